"""New rows as a stream of events, for all viewers from one look at the file every half second."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec

from proxy.dashboard.access import Viewer
from proxy.dashboard.reader import Row
from proxy.errors import DashboardFault

EVERY = 0.5
"""Seconds between two looks at the file, while somebody watches."""

KEPT = 1_000
"""Most rows that a slow viewer may be behind. It does not get the others."""

SILENCE = 15.0
"""Seconds after which a comment shows that the stream is alive."""

VIEWERS = 100
"""Most streams of one process."""


class LiveEvent(msgspec.Struct, frozen=True):
    """A row, as viewers get it, with its place among all that came."""

    number: int
    id: int
    namespace: str
    data: bytes


class Live:
    """`rows` returns the rows after an id, of all workers, and `newest` the newest id."""

    def __init__(self, rows: Callable[[int], Awaitable[list[Row]]], newest: Callable[[], Awaitable[int]]) -> None:
        self._rows = rows
        self._newest = newest
        self._events: deque[LiveEvent] = deque(maxlen=KEPT)
        self._looking: asyncio.Task[None] | None = None
        self._came = asyncio.Event()
        self._count = 0
        self.viewers = 0
        self.ended = False

    def end(self) -> None:
        """End all streams within `EVERY` seconds, because the process ends."""
        self.ended = True

    async def events(self, viewer: Viewer, now: Callable[[], float]) -> AsyncIterator[bytes]:
        """Yield server-sent events until the viewer's login or the process ends."""
        self.viewers += 1
        if self._looking is None:
            self._looking = asyncio.create_task(self._look())
        seen = self._count
        quiet = 0.0
        try:
            yield b": the rows that come from now on\n\n"
            while not self.ended and now() < viewer.until:
                quiet = quiet + EVERY if not await self._waited() else 0.0
                text = b"".join(
                    b"id: %d\ndata: %b\n\n" % (event.id, event.data)
                    for event in self._events
                    if event.number > seen and (viewer.operator or event.namespace == viewer.namespace)
                )
                seen = self._count
                if text or quiet >= SILENCE:
                    quiet = 0.0
                    yield text or b": still here\n\n"
        finally:
            self.viewers -= 1
            if not self.viewers and self._looking:
                self._looking.cancel()
                self._looking = None

    async def _waited(self) -> bool:
        """Wait for rows, `EVERY` seconds at most, and return whether there are any."""
        came = self._came
        try:
            await asyncio.wait_for(came.wait(), EVERY)
        except TimeoutError:
            return False
        return True

    async def _look(self) -> None:
        last = -1
        while True:
            try:
                if last < 0:
                    last = await self._newest()
                rows = await self._rows(last)
                if not rows and last > (top := await self._newest()):
                    last = top  # rows were deleted, and their ids are given again
                for row in rows:
                    self._count += 1
                    self._events.append(LiveEvent(self._count, row["id"], row["namespace"], msgspec.json.encode(row)))
                    last = row["id"]
                if rows:
                    came, self._came = self._came, asyncio.Event()
                    came.set()
            except DashboardFault:
                pass  # the page about health says so
            await asyncio.sleep(EVERY)
