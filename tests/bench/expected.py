"""What is expected of the proxy's overhead, and whether a run of `overhead` shows it. All but ratios is in seconds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tests.bench.bodies import SIZES
from tests.bench.figures import BARE, OURS, Figures, Measured, Point, of, peers

UNTOUCHED = 0.8
"""Of the bare relay's requests, where nothing is to be done."""
MOVING = "proxy, moving"
"""The one of ours that has something to do."""
LARGE, FIRST = 0.005, 0.001
"""Seconds above the bare relay: 1 MB warm, and a stream's first byte, both without anybody else asking."""
LEAN = 3.0
"""How far ahead of the peers: so many times as many requests, but for the leanest."""


@dataclass(frozen=True)
class Finding:
    """Whether one of ours does as is expected at one point, and what it does, in words."""

    expected: str
    holds: bool
    shown: str


def report(results: Mapping[Point, Measured]) -> str:
    """A line for everything that is expected, and one below it for each time that it was missed."""
    found: dict[str, list[Finding]] = {}
    for point, measured in results.items():
        for finding in findings(point, measured):
            found.setdefault(finding.expected, []).append(finding)
    return "\n".join(line for group in found.values() for line in _lines(group))


def _lines(group: list[Finding]) -> Iterator[str]:
    missed = [finding.shown for finding in group if not finding.holds]
    verdict = "missed" if missed else "so"
    yield f"expected, and {verdict}: {group[0].expected} ({len(group) - len(missed)} of {len(group)})"
    yield from (f"  {shown}" for shown in missed)


def findings(point: Point, measured: Measured) -> Iterator[Finding]:
    bare = of(measured, BARE)
    for name in OURS:
        ours, where = of(measured, name), f"{point}: {name}"
        if name != MOVING:
            yield _untouched(point, where, ours)
        if point.size is SIZES[-1] and point.connections == 1:
            expected = f"{point.size.name} within {LARGE * 1000:g} ms of the bare relay, from 1 connection"
            yield _within(LARGE, expected, where, ours.p50 - bare.p50)
        if point.stream and point.connections == 1:
            expected = f"a stream's first byte within {FIRST * 1000:g} ms of the bare relay's, from 1 connection"
            yield _within(FIRST, expected, where, ours.first - bare.first)
        yield from _ahead(where, ours, peers(measured))


def _untouched(point: Point, where: str, ours: Figures) -> Finding:
    expected = f"{point.size.name} that nothing is done about: {UNTOUCHED} of the bare relay's requests/s or more"
    return Finding(expected, ours.share >= UNTOUCHED, f"{where}: {ours.share:.2f}")


def _within(limit: float, expected: str, where: str, added: float) -> Finding:
    return Finding(expected, added <= limit, f"{where}: {added * 1000:.1f} ms more")


def _ahead(where: str, ours: Figures, others: Mapping[str, Figures]) -> Iterator[Finding]:
    leanest = max(others, key=lambda peer: others[peer].share, default="")
    for peer, theirs in others.items():
        times = ours.share / theirs.share
        shown = f"{where}: {times:.2f} times {peer}"
        yield Finding("more requests/s than every peer", times >= 1, shown)
        if peer != leanest:
            yield Finding(f"{LEAN:g} times those of all peers but the leanest", times >= LEAN, shown)
