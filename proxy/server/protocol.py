"""uvicorn's HTTP/1.1 protocol, bounded: no client may take more than its share of our time, memory
and connections.

`_reading` says what a connection is reading:

             first byte        head whole         body whole
    NOTHING ───────────> HEAD ───────────> BODY ───────────> NOTHING
                           │                 │
                           └────────┬────────┘
       a fault, a deadline, a reply that ended before its request, more requests than may wait
                                    ▼
                                  DEAF    input is counted and dropped, and never parsed again; after the last
                                          reply, the connection lingers for a moment and is closed

The connections of a process share its `Bounds`. It uses uvicorn's public attributes (`cycle`,
`flow`, `pipeline`, `parser`, `transport`) and the callbacks of asyncio and httptools, and leaves
requests and replies to uvicorn. It adds one object to ASGI's scope, `Inflow`.
"""

from __future__ import annotations

import asyncio
import enum
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from proxy.errors import (
    BadRequest,
    HeadTooLarge,
    ProxyError,
    RequestTimeout,
    Unsupported,
    UpgradeRefused,
)
from proxy.requests.exchange import RAW, Exchange
from proxy.server.access import Bounds, Inflow, Presence

# upstreams may send these
STATUS_LINE.update({status: b"HTTP/1.1 %d \r\n" % status for status in range(600, 1000)})

HEAD_BYTES = 64 * 1024
"""Most bytes of a request line with its headers, of trailers, and of the framing between two pieces
of a body. Twice what upstreams commonly accept, so that the upstream is the one to refuse."""

HEAD_FIELDS = 200
"""Most header lines of a request; twice Apache's limit. Trailers have the same limit."""

PIPELINED = 64
"""Most requests of one connection that wait for a reply. After these we close the connection, which
asks the client to send the rest again (RFC 9112, 9.3.2)."""

LINGER_BYTES = 1 << 20
"""Most bytes that we read and drop of a request that is already answered. If we closed the
connection with bytes unread, the reset could destroy our reply before a client that is still
sending had read it (RFC 9112, 9.6)."""

LINGER_SECONDS = 5.0
"""Seconds that such a connection stays open; nginx's `lingering_timeout`."""

LAST_LOOK = 0.05
FIRST_LOOK = 1.0
"""Seconds that an idle connection stays open when the process ends: a request may have come that is
not read yet. Whoever has just connected may still have to send its first one."""

UNREAD_SECONDS = 600.0
"""Seconds within which a client must read some of a reply that waits for it; an upstream may be
silent for as long."""

IDLE_SECONDS = 75.0
"""Seconds that a connection may stay open without a request, as in nginx. Clients keep idle
connections in their pools for less time, so the client closes first, and no request arrives just as
we close."""


class _Reading(enum.Enum):
    NOTHING = enum.auto()
    HEAD = enum.auto()
    BODY = enum.auto()
    DEAF = enum.auto()


NOTHING, HEAD, BODY, DEAF = _Reading


class BoundedProtocol(HttpToolsProtocol):
    """One connection. `bounds` is shared by all connections of the process."""

    def __init__(self, *args: Any, bounds: Bounds, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.bounds = bounds
        self._presence = Presence()
        self._reading = NOTHING
        self._inflow: Inflow | None = None
        """The request that is being read, or was read last."""
        self._keeps = False
        """Whether the connection may carry another request behind this one."""
        self._since = self._size = self._fields = 0
        """Bytes received since the head began or since the last piece of the body; bytes and lines
        of the head."""
        self._lingers = self._ends = False
        self._dropped = 0

    # The connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(cast("asyncio.Transport", _Gentle(transport, self)))
        self.bounds.run(self.loop)
        self.bounds.opened(self)
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        self._reading = DEAF
        self._lingers = True
        super().connection_lost(exc)
        self.bounds.deadlines.pop(self, None)
        self.bounds.closed()
        for cycle, _ in self.pipeline:
            cast("Any", cycle.scope)["extensions"][RAW].let_go()
        self.pipeline.clear()
        self._presence.leave()

    def shutdown(self) -> None:
        self._ends = True
        if self.cycle is None or self.cycle.response_complete:
            seconds = FIRST_LOOK if self.cycle is None else LAST_LOOK
            self.loop.call_later(seconds, self._end)
        else:
            super().shutdown()

    def _end(self) -> None:
        """Close the connection behind the request that it carries, or that has begun to arrive."""
        if self._reading is HEAD:
            self.loop.call_later(LAST_LOOK, self._end)
        else:
            super().shutdown()

    def linger(self) -> bool:
        """End our side of the connection and give the client time to read the reply. Returns False
        if it can be closed at once: all that the client sent is read, or it had its time."""
        if self._lingers or self._reading is NOTHING:
            self._expect()
            return False
        self._reading = DEAF
        self._lingers = True
        self.transport.write_eof()
        if self._dropped <= LINGER_BYTES:
            self.flow.resume_reading()
        self._expect()
        return True

    # Deadlines

    def _expect(self) -> None:
        """Set the deadline of what the client has to do next, if it has to do anything."""
        seconds = None
        if self.flow.write_paused or (self.transport.is_closing() and not self._lingers):
            seconds = UNREAD_SECONDS  # the transport closes only after it has sent its buffer
        elif self._lingers:
            seconds = LINGER_SECONDS
        elif self._reading is HEAD:
            seconds = self.bounds.head_seconds
        elif self._reading is BODY:
            seconds = self.bounds.body_seconds
        elif self.cycle is None or self.cycle.response_complete:
            seconds = IDLE_SECONDS
        self.bounds.deadlines.pop(self, None)
        if seconds is not None:
            self.bounds.deadlines[self] = self.loop.time() + seconds

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._expect()

    def expire(self) -> None:
        """Close the connection or refuse the request, unless the delay is ours."""
        if self.flow.write_paused or self.transport.is_closing():
            self.transport.abort()
        elif self._reading not in (HEAD, BODY):
            self.transport.close()
        elif self.flow.read_paused:
            self._expect()  # we paused reading: the client is not the slow one
        elif self._reading is HEAD:
            self.refuse(
                RequestTimeout(
                    f"The request's head was not whole within {self.bounds.head_seconds:g} seconds"
                )
            )
        else:
            seconds = self.bounds.body_seconds
            self.refuse(
                RequestTimeout(
                    f"Nothing came of the request's body for {seconds:g} seconds (--body-timeout)"
                )
            )

    def unfinished(self) -> Inflow | None:
        """Return the request whose body is being read, if there is one."""
        return self._inflow if self._reading is BODY else None

    def idle(self) -> bool:
        """Return whether closing the connection now would lose nothing."""
        answered = self.cycle is None or self.cycle.response_complete
        return answered and self._reading is not BODY and not self.flow.write_paused

    # Input

    def data_received(self, data: bytes) -> None:
        if self._reading is not DEAF:
            if self.timeout_keep_alive_task is not None:
                self.timeout_keep_alive_task.cancel()
                self.timeout_keep_alive_task = None
            self._since += len(data)
            try:
                self._parse(data)
            except httptools.HttpParserError as error:
                if self._reading is not DEAF:
                    why = error.__context__
                    self.refuse(
                        why
                        if isinstance(why, ProxyError)
                        else BadRequest("This is no valid HTTP/1.1 request")
                    )
                    return
            else:
                if self._since > HEAD_BYTES and self._reading in (HEAD, BODY):
                    self.refuse(_too_large())
                elif self._reading is BODY:
                    self._expect()
                return
        self._dropped += len(data)
        if self._dropped > LINGER_BYTES:
            self.flow.pause_reading()

    def _parse(self, data: bytes) -> None:
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                data = data[offer.args[0] :]
            # Another protocol's offer is ignored (RFC 9110, 7.8). Java's client makes one with its
            # first request, with or without a body. The parser takes everything after the head for
            # the other protocol, so a new parser gets the head without the offer.
            line = self.parser.get_method(), self.url, self.parser.get_http_version().encode()
            fields = [b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade"]
            self._feed_anew(b"%b %b HTTP/%b\r\n%b\r\n" % (*line, b"".join(fields)))

    def _asks_for_websocket(self) -> bool:
        """Whether the client can go on only after an upgrade: WebSocket begins with a GET (RFC
        6455, 4.1)."""
        offers = [value.strip().lower() for name, value in self.headers if name == b"upgrade"]
        return self.parser.get_method() == b"GET" and b"websocket" in offers

    def _feed_anew(self, head: bytes) -> None:
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self.parser.feed_data(head)

    def refuse(self, error: ProxyError) -> None:
        """Answer the request that is being read with an error when its turn comes, and read no
        more."""
        # some clients try it each time, and then go on without
        if not isinstance(error, UpgradeRefused):
            self.bounds.warn(
                str(error.status), f"refused a request with {error.status}: {error.message}"
            )
        reading = self._reading
        self._reading = DEAF
        self._expect()
        if reading is BODY:
            assert self._inflow is not None
            self._inflow.fault = error
            self.cycle.message_event.set()
            return

        async def refusal(scope: Any, receive: Any, send: Any) -> None:
            await Exchange(scope, receive, send).fail(error)

        self.app = refusal  # of a request that is never read in full: we make one in its place
        self._feed_anew(b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n")
        self._reading = DEAF

    def evict(self, error: ProxyError) -> None:
        """Refuse what is being read, and close the connection at once behind that: its place is
        needed."""
        self.refuse(error)
        self._lingers = True
        self._expect()

    # The parser's callbacks

    def on_message_begin(self) -> None:
        taken = self.cycle is None or (self.cycle.keep_alive and len(self.pipeline) < PIPELINED)
        if self._reading is not DEAF and not taken:
            self.cycle.keep_alive = False
            self._reading = DEAF
            raise BadRequest("The connection takes no more requests")  # stops the parser
        super().on_message_begin()
        self._reading = HEAD
        self._since = 0
        self._size = 0
        self._fields = 0
        self._expect()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields += 1
        self._count(len(name) + len(value))
        # a trailer must not pass for a header and may be dropped (RFC 9110, 6.5.1)
        if self._reading is HEAD:
            super().on_header(name, value)

    def _count(self, size: int) -> None:
        self._size += size
        if self._size > HEAD_BYTES or self._fields > HEAD_FIELDS:
            raise _too_large()

    def on_headers_complete(self) -> None:
        codings = [
            value.strip().lower() for name, value in self.headers if name == b"transfer-encoding"
        ]
        if codings not in ([], [b"chunked"]):
            # RFC 9112, 6.1. If we relayed only the content, it would no longer be known how it is
            # encoded.
            raise Unsupported(
                "No `Transfer-Encoding` but chunked is understood; use `Content-Encoding`"
            )
        if self.parser.get_method() == b"CONNECT":
            # An upstream that accepts it takes the connection for a tunnel from then on (RFC 9110,
            # 9.3.6).
            raise Unsupported("CONNECT is not relayed: this proxy is no tunnel")
        if self.parser.should_upgrade():
            if self._asks_for_websocket():
                raise UpgradeRefused(
                    "This proxy does not speak WebSocket: send the request over plain HTTP"
                )
            return  # the head comes again, see `_parse`
        self._inflow = Inflow(self.bounds, self._presence, self.url)
        cast("Any", self.scope)["extensions"] = {RAW: self._inflow}
        app = self.app
        if self.parser.get_http_version() == "1.0":
            self.expect_100_continue = False  # RFC 9110, 10.1.1
            self.app = self._unframed
        super().on_headers_complete()
        self.app = app
        # A reply that begins before its request is whole is the last on its connection.
        self._keeps = self.cycle.keep_alive
        self.cycle.keep_alive = False
        self._reading = BODY
        self._since = 0
        self._size = 0
        self._fields = 0

    def on_body(self, body: bytes) -> None:
        assert self._inflow is not None
        self._since = 0
        self._inflow.hold(len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # see `_parse`
        super().on_message_complete()
        if not self.cycle.response_started:
            self.cycle.keep_alive = self._keeps and not self._ends
        self._reading = NOTHING
        self._expect()
        if not self.pipeline:
            # Reading may be paused for this body, which is now whole. We notice a hang-up only
            # while we read.
            self.flow.resume_reading()

    # Output

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._expect()

    async def _unframed(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve a request in HTTP/1.0, which knows no chunks: a reply without a length ends with
        its connection."""
        cycle = self.cycle
        framed = False

        async def send_unframed(message: Any) -> None:
            nonlocal framed
            if message["type"] == "http.response.start":
                framed = any(name == b"content-length" for name, _ in message.get("headers", ()))
                cycle.chunked_encoding = None if framed else False
            elif not framed:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await self.config.loaded_app(scope, receive, send_unframed)


class _Gentle:
    """A transport whose `close` lets the client read the reply first, and whose `write` drops what
    comes too late: when uvloop has closed a connection, it raises, even before it has said that the
    connection is lost."""

    def __init__(self, transport: asyncio.Transport, protocol: BoundedProtocol) -> None:
        self._transport = transport
        self._protocol = protocol

    def write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def close(self) -> None:
        if self._transport.is_closing() or not self._protocol.linger():
            self._transport.close()


def _too_large() -> HeadTooLarge:
    return HeadTooLarge(
        f"The request's head, its trailers or a chunk's extensions have more than {HEAD_BYTES} bytes or "
        f"{HEAD_FIELDS} fields"
    )
