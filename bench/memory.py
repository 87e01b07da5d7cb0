"""Memory as the caches fill with conversations that never come again.

Callers of the three APIs hold conversations of two requests each. In the first one, the model reads
a moved result back, so that a hidden round is stored. Between them others offload and read files
through the operations. Each line shows the memory of the proxy's process and what its caches say
that they hold. Once they are full, memory must stay.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice, pairwise
from multiprocessing.connection import Connection
from typing import Any

import httpx

from bench.bodies import TOOLS, Talk
from bench.systems import MIB, clock, status
from tests.dialects.messages import converting as as_messages
from tests.dialects.responses import converting as as_items
from tests.serving import PLAIN, Proxy, spawned, tight

Json = dict[str, Any]

LEVELS = (1_000, 2_500, 5_000, 10_000)
"""Conversations."""
CALLERS = 8
"""Conversations at once."""
TURNS = 5
RESULT = 2_000
"""Turns of a conversation, and bytes of each result."""
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
ANTHROPIC = "/v1/messages"
KEY = {"authorization": "Bearer sk-bench"}
HIDDEN = "hidden_1"
"""The id of the call that the model makes."""
_STORED = re.compile(rb"stored in (/context_store/\S+?)[;)]")


# The upstream


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Call read_file once for each request that has a reference and no such call, and then
    answer."""
    while head := await _head(reader):
        length = re.search(rb"(?i)content-length: *(\d+)", head)
        body = await reader.readexactly(int(length[1]) if length else 0)
        found = _STORED.search(body)
        arguments = {"path": found[1].decode()} if found and HIDDEN.encode() not in body else None
        # it is asked for its models, too
        reply = REPLIES.get(head.split(b" ", 2)[1].decode(), lambda _: {})
        said = json.dumps(reply(arguments)).encode()
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
            % len(said)
            + said
        )


async def _head(reader: asyncio.StreamReader) -> bytes:
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        return await reader.readuntil(b"\r\n\r\n")
    return b""


def _completion(arguments: Json | None) -> Json:
    message: Json = {"role": "assistant", "content": "I have read it."}
    if arguments:
        function = {"name": "read_file", "arguments": json.dumps(arguments)}
        message |= {
            "content": None,
            "tool_calls": [{"id": HIDDEN, "type": "function", "function": function}],
        }
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": "tool_calls" if arguments else "stop",
    }
    usage = {"prompt_tokens": 9, "completion_tokens": 9, "total_tokens": 18}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "model": "m",
        "choices": [choice],
        "usage": usage,
    }


def _response(arguments: Json | None) -> Json:
    text = {"type": "output_text", "text": "I have read it.", "annotations": []}
    item: Json = {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "status": "completed",
        "content": [text],
    }
    if arguments:
        call = {"call_id": HIDDEN, "name": "read_file", "arguments": json.dumps(arguments)}
        item = {"type": "function_call", "id": "fc_1", "status": "completed", **call}
    return {
        "id": "resp_1",
        "object": "response",
        "status": "completed",
        "model": "m",
        "output": [item],
    }


def _message(arguments: Json | None) -> Json:
    block: Json = {"type": "text", "text": "I have read it."}
    if arguments:
        block = {"type": "tool_use", "id": HIDDEN, "name": "read_file", "input": arguments}
    said = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "content": [block]}
    reason = "tool_use" if arguments else "end_turn"
    return {**said, "stop_reason": reason, "usage": {"input_tokens": 9, "output_tokens": 9}}


REPLIES = {CHAT: _completion, RESPONSES: _response, ANTHROPIC: _message}


def _serve(port: Connection) -> None:
    async def serve() -> None:
        server = await asyncio.start_server(_answer, "127.0.0.1", 0)
        port.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(serve())


@contextmanager
def reading() -> Iterator[str]:
    """Run the upstream in a process; yields its base URL."""
    told, port = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.Process(target=_serve, args=(port,), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{told.recv()}/v1"
    finally:
        process.terminate()
        process.join()


# The callers


def conversation(number: int) -> list[Json]:
    """The messages of a conversation that nobody else has."""
    talk = Talk(number, result=RESULT)
    made = talk.begun()
    for turn in range(TURNS):
        made += talk.turn(turn)
    made.append({"role": "assistant", "content": "I have them all."})
    made.append({"role": "user", "content": f"Read one of them again, number {number}."})
    return made


def request(target: str, messages: Sequence[Json]) -> Json:
    """The body with these chat messages for one of the APIs."""
    if target == RESPONSES:
        return {
            "model": "m",
            "input": as_items.items(messages),
            "tools": as_items.tools(TOOLS),
            "store": False,
        }
    if target == ANTHROPIC:
        return as_messages.request(messages, TOOLS)
    return {"model": "m", "messages": messages, "tools": TOOLS}


async def _converse(client: httpx.AsyncClient, number: int) -> None:
    target = list(REPLIES)[number % len(REPLIES)]
    messages = conversation(number)
    await _ask(client, target, request(target, messages))
    messages.append({"role": "assistant", "content": "I have read it."})
    messages.append({"role": "user", "content": "Thank you."})
    await _ask(client, target, request(target, messages))
    if number % 10 == 0:
        offloaded = {"messages": messages, "store_dir": f"/kept/{number}", "max_total_tokens": 100}
        offloaded |= {"max_tool_message_tokens": 100, "context_manage_mode": "compact"}
        answered = await _ask(client, "/context_offload", offloaded)
        [name, *_] = re.findall(rf"/kept/{number}/[\w.-]+\.txt", answered)
        await _ask(client, "/read_file", {"absolute_path": name})
        await _ask(client, "/grep", {"pattern": "fee", "path": f"/kept/{number}"})


async def _ask(client: httpx.AsyncClient, target: str, body: Json) -> str:
    reply = await client.post(target, json=body)
    if reply.status_code != 200:
        raise RuntimeError(f"{target}: {reply.status_code} {reply.text[:300]}")
    return reply.text


# Measurements


def caches(page: str) -> dict[str, int]:
    """The bytes of each cache, as the metrics tell."""
    found = re.findall(r'^offload_cache_bytes\{.*?cache="(\w+)".*?\} (\S+)$', page, re.MULTILINE)
    return {name: int(float(value)) for name, value in found}


async def fill(proxy: Proxy, levels: Sequence[int]) -> None:
    """Hold so many conversations, and print a line at each level."""
    assert proxy.process
    pid = proxy.process.pid
    numbers = iter(range(levels[-1]))
    async with httpx.AsyncClient(
        base_url=proxy.root, timeout=300, trust_env=False, headers=KEY, verify=PLAIN
    ) as client:

        async def some(count: int) -> None:
            for number in islice(numbers, count):
                await _converse(client, number)

        for before, level in pairwise([0, *levels]):
            share = (level - before) // CALLERS
            used = clock(pid)
            await asyncio.gather(*(some(share) for _ in range(CALLERS)))
            each = (clock(pid) - used) / (share * CALLERS)
            held = caches((await client.get("/metrics")).text)
            cached = ", ".join(f"{name} {size / MIB:.0f}" for name, size in sorted(held.items()))
            print(
                f"{level:,} conversations: {status(pid)['VmRSS'] / 1024:.0f} MiB,"
                f" {each * 1000:.1f} ms of CPU each; caches in MiB: {cached}",
                flush=True,
            )


def main(options: argparse.Namespace) -> None:
    levels = (16, 32) if options.smoke else LEVELS
    with reading() as upstream, spawned({"default": tight(upstream)}) as proxy:
        asyncio.run(fill(proxy, levels))
