"""The cost of a system between an agent and its model: `python -m bench.overhead`.

Chat requests of 1 KB, 100 KB and 1 MB (1,000 messages), plain and streamed (100 events), from 1, 16
and 64 connections at once: directly, through nginx, a bare Starlette relay over the proxy's
transport (`bare.py`), the proxy, and the systems that users could pick instead (`competitors.py`).
All have one worker and the same upstream. The same history is sent repeatedly, so all caches are
warm. The systems take turns, so other load on the machine affects all of them; the tables show
medians. A reply that has not ended 3 s after its run is cut off and not counted. A system that does
not reply at all is left out from then on. `expected.py` says what a run should show.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import uvloop

from bench import bodies, expected, report, wire
from bench.bodies import SIZES
from bench.competitors import COMPETITORS
from bench.figures import BARE, Figures, Measured, Point, chosen_of, median, points
from bench.systems import POLICIES, Launcher, System, bare, nginx, proxy, start

WARM_UP = 0.2
"""Seconds."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    began = time.monotonic()
    chosen, absent = _launchers(options.competitors, options.only)
    asked = (
        [Point(SIZES[0], True, 16), Point(SIZES[1], False, 1)]
        if options.smoke
        else points(options.only)
    )
    with ExitStack() as running:
        folder = Path(running.enter_context(tempfile.TemporaryDirectory(prefix="offload-bench-")))
        runner = running.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        bench = Bench(start(running, folder, chosen), runner, options.runs, options.seconds)
        before = bench.begin()
        results = {}
        for point in asked:
            results[point] = bench.at(point)
            print(report.table(point, results[point]), flush=True)
        memory = {name: (megabytes, bench.memory()[name]) for name, megabytes in before.items()}
    print(
        report.memory_table(memory), report.summary(results), "", expected.report(results), sep="\n"
    )
    print(
        *(f"not installed: {name}" for name in absent),
        f"took {time.monotonic() - began:.0f} s",
        sep="\n",
    )
    if options.png:
        report.draw(options.png, results)
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.overhead", description=(__doc__ or "").partition(":")[0]
    )
    parser.add_argument(
        "--runs", type=int, default=3, help="runs of each at each point, taking turns [3]"
    )
    parser.add_argument("--seconds", type=float, default=0.5, help="of one run [0.5]")
    words = "only points and competitors whose name contains this (repeatable): '1 MB', plain, '16 conn', litellm …"
    parser.add_argument("--only", action="append", default=[], metavar="WORD", help=words)
    parser.add_argument(
        "--no-competitors",
        dest="competitors",
        action="store_false",
        help="only the proxy and its baselines",
    )
    parser.add_argument("--png", type=Path, help="the file to draw a chart to")
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="a quick check that it works: under 10 s, no competitors",
    )
    options = parser.parse_args(arguments)
    if options.smoke:
        options.runs = 1
        options.seconds = 0.1
        options.competitors = False
    return options


def _launchers(competitors: bool, words: Sequence[str]) -> tuple[dict[str, Launcher], list[str]]:
    """The systems to measure (always the proxy and the bare relay), and the competitors that are
    not installed."""
    chosen: dict[str, Launcher] = {}
    absent = []
    if program := shutil.which("nginx"):
        chosen["nginx"] = nginx(program)
    else:
        absent.append("nginx")
    chosen[BARE] = bare
    chosen |= {name: proxy(offload) for name, offload in POLICIES.items()}
    named = (
        chosen_of([competitor.name for competitor in COMPETITORS], words) if competitors else set()
    )
    chosen |= {
        competitor.name: competitor.at
        for competitor in COMPETITORS
        if competitor.name in named and competitor.installed
    }
    absent += [
        f"{competitor.name} (make bench-competitors)"
        for competitor in COMPETITORS
        if competitor.name in named and not competitor.installed
    ]
    return chosen, absent


class Bench:
    """Measures all systems at one point after another, and drops a system for good once it does not
    reply."""

    def __init__(
        self, systems: Sequence[System], runner: asyncio.Runner, runs: int, seconds: float
    ) -> None:
        self._systems = systems
        self._runner = runner
        self._runs = runs
        self._seconds = seconds
        self._out: dict[str, str] = {}

    def begin(self) -> dict[str, float]:
        """Each system's memory in MB after a first small reply: some listen before they have loaded
        everything."""
        body = bodies.body(SIZES[0], stream=False)
        for one in self._systems:
            try:
                self._runner.run(wire.ask(one.port, bodies.request(body, one.headers)))
            except wire.Failed as fault:
                self._out[one.name] = one.ended or str(fault)
            one.settle()
        return self.memory()

    def memory(self) -> dict[str, float]:
        """Resident memory in MB, by system; 0 for one that has ended."""
        return {one.name: one.rss() for one in self._systems}

    def at(self, point: Point) -> Measured:
        body = bodies.body(point.size, stream=point.stream)
        requests = {one.name: bodies.request(body, one.headers) for one in self._systems}
        taken: dict[str, list[Figures]] = {one.name: [] for one in self._systems}
        failed = dict(self._out)
        for turn in range(-1, self._runs):
            for one in self._systems:
                if one.name in failed or (turn > 0 and taken[one.name][0].p50 > self._seconds):
                    continue  # ask only once if a reply takes longer than a run
                try:
                    if turn < 0:
                        self._warm_up(one, requests[one.name], point)
                    else:
                        taken[one.name].append(
                            self._run(one, requests[one.name], point.connections, self._seconds)
                        )
                except wire.Failed as fault:
                    failed[one.name] = self._failed(one, fault)
        bare = taken[BARE]
        return {
            name: failed[name] if name in failed else median(runs, bare)
            for name, runs in taken.items()
        }

    def _failed(self, one: System, fault: wire.Failed) -> str:
        """The reason for missing figures, at this point or from here on."""
        reason = one.ended or str(fault)
        if one.ended or isinstance(fault, wire.Silent):
            self._out[one.name] = reason
        return reason

    def _warm_up(self, one: System, request: bytes, point: Point) -> None:
        """Check its reply, then have it reply a few times and finish its background work."""
        reply = self._runner.run(wire.ask(one.port, request))
        whole = wire.SAID in reply and (not point.stream or b"[DONE]" in reply)
        if not whole:
            raise wire.Failed(reply.partition(b"\r\n")[0].decode("latin-1"))
        self._run(one, request, point.connections, min(WARM_UP, self._seconds))
        one.settle()

    def _run(self, one: System, request: bytes, connections: int, seconds: float) -> Figures:
        before = one.cpu()
        load = self._runner.run(wire.load(one.port, request, connections, seconds))
        cpu = (one.cpu() - before) / load.count
        if load.cut:
            one.settle()
        return Figures(load.rate, load.p50, load.p99, load.first, cpu)


if __name__ == "__main__":
    sys.exit(main())
