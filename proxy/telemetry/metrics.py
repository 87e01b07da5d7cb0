"""Counts outcomes in Prometheus metrics. No other module imports prometheus-client.

Labels are bounded: tenants come from the policies, everything else from enums and small sets. Where
more than `TENANTS` come nevertheless, those are counted as `other`. No path, method, model or
caller is ever a label.

With several workers, prometheus-client keeps the values of every process in the files of a folder.
It reads the folder's name from the variable PROMETHEUS_MULTIPROC_DIR when it is imported.
`prepare_multiprocess` sets the variable for the workers to inherit; then `render` in any of them
shows the sum over all.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from http import HTTPStatus
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Metric,
    disable_created_metrics,
    values,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.registry import Collector

from proxy import __version__
from proxy.telemetry.outcome import Kind, NoAnswer, Outcome, StoreOperation

disable_created_metrics()  # type: ignore[no-untyped-call]  # Prometheus does not use them

VARIABLE = "PROMETHEUS_MULTIPROC_DIR"

TENANTS = 1000
"""The most tenants with their own series, so that no mistake elsewhere can fill the memory."""

SAMPLE_SECONDS = 1.0
"""The least number of seconds between samples of the watched values, for which requests pay."""

MOST = 10**12
"""The most tokens that one request adds to a counter. Upstream may report any number, and none may
break a counter."""

OK = HTTPStatus.OK.value
NONE = "none"
OTHER = "other"
BREAKER_STATES = ("closed", "open")
STATUSES = frozenset(status.value for status in HTTPStatus)

ADDED = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Seconds, from those of an untouched request (under a millisecond) to those of one that waits for
a summary."""

WAITED = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Seconds that a model takes to its first byte, and to the end of its reply."""

COUNTERS: Mapping[str, tuple[str, ...]] = {
    "requests": ("Requests.", "tenant", "status", "kind", "dialect"),
    "request_errors": ("Requests that went wrong.", "tenant", "fault"),
    "unplanned_requests": (
        "Chat requests that went upstream without a plan.", "tenant", "reason", "obstacle", "dialect",
    ),
    "messages_left_alone": (
        "Messages that stay as they came, at every request anew.", "tenant", "reason",
    ),
    "refused_additions": ("Additions that upstream refused; the request succeeded without.", "tenant", "addition"),
    "tool_calls": ("Calls of our tools.", "tenant", "tool", "result"),
    "retrieved_tokens": ("Tokens of our tools' answers.", "tenant", "tool"),
    "store_errors": ("Store operations without an answer.", "operation", "fault"),
    "store_damaged_records": ("Damaged records found, taken as absent.", "kind"),
    "store_expired_records": ("Records deleted after their retention.",),
    "learned_windows": ("Changes of what is known about a model's context window, by what taught it.", "lesson"),
    "policy_reloads": ("Reloads of the policies.", "result"),
    "cache_misses": ("Requests of which upstream's cache lacked what was not new, by cause.", "tenant", "cause"),
    "cache_missed_tokens": ("Tokens that it lacked.", "tenant", "cause"),
    "observed_requests": ("Observed requests that succeeded.", "tenant", "usage"),
}  # fmt: skip
"""Each counter's help text and labels."""

GAUGES: Mapping[str, tuple[str, ...]] = {
    "store_overdue_seconds": (
        "livemax", "How long the oldest expired record that a sweep found is past its time.",
    ),
    "policies_current": ("livemin", "1 while the policies in force are those in the directory."),
    "requests_in_flight": ("livesum", "Requests under way."),
    "cache_entries": ("livesum", "Entries of in-process caches.", "cache"),
    "cache_bytes": ("livesum", "Bytes of in-process caches.", "cache"),
    "store_up": ("livemin", "1 while the store answers."),
    "store_breakers": ("livesum", "Processes by the state of their breaker.", "state"),
    "build_info": ("livemax", "The version that runs.", "version"),
}  # fmt: skip
"""How each gauge's values of several workers are combined, its help text and labels. Only live
workers count: a dead one has no requests and no caches."""

SUMS: Mapping[str, tuple[str, str]] = {
    "tokens_before": ("context_tokens_before", "Tokens of whole prompts as the clients sent them."),
    "tokens_after": (
        "context_tokens_after",
        "Tokens of whole prompts as they went upstream in the first round.",
    ),
    "cost_before": (
        "input_cost_before",
        "Cost of rewritten requests' input as it came, in plain input tokens.",
    ),
    "cost_after": (
        "input_cost_after",
        "Cost of their input as it was sent, and of summaries, in plain input tokens.",
    ),
    "compacted": (
        "messages_compacted",
        "Messages that were sent with their text moved, at every request anew.",
    ),
    "unfollowed": (
        "unfollowed_requests",
        "Requests sent with texts moved that `tool_choice` forbids to read back.",
    ),
    "compressed": (
        "messages_compressed",
        "Messages that were sent as part of a snapshot, at every request anew.",
    ),
    "new_event": ("events", "Offload events: requests at which the sent prefix changed."),
    "reinserted": ("reinserted_rounds", "Hidden rounds put back from earlier turns."),
    "rounds": ("internal_rounds", "Rounds in which the proxy answered its own tools."),
    "prompt_tokens": ("upstream_prompt_tokens", "Input tokens as upstream counted them."),
    "cached_tokens": (
        "upstream_cached_tokens",
        "Those of the input tokens that upstream had in its cache.",
    ),
    "written_tokens": (
        "upstream_cache_write_tokens",
        "Those of the input tokens that upstream wrote to its cache.",
    ),
    "completion_tokens": ("upstream_completion_tokens", "Output tokens as upstream counted them."),
    "summary_prompt_tokens": ("summary_prompt_tokens", "Input tokens of summaries."),
    "summary_completion_tokens": ("summary_completion_tokens", "Output tokens of summaries."),
    "verify_cost": (
        "verified_cost",
        "What it cost to ask requests again, as their budget counts that, in plain input tokens.",
    ),
    "again_tools": (
        "verified_again_tools",
        "Requests that called the same tools when they were asked twice.",
    ),
    "again_exact": ("verified_again_exact", "Those that called them with the same arguments."),
    "whole_tools": (
        "verified_whole_tools",
        "Requests that called the same tools with their whole history.",
    ),
    "whole_exact": ("verified_whole_exact", "Those that called them with the same arguments."),
}
"""Field of `Outcome` → the metric that sums it for each tenant, and its help text."""

TIMES: Mapping[str, tuple[str, Sequence[float]]] = {
    "added_seconds": ("Our own work before the first round was sent.", ADDED),
    "first_byte_seconds": ("From request to the reply's first byte.", WAITED),
    "request_seconds": ("From request to the reply's last byte.", WAITED),
}
"""Each histogram's help text and bounds. They are kept apart by the requests' kind."""

OBSERVED: Mapping[str, tuple[str, str]] = {
    "tokens_before": (
        "observed_tokens_before",
        "Tokens of observed prompts as the clients sent them.",
    ),
    "tokens_after": (
        "observed_tokens_after",
        "Tokens of observed prompts as the plan would have sent them.",
    ),
    "cost_before": (
        "observed_cost_before",
        "Cost of observed requests' input as it came, in plain input tokens.",
    ),
    "cost_after": (
        "observed_cost_after",
        "Cost of observed requests' input as the plan would have sent it.",
    ),
}
"""The same for requests that are only observed, by what their costs rest on."""


class Metrics:
    """The metrics of one process, in their own registry."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._registry = CollectorRegistry()
        self._clock = clock
        self._watched: list[Callable[[], None]] = []
        self._next_sample = float("-inf")
        self._known: dict[str, set[str]] = defaultdict(set)
        made = self._made
        self._series = {
            **{name: made(Counter, name, *about) for name, about in COUNTERS.items()},
            **{name: made(Counter, name, text, "tenant") for name, text in SUMS.values()},
            **{
                name: made(Counter, name, text, "tenant", "usage")
                for name, text in OBSERVED.values()
            },
            **{
                name: made(Gauge, name, *about, multiprocess_mode=mode)
                for name, (mode, *about) in GAUGES.items()
            },
            **{
                name: made(Histogram, name, text, "kind", buckets=ends)
                for name, (text, ends) in TIMES.items()
            },
        }
        """Each metric's series, by its labels."""
        self._in_flight: AbstractContextManager[object] = self._series[
            "requests_in_flight"
        ]().track_inprogress()
        self._series["policies_current"]().set(1)
        self._series["build_info"](__version__).set(1)

    def _made(
        self, kind: type[Any], name: str, text: str, *labels: str, **options: Any
    ) -> Callable[..., Any]:
        # Cached, because finding a series by prometheus-client's own `labels` costs more than
        # counting in it.
        metric = kind(f"offload_{name}", text, labels, registry=self._registry, **options)
        return cache(metric.labels) if labels else lambda: metric

    def _first_of(self, kind: str, label: str) -> str:
        """Return the label, or `other` if there were too many of its kind before it: clients choose
        their names."""
        known = self._known[kind]
        if label not in known:
            if len(known) >= TENANTS:
                return OTHER
            known.add(label)
            for name, _ in SUMS.values() if kind == "tenant" else ():
                self._series[name](label or NONE)  # begins at 0
        return label

    def record(self, outcomes: Iterable[Outcome]) -> None:
        """Count requests. Their amounts are added up first, because increasing a series takes its
        lock."""
        growth: dict[Any, float] = defaultdict(int)

        def add(name: str, amount: int, *labels: str) -> None:
            growth[self._series[name](*labels)] += min(amount, MOST)

        for outcome in outcomes:
            tenant = self._first_of("tenant", outcome.tenant) or NONE
            self._count(outcome, tenant, add)
            self._sum(outcome, tenant, add)
            self._series["added_seconds"](outcome.kind).observe(outcome.added_seconds)
            self._series["request_seconds"](outcome.kind).observe(outcome.seconds)
            if outcome.first_byte_seconds is not None:
                self._series["first_byte_seconds"](outcome.kind).observe(outcome.first_byte_seconds)
        for series, amount in growth.items():
            series.inc(amount)
        if self._clock() >= self._next_sample:
            self.sample()

    def _count(self, outcome: Outcome, tenant: str, add: Callable[..., None]) -> None:
        dialect = outcome.dialect
        status = (
            str(outcome.status) if outcome.status in STATUSES else OTHER if outcome.status else NONE
        )
        add("requests", 1, tenant, status, outcome.kind, dialect)
        if outcome.fault:
            add("request_errors", 1, tenant, outcome.fault)
        if outcome.reason:
            obstacle = self._first_of("obstacle", outcome.obstacle)
            add("unplanned_requests", 1, tenant, outcome.reason, obstacle, dialect)
        if outcome.miss:
            add("cache_misses", 1, tenant, outcome.miss)
            add("cache_missed_tokens", outcome.missed_tokens, tenant, outcome.miss)
        for irregular, times in outcome.left_alone.items():
            add("messages_left_alone", times, tenant, irregular)
        for addition in outcome.refused:
            add("refused_additions", 1, tenant, addition)
        for use in outcome.tool_uses:
            add("tool_calls", use.calls, tenant, use.tool, use.result)
            add("retrieved_tokens", use.tokens, tenant, use.tool)

    def _sum(self, outcome: Outcome, tenant: str, add: Callable[..., None]) -> None:
        sums = {field: getattr(outcome, field) for field in SUMS}
        # it has costs only to be compared with those of a holdout
        if outcome.kind is Kind.UNTOUCHED:
            sums |= {"cost_before": 0, "cost_after": 0}
        if outcome.kind is Kind.OBSERVED:  # what its plan only would have done is counted apart
            sums |= dict.fromkeys(
                ("cost_before", "cost_after", "compacted", "compressed", "new_event"), 0
            )
            sums["tokens_after"] = outcome.tokens_before
            if outcome.status == OK:
                add("observed_requests", 1, tenant, outcome.usage)
                for field, (name, _) in OBSERVED.items():
                    add(name, getattr(outcome, field), tenant, outcome.usage)
        for field, amount in sums.items():
            if amount > 0:  # upstream may report any number
                add(SUMS[field][0], amount, tenant)

    def damaged(self, kind: str) -> None:
        """Count a damaged record. Thread-safe."""
        self._series["store_damaged_records"](self._first_of("kind", kind)).inc()

    def unanswered(self, operation: StoreOperation, why: NoAnswer) -> None:
        """Count a store operation without an answer."""
        self._series["store_errors"](operation, why).inc()

    def swept(self, deleted: int, overdue: float) -> None:
        """Count records that a sweep deleted, and show by how many seconds it is late."""
        self._series["store_expired_records"]().inc(deleted)
        self._series["store_overdue_seconds"]().set(overdue)

    def learned(self, lesson: str) -> None:
        """Count a change of what is known about a window. Few: `lesson` is one of an enum's
        values."""
        self._series["learned_windows"](lesson).inc()

    def reloaded(self, taken: bool) -> None:
        """Count a reload of the policies. Thread-safe."""
        self._series["policy_reloads"]("ok" if taken else "failed").inc()
        self._series["policies_current"]().set(taken)

    def in_flight(self) -> AbstractContextManager[object]:
        """Return a context manager that counts a request as under way; leave it when the reply has
        ended."""
        return self._in_flight

    def watch_cache(self, name: str, size: Callable[[], tuple[int, int]]) -> None:
        """Show a cache's entries and bytes, which `size` returns."""

        def sample() -> None:
            entries, weight = size()
            self._series["cache_entries"](name).set(entries)
            self._series["cache_bytes"](name).set(weight)

        self._watched.append(sample)

    def watch_store(self, state: Callable[[], str]) -> None:
        """Show whether the store answers (the worst value of several workers), and the breakers in
        each state."""

        def sample() -> None:
            now = state()
            self._series["store_up"]().set(now == BREAKER_STATES[0])
            for each in BREAKER_STATES:
                self._series["store_breakers"](each).set(now == each)

        self._watched.append(sample)

    def sample(self) -> None:
        """Take the watched values."""
        self._next_sample = self._clock() + SAMPLE_SECONDS
        for sample in self._watched:
            sample()

    def render(self) -> tuple[str, bytes]:
        """Return the content type and body of `/metrics`, of all workers. With several this reads
        files, so call it in a thread."""
        self.sample()
        if values.ValueClass is values.MutexValue:  # this process is the only one
            return CONTENT_TYPE_PLAIN_0_0_4, generate_latest(self._registry)
        folder = os.environ[VARIABLE]
        for pid in {
            int(path.stem.rpartition("_")[2]) for path in Path(folder).glob("gauge_live*.db")
        }:
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                mark_process_dead(pid, folder)  # type: ignore[no-untyped-call]
            except PermissionError:
                pass  # it lives
        return CONTENT_TYPE_PLAIN_0_0_4, generate_latest(_Workers(Path(folder)))


class _Workers(Collector):
    """The values of all workers, of which each has files in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def collect(self) -> Iterable[Metric]:
        begun = [str(path) for path in self._folder.glob("*.db") if _is_begun(path)]
        return MultiProcessCollector.merge(begun)  # type: ignore[no-any-return, no-untyped-call]


def _is_begun(path: Path) -> bool:
    """Whether a file has room for values. A worker creates it empty, and `merge` raises
    struct.error."""
    try:
        return path.stat().st_size > 0
    except FileNotFoundError:  # another worker has removed it, with a worker that is dead
        return False


@contextmanager
def prepare_multiprocess() -> Iterator[Path]:
    """Create a folder for the values of several workers, and remove it at the end.

    Enter this before spawning the workers. They must not be forked, because they have to import
    prometheus-client anew.
    """
    with TemporaryDirectory(prefix="offload-metrics-") as folder:
        os.environ[VARIABLE] = folder
        try:
            yield Path(folder)
        finally:
            del os.environ[VARIABLE]
