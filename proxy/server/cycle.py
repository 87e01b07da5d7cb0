"""One request and its reply on a connection: bounds the body, and writes the reply in HTTP/1.1 or 1.0."""

from __future__ import annotations

import asyncio
from functools import lru_cache
from typing import Any, Protocol

from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from proxy.errors import ProxyError
from proxy.server.inbound import Inbound
from proxy.upstream.headers import Headers, head

WRITTEN = 256 * 1024
"""Most bytes that are written to the connection at once. If we wrote a large reply in one piece, the request would be
over and its place free while a client that reads nothing leaves the whole reply in our memory."""


class Connection(Protocol):
    """The connection as a cycle sees it."""

    scope: Any
    transport: Any
    flow: FlowControl
    logger: Any
    access_logger: Any
    server_state: Any
    expect_100_continue: bool
    loop: asyncio.AbstractEventLoop
    inbound: Inbound

    def answered(self, cycle: Cycle) -> None:
        """Note that the reply is complete."""

    def refuse(self, error: ProxyError) -> None:
        """Answer with `error`, and read no more."""


class Cycle(RequestResponseCycle):
    """uvicorn's request and reply, which also accounts for the body that it holds and supports HTTP/1.0.

    A reply that begins before its request is whole is the last on its connection: the rest of that body is never
    parsed.
    """

    def __init__(self, protocol: Connection, *, keep_alive: bool) -> None:
        super().__init__(
            scope=protocol.scope,
            transport=protocol.transport,
            flow=protocol.flow,
            logger=protocol.logger,
            access_logger=protocol.access_logger,
            access_log=False,
            default_headers=protocol.server_state.default_headers,
            message_event=asyncio.Event(),
            # RFC 9110, 10.1.1
            expect_100_continue=protocol.expect_100_continue and protocol.scope["http_version"] != "1.0",
            keep_alive=keep_alive,
            on_response=lambda: None,
        )
        self._protocol = protocol
        self._inbound = protocol.inbound
        self.tenant: str | None = None
        self.began = protocol.loop.time()
        self._held = 0
        self._fault: ProxyError | None = None
        self._until_closed = False

    # The body

    def take(self, piece: bytes) -> None:
        """Keep a piece of the body until the application asks for it. Raises Overloaded if there is no room."""
        if self.response_complete:
            return
        self.hold(len(piece))
        self.body += piece
        if len(self.body) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
        self.message_event.set()

    def hold(self, size: int) -> None:
        """Count `size` more bytes. Raises Overloaded if there is no room for them."""
        self._inbound.hold(self.tenant, size)
        self._held += size

    def charge(self, tenant: str) -> None:
        """Charge the body to its tenant. Raises Overloaded if the tenant's bodies take too much."""
        self._inbound.charge(tenant, self._held)
        self.tenant = tenant

    def release(self, size: int) -> None:
        """Stop counting `size` bytes, which are no longer in memory."""
        size = min(size, self._held)
        self._held -= size
        self._inbound.release(self.tenant, size)

    def let_go(self) -> None:
        """Drop the body and stop counting it: the request is over."""
        self.body = bytearray()
        self.release(self._held)

    def fail(self, error: ProxyError) -> None:
        """End the body early: from now on, `receive` raises `error`."""
        self._fault = error
        self.message_event.set()

    def give_up(self, error: ProxyError) -> None:
        """Drop the body and answer with `error`."""
        self.let_go()
        self._protocol.refuse(error)

    async def receive(self) -> Any:
        if self.waiting_for_100_continue and self._fault is None and not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.waiting_for_100_continue = False
        if not (self.disconnected or self.response_complete or self._fault):
            self.flow.resume_reading()
            if not self.message_event.is_set():
                await self.message_event.wait()
            self.message_event.clear()
        if self.disconnected or self.response_complete:
            return {"type": "http.disconnect"}
        if self._fault is not None:
            raise self._fault
        piece, self.body = bytes(self.body), bytearray()
        return {"type": "http.request", "body": piece, "more_body": self.more_body}

    async def run_asgi(self, app: Any) -> None:
        """Have the application reply. Cuts off a reply that it does not end, and sends a 500 if it began none."""
        try:
            await app(self.scope, self.receive, self.send)
        except BaseException as error:
            self.logger.error("Exception in ASGI application", exc_info=error)
        finally:
            self.let_go()
            self.scope.pop("extensions", None)  # refers to us: only the garbage collector could free each request
        if self.response_complete or self.disconnected or self.transport.is_closing():
            return
        if self.response_started:
            self.transport.close()
        else:
            self.logger.error("the application did not reply")
            await self.send_500_response()

    # The reply

    async def send(self, message: Any) -> None:
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected or self.transport.is_closing():  # we closed it, and the loop has not said so yet
            return
        kind = message["type"]
        if kind == "http.response.body" and self.response_started and not self.response_complete:
            body, at = message.get("body", b""), 0
            while len(body) - at > WRITTEN:
                self._continue(body[at : at + WRITTEN], True)
                at += WRITTEN
                await self.flow.drain()
                if self.disconnected or self.transport.is_closing():
                    return
            self._continue(body[at:] if at else body, message.get("more_body", False))
        elif kind == "http.response.start" and not self.response_started:
            self._start(message["status"], message.get("headers", ()))
        else:
            raise RuntimeError(f"{kind} at the wrong time")

    def push(self, piece: bytes) -> bool:
        """Write a piece of a reply that has begun, or return False if that would have to wait or cannot be."""
        if self.flow.write_paused or self.disconnected or self.transport.is_closing() or len(piece) > WRITTEN:
            return False
        if not self.response_started or self.response_complete or not piece:
            return False
        if self.chunked_encoding:
            self.transport.write(_pushed(piece))
        else:
            self._continue(piece, True)
        return True

    def _start(self, status: int, headers: Any) -> None:
        """Write the head. The names of `headers` are in lower case, as ASGI has it."""
        headers = Headers(headers)
        fields = dict(headers)
        keep_alive = self.keep_alive and not self.more_body
        if b"connection" in fields:
            keep_alive = keep_alive and b"close" not in b",".join(headers.get_all(b"connection")).lower()
            headers = headers.without((b"connection",))
        lines = [*map(b": ".join, headers)]
        bodiless = self.scope["method"] == "HEAD" or status in (204, 304)
        unframed = b"content-length" not in fields and not bodiless
        until_closed = unframed and self.scope["http_version"] == "1.0"
        if unframed and not until_closed:
            lines.append(b"transfer-encoding: chunked")
        if until_closed or not keep_alive:
            keep_alive = False
            lines.append(b"connection: close")
        start = STATUS_LINE[status] + head(lines)
        self.keep_alive = keep_alive
        self.expected_content_length = int(fields.get(b"content-length", 0))
        self.chunked_encoding = unframed and not until_closed
        self._until_closed = until_closed
        self.response_started = True
        self.waiting_for_100_continue = False
        self.transport.write(start)

    def _continue(self, body: bytes, more: bool) -> None:
        if self.scope["method"] == "HEAD":
            self.expected_content_length = 0
        elif self.chunked_encoding:
            piece = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            self.transport.write(piece if more else piece + b"0\r\n\r\n")
        elif self._until_closed:
            self.transport.write(body)
        else:
            self.expected_content_length -= len(body)
            if self.expected_content_length < 0:
                raise RuntimeError("the reply is longer than its Content-Length")
            self.transport.write(body)
        if more:
            return
        if self.expected_content_length:
            raise RuntimeError("the reply is shorter than its Content-Length")
        self.response_complete = True
        self.message_event.set()
        self._protocol.answered(self)


@lru_cache(1)
def _pushed(piece: bytes) -> bytes:
    """Return a piece in chunked coding. The same one is pushed to many clients, one after the other."""
    return b"%x\r\n%b\r\n" % (len(piece), piece)
