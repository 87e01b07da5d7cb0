"""What the proxy adds to a request with a long history: `python -m tests.bench.history`.

A history of 1 MB in 1,000 messages is sent directly, through the bare relay, and through the proxy: *cold* (every time
another history, so that each message is decoded and counted) and *warm* (the same history again). *Planning* has
nothing to do in the end, *compacting* moves nearly all of it. While the cold ones are under way, small requests
measure for how long the event loop is held. Shown are medians.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from tests.bench.overhead import start

WORDS = ["".join(random.Random(seed).choices("abcdefghijklmnop", k=2 + seed % 8)) for seed in range(5_000)]
PROXIES = {
    "proxy, mode off": {"mode": "off"},
    "proxy, planning": {"mode": "compact", "max_total_tokens": 1_000_000_000},
    "proxy, compacting": {"mode": "compact", "max_tool_message_tokens": 200},
}
TOOL = {"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.history")
    parser.add_argument("--runs", type=int, default=9, help="of each [9]")
    parser.add_argument("--smoke", action="store_true", help="only to see that it works")
    options = parser.parse_args()
    runs, messages = (2, 50) if options.smoke else (options.runs, 1_000)
    with ExitStack() as running:
        folder = Path(running.enter_context(tempfile.TemporaryDirectory(prefix="offload-bench-")))
        ports = start(running, folder, PROXIES)
        asyncio.run(_measure({name: port for name, port in ports.items() if name != "nginx"}, runs, messages))
    return 0


async def _measure(ports: dict[str, int], runs: int, messages: int) -> None:
    print(f"{'':18}{'warm ms':>9}{'cold ms':>9}{'added warm':>12}{'added cold':>12}{'loop held ms':>14}")
    figures = {name: await _one(port, runs, messages) for name, port in ports.items()}
    bare = figures["bare relay"]
    for name, (warm, cold, held) in figures.items():
        print(f"{name:18}{warm:9.1f}{cold:9.1f}{warm - bare[0]:12.1f}{cold - bare[1]:12.1f}{held:14.1f}")


async def _one(port: int, runs: int, messages: int) -> tuple[float, float, float]:
    """Milliseconds: warm, cold, and the longest that a small request had to wait beside a cold one (median of runs)."""
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}/v1", timeout=60) as client:
        await _post(client, history(10, 0))
        cold, held = [], []
        for seed in range(runs):
            body = history(messages, seed + 1)
            large = asyncio.create_task(_post(client, body))
            held.append(await _longest_wait(client, large))
            cold.append(await large)
        warm = [await _post(client, body) for _ in range(runs + 1)][1:]
    return statistics.median(warm), statistics.median(cold), statistics.median(held)


async def _longest_wait(client: httpx.AsyncClient, task: asyncio.Task[float]) -> float:
    small, longest = history(4, 0), 0.0
    while not task.done():
        longest = max(longest, await _post(client, small))
        await asyncio.sleep(0.001)
    return longest


async def _post(client: httpx.AsyncClient, body: bytes) -> float:
    begun = time.perf_counter()
    reply = await client.post("/chat/completions", content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 200, reply.text[:300]
    return (time.perf_counter() - begun) * 1000


def history(messages: int, seed: int) -> bytes:
    """About 1 KB a message, half of them tool results; another seed is another history, word for word."""
    words = random.Random(seed)
    made: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Go on."}]
    for number in range(messages // 2 - 1):
        call = {"id": f"call_{number}", "type": "function", "function": {"name": "search", "arguments": "{}"}}
        made.append({"role": "assistant", "content": None, "tool_calls": [call]})
        text = " ".join(words.choices(WORDS, k=300))
        made.append({"role": "tool", "tool_call_id": call["id"], "content": text})
    return json.dumps({"model": "gpt-4.1", "messages": made, "tools": [TOOL]}).encode()


if __name__ == "__main__":
    sys.exit(main())
