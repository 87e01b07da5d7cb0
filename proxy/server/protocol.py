"""uvicorn's HTTP/1.1, made exact and bounded: a relay needs of a request what ASGI does not carry, and no client may
take more of us than its due.

What a connection reads, in `_reading`:

             first byte        head whole         body whole
    NOTHING ───────────> HEAD ───────────> BODY ───────────> NOTHING
                           │                 │
                           └────────┬────────┘
       a fault, a deadline, a reply that ended before its request, more requests than may wait
                                    ▼
                                  DEAF    what comes is counted and dropped, and never parsed again; once all that
                                          is owed is answered, the connection lingers for a moment, and is closed

Requests are answered in the order in which they came: `cycle` is the one that is being read, or was last, `pipeline`
has those that wait for the reply before theirs. Also our own refusals wait there.
"""

from __future__ import annotations

import asyncio
import enum
import urllib.parse
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import (
    HttpToolsProtocol,
)

from proxy.errors import BadRequest, HeadTooLarge, ProxyError, RequestTimeout, Unsupported
from proxy.requests.exchange import RAW, Exchange, Raw
from proxy.server.cycle import Cycle
from proxy.server.held_head import HeldHead
from proxy.server.inbound import IDLE_SECONDS, Inbound

if TYPE_CHECKING:
    from proxy.upstream.headers import Header

HEAD_BYTES = 64 * 1024
"""Of a request's line and headers, of its trailers, and of what stands between two pieces of its body. Twice what
upstreams commonly take, so that it is they who refuse."""

HEAD_FIELDS = 200
"""Header lines of a request; twice Apache's limit. Trailers are counted with them."""

PIPELINED = 64
"""Requests of one connection that wait for a reply. Behind these we close, which asks the client to send the rest again
(RFC 9112, 9.3.2)."""

LINGER_BYTES = 1 << 20
"""That are read and dropped of a request that is answered already: a client that is still sending would lose our reply
to the reset that follows when we close on unread bytes (RFC 9112, 9.6)."""

LINGER_SECONDS = 5.0
"""For which such a connection stays open; nginx's `lingering_timeout`."""

UNREAD_SECONDS = 600.0
"""Within which a client has to take some of a reply that waits for it: as long as an upstream may be silent."""


class _Reading(enum.Enum):
    NOTHING = enum.auto()
    HEAD = enum.auto()
    BODY = enum.auto()
    DEAF = enum.auto()


NOTHING, HEAD, BODY, DEAF = _Reading

_FRAMING = (b"content-length", b"transfer-encoding")


class ExactProtocol(HttpToolsProtocol):
    """uvicorn's, that also hands over what ASGI's scope loses of a request; see `client.RAW`."""

    raw_headers: list[Header]
    cycle: Cycle | None  # type: ignore[assignment]

    def __init__(self, *args: Any, inbound: Inbound, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.inbound = inbound
        self._watching: set[Callable[[], object]] = set()
        self._reading = NOTHING
        self._since = 0
        """Bytes since the head began, or since the last piece of the body."""
        self._segment = self._most = 0
        """Bytes of what was read last, and the most that the head can have."""
        self._trailers = 0
        self._resumes = False
        """What the parser reads is a head of ours; see `_read_on`."""
        self._lingers = False
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
        """Have `left` called when the client hangs up, or soon if it has; what comes back takes that back."""
        self._watching.add(left)
        if self.transport.is_closing():
            self.loop.call_soon(self._tell)
        return lambda: self._watching.discard(left)

    def _tell(self) -> None:
        for left in tuple(self._watching):
            left()

    def shutdown(self) -> None:
        if self._lingers:
            self._close()
        else:
            super().shutdown()

    def _close(self) -> None:
        self.transport.close()
        self._wait(UNREAD_SECONDS)  # closed is only what is sent

    def _linger(self) -> None:
        """Say that nothing more comes, and give the client time to read what came."""
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
        """What was waited for has not come in time."""
        if self.flow.write_paused or self.transport.is_closing():
            unsent, self._unsent = self._unsent, self.transport.get_write_buffer_size()
            if self._unsent < unsent:
                self._wait(UNREAD_SECONDS)
            else:
                self.transport.abort()
        elif self._lingers or self._reading is NOTHING:
            self._close()
        elif self.flow.read_paused:
            self._wait(self.inbound.body_seconds)  # it is not the client who is slow
        elif self._reading is HEAD:
            self.refuse(
                RequestTimeout(f"The request's head was not whole within {self.inbound.head_seconds:g} seconds")
            )
        elif self._reading is BODY:
            seconds = self.inbound.body_seconds
            self.refuse(RequestTimeout(f"Nothing came of the request's body for {seconds:g} seconds (--body-timeout)"))

    def unfinished(self) -> Cycle | None:
        """The request whose body it is reading."""
        return self.cycle if self._reading is BODY else None

    def idle(self) -> bool:
        """Whether nothing is lost when it is closed now."""
        answered = self.cycle is None or self.cycle.response_complete
        return answered and self._reading is not BODY and not self.flow.write_paused

    # What comes

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
        """Ignore an offer to go on in another protocol (RFC 9110, 7.8).

        Java's client makes it with its first request, body or none. The parser takes what follows the head for that
        other protocol; so another one is told to expect what the head has announced.
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
        """Answer what is being read with an error, once it is its turn, and read no more."""
        self.inbound.warn(str(error.status), f"refused a request with {error.status}: {error.message}")
        reading, self._reading = self._reading, DEAF
        self._stop_waiting()
        if reading is BODY and self.cycle is not None:
            self.cycle.fail(error)
            return
        super().on_message_begin()
        self.scope.update({"method": "GET", "path": "/", "raw_path": b"/", "query_string": b""})
        self._queue(Cycle(self, keep_alive=False), _refusal(error))

    # What the parser says

    def on_message_begin(self) -> None:
        if self._resumes:
            return
        if self.cycle is not None and (not self.cycle.keep_alive or len(self.pipeline) >= PIPELINED):
            self.cycle.keep_alive = False
            self._reading = DEAF
            raise _Enough
        super().on_message_begin()
        self.raw_headers = []
        self._codings: list[bytes] = []
        self._reading, self._since, self._most = HEAD, 0, self._segment

    def on_url(self, url: bytes) -> None:
        if not self._resumes:
            self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._reading is BODY:
            # A trailer must not pass for a header, and may be dropped (RFC 9110, 6.5.1). Or it is `_read_on`'s.
            self._trailers += 1
            if self._trailers > HEAD_FIELDS:
                raise _too_large()
            return
        if len(self.raw_headers) >= HEAD_FIELDS:
            raise _too_large()
        self.raw_headers.append((name, value))
        name = name.lower()
        self.headers.append((name, value))
        if name == b"expect":
            self.expect_100_continue = value.lower() == b"100-continue"
        elif name == b"transfer-encoding":
            self._codings.append(value.strip().lower())

    def on_headers_complete(self) -> None:
        if self._resumes:
            return
        if self._most > HEAD_BYTES:
            head = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
            if head > HEAD_BYTES:
                raise _too_large()
        if self._codings and self._codings != [b"chunked"]:
            # RFC 9112, 6.1. To hand on what is inside would be to lose what it is encoded with.
            raise Unsupported("No `Transfer-Encoding` but chunked is understood; use `Content-Encoding`")
        version = self.parser.get_http_version()
        path, query = _split(self.url)
        self.scope["method"] = self.parser.get_method().decode("ascii")
        self.scope["http_version"] = version
        self.scope["path"] = urllib.parse.unquote(path.decode("ascii")) if b"%" in path else path.decode("ascii")
        self.scope["raw_path"] = path
        self.scope["query_string"] = query
        cycle = Cycle(self, keep_alive=version != "1.0" and self.parser.should_keep_alive())
        raw: Raw = {"target": self.url, "headers": self.raw_headers, "watch": self.watch, "body": cycle}
        self.scope["extensions"] = {RAW: raw}  # type: ignore[dict-item]
        self._reading, self._since, self._trailers = BODY, 0, 0
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
                # Paused for a body that is whole now; but only while it reads does it hear that the client hangs up.
                self.flow.resume_reading()

    # What goes

    def _queue(self, cycle: Cycle, app: Callable[..., Awaitable[None]]) -> None:
        earlier, self.cycle = self.cycle, cycle
        if earlier is None or earlier.response_complete:
            self._start_asgi_task(cycle, app)
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((cycle, app))

    def answered(self, cycle: Cycle) -> None:
        """Its reply is written."""
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
    """Tells the parser that nobody listens any more."""


def _refusal(error: ProxyError) -> Callable[..., Awaitable[None]]:
    """The application that answers a request which is none."""

    async def refuse(scope: Any, receive: Any, send: Any) -> None:
        await Exchange(scope, receive, send).fail(error)

    return refuse


def _too_large() -> HeadTooLarge:
    return HeadTooLarge(
        f"The request's head, its trailers or a chunk's extensions have more than {HEAD_BYTES} bytes or "
        f"{HEAD_FIELDS} fields"
    )


def _split(target: bytes) -> tuple[bytes, bytes]:
    """Path and query of a request's target. Raises HttpParserError."""
    url = httptools.parse_url(target)
    return url.path, url.query or b""
