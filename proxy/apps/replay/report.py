"""The replay's report as one HTML file without scripts: what matters, the table, costs over time,
and the sessions.

It holds figures and names of models and files, and nothing of what the sessions say. Names come
from strangers: they are text, and the page's own policy allows nothing but its style.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from html import escape

from proxy import __version__
from proxy.apps.replay.tally import Tally
from proxy.terminal import harmless

POINTS = 600
"""Most points of one line in a chart."""
SESSIONS = 200
"""Most sessions of a policy in the report: those that cost most."""
WIDTH = 900
HEIGHT = 220
"""Of a chart, in its own units."""

_STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { margin: 0; }
main { max-width: 72rem; margin: 0 auto; padding: 1rem; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: 1rem 0; }
caption { text-align: left; font-weight: bold; }
th, td { padding: 0.2rem 0.8rem; text-align: left; border-bottom: 1px solid #8886; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
svg { width: 100%; height: auto; border-bottom: 1px solid; }
polyline { fill: none; stroke: #777; stroke-width: 3; }
.after { stroke: #1a7f52; }
"""

_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; base-uri 'none'; form-action 'none'; \
style-src 'sha256-{hash}'">
<title>Replay: what the plan would have done</title>
<style>{style}</style>
</head>
<body>
<main>
<h1>What the plan would have done</h1>
<p>{made}</p>
{body}
</main>
</body>
</html>
"""


def page(
    names: Sequence[str],
    headline: Iterable[str],
    rows: Sequence[Sequence[str]],
    tallies: Sequence[Tally],
    notes: Iterable[str],
) -> str:
    """Return the report. `names` are the files, and `rows` the table, whose first row has the
    policies' names."""
    head, *figures = rows
    body = [f"<p><strong>{escape(line)}</strong></p>" for line in headline if line]
    body += [
        *_table("Every figure of the replay", head, figures),
        *(f"<p>{escape(note)}</p>" for note in notes),
    ]
    for name, tally in zip(head[1:], tallies, strict=True):
        body += [f"<h2>{escape(name)}</h2>", *_policy(tally)]
    made = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, offload-proxy {__version__}. Recordings: {', '.join(names)}"
    style_hash = b64encode(sha256(_STYLE.encode()).digest()).decode()
    return _PAGE.format(hash=style_hash, style=_STYLE, made=escape(made), body="\n".join(body))


def _table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield a table whose first column has titles, and the others numbers."""
    yield f'<div class="scroll"><table><caption>{escape(caption)}</caption><thead><tr>'
    title, *cells = head
    yield f'<th scope="col">{escape(title)}</th>' if title else "<td></td>"
    yield "".join(f'<th scope="col" class="number">{escape(cell)}</th>' for cell in cells)
    yield "</tr></thead><tbody>"
    for title, *cells in rows:
        numbers = "".join(f'<td class="number">{escape(cell)}</td>' for cell in cells)
        yield f'<tr><th scope="row">{escape(title)}</th>{numbers}</tr>'
    yield "</tbody></table></div>"


def _policy(tally: Tally) -> Iterator[str]:
    if not tally.planned:
        yield "<p>This policy plans none of these requests; the table says why.</p>"
        return
    yield from _chart(tally.total)
    numbered = enumerate(tally.sessions.items(), 1)
    costly = sorted(numbered, key=lambda one: max(one[1][1].before, one[1][1].after), reverse=True)
    omitted = f"; {len(costly) - SESSIONS:,} more are left out" if len(costly) > SESSIONS else ""
    head = ("Session", "Requests", "Events", "Cost as it came", "Cost as planned", "As a share")
    rows = []
    details = []
    for number, (session, course) in costly[:SESSIONS]:
        name = f"{number}: {harmless(session.model)} ({session.api})"
        share = f"{course.after / course.before:.2f}" if course.before else "-"
        numbers = (course.requests, course.events, course.before, course.after)
        rows.append([name, *(f"{figure:,}" for figure in numbers), share])
        if course.told:
            details.append(f"<details><summary>{escape(name)}: the plan in words</summary><ol>")
            details += [
                f'<li value="{request + 1}">{escape(words)}</li>' for request, words in course.told
            ]
            details.append("</ol></details>")
    yield from _table(f"The sessions that cost most come first{omitted}", head, rows)
    yield from details


def _chart(total: Sequence[tuple[int, int]]) -> Iterator[str]:
    """Yield both lines of the sums of costs, from zero, and what they show as text."""
    every = -(-len(total) // POINTS)
    points = [*total[:-1:every], total[-1]]
    (before, after), most = total[-1], max(*total[-1], 1)
    said = f"Cost of the input so far, in plain input tokens: {before:,} as it came, and {after:,} as planned (green)."
    yield f'<p>{said}</p>\n<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{said}">'
    for place, kind in enumerate(("before", "after")):
        line = " ".join(
            f"{WIDTH * at / max(len(points) - 1, 1):.1f},{HEIGHT - HEIGHT * point[place] / most:.1f}"
            for at, point in enumerate(points)
        )
        yield f'<polyline class="{kind}" points="{line}"/>'
    yield "</svg>"
