"""How snapshots fare on each line of history: which one is being made, and whether the next one must wait.

A line is found by walking a history's own digests back from its end: the newest boundary at which a snapshot was asked
for tells how its line fares. So a longer history and a fork inherit that, and a stranger that only begins alike does
not, not even with the same first user message.

A client that rewrites its past never comes back with the same digests, and would pay for a snapshot at every turn. It
is known by its first user message together with the last messages before a boundary. A history that goes on where an
earlier request ended was not rewritten.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from proxy.lru import Lru
from proxy.plan.history import Message
from proxy.plan.plan import Role

FIRST_BACKOFF, LONGEST_BACKOFF = 60.0, 3600.0
"""Seconds without summaries after a line's first failure. Each further failure doubles them, up to the longest."""
UNUSED_LIMIT, UNUSED_PAUSE, UNUSED = 5, 3600.0, "snapshots of this conversation are never used; none for an hour"
"""`UNUSED_LIMIT` unused snapshots in a row mean that the client rewrites its past. Then it gets no snapshots for
`UNUSED_PAUSE` seconds, and `UNUSED` is the reason."""
WALK = 512
"""The most digests that are looked up on the way back. A boundary further back than so many messages is forgotten."""
LAST = 4
"""The messages before a boundary by which a client that rewrites its past is known."""
MARKS = 10_000
"""The number of boundaries that are remembered, and of requests."""

Flight = asyncio.Task[Any]
Mark = tuple[str, bytes]
"""A scope and a digest."""

T = TypeVar("T")


class Line(msgspec.Struct, frozen=True):
    """A boundary before message `end` of a history, which may go on after it."""

    scope: str
    """The namespace and the summary model: a line of one never holds up another's."""
    links: Sequence[bytes]
    """The history's digests; see `History.links`."""
    messages: Sequence[Message]
    end: int

    def back(self) -> Iterator[Mark]:
        """Yield the marks of the history's newest places, from its end."""
        return ((self.scope, self.links[place]) for place in self._places())

    def rewritten_back(self) -> Iterator[Mark]:
        """Do the same with marks that a client still has after it rewrote its past."""
        first = self._first()
        return (self._last(first, place) for place in self._places() if place > first)

    def earlier_ends(self) -> Iterator[Mark]:
        """Yield the marks where an earlier request ends if this history goes on where that one ended."""
        places = range(len(self.messages) - 1, max(self.end - LAST, self._first()), -1)
        return ((self.scope, self.links[place]) for place in places)

    @property
    def boundary(self) -> Mark:
        """The boundary's mark."""
        return self.scope, self.links[self.end]

    @property
    def rewritten_boundary(self) -> Mark:
        """The boundary's mark for a client that rewrites its past."""
        return self._last(self._first(), self.end)

    def _places(self) -> range:
        size = len(self.messages)
        return range(size, max(size - WALK, 0), -1)

    def _first(self) -> int:
        """Return where the history's beginning ends: after its first user message."""
        return next((place for place, one in enumerate(self.messages, 1) if one.role is Role.USER), 0)

    def _last(self, first: int, place: int) -> Mark:
        last = self.messages[max(place - LAST, first) : place]
        meant = b"".join([self.links[first], *(message.meaning for message in last)])
        return self.scope, hashlib.sha256(meant).digest()[:16]


class _Health(msgspec.Struct):
    """A boundary's flight, and the failures in a row up to it."""

    failures: int = 0
    until: float = 0.0
    flight: Flight | None = None


class _Use(msgspec.Struct):
    """The snapshots in a row, up to a boundary, that no later request has used."""

    unused: int = 0
    until: float = 0.0


class Lines:
    """Every line of this process on which a snapshot was asked for."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._health: Lru[Mark, _Health] = Lru(MARKS)
        self._use: Lru[Mark, _Use] = Lru(MARKS)
        self._ends: Lru[Mark, bool] = Lru(MARKS)

    def seen(self, scope: str, link: bytes) -> None:
        """Note a request whose history ends with this digest."""
        self._ends.put((scope, link), True)

    def flight(self, line: Line) -> Flight | None:
        """Return the line's flight that is under way."""
        flight = self._newest(line).flight
        return flight if flight and not flight.done() else None

    def paused(self, line: Line) -> bool:
        """Whether the line gets no snapshot now."""
        now = self._clock()
        if self._newest(line).until > now:
            return True
        return self._newest_use(line).until > now and not self._goes_on(line)

    def started(self, line: Line, flight: Flight) -> None:
        """Note the flight for the line's boundary, which inherits how its line fared so far."""
        self._health.put(line.boundary, replace(self._newest(line), flight=flight))
        self._use.put(line.rewritten_boundary, replace(self._newest_use(line)))

    def landed(self, line: Line, fault: str) -> bool:
        """Note the end of the boundary's flight, failed if there is a `fault`. Returns whether the line now pauses
        because its snapshots are never used."""
        health = self._health.get(line.boundary) or _Health()
        health.flight = None
        if fault:
            health.failures += 1
            health.until = self._clock() + min(FIRST_BACKOFF * 2 ** min(health.failures - 1, 16), LONGEST_BACKOFF)
            return False
        health.failures = 0
        use = self._use.get(line.rewritten_boundary) or _Use()
        use.unused += not self._goes_on(line)
        if use.unused < UNUSED_LIMIT:
            return False
        use.until, use.unused = self._clock() + UNUSED_PAUSE, 0
        return True

    def used(self, line: Line) -> None:
        """Note that a request used the boundary's snapshot, so that the next one is worth making."""
        if use := self._use.get(line.rewritten_boundary):
            use.unused = 0

    def _goes_on(self, line: Line) -> bool:
        return _found(self._ends, line.earlier_ends()) is not None

    def _newest(self, line: Line) -> _Health:
        return _found(self._health, line.back()) or _Health()

    def _newest_use(self, line: Line) -> _Use:
        return _found(self._use, line.rewritten_back()) or _Use()


def _found(marks: Lru[Mark, T], back: Iterator[Mark]) -> T | None:
    """Return what is noted at the first of these marks that has a note."""
    return next((note for mark in back if (note := marks.get(mark)) is not None), None)
