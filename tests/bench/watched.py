"""What the dashboard costs the process that serves requests: `python -m tests.bench.watched [--viewers 20]`.

Two proxies get the same small requests at the same time, so that other load on the machine affects both: one with a
dashboard and one without. Each run lasts as long as rows are gathered while nobody looks. The table shows the median of
what the dashboard adds to the processor time of a request, all threads and the viewers' streams included.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import uvloop

from proxy.dashboard.writer import LATEST
from tests.bench import bodies, wire
from tests.bench.systems import Launch, Launcher, Site, System, proxy, start

RATES = (18.0, 44.0, 200.0)
"""Requests per second."""
CONNECTIONS = 4
PAGES = ("requests", "sessions", "savings?days=30")
"""What viewers ask for in turn, beside the stream that each of them has."""
A_PAGE = 60.0
"""Seconds after which a viewer asks for one more page."""
STREAM = b"GET /_offload/api/live HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n\r\n"
PAGE = b"GET /_offload/api/%b HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n\r\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.watched", description=(__doc__ or "").partition(":")[0]
    )
    parser.add_argument("--viewers", type=int, default=0, help="streams of new rows that are open [0]")
    parser.add_argument("--runs", type=int, default=9, help="runs at each rate [9]")
    parser.add_argument("--rates", type=float, nargs="*", default=RATES, help=f"requests per second {list(RATES)}")
    options = parser.parse_args(arguments)
    policy = proxy({"mode": "auto", "max_total_tokens": 1_000_000_000})
    with ExitStack() as running:
        folder = Path(running.enter_context(tempfile.TemporaryDirectory(prefix="offload-bench-")))
        runner = running.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        _, plain, shown = start(running, folder, {"without": policy, "with": _with_dashboard(policy)})
        runner.run(_run((plain, shown), 100.0, 2.0, 0))
        for rate in options.rates:
            found = [runner.run(_run((plain, shown), rate, LATEST, options.viewers)) for _ in range(options.runs)]
            times = [median(one) for one in zip(*found, strict=True)]
            added = median(after / before - 1 for before, after in found)
            print(
                f"{rate:4.0f}/s, {options.viewers:2} viewers: {times[0]:5.0f} µs, {times[1]:5.0f} µs, {added:+.1%}",
                flush=True,
            )


def _with_dashboard(policy: Launcher) -> Launcher:
    def launch(site: Site) -> Launch:
        made = policy(site)
        return Launch([*made.command, f"--dashboard={site.folder / 'rows.db'}"], made.environment)

    return launch


async def _run(systems: Sequence[System], rate: float, seconds: float, viewers: int) -> list[float]:
    """Return the processor time of a request to each system, in microseconds."""
    shown = systems[-1].port
    async with asyncio.TaskGroup() as group:
        looking = [group.create_task(_view(shown)) for _ in range(viewers)]
        looking += [group.create_task(_turn_pages(shown, A_PAGE / viewers))] if viewers else []
        before = [system.busy() for system in systems]
        asking = [
            group.create_task(_ask(system.port, rate / CONNECTIONS, seconds))
            for system in systems
            for _ in range(CONNECTIONS)
        ]
        counts = [await one for one in asking]
        after = [system.busy() for system in systems]
        for one in looking:
            one.cancel()
    asked = [sum(counts[at : at + CONNECTIONS]) for at in range(0, len(counts), CONNECTIONS)]
    return [1e6 * (last - first) / count for first, last, count in zip(before, after, asked, strict=True)]


async def _ask(port: int, rate: float, seconds: float) -> int:
    """Ask on one connection so many times a second, and return how often."""
    request = bodies.request(bodies.body(bodies.SIZES[0], stream=False))
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    begun, count = time.monotonic(), 0
    while (due := begun + count / rate) < begun + seconds:
        await asyncio.sleep(max(due - time.monotonic(), 0.0))
        writer.write(request)
        message = wire.Message()
        while not message.feed(await reader.read(1 << 16)):
            pass
        count += 1
    writer.close()
    return count


async def _view(port: int) -> None:
    """Read the stream of new rows until cancelled."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(STREAM % port)
    while await reader.read(1 << 16):
        pass


async def _turn_pages(port: int, seconds: float) -> None:
    """Ask for a page every so many seconds until cancelled."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while True:
        for page in PAGES:
            await asyncio.sleep(seconds)
            writer.write(PAGE % (page.encode(), port))
            message = wire.Message()
            while not message.feed(await reader.read(1 << 16)):
                pass


if __name__ == "__main__":
    main()
