"""How much memory and time the proxy takes, and what one caller can do to the others.

    python -m bench.bounds [start|history|memory|store|grep|dashboard|flood|soak|liveness ...]

By default it measures everything, which takes about an hour:

- *start*: from the start to /health, memory without requests, and the first chats;
- *history*: a conversation of 10,000 messages that is new, and one that goes on;
- *memory*: RSS and CPU time as ever new conversations fill the caches;
- *store*: CPU time of a request by its kind, and what it asks of Redis;
- *grep*: `/grep` over 1,000 files of 100 KB, beside ripgrep, and `/health` meanwhile;
- *dashboard*: what a row and each page take with so many requests recorded;
- *flood*: turns of one tenant while many callers of another one send histories that are new;
- *soak*: many conversations over two workers, while their Redis keeps restarting;
- *liveness*: `/health` and another tenant's chats during each attack on the proxy.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

from bench import bodies, dashboard, flood, grepping, liveness, memory, soak, stored
from bench.bodies import Talk
from bench.systems import MIB, System, proxy, start, status
from bench.wire import Client
from tests.fake_upstream import StrictUpstream, error, text
from tests.serving import spawned

TURNS = 5_000
EACH = 1_600
"""Turns of a long history, and bytes of each result: 10,000 messages, 10 MB."""
SETTLED = 1.0
"""Seconds to leave a process alone before reading its memory."""


def starting(options: argparse.Namespace) -> None:
    runs = 1 if options.smoke else 7
    with StrictUpstream() as up:
        up.respond(lambda asked: text("Nothing.") if asked.is_chat else error(404))
        starts = [_started(up.url) for _ in range(runs)]
    healthy, idle, first, second = map(statistics.median, zip(*starts, strict=True))
    print(f"medians of {runs}; Python {sys.version.split()[0]}")
    print(f"from the start to /health {healthy:.1f} s, then {idle / MIB:.0f} MiB")
    print(f"the first chat {first * 1000:.0f} ms, the second {second * 1000:.0f} ms")


def _started(upstream: str) -> tuple[float, ...]:
    """Seconds until /health answers, bytes of memory, and seconds of the first two chats."""
    body = {"model": "gpt-4.1", "messages": [{"role": "user", "content": "What is new?"}]}
    begun = time.perf_counter()
    with spawned({"default": {"upstream": {"base_url": upstream}}}) as one:
        healthy = time.perf_counter() - begun
        assert one.process
        time.sleep(SETTLED)
        idle = status(one.process.pid)["VmRSS"] * 1024
        chats = []
        with httpx.Client(base_url=one.url, trust_env=False, timeout=30) as client:
            for _ in range(2):
                begun = time.perf_counter()
                client.post("/chat/completions", json=body).raise_for_status()
                chats.append(time.perf_counter() - begun)
    return healthy, idle, *chats


@contextmanager
def running(offload: dict[str, object]) -> Iterator[System]:
    """A proxy under this policy, in front of an upstream that only replies."""
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="offload-bench-")))
        [system] = start(held, folder, {"proxy": proxy(offload)})
        yield system


def history(options: argparse.Namespace) -> None:
    turns = 50 if options.smoke else TURNS
    for mode in ("off", "auto"):
        with running({"mode": mode}) as system:
            cold, warm = asyncio.run(_history(system, turns))
        print(
            f"mode {mode}, {2 * turns:,} messages: new {cold * 1000:.0f} ms of CPU,"
            f" one more turn {warm * 1000:.0f} ms"
        )


async def _history(system: System, turns: int) -> tuple[float, float]:
    """CPU seconds of a conversation that is new, and of its next turns."""
    client = Client(system.port)
    await client.ask(bodies.request(Talk(1, result=EACH).body(5)))  # loads the vocabulary
    talk = Talk(2, result=EACH)
    costs = []
    for more in range(6):
        await system.settle()
        before = system.cpu()
        await client.ask(bodies.request(talk.body(turns + more)))
        await system.settle()
        costs.append(system.cpu() - before)
    client.close()
    return costs[0], statistics.median(costs[1:])


PARTS: dict[str, Callable[[argparse.Namespace], object]] = {
    "start": starting,
    "history": history,
    "memory": memory.main,
    "store": stored.main,
    "grep": grepping.main,
    "dashboard": dashboard.main,
    "flood": flood.main,
    "soak": soak.main,
    "liveness": liveness.main,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.bounds",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help="what to measure [everything]")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="attacks by name")
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 where an attack misses the bounds"
    )
    parser.add_argument("--smoke", action="store_true", help="each small, to see that it works")
    options = parser.parse_args(arguments)
    if unknown := {*options.parts} - {*PARTS}:
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if not Path("/proc/self/status").exists():
        print("needs Linux's /proc: left out")
        return 0
    failed = False
    for name in options.parts or PARTS:
        print(f"\n## {name}\n", flush=True)
        failed |= bool(PARTS[name](options))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
