"""Drives one turn: sends, feeds what comes back, has our tools answered, asks again, and ends the client's reply."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Iterator, Sequence
from contextlib import aclosing
from typing import Protocol, TypeVar

from proxy import relay
from proxy.client import Client
from proxy.core import sse
from proxy.core.overflow import is_overflow
from proxy.core.transcript import Call
from proxy.core.turn import Broken, State, Turn
from proxy.errors import UpstreamBroken, UpstreamFault
from proxy.headers import Headers, reply_headers, without
from proxy.upstream import Reply, decoded

T = TypeVar("T")

HEARTBEAT = 15.0
"""Seconds of silence after which a comment goes out: proxies and clients give up on silent streams after 30 to 60."""
RETRIES = 2
LONGEST_RETRY = 30.0
"""Seconds of `Retry-After` that a client's open reply is kept waiting for."""
WHOLE_LIMIT = 64 << 20
"""Bytes of a reply that is not a stream."""
TOO_LONG = "The answer was too long for what room is left. Ask for fewer lines."


class Refusal(Exception):
    """Upstream did not answer 200, and nothing has been sent to the client yet."""

    def __init__(self, status: int, headers: Headers, body: bytes) -> None:
        super().__init__(f"upstream answered {status}")
        self.status = status
        self.headers = headers
        self.body = body


class Partner(Protocol):
    """What a turn needs of the world around it."""

    async def send(self, body: bytes) -> Reply:
        """One round's request. Raises UpstreamFault."""

    async def resolve(self, calls: Sequence[Call]) -> list[str]:
        """The answers to calls of our tools, in their order."""

    async def remember(self, turn: Turn) -> None:
        """Write down what the finished turn hid, before the client's reply ends."""

    def headers(self, turn: Turn) -> Headers:
        """Ours, for the client's reply."""


async def converse(turn: Turn, client: Client, partner: Partner) -> None:
    """The whole turn. Raises Refusal, UpstreamFault and ClientGone only as long as nothing went to the client.

    What fails later becomes an error event at the end of the stream, as OpenAI's API does it; the fault is raised
    afterwards as Interrupted, for the record.
    """
    try:
        await _Conversation(turn, client, partner).run()
    except (UpstreamFault, Refusal) as error:
        if not client.status:
            raise
        fault = error if isinstance(error, UpstreamFault) else UpstreamBroken(f"Upstream answered {error.status}")
        await client.finish(sse.encode(fault.body()))
        raise Interrupted(fault) from error


async def pass_on(reply: Reply, client: Client, ours: Headers) -> None:
    """A reply to the client's own request, byte for byte; a stream that breaks off ends with an error event."""
    try:
        await relay.pass_on(reply, client, ours)
    except UpstreamFault as fault:
        if not client.status or not _is_stream(reply) or _is_compressed(reply):
            raise
        await client.finish(b"\n\n" + sse.encode(fault.body()))
        raise Interrupted(fault) from fault


class Interrupted(Exception):
    """The reply was begun and could not be brought to its end; the client was told."""

    def __init__(self, fault: UpstreamFault) -> None:
        super().__init__(fault.message)
        self.fault = fault


class _Conversation:
    def __init__(self, turn: Turn, client: Client, partner: Partner) -> None:
        self._turn = turn
        self._client = client
        self._partner = partner
        self._headers: Headers = []
        self._status = 200
        self._shown = b""
        """A whole reply that goes to the client as it came."""

    async def run(self) -> None:
        async with aclosing(await self._partner.send(self._turn.request())) as reply:
            await self._check(reply)
            self._status, self._headers = reply.status, reply.headers
            await self._read(reply)
        while self._turn.state is not State.DONE:
            if self._turn.state is State.CALLING:
                self._turn.answer(await self._patiently(self._partner.resolve(self._turn.calls)))
            if self._turn.state is State.READY:
                async with aclosing(await self._patiently(self._next_round())) as reply:
                    await self._read(reply)
        await self._end()

    async def _end(self) -> None:
        if self._turn.hidden is not None:
            await self._patiently(self._partner.remember(self._turn))
        last = self._shown or self._turn.close()
        if self._client.status:
            await self._client.finish(last)
        elif last:
            await self._whole(last)

    # -- reading --

    async def _read(self, reply: Reply) -> None:
        if _is_stream(reply):
            await self._read_stream(reply)
        else:
            await self._read_whole(reply)

    async def _read_stream(self, reply: Reply) -> None:
        if not self._client.status:
            await self._start()
        decoder = sse.Decoder()
        async with aclosing(decoded(reply)) as chunks:
            async for chunk in chunks:
                await self._pass_on(self._received(decoder, chunk))
        with _usable():
            rest = b"".join(map(self._taken, decoder.flush())) + self._turn.end()
        await self._pass_on(rest)

    def _received(self, decoder: sse.Decoder, chunk: bytes) -> bytes:
        with _usable():
            return b"".join(map(self._taken, decoder.feed(chunk)))

    def _taken(self, event: sse.Event) -> bytes:
        return self._turn.receive(event) if self._turn.state is State.READING else b""

    async def _read_whole(self, reply: Reply) -> None:
        if self._client.status:
            raise UpstreamBroken("Upstream began with a stream and went on without one")
        whole = await body(reply)
        with _usable():
            self._shown = self._turn.receive_whole(whole)

    # -- writing --

    async def _start(self) -> None:
        headers = without(self._headers, (b"content-length", b"content-encoding"))
        await self._client.start(self._status, reply_headers(headers, self._partner.headers(self._turn)))

    async def _whole(self, body: bytes) -> None:
        headers = without(self._headers, (b"content-length", b"content-encoding"))
        ours = [*self._partner.headers(self._turn), (b"content-length", b"%d" % len(body))]
        await self._client.start(self._status, reply_headers(headers, ours))
        await self._client.finish(body)

    async def _pass_on(self, data: bytes) -> None:
        if data:
            await self._client.write(data)

    async def _patiently(self, work: Awaitable[T]) -> T:
        """Wait, with a comment now and then so that nobody takes the stream for dead."""
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait([task], timeout=HEARTBEAT))[0]:
                if self._client.status:
                    await self._client.write(sse.comment(b"working"))
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    # -- later rounds --

    async def _next_round(self) -> Reply:
        """The reply to a follow-up. The client's visible reply depends on it, so passing faults are tried again."""
        body = self._turn.request()
        reworded = False
        for attempt in range(RETRIES + 1):
            try:
                return await self._asked(body)
            except Refusal as refusal:
                if is_overflow(refusal.status, refusal.body) and not reworded:
                    reworded = True
                    self._turn.reword(TOO_LONG)
                    body = self._turn.request()
                    continue
                if attempt == RETRIES or not _is_passing(refusal.status):
                    raise
                await asyncio.sleep(_pause(refusal.headers, attempt))
            except UpstreamFault:
                if attempt == RETRIES:
                    raise
                await asyncio.sleep(_pause([], attempt))
        raise UpstreamBroken("Upstream has no room for what its own calls brought back")

    async def _asked(self, body: bytes) -> Reply:
        reply = await self._partner.send(body)
        try:
            await self._check(reply)
        except BaseException:
            await reply.aclose()
            raise
        return reply

    async def _check(self, reply: Reply) -> None:
        """Raises Refusal unless upstream has said 200."""
        if reply.status != 200:
            raise await refusal(reply)


@contextlib.contextmanager
def _usable() -> Iterator[None]:
    """What the core says of a reply, in the terms of whose fault it is."""
    try:
        yield
    except (Broken, sse.TooLarge) as error:
        raise UpstreamBroken(f"Upstream's reply cannot be used: {error}") from error


def _is_stream(reply: Reply) -> bool:
    return any(
        name.lower() == b"content-type" and b"text/event-stream" in value.lower() for name, value in reply.headers
    )


def _is_compressed(reply: Reply) -> bool:
    return any(name.lower() == b"content-encoding" for name, _ in reply.headers)


async def body(reply: Reply) -> bytes:
    """A whole reply, decompressed. Raises UpstreamFault."""
    return await _gathered(decoded(reply))


async def refusal(reply: Reply) -> Refusal:
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


def _is_passing(status: int) -> bool:
    return status == 429 or status >= 500


def _pause(headers: Headers, attempt: int) -> float:
    """Seconds until the next try: what upstream says, or a little more each time."""
    said = next((value for name, value in headers if name.lower() == b"retry-after"), b"")
    return min(float(said), LONGEST_RETRY) if said.isdigit() else 0.5 * 2**attempt
