"""The two ends of a measurement, each a process of its own: an upstream that only replies, and a client that only asks.

Both speak HTTP/1.1 by hand on uvloop, so that they take as little as can be of the machine that they share with what
is measured. `python -m tests.bench.wire upstream PORT` and `… load PORT CONNECTIONS SECONDS`.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import cast

import uvloop

MESSAGE = "Please look at the traceback above and tell me what is wrong with it. " * 12
REQUEST_BODY = json.dumps({"model": "gpt-4.1", "messages": [{"role": "user", "content": MESSAGE}]}).encode()
REQUEST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: application/json\r\nAccept-Encoding: gzip\r\n"
    b"Authorization: Bearer sk-bench\r\nContent-Type: application/json\r\nUser-Agent: OpenAI/Python 2.0.0\r\n"
    b"X-Stainless-Lang: python\r\nX-Stainless-Retry-Count: 0\r\nContent-Length: %d\r\n\r\n%b"
) % (len(REQUEST_BODY), REQUEST_BODY)

CHOICE = {"index": 0, "message": {"role": "assistant", "content": "It is the index. " * 20}, "finish_reason": "stop"}
REPLY_BODY = json.dumps({"id": "chatcmpl-1", "object": "chat.completion", "choices": [CHOICE]}).encode()
REPLY = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nX-Request-Id: req_1\r\nServer: bench\r\n"
    b"Content-Length: %d\r\n\r\n%b"
) % (len(REPLY_BODY), REPLY_BODY)


class Messages(asyncio.Protocol):
    """Counts the whole messages that arrive; all of them have a Content-Length or no body."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := _end(self._buffer)) and len(self._buffer) >= end:
            head, self._buffer = self._buffer[:12], self._buffer[end:]
            self.message(head)

    def message(self, start: bytes) -> None:
        raise NotImplementedError


def _end(data: bytes) -> int:
    """Where the first message ends; 0 while its head is not there."""
    head_end = data.find(b"\r\n\r\n")
    if head_end < 0:
        return 0
    head = data[:head_end].lower()
    _, found, rest = head.partition(b"content-length:")
    return head_end + 4 + (int(rest.partition(b"\r")[0]) if found else 0)


class Replying(Messages):
    def message(self, start: bytes) -> None:
        self.transport.write(REPLY)


class Asking(Messages):
    """Asks, waits for the reply, and asks again, until it is over."""

    def __init__(self, seconds: list[float], until: float, over: asyncio.Future[None]) -> None:
        super().__init__()
        self._seconds = seconds
        self._until = until
        self._over = over

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._ask()

    def message(self, start: bytes) -> None:
        now = time.perf_counter()
        if start != b"HTTP/1.1 200":
            self._end(RuntimeError(f"a reply begins with {start!r}"))
            return
        self._seconds.append(now - self._asked)
        if now < self._until:
            self._ask()
        else:
            self._end(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(exc or RuntimeError("the connection was closed"))

    def _ask(self) -> None:
        self._asked = time.perf_counter()
        self.transport.write(REQUEST)

    def _end(self, error: Exception | None) -> None:
        self.transport.close()
        if self._over.done():
            return
        if error:
            self._over.set_exception(error)
        else:
            self._over.set_result(None)


async def serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Replying, "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


async def load(port: int, connections: int, seconds: float) -> dict[str, float]:
    """Requests a second, and the median and the 99th percentile of their time in seconds."""
    loop = asyncio.get_running_loop()
    times: list[float] = []
    began = time.perf_counter()
    ends = [loop.create_future() for _ in range(connections)]
    for over in ends:
        await loop.create_connection(lambda over=over: Asking(times, began + seconds, over), "127.0.0.1", port)
    await asyncio.gather(*ends)
    took = time.perf_counter() - began
    times.sort()
    return {"rate": len(times) / took, "p50": times[len(times) // 2], "p99": times[len(times) * 99 // 100]}


if __name__ == "__main__":
    if sys.argv[1] == "upstream":
        uvloop.run(serve(int(sys.argv[2])))
    else:
        print(json.dumps(uvloop.run(load(int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])))))
