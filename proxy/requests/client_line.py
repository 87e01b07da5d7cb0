"""The client's reply as a turn writes it: a stream is never silent for long, and its head can wait for an event."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from proxy import sse
from proxy.requests.exchange import ErrorEvent, Exchange
from proxy.upstream.headers import Headers

HEARTBEAT = 15.0
"""Seconds of silence after which the client gets a comment: many clients give up after 30 to 60 silent seconds. The
head of a stream waits just as long for the first event, which may be an error."""


class ClientLine:
    """The client's reply. Every long silence of a stream gets a comment, so that nobody takes the stream for dead.

    The head of a stream can wait for the first event, which may be an error. It waits as long as a silence may last.
    """

    def __init__(self, client: Exchange, heartbeat: float) -> None:
        self._client = client
        self._heartbeat = heartbeat
        self._head: tuple[int, Headers] | None = None
        self._writing = asyncio.Lock()
        self._clock = asyncio.get_running_loop().time
        self._heard = self._clock()

    @property
    def prepared(self) -> bool:
        """Whether the head is known."""
        return self._head is not None

    @property
    def open(self) -> bool:
        """Whether the reply has begun."""
        return bool(self._client.status)

    def prepare(self, status: int, headers: Headers, error_event: ErrorEvent | None = None) -> None:
        """Set the head. It is sent with the first bytes, or after a silence of `heartbeat` seconds. `error_event` makes
        the event that ends the reply if it fails within, if it is a stream."""
        self._client.error_event = error_event
        self._head, self._heard = (status, headers), self._clock()

    async def write(self, data: bytes) -> None:
        """Send `data`. It must end with a whole event, because a comment may follow."""
        if data:
            async with self._writing:
                await self._start()
                await self._client.write(data)
                self._heard = self._clock()

    async def finish(self, data: bytes) -> None:
        async with self._writing:
            await self._start()
            await self._client.finish(data)

    async def _start(self) -> None:
        if self._head is not None and not self.open:
            await self._client.start(*self._head)

    @asynccontextmanager
    async def kept_alive(self) -> AsyncIterator[None]:
        beating = asyncio.create_task(self._beat())
        try:
            yield
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)

    async def _beat(self) -> None:
        while True:
            silent = self._clock() - self._heard
            if silent < self._heartbeat:
                await asyncio.sleep(self._heartbeat - silent)
            elif self._writing.locked() or self._head is None:
                await asyncio.sleep(self._heartbeat)
            else:
                await self.write(sse.comment(b"working"))
