"""The two ends of a measurement: an upstream that only replies, and a client that only asks.

Both share the machine with the system under measurement. To use little of it they implement
HTTP/1.1 directly on uvloop and discard the bodies that they receive. The upstream is `python -m
bench.wire PORT`.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import uvloop

EVENTS = 100
"""Events of a streamed reply, without `[DONE]`."""
WORDS = "It is the index. "
SAID = b"It is the index."
"""A text in every reply."""

NAMES = {"id": "chatcmpl-1", "created": 1_760_000_000, "model": "gpt-4.1"}
CHOICE = {
    "index": 0,
    "message": {"role": "assistant", "content": WORDS * 20},
    "finish_reason": "stop",
}
USAGE = {"prompt_tokens": 200, "completion_tokens": 100, "total_tokens": 300}
WHOLE = json.dumps(
    {**NAMES, "object": "chat.completion", "choices": [CHOICE], "usage": USAGE}
).encode()

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nX-Request-Id: req_1\r\nServer: bench\r\n%b\r\n\r\n"
REPLY = HEAD % (b"application/json", b"Content-Length: %d" % len(WHOLE)) + WHOLE
STREAM_HEAD = HEAD % (b"text/event-stream; charset=utf-8", b"Transfer-Encoding: chunked")

STREAMS = (b'"stream": true', b'"stream":true')
"""The member as serialisers write it."""
LAST_CHUNK = b"0\r\n\r\n"
TAIL = max(map(len, (*STREAMS, LAST_CHUNK)))
"""Last bytes of a piece that are kept, because one of these may continue in the next piece."""


def _event(data: str) -> bytes:
    """An SSE event as one HTTP chunk."""
    event = f"data: {data}\n\n".encode()
    return b"%x\r\n%b\r\n" % (len(event), event)


def _delta(number: int) -> str:
    delta = {"role": "assistant", "content": WORDS} if number == 0 else {"content": WORDS}
    ends = "stop" if number == EVENTS - 1 else None
    choice = {"index": 0, "delta": {} if ends else delta, "finish_reason": ends}
    return json.dumps({**NAMES, "object": "chat.completion.chunk", "choices": [choice]})


STREAM = [*(_event(_delta(number)) for number in range(EVENTS)), _event("[DONE]") + LAST_CHUNK]
"""The pieces of a streamed reply, each sent in a write of its own."""


class Message:
    """An incremental parser of one HTTP message: finds the ends of head and body, and whether it
    asks for a stream."""

    def __init__(self) -> None:
        self._head = b""
        self._length: int | None = None  # of the body; None without Content-Length
        self._chunked = False
        self._tail = b""
        self.start = b""
        """The first line, once the head is complete."""
        self.closes = False
        """Whether the connection ends with this message."""
        self.size = 0
        """Bytes of the body so far."""
        self.streams = False

    def feed(self, data: bytes) -> bool:
        """Take the bytes that arrived; returns whether the message is complete."""
        if not self.start:
            head, found, rest = (self._head + data).partition(b"\r\n\r\n")
            if not found:
                self._head = head
                return False
            self._begin(head)
            data = rest
        self.size += len(data)
        across = self._tail + data[:TAIL]
        self.streams = self.streams or any(
            spelling in data or spelling in across for spelling in STREAMS
        )
        self._tail = (self._tail + data[-TAIL:])[-TAIL:]
        if self._length is not None:
            return self.size >= self._length
        return self._chunked and self._tail.endswith(LAST_CHUNK)

    def _begin(self, head: bytes) -> None:
        self.start, _, rest = head.partition(b"\r\n")
        fields = dict(line.lower().partition(b":")[::2] for line in rest.split(b"\r\n"))
        self._chunked = b"chunked" in fields.get(b"transfer-encoding", b"")
        self.closes = b"close" in fields.get(b"connection", b"")
        # A request without either has no body. A reply without either ends with its connection; no
        # system sends one.
        length = fields.get(
            b"content-length", b"" if self._chunked or self.start.startswith(b"HTTP") else b"0"
        )
        self._length = int(length) if length else None


class Replying(asyncio.Protocol):
    """The upstream's end of a connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._loop = asyncio.get_running_loop()
        self._message = Message()

    def data_received(self, data: bytes) -> None:
        if self._message.feed(data):
            streams = self._message.streams
            self._message = Message()
            if streams:
                self._transport.write(STREAM_HEAD)
                self._stream(0)
            else:
                self._transport.write(REPLY)

    def _stream(self, number: int) -> None:
        """Write one event per iteration of the loop: without delay, but each in a write of its
        own."""
        if self._transport.is_closing():
            return
        self._transport.write(STREAM[number])
        if number + 1 < len(STREAM):
            self._loop.call_soon(self._stream, number + 1)


async def serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(
        Replying, "127.0.0.1", port, backlog=1024
    )
    await server.serve_forever()


@dataclass(frozen=True)
class Load:
    """The figures of one run. Times are seconds; `first` is the time to the first byte of a reply's
    body."""

    rate: float
    p50: float
    p99: float
    first: float
    count: int
    cut: int = 0
    """Replies that took too long and were cut off."""


class Failed(Exception):
    """The system failed a request."""


class Silent(Failed):
    """The system does not even reply to a single request."""


@dataclass
class _Run:
    """The state that all connections of a run share."""

    request: bytes
    port: int
    began: float = field(default_factory=time.perf_counter)
    stopping: bool = False
    times: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    last: float = 0.0
    fault: Failed | None = None

    def done(self, asked: float, first: float, now: float) -> None:
        self.times.append(now - asked)
        self.firsts.append(first - asked)
        self.last = now

    def fail(self, reason: str) -> None:
        self.fault = self.fault or Failed(reason)
        self.stopping = True


class _Asking(asyncio.Protocol):
    """Asks, waits for the reply, and asks again, until the run is over or the connection ends."""

    def __init__(self, run: _Run, ended: Callable[[], None]) -> None:
        self._run = run
        self._ended = ended
        self._message = Message()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._ask()

    def data_received(self, data: bytes) -> None:
        whole = self._message.feed(data)
        now = time.perf_counter()
        if not self._first and self._message.size:
            self._first = now
        if whole:
            self._answered(now)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._waiting and not self._run.stopping:
            self._run.fail("the connection was closed before the reply ended")
        self._ended()

    def _ask(self) -> None:
        self._message = Message()
        self._first = 0.0
        self._waiting = True
        self._asked = time.perf_counter()
        self._transport.write(self._run.request)

    def _answered(self, now: float) -> None:
        self._waiting = False
        if not self._message.start.startswith(b"HTTP/1.1 200"):
            self._run.fail(self._message.start.decode("latin-1").partition(" ")[2])
        else:
            self._run.done(self._asked, self._first, now)
        if self._run.stopping or self._message.closes:
            self._transport.close()
        else:
            self._ask()


GRACE = 3.0
"""Seconds to wait at the end of a run for replies under way, before they are cut off."""


async def load(port: int, request: bytes, connections: int, seconds: float) -> Load:
    """Ask on so many connections at once for so long. Raises Failed if a reply is not a 200, or
    none arrives."""
    run = _Run(request, port)
    loop = asyncio.get_running_loop()
    stop = loop.call_later(seconds, setattr, run, "stopping", True)
    asking = [asyncio.create_task(_connection(run)) for _ in range(connections)]
    _, late = await asyncio.wait(asking, timeout=seconds + GRACE)
    stop.cancel()
    run.stopping = True
    for task in late:
        task.cancel()
    ended = await asyncio.gather(*asking, return_exceptions=True)
    broken = next((error for error in ended if isinstance(error, OSError)), None)
    if run.fault or broken:
        raise run.fault or Failed(str(broken))
    if not run.times:
        raise Failed(f"no reply within {seconds + GRACE:g} s")
    return _figures(run, len(late))


async def _connection(run: _Run) -> None:
    """Ask on one connection, and open another when it ends: most systems keep connections open,
    some do not."""
    loop = asyncio.get_running_loop()
    while not run.stopping:
        ended = asyncio.Event()
        transport, _ = await loop.create_connection(
            lambda ended=ended: _Asking(run, ended.set), "127.0.0.1", run.port
        )
        try:
            await ended.wait()
        finally:
            transport.abort()


PATIENCE = 30.0
"""Seconds to wait for a single reply."""


async def ask(port: int, request: bytes) -> bytes:
    """One reply, head and body. Raises Silent if none comes, and Failed if it is incomplete."""
    try:
        async with asyncio.timeout(PATIENCE):
            return await _asked(port, request)
    except TimeoutError:
        raise Silent(f"no reply within {PATIENCE:g} s") from None
    except OSError as error:
        raise Silent(str(error)) from error


async def _asked(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    message = Message()
    reply = b""
    try:
        while data := await reader.read(1 << 16):
            reply += data
            if message.feed(data):
                return reply
    finally:
        writer.close()
    raise Failed("the connection was closed before the reply ended")


def _figures(run: _Run, cut: int) -> Load:
    return Load(
        rate=len(run.times) / (run.last - run.began),
        p50=percentile(run.times, 50),
        p99=percentile(run.times, 99),
        first=percentile(run.firsts, 50),
        count=len(run.times),
        cut=cut,
    )


def percentile(values: Sequence[float], percent: int) -> float:
    return sorted(values)[len(values) * percent // 100]


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
