"""The overhead benchmark's output: a table for each point, two over all of them, and a chart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bench import chart
from bench.figures import BARE, BASELINES, Figures, Measured, Point, of

MARKS = "os^"
COLOURS = ("tab:green", "tab:orange", "tab:red")
"""By size, small to large; markers of streamed requests are hollow."""

Shown = Callable[[Figures, Measured], str]


def table(point: Point, measured: Measured) -> str:
    """Times in milliseconds; a `+` column is the time added to `direct`."""
    added = ["+p50", "+p99", *(["+first byte"] if point.stream else [])]
    heads = ["requests/s", "of bare", "p50", "p99", *added, "CPU"]
    lines = [f"\n{point}", f"{'':24}" + "".join(f"{head:>12}" for head in heads)]
    for name, figures in measured.items():
        lines.append(
            f"{name:24}"
            + (f"  {figures}" if isinstance(figures, str) else _row(point, measured, figures))
        )
    return "\n".join(lines)


def _row(point: Point, measured: Measured, figures: Figures) -> str:
    direct = of(measured, "direct")
    added = [figures.p50 - direct.p50, figures.p99 - direct.p99]
    if point.stream:
        added.append(figures.first - direct.first)
    times = "".join(
        f"{seconds * 1000:12.2f}" for seconds in (figures.p50, figures.p99, *added, figures.cpu)
    )
    return f"{figures.rate:12.0f}{figures.share:12.2f}{times}"


def memory_table(memory: Mapping[str, Sequence[float]]) -> str:
    """Resident megabytes of each system's processes, after one small request and at the end, in
    Markdown.

    0 means that the system has ended.
    """
    lines = ["\n| RSS, MB | before | after |", "|---|---|---|"]
    for name, sizes in memory.items():
        before, after = (f"{size:.0f}" if size else "ended" for size in sizes)
        lines.append(f"| {name} | {before} | {after} |")
    return "\n".join(lines)


def summary(results: Mapping[Point, Measured]) -> str:
    """Two tables in Markdown over all points: a row for each system, a cell for each request."""
    crowds = " / ".join(str(count) for count in sorted({point.connections for point in results}))
    rates = f"requests/s, bare relay = 1, from {crowds} connections"
    times = f"ms added to the median of no proxy, from {crowds} connections"
    return f"\n{_markdown(rates, results, _relative)}\n\n{_markdown(times, results, _added)}"


def _relative(figures: Figures, measured: Measured) -> str:
    return f"{figures.rate:,.0f}/s" if figures is measured[BARE] else f"{figures.share:.2f}"


def _added(figures: Figures, measured: Measured) -> str:
    milliseconds = (figures.p50 - of(measured, "direct").p50) * 1000
    return f"{milliseconds:.0f}" if milliseconds >= 9.95 else f"{milliseconds:.1f}"


def _markdown(title: str, results: Mapping[Point, Measured], shown: Shown) -> str:
    requests = list(dict.fromkeys((point.size, point.way) for point in results))
    lines = [f"| {title} | " + " | ".join(f"{size.name} {way}" for size, way in requests) + " |"]
    lines.append("|---" * (len(requests) + 1) + "|")
    for name in next(iter(results.values())):
        cells = [
            [
                _cell(measured, name, shown)
                for point, measured in results.items()
                if (point.size, point.way) == request
            ]
            for request in requests
        ]
        lines.append(f"| {name} | " + " | ".join(" / ".join(cell) for cell in cells) + " |")
    return "\n".join(lines)


def _cell(measured: Measured, name: str, shown: Shown) -> str:
    figures = measured[name]
    return "-" if isinstance(figures, str) else shown(figures, measured)


def draw(path: Path, results: Mapping[Point, Measured]) -> None:
    """Draw requests/s relative to the bare relay, at the middle one of the measured numbers of
    connections."""
    counts = sorted({point.connections for point in results})
    middle = [point for point in results if point.connections == counts[len(counts) // 2]]
    names = [name for name in results[middle[0]] if name not in BASELINES][::-1]
    sizes = list(dict.fromkeys(point.size for point in middle))
    with chart.saved(
        path, f"Requests/s beside a bare relay's ({middle[0].crowd}, one worker)"
    ) as axes:
        for point in middle:
            shares = {
                name: one.share
                for name in names
                if isinstance(one := results[point][name], Figures)
            }
            place = sizes.index(point.size)
            axes.plot(
                list(shares.values()),
                [names.index(name) for name in shares],
                MARKS[place],
                color=COLOURS[place],
                fillstyle="none" if point.stream else "full",
                label=f"{point.size.name}, {point.way}",
            )
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.axvline(1, color="black", linewidth=0.8)
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(-0.5, len(names) + 1)
        axes.legend(ncols=len(sizes), loc="upper center", frameon=False)
