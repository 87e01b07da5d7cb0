"""The two ends of a measurement: an upstream that only replies, and a client that only asks.

Both share the machine with what is measured. The upstream is `python -m bench.wire PORT`. The
request's model says how it replies: see `SLOW` and `AGENT`.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from dataclasses import dataclass
from typing import Any, cast

import httptools
import uvloop

from bench.bodies import MESSAGES, MODEL, Talk

Json = dict[str, Any]

SLOW = f"{MODEL}-slow"
"""Streams with `PAUSE` before each event, as a model writes them."""
AGENT = f"{MODEL}-agent"
"""Continues a `Talk`, greps in every tenth turn, and writes summaries."""
PAUSE = 0.004
"""Seconds."""
EVENTS = 100
"""Events of a streamed reply, without `[DONE]`."""
SNAPSHOT = "<state_snapshot>The search goes on as it was agreed.</state_snapshot>"
GREP_EVERY = 10
"""Turns."""
STORED = re.compile(rb"stored in (/context_store/[^\s;)]+)")
STREAMS = re.compile(rb'"stream": ?true')

NAMES = {"id": "chatcmpl-1", "created": 1_760_000_000, "model": MODEL}
WORDS = "It is the index. "
USAGE = {"prompt_tokens": 200, "completion_tokens": 100, "total_tokens": 300}
ANSWER: Json = {"role": "assistant", "content": WORDS * 20}


def _http(kind: str, content: bytes) -> bytes:
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


def completion(message: Json) -> bytes:
    """A chat completion with this message, as an HTTP response."""
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": "tool_calls" if message.get("tool_calls") else "stop",
    }
    reply = {**NAMES, "object": "chat.completion", "choices": [choice], "usage": USAGE}
    return _http("application/json", json.dumps(reply).encode())


def _message() -> bytes:
    """A reply of the Messages API."""
    reply = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [{"type": "text", "text": WORDS * 20}],
        "stop_reason": "end_turn",
        "usage": {"input_tokens": 200, "output_tokens": 100},
    }
    return _http("application/json", json.dumps(reply).encode())


def _event(data: str) -> bytes:
    """An SSE event as one HTTP chunk."""
    event = f"data: {data}\n\n".encode()
    return b"%x\r\n%b\r\n" % (len(event), event)


def _delta(number: int) -> str:
    delta = {"role": "assistant", "content": WORDS} if number == 0 else {"content": WORDS}
    ends = "stop" if number == EVENTS - 1 else None
    choice = {"index": 0, "delta": {} if ends else delta, "finish_reason": ends}
    return json.dumps({**NAMES, "object": "chat.completion.chunk", "choices": [choice]})


STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)
STREAM = [
    STREAM_HEAD,
    *(_event(_delta(number)) for number in range(EVENTS)),
    _event("[DONE]") + b"0\r\n\r\n",
]
"""The pieces of a streamed reply, each sent in a write of its own."""
REPLIES = {MESSAGES.encode(): _message()}
PLAIN = completion(ANSWER)


def continued(body: bytes) -> bytes:
    """The reply of `AGENT`: a summary if the last message is no result, a `grep` that has not been
    answered yet in every tenth turn, or the next call of the conversation."""
    last = json.loads(body)["messages"][-1]
    if last["role"] != "tool":
        return completion({"role": "assistant", "content": SNAPSHOT})
    name, _, number = last["tool_call_id"].partition("_")
    stored = STORED.search(body)
    if name == "call" and int(number) % GREP_EVERY == 0 and stored:
        arguments = json.dumps({"pattern": "import|id", "path": stored[1].decode()})
        function = {"name": "grep", "arguments": arguments}
        call = {"id": f"ours_{number}", "type": "function", "function": function}
        return completion({"role": "assistant", "content": None, "tool_calls": [call]})
    return completion(Talk(0, result=0).turn(int(number) + 1)[0])


class Replying(asyncio.Protocol):
    """The upstream's end of a connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._path = b""
        self._body: list[bytes] = []

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._path = url

    def on_body(self, piece: bytes) -> None:
        self._body.append(piece)

    def on_message_complete(self) -> None:
        body = b"".join(self._body)
        self._body.clear()
        if AGENT.encode() in body[:200]:
            self._transport.write(continued(body))
        elif STREAMS.search(body):
            self._stream(0, PAUSE if SLOW.encode() in body[:200] else 0.0)
        else:
            self._transport.write(REPLIES.get(self._path, PLAIN))

    def _stream(self, number: int, pause: float) -> None:
        """Write one event for each iteration of the loop."""
        if not self._transport.is_closing():
            self._transport.write(STREAM[number])
            if number + 1 < len(STREAM):
                self._loop.call_later(pause, self._stream, number + 1, pause)


async def serve(port: int) -> None:
    """Serve until cancelled."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Replying, "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


class Failed(Exception):
    """A system failed a request."""


PATIENCE = 60.0
"""Seconds to wait for a reply."""


@dataclass
class Reply:
    """A reply, and the seconds until it was complete."""

    status: int
    body: bytes
    seconds: float


class Client:
    """One connection to a system, opened again where the system has closed it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._writer: asyncio.StreamWriter | None = None

    async def ask(self, request: bytes) -> Reply:
        """Send the request. Raises Failed unless the whole reply arrives, with status 200."""
        began = time.perf_counter()
        try:
            async with asyncio.timeout(PATIENCE):
                received = await self._asked(request)
        except TimeoutError:
            raise Failed(f"no reply within {PATIENCE:g} s") from None
        except (OSError, httptools.HttpParserError) as error:
            raise Failed(str(error)) from error
        body = b"".join(received.body)
        if received.status != 200:
            raise Failed(f"{received.status} {body[:200].decode('utf-8', 'replace')}")
        return Reply(received.status, body, time.perf_counter() - began)

    def close(self) -> None:
        """End the connection."""
        if self._writer:
            self._writer.transport.abort()
        self._writer = None

    async def _asked(self, request: bytes) -> _Receiving:
        if self._writer is None:
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writer.write(request)
        receiving = _Receiving()
        parser = httptools.HttpResponseParser(receiving)
        receiving.parser = parser
        while not receiving.complete:
            data = await self._reader.read(1 << 16)
            if not data:
                self.close()
                raise Failed("the connection was closed before the reply ended")
            parser.feed_data(data)
        if not receiving.keeps:
            self.close()
        return receiving


class _Receiving:
    """What httptools calls as it reads a reply."""

    parser: httptools.HttpResponseParser

    def __init__(self) -> None:
        self.body = list[bytes]()
        self.complete = False
        self.keeps = False
        """Whether the connection may carry another request. The parser knows it only until the
        message is over."""
        self.status = 0

    def on_status(self, _: bytes) -> None:
        self.status = self.parser.get_status_code()

    def on_body(self, piece: bytes) -> None:
        self.body.append(piece)

    def on_message_complete(self) -> None:
        self.complete = True
        self.keeps = self.parser.should_keep_alive()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
