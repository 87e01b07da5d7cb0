"""Connections to upstream, and one request over one of them: aiohttp's connector and parser, without its session.

A session merges headers, cookies, redirects and credentials, all of which a relay has to leave alone, and makes two
objects of each exchange and a task of each body. Without it a small request takes three quarters of the time.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from functools import lru_cache
from typing import TYPE_CHECKING, Self
from weakref import WeakSet

import aiohttp
from aiohttp.http import StreamWriter
from aiohttp.http_exceptions import HttpProcessingError

from proxy.upstream.headers import Headers

if TYPE_CHECKING:
    import ssl

    from aiohttp.client_proto import ResponseHandler
    from aiohttp.connector import Connection
    from aiohttp.http_parser import RawResponseMessage
    from aiohttp.streams import StreamReader

    from proxy.upstream.egress import Route

_HEAD_LIMIT = 256 * 1024
"""Bytes that one line of a reply's head may have. aiohttp's 8 KiB are below what gateways in front of models send."""

_MAX_HEADERS = 1_000

_KEPT_ALIVE = 15.0
"""Seconds that an idle connection stays in the pool."""

_JOINED = 64 * 1024
"""Bytes of a body that are copied behind their head, to go out in one piece; a larger one is not worth the copy."""

_FORBIDDEN = re.compile(rb"[\x00-\x08\x0b-\x1f\x7f]")
"""Control characters (RFC 9110, 5.5) but for the tab, and the line feed, which is looked for on its own."""

_WITHOUT_BODY = frozenset(("GET", "HEAD", "OPTIONS", "TRACE"))
"""Methods whose requests need not say that they have no body (RFC 9110, 8.6)."""

Content = bytes | AsyncIterator[bytes]


class Stale(aiohttp.ClientError):
    """A connection from the pool broke before it gave a byte of the reply, as far as can be known."""


class UpstreamResponse:
    """A reply whose head is there. Read to its end or not, it has to be closed."""

    def __init__(
        self,
        connection: Connection,
        message: RawResponseMessage,
        content: StreamReader,
        writing: asyncio.Task[None] | None,
    ) -> None:
        self.status = message.code
        self.headers = Headers(message.raw_headers)
        self.content = content
        self._connection = connection
        self._writing = writing
        content.on_eof(self._ended)

    def close(self) -> None:
        """End the connection, unless the reply has ended and it is back in the pool."""
        if self._writing is not None:
            self._writing.cancel()
        self._connection.close()

    def _ended(self) -> None:
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
    """Open within `async with`. `limit`: connections at once. Everything here raises aiohttp.ClientError."""

    def __init__(self, context: ssl.SSLContext, limit: int) -> None:
        self._context = context
        self._limit = limit
        self._ways: dict[Route, _Way] = {}
        self._used: WeakSet[ResponseHandler] = WeakSet()
        self._connector: aiohttp.TCPConnector

    async def __aenter__(self) -> Self:
        self._connector = aiohttp.TCPConnector(limit=self._limit, keepalive_timeout=_KEPT_ALIVE, ssl=self._context)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._connector.close()

    async def ask(
        self, route: Route, method: str, target: str, headers: Headers, content: Content, connect_timeout: float
    ) -> UpstreamResponse:
        """Send a request; its answer as soon as the head is there. Target and headers go out as they are written.

        Raises Stale, and ValueError for characters that no head may have.
        """
        way = self._way(route)
        head = _head(way, method, target, headers, content)
        connection, protocol = await self._connected(way, connect_timeout)
        reused = protocol in self._used
        self._used.add(protocol)
        writing = None
        try:
            protocol.set_response_params(
                skip_payload=method == "HEAD",
                read_until_eof=True,
                auto_decompress=False,
                max_line_size=_HEAD_LIMIT,
                max_field_size=_HEAD_LIMIT,
                max_headers=_MAX_HEADERS,
            )
            writing = _write(protocol, head, content)
            message, body = await _reply(protocol)
        except BaseException as error:
            if writing is not None:
                writing.cancel()
            connection.close()
            if reused and isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError):
                raise Stale(str(error)) from error
            raise
        return UpstreamResponse(connection, message, body, writing)

    async def _connected(self, way: _Way, seconds: float) -> tuple[Connection, ResponseHandler]:
        """A connection on which nothing was said that nobody asked for: it would be taken for the reply."""
        while True:
            try:
                connection = await self._connector.connect(way.asked, [], _timeout(seconds))
            except TimeoutError as error:
                raise aiohttp.ConnectionTimeoutError(f"no connection within {seconds:g} s") from error
            protocol = connection.protocol
            assert protocol is not None
            if protocol not in self._used or not protocol.should_close:
                return connection, protocol
            connection.close()

    def _way(self, route: Route) -> _Way:
        way = self._ways.get(route)
        if way is None:
            way = self._ways[route] = _Way(route)
        return way


class _Way:
    """The way to one origin, and what it asks of the heads that take it."""

    def __init__(self, route: Route) -> None:
        # All that is used of it is that it tells the connector where to connect to.
        self.asked = aiohttp.ClientRequest("GET", route.origin, loop=asyncio.get_running_loop(), proxy=route.proxy)
        self.lines = [f"Host: {self.asked.headers['Host']}".encode("ascii")]
        self.origin = ""
        """What stands in front of the target: a proxy that has to read it needs it whole (RFC 9112, 3.2.2)."""
        if route.proxy is not None and not self.asked.is_ssl():
            self.origin = str(route.origin).rstrip("/")
            if route.proxy.user is not None:
                credentials = aiohttp.encode_basic_auth(route.proxy.user, route.proxy.password or "")
                self.lines.append(f"Proxy-Authorization: {credentials}".encode())


@lru_cache(maxsize=100)
def _timeout(connect: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=None, connect=connect)


def _head(way: _Way, method: str, target: str, headers: Headers, content: Content) -> bytes:
    """Raises ValueError for what no head may have in it."""
    lines = [f"{method} {way.origin}{target} HTTP/1.1".encode("ascii"), *way.lines]
    lines += [b"%b: %b" % header for header in headers]
    lines += _framing(method, headers, content)
    head = b"\n".join(lines)
    if head.count(b"\n") >= len(lines) or _FORBIDDEN.search(head):
        raise ValueError("a control character")
    head.decode()
    return head.replace(b"\n", b"\r\n") + b"\r\n\r\n"


def _framing(method: str, headers: Headers, content: Content) -> list[bytes]:
    """How the other end is to know where the body ends, unless the headers say so."""
    if headers.get_all(b"content-length"):
        return []
    if not isinstance(content, bytes):
        return [b"Transfer-Encoding: chunked"]
    return [b"Content-Length: %d" % len(content)] if content or method not in _WITHOUT_BODY else []


def _write(protocol: ResponseHandler, head: bytes, content: Content) -> asyncio.Task[None] | None:
    """Send head and body: at once what is there, and what is not in a task, for the reply may come before its end."""
    transport = protocol.transport
    if transport is None or transport.is_closing():
        raise aiohttp.ClientOSError("the connection is closed")
    if not isinstance(content, bytes):
        transport.write(head)
        writing = asyncio.create_task(_pour(protocol, content, chunked=head.endswith(b": chunked\r\n\r\n")))
        writing.add_done_callback(lambda task: _broken_off(protocol, task))
        return writing
    if len(content) <= _JOINED:
        transport.write(head + content)
    else:
        transport.writelines((head, content))
    return None


async def _pour(protocol: ResponseHandler, content: AsyncIterator[bytes], *, chunked: bool) -> None:
    writer = StreamWriter(protocol, asyncio.get_running_loop())
    if chunked:
        writer.enable_chunking()
    async for chunk in content:
        await writer.write(chunk)
    await writer.write_eof()


def _broken_off(protocol: ResponseHandler, writing: asyncio.Task[None]) -> None:
    """Whoever waits for the reply hears of it if the request could not be sent to its end."""
    error = None if writing.cancelled() else writing.exception()
    if isinstance(error, OSError):
        protocol.set_exception(aiohttp.ClientOSError(error.errno, str(error)), error)
    elif error is not None:
        protocol.set_exception(aiohttp.ClientConnectionError(f"the request broke off: {error!r}"), error)


async def _reply(protocol: ResponseHandler) -> tuple[RawResponseMessage, StreamReader]:
    """The head, behind those that only say that it will come (RFC 9110, 15.2), and the body."""
    begun = False
    while True:
        try:
            message, content = await protocol.read()
        except HttpProcessingError as error:
            raise aiohttp.ClientPayloadError(error.message) from error
        except aiohttp.ClientConnectionError as error:
            if begun or _within_head(error):
                raise aiohttp.ClientPayloadError("its reply had begun") from error
            raise
        if message.code == 101 or not 100 <= message.code < 200:
            return message, content
        begun = True


def _within_head(error: aiohttp.ClientConnectionError) -> bool:
    """Of an end; of a reset it cannot be known."""
    return isinstance(error, aiohttp.ServerDisconnectedError) and not isinstance(error.message, str)
