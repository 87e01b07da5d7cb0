"""The cost of one request by its kind: CPU of the proxy's process, and operations and bytes of its
Redis.

An agent's conversation under the default policy: every request brings one more tool result of 5.5
KB. CPU is user and system time of the process; operations and bytes come from Redis' own counters.
Requests run one at a time.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
from redis import Redis

from bench.systems import clock
from tests.fake_upstream import Recorded, StrictUpstream, calls, whole
from tests.serving import Proxy, spawned
from tests.stores.engines import redis_server

Json = dict[str, Any]

TOOL = {"type": "function", "function": {"name": "fetch", "parameters": {"type": "object"}}}
SETTLE = 0.5
"""Seconds for background work to end; it is counted too."""


@dataclass
class Cost:
    """The cost of one request."""

    kind: str
    milliseconds: float
    operations: float
    read: float
    """Bytes from Redis."""
    written: float
    """Bytes to Redis."""

    def line(self) -> str:
        return (
            f"{self.kind:34} {self.milliseconds:7.2f} ms CPU {self.operations:6.1f} store operations "
            f"{self.read / 1024:7.1f} KiB read {self.written / 1024:7.1f} KiB written"
        )


def named(number: int, conversation: str) -> str:
    """The id of a call. No two conversations share one, as with real upstreams."""
    return f"c{number}_{conversation.replace(' ', '-')}"


def messages(conversation: str, results: int) -> list[Json]:
    """A question followed by so many calls and their results."""
    made: list[Json] = [{"role": "user", "content": f"Look into {conversation}."}]
    for number in range(results):
        function = {"name": "fetch", "arguments": json.dumps({"n": number})}
        call = {"id": named(number, conversation), "type": "function", "function": function}
        made.append({"role": "assistant", "tool_calls": [call]})
        lines = (
            f"{conversation} result {number} line {line}: {line * 7919 % 104729}\n"
            for line in range(180)
        )
        made.append({"role": "tool", "tool_call_id": call["id"], "content": "".join(lines)})
    return made


def model(request: Recorded) -> Any:
    """Fetches the next result, as the next request's history says. In a conversation with "search"
    in its name it searches before."""
    if not request.is_chat:
        return whole({"object": "list", "data": []})
    first = request.messages[0]["content"]
    last = request.messages[-1]
    searched = str(last.get("tool_call_id", "")).startswith("ours")
    if "search" in first and "grep" in request.tool_names and not searched:
        return calls(("grep", {"pattern": "line 7:"}, f"ours{len(request.messages)}"))
    fetched = [
        int(one["tool_call_id"][1:].partition("_")[0])
        for one in request.messages
        if str(one.get("tool_call_id")).startswith("c")
    ]
    number = max(fetched, default=-1) + 1
    conversation = first.removeprefix("Look into ").removesuffix(".")
    return calls(("fetch", {"n": number}, named(number, conversation)))


def run(most: int) -> Iterator[Cost]:
    """The cost of each kind, of at most so many requests."""
    with TemporaryDirectory(prefix="offload-costs-") as folder, StrictUpstream() as up:
        up.respond(model)
        with redis_server(Path(folder)) as redis, Redis(port=redis.port) as counters:
            flags = [f"--store=redis://127.0.0.1:{redis.port}/0"]
            with spawned({"default": {"upstream": {"base_url": up.url}}}, flags=flags) as proxy:
                yield from _kinds(proxy, counters, most)


def _kinds(proxy: Proxy, counters: Any, most: int) -> Iterator[Cost]:
    with httpx.Client(base_url=proxy.url, timeout=60, trust_env=False) as client:

        def chat(conversation: str, results: int) -> None:
            body = {"model": "gpt-4o", "messages": messages(conversation, results), "tools": [TOOL]}
            client.post("/chat/completions", json=body).raise_for_status()

        def relay(_: int) -> None:
            client.get("/models").raise_for_status()

        for _ in range(50):
            relay(0)
        chat("first", 1)  # loads the vocabulary
        yield _cost("relayed", proxy, counters, relay, range(200)[:most])
        yield _cost(
            "chat, nothing to do",
            proxy,
            counters,
            lambda n: chat(f"short {n // 6}", n % 6 + 1),
            range(120)[:most],
        )
        for conversation in ("long", "search"):
            for results in range(20):
                chat(conversation, results)
        yield _cost("offloaded", proxy, counters, lambda n: chat("long", n), range(20, 60)[:most])
        yield _cost(
            "offloaded, a round of our tools",
            proxy,
            counters,
            lambda n: chat("search", n),
            range(20, 60)[:most],
        )
        yield _cost(
            "offloaded, never seen by this one",
            proxy,
            counters,
            lambda n: chat(f"new {n}", 40),
            range(30)[:most],
        )


def _cost(kind: str, proxy: Proxy, counters: Any, ask: Any, numbers: range) -> Cost:
    before = _now(proxy, counters)
    for number in numbers:
        ask(number)
    time.sleep(SETTLE)
    cpu, operations, read, written = (
        (after - earlier) / len(numbers)
        for after, earlier in zip(_now(proxy, counters), before, strict=True)
    )
    return Cost(kind, cpu * 1000, operations, read, written)


def _now(proxy: Proxy, counters: Any) -> tuple[float, float, float, float]:
    """CPU seconds of the proxy; Redis' commands (the store's, not these reads), and its bytes out
    and in."""
    assert proxy.process
    cpu = clock(proxy.process.pid)
    info = counters.info("all")
    commands = sum(
        each["calls"]
        for name, each in info.items()
        if name in ("cmdstat_mget", "cmdstat_set", "cmdstat_pexpire")
    )
    return cpu, commands, info["total_net_output_bytes"], info["total_net_input_bytes"]


def main(options: argparse.Namespace) -> None:
    for cost in run(5 if options.smoke else 1_000):
        print(cost.line())
