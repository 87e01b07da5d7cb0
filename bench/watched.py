"""What the dashboard costs the process that serves requests: `python -m bench.watched [--viewers
20]`.

Two proxies get the same small requests, one with a dashboard and one without: at each rate both at
the same time, so that other load on the machine affects both, and then as many requests as they
take, by turns. Who goes first changes with each run and turn. Both are started anew for each run,
because two processes of the same program differ by some percent. Viewers look for new rows every
two seconds. Before a measurement begins, requests have come for some seconds, because what a
process does for the first time costs more. The table shows the median of what the dashboard adds to
the processor time of a request, all threads included, and what that is in a second: a transaction
and a look cost the same however many requests come. What a page costs is shown below it.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from statistics import median

import msgspec
import uvloop

from bench import bodies, wire
from bench.systems import Launch, Launcher, Site, System, proxy, start
from proxy.apps.dashboard.writer import LATEST

RATES = (18.0, 44.0, 200.0)
"""Requests per second."""
CONNECTIONS = 4
WARM = 10.0
SECONDS = 20.0
"""Seconds of a run at a rate before it is measured, and while it is."""
A_TURN = 0.25
TURNS = 40
"""Seconds of a turn, and turns of each system, in a run without a rate."""
PAGES = ("requests", "sessions", "savings?period=month")
"""What viewers ask for beside the rows that each of them asks for again and again."""
EVERY = 2.0
"""Seconds between two looks of a viewer for new rows."""
A_PAGE = 60.0
"""Seconds after which a viewer turns a page."""
PAGES_TURNED = 10
"""How often each page is asked for."""
TOKEN = "the token of the benchmark"
PAGE = (
    b"GET /_offload/api/%b HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nAuthorization: Bearer "
    + TOKEN.encode()
    + b"\r\n\r\n"
)
REQUEST = bodies.request(bodies.body(bodies.SIZES[0], stream=False))

Times = tuple[float, float, float]
"""Of one run: the processor time of a request without and with a dashboard, in microseconds, and
requests a second."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.watched", description=(__doc__ or "").partition(":")[0]
    )
    parser.add_argument("--viewers", type=int, default=0, help="viewers of the live page [0]")
    parser.add_argument("--runs", type=int, default=9, help="runs at each rate [9]")
    parser.add_argument(
        "--rates", type=float, nargs="*", default=RATES, help=f"requests per second {list(RATES)}"
    )
    options = parser.parse_args(arguments)
    runs = [_run(options.rates, options.viewers, run % 2) for run in range(options.runs)]
    print(f"{options.viewers} viewers   without      with   added   a second")
    for found in zip(*(times for times, _ in runs), strict=True):
        before, after, a_second = (median(one) for one in zip(*found, strict=True))
        added = median(after / before - 1 for before, after, _ in found)
        spent = median((after - before) * count for before, after, count in found) / 1000
        print(f"{a_second:7.0f}/s {before:7.0f} µs {after:7.0f} µs {added:+7.1%} {spent:+7.2f} ms")
    taken = [median(one) for one in zip(*(pages for _, pages in runs), strict=True)]
    print(
        "a page:", ", ".join(f"{page} {one:.1f} ms" for page, one in zip(PAGES, taken, strict=True))
    )
    if options.viewers:
        share = sum(taken) / len(taken) * options.viewers / A_PAGE
        print(
            f"{options.viewers} viewers who turn a page every {A_PAGE:.0f} s: {share:+.2f} ms a second"
        )


def _run(rates: Sequence[float], viewers: int, first: int) -> tuple[list[Times], list[float]]:
    """Start both proxies, and return the times at each rate and without one, and what each page
    takes. `first` is the place of the one that goes first."""
    policy = proxy({"mode": "auto", "max_total_tokens": 1_000_000_000})
    with ExitStack() as running:
        folder = Path(running.enter_context(tempfile.TemporaryDirectory(prefix="offload-bench-")))
        _, *systems = start(running, folder, {"without": policy, "with": _with_dashboard(policy)})
        return uvloop.run(_measure(systems, rates, viewers, first))


async def _measure(
    systems: Sequence[System], rates: Sequence[float], viewers: int, first: int
) -> tuple[list[Times], list[float]]:
    for system in systems:
        await wire.load(system.port, REQUEST, CONNECTIONS, A_TURN)
    times = []
    for rate in (*rates, None):
        await _turn(systems[-1], PAGES[0])  # has the rows so far written
        async with _watching(systems[-1].port, viewers):
            if rate is None:
                times.append(await _by_turns(systems, first))
            else:
                await _at(systems, first, rate, WARM)
                times.append(await _at(systems, first, rate, SECONDS))
            print(".", end="", flush=True, file=sys.stderr)
    return times, [await _turn(systems[-1], page) for page in PAGES]


def _with_dashboard(policy: Launcher) -> Launcher:
    def launch(site: Site) -> Launch:
        made = policy(site)
        return Launch(
            [*made.command, f"--dashboard={site.folder / 'rows.db'}"],
            {**made.environment, "OFFLOAD_ADMIN_TOKEN": TOKEN},
        )

    return launch


async def _at(systems: Sequence[System], first: int, rate: float, seconds: float) -> Times:
    """Ask both systems so many times a second for so long."""
    before = [system.busy() for system in systems]
    counts = [0] * len(systems)

    async def ask(at: int) -> None:
        asking = (_ask(systems[at].port, rate / CONNECTIONS, seconds) for _ in range(CONNECTIONS))
        counts[at] = sum(await asyncio.gather(*asking))

    await asyncio.gather(*map(ask, _order(systems, first)))
    after = [system.busy() for system in systems]
    return _times(before, after, counts, seconds)


async def _by_turns(systems: Sequence[System], first: int) -> Times:
    """Ask each system by turns as often as it replies, and wait until all rows are written."""
    before = [system.busy() for system in systems]
    counts = [0] * len(systems)
    for turn in range(TURNS):
        for at in _order(systems, first + turn):
            counts[at] += (await wire.load(systems[at].port, REQUEST, CONNECTIONS, A_TURN)).count
    await asyncio.sleep(2 * LATEST)
    after = [system.busy() for system in systems]
    return _times(before, after, counts, TURNS * A_TURN)


def _order(systems: Sequence[System], first: int) -> list[int]:
    """Return the places of the systems in the order in which they are asked."""
    return [(first + at) % len(systems) for at in range(len(systems))]


def _times(
    before: Sequence[float], after: Sequence[float], counts: Sequence[int], seconds: float
) -> Times:
    plain, shown = (
        1e6 * (last - first) / count
        for first, last, count in zip(before, after, counts, strict=True)
    )
    return plain, shown, counts[-1] / seconds


async def _ask(port: int, rate: float, seconds: float) -> int:
    """Ask on one connection so many times a second, and return how often."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    begun = time.monotonic()
    count = 0
    while (due := begun + count / rate) < begun + seconds:
        await asyncio.sleep(max(due - time.monotonic(), 0.0))
        writer.write(REQUEST)
        message = wire.Message()
        while not message.feed(await reader.read(1 << 16)):
            pass
        count += 1
    writer.close()
    return count


@asynccontextmanager
async def _watching(port: int, viewers: int) -> AsyncIterator[None]:
    """Keep so many viewers looking, at different times."""
    async with asyncio.TaskGroup() as group:
        looking = [group.create_task(_view(port, EVERY * at / viewers)) for at in range(viewers)]
        await asyncio.sleep(EVERY)
        yield
        for one in looking:
            one.cancel()


async def _view(port: int, begins: float) -> None:
    """Ask for new rows until cancelled."""
    await asyncio.sleep(begins)
    newest = 0
    while True:
        reply = await wire.ask(port, PAGE % (b"requests?limit=50&after=%d" % newest, port))
        rows = msgspec.json.decode(reply.partition(b"\r\n\r\n")[2])
        newest = rows[0]["id"] if rows else newest
        await asyncio.sleep(EVERY)


async def _turn(system: System, page: str) -> float:
    """Return the processor time of a page, in milliseconds."""
    before = system.busy()
    for _ in range(PAGES_TURNED):
        await wire.ask(system.port, PAGE % (page.encode(), system.port))
    return 1e3 * (system.busy() - before) / PAGES_TURNED


if __name__ == "__main__":
    main()
