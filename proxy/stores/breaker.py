"""A circuit breaker: stops calls to a failing engine for some seconds. Does no I/O; takes its clock as an argument.

    closed ──── `limit` failures in a row ────▶ open ◀──────────────┐
      ▲                                          │                  │
      │                       a pause later, the next call is let   │ it fails, or a pause
      │                                          ▼ through          │ goes by in silence
      └────────────── it succeeds ────────── half-open ─────────────┘

A probing call without a result counts as failed, because it may have been cancelled.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

State = Literal["closed", "open", "half-open"]


class Breaker:
    """Call `admit` before every call to the engine, then report the result with `succeeded` or `failed`."""

    def __init__(
        self, *, limit: int = 5, pause_seconds: float = 5.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit = limit
        self._pause = pause_seconds
        self._clock = clock
        self._failures = 0
        self._closed = True
        self._probing = False
        self._next_probe = 0.0

    def another(self) -> Breaker:
        """Return a closed breaker with the same limit, pause and clock."""
        return Breaker(limit=self._limit, pause_seconds=self._pause, clock=self._clock)

    @property
    def state(self) -> State:
        """The current state."""
        if self._closed:
            return "closed"
        return "half-open" if self._probing and self._clock() < self._next_probe else "open"

    @property
    def ready(self) -> bool:
        """Whether `admit` would return true."""
        return self._closed or self._clock() >= self._next_probe

    def admit(self) -> bool:
        """Return whether a call may be made now. True while the breaker is open makes it this pause's only probe."""
        if self._closed:
            return True
        if not self.ready:
            return False
        self._probing = True
        self._next_probe = self._clock() + self._pause
        return True

    def succeeded(self) -> None:
        """Note that a call was answered, and close the breaker."""
        self._failures = 0
        self._closed = True
        self._probing = False

    def failed(self) -> None:
        """Note that a call failed or timed out, and open the breaker after `limit` of these in a row."""
        self._failures += 1
        if self._failures >= self._limit:
            self._closed = False
            self._probing = False
            self._next_probe = self._clock() + self._pause
