"""The client's side of one HTTP exchange: what it sent, whether it is still there, and the reply to it."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypedDict

import msgspec

from proxy.errors import BodyTooLarge, ProxyError
from proxy.headers import Header, Headers, without
from proxy.outcome import Outcome

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send


class Raw(TypedDict):
    """A request as the client wrote it, and word of the client when it hangs up."""

    target: bytes
    headers: Headers
    watch: Callable[[Callable[[], object]], Callable[[], object]]
    """Have this called when the client hangs up, or soon if it has; what comes back takes that back."""


RAW = "offload_proxy.raw"
"""The ASGI extension by which our server hands over what the protocol loses: the request's target as it was written
(ASGI cannot tell `/x?` from `/x`), the headers' names in the client's case, and the connection's end, which ASGI tells
only to who waits for it: a task for each request."""


class ClientGone(Exception):
    """The client hung up: nobody is left to reply to."""


class Client:
    """One request and the reply to it.

    Bodies larger than one message of the server are never held here: `body` hands them on as they come, and `write`
    waits while the client is slower than upstream.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.began = time.perf_counter()
        self.scope = scope
        self.method: str = scope["method"]
        raw: Raw | None = (scope.get("extensions") or {}).get(RAW)
        self.written_target = raw["target"] if raw else b""
        """As the request has it, with the origin if there is one; empty if the server does not tell."""
        self.target = _target(scope, self.written_target)
        """Raw path and query."""
        self.path = self.target.partition(b"?")[0]
        """Raw, without the query."""
        self.headers: Headers = list(raw["headers"] if raw else scope["headers"])
        """In the client's case, if the server tells."""
        self.request_id = f"req_{os.urandom(16).hex()}"
        self.fault_body: Callable[[ProxyError], bytes] = ProxyError.body
        """How an error of ours reads to this client: in OpenAI's shape, unless whoever serves it says otherwise."""
        self.gone = False
        """Whether the client left before the reply's last byte was on its way to it."""
        self.replied = False
        """Whether that byte is: from then on the client closes when it likes."""
        self.status = 0
        """Of the reply; 0 as long as there is none."""
        self.sent: float | None = None
        """When the request first went upstream, on the clock of `began`: set by whoever sends it."""
        self.receive = receive
        self._watch_connection = raw["watch"] if raw else None
        self._first_byte: float | None = None
        self._send = send
        self._heard_out = asyncio.Event()

    async def body(self) -> bytes | AsyncIterator[bytes]:
        """The body: whole where it has arrived whole already, otherwise as it comes. Raises ClientGone."""
        if not _has_body(self.scope["headers"]):
            self._heard_out.set()
            return b""
        first, more = await self._next()
        return _Streamed(self, first) if more else first

    async def read(self, limit: int) -> bytes:
        """The whole body. Raises BodyTooLarge as soon as it is known to be above `limit` bytes, and ClientGone."""
        _check_size(_content_length(self.scope["headers"]), limit)
        body = await self.body()
        if isinstance(body, bytes):
            _check_size(len(body), limit)
            return body
        chunks, size = [], 0
        async for chunk in body:
            chunks.append(chunk)
            size += len(chunk)
            _check_size(size, limit)
        return b"".join(chunks)

    @property
    def wants_upgrade(self) -> bool:
        """Whether the rest of the connection is meant for another protocol.

        Offers may be ignored (RFC 9110, 7.8), but with a body the parser has already taken that for the rest.
        """
        offers = [value.lower() for name, value in self.scope["headers"] if name == b"upgrade"]
        return bool(offers) and (b"websocket" in offers or _has_body(self.scope["headers"]))

    @contextmanager
    def present(self) -> Iterator[None]:
        """Run a block for as long as the client is there, and raise ClientGone out of it otherwise.

        A server that is not ours tells us only when asked, so somebody has to be waiting for it (Starlette's
        StreamingResponse does so only while it sends).
        """
        task = asyncio.current_task()
        assert task is not None
        if self._watch_connection is not None:
            forget = self._watch_connection(lambda: self._left(task))
        else:
            forget = asyncio.create_task(self._watch(task)).cancel
        try:
            yield
        except asyncio.CancelledError:
            if self.gone and task.uncancel() == 0:
                raise ClientGone from None
            raise
        finally:
            forget()

    def _left(self, task: asyncio.Task[Any]) -> None:
        if not self.replied:
            self.gone = True
            task.cancel()

    async def _watch(self, task: asyncio.Task[Any]) -> None:
        await self._heard_out.wait()
        while not self._take(await self.receive()):
            pass
        self._left(task)

    async def _next(self) -> tuple[bytes, bool]:
        """The body's next piece, and whether there are more."""
        message = await self.receive()
        if self._take(message):
            raise ClientGone
        return message.get("body", b""), message.get("more_body", False)

    def _take(self, message: Message) -> bool:
        """Whether this is word that the client has left; the server also says so once the reply is complete."""
        left: bool = message["type"] == "http.disconnect"
        self.gone = left and not self.replied
        if left or not message.get("more_body", False):
            self._heard_out.set()
        return left

    async def send(self, message: Message) -> None:
        """ASGI's `send`, for whoever replies by it."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self._first_byte = time.perf_counter()
        await self._send(message)

    async def start(self, status: int, headers: Headers) -> None:
        """Begin the reply. Framing and `Connection` are the server's."""
        if status == 304:
            # Its Content-Length is that of a body not sent (RFC 9110, 8.6); uvicorn would insist on the body.
            headers = without(headers, (b"content-length",))
        await self.send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, chunk: bytes) -> None:
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def finish(self, chunk: bytes = b"") -> None:
        """End the reply. One that is left without this is cut off, so that the client sees that it is not whole."""
        await self._send({"type": "http.response.body", "body": chunk})
        self.replied = not self.gone  # at once: whoever is told now that the client left must not stop what follows

    async def fail(self, error: ProxyError) -> None:
        """Reply with an error of our own. Nothing may have been sent before."""
        await self.reply(error.status, self.fault_body(error), error.headers())

    async def reply(self, status: int, body: bytes, headers: Sequence[Header] = ()) -> None:
        """Reply with JSON of our own, whole. Nothing may have been sent before."""
        ours = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"x-request-id", self.request_id.encode()),
        ]
        await self.start(status, [*ours, *headers])
        await self.finish(body)

    def outcome(self, kind: str, tenant: str = "", namespace: str = "") -> Outcome:
        """What is known of the request at its start."""
        return Outcome(
            request_id=self.request_id,
            tenant=tenant,
            namespace=namespace,
            kind=kind,
            method=self.method,
            path=self.path.decode("latin-1"),
        )

    def completed(self, outcome: Outcome, fault: str = "", detail: str = "") -> Outcome:
        """`outcome` with the reply's status, the times, and whose fault it was if something went wrong."""
        now = time.perf_counter()
        return msgspec.structs.replace(
            outcome,
            status=self.status,
            fault=fault,
            detail=detail,
            seconds=now - self.began,
            added_seconds=(self.sent or now) - self.began,
            first_byte_seconds=None if self._first_byte is None else self._first_byte - self.began,
        )


class _Streamed(AsyncIterator[bytes]):
    """A body as it comes. Cancelling `__anext__` loses nothing: a message is taken only once it is there."""

    def __init__(self, client: Client, first: bytes) -> None:
        self._client = client
        self._pending = first
        self._more = True

    async def __anext__(self) -> bytes:
        while not self._pending:
            if not self._more:
                raise StopAsyncIteration
            self._pending, self._more = await self._client._next()
        chunk, self._pending = self._pending, b""
        return chunk


def _target(scope: Scope, raw: bytes) -> bytes:
    """Raw path and query; without the origin, if the client named one (RFC 9112, 3.2.2)."""
    if raw.startswith(b"/"):
        return raw
    path: bytes = scope.get("raw_path") or scope["path"].encode()
    query: bytes = scope["query_string"]
    return path + b"?" + query if query else path


def _check_size(size: int, limit: int) -> None:
    if size > limit:
        raise BodyTooLarge(f"The request's body is larger than {limit} bytes")


def _has_body(headers: Headers) -> bool:
    return any(name == b"transfer-encoding" for name, _ in headers) or _content_length(headers) > 0


def _content_length(headers: Headers) -> int:
    """The announced length, 0 where there is none. The server has checked that it is a number."""
    return next((int(value) for name, value in headers if name == b"content-length"), 0)
