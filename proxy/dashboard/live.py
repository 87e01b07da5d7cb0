"""New rows as a stream of events, for all viewers from one look at the file.

Each look costs a transaction, and each viewer a write. So many viewers get the rows less often, and get only what the
live page shows. A look writes to all viewers by itself: to wake each one's task would cost as much as the write. Only a
viewer that is behind, or whose stream ends, is left to its own task.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from itertools import islice

from proxy.dashboard.access import Viewer
from proxy.dashboard.events import LiveRows
from proxy.errors import DashboardFault

logger = logging.getLogger(__name__)

EVERY, SLOWEST = 1.0, 8.0
"""Seconds between two looks at the file while somebody watches, at least and at most. It is less than the seconds for
which other processes write at once."""

WRITES = 2.5
"""Writes to viewers a second above which the looks become rarer."""

KEPT = 400
"""Most packs of rows that a slow viewer may be behind. It does not get the others."""

SILENCE = 15.0
"""Seconds after which a comment shows that the stream is alive."""

VIEWERS = 100
"""Most streams of one process."""

BEGINNING, ALIVE = b": the rows that come from now on\n\n", b": still here\n\n"

Push = Callable[[bytes], bool]
"""Writes a piece of a reply at once, or returns that it cannot."""


class _Stream:
    """One viewer's."""

    def __init__(self, viewer: Viewer, push: Push | None, seen: int, spoken: float) -> None:
        self.namespace = None if viewer.operator else viewer.namespace
        self.until = viewer.until
        self.push = push
        self.seen = seen
        """Of how many rows it has had, or was not to get, its own ones."""
        self.floor = 0
        """The newest row that it began with, until a look found a newer one."""
        self.spoken = spoken
        self.waits = False
        """Whether its task waits, and so writes nothing itself."""
        self.came = asyncio.Event()

    def wake(self) -> None:
        """Leave what comes next to the task."""
        self.waits = False
        self.came.set()


class Live:
    """`rows` returns the rows after an id, of all workers, and `newest` the newest id."""

    def __init__(self, rows: Callable[[int], Awaitable[list[LiveRows]]], newest: Callable[[], Awaitable[int]]) -> None:
        self._rows = rows
        self._newest = newest
        self._events: deque[LiveRows] = deque(maxlen=KEPT)
        self._looking: asyncio.Task[None] | None = None
        self._streams: set[_Stream] = set()
        self._count = 0
        self._last = -1
        """The newest row that a look found; -1 before the first look."""
        self._texts: dict[tuple[int, str | None], bytes] = {}
        """What viewers get who have seen so many rows: most of them get the same."""
        self.ended = False

    @property
    def viewers(self) -> int:
        return len(self._streams)

    @property
    def pace(self) -> float:
        """Return the seconds between two looks."""
        return min(max(EVERY, self.viewers / WRITES), SLOWEST)

    def end(self) -> None:
        """End all streams, because the process ends."""
        self.ended = True
        for stream in self._streams:
            stream.wake()

    async def events(
        self, viewer: Viewer, now: Callable[[], float], push: Push | None = None, after: int | None = None
    ) -> AsyncGenerator[bytes, None]:
        """Yield server-sent events until the viewer's login or the process ends, but those that `push` writes.

        The first ones are the rows after the id `after`, which is what a viewer has already; without it, there are
        only those that come from now on.
        """
        time = asyncio.get_running_loop().time
        stream = _Stream(viewer, push, self._count, time())
        self._streams.add(stream)
        if self._looking is None:
            self._looking = asyncio.create_task(self._look(now))
        try:
            yield BEGINNING
            if after is not None and (text := await self._missed(stream, after)):
                yield text
            while not self.ended and now() < stream.until:
                if stream.seen == self._count:
                    stream.came.clear()
                    stream.waits = True
                    await stream.came.wait()
                if text := self._next(stream, time()):
                    yield text
        finally:
            self._streams.discard(stream)
            if not self._streams and self._looking:
                self._looking.cancel()
                self._looking, self._last = None, -1

    async def _missed(self, stream: _Stream, after: int) -> bytes:
        """Return the events that a viewer lacks which has the rows up to an id. Looks go on where they end."""
        try:
            after = min(after, await self._newest())  # if rows were deleted, their ids are given again
            events = await self._rows(after)
        except DashboardFault:
            return b""
        stream.floor = events[-1].id if events else after
        if self._last < 0:
            self._last = stream.floor
        return _joined(events, stream.namespace)

    def _pass(self, stream: _Stream) -> None:
        """Count as seen what a stream began with, and a look has found, too."""
        if not stream.floor:
            return
        stream.seen = max(stream.seen, self._count - len(self._events))
        for event in islice(self._events, len(self._events) - (self._count - stream.seen), None):
            if event.id > stream.floor:
                stream.floor = 0
                return
            stream.seen += 1

    def _next(self, stream: _Stream, now: float) -> bytes:
        """Return what a viewer gets next, and count it as seen; nothing, if it has heard of us not long ago."""
        self._pass(stream)
        text = self._text(stream.seen, stream.namespace)
        stream.seen = self._count
        if not text and now - stream.spoken >= SILENCE - self.pace:
            text = ALIVE
        if text:
            stream.spoken = now
        return text

    def _text(self, seen: int, namespace: str | None) -> bytes:
        """Return the events after so many; without a namespace, those of all."""
        if (seen, namespace) not in self._texts:
            events = islice(self._events, max(len(self._events) - (self._count - seen), 0), None)
            self._texts[seen, namespace] = _joined(events, namespace)
        return self._texts[seen, namespace]

    def _spread(self, now: float) -> None:
        """Write to all viewers what came."""
        self._texts.clear()
        time = asyncio.get_running_loop().time()
        for stream in self._streams:
            if not stream.waits:
                continue  # its task looks again before it waits
            if stream.push is None or now >= stream.until:
                stream.wake()
                continue
            self._pass(stream)
            seen = stream.seen
            if (text := self._next(stream, time)) and not _pushed(stream.push, text):
                stream.seen = seen
                stream.wake()

    async def _look(self, now: Callable[[], float]) -> None:
        quiet = 0.0
        while True:
            known = self._count
            await self._take()
            quiet = 0.0 if self._count > known else quiet + self.pace
            if not quiet or quiet >= SILENCE:
                quiet = 0.0
                self._spread(now())
            await asyncio.sleep(self.pace)

    async def _take(self) -> None:
        """Take the rows that are newer than those of the last look."""
        try:
            if self._last < 0:
                newest = await self._newest()
                self._last = newest if self._last < 0 else self._last  # a stream may have begun meanwhile
            if events := await self._rows(self._last):
                self._count += len(events)
                self._events += events
                self._last = events[-1].id
            elif (newest := await self._newest()) < self._last:  # rows were deleted: their ids are given again
                self._last = newest
                for stream in self._streams:
                    stream.floor = 0
        except DashboardFault:
            pass  # the page about health says so
        except Exception:
            logger.exception("a bug, in looking for rows to stream")


def _pushed(push: Push, text: bytes) -> bool:
    """Whether this wrote the text. A bug there costs no other viewer anything: the viewer's task writes it."""
    try:
        return push(text)
    except Exception:
        logger.exception("a bug, in writing to a viewer of the dashboard")
        return False


def _joined(events: Iterable[LiveRows], namespace: str | None) -> bytes:
    """Return the rows of a namespace as one event; without a namespace, those of all."""
    if not (own := [event for event in events if namespace in (None, event.namespace)]):
        return b""
    return b"id: %d\ndata: [%b]\n\n" % (own[-1].id, b",".join([event.text for event in own]))
