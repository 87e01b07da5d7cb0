"""Requests to upstream and their replies, as raw bytes: one pool of connections per process.

Driven is aiohttp's session. httpx-aiohttp's transport stands on the same session and was tried first, but it quotes
paths anew (`|` to `%7C`), drops an empty query, and joins repeated headers; a relay has to leave all three alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TYPE_CHECKING, Self
from weakref import WeakSet

import aiohttp
import msgspec

from proxy.codings import Decoder
from proxy.errors import (
    BadEncoding,
    ClientFault,
    UpstreamBroken,
    UpstreamFault,
    UpstreamSilent,
    UpstreamUnreachable,
)
from proxy.headers import Headers
from proxy.outgoing import Routes, certificates

if TYPE_CHECKING:
    from aiohttp.client import ClientTimeout
    from aiohttp.client_proto import ResponseHandler
    from aiohttp.connector import Connection
    from aiohttp.tracing import Trace

    from proxy.settings import Settings

_HEAD_LIMIT = 256 * 1024
"""Bytes that one line of a reply's head may have. aiohttp's 8 KiB are below what gateways in front of models send."""

_MAX_HEADERS = 1_000

_KEPT_ALIVE = 15.0
"""Seconds that an idle connection stays in the pool."""

_STALE_WITHIN = 2.0
"""Seconds within which a pooled connection has to break for its request to be sent once more. A server that closes
an idle connection does so on its own clock, so a request can cross it on the way; the answer to that takes one round
trip. Breaking later, the server may have been at work on the request."""

_REPLAY_LIMIT = 1024 * 1024
"""Bytes of a streamed request body that are remembered in case it has to be sent once more."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request. `url` goes out as it is written, byte for byte, and so do the headers, in their order.

    A body that is an iterator is sent as it comes: under the `content-length` among the headers, or else chunked.
    Cancelling its `__anext__` must lose nothing, for the body may be taken up again on another connection.
    Timeouts are seconds: to connect; from the body's end to the reply's first byte; and without any progress.
    """

    method: str
    url: str
    headers: Headers
    content: bytes | AsyncIterator[bytes]
    connect_timeout: float
    first_byte_timeout: float
    idle_timeout: float


class Reply:
    """A reply whose body has yet to be read. It has to be closed, read to its end or not."""

    def __init__(self, response: aiohttp.ClientResponse, idle_timeout: float) -> None:
        self.status = response.status
        self.headers: Headers = list(response.raw_headers)
        self._response = response
        self._idle_timeout = idle_timeout

    @property
    def ended(self) -> bool:
        """Whether no chunk is left, as far as is known: what has been read may have been the last."""
        return self._response.content.at_eof()

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The body as it arrives, neither decoded nor empty. Raises UpstreamSilent or UpstreamBroken."""
        content = self._response.content
        try:
            while not content.at_eof():
                if chunk := content.read_nowait() or await self._next():
                    yield chunk
        except aiohttp.ClientError as error:
            raise _translated(error) from error

    async def _next(self) -> bytes:
        try:
            async with asyncio.timeout(self._idle_timeout):
                return await self._response.content.readany()
        except TimeoutError as error:
            raise UpstreamSilent(f"Upstream sent nothing for {self._idle_timeout:g} s") from error

    async def aclose(self) -> None:
        """Let go of the connection: back to the pool after the last byte, closed at once before."""
        self._response.close()


async def decoded(reply: Reply) -> AsyncGenerator[bytes, None]:
    """The reply's chunks with its `Content-Encoding` undone. Raises UpstreamBroken where that cannot be."""
    codings = [value.decode("latin-1") for name, value in reply.headers if name.lower() == b"content-encoding"]
    try:
        decoder = Decoder(",".join(codings))
        async for chunk in reply.chunks():
            for piece in decoder.feed(chunk):
                yield piece
        decoder.finish()
    except BadEncoding as error:
        raise UpstreamBroken(f"Upstream's reply cannot be decoded: {error.message}") from error


class Upstream:
    """The pool: open within `async with`, which is to happen in the event loop that sends.

    Nothing is kept between requests but connections: no cookies, no redirects, no credentials of any `.netrc`. The
    environment's outgoing proxies and certificates count as they do for httpx's users. Raises UserMistake where they
    cannot be used.
    """

    def __init__(self, settings: Settings) -> None:
        self._routes = Routes(settings.environment)
        self._ssl = certificates(settings.environment)
        self._max_connections = settings.max_connections
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> Self:
        connector = _Connector(limit=self._max_connections, keepalive_timeout=_KEPT_ALIVE, ssl=self._ssl)
        self._session = aiohttp.ClientSession(
            connector=connector,
            request_class=_Request,
            middlewares=(_tell_stale,),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent", "Content-Type"),
            max_line_size=_HEAD_LIMIT,
            max_field_size=_HEAD_LIMIT,
            max_headers=_MAX_HEADERS,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def send(self, request: Request) -> Reply:
        """The reply, as soon as its head is there.

        Raises UpstreamUnreachable, UpstreamSilent or UpstreamBroken, or ClientFault for a header that HTTP forbids.
        """
        body = _Body(request)
        started = asyncio.get_running_loop().time()
        try:
            return await self._attempt(request, body)
        except _Stale as stale:
            if body.spent or asyncio.get_running_loop().time() - started > _STALE_WITHIN:
                raise _translated(stale) from stale
        try:
            return await self._attempt(request, body)
        except _Stale as stale:
            raise _translated(stale) from stale

    async def _attempt(self, request: Request, body: _Body) -> Reply:
        """Send once. Raises _Stale, untranslated, where a pooled connection turned out to be gone."""
        try:
            async with asyncio.timeout(None) as deadline:
                response = await self._exchange(request, body.attempt(deadline))
                body.settle()
        except _Stale:
            raise
        except aiohttp.ClientError as error:
            raise _translated(error) from error
        except TimeoutError as error:
            raise UpstreamSilent(f"Upstream did not begin to reply: {body.waited_for}") from error
        except ValueError as error:
            # Neither ASCII nor UTF-8, or a control character (RFC 9110, 5.5): aiohttp cannot or will not send it.
            raise ClientFault("A header or the path has characters that cannot be sent on") from error
        reply = Reply(response, request.idle_timeout)
        if not 200 <= reply.status < 600:
            await reply.aclose()
            raise UpstreamBroken(f"Upstream replied with status {reply.status}")
        return reply

    async def _exchange(self, request: Request, content: bytes | AsyncIterator[bytes] | None) -> aiohttp.ClientResponse:
        scheme, _, rest = request.url.partition("://")
        authority, _, target = rest.partition("/")
        route = self._routes.to(scheme, authority)
        return await self._session.request(
            request.method,
            # The query is left in the path, where nobody looks for it: taken apart, an empty one would be lost.
            route.origin.with_path("/" + target, encoded=True),
            headers=_spelled(request.headers),
            data=content,
            allow_redirects=False,
            proxy=route.proxy,
            timeout=aiohttp.ClientTimeout(total=None, connect=request.connect_timeout),
        )


class _Body:
    """A request's body, for as many attempts as it can be had, moving the attempt's deadline as upstream takes it."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._kept: list[bytes] = []
        self._size = 0
        self._deadline: asyncio.Timeout | None = None
        self.waited_for = ""
        """What upstream was given time for, in words."""

    @property
    def spent(self) -> bool:
        """Whether the body's beginning is gone and it cannot be sent again."""
        return self._size > _REPLAY_LIMIT

    def attempt(self, deadline: asyncio.Timeout) -> bytes | AsyncIterator[bytes] | None:
        """The body from its beginning, under a new deadline. None: there is none."""
        self._deadline = deadline
        if isinstance(self._request.content, bytes):
            self._await_reply(self._request.connect_timeout)
            return self._request.content or None
        return self._stream(self._request.content)

    def settle(self) -> None:
        """The reply has begun: the deadline is met, even if the body goes on."""
        self._deadline = None

    async def _stream(self, source: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        for chunk in tuple(self._kept):
            self._await_progress()
            yield chunk
        self._await_client()
        async for chunk in source:
            self._keep(chunk)
            self._await_progress()
            yield chunk
            self._await_client()
        self._await_reply()

    def _keep(self, chunk: bytes) -> None:
        self._size += len(chunk)
        if self.spent:
            self._kept.clear()
        else:
            self._kept.append(chunk)

    def _await_client(self) -> None:
        self._give(None, "")

    def _await_progress(self) -> None:
        idle = self._request.idle_timeout
        self._give(idle, f"it took none of the request for {idle:g} s")

    def _await_reply(self, connecting: float = 0) -> None:
        silent = self._request.first_byte_timeout
        self._give(connecting + silent, f"no byte within {silent:g} s")

    def _give(self, seconds: float | None, waited_for: str) -> None:
        if self._deadline is not None:
            now = asyncio.get_running_loop().time()
            self._deadline.reschedule(None if seconds is None else now + seconds)
            self.waited_for = waited_for


class _Stale(aiohttp.ClientError):
    """A connection from the pool broke before it gave a byte of the reply."""


class _Request(aiohttp.ClientRequest):
    reused = False
    """Whether the connection has carried another request before."""


class _Connector(aiohttp.TCPConnector):
    """Tells each request whether its connection is new."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self._used: WeakSet[ResponseHandler] = WeakSet()

    async def connect(self, req: aiohttp.ClientRequest, traces: list[Trace], timeout: ClientTimeout) -> Connection:  # noqa: ASYNC109
        connection = await super().connect(req, traces, timeout)
        protocol = connection.protocol
        assert isinstance(req, _Request) and protocol is not None
        req.reused = protocol in self._used
        self._used.add(protocol)
        return connection


async def _tell_stale(request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
    try:
        return await send(request)
    except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
        if isinstance(request, _Request) and request.reused:
            raise _Stale(str(error)) from error
        raise


def _spelled(headers: Headers) -> list[tuple[str, str]]:
    """As text, a repeated name in its first spelling: aiohttp takes `X-A` after `x-a` for its replacement."""
    first: dict[bytes, bytes] = {}
    return [(first.setdefault(name.lower(), name).decode(), value.decode()) for name, value in headers]


_UNREACHABLE = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, aiohttp.ClientHttpProxyError)


def _translated(error: aiohttp.ClientError) -> UpstreamFault:
    if isinstance(error, _UNREACHABLE):
        return UpstreamUnreachable(f"Upstream cannot be reached: {error}")
    return UpstreamBroken(f"Upstream broke off: {error or type(error).__name__}")
