"""One turn's conversation with upstream.

    send a round ──> read its reply ──calls of our tools──> answer them ──> send the next round
                                    └──done──> record what the client does not see ──> end the client's reply

`dialects.turn` decides what is sent and what the client sees. Here is its I/O: upstream, our tools, the store, threads,
and the client's reply, in which no stream is silent for long.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from msgspec.structs import replace

from proxy import rawjson, sse
from proxy.dialects import refusals
from proxy.dialects.turn import Turn
from proxy.errors import UpstreamBroken, UpstreamFault, UpstreamUnreachable
from proxy.plan.history import extend
from proxy.plan.message import ToolCall
from proxy.plan.recognise import Visible
from proxy.plan.turn import Broken, Hidden, State, Verdict
from proxy.rawjson import NotJson
from proxy.requests import relay
from proxy.requests.answers import OurTools
from proxy.requests.exchange import HEARTBEAT, Exchange, ReplyWriter
from proxy.requests.pauses import Pauses
from proxy.requests.relay import REFUSAL_LIMIT, Refusal, Relay, Sink, is_stream
from proxy.tools.answer import ToolAnswer
from proxy.upstream.client import UpstreamReply, decoded
from proxy.upstream.headers import Header, Headers, reply_headers

if TYPE_CHECKING:
    from proxy.requests.cache import MessageCache
    from proxy.requests.planned import Rendered
    from proxy.requests.prepared import Prepared
    from proxy.requests.records import Records
    from proxy.requests.summaries import Summaries
    from proxy.requests.windows import Known
    from proxy.settings import Settings
    from proxy.stores.guarded import Guarded
    from proxy.telemetry.outcome import Outcome
    from proxy.threads import Background, WorkPool
    from proxy.upstream.client import UpstreamClient

T = TypeVar("T")

PARSED = 16
"""How many times as much it costs to parse a reply as to look through a request: 32 KiB take a thread."""
LINE = 32
"""Bytes that a line of a stream counts as, however short it is. A few bytes can be an event."""
LAST_BYTES = 0.2
"""Seconds that a stream has to end after its last event. Its connection is reused only if we read it to its end."""
EARLY = 32 << 10
"""Most bytes of a stream that wait for its first event with data."""
RETRIES = 2
LONGEST_RETRY = 30.0
"""Most seconds of a `Retry-After` that we wait, because the client's reply stays open meanwhile."""
FIRST_RETRY = 0.5
"""Seconds before the first retry if upstream does not say. They double for each further retry."""
NOT_TAKEN = "This image or file cannot be shown again: the API that serves you does not take it in a result."
TOO_LONG = "The answer was too long for what room is left. Ask for fewer lines."


DAY = 86_400


@dataclass
class Spending:
    """What each tenant has spent today, in money. `clock` returns seconds since the epoch."""

    clock: Callable[[], float] = time.time
    _day: int = 0
    _spent: dict[str, float] = field(default_factory=dict)

    def take(self, tenant: str, money: float, most: float) -> bool:
        """Spend this if that leaves the tenant within its day's bound."""
        if (today := int(self.clock() // DAY)) != self._day:
            self._day, self._spent = today, {}
        if self._spent.get(tenant, 0.0) + money > most:
            return False
        self.correct(tenant, money)
        return True

    def correct(self, tenant: str, money: float) -> None:
        """Add what was spent beyond what was taken; less than nothing if it was less."""
        self._spent[tenant] = max(self._spent.get(tenant, 0.0) + money, 0.0)


@dataclass(frozen=True)
class Services:
    """The parts of a process that all of its requests share: `known` is what upstreams have shown, `sink` gets all
    outcomes."""

    settings: Settings
    upstream: UpstreamClient
    relay: Relay
    store: Guarded
    reader: MessageCache
    summaries: Summaries
    background: Background
    threads: WorkPool
    known: Known
    sink: Sink
    pauses: Pauses = field(default_factory=Pauses)
    verifying: Spending | None = None
    """What tenants spend on asking again; None: nothing is asked again."""
    watch: Callable[[Outcome, Prepared], None] | None = None
    """Called with every chat request that has ended, before the sink gets its outcome."""


class Rounds:
    """What the rounds of one request need from outside. `rendered` is the request that is sent."""

    def __init__(
        self,
        services: Services,
        client: Exchange,
        prepared: Prepared,
        rendered: Rendered,
        records: Records,
        accepted: Callable[[], Awaitable[None]],
    ) -> None:
        self.accepted = accepted
        """Called once upstream has answered the first round, and so accepted the request and its credentials."""
        self._services = services
        self._client = client
        self._prepared = prepared
        self._rendered = rendered
        self._planned = rendered.planned
        self._records = records
        self._answers = OurTools(services.threads, services.reader, services.store, prepared, rendered, records)

    @property
    def size(self) -> int:
        """The bytes that building a request looks through."""
        return self._planned.request.size

    @property
    def own_fits(self) -> bool:
        """Whether the client's own request fits the window as far as that is known, so that it may be sent."""
        return self._planned.room.holds(self._planned.tokens)

    def is_final(self, refusal: Refusal) -> bool:
        """Whether upstream refuses the client's own request, too: for its limits, the credentials or the like."""
        return self._planned.dialect.complaint(refusal.status, refusal.said()) is Verdict.FINAL

    async def send(self, body: bytes) -> UpstreamReply:
        """Send one round's request and return the reply. Raises UpstreamFault if there is none."""
        client, prepared, first = self._client, self._prepared, self._client.sent is None
        client.sent = client.sent or time.perf_counter()
        request = self._services.relay.changed(
            client, prepared.tenant, body, self._planned.dialect, prepared.form.without, first=first
        )
        return await self._services.upstream.send(request)

    async def resolve(self, calls: Sequence[ToolCall]) -> Sequence[ToolAnswer]:
        """Return the answers to calls of our tools, in the same order."""
        return await self._answers.resolve(calls)

    def headers(self, turn: Turn) -> Sequence[Header]:
        """Return our headers for the client's reply. One that is no stream is told the number of hidden rounds."""
        ours = self._prepared.headers()
        return ours if self._planned.request.stream else [*ours, (b"x-offload-rounds", b"%d" % turn.rounds)]

    async def aside(self, work: Callable[[], T], size: float) -> T:
        """Return the result of work on upstream's reply that looks through so many bytes."""
        return await self._services.threads.run(self._prepared.tenant.namespace, work, size, begun=True)

    async def remember(self, turn: Turn) -> None:
        """Record what the finished turn hid, under the digest of the history that ends with the visible reply. The
        client's reply ends only afterwards."""
        if continuation := turn.continuation:
            await self._records.keep_continuation(continuation)
        planned, hidden, model = self._planned, turn.hidden, self._planned.request.model
        run = partial(self._services.threads.run, self._prepared.tenant.namespace, begun=True)
        if hidden is None:
            await self._records.contest(planned.chain[-1], model, lambda: run(lambda: Visible.of(*turn.visible)))
            return
        link, visible, sizes = await run(partial(self._measured, turn, hidden))
        counted = replace(hidden, tokens=sum(sizes), sizes=sizes)
        places = {*planned.befores(), *planned.coming(visible).anchors()}
        await self._records.remember(link, model, counted, places, visible)

    def _measured(self, turn: Turn, hidden: Hidden) -> tuple[bytes, Visible, tuple[int, ...]]:
        """Return the digest of the history that ends with the reply, the reply, and the tokens of what it hid."""
        visible, planned, dialect = turn.visible, self._planned, self._planned.dialect
        count = self._services.reader.counter(planned.request.model)
        sizes = tuple(dialect.read(raw, planned.reading, count).tokens for raw in (*hidden.before, *hidden.after))
        return extend(planned.chain[-1], dialect.reply_meaning(*visible)), Visible.of(*visible), sizes


async def converse(turn: Turn, client: Exchange, io: Rounds, *, heartbeat: float = HEARTBEAT) -> Refusal | None:
    """Drive the turn to its end. Raises UpstreamFault, or Refusal if the client was sent nothing. Returns the refusal
    after which the client's own request was sent, if there was one.

    After a fault within a reply, the client's stream ends with an error event, as in OpenAI's API, and the fault is
    raised for the record. A stream is never silent for longer than `heartbeat` seconds.

    A refusal of the first round is raised. If a later round is refused, or the first one after the reply's head was
    sent, before the client has seen anything of the reply, the client's own request is sent instead.
    """
    reply = ReplyWriter(client, heartbeat)
    try:
        async with reply.kept_alive():
            return await _Conversation(turn, reply, io).run()
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


class _Conversation:
    def __init__(self, turn: Turn, reply: ReplyWriter, io: Rounds) -> None:
        self._turn = turn
        self._reply = reply
        self._io = io
        self._headers = Headers()
        self._begun = False  # whether any event with data has come
        self._heard = 0  # bytes of all replies
        self._decoder = sse.EventDecoder()
        self._showing = False  # whether the newest answers have an image or a file
        self._refused: Refusal | None = None  # after which the client's own request was sent

    async def run(self) -> Refusal | None:
        turn = self._turn
        await self._round(retries=0)
        await self._io.accepted()
        while turn.state is not State.DONE:
            if turn.state is State.CALLING:
                answers = await self._io.resolve(await self._taken(lambda: turn.calls))
                texts, parts = [one.text for one in answers], [one.part for one in answers]
                self._showing = any(parts)
                await self._taken(partial(turn.answer, texts, parts))
            if turn.state is State.READY:
                await self._round(RETRIES)
        last = await self._taken(turn.close)
        await self._io.remember(turn)
        if not self._reply.prepared:
            self._reply.prepare(200, self._reply_headers([(b"content-length", b"%d" % len(last))]))
        await self._reply.finish(last)
        return self._refused

    async def _round(self, retries: int) -> None:
        """Ask and read the reply. Instead of a refused round, send the client's own request if that is possible."""
        try:
            await self._read(await self._ask(retries))
        except Refusal as refusal:
            first = not (self._turn.rounds or self._reply.open)
            in_vain = not self._turn.rounds and self._io.is_final(refusal)
            if first or in_vain or not (self._io.own_fits and self._turn.start_over()):
                raise
            self._refused = refusal
            await self._read(await self._ask(retries=0))

    async def _ask(self, retries: int) -> UpstreamReply:
        """Return the reply to the turn's next request. Raises Refusal if upstream does not answer 200. The client's
        reply depends on a follow-up, so that one is sent again after a passing fault."""
        body = await self._taken(self._turn.request)
        reworded = False
        for attempt in range(retries):
            try:
                return await self._answered(body)
            except Refusal as refusal:
                too_long = refusals.is_overflow(refusal.status, refusal.said())
                passing = refusal.status == 429 or refusal.status >= 500
                if (too_long or (self._showing and not passing)) and not reworded:
                    reworded = True
                    self._turn.reword(TOO_LONG if too_long else NOT_TAKEN)
                    body = await self._taken(self._turn.request)
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
            raise await relay.refusal(reply)

    # -- reading --

    async def _read(self, reply: UpstreamReply) -> None:
        self._headers = self._headers or reply.headers
        async with aclosing(reply):
            if is_stream(reply, otherwise=self._turn.streams):
                await self._read_stream(reply)
            else:
                await self._read_whole(reply)
            await self._reply.write(await self._taken(self._turn.end))

    async def _read_whole(self, reply: UpstreamReply) -> None:
        whole = await relay.body(reply)
        self._heard += len(whole)
        out = await self._taken(partial(self._turn.receive_whole, whole), PARSED * len(whole))
        if self._turn.refusal is not None:
            raise _refused(reply, whole, self._turn.refusal)
        await self._reply.write(out)

    async def _read_stream(self, reply: UpstreamReply) -> None:
        if not self._reply.open:
            self._reply.prepare(reply.status, self._reply_headers([]), self._turn.error_event)
        decoder = self._decoder = sse.EventDecoder()
        early = raw = b""  # what came before the first event with data, for the client and as it came
        async with aclosing(decoded(reply)) as chunks:
            async for chunk in chunks:
                self._heard += len(chunk)
                out = await self._received(decoder.feed, chunk)
                if self._turn.refusal is not None:
                    raise _refused(reply, raw + chunk + await _rest(chunks), self._turn.refusal)
                if not (self._begun or self._reply.open or len(raw) > EARLY):
                    early, raw = early + out, raw + chunk
                    continue
                await self._reply.write(early + out)
                early = b""
                if self._turn.over:
                    if rest := await _rest(chunks):
                        await self._reply.write(await self._received(decoder.feed, rest))
                    return
        out = early + await self._received(lambda _: _ended(decoder.flush()), b"")
        if self._turn.refusal is not None:
            raise _refused(reply, raw, self._turn.refusal)
        await self._reply.write(out)

    async def _received(self, events_of: Callable[[bytes], list[sse.ServerSentEvent]], chunk: bytes) -> bytes:
        """Feed the events that this chunk completes to the turn, and return the bytes for the client."""
        lines = chunk.count(b"\n") + chunk.count(b"\r")
        size = PARSED * max(self._decoder.held + len(chunk), lines * LINE)
        return await self._taken(lambda: self._turned(events_of(chunk)), size)

    def _turned(self, events: Sequence[sse.ServerSentEvent]) -> bytes:
        self._begun = self._begun or any(event.data is not None for event in events)
        return b"".join(map(self._turn.receive, events))

    async def _taken(self, work: Callable[[], T], size: int | None = None) -> T:
        """Return the result of `work` that looks through `size` bytes, or through all that the turn holds. Raises
        UpstreamBroken if upstream's reply cannot be used."""
        if size is None:
            size = max(self._io.size, PARSED * self._heard)
        try:
            return await self._io.aside(work, size)
        except (Broken, NotJson, sse.TooLarge) as error:
            raise UpstreamBroken(f"Upstream's reply cannot be used: {error}") from error

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


def _pause(headers: Headers, attempt: int) -> float:
    """Return the seconds until the next try: those of `Retry-After`, unless that is a date."""
    said = headers.get(b"retry-after").decode("latin-1")
    return min(float(said), LONGEST_RETRY) if said.replace(".", "", 1).isdecimal() else FIRST_RETRY * (1 << attempt)
