"""Pages that people pass on: one HTML file without scripts, in the looks of the dashboard.

What they show may come from strangers. So all text is text, also where it looks like HTML, and the
page's own policy allows nothing but its style.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from functools import cache
from hashlib import sha256
from html import escape
from importlib.resources import files
from math import ceil, floor, log10
from typing import NamedTuple

from proxy import __version__
from proxy.plan.prices import DEARER
from proxy.terminal import harmless, in_short

POINTS = 600
"""Most points of one line in a chart."""
WIDTH = 1_000
HEIGHT = 240
TOP = 18
BOTTOM = 28
"""Of a chart's inside, in its own units, and the room above and below it in pixels."""
MARKS = 3
"""Most labels below a chart: as many as a phone has room for."""

_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; base-uri 'none'; form-action 'none'; \
style-src 'sha256-{hash}'">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<header><span class="brand">{icon}Offload Proxy</span></header>
<main>
{body}
</main>
<footer><p>{made}</p></footer>
</body>
</html>
"""


class Html(str):
    """Text that is HTML already."""


def text(value: str) -> Html:
    if isinstance(value, Html):
        return value
    return Html(escape(harmless(value)).replace(" %", "&nbsp;%"))  # on one line


def element(tag: str, *children: str, **attributes: str) -> Html:
    """Return an element. In names of attributes `_` stands for `-`, and goes at the end; empty ones
    are left out."""
    said = "".join(
        f' {name.strip("_").replace("_", "-")}="{escape(harmless(value))}"'
        for name, value in attributes.items()
        if value
    )
    return Html(f"<{tag}{said}>{''.join(map(text, children))}</{tag}>")


def document(title: str, body: Iterable[str]) -> str:
    """Return a whole page: a heading of this title, and then the body."""
    style = _static("dashboard.css")
    parts = [element("h1", title), *map(text, body)]
    return _PAGE.format(
        title=escape(title),
        hash=b64encode(sha256(style.encode()).digest()).decode(),
        style=style,
        icon=_static("icon.svg").replace("<svg", '<svg width="22" height="22" aria-hidden="true"'),
        body="\n".join(parts),
        made=f"Made {datetime.now(UTC):%Y-%m-%d %H:%M} UTC by offload-proxy {__version__}",
    )


@cache
def _static(name: str) -> str:
    """Return a file of the dashboard's."""
    return (files("proxy.apps.dashboard") / "static" / name).read_text(encoding="utf-8").strip()


# -- pieces ----------------------------------------------------------------------------------------


def judged(before: float, after: float, said: str) -> Html:
    """Return what was said of a change: green where it became less, red where it became more by a
    per cent."""
    kind = "bad" if after > before * DEARER else "good" if after < before else ""
    return element("span", said, class_=kind)


def tiles(*shown: Sequence[str]) -> Html:
    """Return figures side by side: a title, the figure, and notes."""

    def tile(title: str, figure: str, *notes: str) -> Html:
        faint = [element("div", note, class_="faint") for note in notes if note]
        said = element("dd", element("div", figure, class_="figure"), *faint)
        return element("div", element("dt", title), said)

    return element("dl", *(tile(*one) for one in shown), class_="tiles even")


def card(heading: str, *children: str) -> Html:
    return element("section", element("h2", heading), *children, class_="card")


def more(summary: str, *children: str) -> Html:
    """Return what is shown to those who ask for it."""
    return element("details", element("summary", summary), *children)


def pair(came: float, sent: float, most: float) -> Html:
    """Return what came and what was sent as a pair of bars. A bar of `most` takes the whole width."""

    def bar(kind: str, y: int, value: float) -> Html:
        width = max(100 * value / most, 1) if most and value else 0
        return element("rect", class_=f"fill-{kind}", y=str(y), width=f"{width:.1f}%", height="6")

    bars = bar("came", 0, came), bar("lost" if sent > came else "sent", 8, sent)
    drawn = element("svg", *bars, class_="bars", width="100%", height="14", aria_hidden="true")
    said = element("span", f"{in_short(came)} → {in_short(sent)}", class_="figures")
    return element("span", drawn, said, class_="pair")


class Column(NamedTuple):
    """A column of a table: its heading, its kind (`number`, `bars-cell`, `wide`), and on which of a
    row's two lines it stands on a phone (0: on none)."""

    heading: str
    kind: str = ""
    phone: int = 0


def table(caption: str, columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> Html:
    def cell(column: Column, value: str) -> Html:
        place = f"line{column.phone}" if column.phone else "wide-only"
        kinds = " ".join(filter(None, (column.kind, place)))
        return element("td", value, class_=kinds, data_label=column.heading)

    heads = (
        element("th", one.heading, scope="col", class_=one.kind) if one.heading else element("td")
        for one in columns
    )
    lines = (element("tr", *map(cell, columns, row)) for row in rows)
    made = element(
        "table",
        element("caption", caption),
        element("thead", element("tr", *heads)),
        element("tbody", *lines),
        class_="rows",
    )
    return element("div", made, class_="scroll", tabindex="0", role="region", aria_label=caption)


class Line(NamedTuple):
    """A line of a chart: its name in the legend, its colour (`came` or `sent`), and its values."""

    name: str
    kind: str
    values: Sequence[float]


def chart(
    said: str, show: Callable[[float], str], lines: Sequence[Line], label: Callable[[int], str]
) -> Html:
    """Return lines from zero on, filled below. `show` writes a value with its unit, and `label`
    what stands below the value with this index; `said` says all that in words."""
    count = len(lines[0].values)
    places = sorted({*range(0, count, max(ceil(count / POINTS), 1)), count - 1})
    marks = _ticks(max(max(line.values) for line in lines))
    top = marks[-1]
    wide = WIDTH / max(count - 1, 1)

    def y(value: float) -> float:
        return HEIGHT * (1 - value / top)

    areas = []
    for line in lines:
        points = " ".join(f"{wide * at:.1f},{y(line.values[at]):.1f}" for at in places)
        area = f"M0,{HEIGHT} L{points} L{WIDTH},{HEIGHT} Z"
        areas.append(element("path", class_=f"fill-{line.kind}", d=area))
    inside = element(
        "svg",
        *areas,
        y=str(TOP),
        width="100%",
        height=str(HEIGHT),
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        preserveAspectRatio="none",
    )
    grid = []
    ticks = []
    for mark in marks:
        height = f"{TOP + y(mark):.1f}"
        grid.append(element("line", class_="grid", x2="100%", y1=height, y2=height))
        ticks.append(_tick("-8", f"{TOP + y(mark) + 4:.1f}", show(mark), "end"))
    for place, at in enumerate(shown := _shown(count, label)):
        anchor = "start" if not place else "end" if place == len(shown) - 1 else "middle"
        x = f"{100 * at / max(count - 1, 1):.1f}%"
        ticks.append(_tick(x, str(TOP + HEIGHT + 18), label(at), anchor))
    drawn = element(
        "svg",
        inside,
        *grid,
        *ticks,
        class_="graph",
        height=str(TOP + HEIGHT + BOTTOM),
        role="img",
        aria_label=said,
    )
    named = (
        element(
            "li",
            element("span", class_=f"swatch fill-{line.kind}", aria_hidden="true"),
            f"{line.name}: {show(line.values[-1])}",
        )
        for line in lines
    )
    return element(
        "div", element("p", said, class_="faint"), drawn, element("ul", *named, class_="legend"),
        class_="chart",
    )  # fmt: skip


def _tick(x: str, y: str, said: str, anchor: str) -> Html:
    return element("text", said, class_="tick", x=x, y=y, text_anchor=anchor)


def _shown(count: int, label: Callable[[int], str]) -> list[int]:
    """Return the indexes whose labels are shown: spread evenly, and none that says the same as the
    one before."""
    spread = sorted({round(place * (count - 1) / (MARKS - 1)) for place in range(MARKS)})
    return [
        at for place, at in enumerate(spread) if not place or label(at) != label(spread[place - 1])
    ]


def _ticks(most: float) -> list[float]:
    """Return round numbers from 0 to the largest value, about five."""
    if most <= 0:
        return [0.0, 1.0]
    rough = most / 5
    unit = 10.0 ** floor(log10(rough))
    step = next(one * unit for one in (1, 2, 2.5, 5, 10) if one * unit >= rough)
    return [step * place for place in range(ceil(most / step) + 1)]
