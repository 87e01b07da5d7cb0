"""Connections to upstream, made with aiohttp's connector and parser but without its session.

A session adds headers, cookies, redirects and credentials, all of which a relay must leave alone. It also makes two
objects for each exchange and a task for each body: without it, a small request takes three quarters of the time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Self

import aiohttp
from aiohttp.http import StreamWriter
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.streams import StreamReader

from proxy.upstream.connections import Connector, Exhausted, KeptConnection
from proxy.upstream.headers import Headers, head

if TYPE_CHECKING:
    import ssl

    from aiohttp.client_proto import ResponseHandler
    from aiohttp.connector import Connection
    from aiohttp.http_parser import RawResponseMessage

    from proxy.upstream.egress import Route

_INTERIM = 1_000
"""Most interim heads before a reply. Some upstreams send one each second, so that nobody takes them for dead."""

_KEPT_ALIVE = 15.0
"""Seconds that an idle connection stays in the pool."""

_STALE_WITHIN = 2.0
"""If a pooled connection breaks within this many seconds of the first byte that we sent, its request may be sent again:
the server most likely closed an idle connection while the request was on its way, and we learn of that within a round
trip. If the connection breaks later, the server may have worked on the request."""

_TURNS = 2
"""Turns of the event loop after which it has read what had arrived before."""

CLOSING = 0.25
"""Seconds at the end for connections to close. One whose upstream reads nothing stays open until all is sent."""

_JOINED = 64 * 1024
"""The most bytes of a body that is copied after its head, so that both are sent in one piece. Copying a larger one does
not pay."""

_WITHOUT_BODY = frozenset(("GET", "HEAD", "OPTIONS", "TRACE"))
"""Methods whose requests need no `Content-Length: 0` (RFC 9110, 8.6)."""

Content = bytes | AsyncIterator[bytes]


class Stale(aiohttp.ClientError):
    """A pooled connection broke soon after it was used again, before any byte of the reply arrived, as far as can be
    known."""


class _Body(StreamReader):
    """aiohttp's reader of a body, for a relay, which takes all that has arrived and never asks where a chunk ends.

    For each chunk, aiohttp's own notes its end, forgets it again, and has the connection go on reading: in a stream of
    small events, that costs more than all else.
    """

    __slots__ = ()  # aiohttp's parser makes the readers, and they become ours afterwards

    def begin_http_chunk_receiving(self) -> None:
        """Note nothing."""

    def end_http_chunk_receiving(self) -> None:
        """Only bound the number of chunks that wait, because many small ones take much memory and time."""
        if len(self._buffer) > self._high_water_chunks:
            self._protocol.pause_reading()

    def _read_nowait(self, n: int) -> bytes:
        arrived = b"".join(self._buffer)
        self._buffer.clear()
        self._size = 0
        if self._protocol._reading_paused:
            self._protocol.resume_reading()  # more may arrive within this call
        return arrived


class UpstreamResponse:
    """A reply whose head has arrived. Close it even if you read it to the end."""

    timed_out_idle = False
    """Whether this is most likely no reply to the request, but a pooled connection's end: some servers send 408 and
    close when they have heard nothing for a while. It says that they got no request (RFC 9110, 15.5.9)."""

    def __init__(
        self,
        connection: Connection,
        protocol: ResponseHandler,
        message: RawResponseMessage,
        content: StreamReader,
        writing: asyncio.Task[None] | None,
    ) -> None:
        self.status = message.code
        self.headers = Headers(message.raw_headers)
        if type(content) is StreamReader:  # else there is no body
            content.__class__ = _Body
        self.content = content
        self._connection = connection
        self._protocol = protocol
        self._writing = writing
        self._watched: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._waits = False
        self._since = 0.0
        content.on_eof(self._ended)

    async def next(self, seconds: float) -> bytes:
        """Wait up to `seconds` for more of the body, after reading all that came before. Raises ClientError, and
        TimeoutError. One timer serves the whole reply: a stream waits hundreds of times.

        If aiohttp's parser finds a broken chunk, it closes the connection without informing the body. A reader that
        already waits would then wait until it is cancelled, and a later one would get a RuntimeError.
        """
        if self._watched is None and (closed := self._protocol.closed):
            self._watched = closed
            closed.add_done_callback(self._lost)
        if self._watched is None or self._watched.done():
            raise _not_whole()
        loop = asyncio.get_running_loop()
        self._waits, self._since = True, loop.time()
        if self._timer is None:
            self._timer = loop.call_at(self._since + seconds, self._expire, seconds)
        try:
            return await self.content.readany()
        finally:
            self._waits = False

    def _expire(self, seconds: float) -> None:
        self._timer, deadline = None, self._since + seconds
        if not self._waits:
            return
        loop = asyncio.get_running_loop()
        if loop.time() < deadline:
            self._timer = loop.call_at(deadline, self._expire, seconds)
        else:
            self.content.set_exception(aiohttp.SocketTimeoutError("idle"))

    def _lost(self, _: object) -> None:
        if self._waits and not self.content.is_eof() and self.content.exception() is None:
            self.content.set_exception(_not_whole())

    def close(self) -> None:
        """Close the connection, unless the reply has ended and the connection is back in the pool."""
        if self._writing is not None:
            self._writing.cancel()
        self._forget()
        self._connection.close()

    def _forget(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._watched is not None:
            self._watched.remove_done_callback(self._lost)

    def _ended(self) -> None:
        self._forget()
        if self._sent():
            self._connection.release()
        else:
            self.close()  # upstream did not want the rest of the request

    def _sent(self) -> bool:
        if self._writing is not None:
            return self._writing.done()
        transport = self._connection.transport
        return transport is None or not transport.get_write_buffer_size()


class ConnectionPool:
    """A pool that is opened with `async with`. `limit`: connections at once. All methods raise aiohttp.ClientError."""

    def __init__(self, context: ssl.SSLContext, limit: int) -> None:
        self._context = context
        self._limit = limit
        self._ways: dict[Route, _Way] = {}
        self._connector: Connector

    async def __aenter__(self) -> Self:
        self._connector = Connector(limit=self._limit, keepalive=_KEPT_ALIVE, ssl=self._context)
        return self

    async def __aexit__(self, *_: object) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSING):
                await self._connector.close()

    async def ask(
        self,
        route: Route,
        method: str,
        target: str,
        headers: Headers,
        content: Content,
        connect_timeout: float,
        first_byte_timeout: float | None,
        *,
        fresh: bool = False,
    ) -> UpstreamResponse:
        """Send a request and return the reply as soon as its head arrives. Target and headers are sent byte for byte.
        A streamed body, which cannot be sent again, always goes over a new connection.

        Raises Stale, but not on a fresh connection, Exhausted, ValueError for characters that are forbidden in a head,
        and TimeoutError. The first byte's timeout counts from the connection; None waits forever.
        """
        way = self._way(route)
        start = _head(way, method, target, headers, content)
        streamed = not isinstance(content, bytes)
        connection, protocol = await self._connected(way, connect_timeout, fresh=fresh, streamed=streamed)
        reused = protocol.used
        if not reused:
            protocol.used = True
            if closed := protocol.closed:
                closed.add_done_callback(_heard)
        loop = asyncio.get_running_loop()
        began = loop.time()
        writing = timer = None
        if first_byte_timeout is not None:
            timer = loop.call_later(first_byte_timeout, _no_first_byte, protocol)
        try:
            protocol.expect_reply(method)
            writing = _write(protocol, start, headers, content)
            message, body = await _reply(protocol, method)
        except BaseException as error:
            if writing is not None:
                writing.cancel()
            connection.close()
            gone = isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError)
            if gone and reused and loop.time() - began <= _STALE_WITHIN:
                raise Stale(str(error)) from error
            raise
        finally:
            if timer is not None:
                timer.cancel()
        response = UpstreamResponse(connection, protocol, message, body, writing)
        if message.code == 408 and reused and message.should_close:
            response.timed_out_idle = loop.time() - began <= _STALE_WITHIN
        return response

    async def _connected(
        self, way: _Way, seconds: float, *, fresh: bool, streamed: bool
    ) -> tuple[Connection, KeptConnection]:
        """Return a connection, new if it is for a `streamed` body or has to be `fresh`. In the latter case those that
        idle are closed: where one is stale, those that have idled for longer are, too."""
        connect = self._connector.connect_anew if streamed else self._connector.connect
        while True:
            try:
                connection = await connect(way.asked, [], _timeout(seconds))
            except TimeoutError as error:
                if self._connector.exhausted:
                    raise Exhausted(f"all {self._connector.limit} connections were in use for {seconds:g} s") from error
                raise aiohttp.ConnectionTimeoutError(f"no connection within {seconds:g} s") from error
            protocol = connection.protocol
            assert isinstance(protocol, KeptConnection)
            if not (fresh and protocol.used):
                return connection, protocol
            connection.close()

    def _way(self, route: Route) -> _Way:
        way = self._ways.get(route)
        if way is None:
            way = self._ways[route] = _Way(route)
        return way


class _Way:
    """A route to one origin, and the lines that it adds to each request's head."""

    def __init__(self, route: Route) -> None:
        # This request is never sent: it only tells the connector where to connect.
        self.asked = aiohttp.ClientRequest("GET", route.origin, loop=asyncio.get_running_loop(), proxy=route.proxy)
        self.lines = [f"Host: {self.asked.headers['Host']}".encode("ascii")]
        self.origin = ""
        """The prefix of each target: a proxy that forwards plain HTTP needs the absolute form (RFC 9112, 3.2.2)."""
        if route.proxy is not None and not self.asked.is_ssl():
            self.origin = str(route.origin).rstrip("/")
            if route.proxy.user is not None:
                credentials = aiohttp.encode_basic_auth(route.proxy.user, route.proxy.password or "")
                self.lines.append(f"Proxy-Authorization: {credentials}".encode())


@lru_cache(maxsize=100)
def _timeout(connect: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=None, connect=connect)


def _head(way: _Way, method: str, target: str, headers: Headers, content: Content) -> bytes:
    """Build the request's head. Raises ValueError for characters that are forbidden in it."""
    lines = [f"{method} {way.origin}{target} HTTP/1.1".encode("ascii"), *way.lines, *map(b": ".join, headers)]
    lines += _framing(method, headers, content)
    made = head(lines)
    made.decode()
    return made


def _framing(method: str, headers: Headers, content: Content) -> list[bytes]:
    """Return the header that says where the body ends, unless the headers already have one."""
    if headers.has(b"content-length"):
        return []
    if not isinstance(content, bytes):
        return [b"Transfer-Encoding: chunked"]
    return [b"Content-Length: %d" % len(content)] if content or method not in _WITHOUT_BODY else []


def _write(protocol: KeptConnection, head: bytes, headers: Headers, content: Content) -> asyncio.Task[None] | None:
    """Send head and body. A task sends a streamed body, because the reply may arrive before the body ends."""
    transport = protocol.transport
    if transport is None or transport.is_closing():
        raise aiohttp.ClientOSError("the connection is closed")
    if not isinstance(content, bytes):
        transport.write(head)
        writing = asyncio.create_task(_pour(protocol, content, chunked=not headers.has(b"content-length")))
        writing.add_done_callback(lambda task: _broken_off(protocol, task))
        return writing
    if len(content) <= _JOINED:
        transport.write(head + content)
    else:
        transport.writelines((head, content))
    return None


async def _pour(protocol: KeptConnection, content: AsyncIterator[bytes], *, chunked: bool) -> None:
    """Send a body as it arrives. An upstream that wants none of it replies and closes: read that first, because an
    attempt to write would end the connection, and the reply would be lost."""
    writer = StreamWriter(protocol, asyncio.get_running_loop())
    if chunked:
        writer.enable_chunking()
    async for chunk in content:
        for _ in range(_TURNS):
            if not protocol.unread():
                break
            await asyncio.sleep(0)
        await writer.write(chunk)
    await writer.write_eof()


def _broken_off(protocol: ResponseHandler, writing: asyncio.Task[None]) -> None:
    """If the whole request could not be sent, raise its error where the reply is awaited."""
    error = None if writing.cancelled() else writing.exception()
    if isinstance(error, OSError):
        protocol.set_exception(aiohttp.ClientOSError(error.errno, str(error)), error)
    elif error is not None:
        protocol.set_exception(aiohttp.ClientConnectionError(f"the request broke off: {error!r}"), error)


async def _reply(protocol: KeptConnection, method: str) -> tuple[RawResponseMessage, StreamReader]:
    """Return the head, skipping interim ones (RFC 9110, 15.2), and the body. What follows a whole reply unasked is
    dropped, as browsers and curl do; the connection is closed."""
    begun = False
    for _ in range(_INTERIM):
        try:
            message, content = await protocol.read()
        except HttpProcessingError as error:
            if whole := protocol.whole_reply(method):
                return whole
            raise aiohttp.ClientPayloadError(error.message) from error
        except aiohttp.ClientConnectionError as error:
            if begun or _within_head(error):
                raise aiohttp.ClientPayloadError("its reply had begun") from error
            raise
        if message.code == 101 or not 100 <= message.code < 200:
            return message, content
        begun = True
    raise aiohttp.ClientPayloadError(f"more than {_INTERIM} interim replies")


def _no_first_byte(protocol: ResponseHandler) -> None:
    protocol.set_exception(TimeoutError())


def _heard(closed: asyncio.Future[None]) -> None:
    """Retrieve the exception of an ended connection: asyncio complains about exceptions that nobody has retrieved."""
    if not closed.cancelled():
        closed.exception()


def _not_whole() -> aiohttp.ClientPayloadError:
    return aiohttp.ClientPayloadError("the connection was closed before the end of the body")


def _within_head(error: aiohttp.ClientConnectionError) -> bool:
    """Whether the connection ended within the reply's head. After a reset, this cannot be known."""
    return isinstance(error, aiohttp.ServerDisconnectedError) and not isinstance(error.message, str)
