"""Sends requests to upstream over an aiohttp session, and raises our own errors.

The session keeps connections and nothing else: no cookies, redirects or decompression, and no
headers of its own.

A pooled connection may break because upstream closed it while it was idle. Then the request is sent
once more, on a new connection. HTTP allows a proxy to repeat a POST only if it knows that the first
one was not applied (RFC 9110, 9.2.2); a server that closes an idle connection does not say so, but
nearly always it is that, and browsers and curl repeat any method then. A body that is streamed is
not kept, and so always gets a new connection.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping
from contextlib import aclosing, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakSet

import aiohttp
import certifi
import msgspec
from yarl import URL

from proxy import __version__
from proxy.errors import (
    BadEncoding,
    ClientFault,
    UpstreamBroken,
    UpstreamFault,
    UpstreamSilent,
    UpstreamUnreachable,
    UserMistake,
)
from proxy.upstream.codings import reply_decoder
from proxy.upstream.headers import Header, Headers
from proxy.upstream.models import Listed, listed_windows
from proxy.upstream.routes import Routes, origin_of

if TYPE_CHECKING:
    from aiohttp.connector import Connection

    from proxy.settings import Settings
    from proxy.telemetry.otel import TracedCall

_HEAD_LIMIT = 256 * 1024
_MAX_HEADERS = 1_000
"""Bytes of one line of a reply's head, and its most lines. Gateways in front of models exceed
aiohttp's defaults."""

_KEPT_ALIVE = 15.0
"""Seconds that an idle connection stays in the pool."""

_STALE_WITHIN = 2.0
"""If a pooled connection breaks within this many seconds, its request is sent again: we learn
within a round trip that the server had closed it. If it breaks later, the server may have worked on
the request."""

CLOSING = 0.25
"""Seconds at the end for connections to close. One whose upstream reads nothing stays open until
all is sent."""

LARGEST_LIST = 8 << 20
"""The most bytes of a list of models. The longest public lists have less than one MiB."""


class UpstreamRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request. Path, query and headers are sent as written; the headers must not have
    hop-by-hop ones.

    A body that is an iterator is sent as it arrives, with the `content-length` among the headers,
    or else chunked. Timeouts are in seconds. `first_byte_timeout` counts from the end of a streamed
    body, otherwise from the connection; `idle_timeout` is the longest time without progress.
    """

    method: str
    url: str
    headers: Headers
    content: bytes | AsyncIterator[bytes]
    connect_timeout: float
    first_byte_timeout: float
    idle_timeout: float


class UpstreamReply(AsyncIterator[bytes]):
    """A reply whose body has not been read yet. Close it even if you read it to the end.

    Iterate over it for the body's chunks as they arrive, not decoded and never empty. That raises
    UpstreamSilent or UpstreamBroken.
    """

    def __init__(self, response: aiohttp.ClientResponse, idle_timeout: float, url: str) -> None:
        self.status = response.status
        self.headers = Headers(response.raw_headers)
        self._response = response
        self._content = response.content
        self._idle_timeout = idle_timeout
        self._url = url
        self._loop = asyncio.get_running_loop()
        self._alarm: asyncio.TimerHandle | None = None
        self._waits_since: float | None = None
        """On the loop's clock; None while nobody waits for a chunk."""
        self.closed: Callable[[], None] | None = None
        """Called once, when the reply is closed."""
        protocol = None if response.connection is None else response.connection.protocol
        self._gone = None if protocol is None else protocol.closed
        if self._gone is not None:
            self._gone.add_done_callback(self._lost)

    @property
    def ended(self) -> bool:
        """Whether the body is known to have ended."""
        return self._content.at_eof()

    async def __anext__(self) -> bytes:
        self._waits_since = self._loop.time()
        if self._alarm is None:
            self._alarm = self._loop.call_later(self._idle_timeout, self._look)
        try:
            chunk = await self._content.readany()
        except TimeoutError as error:
            raise _silent(
                f"Upstream sent nothing for {self._idle_timeout:g} s", self._url
            ) from error
        except aiohttp.ClientError as error:
            raise _translated(error, self._url) from error
        # a broken chunk, now or before this call
        except (aiohttp.http.HttpProcessingError, RuntimeError) as error:
            raise _translated(aiohttp.ClientPayloadError("a broken chunk"), self._url) from error
        finally:
            self._waits_since = None
        if not chunk:
            raise StopAsyncIteration
        return chunk

    async def aclose(self) -> None:
        """Release the connection: it goes back to the pool if the whole reply was read, and is
        closed otherwise."""
        if self._gone is not None:
            self._gone.remove_done_callback(self._lost)
        if self._alarm is not None:
            self._alarm.cancel()
        self._response.close()
        closed = self.closed
        self.closed = None
        if closed is not None:
            closed()

    def _look(self) -> None:
        """End a wait that takes too long. One timer for all chunks, which looks again when the wait
        of now would: a timer for each one costs more than to pass it on."""
        now = self._loop.time()
        since = now if self._waits_since is None else self._waits_since
        left = since + self._idle_timeout - now
        if left > 0:
            self._alarm = self._loop.call_later(left, self._look)
        else:
            self._content.set_exception(TimeoutError())

    def _lost(self, _: object) -> None:
        """Tell whoever waits for more. At a broken chunk, aiohttp closes the connection and does
        not say so."""
        if not self._content.is_eof() and self._content.exception() is None:
            self._content.set_exception(
                aiohttp.ClientPayloadError("the connection was closed within the body")
            )


async def decoded_reply(reply: UpstreamReply) -> AsyncGenerator[bytes, None]:
    """Yield the reply's body, decoded by its `Content-Encoding`. Raises UpstreamBroken if it cannot
    be decoded."""
    codings = b",".join(reply.headers.get_all(b"content-encoding")).decode("latin-1")
    try:
        decoder = reply_decoder(codings)
        async for chunk in reply:
            for number, piece in enumerate(decoder.feed(chunk)):
                if number:
                    await asyncio.sleep(0)  # much may have come at once, and others have theirs
                if piece:
                    yield piece
        decoder.finish()
    except BadEncoding as error:
        raise UpstreamBroken(f"Upstream's reply cannot be decoded: {error.message}") from error


class UpstreamClient:
    """Sends requests over pooled connections. Open it with `async with`, in the event loop that
    sends.

    It uses the environment's proxies and certificates as httpx does, and raises UserMistake if they
    are unusable. `trace` is told of each request's method, URL and content.
    """

    def __init__(
        self, settings: Settings, trace: Callable[[str, str, object], TracedCall] | None = None
    ) -> None:
        self._trace = trace
        self._routes = Routes(settings.environment)
        self._certificates = certificates(settings.environment)
        self._limit = settings.max_connections
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=_Connector(
                limit=self._limit, keepalive_timeout=_KEPT_ALIVE, ssl=self._certificates
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
            auto_decompress=False,
            max_line_size=_HEAD_LIMIT,
            max_field_size=_HEAD_LIMIT,
            max_headers=_MAX_HEADERS,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSING):
                await self._session.close()

    async def send(self, request: UpstreamRequest) -> UpstreamReply:
        """Send a request and return the reply as soon as its head arrives.

        Raises UpstreamUnreachable, UpstreamSilent or UpstreamBroken, or ClientFault for a header
        that HTTP forbids.
        """
        if self._trace is None:
            return await self._sent(request)
        call = self._trace(request.method, request.url, request.content)
        kept = request.headers.without([name for name, _ in call.headers])
        try:
            reply = await self._sent(
                msgspec.structs.replace(request, headers=Headers([*kept, *call.headers]))
            )
        except BaseException as error:
            call.failed(type(error).__name__)
            call.end()
            raise
        call.replied(reply.status)
        reply.closed = call.end
        return reply

    async def _sent(self, request: UpstreamRequest) -> UpstreamReply:
        try:
            if request.headers.has_control_characters():
                raise ValueError("a control character")
            headers = [
                (name.decode("ascii").lower(), value.decode()) for name, value in request.headers
            ]
            bodiless = request.content or request.method in ("GET", "HEAD", "OPTIONS", "TRACE")
            if not bodiless and not request.headers.has(b"content-length"):
                headers.append(("Content-Length", "0"))
            response = await self._once(
                request, headers, fresh=not isinstance(request.content, bytes)
            )
            if response is None:
                response = await self._once(request, headers, fresh=True)
        except aiohttp.ClientError as error:
            raise _translated(error, request.url, self._limit) from error
        except ValueError as error:
            # A control character, or neither ASCII nor UTF-8: forbidden in a head (RFC 9110, 5.5).
            raise ClientFault(
                "A header or the path has characters that cannot be sent on"
            ) from error
        assert response is not None
        reply = UpstreamReply(response, request.idle_timeout, request.url)
        fault = (
            "a header with a control character" if reply.headers.has_control_characters() else ""
        )
        if reply.status < 200:
            fault = f"status {reply.status}"
        if fault:  # aiohttp's parser accepts most control characters; our server, none
            await reply.aclose()
            raise UpstreamBroken(f"Upstream replied with {fault}")
        return reply

    async def _once(
        self, request: UpstreamRequest, headers: list[tuple[str, str]], *, fresh: bool
    ) -> aiohttp.ClientResponse | None:
        """Send once. Returns None if a pooled connection was stale."""
        attempt = _Attempt(fresh)
        _attempt.set(attempt)
        content = request.content
        waits = None
        if isinstance(content, bytes):
            waits = request.connect_timeout + request.first_byte_timeout
        now = asyncio.get_running_loop().time
        began = now()
        try:
            async with asyncio.timeout(waits) as deadline:
                return await self._session.request(
                    request.method,
                    URL(request.url, encoded=True),
                    data=content or None
                    if isinstance(content, bytes)
                    else _uploaded(request, content, deadline),
                    headers=headers,
                    allow_redirects=False,
                    proxy=self._routes.to(origin_of(request.url)),
                    timeout=aiohttp.ClientTimeout(total=None, connect=request.connect_timeout),
                )
        except aiohttp.ConnectionTimeoutError:
            raise
        except TimeoutError as error:
            waited_for = f"no byte within {request.first_byte_timeout:g} s"
            if waits is None:
                waited_for += f", or it took none of the body for {request.idle_timeout:g} s"
            raise _silent(f"Upstream did not begin to reply: {waited_for}", request.url) from error
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
            if not attempt.reused or now() - began > _STALE_WITHIN:
                raise
            return None


class _Attempt(msgspec.Struct):
    """What a request asks of its connection, and what it learns of it."""

    fresh: bool
    reused: bool = False


_attempt: ContextVar[_Attempt] = ContextVar("_attempt")


class _Connector(aiohttp.TCPConnector):
    """aiohttp's pool, which also gives new connections. It drops a connection on which upstream has
    sent something unasked: that would be taken for the next request's reply."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._known: WeakSet[object] = WeakSet()

    async def connect(self, *args: Any, **kwargs: Any) -> Connection:
        """Return a connection. The idle ones that cannot be used, or must not be, are closed."""
        attempt = _attempt.get()
        while True:
            connection = await super().connect(*args, **kwargs)
            protocol = connection.protocol
            assert protocol is not None
            attempt.reused = protocol in self._known
            if not attempt.reused and (closed := protocol.closed):
                # asyncio complains about exceptions that nobody has retrieved.
                closed.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
            self._known.add(protocol)
            if not attempt.reused or not (attempt.fresh or protocol.should_close):
                return connection
            connection.close()


async def _uploaded(
    request: UpstreamRequest, content: AsyncIterator[bytes], deadline: asyncio.Timeout
) -> AsyncGenerator[bytes, None]:
    """Yield a body that arrives while it is sent, and move its request's deadline as upstream
    accepts it."""
    now = asyncio.get_running_loop().time

    def wait(seconds: float | None) -> None:
        with suppress(RuntimeError):  # the reply has begun, and the deadline is past its use
            deadline.reschedule(None if seconds is None else now() + seconds)

    async for chunk in content:
        wait(request.idle_timeout)
        yield chunk
        wait(None)  # a slow client is not upstream's fault
    wait(request.first_byte_timeout)


def certificates(environment: Mapping[str, str]) -> ssl.SSLContext:
    """Load the trusted certificates: SSL_CERT_FILE, else SSL_CERT_DIR, else certifi's list. Raises
    UserMistake."""
    file = environment.get("SSL_CERT_FILE")
    directory = environment.get("SSL_CERT_DIR")
    try:
        if file or not directory:
            return ssl.create_default_context(cafile=file or certifi.where())
        return ssl.create_default_context(capath=directory)
    except OSError as error:
        raise UserMistake(f"SSL_CERT_FILE: {file}: {error.strerror or error}") from error


def _translated(error: aiohttp.ClientError, url: str, limit: int = 0) -> UpstreamFault:
    """Translate aiohttp's error into ours. Its text is only for the operator, as it names addresses
    and quotes the reply."""
    # its text has the proxy's address, password included
    if isinstance(error, aiohttp.ClientHttpProxyError):
        message = f"Upstream cannot be reached: the proxy on the way there answered {error.status}"
        return UpstreamUnreachable(
            message, detail=f"{origin_of(url)}: the outgoing proxy answered {error.status}"
        )
    said = error.message if isinstance(error, aiohttp.ClientResponseError) else str(error)
    said = said.partition("\n")[0].partition(": b'")[0]  # without the quotation
    detail = f"{origin_of(url)}: {type(error).__name__}: {said}"
    match error:
        case aiohttp.ClientConnectorError(os_error=ConnectionRefusedError()):
            detail = f"connection refused at {URL(url).authority}"
            return UpstreamUnreachable("Upstream cannot be reached", detail=detail)
        case aiohttp.ConnectionTimeoutError():
            message = f"Upstream cannot be reached: no connection in time; at most {limit} are open (--max-connections)"
            return UpstreamUnreachable(message, detail=detail)
        case aiohttp.ClientConnectorError() | aiohttp.InvalidURL():
            return UpstreamUnreachable("Upstream cannot be reached", detail=detail)
        case aiohttp.ClientPayloadError() | aiohttp.ClientResponseError():
            return UpstreamBroken(
                "Upstream broke off: its reply is not whole, or not what HTTP allows", detail=detail
            )
        case _:
            return UpstreamBroken("Upstream broke off", detail=detail)


def _silent(message: str, url: str) -> UpstreamSilent:
    return UpstreamSilent(message, detail=f"{origin_of(url)}: {message}")


# -- lists of models --


class ModelList(msgspec.Struct, frozen=True):
    """The reply to `GET /models`: its status, and each model's context window in tokens, None if it
    is not given."""

    status: int
    windows: Listed


async def models(
    client: UpstreamClient,
    base_url: str,
    headers: Iterable[Header],
    seconds: float,
    *,
    read: bool = True,
) -> ModelList:
    """Ask for the models that upstream lists for the holder of the key in `headers`; without
    `read`, only for the status. Raises UpstreamFault."""
    request = UpstreamRequest(
        method="GET",
        url=base_url.rstrip("/") + "/models",
        headers=Headers(
            [
                (b"user-agent", f"offload-proxy/{__version__}".encode()),
                (b"accept", b"*/*"),
                *headers,
            ]
        ),
        content=b"",
        connect_timeout=2 * seconds,  # our own deadline comes first
        first_byte_timeout=seconds,
        idle_timeout=seconds,
    )
    try:
        async with asyncio.timeout(seconds), aclosing(await client._sent(request)) as reply:
            whole = bytearray()
            if read:
                async with aclosing(decoded_reply(reply)) as pieces:
                    async for piece in pieces:
                        whole += piece
                        if len(whole) > LARGEST_LIST:
                            raise UpstreamBroken(
                                f"The list of models is larger than {LARGEST_LIST} bytes"
                            )
            return ModelList(reply.status, listed_windows(bytes(whole)))
    except ClientFault as error:  # from our own headers and the policy's address
        raise UpstreamBroken(f"Upstream cannot be asked: {error.message}") from error
    except TimeoutError as error:
        raise UpstreamSilent(f"no answer within {seconds:g} s") from error
