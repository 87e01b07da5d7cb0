"""One turn's conversation with upstream.

    send a round ──> read its reply ──calls of our tools──> answer them ──> send the next round
                                    └──done──> record what the client does not see ──> end the client's reply

`dialects.turn` decides what is sent and what the client sees. Here is its I/O: upstream, our tools,
the store, threads, and the client's reply, in which no stream is silent for long.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import TypeVar

from msgspec.structs import replace

from proxy import rawjson, sse
from proxy.dialects import refusals
from proxy.dialects.turn import Turn
from proxy.errors import UpstreamBroken, UpstreamFault, UpstreamUnreachable
from proxy.plan.turn import Broken, State
from proxy.rawjson import NotJson
from proxy.requests import relay
from proxy.requests.exchange import Exchange
from proxy.requests.relay import is_stream
from proxy.requests.rounds import Rounds
from proxy.requests.versions import REFUSAL_LIMIT, Refusal
from proxy.threads import SMALL
from proxy.upstream.client import UpstreamReply, decoded_reply
from proxy.upstream.headers import DIGESTS, Header, Headers, reply_headers

T = TypeVar("T")

PARSED = 32
"""How many times as much it costs to parse a reply as to look through a request: 32 KiB take a
thread."""
LINE = 32
"""Bytes that a line of a stream counts as, however short it is. A few bytes can be an event."""
SHORT = SMALL // PARSED // LINE
"""Bytes of a stream that take no thread, whatever they are."""
LAST_BYTES = 0.2
"""Seconds that a stream has to end after its last event. Its connection is reused only if we read
it to its end."""
EARLY = 32 << 10
"""Most bytes of a stream that wait for its first event with data."""
HEARTBEAT = 5.0
"""Seconds without a sign of life after which the client gets one: many clients give up after 30 to
60 of them. The head of a stream waits just as long for the first event, which may be an error."""
RETRIES = 2
LONGEST_RETRY = 30.0
"""Most seconds of a `Retry-After` that we wait, because the client's reply stays open meanwhile."""
FIRST_RETRY = 0.5
"""Seconds before the first retry if upstream does not say. They double for each further retry."""
NOT_TAKEN = "This image or file cannot be shown again: the API that serves you does not take it in a result."
TOO_LONG = "The answer was too long for what room is left. Ask for fewer lines."


async def converse(
    turn: Turn, client: Exchange, io: Rounds, *, heartbeat: float = HEARTBEAT
) -> Refusal | None:
    """Drive the turn to its end. Raises UpstreamFault, or Refusal if the client was sent nothing.
    Returns the refusal after which the client's own request was sent, if there was one.

    After a fault within a reply, the client's stream ends with an error event, as in OpenAI's API,
    and the fault is raised for the record. A stream is never without a sign of life for longer than
    `heartbeat` seconds.

    A refusal of the first round is raised. If a later round is refused, or the first one after the
    reply's head was sent, before the client has seen anything of the reply, the client's own
    request is sent instead.
    """
    try:
        return await _Conversation(turn, client, io).run(heartbeat)
    except UpstreamFault as fault:
        if client.status:
            await client.break_off(fault)
        raise
    except Refusal as refusal:
        if not client.status:
            raise
        broken = UpstreamBroken(f"Upstream answered {refusal.status} to a follow-up request")
        await client.finish(turn.error_event(broken, refusal.error_body()))
        raise broken from refusal


class _Conversation:
    """The head of the reply waits for its first bytes, or for a silence: a stream's first event may
    be an error."""

    def __init__(self, turn: Turn, client: Exchange, io: Rounds) -> None:
        self._turn = turn
        self._client = client
        self._io = io
        self._headers = Headers()  # of upstream's first reply
        self._reply_head: tuple[int, Headers] | None = (
            None  # of the client's reply, once it is known
        )
        self._writing = asyncio.Lock()
        """Held from when the turn makes bytes until they are written, because events have
        numbers."""
        self._clock = asyncio.get_running_loop().time
        self._signs = 0  # of life so far
        self._lived = self._clock()  # when the newest one was written
        self._begun = False  # whether any event with data has come
        self._accepted = False  # whether that upstream has taken the request is recorded
        self._heard = 0  # bytes of all replies
        self._showing = False  # whether the newest answers have an image or a file
        self._refused: Refusal | None = None  # after which the client's own request was sent

    async def run(self, heartbeat: float) -> Refusal | None:
        # an event wakes this task alone, and not all that waits for the reply
        rounds = asyncio.create_task(self._rounds())
        left = heartbeat
        try:
            while not (await asyncio.wait([rounds], timeout=left))[0]:
                left = await self._beat(rounds, heartbeat)
            await rounds
        except (Broken, NotJson, sse.TooLarge) as error:
            raise UpstreamBroken(f"Upstream's reply cannot be used: {error}") from error
        finally:
            rounds.cancel()
            await asyncio.gather(rounds, return_exceptions=True)
        return self._refused

    async def _rounds(self) -> None:
        turn = self._turn
        await self._round(retries=0)
        await self._accept()
        while turn.state is not State.DONE:
            if turn.state is State.CALLING:
                answers = await self._io.resolve(await self._run(lambda: turn.calls))
                texts = [one.text for one in answers]
                parts = [one.part for one in answers]
                self._showing = any(parts)
                await self._run(partial(turn.answer, texts, parts))
            if turn.state is State.READY:
                await self._round(RETRIES)
        last = await self._run(turn.close)
        await self._io.remember(turn)
        if self._reply_head is None:
            self._reply_head = 200, self._reply_headers([(b"content-length", b"%d" % len(last))])
            self._client.error_event = None
        async with self._writing:
            await self._start()
            await self._client.finish(last)

    async def _accept(self) -> None:
        if not self._accepted:
            self._accepted = True
            await self._io.on_accepted()

    # -- writing to the client --

    async def _write(self, data: bytes) -> None:
        """Send `data`, while holding the lock. It must end with a whole event, because a heartbeat
        may follow."""
        if data:
            if not self._client.status:
                await self._start()
            await self._client.write(data)
        if self._turn.signs > self._signs:
            self._signs = self._turn.signs
            self._lived = self._clock()

    async def _start(self) -> None:
        if self._reply_head is not None and not self._client.status:
            await self._client.start(*self._reply_head)

    async def _beat(self, rounds: asyncio.Task[None], heartbeat: float) -> float:
        """Write a heartbeat if the stream has been silent for so many seconds, so that nobody takes
        it for dead. Returns the seconds until it may be time for the next one. While this waits for
        the lock, the rounds may end, perhaps with a refusal that is to be the client's reply."""
        async with self._writing:
            left = self._lived + heartbeat - self._clock()
            if left <= 0 and self._reply_head is not None and not rounds.done():
                await self._write(self._turn.heartbeat())
                self._lived = self._clock()
        return left if left > 0 else heartbeat

    # -- asking upstream --

    async def _round(self, retries: int) -> None:
        """Ask and read the reply. Instead of a refused round, send the client's own request if that
        is possible."""
        try:
            await self._read(await self._ask(retries))
        except Refusal as refusal:
            first = not (self._turn.rounds or self._client.status)
            in_vain = not self._turn.rounds and self._io.is_final(refusal)
            if first or in_vain or not (self._io.own_fits and self._turn.start_over()):
                raise
            self._refused = refusal
            await self._read(await self._ask(retries=0))

    async def _ask(self, retries: int) -> UpstreamReply:
        """Return the reply to the turn's next request. Raises Refusal if upstream does not answer
        200. The client's reply depends on a follow-up, so that one is sent again after a passing
        fault."""
        body = await self._run(self._turn.request)
        shortened = False
        plain = not self._showing
        for attempt in range(retries):
            try:
                return await self._answered(body)
            except Refusal as refusal:
                too_long = refusals.is_overflow(refusal.status, refusal.error_body())
                passing = refusal.status == 429 or refusal.status >= 500
                if too_long and not shortened:
                    shortened = plain = True
                    self._turn.reword(TOO_LONG)
                    self._io.forget_answers()
                    body = await self._run(self._turn.request)
                elif not (plain or passing):
                    plain = True
                    self._turn.reword(NOT_TAKEN, only_parts=True)
                    body = await self._run(self._turn.request)
                elif passing:
                    await asyncio.sleep(_pause(refusal.headers, attempt))
                else:
                    raise
            except (UpstreamUnreachable, UpstreamBroken):
                await asyncio.sleep(_pause(Headers(), attempt))
        return await self._answered(body)

    async def _answered(self, body: bytes) -> UpstreamReply:
        reply = await self._io.send(body)
        if reply.status == 200:
            return reply
        async with aclosing(reply):
            raise await Refusal.read(reply)

    # -- reading --

    async def _read(self, reply: UpstreamReply) -> None:
        self._headers = self._headers or reply.headers
        async with aclosing(reply):
            if is_stream(reply, otherwise=self._turn.streams):
                await self._read_stream(reply)
            else:
                await self._read_whole(reply)
            async with self._writing:
                await self._write(await self._run(self._turn.end))

    async def _read_whole(self, reply: UpstreamReply) -> None:
        whole = await relay.body(reply)
        self._heard += len(whole)
        async with self._writing:
            out = await self._run(partial(self._turn.receive_whole, whole), PARSED * len(whole))
            if self._turn.refusal is not None:
                raise self._refusal(reply, whole, whole)
            await self._write(out)

    async def _read_stream(self, reply: UpstreamReply) -> None:
        if not self._client.status:
            self._client.error_event = self._turn.error_event
            self._reply_head = (reply.status, self._reply_headers([]))
            self._lived = self._clock()
        decoder = sse.EventDecoder()
        # what came before the first event with data, for the client and as it came
        early = raw = b""
        async with aclosing(decoded_reply(reply)) as chunks:
            async for chunk in chunks:
                self._heard += len(chunk)
                async with self._writing:
                    out = await self._received(decoder, chunk)
                    if self._turn.refusal is not None:
                        rest = await _rest(chunks)
                        raise self._refusal(reply, raw + chunk + rest, early + out + rest)
                    if not (self._begun or self._client.status or len(raw) > EARLY):
                        early = early + out
                        raw = raw + chunk
                        continue
                    await self._write(early + out)
                    early = b""
                    if self._turn.over:
                        if rest := await _rest(chunks):
                            await self._write(await self._received(decoder, rest))
                        return
                if self._begun and not self._accepted:
                    await self._accept()
        async with self._writing:
            out = early + await self._received(decoder, None)
            if self._turn.refusal is not None:
                raise self._refusal(reply, raw, out)
            await self._write(out)

    def _refusal(self, reply: UpstreamReply, came: bytes, shown: bytes) -> Refusal:
        """Return the refusal that an error in the place of a reply is. The client gets the reply as
        it `came`, decompressed, or what it may be `shown` of it."""
        headers = reply.headers.without((b"content-encoding", b"content-length"))
        return Refusal(
            reply.status, headers, shown if self._turn.hides else came, self._turn.refusal
        )

    async def _received(self, decoder: sse.EventDecoder, chunk: bytes | None) -> bytes:
        """Feed the events that this chunk completes to the turn, and return the bytes for the
        client. None: the end."""

        came = chunk or b""
        size = decoder.held + len(came)
        if size <= SHORT:
            return self._turned(decoder, chunk)
        lines = came.count(b"\n") + came.count(b"\r")
        work = partial(self._turned, decoder, chunk)
        return await self._run(work, PARSED * max(size, lines * LINE))

    def _turned(self, decoder: sse.EventDecoder, chunk: bytes | None) -> bytes:
        events = _ended(decoder.flush()) if chunk is None else decoder.feed(chunk)
        if not self._begun:
            self._begun = any(event.data is not None for event in events)
        return b"".join(map(self._turn.receive, events))

    async def _run(self, work: Callable[[], T], size: int | None = None) -> T:
        """Return the result of `work` that looks through `size` bytes, or through all that the turn
        holds."""
        if size is None:
            size = max(self._io.size, PARSED * self._heard)
        return work() if size <= SMALL else await self._io.aside(work, size)

    def _reply_headers(self, more: Sequence[Header]) -> Headers:
        headers = self._headers.without((b"content-length", b"content-encoding", *DIGESTS))
        return reply_headers(headers, [*self._io.headers(self._turn), *more])


async def _rest(chunks: AsyncIterator[bytes]) -> bytes:
    """Return what follows soon after the last event."""
    rest = bytearray()
    with suppress(TimeoutError, UpstreamFault):
        async with asyncio.timeout(LAST_BYTES):
            async for chunk in chunks:
                rest += chunk[: REFUSAL_LIMIT - len(rest)]
    return bytes(rest)


def _ended(unfinished: Sequence[sse.ServerSentEvent]) -> list[sse.ServerSentEvent]:
    """Return the event after which the stream ended, with the end that it lacks; nothing if it is
    incomplete."""
    return [replace(event, raw=event.raw + b"\n\n") for event in unfinished if not _is_cut(event)]


def _is_cut(event: sse.ServerSentEvent) -> bool:
    """Whether this event, after which the stream ended, is incomplete. Clients discard it, and it
    may be ours."""
    if event.data is None:
        return event.name is not None
    try:
        if event.data.strip() != sse.DONE:
            rawjson.members(event.data)
    except NotJson:
        return True
    return False


def _pause(headers: Headers, attempt: int) -> float:
    """Return the seconds until the next try: those of `Retry-After`, unless that is a date."""
    said = headers.get(b"retry-after").decode("latin-1")
    return (
        min(float(said), LONGEST_RETRY)
        if said.replace(".", "", 1).isdecimal()
        else FIRST_RETRY * (1 << attempt)
    )
