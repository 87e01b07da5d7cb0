"""What became of the requests, on its way to metrics and log: a few at a time.

Right behind one another they find code and data in the processor's caches; each on its own, between two requests, took
several times as long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from proxy.telemetry.outcome import Outcome

MOST = 32
"""Outcomes that wait at most: writing them down takes less than a millisecond."""

LATEST = 0.005
"""Seconds that one waits at most."""


class Recorder:
    """Hands every outcome to each of the `sinks`, in order. To be used, but for `flush`, in a running event loop."""

    def __init__(self, *sinks: Callable[[Outcome], None]) -> None:
        self._sinks = sinks
        self._waiting: list[Outcome] = []

    def record(self, outcome: Outcome) -> None:
        """Have it written down soon."""
        self._waiting.append(outcome)
        if len(self._waiting) >= MOST:
            self.flush()
        elif len(self._waiting) == 1:
            asyncio.get_running_loop().call_later(LATEST, self.flush)

    def flush(self) -> None:
        """Write down what waits: before anybody looks, and at the end."""
        waiting, self._waiting = self._waiting, []
        for sink in self._sinks:
            for outcome in waiting:
                sink(outcome)
