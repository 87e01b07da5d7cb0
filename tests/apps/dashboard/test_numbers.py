"""One outcome, three views: the dashboard's numbers are those of the log and of the metrics."""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from contextlib import closing
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from proxy.apps.dashboard.describe import KINDS
from proxy.apps.dashboard.queries import Reader
from proxy.apps.dashboard.rows import DAY, SUMMED, Recorded, Rows
from proxy.apps.dashboard.savings import savings
from proxy.telemetry.metrics import SUMS
from proxy.telemetry.outcome import Basis, Holdout, Kind, Outcome
from tests.apps.dashboard.speaking import (
    APIS,
    FAIL,
    HANG_UP,
    NO_TOOLS,
    PATHS,
    READ,
    Model,
    ask,
    play,
)
from tests.apps.dashboard.traffic import begin, dashboard, outcome, recorded, session
from tests.clock import wait_until
from tests.fake_upstream import StrictUpstream
from tests.serving import PLAIN, Proxy, served, tight


def metrics(proxy: Proxy) -> Counter[str]:
    """Return each counter's sum over its labels."""
    page = httpx.get(f"{proxy.root}/metrics", verify=PLAIN).text
    sums: Counter[str] = Counter()
    for name, value in re.findall(r"^offload_(\w+)_total(?:\{[^}]*\})? (\S+)$", page, re.MULTILINE):
        sums[name] += float(value)  # type: ignore[assignment]
    return sums


FLAT = {"cached_read": 1.0, "cache_write": 1.0}
"""A cached token costs as much as any other."""
COSTS = ("tokens_before", "tokens_after", "cost_before", "cost_after")
NOT_COMPARED = (
    "tool_uses",
    "left_alone",
    "store_errors",
    "refused",
    "seconds",
    "added_seconds",
    "first_byte_seconds",
)
"""Fields that are no JSON, or that the log rounds."""


def all_kinds(proxy: Proxy, model: Model, api: str) -> None:
    """Have a request of every kind: plain, streamed, rewritten, observed, held out, failed,
    refused, summarised."""
    read = {4: READ}
    play(proxy, model, api, 6, task="Plain.", moves=read)
    play(proxy, model, api, 6, task="Streamed.", moves=read, stream=True)
    play(
        proxy,
        model,
        api,
        6,
        task="Observed.",
        key="watched-key",
        model="m-observed",
        moves={3: FAIL},
    )
    for number in range(3):
        play(proxy, model, api, 4, task=f"Held out or not: {number}.", key="compared-key")
    play(proxy, model, api, 6, task="Summarised.", key="summed-key")
    play(proxy, model, api, 7, task="Tools are refused.", moves={4: NO_TOOLS, 5: FAIL, 6: HANG_UP})
    ask(proxy, api, begin("Left alone."), headers={"x-offload": "off"})
    proxy.post(PATHS[api], b"no json")


def all_recorded(
    proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> tuple[list[Outcome], list[dict[str, Any]]]:
    """Return the outcomes that were logged, and their rows, once that of the last request is
    there."""

    def logged() -> list[Outcome]:
        return [
            record.__dict__["fields"] for record in caplog.records if record.name == "proxy.request"
        ]

    wait_until(lambda: any(outcome.path == "/v1/models" for outcome in logged()))
    wait_until(lambda: dashboard(proxy, "me")["written"] == len(logged()))
    return logged(), recorded(proxy, len(logged()))


def test_the_sums_are_those_of_the_log_and_the_metrics(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "proxy.request")
    with StrictUpstream(expect_refusals=True) as upstream:
        upstream.respond(model := Model())
        summing = {
            "mode": "compress",
            "pin_user_tokens": 60,
            "compress": {"wait": "always", "snapshot_tokens": 100},
        }
        tenants = {"watched": {"mode": "observe"}, "compared": {"holdout": 0.5}, "summed": summing}
        policies = {
            name: tight(
                upstream.url, tenant=name, api_keys=[{"env": name.upper()}], offload=offload
            )
            for name, offload in tenants.items()
        }
        environment = {name.upper(): f"{name}-key" for name in tenants}
        with served(
            {"default": tight(upstream.url), **policies},
            dashboard=tmp_path / "rows.db",
            environment=environment,
        ) as proxy:
            for api in APIS:
                all_kinds(proxy, model, api)
            httpx.get(f"{proxy.url}/models", verify=PLAIN)
            outcomes, rows = all_recorded(proxy, caplog)
            counted, found = metrics(proxy), dashboard(proxy, "savings")
            sessions = dashboard(proxy, "sessions")

    for api in APIS:
        of_api = [row for row in rows if row["dialect"] == api]
        assert {row["kind"] for row in of_api} == {"offloaded", "untouched", "observed", "summary"}
        assert {"", "header", "invalid", "refused"} <= {row["reason"] for row in of_api}
        assert {"", "kept", "planned"} == {row["holdout"] for row in of_api}
        assert {True, False} == {
            row["stream"] for row in of_api if row["new_event"] and row["kind"] == "offloaded"
        }
        for wanted in (
            "rounds",
            "reinserted",
            "compressed",
            "compacted",
            "fault",
            "words",
            "refused",
        ):
            assert any(row[wanted] for row in of_api), (api, wanted)
    by_id = {outcome.request_id: outcome for outcome in outcomes}
    for row in rows:
        told = msgspec.to_builtins(by_id[row["request_id"]])
        assert {name: row[name] for name in told if name not in NOT_COMPARED} == {
            name: value for name, value in told.items() if name not in NOT_COMPARED
        }
        assert bool(row["cause"]) == row["new_event"]
        sent = row["tokens_before" if row["kind"] == "observed" else "tokens_after"]
        assert row["kinds"] is None or sum(row["kinds"]) == sent, (
            "the kinds are those of the whole prompt"
        )
        assert row["words"] or not row["new_event"]

    assert set(SUMS) <= set(SUMMED), "whatever the metrics sum, the dashboard does"
    observed = [row for row in rows if row["kind"] == "observed"]
    sent = [row for row in rows if row["kind"] != "observed"]
    models, course = found["models"], found["course"]

    def total(field: str, of: list[dict[str, Any]]) -> int:
        return sum(row[field] for row in of)

    spent = [row for row in sent if row["kind"] in ("offloaded", "summary")]
    seen = [row for row in observed if row["status"] == 200]
    assert len(seen) < len(observed)
    assert any(row["cost_before"] for row in sent if row["kind"] == "untouched"), (
        "compared with held-out ones"
    )
    for field, (name, _) in SUMS.items():
        costs, planned = (
            field.startswith("cost"),
            field in ("tokens_after", "new_event", "compacted", "compressed"),
        )
        real = total("tokens_before", observed) if field == "tokens_after" else 0
        expected = total(field, spent if costs else sent if planned else rows) + real
        assert counted[name] == expected, field
    for field in ("tokens_before", "tokens_after", "cost_before", "cost_after"):
        assert total(field, course) == total(field, spent if field.startswith("cost") else sent)
        watched = "observed_" + field.removeprefix("tokens_")
        assert total(watched, models) == total(field, seen) == counted[f"observed_{field}"] > 0
    assert total("expected", models) == total("cost_before", spent) > 0
    assert total("actual", models) + total("summaries", models) == total("cost_after", spent) > 0
    assert total("retrieved_tokens", models) == counted["retrieved_tokens"] > 0
    assert (
        total("faults", models)
        == counted["request_errors"]
        == sum(bool(row["fault"]) for row in rows)
    )
    assert counted["requests"] == len(outcomes)
    of_sessions = [row for row in rows if row["session"]]
    assert total("requests", sessions) == len(of_sessions)
    for name, field in (("events", "new_event"), *((name, name) for name in COSTS)):
        assert total(name, sessions) == total(field, of_sessions)


@pytest.mark.parametrize("stream", [False, True])
def test_costs_are_those_that_upstream_billed(tmp_path: Path, stream: bool) -> None:
    with StrictUpstream() as upstream:
        with served(
            {"default": tight(upstream.url, offload=FLAT)}, dashboard=tmp_path / "rows.db"
        ) as proxy:
            session(proxy, upstream, 7, stream=stream)
            rows = recorded(proxy, 7)[::-1]
        billed = [(request.prompt_tokens, request.cached_tokens) for request in upstream.chats]
    rewritten = [row for row in rows if row["kind"] == "offloaded"]
    assert rewritten
    # At these prices a cached token costs as much as any other.
    for row, (prompt, cached) in zip(rows, billed, strict=True):
        if row["kind"] == "offloaded":
            assert (row["prompt_tokens"], row["cached_tokens"], row["cost_after"]) == (
                prompt,
                cached,
                prompt,
            )
            assert row["cost_before"] == pytest.approx(
                row["tokens_before"] * prompt / row["tokens_after"], rel=0.02
            )
        else:
            assert (row["cost_before"], row["cost_after"]) == (0, 0)
    assert rewritten[0]["cost_before"] < rewritten[0]["cost_after"], (
        "the tools' definitions: a loss is shown as one"
    )
    assert rewritten[-1]["cost_before"] > rewritten[-1]["cost_after"]


def test_summaries_of_another_model_count_in_the_planned_group(tmp_path: Path) -> None:
    """In proportion to the costs of the tenant's planned conversations, as far as upstream billed
    them."""
    kept, planned = Holdout.KEPT, Holdout.PLANNED
    requests = [
        ("acme", "large", Kind.OBSERVED, kept, 900, 1),
        ("acme", "large", Kind.OFFLOADED, planned, 9, 300),
        ("acme", "middle", Kind.OFFLOADED, planned, 9, 100),
        ("acme", "small", Kind.SUMMARY, Holdout.NONE, 0, 40),
        ("acme", "large", Kind.SUMMARY, Holdout.NONE, 0, 20),
        ("other", "large", Kind.UNTOUCHED, planned, 0, 0),
    ]
    with (
        closing(Rows(tmp_path / "rows.db", 1 << 20)) as rows,
        closing(Reader(tmp_path / "rows.db")) as reader,
    ):
        for number, (tenant, model, kind, holdout, before, after) in enumerate(requests):
            usage = Basis.BILLED if after else Basis.UNKNOWN
            what = {"model": model, "kind": kind, "holdout": holdout, "status": 200, "usage": usage}
            one = outcome(number, f"{tenant}-1", cost_before=before, cost_after=after, **what)
            rows.write([Recorded(DAY, one, None if kind is Kind.SUMMARY else number)])
        groups = savings(reader, "month", DAY + 9.0, lambda tenant, model: None)["groups"]
    assert [
        (one["tenant"], one["model"], one["holdout"], one["billed"], one["cost"]) for one in groups
    ] == [
        ("acme", "large", "kept", 1, 900),
        ("acme", "large", "planned", 1, 320 + round(40 * 320 / 420)),
        ("acme", "middle", "planned", 1, 100 + round(40 * 100 / 420)),
        ("other", "large", "planned", 0, 0),
    ]


def test_a_held_out_conversation_is_left_as_it_comes_and_compared(tmp_path: Path) -> None:
    with StrictUpstream() as upstream:
        policy = tight(upstream.url, offload={"holdout": 0.5, **FLAT})
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
    assert sum(row["prompt_tokens"] for row in rows) == sum(
        request.prompt_tokens for request in chats
    )
    costs = {group["holdout"]: group["cost"] for group in found["groups"]}
    assert costs == {
        "kept": sum(row["prompt_tokens"] for row in kept),
        "planned": sum(row["prompt_tokens"] for row in planned),
    }
    assert [group["sessions"] for group in found["groups"]] == [len(kept) // 4, len(planned) // 4]


@pytest.mark.parametrize(
    ("costs", "dearer"),
    [((1_000, 999), False), ((1_000, 1_010), False), ((1_000, 1_011), True), ((0, 5_000), False)],
)
def test_a_session_is_dearer_from_one_per_cent_on(
    tmp_path: Path, costs: tuple[int, int], dearer: bool
) -> None:
    before, after = costs
    with (
        closing(Rows(tmp_path / "rows.db", 16 << 20)) as rows,
        closing(Reader(tmp_path / "rows.db")) as reader,
    ):
        rows.write([Recorded(100 * DAY, outcome(1, cost_before=before, cost_after=after), 1)])
        found = savings(reader, "day", 100 * DAY + 60, lambda tenant, model: 2.0)
    [fared] = found["sessions"]
    assert (fared["sessions"], fared["losses"]) == (int(before > 0), int(dearer))
    assert [one["session"] for one in found["worst"]] == [f"{1:016x}"] * dearer
    assert len(found["best"]) == int(0 < after < before)


def test_the_sessions_that_saved_most_money_are_not_those_that_saved_most_tokens(
    tmp_path: Path,
) -> None:
    """Where nothing has a price, tokens decide, and no session is dearer."""
    sessions = {
        "cheap": (9_000, 1_000, 900, 100),
        "precious": (500, 400, 500, 400),
        "free": (99, 9, 10, 99),
    }
    prices = {"cheap": 0.1, "precious": 10.0}
    with (
        closing(Rows(tmp_path / "rows.db", 16 << 20)) as rows,
        closing(Reader(tmp_path / "rows.db")) as reader,
    ):
        for number, (model, figures) in enumerate(sessions.items()):
            names = ("tokens_before", "tokens_after", "cost_before", "cost_after")
            given = dict(zip(names, figures, strict=True))
            rows.write([Recorded(100 * DAY, outcome(number, model=model, **given), number)])
        priced = savings(reader, "day", 100 * DAY + 60, lambda tenant, model: prices.get(model))
        free = savings(reader, "day", 100 * DAY + 60, lambda tenant, model: None)
    assert [one["model"] for one in priced["best"]] == ["precious", "cheap"]
    assert priced["worst"] == []
    assert [one["model"] for one in free["best"]] == ["cheap", "precious", "free"]
    assert free["worst"] == []


@pytest.mark.parametrize(
    ("policy", "model", "price"),
    [
        ({}, "gpt-5.5", 5.0),
        (
            {"upstreams": {"messages": {"base_url": "https://api.anthropic.com/v1"}}},
            "claude-opus-4.5",
            5.0,
        ),
        ({"upstream": {"base_url": "http://127.0.0.1:9/v1"}}, "gpt-5.5", None),
        (
            {"upstream": {"base_url": "http://127.0.0.1:9/v1"}, "offload": {"input_price": 2.0}},
            "gpt-5.5",
            2.0,
        ),
        ({"offload": {"input_price": 0.0}}, "gpt-5.5", None),
        ({}, "unheard-of", None),
    ],
)
def test_money_is_known_where_something_says_the_price(
    tmp_path: Path, policy: dict[str, Any], model: str, price: float | None
) -> None:
    with served({"default": policy}, dashboard=tmp_path / "rows.db") as proxy:
        with closing(Rows(tmp_path / "rows.db", 16 << 20)) as rows:
            rows.write([Recorded(time.time(), outcome(1, "default-1", model=model), 1)])
        [found] = dashboard(proxy, "sessions")
        assert found["price"] == dashboard(proxy, "requests/1")["price"] == price


@pytest.mark.parametrize(
    ("ages", "period"),
    [
        ((), "hour"),
        ((60.0,), "hour"),
        ((60.0, 0.5 * DAY), "day"),
        ((60.0, 6.0 * DAY), "week"),
        ((20.0 * DAY,), "month"),
    ],
)
def test_the_first_period_is_the_shortest_that_holds_all(
    ages: tuple[float, ...], period: str, tmp_path: Path
) -> None:
    now = 100.5 * DAY
    with (
        closing(Rows(tmp_path / "rows.db", 16 << 20)) as rows,
        closing(Reader(tmp_path / "rows.db")) as reader,
    ):
        rows.write(
            [Recorded(now - age, outcome(number), number) for number, age in enumerate(ages)]
        )
        found = savings(reader, "", now, lambda tenant, model: None)
        assert found["period"] == period
        assert savings(reader, "week", now, lambda tenant, model: None)["period"] == "week"


def test_each_colour_has_one_meaning() -> None:
    """By day and by night, no two kinds of tokens, nor better and worse, sent and what came, have
    the same colour."""
    style = (files("proxy.apps.dashboard") / "static" / "dashboard.css").read_text()
    for variables in re.findall(r":root \{([^}]*--text:[^}]*)\}", style):
        colours = dict(re.findall(r"--([\w-]+): (#\w+)", variables))
        meanings = [
            colours[name] for name in (*set(KINDS), "good", "bad", "sent", "came", "link", "text")
        ]
        assert len(meanings) == len(KINDS) + 6 == len(set(meanings))
