"""uvicorn's HTTP/1.1 protocol, made exact and bounded: a relay needs more of a request than ASGI carries, and no client
may take more than its share of our resources.

`_reading` says what a connection is reading:

             first byte        head whole         body whole
    NOTHING ───────────> HEAD ───────────> BODY ───────────> NOTHING
                           │                 │
                           └────────┬────────┘
       a fault, a deadline, a reply that ended before its request, more requests than may wait
                                    ▼
                                  DEAF    input is counted and dropped, and never parsed again; after the last
                                          reply, the connection lingers for a moment and is closed

Requests are answered in the order in which they arrive. `cycle` is the request that is being read or was read last.
`pipeline` holds the requests, and our own refusals, that wait for an earlier reply to end.
"""

from __future__ import annotations

import asyncio
import enum
import urllib.parse
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from proxy.errors import BadRequest, HeadTooLarge, ProxyError, RequestTimeout, Unsupported
from proxy.requests.exchange import RAW, Exchange, Raw
from proxy.server.cycle import Cycle
from proxy.server.held_head import HeldHead
from proxy.server.inbound import IDLE_SECONDS, Inbound
from proxy.upstream.headers import Headers

if TYPE_CHECKING:
    from proxy.upstream.headers import Header

HEAD_BYTES = 64 * 1024
"""Most bytes of a request line with its headers, of trailers, and of the framing between two pieces of a body. Twice
what upstreams commonly accept, so that the upstream is the one to refuse."""

HEAD_FIELDS = 200
"""Most header lines of a request; twice Apache's limit. Trailers have the same limit."""

PIPELINED = 64
"""Most requests of one connection that wait for a reply. After these we close the connection, which asks the client to
send the rest again (RFC 9112, 9.3.2)."""

LINGER_BYTES = 1 << 20
"""Most bytes that we read and drop of a request that is already answered. If we closed the connection with bytes
unread, the reset could destroy our reply before a client that is still sending had read it (RFC 9112, 9.6)."""

LINGER_SECONDS = 5.0
"""Seconds that such a connection stays open; nginx's `lingering_timeout`."""

LOOKS, LOOK_SECONDS = 3, 0.02
"""How often, and how soon again, we look for a request on an idle connection when the process ends. One may have come
that is not read yet: its client would get nothing but a reset."""

UNREAD_SECONDS = 600.0
"""Seconds within which a client must read some of a reply that waits for it; an upstream may be silent for as long."""


class _Reading(enum.Enum):
    NOTHING = enum.auto()
    HEAD = enum.auto()
    BODY = enum.auto()
    DEAF = enum.auto()


NOTHING, HEAD, BODY, DEAF = _Reading

_FRAMING = (b"content-length", b"transfer-encoding")


class ExactProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which also passes on what ASGI's scope loses of a request; see `exchange.RAW`."""

    raw_headers: Headers
    cycle: Cycle | None  # type: ignore[assignment]

    def __init__(self, *args: Any, inbound: Inbound, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.inbound = inbound
        self._watching: set[Callable[[], object]] = set()
        self._reading = NOTHING
        self._since = 0
        """Bytes received since the head began, or since the last piece of the body."""
        self._segment = self._most = 0
        """Bytes of the last read, and the most bytes that the head can have."""
        self._resumes = False
        """Whether the parser is reading a head that we made; see `_read_on`."""
        self._lingers = self._ends = False
        self._dropped = 0
        self._unsent = 0

    # The connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(cast("asyncio.Transport", HeldHead(transport, self.loop)))
        self.inbound.run(self.loop)
        self.inbound.opened()
        self._wait(IDLE_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._reading = DEAF
        self.inbound.deadlines.pop(self, None)
        self.inbound.closed()
        for cycle, _ in self.pipeline:
            cast("Cycle", cycle).let_go()
        self.pipeline.clear()
        self._tell()

    def watch(self, left: Callable[[], object]) -> Callable[[], object]:
        """Call `left` when the client hangs up, or soon if it already has. Returns a function that cancels this."""
        self._watching.add(left)
        if self.transport.is_closing():
            self.loop.call_soon(self._tell)
        return lambda: self._watching.discard(left)

    def _tell(self) -> None:
        for left in tuple(self._watching):
            left()

    def shutdown(self, looks: int = LOOKS) -> None:
        self._ends = True
        if self._lingers:
            self._close()
        elif looks and (self.cycle is None or self.cycle.response_complete):
            self.loop.call_later(LOOK_SECONDS, self.shutdown, looks - 1)
        else:
            super().shutdown()

    def _close(self) -> None:
        self.transport.close()
        self._wait(UNREAD_SECONDS)  # the transport closes only after it has sent its buffer

    def _linger(self) -> None:
        """End our side of the connection, and give the client time to read the replies."""
        self._reading, self._lingers = DEAF, True
        self.transport.write_eof()
        if self._dropped <= LINGER_BYTES:
            self.flow.resume_reading()
        self._wait(LINGER_SECONDS)

    # Deadlines

    def _wait(self, seconds: float) -> None:
        if self.flow.write_paused:
            seconds = UNREAD_SECONDS
        self.inbound.deadlines[self] = self.loop.time() + seconds

    def _stop_waiting(self) -> None:
        if not self.flow.write_paused:
            self.inbound.deadlines.pop(self, None)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unsent = self.transport.get_write_buffer_size()
        self._wait(UNREAD_SECONDS)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._lingers:
            self._wait(LINGER_SECONDS)
        elif self._reading is HEAD:
            self._wait(self.inbound.head_seconds)
        elif self._reading is BODY:
            self._wait(self.inbound.body_seconds)
        elif self.cycle is None or self.cycle.response_complete:
            self._wait(IDLE_SECONDS)
        else:
            self._stop_waiting()

    def expire(self) -> None:
        """Close the connection or refuse the request, unless the client made progress or the delay is ours."""
        if self.flow.write_paused or self.transport.is_closing():
            unsent, self._unsent = self._unsent, self.transport.get_write_buffer_size()
            if self._unsent < unsent:
                self._wait(UNREAD_SECONDS)
            else:
                self.transport.abort()
        elif self._lingers or self._reading is NOTHING:
            self._close()
        elif self.flow.read_paused:
            self._wait(self.inbound.body_seconds)  # we paused reading: the client is not the slow one
        elif self._reading is HEAD:
            self.refuse(
                RequestTimeout(f"The request's head was not whole within {self.inbound.head_seconds:g} seconds")
            )
        elif self._reading is BODY:
            seconds = self.inbound.body_seconds
            self.refuse(RequestTimeout(f"Nothing came of the request's body for {seconds:g} seconds (--body-timeout)"))

    def unfinished(self) -> Cycle | None:
        """Return the request whose body is being read, if there is one."""
        return self.cycle if self._reading is BODY else None

    def idle(self) -> bool:
        """Return whether closing the connection now would lose nothing."""
        answered = self.cycle is None or self.cycle.response_complete
        return answered and self._reading is not BODY and not self.flow.write_paused

    # Input

    def data_received(self, data: bytes) -> None:
        if self._reading is DEAF:
            self._drop(len(data))
            return
        self._segment = len(data)
        self._since += self._segment
        self._most += self._segment
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            if self._reading is DEAF:
                self._drop(len(data))
                return
            reason = error.__context__
            self.refuse(reason if isinstance(reason, ProxyError) else BadRequest("This is no valid HTTP/1.1 request"))
            return
        if self._reading is NOTHING:
            return
        if self._since > HEAD_BYTES:
            self.refuse(_too_large())
        elif self._reading is BODY:
            self._wait(self.inbound.body_seconds)
        elif not self._since:
            self._wait(self.inbound.head_seconds)

    def _parse(self, data: bytes) -> None:
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                data = data[offer.args[0] :]
                self._read_on()

    def _read_on(self) -> None:
        """Ignore an offer to switch to another protocol (RFC 9110, 7.8).

        Java's client makes such an offer with its first request, with or without a body. The parser takes everything
        after the head for the other protocol, so a new parser gets a head with the same framing and reads the body.
        """
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        framing = [b"%b: %b\r\n" % header for header in self.headers if header[0] in _FRAMING]
        self._resumes = True
        try:
            self.parser.feed_data(b"POST / HTTP/1.1\r\n" + b"".join(framing) + b"\r\n")
        finally:
            self._resumes = False

    def _drop(self, size: int) -> None:
        self._dropped += size
        if self._dropped > LINGER_BYTES:
            self.flow.pause_reading()

    def refuse(self, error: ProxyError) -> None:
        """Answer the request that is being read with an error when its turn comes, and read no more."""
        self.inbound.warn(str(error.status), f"refused a request with {error.status}: {error.message}")
        reading, self._reading = self._reading, DEAF
        self._stop_waiting()
        if reading is BODY and self.cycle is not None:
            self.cycle.fail(error)
            return
        super().on_message_begin()
        self.scope.update({"method": "GET", "path": "/", "raw_path": b"/", "query_string": b""})
        self._queue(Cycle(self, keep_alive=False), _refusal(error))

    # The parser's callbacks

    def on_message_begin(self) -> None:
        if self._resumes:
            return
        if self.cycle is not None and (not self.cycle.keep_alive or len(self.pipeline) >= PIPELINED):
            self.cycle.keep_alive = False
            self._reading = DEAF
            raise _Enough
        super().on_message_begin()
        self.raw_headers = Headers()
        self._reading, self._since, self._most = HEAD, 0, self._segment

    def on_url(self, url: bytes) -> None:
        if not self._resumes:
            self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        headers = self.raw_headers
        if len(headers) >= HEAD_FIELDS:
            raise _too_large()
        headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self._resumes:
            return
        if self._most > HEAD_BYTES:
            head = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.raw_headers)
            if head > HEAD_BYTES:
                raise _too_large()
        self.headers += self.raw_headers.lowered()
        fields = dict(self.headers)
        if b"transfer-encoding" in fields and _codings(self.headers) != [b"chunked"]:
            # RFC 9112, 6.1. If we relayed only the content, it would no longer be known how it is encoded.
            raise Unsupported("No `Transfer-Encoding` but chunked is understood; use `Content-Encoding`")
        self.expect_100_continue = fields.get(b"expect", b"").lower() == b"100-continue"
        version = self.parser.get_http_version()
        raw_path, query = _split(self.url)
        path = raw_path.decode("ascii")
        scope: Any = self.scope
        scope["method"] = method = self.parser.get_method().decode("ascii")
        if method == "CONNECT":
            # An upstream that accepts it takes the connection for a tunnel from then on (RFC 9110, 9.3.6).
            raise Unsupported("CONNECT is not relayed: this proxy is no tunnel")
        scope["http_version"] = version
        scope["path"] = urllib.parse.unquote(path) if "%" in path else path
        scope["raw_path"] = raw_path
        scope["query_string"] = query
        cycle = Cycle(self, keep_alive=version != "1.0" and self.parser.should_keep_alive() and not self._ends)
        raw: Raw = {
            "target": self.url,
            "headers": self.raw_headers,
            "fields": fields,
            "watch": self.watch,
            "body": cycle,
            "push": cycle.push,
        }
        scope["extensions"] = {RAW: raw}
        # A trailer must not pass for a header and may be dropped (RFC 9110, 6.5.1). `_read_on` feeds headers, too.
        self.raw_headers = Headers()
        self._reading, self._since = BODY, 0
        self._queue(cycle, self.app)

    def on_body(self, body: bytes) -> None:
        self._since = 0
        if self.cycle is not None:
            self.cycle.take(body)

    def on_message_complete(self) -> None:
        if self._resumes or not self.parser.should_upgrade():
            self._reading = NOTHING
            self._stop_waiting()
            assert self.cycle is not None
            self.cycle.more_body = False
            self.cycle.message_event.set()
            if not self.pipeline:
                # Reading may be paused for this body, which is now whole. We notice a hang-up only while we read.
                self.flow.resume_reading()

    # Output

    def _queue(self, cycle: Cycle, app: Callable[..., Awaitable[None]]) -> None:
        earlier, self.cycle = self.cycle, cycle
        if earlier is None or earlier.response_complete:
            self._start_asgi_task(cycle, app)
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((cycle, app))

    def answered(self, cycle: Cycle) -> None:
        """Start the next request, or close the connection, now that the reply is written."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        if not cycle.keep_alive and (cycle.more_body or self._reading is not NOTHING):
            self._linger()
        elif not cycle.keep_alive:
            self._close()
        elif self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        else:
            self.flow.resume_reading()
            if self._reading is NOTHING:
                self._wait(IDLE_SECONDS)


class _Enough(Exception):
    """Stops the parser: the connection takes no more requests."""


def _refusal(error: ProxyError) -> Callable[..., Awaitable[None]]:
    """Return an application that replies with `error`, for a request that was never read in full."""

    async def refuse(scope: Any, receive: Any, send: Any) -> None:
        await Exchange(scope, receive, send).fail(error)

    return refuse


def _too_large() -> HeadTooLarge:
    return HeadTooLarge(
        f"The request's head, its trailers or a chunk's extensions have more than {HEAD_BYTES} bytes or "
        f"{HEAD_FIELDS} fields"
    )


def _codings(headers: Iterable[Header]) -> list[bytes]:
    """Return each header line that says how the body is transferred."""
    return [value.strip().lower() for name, value in headers if name == b"transfer-encoding"]


def _split(target: bytes) -> tuple[bytes, bytes]:
    """Return the path and query of a request's target. Raises HttpParserError if it is invalid."""
    url = httptools.parse_url(target)
    return url.path, url.query or b""
