"""The replay's report as one HTML file that needs no network: its table, its charts, and the sessions.

It holds figures and names of models and files, and nothing of what the sessions say. Names come from strangers: they
are text in the table and in a block of JSON, never markup, and the page's own policy allows no script but ours.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from functools import cache
from hashlib import sha256
from html import escape
from importlib.resources import files
from typing import Any

import msgspec

from proxy import __version__
from proxy.cli.tally import KINDS, Course, SessionKey, Tally

POINTS = 600
"""Most points of one line in a chart."""

SESSIONS = 200
"""Most sessions of a policy in the report: those that cost most."""

_SHEETS = ("dashboard.css", "report.css")
_MODULES = ("common.js", "charts.js", "report.js")
"""The scripts of the report, each of which imports only from those before it. All but the last are the dashboard's."""

_IMPORT = re.compile(r"^import [^;]*;\n|^export ", re.MULTILINE)

_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; base-uri 'none'; form-action 'none'; \
style-src {style_hash}; script-src {script_hashes}">
<title>Replay: what the plan would have done</title>
<style>{style}</style>
</head>
<body>
<main>
<h1>What the plan would have done</h1>
<p class="faint">{about}</p>
<div class="scroll"><table><caption>Every figure of the replay</caption>
<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>
<p class="faint">{notes}</p>
<div id="report"><noscript><p>The charts need JavaScript, which is part of this file.</p></noscript></div>
</main>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def page(names: Sequence[str], rows: Sequence[Sequence[str]], tallies: Sequence[Tally], notes: str) -> str:
    """Return the report. `names` are the files, and `rows` the table, whose first row has the policies' names."""
    (_, *policies), *figures = rows
    style, script = _assets()
    data = {"kinds": KINDS, "policies": [_policy(name, tally) for name, tally in zip(policies, tallies, strict=True)]}
    made = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, offload-proxy {__version__}. Recordings: {', '.join(names)}"
    return _PAGE.format(
        style_hash=_hash(style),
        script_hashes=_hash(script),
        style=style,
        about=escape(made),
        head=_cells("th", ["", *policies]),
        body="".join(f"<tr>{_cells('td', row)}</tr>" for row in figures),
        notes=escape(notes),
        data=_inert(data),
        script=script,
    )


def _cells(tag: str, row: Sequence[str]) -> str:
    title, *cells = row
    part = ' class="part"' if title.startswith(" ") else ""
    heading = f'<th scope="row"{part}>{escape(title)}</th>' if tag == "td" else "<td></td>"
    scope = ' scope="col"' if tag == "th" else ""
    return heading + "".join(f'<{tag}{scope} class="number">{escape(cell)}</{tag}>' for cell in cells)


@cache
def _assets() -> tuple[str, str]:
    """Return the style sheet and the script."""
    static = files("proxy.dashboard") / "static"

    def text(name: str) -> str:
        return static.joinpath(name).read_text(encoding="utf-8")

    modules = (_IMPORT.sub("", text(name)) for name in _MODULES)
    script = f'"use strict";\n(() => {{\n{"".join(modules)}\n}})();'
    return "".join(map(text, _SHEETS)), script


def _hash(text: str) -> str:
    """Return the source expression that allows this inline text (CSP 3, 2.3.1)."""
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


def _inert(data: object) -> str:
    """Return JSON that HTML cannot take for markup."""
    text = msgspec.json.encode(data).decode()
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _policy(name: str, tally: Tally) -> dict[str, Any]:
    every = _step(tally.total)
    sums = [*tally.total[:-1:every], *tally.total[-1:]]
    return {
        "name": name,
        "every": every,
        "before": [before for before, _ in sums],
        "after": [after for _, after in sums],
        "planned": tally.planned,
        "sessions": list(_sessions(tally)),
        "omitted": max(len(tally.sessions) - SESSIONS, 0),
    }


def _step(points: Sequence[object]) -> int:
    """Every which point a chart shows."""
    return -(-len(points) // POINTS) or 1


def _sessions(tally: Tally) -> Iterator[dict[str, Any]]:
    """Yield the sessions that cost most, each numbered by when it began."""
    numbered = enumerate(tally.sessions.items(), 1)
    costly = sorted(numbered, key=lambda one: max(one[1][1].before, one[1][1].after), reverse=True)
    for number, (session, course) in costly[:SESSIONS]:
        yield _session(number, session, course)


def _session(number: int, session: SessionKey, course: Course) -> dict[str, Any]:
    every = _step(course.points or ())
    points = (course.points or [])[::every]
    return {
        "number": number,
        "api": session.api,
        "model": session.model.encode("utf-8", "replace").decode(),
        "requests": course.requests,
        "before": course.before,
        "after": course.after,
        "events": len(course.events),
        "every": every,
        "told": course.told,
        "marks": sorted({event // every for event in course.events}),
        "came": [point.came for point in points],
        "kinds": [[point.kinds[place] for point in points] for place in range(len(KINDS))],
        "costs": [[point.before for point in points], [point.after for point in points]],
    }
