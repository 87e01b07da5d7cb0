"""Drives one turn: sends a round, feeds the reply to the turn, has calls of our tools answered, and sends the next
round, until the turn is done. Then it ends the client's reply."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import Protocol, TypeVar

from msgspec.structs import replace

from proxy import rawjson, sse
from proxy.dialects import overflow
from proxy.dialects.turn import Turn
from proxy.errors import BadEncoding, OffloadError, ProxyError, UpstreamBroken, UpstreamFault, UpstreamUnreachable
from proxy.plan.history import ToolCall
from proxy.plan.turn import Broken, State
from proxy.rawjson import NotJson
from proxy.requests import relay
from proxy.requests.client_line import HEARTBEAT, ClientLine
from proxy.requests.exchange import Exchange
from proxy.requests.retries import RETRIES, is_passing, pause
from proxy.threads import SMALL
from proxy.tools.answer import ToolAnswer
from proxy.upstream import codings
from proxy.upstream.client import UpstreamReply, decoded
from proxy.upstream.headers import Header, Headers, reply_headers

T = TypeVar("T")

WHOLE_LIMIT = 32 << 20
"""Most bytes of a reply that is not a stream."""
REFUSAL_SECONDS = 15.0
"""Seconds for which we read a refusal's body. What it says comes first, and another try may serve the client."""
REFUSAL_LIMIT = 128 << 10
"""Most bytes of a refusal, compressed or not, that we read to understand it."""
INLINE_BYTES = 32 << 10
"""Most bytes of a reply that we parse on the event loop. More would hold it up, so a thread parses them."""
INLINE_LINES = 1_000
"""Most lines of a stream, at once, that we parse on the event loop: some 500 events. A few bytes can be an event."""
LARGE_BYTES, MANY_PIECES = 128 << 10, 200
"""Bytes of all replies of a turn, and pieces of them, above which a thread ends a round, takes the answers and builds
the next request. This takes 10 to 30 microseconds for each call, and there may be thousands."""
LAST_BYTES = 0.2
"""Seconds that a stream has to end after its last event. Its connection is reused only if we read it to its end."""
_BOUND = b"content-encoding", b"content-length"
"""With one of these headers, a reply takes nothing behind what upstream sent of it."""
NOT_TAKEN = "This image or file cannot be shown again: the API that serves you does not take it in a result."
TOO_LONG = "The answer was too long for what room is left. Ask for fewer lines."


class Refusal(OffloadError):
    """Upstream did not answer 200, or it sent an `error` in the place of a reply. `body` is as it came.

    `converse` raises this only if the client was sent nothing.
    """

    def __init__(
        self, status: int, headers: Headers, body: bytes, error: bytes | None = None, *, whole: bool = True
    ) -> None:
        super().__init__(f"upstream answered {status}")
        self.status = status
        self.headers = headers
        self.body = body
        self.whole = whole
        """Whether `body` is all of it. One that is very long or slow, or that breaks off, is read only in part."""
        self._error = error

    def said(self) -> bytes:
        """Return the error, or the beginning of the body decompressed, or the body as it came if that fails."""
        if self._error is not None:
            return self._error
        encoding = b",".join(self.headers.get_all(b"content-encoding"))
        try:
            return codings.beginning(self.body, encoding.decode("latin-1"), REFUSAL_LIMIT)
        except BadEncoding:
            return self.body


class TurnIO(Protocol):
    """Connects a turn to upstream, our tools, the store and threads."""

    @property
    def own_fits(self) -> bool:
        """Whether the client's own request may be sent, because it fits the window as far as that is known."""

    def is_final(self, refusal: Refusal) -> bool:
        """Whether upstream refuses the client's own request, too: for its limits, the credentials or the like."""

    async def send(self, body: bytes) -> UpstreamReply:
        """Send one round's request and return the reply. Raises UpstreamFault if there is none."""

    async def accepted(self) -> None:
        """Upstream has answered the first round: it accepts the request and its credentials."""

    async def resolve(self, calls: Sequence[ToolCall]) -> Sequence[ToolAnswer]:
        """Return the answers to calls of our tools, in the same order."""

    async def remember(self, turn: Turn) -> None:
        """Record the hidden rounds of the finished turn, if it has any. The client's reply ends only afterwards."""

    def headers(self, turn: Turn) -> Sequence[Header]:
        """Return our headers for the client's reply."""

    async def aside(self, work: Callable[[], T]) -> T:
        """Run work that would hold up the event loop in a thread, and return its result."""


async def converse(
    turn: Turn, client: Exchange, io: TurnIO, *, size: int = 0, heartbeat: float = HEARTBEAT
) -> Refusal | None:
    """Drive the turn to its end. Raises UpstreamFault, or Refusal if the client was sent nothing. Returns the refusal
    after which the client's own request was sent, if there was one.

    After a fault within a reply, the client's stream ends with an error event, as in OpenAI's API, and the fault is
    raised for the record. A stream is never silent for longer than `heartbeat` seconds. Building a request looks
    through `size` bytes.

    A refusal of the first round is raised. If a later round is refused, or the first one after the reply's head was
    sent, before the client has seen anything of the reply, the client's own request is sent instead.
    """
    line = ClientLine(client, heartbeat)
    try:
        async with line.kept_alive():
            return await _Conversation(turn, line, io, size).run()
    except UpstreamFault as fault:
        if client.status:
            await client.break_off(fault)
        raise
    except Refusal as refusal:
        if not client.status:
            raise
        broken = UpstreamBroken(f"Upstream answered {refusal.status} to a follow-up request")
        await client.finish(turn.error_event(broken, refusal.said()))
        raise broken from refusal


async def pass_on(
    reply: UpstreamReply,
    client: Exchange,
    ours: Sequence[Header],
    error_event: Callable[[ProxyError], bytes],
    watch: Callable[[bytes], object] = relay.ignore,
    read: bytes = b"",
) -> None:
    """Relay a reply to the client's own request, byte for byte, and show each chunk to `watch`. `read` was read of it
    before. Raises UpstreamFault if it breaks off; an uncompressed stream then ends with an error event."""
    if _is_stream(reply, otherwise=False) and not any(map(reply.headers.get_all, _BOUND)):
        client.error_event = lambda error: b"\n\n" + error_event(error)
    else:
        client.error_event = None
    try:
        await relay.pass_on(reply, client, ours, watch, read)
    except UpstreamFault as fault:
        if client.status:
            await client.break_off(fault)
        raise


class _Conversation:
    def __init__(self, turn: Turn, line: ClientLine, io: TurnIO, size: int) -> None:
        self._turn = turn
        self._line = line
        self._io = io
        self._size = size
        self._headers = Headers()
        self._begun = False  # whether any event with data has come
        self._heard = 0  # bytes of all replies
        self._decoder = sse.EventDecoder()
        self._showing = False  # whether the newest answers have an image or a file
        self._refused: Refusal | None = None  # after which the client's own request was sent

    async def run(self) -> Refusal | None:
        await self._round(self._ask_first)
        await self._io.accepted()
        while self._turn.state is not State.DONE:
            if self._turn.state is State.CALLING:
                answers = await self._io.resolve(await self._taken(lambda: self._turn.calls))
                texts, parts = [one.text for one in answers], [one.part for one in answers]
                self._showing = any(parts)
                await self._taken(partial(self._turn.answer, texts, parts))
            if self._turn.state is State.READY:
                await self._round(self._ask_again)
        last = await self._taken(self._turn.close)
        await self._io.remember(self._turn)
        await self._end(last)
        return self._refused

    async def _round(self, ask: Callable[[], Awaitable[UpstreamReply]]) -> None:
        """Ask and read the reply. Instead of a refused round, send the client's own request if that is possible."""
        try:
            async with aclosing(await ask()) as reply:
                await self._read(reply)
        except Refusal as refusal:
            first = not (self._turn.rounds or self._line.open)
            in_vain = not self._turn.rounds and self._io.is_final(refusal)
            if first or in_vain or not (self._io.own_fits and self._turn.start_over()):
                raise
            self._refused = refusal
            async with aclosing(await self._ask(await self._request())) as reply:
                await self._read(reply)

    async def _ask_first(self) -> UpstreamReply:
        reply = await self._ask(await self._request())
        self._headers = reply.headers
        return reply

    async def _request(self) -> bytes:
        """Return the body of the next round's request."""
        return await self._taken(self._turn.request)

    async def _ask(self, body: bytes) -> UpstreamReply:
        """Return the reply to one request. Raises Refusal if upstream does not answer 200."""
        reply = await self._io.send(body)
        if reply.status == 200:
            return reply
        async with aclosing(reply):
            raise await refusal(reply)

    async def _ask_again(self) -> UpstreamReply:
        """Return the reply to a follow-up. The client's reply depends on it, so we retry after a passing fault."""
        body = await self._request()
        reworded = False
        for attempt in range(RETRIES):
            try:
                return await self._ask(body)
            except Refusal as refusal:
                too_long = overflow.is_overflow(refusal.status, refusal.said())
                if (too_long or (self._showing and not is_passing(refusal.status))) and not reworded:
                    reworded = True
                    self._turn.reword(TOO_LONG if too_long else NOT_TAKEN)
                    body = await self._request()
                elif is_passing(refusal.status):
                    await asyncio.sleep(pause(refusal.headers, attempt))
                else:
                    raise
            except (UpstreamUnreachable, UpstreamBroken):
                await asyncio.sleep(pause(Headers(), attempt))
        return await self._ask(body)

    # -- reading --

    async def _read(self, reply: UpstreamReply) -> None:
        if _is_stream(reply, otherwise=self._turn.streams):
            await self._read_stream(reply)
        else:
            whole = await body(reply)
            self._heard += len(whole)
            out = await self._taken(partial(self._turn.receive_whole, whole), len(whole))
            if self._turn.refusal is not None:
                raise _refused(reply, whole, self._turn.refusal)
            await self._line.write(out)
        await self._line.write(await self._taken(self._turn.end))

    async def _read_stream(self, reply: UpstreamReply) -> None:
        if not self._line.open:
            self._line.prepare(reply.status, self._reply_headers([]), self._turn.error_event)
        decoder = self._decoder = sse.EventDecoder()
        early = raw = b""  # what came before the first event with data, for the client and as it came
        async with aclosing(decoded(reply)) as chunks:
            async for chunk in chunks:
                self._heard += len(chunk)
                out = await self._received(decoder.feed, chunk)
                if self._turn.refusal is not None:
                    raise _refused(reply, raw + chunk + await _rest(chunks), self._turn.refusal)
                if not (self._begun or self._line.open or len(raw) > INLINE_BYTES):
                    early, raw = early + out, raw + chunk
                    continue
                await self._line.write(early + out)
                early = b""
                if self._turn.over:
                    if rest := await _rest(chunks):
                        await self._line.write(await self._received(decoder.feed, rest))
                    return
        out = early + await self._received(lambda _: _ended(decoder.flush()), b"")
        if self._turn.refusal is not None:
            raise _refused(reply, raw, self._turn.refusal)
        await self._line.write(out)

    async def _received(self, events_of: Callable[[bytes], list[sse.ServerSentEvent]], chunk: bytes) -> bytes:
        """Feed the events that this chunk completes to the turn, and return the bytes for the client."""
        if self._decoder.held > INLINE_BYTES or chunk.count(b"\n") + chunk.count(b"\r") > INLINE_LINES:
            return await self._taken(lambda: self._turned(events_of(chunk)), math.inf)
        with _usable():
            events = events_of(chunk)
        return await self._taken(partial(self._turned, events), sum(len(event.raw) for event in events))

    def _turned(self, events: Sequence[sse.ServerSentEvent]) -> bytes:
        self._begun = self._begun or any(event.data is not None for event in events)
        return b"".join(map(self._turn.receive, events))

    async def _taken(self, work: Callable[[], T], size: float | None = None) -> T:
        """Return the result of `work` on `size` bytes of upstream's reply, or on all that the turn holds. Raises
        UpstreamBroken if that fails."""
        with _usable():
            aside = self._heavy if size is None else size > INLINE_BYTES
            return await self._io.aside(work) if aside else work()

    @property
    def _heavy(self) -> bool:
        """Whether going through all that the turn holds takes noticeable time."""
        return self._size > SMALL or self._heard > LARGE_BYTES or (self._heard > 0 and self._turn.pieces > MANY_PIECES)

    # -- writing --

    async def _end(self, last: bytes) -> None:
        if not self._line.prepared:
            self._line.prepare(200, self._reply_headers([(b"content-length", b"%d" % len(last))]))
        await self._line.finish(last)

    def _reply_headers(self, more: Sequence[Header]) -> Headers:
        headers = self._headers.without((b"content-length", b"content-encoding"))
        return reply_headers(headers, [*self._io.headers(self._turn), *more])


async def _rest(chunks: AsyncIterator[bytes]) -> bytes:
    """Return what follows soon after the last event."""
    rest = bytearray()
    with suppress(TimeoutError, UpstreamFault):
        async with asyncio.timeout(LAST_BYTES):
            async for chunk in chunks:
                rest += chunk[: REFUSAL_LIMIT - len(rest)]
    return bytes(rest)


def _refused(reply: UpstreamReply, body: bytes, error: bytes) -> Refusal:
    """Return the refusal that an error in the place of a reply is. `body` is the whole reply, decompressed."""
    return Refusal(reply.status, reply.headers.without((b"content-encoding", b"content-length")), body, error)


@contextlib.contextmanager
def _usable() -> Iterator[None]:
    """Raise UpstreamBroken if the turn cannot use upstream's reply."""
    try:
        yield
    except (Broken, NotJson, sse.TooLarge) as error:
        raise UpstreamBroken(f"Upstream's reply cannot be used: {error}") from error


def _is_stream(reply: UpstreamReply, *, otherwise: bool) -> bool:
    """Return whether a reply is a stream, by its content type, or `otherwise` if that does not say."""
    kinds = b" ".join(reply.headers.get_all(b"content-type")).lower()
    return b"text/event-stream" in kinds or (otherwise and b"json" not in kinds)


def _ended(unfinished: Sequence[sse.ServerSentEvent]) -> list[sse.ServerSentEvent]:
    """Return the event after which the stream ended, with the end that it lacks; nothing if it is incomplete."""
    return [replace(event, raw=event.raw + b"\n\n") for event in unfinished if not _is_cut(event)]


def _is_cut(event: sse.ServerSentEvent) -> bool:
    """Whether this event, after which the stream ended, is incomplete. Clients discard it, and it may be ours."""
    if event.data is None:
        return event.name is not None
    if event.data.strip() == sse.DONE:
        return False
    try:
        rawjson.members(event.data)
    except NotJson:
        return True
    return False


def first_data(reply: UpstreamReply, beginning: bytes) -> bytes:
    """Return the data of a stream's first event, or the beginning of another reply, decompressed, as far as it came."""
    said = Refusal(reply.status, reply.headers, beginning).said()
    if not _is_stream(reply, otherwise=False):
        return said
    decoder = sse.EventDecoder()
    return next((event.data for event in decoder.feed(said) + decoder.flush() if event.data is not None), b"")


async def body(reply: UpstreamReply) -> bytes:
    """Return a whole reply, decompressed. Raises UpstreamFault if it breaks off or is too large."""
    return await _gathered(decoded(reply))


async def refusal(reply: UpstreamReply) -> Refusal:
    """Read a reply whose status is not 200, as it came and as far as that is possible within our bounds. Reading
    `reply` then goes on where we stopped."""
    read, whole = bytearray(), False
    with suppress(TimeoutError, UpstreamFault):
        async with asyncio.timeout(REFUSAL_SECONDS):
            async for chunk in reply:
                read += chunk
                if len(read) > WHOLE_LIMIT:
                    break
            else:
                whole = True
    return Refusal(reply.status, reply.headers, bytes(read), whole=whole)


async def _gathered(chunks: AsyncGenerator[bytes, None]) -> bytes:
    whole = bytearray()
    async with aclosing(chunks):
        async for chunk in chunks:
            whole += chunk
            if len(whole) > WHOLE_LIMIT:
                raise UpstreamBroken(f"Upstream's reply is larger than {WHOLE_LIMIT} bytes")
    return bytes(whole)
