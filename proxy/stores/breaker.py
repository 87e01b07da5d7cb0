"""A circuit breaker: stops calls to a failing engine for a while. No I/O; the clock is passed in.

    closed ──── `limit` failures in a row ────▶ open ◀──────────────┐
      ▲                                          │                  │
      │                       a pause later, the next call is let   │ it fails, or a pause
      │                                          ▼ through          │ goes by in silence
      └────────────── it succeeds ────────── half-open ─────────────┘

Silence counts as a failure because the probing call may be cancelled.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

State = Literal["closed", "open", "half-open"]


class Breaker:
    """Ask `admit` before every call, and report its result."""

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

    @property
    def state(self) -> State:
        """The present state."""
        if self._closed:
            return "closed"
        return "half-open" if self._probing and self._clock() < self._next_probe else "open"

    def admit(self) -> bool:
        """Whether a call may be made now. If the breaker is open, True makes the call this pause's only probe."""
        if self._closed:
            return True
        if self._clock() < self._next_probe:
            return False
        self._probing = True
        self._next_probe = self._clock() + self._pause
        return True

    def succeeded(self) -> None:
        """A call was answered."""
        self._failures = 0
        self._closed = True
        self._probing = False

    def failed(self) -> None:
        """A call failed or was not answered in time."""
        self._failures += 1
        if self._failures >= self._limit:
            self._closed = False
            self._probing = False
            self._next_probe = self._clock() + self._pause
