"""The proxy's start-up time and memory: `python -m bench.startup`.

Measured on a child process: the time from its start to the first answer of /health, by which it has
loaded the vocabulary for counting tokens; its memory before any request and after a first chat; the
time of that chat, and how long the event loop was blocked meanwhile; and the slowest imports. The
table shows medians.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import httpx
import msgspec

from bench.metering import status
from tests.fake_upstream import StrictUpstream, error, text
from tests.serving import Proxy, spawned

MIB = 2**20
SERVING = "import proxy.cli, proxy.settings, proxy.server.runner, proxy.apps.parts"
"""The imports of `offload-proxy serve`."""
LONGEST = 10
"""Imports in the table."""
SETTLED = 1.0
"""Seconds to leave a process alone before reading its memory."""
CHAT = {"model": "gpt-4.1", "messages": [{"role": "user", "content": "What is new?"}]}

IMPORT = re.compile(r"import time:\s+(?P<own>\d+) \|\s+(?P<all>\d+) \| (?P<indent> *)(?P<name>\S+)")


class Import(msgspec.Struct, frozen=True):
    """One module. Microseconds: its own, and including the modules that it was the first to
    import."""

    name: str
    own: int
    total: int


class Start(msgspec.Struct, frozen=True):
    """The figures of one process, in seconds and bytes."""

    healthy: float
    """From the start to the first answer of /health."""
    idle: int
    """RSS, before the first chat."""
    first: float
    """The first chat."""
    held: float
    """The longest wait of a request to /health during that chat."""
    second: float
    loaded: int
    """RSS, after these chats."""


def imports(seen: str) -> list[Import]:
    """The modules in the output of `-X importtime`, sorted by their own time, slowest first."""
    found = [Import(one["name"], int(one["own"]), int(one["all"])) for one in IMPORT.finditer(seen)]
    return sorted(found, key=lambda one: -one.own)


def import_times() -> list[Import]:
    """The imports of a fresh process that serves."""
    command = [sys.executable, "-X", "importtime", "-c", SERVING]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True
    )
    return imports(done.stderr)


def started(upstream: str) -> Start:
    """Start a proxy and take its figures."""
    begun = time.perf_counter()
    with spawned({"default": {"upstream": {"base_url": upstream}}}) as proxy:
        healthy = time.perf_counter() - begun
        time.sleep(SETTLED)
        idle = rss(proxy)
        with httpx.Client(base_url=proxy.url, trust_env=False, timeout=30) as client:
            held: list[float] = []
            with _watching(proxy, held):
                first = _chat(client)
            second = _chat(client)
        time.sleep(SETTLED)
        return Start(healthy, idle, first, max(held, default=0.0), second, rss(proxy))


def rss(proxy: Proxy) -> int:
    """The resident memory of the process, in bytes."""
    assert proxy.process
    return status(proxy.process.pid)["VmRSS"] * 1024


def _chat(client: httpx.Client) -> float:
    begun = time.perf_counter()
    client.post("/chat/completions", json=CHAT).raise_for_status()
    return time.perf_counter() - begun


@contextmanager
def _watching(proxy: Proxy, held: list[float]) -> Iterator[None]:
    """Keep asking for /health meanwhile; append the seconds of each request to `held`."""
    over = threading.Event()

    def watch() -> None:
        with httpx.Client(base_url=proxy.root, trust_env=False, timeout=30) as client:
            while not over.wait(0.001):
                begun = time.perf_counter()
                client.get("/health").raise_for_status()
                held.append(time.perf_counter() - begun)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def table(starts: list[Start], found: list[Import]) -> str:
    def middle(name: str, unit: float) -> float:
        return median(getattr(start, name) for start in starts) / unit

    lines = [
        f"medians of {len(starts)} starts; Python {sys.version.split()[0]}",
        f"{'up: start to /health':44}{middle('healthy', 1e-3):9.0f} ms",
        f"{'of this, imports':44}{sum(one.own for one in found) / 1000:9.0f} ms",
        f"{'RSS idle':44}{middle('idle', MIB):9.0f} MiB",
        f"{'RSS after the first chats':44}{middle('loaded', MIB):9.0f} MiB",
        f"{'first chat':44}{middle('first', 1e-3):9.0f} ms",
        f"{'  longest that /health waited beside it':44}{middle('held', 1e-3):9.0f} ms",
        f"{'second chat':44}{middle('second', 1e-3):9.1f} ms",
        "",
        f"{'imports that take longest by themselves':44}{'own ms':>9}{'in all':>9}",
    ]
    return "\n".join(
        lines
        + [
            f"  {one.name:42}{one.own / 1000:9.1f}{one.total / 1000:9.1f}"
            for one in found[:LONGEST]
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.startup", description=(__doc__ or "").partition(":")[0]
    )
    parser.add_argument("--runs", type=int, default=7, help="starts [7]")
    parser.add_argument(
        "--smoke", action="store_true", help="one start, as a quick check that it works"
    )
    options = parser.parse_args()
    if not Path("/proc/self/status").exists():
        print("needs /proc: left out")
        return 0
    import_times()  # compiles modules that are not compiled yet
    found = import_times()
    with StrictUpstream() as up:
        up.respond(lambda asked: text("Nothing.") if asked.is_chat else error(404))
        starts = [started(up.url) for _ in range(1 if options.smoke else options.runs)]
    print(table(starts, found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
