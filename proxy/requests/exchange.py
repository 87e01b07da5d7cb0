"""The client's side of one HTTP exchange: its request, its presence, and the reply to it."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import NamedTuple, Protocol

import msgspec
from starlette.types import Message, Receive, Scope, Send

from proxy.errors import BodyTooLarge, Fault, OffloadError, ProxyError, UpstreamFault
from proxy.plan.prices import is_loopback
from proxy.telemetry.outcome import DECIMALS, Kind, Outcome
from proxy.upstream.headers import Header, Headers


class Account(NamedTuple):
    """What is counted together: of a tenant, of one caller, or of several."""

    name: str
    whose: str
    """What errors call its requests."""
    places: int
    """Most requests at once."""
    part: int = 0
    """Its bodies may take the bytes of all bodies, divided by this; 0: they are not counted
    here."""


class Incoming(Protocol):
    """What our server tells of a request beyond ASGI. `admit` says to which accounts it belongs. It
    raises Overloaded if one of them has too many requests or its bodies take too much, and so does
    `hold` if there is no room for what was made from the body."""

    target: bytes
    """The request target as written; ASGI loses the host that it may name."""
    fault: ProxyError | None
    """Why the body will never be whole: it is too slow, too much at once, or invalid HTTP."""

    def watch(self, left: Callable[[], object], /) -> Callable[[], object]:
        """Call `left` when the client hangs up, or soon if it already has. Returns a function that
        cancels this."""

    def admit(self, accounts: Sequence[Account]) -> None: ...

    def hold(self, size: int) -> None: ...

    def release(self, size: int) -> None: ...

    def let_go(self) -> None: ...


WRITTEN = 256 << 10
"""Most bytes that are written to the client at once. If we wrote a large reply in one piece, the
request would be over and its place free while a client that reads nothing leaves the whole reply in
our memory."""

RAW = "offload_proxy.inflow"
"""The ASGI extension in which our server passes on what it tells of a request."""

FORWARDED = frozenset(
    (b"forwarded", b"via", b"x-real-ip", b"x-client-ip", b"true-client-ip", b"cf-connecting-ip")
)
"""Headers that proxies add to what they forward, beside `X-Forwarded-...`."""


_PLAIN = re.compile(rb"[\w.:~-]*", re.ASCII)
"""A segment of a path that log, dashboard and captures show. Others may hold parameters or a
key."""


class ClientGone(OffloadError):
    """The client hung up, so no reply can reach it."""


class Exchange:
    """One request and the reply to it. `write` waits while the client is slower than upstream."""

    dialect = ""
    """The name of the request's dialect. The application sets it; empty: it is passed through."""
    api = ""
    """The name of the API that the request belongs to, even if it is passed through; empty if it is
    not known."""
    gone = False
    """Whether the client left before the reply's last byte was sent."""
    replied = False
    """Whether the last byte was sent. From then on, the client may close at any time."""
    error_event: Callable[[ProxyError], bytes] | None = None
    """Makes the event that ends the reply if it fails after it has begun; None: the reply is no
    stream of events."""
    status = 0
    """The reply's status; 0 until the reply begins."""
    sent: float | None = None
    """When the request first went upstream, on the clock of `began`. The sender sets it."""
    relocated: Callable[[bytes], bytes] | None = None
    """Returns a `Location` of upstream's as the client can follow it. The relay sets it."""
    below = b""
    """The path below which callers find the proxy; empty: at its address itself."""
    broken: ProxyError | None = None
    """Why the body ended before it was whole."""
    _first_byte: float | None = None

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.began = time.perf_counter()
        self.scope = scope
        self.method: str = scope["method"]
        self._inflow: Incoming = scope["extensions"][RAW]
        self.written_target = self._inflow.target
        """The target as written, with the origin if there is one."""
        self.path: bytes = scope["raw_path"]
        """The raw path, without the query."""
        query = scope["query_string"]
        self.target = self.path + b"?" + query if query else self.path
        """The raw path and query."""
        self.headers = Headers(scope["headers"])
        """Names are in lower case."""
        self.request_id = f"req_{os.urandom(16).hex()}"
        self.fault_body: Callable[[ProxyError], bytes] = ProxyError.body
        """Makes the body of an error of ours: in OpenAI's shape, unless the application sets
        another."""
        self.receive = receive
        self._pieces: list[bytes] = []
        self._size = 0
        self.fields = fields = dict(self.headers)
        """Each header's last value, by its name in lower case."""
        self._announced = int(fields.get(b"content-length", 0))
        """Bytes of the body, or 0 if the head does not say. The server has checked that it is a
        number."""
        self._more = self._announced > 0 or b"transfer-encoding" in fields
        self.encoded = b"content-encoding" in fields
        """Whether the body has a content coding."""
        self._send = send
        self.admit = self._inflow.admit
        self.hold = self._inflow.hold

    def enter(self, below: bytes) -> bool:
        """Take this off the beginning of the path. Returns whether it stood there."""
        entered = self.path.startswith(below + b"/") or self.path == below
        if entered:
            self.below = below
            query = self.target.removeprefix(self.path)
            self.path = self.path.removeprefix(below) or b"/"
            self.target = self.path + query
        return entered

    def unheard(self) -> Exchange:
        """Return the same request, already sent once, with a reply that goes nowhere."""
        made = copy(self)
        made._send = _nowhere
        made.error_event = None
        made.status = 0
        made.gone = False
        made.replied = False
        made.sent = time.perf_counter()
        return made

    def close(self) -> None:
        """Drop the body: the request is over."""
        self._pieces = []
        self._inflow.let_go()
        self.scope.pop("extensions")  # what it holds refers to the scope

    async def gather(self, limit: int) -> bool:
        """Wait for the body, unless it is larger than `limit` bytes, and return whether it is
        whole. Raises ClientGone, and ProxyError if the body will never be whole."""
        if self._more and self._announced > limit:
            return False
        while self._more and self._size <= limit:
            piece = await self._next()
            self._pieces.append(piece)
            self._size += len(piece)
        return not self._more

    async def body(self, gathered: int = 0) -> bytes | AsyncIterator[bytes]:
        """Return the body: whole if it fits in `gathered` bytes, or else as a stream. Raises what
        `gather` raises."""
        whole = not self._more or await self.gather(gathered)
        if not whole and not self._pieces:
            self._pieces.append(await self._next())
            whole = not self._more
        if whole:
            return self._joined()
        first = self._joined()
        self._pieces = []
        return _Streamed(self, first)

    async def read(self, limit: int) -> bytes:
        """Return the whole body, repeatedly. Raises what `gather` raises, and BodyTooLarge as soon
        as it is known to exceed `limit` bytes."""
        if self._more:
            await self.gather(limit)
        if max(self._announced, self._size) > limit:
            raise BodyTooLarge(f"The request's body is larger than {limit} bytes")
        return self._joined()

    def _joined(self) -> bytes:
        if len(self._pieces) != 1:
            self._pieces = [b"".join(self._pieces)]
        return self._pieces[0]

    @contextmanager
    def present(self) -> Iterator[None]:
        """Run a block while the client is there, and raise ClientGone out of it when the client
        hangs up."""
        task = asyncio.current_task()
        assert task is not None

        def left() -> None:
            if not self.replied:
                self.gone = True
                task.cancel()

        forget = self._inflow.watch(left)
        try:
            yield
        except asyncio.CancelledError:
            if self.gone and task.uncancel() == 0:
                raise ClientGone from None
            raise
        finally:
            forget()

    async def _next(self) -> bytes:
        """Return the body's next piece. Raises what `gather` raises."""
        message = await self.message()
        self._more = message.get("more_body", False)
        piece: bytes = message.get("body", b"")
        return piece

    async def message(self) -> Message:
        """Return the next ASGI message, for code that reads the body through ASGI. Raises what
        `gather` raises."""
        message = await self.receive()
        if message["type"] == "http.disconnect":
            self.gone = not self.replied
            self._more = False
            raise ClientGone
        if self._inflow.fault is not None:
            self.broken = self._inflow.fault
            raise self.broken
        return message

    async def send(self, message: Message) -> None:
        """Send an ASGI message, for code that replies through ASGI."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self._first_byte = time.perf_counter()
        await self._send(message)

    async def start(self, status: int, headers: Iterable[Header]) -> None:
        """Begin the reply. The server adds framing and `Connection`."""
        if status in (204, 304):
            # After 304 it is the length of a body that is not sent, and 204 must have none (RFC
            # 9110, 8.6). The server would insist on the body.
            headers = Headers(headers).without((b"content-length",))
        if self.relocated is not None and (status == 201 or 300 <= status < 400):
            named = b"location"
            headers = [
                (name, self._led(value) if name == named else value) for name, value in headers
            ]
        await self.send({"type": "http.response.start", "status": status, "headers": headers})

    def _led(self, location: bytes) -> bytes:
        led = self.relocated(location) if self.relocated else location
        through_us = led.startswith(b"/") and not led.startswith(b"//")
        return self.below + led if through_us else led

    async def write(self, chunk: bytes) -> None:
        for at in range(0, len(chunk), WRITTEN):
            await self._send(
                {"type": "http.response.body", "body": chunk[at : at + WRITTEN], "more_body": True}
            )

    async def finish(self, chunk: bytes = b"") -> None:
        """End the reply. Without this call the server cuts it off, so that the client sees that it
        is not whole."""
        if len(chunk) > WRITTEN:
            await self.write(chunk[:-WRITTEN])
            chunk = chunk[-WRITTEN:]
        await self._send({"type": "http.response.body", "body": chunk})
        # set at once, so that a hang-up from now on does not cancel what follows
        self.replied = not self.gone

    async def fail(self, error: ProxyError) -> None:
        """Reply with an error of our own. Call it only before any other reply. A caller on this
        machine that does not seem to forward somebody else's request also learns upstream's address
        and what went wrong with it."""
        if isinstance(error, UpstreamFault) and error.detail:
            client = self.scope.get("client")
            forwarded = any(
                name in FORWARDED or name.startswith(b"x-forwarded-") for name in self.fields
            )
            if client is not None and is_loopback(client[0]) and not forwarded:
                error = type(error)(f"{error.message}: {error.detail}", detail=error.detail)
        await self.reply(error.status, self.fault_body(error), error.headers())

    async def break_off(self, error: ProxyError) -> None:
        """End a reply that has begun. A stream ends with an error event; any other reply is left to
        be cut off."""
        if self.error_event is not None and not self.replied:
            await self.finish(self.error_event(error))

    async def reply(self, status: int, body: bytes, headers: Sequence[Header] = ()) -> None:
        """Send a whole reply with JSON of our own. Call it only before any other reply."""
        ours = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"x-request-id", self.request_id.encode()),
        ]
        await self.start(status, [*ours, *headers])
        await self.finish(body)

    @property
    def our_header(self) -> set[bytes]:
        """The words of `x-offload`: how the client wants this request treated. Proxies may join
        several headers."""
        said = self.headers.get_all(b"x-offload") if b"x-offload" in self.fields else ()
        return {word.strip().lower() for word in b",".join(said).split(b",")}

    @property
    def shown_path(self) -> str:
        """The path as log, dashboard and captures show it: `*` stands for what may have a key in
        it."""
        shown = [
            segment if _PLAIN.fullmatch(segment) else b"*" for segment in self.path.split(b"/")
        ]
        return b"/".join(shown).decode("ascii")

    def outcome(self, kind: Kind, tenant: str = "", namespace: str = "") -> Outcome:
        """Return an outcome with what is known of the request at its start."""
        return Outcome(
            request_id=self.request_id,
            tenant=tenant,
            namespace=namespace,
            kind=kind,
            method=self.method,
            path=self.shown_path,
            dialect=self.dialect,
        )

    def completed(self, outcome: Outcome, fault: Fault = Fault.NONE, detail: str = "") -> Outcome:
        """Return `outcome` with the reply's status, the times, and whose fault it was if something
        went wrong."""
        now = time.perf_counter()
        return msgspec.structs.replace(
            outcome,
            status=self.status,
            fault=fault,
            detail=detail,
            seconds=round(now - self.began, DECIMALS),
            added_seconds=round((self.sent or now) - self.began, DECIMALS),
            first_byte_seconds=None
            if self._first_byte is None
            else round(self._first_byte - self.began, DECIMALS),
        )


class _Streamed(AsyncIterator[bytes]):
    """A body as it arrives. Cancelling `__anext__` loses nothing: a message is taken only when it
    has arrived."""

    def __init__(self, client: Exchange, first: bytes) -> None:
        self._client = client
        self._pending = first
        self._taken = 0

    async def __anext__(self) -> bytes:
        self._client._inflow.release(self._taken)
        self._taken = 0
        while not self._pending:
            if not self._client._more:
                raise StopAsyncIteration
            self._pending = await self._client._next()
        chunk = self._pending
        self._pending = b""
        self._taken = len(chunk)
        return chunk


async def _nowhere(message: Message) -> None:
    """Send nothing."""
