"""What stands between an agent and its model costs this much: `python -m tests.bench.overhead`.

Chat requests of 1 KB, 100 KB and 1 MB (1,000 messages), plain and streamed (100 events), from 1, 16 and 64 connections
at once, through no proxy at all, nginx, a bare Starlette relay over the proxy's transport (`bare.py`), the proxy, and
what users would pick in its place (`peers.py`), all with one worker and in front of the same upstream. The same history
comes again and again, so all caches are warm. The contestants take turns, so that what else happens on the machine
happens to all; shown are medians of the runs. A reply that has not ended 3 s after its run is cut off and left out; who
does not reply at all is left out from there on. `expected.py` says what a run should show.
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

from tests.bench import bodies, expected, report, wire
from tests.bench.bodies import SIZES
from tests.bench.contestants import POLICIES, Contestant, Launcher, bare, nginx, proxy, start
from tests.bench.figures import BARE, Figures, Measured, Point, chosen_of, median, points
from tests.bench.peers import PEERS

WARM_UP = 0.2
"""Seconds."""
SETTLING = 10.0
"""Seconds that a contestant may go on with what it does beside its replies before it is measured all the same."""
QUIET = 0.1
"""Of one processor: what a process may use that has nothing to do."""


def main(arguments: Sequence[str] | None = None) -> int:
    options, began = _options(arguments), time.monotonic()
    chosen, absent = _launchers(options.peers, options.only)
    asked = [Point(SIZES[0], True, 16), Point(SIZES[1], False, 1)] if options.smoke else points(options.only)
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
    print(report.memory_table(memory), report.summary(results), "", expected.report(results), sep="\n")
    print(*(f"not installed: {name}" for name in absent), f"took {time.monotonic() - began:.0f} s", sep="\n")
    if options.png:
        report.draw(options.png, results)
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.overhead", description=(__doc__ or "").partition(":")[0]
    )
    parser.add_argument("--runs", type=int, default=3, help="runs of each at each point, taking turns [3]")
    parser.add_argument("--seconds", type=float, default=0.5, help="of one run [0.5]")
    words = "only points and peers with this in their name (again for more): '1 MB', plain, '16 conn', litellm …"
    parser.add_argument("--only", action="append", default=[], metavar="WORD", help=words)
    parser.add_argument("--no-peers", dest="peers", action="store_false", help="only ours, and what ours is built on")
    parser.add_argument("--png", type=Path, help="draw a chart there")
    parser.add_argument("--smoke", action="store_true", help="only to see that it works: under 10 s, no peers")
    options = parser.parse_args(arguments)
    if options.smoke:
        options.runs, options.seconds, options.peers = 1, 0.1, False
    return options


def _launchers(peers: bool, words: Sequence[str]) -> tuple[dict[str, Launcher], list[str]]:
    """Who takes part, and which peers would but are not there. Ours and the bare relay always do."""
    chosen: dict[str, Launcher] = {}
    absent = []
    if program := shutil.which("nginx"):
        chosen["nginx"] = nginx(program)
    else:
        absent.append("nginx")
    chosen[BARE] = bare
    chosen |= {name: proxy(offload) for name, offload in POLICIES.items()}
    named = chosen_of([peer.name for peer in PEERS], words) if peers else set()
    chosen |= {peer.name: peer.at for peer in PEERS if peer.name in named and peer.installed}
    absent += [f"{peer.name} (make bench-peers)" for peer in PEERS if peer.name in named and not peer.installed]
    return chosen, absent


class Bench:
    """Measures all contestants at one point after the other; who does not reply to anything is left out for good."""

    def __init__(self, contestants: Sequence[Contestant], runner: asyncio.Runner, runs: int, seconds: float) -> None:
        self._contestants = contestants
        self._runner = runner
        self._runs = runs
        self._seconds = seconds
        self._out: dict[str, str] = {}

    def begin(self) -> dict[str, float]:
        """Everybody's memory in MB after a first small reply: some listen before they have loaded what they need."""
        body = bodies.body(SIZES[0], stream=False)
        for one in self._contestants:
            try:
                self._runner.run(wire.ask(one.port, bodies.request(body, one.headers)))
            except wire.Failed as fault:
                self._out[one.name] = one.ended or str(fault)
            _settle(one)
        return self.memory()

    def memory(self) -> dict[str, float]:
        """Resident, in MB, by contestant; that of one that has ended is 0."""
        return {one.name: one.rss() for one in self._contestants}

    def at(self, point: Point) -> Measured:
        body = bodies.body(point.size, stream=point.stream)
        requests = {one.name: bodies.request(body, one.headers) for one in self._contestants}
        taken: dict[str, list[Figures]] = {one.name: [] for one in self._contestants}
        failed = dict(self._out)
        for turn in range(-1, self._runs):
            for one in self._contestants:
                if one.name in failed or (turn > 0 and taken[one.name][0].p50 > self._seconds):
                    continue  # whose replies take longer than a run is asked once
                try:
                    if turn < 0:
                        self._warm_up(one, requests[one.name], point)
                    else:
                        taken[one.name].append(self._run(one, requests[one.name], point.connections, self._seconds))
                except wire.Failed as fault:
                    failed[one.name] = self._failed(one, fault)
        bare = taken[BARE]
        return {name: failed[name] if name in failed else median(runs, bare) for name, runs in taken.items()}

    def _failed(self, one: Contestant, fault: wire.Failed) -> str:
        """Why there are no figures, at this point or from here on."""
        reason = one.ended or str(fault)
        if one.ended or isinstance(fault, wire.Silent):
            self._out[one.name] = reason
        return reason

    def _warm_up(self, one: Contestant, request: bytes, point: Point) -> None:
        """See that it replies as it should, then let it do so a few times and end what it does besides."""
        reply = self._runner.run(wire.ask(one.port, request))
        whole = wire.SAID in reply and (not point.stream or b"[DONE]" in reply)
        if not whole:
            raise wire.Failed(reply.partition(b"\r\n")[0].decode("latin-1"))
        self._run(one, request, point.connections, min(WARM_UP, self._seconds))
        _settle(one)

    def _run(self, one: Contestant, request: bytes, connections: int, seconds: float) -> Figures:
        before = one.cpu()
        load = self._runner.run(wire.load(one.port, request, connections, seconds))
        cpu = (one.cpu() - before) / load.count
        if load.cut:
            _settle(one)
        return Figures(load.rate, load.p50, load.p99, load.first, cpu)


def _settle(one: Contestant) -> None:
    deadline = time.monotonic() + SETTLING
    while time.monotonic() < deadline:
        before = one.cpu()
        time.sleep(0.1)
        if one.cpu() - before <= QUIET * 0.1:
            return


if __name__ == "__main__":
    sys.exit(main())
