"""The cost of a system between an agent and its model: `python -m bench.overhead`.

The requests are those of `bench.bodies`: each connection has a conversation of its own that the
system knows, and adds a new turn of 20 KB with each request. All systems have one worker and the
same upstream, which only replies. They take turns, so that other load on the machine affects all of
them, and the figures are medians over the runs. Processor time is that of all processes of a
system, with its work after the reply. *Share* is the bare relay's (`bench.bare`) divided by the
system's: 1 costs as little as relaying, 0.5 twice as much.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import uvloop

from bench import bodies
from bench.bodies import CHAT, MESSAGES, MODEL, Talk
from bench.competitors import COMPETITORS
from bench.systems import Launcher, System, bare, nginx, proxy, start
from bench.wire import AGENT, SLOW, Client, Failed

BARE = "bare relay"
OURS = "proxy"
OFF = "proxy, mode: off"
DASHBOARD = "proxy, --dashboard"
KB = 1_000
MB = 1_000_000
WINDOW = 250
"""Turns of an agent's run that are averaged."""
STEP = 2_000
"""Bytes of each result of an agent's run."""


@dataclass(frozen=True)
class Case:
    """Requests to measure."""

    size: int
    """Bytes of a request; below 2,000, a request of 1 KB with one tool."""
    turns: int = 4
    """Requests of each connection that are measured, after one that makes it known."""
    stream: bool = False
    connections: int = 1
    model: str = MODEL
    api: str = CHAT
    marks: bool = False

    def requests(self, run: int) -> list[list[bytes]]:
        """The bodies of each connection."""
        return [self._bodies(1 + run * self.connections + at) for at in range(self.connections)]

    def _bodies(self, seed: int) -> list[bytes]:
        numbers = range(self.turns + 1)
        if self.size < 2 * KB:
            first = seed * len(numbers)
            asked = [
                bodies.small(first + one, stream=self.stream, model=self.model) for one in numbers
            ]
            return asked
        talk = Talk(seed, self.api, self.marks, model=self.model)
        first = max(talk.turns(self.size) - self.turns // 2, 1)
        return [talk.body(first + one, stream=self.stream) for one in numbers]


SMALL = Case(KB, 300)
SMALL_STREAMED = Case(KB, 40, stream=True)
TURNS = {size: Case(size) for size in (100 * KB, MB, 3 * MB)}
EIGHT = Case(MB, connections=8)
EIGHT_STREAMED = Case(MB, connections=8, stream=True)
PLAIN = {size: Case(size, api=MESSAGES) for size in (MB, 3 * MB)}
MARKED = {size: Case(size, api=MESSAGES, marks=True) for size in (MB, 3 * MB)}
WRITTEN = Case(KB, 2, stream=True, connections=8, model=SLOW)
SHOWN = {
    "1 KB": SMALL,
    "1 KB streamed": SMALL_STREAMED,
    "100 KB": TURNS[100 * KB],
    "1 MB": TURNS[MB],
}
"""What the alternatives are measured with, too."""


@dataclass(frozen=True)
class Sample:
    """One run of a case through one system: processor seconds of a request, its median seconds, and
    requests a second."""

    cpu: float
    seconds: float
    rate: float


Figure = Callable[[Sample, Sample], float]
"""Of a system's run and the bare relay's."""


class Bench:
    """Measures systems, and remembers which failed at what."""

    def __init__(self, systems: Sequence[System], runs: int) -> None:
        self.systems = {one.name: one for one in systems}
        self.failed: dict[str, str] = {}
        self._runs = runs
        self._taken: dict[tuple[str, Case], list[Sample]] = {}

    async def measure(self, case: Case, names: Sequence[str]) -> None:
        """Take the samples of a case: each system in its turn, in each run."""
        for run in range(self._runs):
            requests = case.requests(run)
            for name in names:
                if f"{name}, {case}" not in self.failed:
                    await self._measure(case, self.systems[name], requests)

    async def _measure(self, case: Case, system: System, requests: list[list[bytes]]) -> None:
        try:
            sample = await sampled(system, case, requests)
        except Failed as fault:
            self.failed[f"{system.name}, {case}"] = system.ended or str(fault)
        else:
            self._taken.setdefault((system.name, case), []).append(sample)

    def share(self, name: str, case: Case) -> float | None:
        """The bare relay's processor time divided by the system's."""
        return self._median(name, case, lambda one, bare: bare.cpu / one.cpu)

    def rate(self, name: str, case: Case) -> float | None:
        """The system's requests a second divided by the bare relay's."""
        return self._median(name, case, lambda one, bare: one.rate / bare.rate)

    def added(self, name: str, case: Case) -> float | None:
        """Processor seconds above the bare relay's."""
        return self._median(name, case, lambda one, bare: one.cpu - bare.cpu)

    def slower(self, name: str, case: Case) -> float | None:
        """Seconds that a request takes longer than through the bare relay."""
        return self._median(name, case, lambda one, bare: one.seconds - bare.seconds)

    def cpu(self, name: str, case: Case) -> float | None:
        """Processor seconds."""
        return self._median(name, case, lambda one, _: one.cpu)

    def _median(self, name: str, case: Case, figure: Figure) -> float | None:
        runs = self._taken.get((name, case), [])
        beside = self._taken.get((BARE, case), runs)
        if not runs:
            return None
        return median(figure(one, bare) for one, bare in zip(runs, beside, strict=False))


async def sampled(system: System, case: Case, requests: list[list[bytes]]) -> Sample:
    """Make the conversations known, then measure their next turns. Raises Failed."""
    clients = [Client(system.port) for _ in requests]
    asked = [
        [bodies.request(body, case.api, system.headers) for body in connection]
        for connection in requests
    ]
    taken = list[float]()

    async def ask(client: Client, turns: list[bytes]) -> None:
        for turn in turns:
            taken.append((await client.ask(turn)).seconds)

    for client, (known, *_) in zip(clients, asked, strict=True):
        await client.ask(known)
    await system.settle()
    before = system.cpu()
    began = time.perf_counter()
    await asyncio.gather(
        *(ask(client, turns) for client, (_, *turns) in zip(clients, asked, strict=True))
    )
    lasted = time.perf_counter() - began
    await system.settle()
    cpu = system.cpu() - before
    for client in clients:
        client.close()
    return Sample(cpu / len(taken), median(taken), len(taken) / lasted)


async def growth(ours: System, relay: System, turns: int) -> tuple[float, float]:
    """Play an agent's run of so many turns, with hidden rounds and summaries. Returns the processor
    time of its last turns, divided by that of the turns before its first quarter ends: once all of
    it, and once only what it has beyond the relay's for the same bodies."""
    talk = Talk(0, result=STEP, model=AGENT)
    quarter = turns // 4
    window = min(WINDOW, turns // 8)

    async def spent(system: System, first: int, last: int) -> float:
        client = Client(system.port)
        before = system.cpu()
        for turn in range(first, last):
            await client.ask(bodies.request(talk.body(turn + 1)))
        await system.settle()
        client.close()
        return system.cpu() - before

    await spent(ours, 0, quarter - window)
    early = await spent(ours, quarter - window, quarter)
    await spent(ours, quarter, turns - window)
    late = await spent(ours, turns - window, turns)
    relayed_early = await spent(relay, quarter - window, quarter)
    relayed_late = await spent(relay, turns - window, turns)
    return late / early, (late - relayed_late) / (early - relayed_early)


# -- tables ----------------------------------------------------------------------------------------


def table(bench: Bench, grown: tuple[float, float]) -> str:
    """Return the rows of ratios."""
    sizes = "100 KB, 1 MB, 3 MB"
    rows: dict[str, Sequence[float | None]] = {
        f"share of the bare relay's CPU, a known conversation, one new turn: {sizes}": [
            bench.share(OURS, case) for case in TURNS.values()
        ],
        "CPU added to the bare relay's at 3 MB, against at 100 KB": [
            _ratio(bench.added(OURS, TURNS[3 * MB]), bench.added(OURS, TURNS[100 * KB]))
        ],
        "eight connections, share of the bare relay's requests/s at 1 MB: plain, streamed": [
            bench.rate(OURS, EIGHT),
            bench.rate(OURS, EIGHT_STREAMED),
        ],
        "CPU of an agent's last turns, against those before a quarter: all, added to the bare relay's": grown,
        "CPU with cache marks that move, against without: 1 MB, 3 MB": [
            _ratio(bench.cpu(OURS, MARKED[size]), bench.cpu(OURS, PLAIN[size])) for size in PLAIN
        ],
        "share of CPU, a streamed reply with events 4 ms apart": [bench.share(OURS, WRITTEN)],
        "share of CPU, 1 KB with one tool: plain, streamed": [
            bench.share(OURS, SMALL),
            bench.share(OURS, SMALL_STREAMED),
        ],
        "share of CPU, `mode: off`: 1 MB, 3 MB": [
            bench.share(OFF, TURNS[MB]),
            bench.share(OFF, TURNS[3 * MB]),
        ],
    }
    lines = [f"| {name} | {', '.join(map(_shown, values))} |" for name, values in rows.items()]
    return "\n".join(["| | |", "|---|---|", *lines])


def beside(bench: Bench, memory: Mapping[str, float]) -> str:
    """The systems beside each other: share of CPU, and milliseconds added to the median request."""
    heads = [f"{name} | ms added" for name in SHOWN]
    lines = [f"| share of the bare relay's CPU | {' | '.join(heads)} | RSS, MB |"]
    lines.append("|---" * (2 * len(SHOWN) + 2) + "|")
    for name in bench.systems:
        cells = [
            f"{_shown(bench.share(name, case))} | {_shown(bench.slower(name, case), 1000)}"
            for case in SHOWN.values()
        ]
        lines.append(f"| {name} | {' | '.join(cells)} | {memory[name]:.0f} |")
    return "\n".join(lines)


def _ratio(one: float | None, other: float | None) -> float | None:
    return one / other if one is not None and other else None


def _shown(figure: float | None, times: float = 1.0) -> str:
    return "-" if figure is None else f"{figure * times:.2f}"


def launchers(words: Sequence[str] | None) -> tuple[dict[str, Launcher], list[str]]:
    """The systems to measure, and the names of those that are not installed. Words choose the
    alternatives."""
    chosen: dict[str, Launcher] = {
        BARE: bare,
        OURS: proxy({}),
        OFF: proxy({"mode": "off"}),
        DASHBOARD: proxy({}, dashboard=True),
    }
    absent = []
    program = shutil.which("nginx")
    others = {one.name: one.at if one.installed else None for one in COMPETITORS}
    others["nginx"] = nginx(program) if program else None
    for name, launcher in others.items():
        if words is not None and not any(word.lower() in name.lower() for word in words):
            continue
        if launcher:
            chosen[name] = launcher
        else:
            absent.append(name)
    return chosen, absent


async def measured(bench: Bench, turns: int, smoke: bool) -> tuple[float, float]:
    """Take all samples. Returns how an agent's turns grow."""
    ours = [BARE, OURS]
    for case in [SMALL_STREAMED, TURNS[100 * KB]] if smoke else SHOWN.values():
        await bench.measure(case, list(bench.systems))
    await bench.measure(WRITTEN, ours)
    if not smoke:
        await bench.measure(TURNS[3 * MB], [*ours, OFF])
        for case in (EIGHT, EIGHT_STREAMED, *PLAIN.values(), *MARKED.values()):
            await bench.measure(case, ours)
    return await growth(bench.systems[OURS], bench.systems[BARE], turns)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.overhead", description=(__doc__ or "").partition(":")[0]
    )
    parser.add_argument("--runs", type=int, default=5, help="runs of each, taking turns [5]")
    parser.add_argument("--turns", type=int, default=2_000, help="of an agent's run [2000]")
    parser.add_argument(
        "--beside", nargs="*", metavar="WORD", help="only alternatives with a word in their names"
    )
    parser.add_argument("--smoke", action="store_true", help="a quick check that it works")
    options = parser.parse_args(arguments)
    if options.smoke:
        options.runs = 1
        options.turns = 40
        options.beside = []
    began = time.monotonic()
    chosen, absent = launchers(options.beside)
    with ExitStack() as running:
        folder = Path(running.enter_context(tempfile.TemporaryDirectory(prefix="offload-bench-")))
        bench = Bench(start(running, folder, chosen), options.runs)
        grown = uvloop.run(measured(bench, options.turns, options.smoke))
        memory = {name: one.rss() for name, one in bench.systems.items()}
    print(table(bench, grown), beside(bench, memory), sep="\n\n")
    for what, reason in bench.failed.items():
        print(f"failed: {what}: {reason}")
    for name in absent:
        print(f"not installed: {name}")
    print(f"took {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
