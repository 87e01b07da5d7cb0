"""Drives one turn: sends, feeds what comes back, has our tools answered, asks again, and ends the client's reply."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Protocol

import msgspec

from proxy.core import rawjson, sse
from proxy.core.history import ToolCall
from proxy.core.rawjson import NotJson
from proxy.dialects.chat.overflow import is_overflow
from proxy.dialects.chat.turn import Broken, ChatTurn, State
from proxy.errors import BadEncoding, OffloadError, UpstreamBroken, UpstreamFault, UpstreamUnreachable
from proxy.requests import passthrough
from proxy.requests.exchange import Exchange
from proxy.upstream import content_encoding
from proxy.upstream.client import UpstreamReply, decoded
from proxy.upstream.headers import Header, Headers, reply_headers

HEARTBEAT = 15.0
"""Seconds of silence after which a comment goes out: proxies and clients give up on silent streams after 30 to 60."""
RETRIES = 2
LONGEST_RETRY = 30.0
"""Seconds of `Retry-After` that a client's open reply is kept waiting for."""
FIRST_RETRY = 0.5
"""Seconds, doubled each time, where upstream does not say."""
WHOLE_LIMIT = 32 << 20
"""Bytes of a reply that is not a stream."""
REFUSAL_LIMIT = 128 << 10
"""Bytes of a refusal, compressed or not, that are looked at in order to understand it."""
INLINE_BYTES = 32 << 10
"""Bytes of events that are taken apart at once; more of them could hold up the event loop."""
LAST_BYTES = 0.2
"""Seconds that a stream has to end once it said that it is complete: read out, its connection can be used again."""
TOO_LONG = "The answer was too long for what room is left. Ask for fewer lines."


class Refusal(OffloadError):
    """Upstream did not answer 200, and nothing has been sent to the client yet. `body` is as it came."""

    def __init__(self, status: int, headers: Headers, body: bytes) -> None:
        super().__init__(f"upstream answered {status}")
        self.status = status
        self.headers = headers
        self.body = body

    def said(self) -> bytes:
        """The body's beginning in the clear, for us to understand it; as it came where that cannot be."""
        encoding = b",".join(self.headers.get_all(b"content-encoding"))
        try:
            return content_encoding.beginning(self.body, encoding.decode("latin-1"), REFUSAL_LIMIT)
        except BadEncoding:
            return self.body


class TurnIO(Protocol):
    """What a turn needs of the world around it."""

    async def send(self, body: bytes) -> UpstreamReply:
        """One round's request. Raises UpstreamFault."""

    async def resolve(self, calls: Sequence[ToolCall]) -> list[str]:
        """The answers to calls of our tools, in their order."""

    async def remember(self, turn: ChatTurn) -> None:
        """Write down what the finished turn hid, before the client's reply ends."""

    def headers(self, turn: ChatTurn) -> Sequence[Header]:
        """Ours, for the client's reply."""

    async def aside(self, work: Callable[[], bytes]) -> bytes:
        """The result of work that would hold up the event loop."""


class Interrupted(OffloadError):
    """The reply was begun and could not be brought to its end; the client was told."""

    def __init__(self, fault: UpstreamFault) -> None:
        super().__init__(fault.message)
        self.fault = fault


async def converse(turn: ChatTurn, client: Exchange, partner: TurnIO, heartbeat: float = HEARTBEAT) -> None:
    """The whole turn. Raises Refusal, UpstreamFault and ClientGone only as long as nothing went to the client.

    What fails later becomes an error event at the end of the stream, as OpenAI's API does it; the fault is raised
    afterwards as Interrupted, for the record. A stream is never silent for longer than `heartbeat` seconds.
    """
    line = _Line(client, heartbeat)
    try:
        async with line.kept_alive():
            await _Conversation(turn, line, partner).run()
    except UpstreamFault as fault:
        if not client.status:
            raise
        await client.finish(sse.encode(fault.body()))
        raise Interrupted(fault) from fault
    except Refusal as refusal:
        if not client.status:
            raise
        broken = UpstreamBroken(f"Upstream answered {refusal.status} to a follow-up request")
        await client.finish(_error_event(refusal, broken))
        raise Interrupted(broken) from refusal


async def pass_on(reply: UpstreamReply, client: Exchange, ours: Sequence[Header]) -> None:
    """A reply to the client's own request, byte for byte; a stream that breaks off ends with an error event."""
    try:
        await passthrough.pass_on(reply, client, ours)
    except UpstreamFault as fault:
        if not client.status or _is_compressed(reply) or not _is_stream(reply, otherwise=False):
            raise
        await client.finish(b"\n\n" + sse.encode(fault.body()))
        raise Interrupted(fault) from fault


class _Line:
    """The client's end of a stream: what goes out, and a comment now and then so that nobody takes it for dead."""

    def __init__(self, client: Exchange, heartbeat: float) -> None:
        self._client = client
        self._heartbeat = heartbeat
        self._writing = asyncio.Lock()
        self._clock = asyncio.get_running_loop().time
        self._heard = self._clock()

    @property
    def open(self) -> bool:
        """Whether the reply has begun."""
        return bool(self._client.status)

    async def start(self, status: int, headers: Headers) -> None:
        async with self._writing:
            await self._client.start(status, headers)
            self._heard = self._clock()

    async def write(self, data: bytes) -> None:
        """Whole events only: a comment may come behind them."""
        if data:
            async with self._writing:
                await self._client.write(data)
                self._heard = self._clock()

    async def finish(self, data: bytes) -> None:
        async with self._writing:
            await self._client.finish(data)

    @asynccontextmanager
    async def kept_alive(self) -> AsyncIterator[None]:
        beating = asyncio.create_task(self._beat())
        try:
            yield
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)

    async def _beat(self) -> None:
        while True:
            silent = self._clock() - self._heard
            if silent < self._heartbeat:
                await asyncio.sleep(self._heartbeat - silent)
            elif self._writing.locked() or not self.open:
                await asyncio.sleep(self._heartbeat)
            else:
                await self.write(sse.comment(b"working"))


class _Conversation:
    def __init__(self, turn: ChatTurn, line: _Line, partner: TurnIO) -> None:
        self._turn = turn
        self._line = line
        self._partner = partner
        self._headers = Headers()
        self._status = 200

    async def run(self) -> None:
        async with aclosing(await self._ask(self._turn.request())) as reply:
            self._status, self._headers = reply.status, reply.headers
            await self._read(reply)
        while self._turn.state is not State.DONE:
            self._turn.answer(await self._partner.resolve(self._turn.calls))
            if self._turn.state is State.READY:
                async with aclosing(await self._ask_again()) as reply:
                    await self._read(reply)
        if self._turn.hidden is not None:
            await self._partner.remember(self._turn)
        await self._end(self._turn.close())

    async def _ask(self, body: bytes) -> UpstreamReply:
        """The reply to one request. Raises Refusal unless upstream has said 200."""
        reply = await self._partner.send(body)
        if reply.status == 200:
            return reply
        async with aclosing(reply):
            raise await refusal(reply)

    async def _ask_again(self) -> UpstreamReply:
        """The reply to a follow-up. The client's visible reply depends on it, so passing faults are tried again."""
        body = self._turn.request()
        reworded = False
        for attempt in range(RETRIES):
            try:
                return await self._ask(body)
            except Refusal as refusal:
                if is_overflow(refusal.status, refusal.said()) and not reworded:
                    reworded = True
                    self._turn.reword(TOO_LONG)
                    body = self._turn.request()
                elif _is_passing(refusal.status):
                    await asyncio.sleep(_pause(refusal.headers, attempt))
                else:
                    raise
            except (UpstreamUnreachable, UpstreamBroken):
                await asyncio.sleep(_pause(Headers(), attempt))
        return await self._ask(body)

    # -- reading --

    async def _read(self, reply: UpstreamReply) -> None:
        if _is_stream(reply, otherwise=self._turn.streams):
            await self._read_stream(reply)
        else:
            whole = await body(reply)
            await self._line.write(await self._taken(partial(self._turn.receive_whole, whole), len(whole)))
        with _usable():
            out = self._turn.end()
        await self._line.write(out)

    async def _read_stream(self, reply: UpstreamReply) -> None:
        if not self._turn.rounds:
            await self._line.start(self._status, self._reply_headers([]))
        decoder = sse.EventDecoder()
        async with aclosing(decoded(reply)) as chunks:
            async for chunk in chunks:
                await self._line.write(await self._received(decoder.feed, chunk))
                if self._turn.over:
                    await _read_out(chunks)
                    return
        out = await self._received(lambda _: decoder.flush(), b"")
        await self._line.write(out + b"\n\n" if out else b"")

    async def _received(self, events_of: Callable[[bytes], list[sse.ServerSentEvent]], chunk: bytes) -> bytes:
        """What goes to the client of the events that are complete with this chunk."""
        with _usable():
            events = events_of(chunk)
        return await self._taken(
            lambda: b"".join(map(self._turn.receive, events)), sum(len(event.raw) for event in events)
        )

    async def _taken(self, work: Callable[[], bytes], size: int) -> bytes:
        """What goes to the client of so many bytes of upstream's."""
        with _usable():
            return work() if size <= INLINE_BYTES else await self._partner.aside(work)

    # -- writing --

    async def _end(self, last: bytes) -> None:
        if not self._line.open:
            await self._line.start(self._status, self._reply_headers([(b"content-length", b"%d" % len(last))]))
        await self._line.finish(last)

    def _reply_headers(self, more: Sequence[Header]) -> Headers:
        headers = self._headers.without((b"content-length", b"content-encoding"))
        return reply_headers(headers, [*self._partner.headers(self._turn), *more])


async def _read_out(chunks: AsyncIterator[bytes]) -> None:
    with suppress(TimeoutError, UpstreamFault):
        async with asyncio.timeout(LAST_BYTES):
            async for _ in chunks:
                pass


@contextlib.contextmanager
def _usable() -> Iterator[None]:
    """What the core says of a reply, in the terms of whose fault it is."""
    try:
        yield
    except (Broken, sse.TooLarge) as error:
        raise UpstreamBroken(f"Upstream's reply cannot be used: {error}") from error


def _is_stream(reply: UpstreamReply, *, otherwise: bool) -> bool:
    """By its content type; `otherwise` where that says neither."""
    kinds = b" ".join(reply.headers.get_all(b"content-type")).lower()
    return b"text/event-stream" in kinds or (otherwise and b"json" not in kinds)


def _is_compressed(reply: UpstreamReply) -> bool:
    return bool(reply.headers.get_all(b"content-encoding"))


async def body(reply: UpstreamReply) -> bytes:
    """A whole reply, decompressed. Raises UpstreamFault."""
    return await _gathered(decoded(reply))


async def refusal(reply: UpstreamReply) -> Refusal:
    """A reply that is no 200, as it came. Raises UpstreamFault."""
    return Refusal(reply.status, reply.headers, await _gathered(reply.chunks()))


async def _gathered(chunks: AsyncGenerator[bytes, None]) -> bytes:
    whole = bytearray()
    async with aclosing(chunks):
        async for chunk in chunks:
            whole += chunk
            if len(whole) > WHOLE_LIMIT:
                raise UpstreamBroken(f"Upstream's reply is larger than {WHOLE_LIMIT} bytes")
    return bytes(whole)


def _error_event(refusal: Refusal, fault: UpstreamFault) -> bytes:
    """Upstream's own words, where they have the shape that clients know."""
    said = refusal.said()
    try:
        known = not rawjson.is_null(rawjson.members(said).get("error"))
        return sse.encode(msgspec.json.format(said, indent=-1) if known else fault.body())
    except (NotJson, msgspec.MsgspecError):
        return sse.encode(fault.body())


def _is_passing(status: int) -> bool:
    return status == 429 or status >= 500


def _pause(headers: Headers, attempt: int) -> float:
    """Seconds until the next try: what upstream says, or a little more each time."""
    said = headers.get(b"retry-after").decode("latin-1")
    seconds = _retry_after(said)
    return FIRST_RETRY * 2**attempt if seconds is None else min(max(seconds, 0.0), LONGEST_RETRY)


def _retry_after(said: str) -> float | None:
    """Seconds, or a date (RFC 9110, 10.2.3)."""
    if said.replace(".", "", 1).isdecimal():
        return float(said)
    try:
        return (parsedate_to_datetime(said) - datetime.now(UTC)).total_seconds()
    except (ValueError, TypeError):
        return None
