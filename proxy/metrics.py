"""Outcomes as Prometheus metrics. The only home of prometheus-client.

Labels are bounded: tenants come from the policies, everything else from small sets in this module; what is in none of
them is counted as `other`. No path, method, model or caller is ever a label.

With several workers, prometheus-client keeps every process' values in files of a folder that it finds by the variable
PROMETHEUS_MULTIPROC_DIR, read when it is imported. `prepare_multiprocess` sets it for the workers to inherit; then
`render` of any of them shows the sum over all.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from http import HTTPStatus
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, values
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.registry import Collector

from proxy.outcome import Outcome, ToolUse

VARIABLE = "PROMETHEUS_MULTIPROC_DIR"

TENANTS = 1000
"""Told apart at most, so that no mistake elsewhere can fill the memory with series."""

SAMPLE_SECONDS = 1.0
"""How often watched values are taken at most; where there are several workers, the others show what they last took."""

KINDS = frozenset({"relay", "untouched", "offloaded", "operation", "refused"})
FAULTS = frozenset({"client", "client_gone", "proxy", "connect", "timeout", "broken", "protocol", "overloaded"})
TOOLS = frozenset({"grep", "read_file"})
RESULTS = frozenset({"ok", "empty", "refused", "budget"})
OPERATIONS = frozenset({"get", "put", "list", "delete", "sweep"})
STORE_FAULTS = frozenset({"failed", "timeout", "budget", "open"})
STATUSES = frozenset(str(status.value) for status in HTTPStatus)

ADDED = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Seconds: from an untouched request, under a millisecond, to a summary that is waited for."""

WAITED = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Seconds: what a model takes for its first byte, and for the whole reply."""

_SUMS: Mapping[str, tuple[str, str]] = {
    "tokens_before": ("context_tokens_before", "Tokens of histories as the clients sent them."),
    "tokens_after": ("context_tokens_after", "Tokens of histories as they went upstream in the first round."),
    "compacted": ("messages_compacted", "Messages that were sent with their text moved, at every request anew."),
    "compressed": ("messages_compressed", "Messages that were sent as part of a snapshot, at every request anew."),
    "new_event": ("events", "Offload events: requests at which the sent prefix changed."),
    "reinserted": ("reinserted_rounds", "Hidden rounds put back from earlier turns."),
    "rounds": ("internal_rounds", "Rounds in which the proxy answered its own tools."),
    "prompt_tokens": ("upstream_prompt_tokens", "Input tokens as upstream counted them."),
    "cached_tokens": ("upstream_cached_tokens", "Those of the input tokens that upstream had in its cache."),
    "completion_tokens": ("upstream_completion_tokens", "Output tokens as upstream counted them."),
    "summary_prompt_tokens": ("summary_prompt_tokens", "Input tokens of summaries."),
    "summary_completion_tokens": ("summary_completion_tokens", "Output tokens of summaries."),
}
"""Field of `Outcome` → metric that sums it for each tenant, and its help text."""


class _Child(Protocol):
    def inc(self, amount: float = 1) -> None: ...


class Metrics:
    """The metrics of one process, in a registry of its own."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._registry = CollectorRegistry()
        self._clock = clock
        self._watched: list[Callable[[], None]] = []
        self._sampled = float("-inf")
        self._tenants: dict[str, _Tenant] = {}
        self._sums = {field: self._counter(*named, ("tenant",)) for field, named in _SUMS.items()}
        self._requests = self._counter("requests", "Requests answered.", ("tenant", "status", "kind"))
        self._faults = self._counter("request_errors", "Requests that went wrong, by fault.", ("tenant", "fault"))
        self._tools = self._counter("tool_calls", "Calls of our tools.", ("tenant", "tool", "result"))
        self._retrieved = self._counter("retrieved_tokens", "Tokens of our tools' answers.", ("tenant", "tool"))
        self._store = self._counter("store_errors", "Store operations without an answer.", ("operation", "fault"))
        self._added = self._histogram("added_seconds", "Our own work before the first round was sent.", ADDED)
        self._first_byte = self._histogram("first_byte_seconds", "From the request to the reply's first byte.", WAITED)
        self._whole = self._histogram("request_seconds", "From the request to the reply's last byte.", WAITED)
        self._in_flight = self._gauge("requests_in_flight", "Requests under way.", "livesum")
        self._cache_entries = self._gauge("cache_entries", "Entries of in-process caches.", "livesum", ("cache",))
        self._cache_bytes = self._gauge("cache_bytes", "Bytes of in-process caches.", "livesum", ("cache",))
        self._store_up = self._gauge("store_up", "1 while the store answers; the worst of all workers.", "livemin")
        self._store_up.set(1)

    def record(self, outcome: Outcome) -> None:
        """Count one request. Takes some microseconds and never raises."""
        tenant = self._tenant(outcome.tenant)
        kind = _one_of(KINDS, outcome.kind)
        tenant.requests(outcome.status, kind).inc()
        for field, child in tenant.sums:
            if amount := getattr(outcome, field):
                child.inc(amount)
        if outcome.fault:
            tenant.faults(_one_of(FAULTS, outcome.fault)).inc()
        for use in outcome.tool_uses:
            tenant.used(use)
        for failed, times in outcome.store_errors.items():
            self._count_store(failed, times)
        self._observe(outcome, kind)
        self._sample()
