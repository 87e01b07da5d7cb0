"""An upstream whose reply is an attack, in a process of its own: `python -m bench.misbehaving`.

It prints its port and serves until its input ends. The request's `model` names the reply; any other
model, and every request that answers the calls of its reply, gets a short text.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import sys
import zlib
from collections.abc import Callable
from functools import cache
from typing import Any

from tests.wire import EVENTS, Peer, chunk, read_message, upstream

MODEL = re.compile(rb'"model":\s*"([^"]*)"')
CALLED = b"call_attack"
"""How the ids of its calls begin."""
NAMES: dict[str, Any] = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1_760_000_000,
    "model": "m",
}


def completion(content: str | None, calls: list[Any] | None = None) -> bytes:
    message: dict[str, Any] = {"role": "assistant", "content": content}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if calls else "stop"}
    if calls:
        message["tool_calls"] = calls
    return json.dumps({**NAMES, "choices": [choice]}).encode()


def event(delta: Any, finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return (
        b"data: "
        + json.dumps({**NAMES, "object": "chat.completion.chunk", "choices": [choice]}).encode()
        + b"\n\n"
    )


def streamed(content: str) -> bytes:
    return (
        event({"role": "assistant", "content": content}) + event({}, "stop") + b"data: [DONE]\n\n"
    )


def sized(body: bytes, kind: bytes = b"application/json", coding: bytes = b"") -> bytes:
    encoded = b"Content-Encoding: %b\r\n" % coding if coding else b""
    return (
        b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\n%bContent-Length: %d\r\n\r\n"
        % (kind, encoded, len(body))
        + body
    )


def _chunked(body: bytes) -> bytes:
    return EVENTS + chunk(body) + b"0\r\n\r\n"


def _calls(*made: tuple[str, Any]) -> bytes:
    functions = [{"name": name, "arguments": json.dumps(arguments)} for name, arguments in made]
    calls = [
        {"id": f"call_attack_{n}", "type": "function", "function": one}
        for n, one in enumerate(functions)
    ]
    return sized(completion(None, calls))


def _coded(coding: bytes, compress: Callable[[bytes], bytes], content: str, stream: bool) -> bytes:
    plain, kind = (
        (streamed(content), b"text/event-stream")
        if stream
        else (completion(content), b"application/json")
    )
    return sized(compress(plain), kind, coding)


def _members(data: bytes) -> bytes:
    return gzip.compress(b"") * 60_000 + gzip.compress(data)


def _pieces(**numbered: int) -> bytes:
    """Arguments in 16,000 pieces, each with the name and without an id."""
    begun = event({"role": "assistant", "content": None})
    piece = event(
        {"tool_calls": [{**numbered, "function": {"name": "fetch", "arguments": "x" * 8}}]}
    )
    return _chunked(begun + piece * 16_000 + event({}, "tool_calls") + b"data: [DONE]\n\n")


CODINGS: dict[str, tuple[bytes, Callable[[bytes], bytes], int]] = {
    "members": (b"gzip", _members, 100),
    "stored": (b"deflate", lambda data: zlib.compress(data, 0), 60 << 20),
    "bomb": (b"gzip", gzip.compress, 60 << 20),
}

REPLIES: dict[str, Callable[[], bytes]] = {
    "grep": lambda: _calls(*[("grep", {"pattern": "(?:.{0,99}m){9}zq"})] * 12),
    "grep-empty": lambda: _calls(("grep", {"pattern": "x*"})),
    "read": lambda: _calls(
        *[("read_file", {"path": "PATH", "offset": 100_000 * n, "limit": 2_000}) for n in range(16)]
    ),
    "pieces": lambda: _pieces(index=0),
    "pieces-loose": _pieces,
    "summary-think": lambda: sized(completion("<think>" * 8_000)),
    "summary-snapshots": lambda: sized(completion("<state_snapshot>" * 20_000)),
    "summary-angles": lambda: sized(
        completion("<state_snapshot>" + "<" * 200_000 + "</state_snapshot>")
    ),
    "summary": lambda: sized(completion("<state_snapshot>It went on.</state_snapshot>")),
    **{
        f"reply-{name}{'-streamed' if stream else ''}": lambda how=how, stream=stream: _coded(  # type: ignore[misc]
            how[0], how[1], "x" * how[2], stream
        )
        for name, how in CODINGS.items()
        for stream in (False, True)
    },
}
PATH = re.compile(rb"stored in (/context_store/[^\s;)]+)")


@cache
def _reply(model: str) -> bytes:
    return REPLIES[model]()


async def _serve(peer: Peer) -> None:
    while True:
        message = await read_message(peer.reader)
        found = MODEL.search(message.body)
        model = found[1].decode("latin-1") if found else ""
        if model not in REPLIES or CALLED in message.body:
            asked = re.search(rb'"stream":\s*true', message.body[:200] + message.body[-200:])
            await peer.send(
                _chunked(streamed("Nothing.")) if asked else sized(completion("Nothing."))
            )
            continue
        reply = await asyncio.to_thread(_reply, model)
        if path := PATH.search(message.body):
            body = reply.partition(b"\r\n\r\n")[2].replace(b"PATH", path[1])
            reply = sized(body) if model == "read" else reply
        await peer.send(reply)


async def main() -> None:
    async with upstream(_serve) as wire:
        for model in sys.argv[1:]:
            _reply(model)
        print(wire.port, flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main())
