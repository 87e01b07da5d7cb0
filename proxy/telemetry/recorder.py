"""Outcomes on their way to the metrics and the log, in small batches.

Batching keeps the processor's caches warm: recorded one by one between requests, outcomes took several times as long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from proxy.telemetry.outcome import Outcome

MOST = 32
"""Outcomes in a batch at most: recording so many takes less than a millisecond."""

LATEST = 0.005
"""Seconds that an outcome waits at most."""


class Recorder:
    """Hands every outcome to each of the `sinks`, in order. All but `flush` needs a running event loop."""

    def __init__(self, *sinks: Callable[[Outcome], None]) -> None:
        self._sinks = sinks
        self._waiting: list[Outcome] = []

    def record(self, outcome: Outcome) -> None:
        """Record this one soon."""
        self._waiting.append(outcome)
        if len(self._waiting) >= MOST:
            self.flush()
        elif len(self._waiting) == 1:
            asyncio.get_running_loop().call_later(LATEST, self.flush)

    def flush(self) -> None:
        """Record all that wait: before anybody looks at the metrics, and at the end."""
        waiting, self._waiting = self._waiting, []
        for sink in self._sinks:
            for outcome in waiting:
                sink(outcome)
