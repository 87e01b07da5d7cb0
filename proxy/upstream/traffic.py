"""Which upstreams are at work on clients' requests, so that a summary can wait until one is idle."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec


class Traffic:
    """Counts the requests under way to each origin. A server with one slot works on one at a time."""

    def __init__(self) -> None:
        self._under_way: defaultdict[str, int] = defaultdict(int)
        self._changed: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)

    def began(self, origin: str) -> None:
        """Count a request that goes to this origin."""
        self._under_way[origin] += 1
        self._notify(origin)

    def ended(self, origin: str) -> None:
        """Count it no more."""
        self._under_way[origin] -= 1
        if not self._under_way[origin]:
            del self._under_way[origin]
        self._notify(origin)

    def under_way(self, origin: str) -> int:
        """Return the requests under way to this origin."""
        return self._under_way.get(origin, 0)

    def changed(self, origin: str) -> asyncio.Event:
        """Return an event that is set when the next request begins or ends."""
        return self._changed[origin]

    def idle(self, origin: str) -> Idle:
        """Return how to wait for this origin."""
        return Idle(self, origin)

    def _notify(self, origin: str) -> None:
        if event := self._changed.pop(origin, None):
            event.set()


class Idle(msgspec.Struct, frozen=True):
    """Waits until an origin is idle, or no longer is."""

    traffic: Traffic
    origin: str

    async def quiet(self, seconds: float) -> None:
        """Return when the origin has been idle for so long."""
        while True:
            changed = self.traffic.changed(self.origin)
            if self.traffic.under_way(self.origin):
                await changed.wait()
                continue
            try:
                async with asyncio.timeout(seconds):
                    await changed.wait()
            except TimeoutError:
                return

    @contextmanager
    def used(self) -> Iterator[bool]:
        """Use the origin within the block, if it is idle, which the block is told."""
        idle = not self.traffic.under_way(self.origin)
        if idle:
            self.traffic.began(self.origin)
        try:
            yield idle
        finally:
            if idle:
                self.traffic.ended(self.origin)

    async def disturbed(self) -> None:
        """Return when somebody else uses the origin, too."""
        while self.traffic.under_way(self.origin) <= 1:
            await self.traffic.changed(self.origin).wait()
