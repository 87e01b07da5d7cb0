"""Responses over WebSocket: each message is served as a request over HTTP, by the same handlers.

    message ──the history that the connection holds──> POST /v1/responses ──its events──> one message each

The connection holds the histories of its last responses, so the client sends only what is new. Requests of one
connection are served one after the other. `Talk` reads and writes the messages.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from contextlib import suppress
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from proxy import sse
from proxy.dialects.responses import RESPONSES
from proxy.errors import BadRequest, Overloaded, ProxyError, UpstreamBroken
from proxy.requests.exchange import RAW
from proxy.server.access import Bounds, Inflow, Presence

_WHY = BadRequest("This is no WebSocket handshake: it has a body, over 128 fields, or a line over 8,192 bytes").body()
NO_HANDSHAKE = (
    b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(_WHY), _WHY)
)
"""The reply to a head that `websockets` cannot read."""

IDLE_SECONDS = 600.0
"""Seconds without a message, or without an answer to a ping, after which a connection is closed. Clients open another
one when they need it. Some answer no ping while they run a tool."""

WAITING = 16
"""Messages that may wait while a response is made: OpenAI's API makes so many at once, one for each lane."""

TOO_MUCH = 1008
"""The code with which such a connection is closed (RFC 6455, 7.4.1)."""

SOCKET = "offload_proxy.socket"
"""The ASGI extension in which the server passes on the connection's protocol."""

_HOP = frozenset(
    (b"connection", b"upgrade", b"content-length", b"content-type", b"content-encoding", b"accept", b"accept-encoding")
)


class BoundedSocket(WebSocketsSansIOProtocol):
    """uvicorn's protocol for WebSocket, counted by the process' bounds as every other connection."""

    def __init__(self, *args: Any, bounds: Bounds, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.bounds, app = bounds, self.app
        self.busy = self.ending = False
        """Whether a response is under way, and whether the connection is closed after it."""
        self.arrived = Inflow(bounds)
        """What has arrived of messages that nobody has taken yet."""

        async def bounded(scope: Any, receive: Any, send: Any) -> None:
            scope["extensions"][SOCKET] = self
            await app(scope, receive, send)
            self.handshake_complete = True  # or uvicorn would log an error for each handshake that is refused

        self.app = bounded

    def data_received(self, data: bytes) -> None:
        try:
            self.arrived.hold(len(data))
        except Overloaded:
            if self.handshake_complete and not self.close_sent:
                self.conn.send_close(1013, "too much is held; try again later")
                self.transport.write(b"".join(self.conn.data_to_send()))
                self.close_sent = True
            self.transport.close()
            return
        super().data_received(data)
        if not self.handshake_initiated:  # the head was no handshake, and nothing else would ever answer it
            self.handshake_complete = True
            self.transport.write(NO_HANDSHAKE)
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.arrived.let_go()
        self.bounds.closed()

    async def receive(self) -> Any:
        message = await super().receive()
        self.arrived.let_go()
        return message

    def shutdown(self) -> None:
        """Close the connection, after the response that is under way."""
        self.ending = True
        if not self.busy:
            super().shutdown()


class Connection:
    """One client's connection. `serve` is the application, which takes the requests."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, serve: ASGIApp, tenant: str) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._serve = serve
        self._socket: BoundedSocket = scope["extensions"][SOCKET]
        self._socket.arrived.charge(tenant)
        self._waiting: deque[Message] = deque()
        self._talk = RESPONSES.talk()
        self._holding = Inflow(self._socket.bounds)
        """What the talk's history takes."""
        self._holding.charge(tenant)

    async def run(self) -> None:
        """Serve the client until it leaves, or is silent for too long."""
        await self._receive()  # that it wants to connect
        await self._send({"type": "websocket.accept"})
        try:
            while (message := await self._next())["type"] == "websocket.receive":
                try:
                    await self._answer(_bytes(message))
                except ProxyError as error:
                    await self._tell(self._talk.refuse(error.status, error.body()))
                if self._socket.ending:
                    await self._send({"type": "websocket.close", "code": 1012})
                    break
            if message.get("code") == TOO_MUCH:
                await self._send({"type": "websocket.close", "code": TOO_MUCH, "reason": "too much at once"})
        finally:
            self._holding.let_go()

    async def _tell(self, message: str) -> None:
        with suppress(OSError):  # the client has left, which ends the request soon
            await self._send({"type": "websocket.send", "text": message})

    async def _next(self) -> Message:
        if self._waiting:
            return self._waiting.popleft()
        try:
            return await asyncio.wait_for(self._receive(), IDLE_SECONDS)
        except TimeoutError:
            await self._send({"type": "websocket.close", "code": 1001, "reason": "idle for too long"})
            return {"type": "websocket.disconnect"}

    async def _answer(self, raw: bytes) -> None:
        """Raises ProxyError."""
        presence = Presence()
        inflow = Inflow(self._socket.bounds, presence, self._scope["raw_path"])
        inflow.hold(len(raw))
        self._socket.busy = True
        try:
            body = self._talk.take(raw)
            if body is not None:
                await self._respond(inflow, presence, body)
            else:
                for message in self._talk.warm(f"resp_{os.urandom(24).hex()}"):
                    await self._tell(message)
        finally:
            self._socket.busy = False
            inflow.let_go()
        self._holding.let_go()
        try:
            self._holding.hold(self._talk.size)
        except Overloaded:
            self._talk.forget()

    async def _respond(self, inflow: Inflow, presence: Presence, body: bytes) -> None:
        """Serve the request, and send each event of its reply as a message. Raises UpstreamBroken."""
        status, pieces, events = 0, list[bytes](), sse.EventDecoder()

        async def give() -> Message:
            return {"type": "http.request", "body": body, "more_body": False}

        async def take(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif status != 200:
                pieces.append(message.get("body", b""))
            else:
                more = message.get("more_body", False)
                for event in [*events.feed(message.get("body", b"")), *([] if more else events.flush())]:
                    if event.data is not None and event.data != sse.DONE:
                        await self._tell(self._talk.show(event.data))

        request = asyncio.ensure_future(self._serve(request_scope(self._scope, inflow, len(body)), give, take))
        leaving = asyncio.create_task(self._watch(inflow, presence))
        try:
            await request
        finally:
            request.cancel()
            leaving.cancel()
            await asyncio.gather(request, leaving, return_exceptions=True)
        if status != 200:
            await self._tell(self._talk.refuse(status, b"".join(pieces)))
        elif not self._talk.ended:
            raise UpstreamBroken("Upstream's reply ended without its last event")

    async def _watch(self, inflow: Inflow, presence: Presence) -> None:
        """Keep what the client sends while it is answered. End the request if the client leaves or sends too much."""
        with suppress(Overloaded):
            while (message := await self._receive())["type"] == "websocket.receive" and len(self._waiting) < WAITING:
                inflow.hold(len(_bytes(message)))
                self._waiting.append(message)
        if message["type"] == "websocket.receive":
            message = {"type": "websocket.disconnect", "code": TOO_MUCH}
        self._waiting = deque([message])
        presence.leave()


def _bytes(message: Message) -> bytes:
    said = message.get("text")
    return said.encode("utf-8", "surrogatepass") if said else message.get("bytes") or b""


async def refuse(error: ProxyError, body: bytes, send: Send) -> None:
    """Refuse a handshake with this error."""
    ours = [(b"content-type", b"application/json"), (b"x-request-id", f"req_{os.urandom(16).hex()}".encode())]
    headers = [*ours, *error.headers()]
    await send({"type": "websocket.http.response.start", "status": error.status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": body})


def request_scope(scope: Scope, inflow: Inflow, size: int) -> Scope:
    """Return the scope of a request over HTTP, with a body of `size` bytes, in place of one over WebSocket."""
    headers = [
        (name, value) for name, value in scope["headers"] if name not in _HOP and not name.startswith(b"sec-websocket-")
    ]
    headers += [(b"content-type", b"application/json"), (b"content-length", b"%d" % size)]
    headers.append((b"accept", b"text/event-stream"))
    scheme = "https" if scope["scheme"] == "wss" else "http"
    more = {"type": "http", "method": "POST", "scheme": scheme, "headers": headers, "extensions": {RAW: inflow}}
    return {**scope, **more}
