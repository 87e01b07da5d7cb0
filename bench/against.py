"""The processor time of a small request against another commit: `python -m bench.against FOLDER [--pairs 9]`.

FOLDER is a worktree of the other commit (`git worktree add FOLDER COMMIT`). Two processes of the same code can differ
by several percent for as long as they live, so each pair is started anew, in swapped order. The two of a pair take
short turns under the same load. The table shows the median of the pairs' ratios, all threads included. The bare relay
uses no more of the proxy than its transport, so its ratio shows the noise.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import uvloop

from bench import bodies, wire
from bench.systems import POLICIES, ROOT, Launch, Launcher, Site, System, bare, proxy, start

CONNECTIONS = 16
TURN = 0.25
"""Seconds that each of a pair has in turn: so short that what else the machine does happens to both."""
WARM_UP = 0.5
"""Seconds."""

LAUNCHERS = {"bare relay": bare} | {name: proxy(offload) for name, offload in POLICIES.items()}
PLAIN, STREAMED = (bodies.request(bodies.body(bodies.SIZES[0], stream=stream)) for stream in (False, True))
REQUESTS = {
    "plain": PLAIN,
    "streamed": STREAMED,
    "relayed": PLAIN.replace(b"/v1/chat/completions", b"/v1/embeddings"),
}
POINTS = [f"{shape}, {name}" for shape in REQUESTS for name in LAUNCHERS]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.against", description=(__doc__ or "").partition(":")[0])
    parser.add_argument("other", type=Path, help="a worktree of the other commit")
    parser.add_argument("--pairs", type=int, default=9, help="fresh pairs of processes [9]")
    parser.add_argument("--only", default="", metavar="WORD", help="only points whose name contains this: plain …")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each at each point [2]")
    options = parser.parse_args(arguments)
    points = [point for point in POINTS if options.only in point]
    found: dict[str, list[tuple[float, float]]] = {point: [] for point in points}
    for number in range(options.pairs):
        roots = (options.other.resolve(), ROOT)
        for point, times in _pair(roots, points, options.seconds, swapped=number % 2 == 1).items():
            found[point].append(times)
    print(f"{'':28}{'other':>8}{'this':>8}{'ratio':>8}  (lowest, highest)")
    for point, pairs in found.items():
        other, this = (median(times) for times in zip(*pairs, strict=True))
        ratios = sorted(this / other for other, this in pairs)
        print(f"{point:28}{other:5.0f} µs{this:5.0f} µs{median(ratios):8.3f}  ({ratios[0]:.3f}, {ratios[-1]:.3f})")


def _pair(
    roots: tuple[Path, Path], points: Sequence[str], seconds: float, *, swapped: bool
) -> dict[str, tuple[float, float]]:
    """Return the microseconds of a request at each point, by root, for processes that are started for it."""
    order = [1, 0] if swapped else [0, 1]
    names = dict.fromkeys(point.partition(", ")[2] for point in points)
    launchers = {f"{name}, {at}": of(roots[at], LAUNCHERS[name]) for name in names for at in order}
    with ExitStack() as running:
        folder = Path(running.enter_context(tempfile.TemporaryDirectory(prefix="offload-bench-")))
        runner = running.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        systems = {system.name: system for system in start(running, folder, launchers)}
        for system in systems.values():
            system.settle()
        times = {}
        for point in points:
            shape, _, name = point.partition(", ")
            pair = [systems[f"{name}, {at}"] for at in order]
            taken = _take_turns(runner, pair, REQUESTS[shape], seconds)
            times[point] = (taken[1], taken[0]) if swapped else (taken[0], taken[1])
        return times


def of(root: Path, launcher: Launcher) -> Launcher:
    def launch(site: Site) -> Launch:
        made = launcher(site)
        return Launch(made.command, {**made.environment, "PYTHONPATH": str(root)}, made.headers)

    return launch


def _take_turns(runner: asyncio.Runner, pair: Sequence[System], request: bytes, seconds: float) -> list[float]:
    used, counts = [0.0 for _ in pair], [0 for _ in pair]
    for system in pair:
        runner.run(wire.load(system.port, request, CONNECTIONS, WARM_UP))
    for turn in range(max(round(seconds / TURN), 1)):
        for at in (0, 1) if turn % 2 == 0 else (1, 0):
            before = pair[at].busy()
            counts[at] += runner.run(wire.load(pair[at].port, request, CONNECTIONS, TURN)).count
            used[at] += pair[at].busy() - before
    return [1e6 * time / count for time, count in zip(used, counts, strict=True)]


if __name__ == "__main__":
    main()
