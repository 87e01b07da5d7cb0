"""The time that the proxy adds to a request with a long history: `python -m bench.history`.

A history of 1 MB in 1,000 messages is sent directly, through the bare relay, and through the proxy:
*cold* (a different history each time, so that every message is decoded and counted) and *warm* (the
same history again). *Planning* changes nothing in the end, *moving* takes out nearly all of it.
During cold requests, small ones measure for how long the event loop is blocked. The table shows
medians. `overhead` measures how many warm requests the proxy serves per second.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import httpx

from bench.bodies import SIZES, Size, body
from bench.systems import POLICIES, System, bare, proxy, start

SMALL = Size("4 KB", 10, 285)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.history")
    parser.add_argument("--runs", type=int, default=9, help="requests of each kind [9]")
    parser.add_argument("--smoke", action="store_true", help="a quick check that it works")
    options = parser.parse_args()
    runs, size = (2, Size("50 KB", 50, 285)) if options.smoke else (options.runs, SIZES[-1])
    with ExitStack() as running:
        folder = Path(running.enter_context(tempfile.TemporaryDirectory(prefix="offload-bench-")))
        relays = {
            "bare relay": bare,
            **{name: proxy(offload) for name, offload in POLICIES.items()},
        }
        asyncio.run(_measure(start(running, folder, relays), runs, size))
    return 0


async def _measure(relays: list[System], runs: int, size: Size) -> None:
    print(
        f"{'':18}{'warm ms':>9}{'cold ms':>9}{'added warm':>12}{'added cold':>12}{'loop held ms':>14}"
    )
    figures = {relay.name: await _one(relay, runs, size) for relay in relays}
    bare = figures["bare relay"]
    for name, (warm, cold, held) in figures.items():
        print(
            f"{name:18}{warm:9.1f}{cold:9.1f}{warm - bare[0]:12.1f}{cold - bare[1]:12.1f}{held:14.1f}"
        )


async def _one(relay: System, runs: int, size: Size) -> tuple[float, float, float]:
    """Median milliseconds: warm, cold, and the longest wait of a small request during a cold
    one."""
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{relay.port}/v1", timeout=60
    ) as client:
        await _post(client, body(SMALL, stream=False))
        cold = []
        held = []
        for seed in range(runs):
            asked = body(size, stream=False, seed=seed + 1)
            large = asyncio.create_task(_post(client, asked))
            held.append(await _longest_wait(client, large))
            cold.append(await large)
        await _at_rest(relay)
        warm = [await _post(client, asked) for _ in range(runs + 1)][1:]
    return statistics.median(warm), statistics.median(cold), statistics.median(held)


async def _at_rest(relay: System) -> None:
    """Wait until background work, such as writing originals, has ended."""
    used = relay.cpu()
    before = -1.0
    while used > before + 0.02:
        before = used
        await asyncio.sleep(0.5)
        used = relay.cpu()


async def _longest_wait(client: httpx.AsyncClient, task: asyncio.Task[float]) -> float:
    small = body(SMALL, stream=False)
    longest = 0.0
    while not task.done():
        longest = max(longest, await _post(client, small))
        await asyncio.sleep(0.001)
    return longest


async def _post(client: httpx.AsyncClient, body: bytes) -> float:
    begun = time.perf_counter()
    reply = await client.post(
        "/chat/completions", content=body, headers={"content-type": "application/json"}
    )
    assert reply.status_code == 200, reply.text[:300]
    return (time.perf_counter() - begun) * 1000


if __name__ == "__main__":
    sys.exit(main())
