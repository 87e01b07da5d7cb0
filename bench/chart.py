"""The common look of the benchmarks' charts: `with chart.saved(path, "Title") as axes:
axes.plot(...)`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE = (8.0, 4.5)
"""Inches."""
DPI = 110


@contextmanager
def saved(path: Path, title: str, *, x: str = "", y: str = "") -> Iterator[Axes]:
    """Axes to draw on, written to `path` (PNG) at the end. `x` and `y` name the axes, with their
    units."""
    from matplotlib.figure import Figure  # 0.8 s, which the tests of benchmarks do without

    # without pyplot, which needs a screen
    figure = Figure(figsize=SIZE, dpi=DPI, layout="constrained")
    axes = figure.subplots()
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    yield axes
    if axes.get_legend_handles_labels()[1] and axes.get_legend() is None:
        axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
