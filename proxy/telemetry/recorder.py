"""Passes outcomes to the log and the metrics, in small batches.

Batching keeps the processor's caches warm: recording outcomes one by one between requests took several times as long.
The log writes the lines of a batch together, and the metrics add up what it counts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from proxy.telemetry.outcome import Outcome

logger = logging.getLogger(__name__)

MOST = 64
"""The most outcomes in a batch; recording so many takes about a millisecond."""

LATEST = 0.05
"""The most seconds that an outcome waits."""


class Recorder:
    """Passes every outcome to each of the `sinks`, in order. What fails in one of them keeps nothing from the others.

    `record` needs a running event loop; `flush` does not.
    """

    def __init__(self, *sinks: Callable[[Sequence[Outcome]], None]) -> None:
        self._sinks = sinks
        self._waiting: list[Outcome] = []
        self._timer: asyncio.TimerHandle | None = None
        """Flushes a batch that does not get full. It ends with its batch, or it would cut the next one short."""

    def record(self, outcome: Outcome) -> None:
        """Record `outcome` within `LATEST` seconds."""
        self._waiting.append(outcome)
        if len(self._waiting) >= MOST:
            self.flush()
        elif len(self._waiting) == 1:
            self._timer = asyncio.get_running_loop().call_later(LATEST, self.flush)

    def flush(self) -> None:
        """Record all waiting outcomes. Call it before the metrics are read, and at the end."""
        if self._timer:
            self._timer.cancel()
            self._timer = None
        waiting, self._waiting = self._waiting, []
        for sink in self._sinks:
            try:
                sink(waiting)
            except Exception:
                logger.exception("a bug, in recording requests: %s", getattr(sink, "__qualname__", sink))
