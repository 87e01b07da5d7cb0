"""The expectations on the proxy's overhead, and whether a run of `overhead` meets them. Ratios, or
seconds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from bench.bodies import SIZES
from bench.figures import BARE, OURS, Figures, Measured, Point, competitors, of

UNTOUCHED = 0.8
"""The least share of the bare relay's request rate where the plan changes nothing."""
MOVING = "proxy, moving"
"""The policy under which the proxy changes the request."""
LARGE = 0.005
FIRST = 0.001
"""Seconds above the bare relay: 1 MB warm, and a stream's first byte, both from a single
connection."""
LEAN = 3.0
"""How many times the requests of each competitor, except the leanest."""


@dataclass(frozen=True)
class Finding:
    """Whether the proxy meets an expectation at one point, and its figure in words."""

    expected: str
    holds: bool
    shown: str


def report(results: Mapping[Point, Measured]) -> str:
    """A line for each expectation, and one below it for each miss."""
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
        ours = of(measured, name)
        where = f"{point}: {name}"
        if name != MOVING:
            yield _untouched(point, where, ours)
        if point.size is SIZES[-1] and point.connections == 1:
            expected = (
                f"{point.size.name} within {LARGE * 1000:g} ms of the bare relay, from 1 connection"
            )
            yield _within(LARGE, expected, where, ours.p50 - bare.p50)
        if point.stream and point.connections == 1:
            expected = f"a stream's first byte within {FIRST * 1000:g} ms of the bare relay's, from 1 connection"
            yield _within(FIRST, expected, where, ours.first - bare.first)
        yield from _ahead(where, ours, competitors(measured))


def _untouched(point: Point, where: str, ours: Figures) -> Finding:
    expected = f"{point.size.name} that nothing is done about: {UNTOUCHED} of the bare relay's requests/s or more"
    return Finding(expected, ours.share >= UNTOUCHED, f"{where}: {ours.share:.2f}")


def _within(limit: float, expected: str, where: str, added: float) -> Finding:
    return Finding(expected, added <= limit, f"{where}: {added * 1000:.1f} ms more")


def _ahead(where: str, ours: Figures, others: Mapping[str, Figures]) -> Iterator[Finding]:
    leanest = max(others, key=lambda competitor: others[competitor].share, default="")
    for competitor, theirs in others.items():
        times = ours.share / theirs.share
        shown = f"{where}: {times:.2f} times {competitor}"
        yield Finding("more requests/s than every competitor", times >= 1, shown)
        if competitor != leanest:
            yield Finding(
                f"{LEAN:g} times those of all competitors but the leanest", times >= LEAN, shown
            )
