"""Sends requests to upstream and reads the replies as raw bytes, with timeouts, and raises our own errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Self

import aiohttp
import msgspec

from proxy.errors import (
    BadEncoding,
    ClientFault,
    UpstreamBroken,
    UpstreamFault,
    UpstreamSilent,
    UpstreamUnreachable,
)
from proxy.upstream.connections import Exhausted
from proxy.upstream.content_encoding import reply_decoder
from proxy.upstream.egress import Routes, certificates
from proxy.upstream.headers import Headers
from proxy.upstream.pool import ConnectionPool, Content, Stale, UpstreamResponse
from proxy.upstream.traffic import Traffic

if TYPE_CHECKING:
    from proxy.settings import Settings

_BREATH = 0.002
"""Seconds of work on one chunk of a reply, including its reader's work, after which the event loop serves others."""

_PIECE = 16 * 1024
"""Bytes of a reply that are passed on at once. So many may hold thousands of events."""


class UpstreamRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request. `url` and headers are sent byte for byte, the headers in their order.

    A body that is an iterator is sent as it arrives, with the `content-length` among the headers, or else chunked.
    Timeouts are in seconds. `first_byte_timeout` counts from the end of a streamed body, otherwise from the connection;
    `idle_timeout` is the longest time without progress.
    """

    method: str
    url: str
    headers: Headers
    content: bytes | AsyncIterator[bytes]
    connect_timeout: float
    first_byte_timeout: float
    idle_timeout: float
    aside: bool = False
    """No client waits for it: it does not count in `UpstreamClient.traffic`."""

    @property
    def origin(self) -> str:
        """Scheme, host and port."""
        return _origin(self.url)


class UpstreamReply(AsyncIterator[bytes]):
    """A reply whose body has not been read yet. Close it even if you read it to the end.

    Iterate over it for the body's chunks as they arrive, not decoded and never empty. That raises UpstreamSilent or
    UpstreamBroken.
    """

    def __init__(self, answer: UpstreamResponse, idle_timeout: float, url: str) -> None:
        self.status = answer.status
        self.headers = answer.headers
        self._answer = answer
        self._idle_timeout = idle_timeout
        self._url = url
        self.closed: Callable[[], None] | None = None
        """Called once, when the reply is closed."""

    @property
    def timed_out_idle(self) -> bool:
        """See `UpstreamResponse.timed_out_idle`."""
        return self._answer.timed_out_idle

    @property
    def ended(self) -> bool:
        """Whether the body is known to have ended."""
        return self._answer.content.at_eof()

    async def __anext__(self) -> bytes:
        content = self._answer.content
        try:
            while not content.at_eof():
                if chunk := content.read_nowait() or await self._answer.next(self._idle_timeout):
                    return chunk
        except TimeoutError as error:
            raise _silent(f"Upstream sent nothing for {self._idle_timeout:g} s", self._url) from error
        except aiohttp.ClientError as error:
            raise _translated(error, self._url) from error
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Release the connection: it goes back to the pool if the whole reply was read, and is closed otherwise."""
        self._answer.close()
        if self.closed is not None:
            closed, self.closed = self.closed, None
            closed()


async def decoded(reply: UpstreamReply) -> AsyncGenerator[bytes, None]:
    """Yield the reply's body, decoded by its `Content-Encoding`. Raises UpstreamBroken if it cannot be decoded."""
    codings = b",".join(reply.headers.get_all(b"content-encoding")).decode("latin-1")
    try:
        decoder = reply_decoder(codings)
        clock = asyncio.get_running_loop().time
        async for chunk in reply:
            rested = clock()
            for piece in decoder.feed(chunk):
                for start in range(0, len(piece), _PIECE):
                    yield piece[start : start + _PIECE]
                    if clock() - rested > _BREATH:
                        await asyncio.sleep(0)
                        rested = clock()
                if not piece and clock() - rested > _BREATH:
                    await asyncio.sleep(0)
                    rested = clock()
        decoder.finish()
    except BadEncoding as error:
        raise UpstreamBroken(f"Upstream's reply cannot be decoded: {error.message}") from error


class UpstreamClient:
    """Sends requests over pooled connections. Open it with `async with`, in the event loop that sends.

    Between requests it keeps connections and nothing else: no cookies, no redirects, no credentials from `.netrc`.
    It uses the environment's proxies and certificates as httpx does, and raises UserMistake if they are unusable.
    """

    def __init__(self, settings: Settings) -> None:
        self._routes = Routes(settings.environment)
        self._pool = ConnectionPool(certificates(settings.environment), settings.max_connections)
        self.traffic = Traffic()
        """The requests of clients that are under way."""

    async def __aenter__(self) -> Self:
        await self._pool.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._pool.__aexit__()

    async def send(self, request: UpstreamRequest) -> UpstreamReply:
        """Send a request and return the reply as soon as its head arrives.

        Raises UpstreamUnreachable, UpstreamSilent or UpstreamBroken, or ClientFault for a header that HTTP forbids.
        """
        origin = request.origin
        if request.aside:
            return await self._send(request, origin)
        self.traffic.began(origin)
        try:
            reply = await self._send(request, origin)
        except BaseException:
            self.traffic.ended(origin)
            raise
        reply.closed = partial(self.traffic.ended, origin)
        return reply

    async def _send(self, request: UpstreamRequest, origin: str) -> UpstreamReply:
        """Send a request, and send it once more, on a new connection, if a pooled one turns out to be closed.

        HTTP lets a proxy repeat a POST only if it can tell that the first one was not applied (RFC 9110, 9.2.2). A
        server that closes an idle connection does not say so, but nearly always it is that, and browsers and curl
        repeat any method then. To a client that knows nothing of our connections, the error would make no sense; and
        the SDKs would repeat the request after a 502, whatever had happened to it. A streamed body is not kept, and
        never gets a pooled connection.
        """
        with suppress(Stale):
            reply = await self._attempt(request, origin)
            if not reply.timed_out_idle:
                return reply
            await reply.aclose()
        return await self._attempt(request, origin, fresh=True)

    async def _attempt(self, request: UpstreamRequest, origin: str, *, fresh: bool = False) -> UpstreamReply:
        """Send once. Raises Stale, untranslated, if a pooled connection turns out to be closed."""
        body = None if isinstance(request.content, bytes) else _StreamedBody(request, request.content)
        try:
            if body is None:
                first_byte = request.first_byte_timeout
                answer = await self._exchange(request, origin, request.content, first_byte, fresh=fresh)
            else:
                async with asyncio.timeout(None) as deadline:
                    answer = await self._exchange(request, origin, body.stream(deadline), None, fresh=fresh)
                    body.settle()
        except Stale:
            raise
        except aiohttp.ClientError as error:
            raise _translated(error, request.url) from error
        except TimeoutError as error:
            waited_for = _no_byte(request) if body is None else body.waited_for
            raise _silent(f"Upstream did not begin to reply: {waited_for}", request.url) from error
        except ValueError as error:
            # A control character, or neither ASCII nor UTF-8: forbidden in a head (RFC 9110, 5.5).
            raise ClientFault("A header or the path has characters that cannot be sent on") from error
        reply = UpstreamReply(answer, request.idle_timeout, request.url)
        if not 200 <= reply.status < 600:
            await reply.aclose()
            raise UpstreamBroken(f"Upstream replied with status {reply.status}")
        if reply.headers.has_control_characters():  # aiohttp's parser accepts most of them; our server, none
            await reply.aclose()
            raise UpstreamBroken("Upstream's reply has a header with a control character")
        return reply

    async def _exchange(
        self, request: UpstreamRequest, origin: str, content: Content, first_byte: float | None, *, fresh: bool
    ) -> UpstreamResponse:
        target = request.url.removeprefix(origin)
        if not target.startswith("/"):
            target = "/" + target  # a query may directly follow the authority (RFC 3986, 3)
        route = self._routes.to(origin)
        method, headers, connect_timeout = request.method, request.headers, request.connect_timeout
        return await self._pool.ask(route, method, target, headers, content, connect_timeout, first_byte, fresh=fresh)


class _StreamedBody:
    """A body that arrives while it is sent. It moves its request's deadline as upstream accepts it."""

    def __init__(self, request: UpstreamRequest, source: AsyncIterator[bytes]) -> None:
        self._request = request
        self._source = source
        self._deadline: asyncio.Timeout | None = None
        self.waited_for = ""
        """What upstream failed to do in time, in words."""

    async def stream(self, deadline: asyncio.Timeout) -> AsyncIterator[bytes]:
        """Yield the body, and move the deadline."""
        self._deadline = deadline
        self._await_client()
        async for chunk in self._source:
            self._await_progress()
            yield chunk
            self._await_client()
        self._await_reply()

    def settle(self) -> None:
        """Lift the deadline: the reply has begun, even if the body is still being sent."""
        self._deadline = None

    def _await_client(self) -> None:
        self._give(None, "")

    def _await_progress(self) -> None:
        idle = self._request.idle_timeout
        self._give(idle, f"it took none of the request for {idle:g} s")

    def _await_reply(self) -> None:
        self._give(self._request.first_byte_timeout, _no_byte(self._request))

    def _give(self, seconds: float | None, waited_for: str) -> None:
        if self._deadline is not None:
            now = asyncio.get_running_loop().time()
            self._deadline.reschedule(None if seconds is None else now + seconds)
            self.waited_for = waited_for


def _no_byte(request: UpstreamRequest) -> str:
    return f"no byte within {request.first_byte_timeout:g} s"


_UNREACHABLE = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)


def _translated(error: aiohttp.ClientError, url: str) -> UpstreamFault:
    """Translate aiohttp's error into ours. Its text is only for the operator, as it names addresses and quotes the
    reply."""
    if isinstance(error, aiohttp.ClientHttpProxyError):  # its text has the proxy's address, password included
        message = f"Upstream cannot be reached: the proxy on the way there answered {error.status}"
        return UpstreamUnreachable(message, detail=f"{_origin(url)}: the outgoing proxy answered {error.status}")
    said = str(error).partition("\n")[0].partition(": b'")[0]  # without the quotation
    detail = f"{_origin(url)}: {type(error).__name__}: {said}"
    if isinstance(error, Exhausted):
        return UpstreamUnreachable(f"Upstream cannot be reached: {error} (--max-connections)", detail=detail)
    if isinstance(error, _UNREACHABLE):
        return UpstreamUnreachable("Upstream cannot be reached", detail=detail)
    if isinstance(error, aiohttp.ClientPayloadError):
        return UpstreamBroken("Upstream broke off: its reply is not whole, or not what HTTP allows", detail=detail)
    return UpstreamBroken("Upstream broke off", detail=detail)


def _silent(message: str, url: str) -> UpstreamSilent:
    return UpstreamSilent(message, detail=f"{_origin(url)}: {message}")


def _origin(url: str) -> str:
    """Scheme, host and port, without the path, which may be the client's own."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.partition('/')[0].partition('?')[0]}"
