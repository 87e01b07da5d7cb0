"""New rows as a stream of events, for all viewers from one look at the file.

Each look costs a transaction, and each viewer a write. So many viewers get the rows less often, and get only what the
live page shows."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import islice

import msgspec

from proxy.dashboard.access import Viewer
from proxy.dashboard.reader import Row
from proxy.errors import DashboardFault

logger = logging.getLogger(__name__)

EVERY, SLOWEST = 1.0, 4.0
"""Seconds between two looks at the file while somebody watches, at least and at most. It is less than the seconds for
which other processes write at once."""

WRITES = 5.0
"""Writes to viewers a second above which the looks become rarer."""

KEPT = 1_000
"""Most rows that a slow viewer may be behind. It does not get the others."""

SILENCE = 15.0
"""Seconds after which a comment shows that the stream is alive."""

VIEWERS = 100
"""Most streams of one process."""


class LiveEvent(msgspec.Struct, frozen=True):
    """A row, as viewers get it."""

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
        self._texts: dict[tuple[int, str | None], bytes] = {}
        """What viewers get who have seen so many rows: most of them get the same."""
        self.viewers = 0
        self.ended = False

    def end(self) -> None:
        """End all streams, because the process ends."""
        self.ended = True
        self._wake()

    async def events(self, viewer: Viewer, now: Callable[[], float]) -> AsyncIterator[bytes]:
        """Yield server-sent events until the viewer's login or the process ends."""
        self.viewers += 1
        if self._looking is None:
            self._looking = asyncio.create_task(self._look())
        seen, time = self._count, asyncio.get_running_loop().time
        spoken = time()
        try:
            yield b": the rows that come from now on\n\n"
            while not self.ended and now() < viewer.until:
                if seen == self._count:
                    await self._came.wait()
                text = self._text(seen, None if viewer.operator else viewer.namespace)
                seen = self._count
                if text or time() - spoken >= SILENCE - self.pace:
                    spoken = time()
                    yield text or b": still here\n\n"
        finally:
            self.viewers -= 1
            if not self.viewers and self._looking:
                self._looking.cancel()
                self._looking = None

    def _text(self, seen: int, namespace: str | None) -> bytes:
        """Return the events after so many; without a namespace, those of all."""
        if (seen, namespace) not in self._texts:
            self._texts[seen, namespace] = b"".join(
                b"id: %d\ndata: %b\n\n" % (event.id, event.data)
                for event in islice(self._events, max(len(self._events) - (self._count - seen), 0), None)
                if namespace in (None, event.namespace)
            )
        return self._texts[seen, namespace]

    @property
    def pace(self) -> float:
        """Return the seconds between two looks."""
        return min(max(EVERY, self.viewers / WRITES), SLOWEST)

    def _wake(self) -> None:
        """Let all viewers look at what came."""
        self._texts.clear()
        came, self._came = self._came, asyncio.Event()
        came.set()

    async def _look(self) -> None:
        last, quiet = -1, 0.0
        while True:
            try:
                if last < 0:
                    last = await self._newest()
                rows = await self._rows(last)
                if not rows and last > (top := await self._newest()):
                    last = top  # rows were deleted, and their ids are given again
                for row in rows:
                    self._count += 1
                    self._events.append(LiveEvent(row["id"], row.get("namespace", ""), msgspec.json.encode(row)))
                    last = row["id"]
            except DashboardFault:
                rows = []  # the page about health says so
            except Exception:
                rows = []
                logger.exception("a bug, in looking for rows to stream")
            quiet = 0.0 if rows else quiet + self.pace
            if rows or quiet >= SILENCE:
                quiet = 0.0
                self._wake()
            await asyncio.sleep(self.pace)
