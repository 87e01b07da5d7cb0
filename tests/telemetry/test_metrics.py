from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from proxy.errors import Fault
from proxy.plan.history import Irregular
from proxy.telemetry import metrics as module
from proxy.telemetry.metrics import STATUSES, Metrics, prepare_multiprocess
from proxy.telemetry.outcome import Kind, NoAnswer, Outcome, StoreOperation, ToolUse

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]

OUTCOME = Outcome(
    request_id="r",
    tenant="acme",
    namespace="acme-1",
    kind=Kind.OFFLOADED,
    method="POST",
    path="/v1/chat/completions",
    model="gpt",
    status=200,
    left_alone={Irregular.NO_RESULT: 1, Irregular.NO_CALL: 2},
    tokens_before=900,
    tokens_after=120,
    compacted=3,
    unfollowed=True,
    compressed=4,
    events=2,
    new_event=True,
    reinserted=5,
    rounds=6,
    tool_uses=(
        ToolUse("grep", "ok", 70),
        ToolUse("grep", "empty", 8),
        ToolUse("grep", "refused", 600, 40),
        ToolUse("read_file", "budget", 9),
    ),
    prompt_tokens=1000,
    completion_tokens=11,
    cached_tokens=800,
    written_tokens=150,
    summary_prompt_tokens=13,
    summary_completion_tokens=14,
    seconds=2.0,
    added_seconds=0.004,
    first_byte_seconds=0.3,
)


def samples(metrics: Metrics) -> Samples:
    kind, body = metrics.render()
    assert kind.startswith("text/plain; version=0.0.4")
    return parsed(body.decode())


def parsed(text: str) -> Samples:
    families = text_string_to_metric_families(text)
    return {
        (each.name, frozenset(each.labels.items())): each.value
        for one in families
        for each in one.samples
    }


def value(found: Samples, name: str, **labels: str) -> float | None:
    return found.get((f"offload_{name}", frozenset(labels.items())))


def replaced(**fields: object) -> Outcome:
    return msgspec.structs.replace(OUTCOME, **fields)


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


def test_outcome_is_counted_by_its_labels(metrics: Metrics) -> None:
    metrics.record([OUTCOME])
    metrics.record([OUTCOME])
    found = samples(metrics)
    assert (
        value(found, "requests_total", tenant="acme", status="200", kind="offloaded", dialect="")
        == 2
    )
    by_tenant = {
        "context_tokens_before_total": 1800,
        "context_tokens_after_total": 240,
        "messages_compacted_total": 6,
        "unfollowed_requests_total": 2,
        "messages_compressed_total": 8,
        "events_total": 2,
        "reinserted_rounds_total": 10,
        "internal_rounds_total": 12,
        "upstream_prompt_tokens_total": 2000,
        "upstream_cached_tokens_total": 1600,
        "upstream_cache_write_tokens_total": 300,
        "upstream_completion_tokens_total": 22,
        "summary_prompt_tokens_total": 26,
        "summary_completion_tokens_total": 28,
    }
    assert {name: value(found, name, tenant="acme") for name in by_tenant} == by_tenant
    assert value(found, "messages_left_alone_total", tenant="acme", reason="no_result") == 2
    assert value(found, "messages_left_alone_total", tenant="acme", reason="no_call") == 4
    assert value(found, "tool_calls_total", tenant="acme", tool="grep", result="ok") == 2
    assert value(found, "tool_calls_total", tenant="acme", tool="grep", result="empty") == 2
    assert value(found, "tool_calls_total", tenant="acme", tool="grep", result="refused") == 80
    assert value(found, "tool_calls_total", tenant="acme", tool="read_file", result="budget") == 2
    assert value(found, "retrieved_tokens_total", tenant="acme", tool="grep") == 1_356
    assert value(found, "request_seconds_sum", kind="offloaded") == 4
    assert value(found, "added_seconds_bucket", kind="offloaded", le="0.0025") == 0
    assert value(found, "added_seconds_bucket", kind="offloaded", le="0.005") == 2
    assert value(found, "first_byte_seconds_count", kind="offloaded") == 2


def test_request_errors_are_counted_by_fault(metrics: Metrics) -> None:
    metrics.record([replaced(fault=Fault.TIMEOUT, status=504)])
    metrics.record([replaced(fault=Fault.CLIENT_GONE, status=0, first_byte_seconds=None)])
    found = samples(metrics)
    assert value(found, "request_errors_total", tenant="acme", fault="timeout") == 1
    assert (
        value(found, "requests_total", tenant="acme", status="504", kind="offloaded", dialect="")
        == 1
    )
    assert (
        value(found, "requests_total", tenant="acme", status="none", kind="offloaded", dialect="")
        == 1
    )
    assert value(found, "first_byte_seconds_count", kind="offloaded") == 1


def test_labels_that_clients_choose_are_bounded(
    metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TENANTS", 50)
    metrics.record(
        replaced(
            tenant=f"tenant-{number}",
            status=number,
            method=f"M{number}",
            path=f"/{number}",
            model=f"{number}",
        )
        for number in range(600)
    )
    found = samples(metrics)
    labels: dict[str, set[str]] = {}
    for _, pairs in found:
        for name, label in pairs:
            labels.setdefault(name, set()).add(label)
    assert labels["status"] == {str(status) for status in STATUSES} | {"none", "other"}
    assert len(labels["tenant"]) == 51


def test_impossible_token_counts_of_upstream_break_no_counter(metrics: Metrics) -> None:
    metrics.record([replaced(prompt_tokens=-5, completion_tokens=10**400, cached_tokens=1)])
    found = samples(metrics)
    assert value(found, "upstream_prompt_tokens_total", tenant="acme") == 0
    assert value(found, "upstream_completion_tokens_total", tenant="acme") == 1e12
    assert value(found, "upstream_cached_tokens_total", tenant="acme") == 1


def test_metric_names_follow_prometheus_conventions(metrics: Metrics) -> None:
    metrics.record([OUTCOME])
    metrics.watch_cache("store", lambda: (1, 2))
    metrics.watch_store(lambda: "closed")
    text = metrics.render()[1].decode()
    assert "_created" not in text
    for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE):
        assert re.fullmatch(r"offload_[a-z_]+", name)
        assert (kind == "counter") == name.endswith("_total")
        assert kind != "histogram" or name.endswith("_seconds")
        assert re.search(rf"^# HELP {name} \S", text, re.MULTILINE)


def test_requests_in_flight_are_counted_until_they_end(metrics: Metrics) -> None:
    with metrics.in_flight(), metrics.in_flight():
        assert value(samples(metrics), "requests_in_flight") == 2
    assert value(samples(metrics), "requests_in_flight") == 0


def test_watched_caches_and_store_show_their_current_state(metrics: Metrics) -> None:
    size, state = (3, 500), "closed"
    metrics.watch_cache("store", lambda: size)
    metrics.watch_cache("messages", lambda: (1, 1))
    metrics.watch_store(lambda: state)
    assert value(samples(metrics), "cache_bytes", cache="store") == 500
    assert value(samples(metrics), "store_breakers", state="closed") == 1
    size, state = (4, 600), "open"
    found = samples(metrics)
    assert value(found, "cache_entries", cache="store") == 4
    assert value(found, "cache_entries", cache="messages") == 1
    assert value(found, "store_up") == 0
    assert [value(found, "store_breakers", state=one) for one in ("closed", "open")] == [0, 1]


WORKER = """
import sys
from proxy.telemetry.metrics import Metrics
from tests.telemetry.test_metrics import OUTCOME
metrics = Metrics()
metrics.watch_cache("store", lambda: (1, 100))
metrics.watch_store(lambda: "closed" if sys.argv[1] == "up" else "open")
with metrics.in_flight():
    metrics.record([OUTCOME])
    for line in sys.stdin:
        kind, body = metrics.render()
        print(body.decode().replace("\\n", "\\x00"), flush=True)
"""


class Worker:
    def __init__(self, state: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER, state],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )

    def render(self) -> Samples:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("render\n")
        self.process.stdin.flush()
        return parsed(self.process.stdout.readline().replace("\x00", "\n"))

    def end(self, how: signal.Signals) -> None:
        self.process.send_signal(how)
        self.process.communicate()


def test_a_file_that_a_worker_has_just_created_is_no_fault() -> None:
    with prepare_multiprocess() as folder:
        one = Worker("up")
        (folder / "counter_1.db").touch()
        assert value(one.render(), "store_up") == 1
        one.end(signal.SIGTERM)


def test_every_worker_shows_the_sum_over_all_workers() -> None:
    with prepare_multiprocess() as folder:
        one, other = Worker("up"), Worker("down")
        one.render(), other.render()
        found = one.render()
        assert found == other.render()
        assert (
            value(
                found, "requests_total", tenant="acme", status="200", kind="offloaded", dialect=""
            )
            == 2
        )
        assert value(found, "added_seconds_count", kind="offloaded") == 2
        assert value(found, "requests_in_flight") == 2
        assert value(found, "cache_bytes", cache="store") == 200
        assert value(found, "store_up") == 0

        other.end(signal.SIGKILL)
        found = one.render()
        assert value(found, "requests_in_flight") == 1, "a dead worker serves nothing"
        assert value(found, "cache_bytes", cache="store") == 100
        assert value(found, "store_up") == 1
        assert (
            value(
                found, "requests_total", tenant="acme", status="200", kind="offloaded", dialect=""
            )
            == 2
        ), "but it did count"

        third = Worker("up")
        third.render()
        assert (
            value(
                one.render(),
                "requests_total",
                tenant="acme",
                status="200",
                kind="offloaded",
                dialect="",
            )
            == 3
        )
        third.end(signal.SIGTERM)
        one.end(signal.SIGTERM)
        assert folder.is_dir()
        assert folder.stat().st_mode & 0o077 == 0
    assert not folder.exists()


def test_store_operations_without_an_answer_are_counted_by_why(metrics: Metrics) -> None:
    for why in (NoAnswer.OPEN, NoAnswer.OPEN, NoAnswer.TIMEOUT):
        metrics.unanswered(StoreOperation.PUT, why)
    found = samples(metrics)
    assert value(found, "store_errors_total", operation="put", fault="open") == 2
    assert value(found, "store_errors_total", operation="put", fault="timeout") == 1
