"""One outcome, three views: the dashboard's numbers are those of the log and of the metrics."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from proxy.dashboard.rows import SUMMED
from proxy.telemetry.metrics import SUMS
from proxy.telemetry.outcome import Outcome
from tests.dashboard.traffic import begin, dashboard, recorded, session, turn
from tests.fake_upstream import StrictUpstream, error
from tests.serving import PLAIN, Proxy, served, tight


@contextmanager
def logged() -> Iterator[list[Outcome]]:
    """Collect the outcomes that are logged."""
    found: list[Outcome] = []

    class Collects(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.__dict__["fields"])

    logger, handler = logging.getLogger("proxy.request"), Collects()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def metrics(proxy: Proxy) -> Counter[str]:
    """Return each counter's sum over its labels."""
    page = httpx.get(f"{proxy.root}/metrics", verify=PLAIN).text
    sums: Counter[str] = Counter()
    for name, value in re.findall(r"^offload_(\w+)_total(?:\{[^}]*\})? (\S+)$", page, re.MULTILINE):
        sums[name] += float(value)  # type: ignore[assignment]
    return sums


def test_the_sums_are_those_of_the_log_and_the_metrics(tmp_path: Path) -> None:
    with StrictUpstream(expect_refusals=True) as upstream, logged() as outcomes:
        policies = {
            "default": tight(upstream.url),
            "watched": tight(
                upstream.url, tenant="watched", api_keys=[{"env": "WATCHED"}], offload={"mode": "observe"}
            ),
        }
        environment = {"WATCHED": "watched-key"}
        with served(policies, dashboard=tmp_path / "rows.db", environment=environment) as proxy:
            session(proxy, upstream, read=True)
            session(proxy, upstream, 6, key="watched-key", model="gpt-4.1")
            session(proxy, upstream, 3, stream=True, task="Another one.")
            upstream.script(error(500))
            turn(proxy, begin("fails"), 1)
            httpx.post(f"{proxy.url}/chat/completions", content=b"no json", verify=PLAIN)
            httpx.get(f"{proxy.url}/models", verify=PLAIN)
            rows = recorded(proxy, 20)
            assert len(rows) == len(outcomes) == 20
            counted, found = metrics(proxy), dashboard(proxy, "savings")

    by_id = {outcome.request_id: outcome for outcome in outcomes}
    for row in rows:
        outcome = by_id[row["request_id"]]
        told = {name: getattr(outcome, name) for name in Outcome.__struct_fields__}
        assert {name: row[name] for name in told if name not in ("tool_uses", "left_alone", "seconds")} == {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in told.items()
            if name not in ("tool_uses", "left_alone", "seconds")
        } | {"added_seconds": row["added_seconds"], "first_byte_seconds": row["first_byte_seconds"]}
    assert any(row["new_event"] for row in rows), "the sessions had events"
    assert any(row["rounds"] for row in rows), "and hidden rounds"

    sent = [outcome for outcome in outcomes if outcome.kind != "observed"]
    models, hours = found["models"], found["hours"]
    for field in ("tokens_before", "tokens_after", "cost_before", "cost_after"):
        of_log = sum(getattr(outcome, field) for outcome in sent)
        watched = sum(outcome.tokens_before for outcome in outcomes if outcome.kind == "observed")
        assert sum(hour[field] for hour in hours) == of_log
        assert counted[SUMS[field][0]] == of_log + (watched if field.startswith("tokens") else 0), field
    assert sum(row["expected"] for row in models) == sum(outcome.cost_before for outcome in sent) > 0
    assert sum(row["actual"] + row["summaries"] for row in models) == sum(outcome.cost_after for outcome in sent) > 0
    for field in ("cost_before", "cost_after"):
        assert sum(row[f"observed_{field}"] for row in models) == counted[f"observed_{field}"] > 0
    assert sum(row["retrieved_tokens"] for row in models) == counted["retrieved_tokens"] > 0
    assert counted["requests"] == len(outcomes)
    assert set(SUMS) - set(SUMMED) <= set(), "whatever the metrics sum, the dashboard does"


@pytest.mark.parametrize("stream", [False, True])
def test_costs_are_those_that_upstream_billed(tmp_path: Path, stream: bool) -> None:
    with StrictUpstream() as upstream:
        with served({"default": tight(upstream.url)}, dashboard=tmp_path / "rows.db") as proxy:
            session(proxy, upstream, 7, stream=stream)
            rows = recorded(proxy, 7)[::-1]
        billed = [(request.prompt_tokens, request.cached_tokens) for request in upstream.chats]
    rewritten = [row for row in rows if row["kind"] == "offloaded"]
    assert rewritten
    # At these prices a cached token costs as much as any other.
    for row, (prompt, cached) in zip(rows, billed, strict=True):
        if row["kind"] == "offloaded":
            assert (row["prompt_tokens"], row["cached_tokens"], row["cost_after"]) == (prompt, cached, prompt)
            assert row["cost_before"] == pytest.approx(row["came"] * prompt / sum(row["kinds"]), rel=0.02)
        else:
            assert (row["cost_before"], row["cost_after"]) == (0, 0)
    assert rewritten[0]["cost_before"] < rewritten[0]["cost_after"], "the tools' definitions: a loss is shown as one"
    assert rewritten[-1]["cost_before"] > rewritten[-1]["cost_after"]


def test_a_held_out_conversation_is_left_as_it_comes_and_compared(tmp_path: Path) -> None:
    with StrictUpstream() as upstream:
        policy = tight(upstream.url, offload={"holdout": 0.5})
        with served({"default": policy}, dashboard=tmp_path / "rows.db") as proxy:
            for number in range(6):
                session(proxy, upstream, 4, task=f"Task {number}.")
            rows = recorded(proxy, 24)
            found = dashboard(proxy, "savings")
        chats = upstream.chats
    groups = {row["session"]: {row["holdout"]} for row in rows}
    for row in rows:
        groups[row["session"]].add(row["holdout"])
    assert len(groups) == 6
    assert all(len(group) == 1 for group in groups.values()), "a conversation stays in its group"
    kept = [row for row in rows if row["holdout"] == "kept"]
    planned = [row for row in rows if row["holdout"] == "planned"]
    assert kept and planned
    assert {row["kind"] for row in kept} == {"observed"}
    assert {row["kind"] for row in planned} == {"untouched", "offloaded"}
    # Both groups have real usage, and what the page compares is its sum.
    assert sum(row["prompt_tokens"] for row in rows) == sum(request.prompt_tokens for request in chats)
    costs = {group["holdout"]: group["cost"] for group in found["groups"]}
    assert costs == {
        "kept": sum(row["prompt_tokens"] for row in kept),
        "planned": sum(row["prompt_tokens"] for row in planned),
    }
    assert [group["sessions"] for group in found["groups"]] == [len(kept) // 4, len(planned) // 4]
