"""The overhead benchmark's points, and the figures of each system at a point."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from bench.bodies import SIZES, Size
from bench.systems import POLICIES

CONNECTIONS = (1, 16, 64)

OURS = tuple(POLICIES)
BARE = "bare relay"
BASELINES = ("direct", "nginx", BARE)


@dataclass(frozen=True)
class Point:
    """One request, and the number of connections that send it."""

    size: Size
    stream: bool
    connections: int

    @property
    def way(self) -> str:
        return "streamed" if self.stream else "plain"

    @property
    def crowd(self) -> str:
        return f"{self.connections} connection{'s' if self.connections > 1 else ''}"

    def __str__(self) -> str:
        return f"{self.size.name}, {self.way}, {self.crowd}"


@dataclass(frozen=True)
class Figures:
    """One system at one point. Times are seconds; `cpu` is processor time per request.

    `share` is the rate divided by the bare relay's in the same turn, because a noisy machine slows
    both.
    """

    rate: float
    p50: float
    p99: float
    first: float
    cpu: float
    share: float = 0.0


Measured = dict[str, Figures | str]
"""By system, `direct` first; a text is the reason for missing figures."""


def median(runs: Sequence[Figures], bare: Sequence[Figures]) -> Figures:
    """The median of each figure on its own; `bare` are the bare relay's in the same turns."""
    shares = [one.rate / beside.rate for one, beside in zip(runs, bare, strict=False)]
    named = [field.name for field in fields(Figures) if field.name != "share"]
    middle = {name: statistics.median(getattr(one, name) for one in runs) for name in named}
    return Figures(**middle, share=statistics.median(shares))


def of(measured: Measured, name: str) -> Figures:
    """The figures of an indispensable system. Raises RuntimeError if it failed."""
    figures = measured[name]
    if isinstance(figures, str):
        raise RuntimeError(f"{name}: {figures}")
    return figures


def competitors(measured: Measured) -> dict[str, Figures]:
    """The figures of all systems but the proxy and the baselines."""
    others = {*BASELINES, *OURS}
    return {
        name: one
        for name, one in measured.items()
        if name not in others and isinstance(one, Figures)
    }


def points(words: Sequence[str] = ()) -> list[Point]:
    """All points, or those with one of the words in the name of size, way or connections."""
    found = [
        Point(size, stream, many)
        for size in SIZES
        for stream in (False, True)
        for many in CONNECTIONS
    ]
    for feature in (
        lambda point: point.size.name,
        lambda point: point.way,
        lambda point: point.crowd,
    ):
        chosen = chosen_of(map(feature, found), words)
        found = [point for point in found if feature(point) in chosen]
    return found


def chosen_of(names: Iterable[str], words: Sequence[str]) -> set[str]:
    """The names that contain one of the words; all of them if none does."""
    every = set(names)
    return {name for name in every if any(word.lower() in name.lower() for word in words)} or every
