"""The replay's report as a page that a person passes on.

It holds figures and names of models and files, and nothing of what the sessions say.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import accumulate
from pathlib import Path

from proxy.apps.replay.tally import Course, SessionKey, Tally
from proxy.apps.report import (
    Column,
    Html,
    Line,
    card,
    chart,
    document,
    element,
    judged,
    more,
    pair,
    table,
    tiles,
)
from proxy.terminal import change, in_money, in_short, percent, several

SEEN = 6
SESSIONS = 200
"""Sessions of a policy that are seen at once, and in the report at most: those that cost most."""
FILES = 3
"""Most files that are named."""
DAY = 86_400
"""Seconds from which on a chart has dates and not times of the day."""

_SESSION = (
    Column("Session", "", 1),
    Column("Requests", "number"),
    Column("Tokens: came, planned", "bars-cell", 2),
    Column("Cost: came, planned", "number", 2),
    Column("Change", "number", 1),
)


def outline(tally: Tally) -> str:
    """Say what a policy would have done: money, or tokens where no price is known, and how its
    sessions fare."""
    if not tally.planned:
        return "no request is planned; the table says why"
    if tally.priced:
        partly = tally.priced < tally.planned
        of = f" for {tally.priced:,} of {tally.planned:,} requests" if partly else ""
        figures = f"{_cost(tally)}{of}, {change(tally.money_before, tally.money_after)}"
    else:
        less = change(tally.tokens_before, tally.tokens_after)
        figures = f"{_tokens(tally)} tokens, {less}"
    worst = "" if tally.worst is None else f", the worst at {percent(tally.worst)}"
    sessions = several(len(tally.sessions), "session")
    return f"{figures}; {tally.losses:,} of {sessions} dearer{worst}"


def unmoved(tally: Tally) -> str:
    """Say why nothing moves; "" if something does."""
    if tally.changed or not tally.planned:
        return ""
    added = tally.tokens_after > tally.tokens_before
    more_tokens = ", and the proxy's tools add tokens" if added else ""
    waits = tally.quiet[1].removeprefix("waiting: ")
    return f"nothing moves{more_tokens}. In the largest request, {waits}"


def page(
    count: int,
    sources: Sequence[str],
    tallies: Sequence[Tally],
    best: Tally | None,
    rows: Sequence[Sequence[str]],
    notes: Iterable[str],
    not_counted: Sequence[str],
) -> str:
    """Return the report on so many requests of these sources. `best` is the policy that is shown in
    full, by default the first one; `rows` are the table, whose first row has the policies' names.
    `not_counted` says which parts of the sources are not in the figures, and why."""
    main = best or next((one for one in tallies if one.planned), tallies[0])
    named = _names(tallies)
    files = [_base(source) for source in sources]
    more_files = f" and {len(files) - FILES} more" if files[FILES:] else ""
    about = [several(count, "request"), several(len(main.sessions), "session"), _period(main)]
    about += [f"recorded in {', '.join(files[:FILES])}{more_files}", f"policy: {named[main.name]}"]
    body = [
        element("p", outline(main), class_="headline"),
        *([element("p", f"Here {still}.")] if (still := unmoved(main)) else []),
        element("p", "; ".join(filter(None, about)), class_="faint"),
        *_policy(main, ""),
    ]
    if len(tallies) > 1:
        compared = [[named[one.name], outline(one)] for one in tallies]
        columns = [Column("Policy", "", 1), Column("What it would have done", "wide", 2)]
        body.append(card("All policies", table("All policies", columns, compared)))
    others = [one for one in tallies if one is not main and one.planned]
    body += [more(f"With {named[one.name]}", *_policy(one, named[one.name])) for one in others]
    head = ["", *(named[one.name] for one in tallies)]
    columns = [Column(title, "number" if place else "", 1) for place, title in enumerate(head)]
    body.append(more("Every figure", table("Every figure of the replay", columns, rows[1:])))
    body.append(element("h2", "How this was counted"))
    body.append(element("ul", *(element("li", note) for note in notes), class_="faint"))
    if not_counted:
        parts = element("ul", *(element("li", part) for part in not_counted))
        body.append(more(f"Not in these figures: {several(len(not_counted), 'part')}", parts))
    return document("What the proxy would have saved", body)


def _names(tallies: Sequence[Tally]) -> dict[str, str]:
    """Return what the report calls policies: files without their folders."""
    bases = [Path(one.name).name for one in tallies]
    return {
        one.name: base if bases.count(base) == 1 else f"{base} ({place})"
        for place, (one, base) in enumerate(zip(tallies, bases, strict=True), 1)
    }


def _base(source: str) -> str:
    """Return the name of a file or a store without its folder, host and password."""
    if source == "-":
        return "standard input"
    return Path(source).resolve().name if "://" not in source else source.partition("://")[0]


def _policy(tally: Tally, name: str) -> Iterator[Html]:
    """Yield what a policy would have done. `name` tells its tables from another's."""
    if not tally.planned:
        yield element("p", "This policy plans none of these requests; the table says why.")
        return
    of = f" with {name}" if name else ""
    yield tiles(*_tiles(tally))
    yield card("Cost over time", _chart(tally))
    numbered = enumerate(tally.sessions.items(), 1)
    costly = sorted(numbered, key=lambda one: -max(one[1][1].cost_before, one[1][1].cost_after))
    most = max(one.tokens_before for one in tally.sessions.values())
    rows = [_row(number, key, course, most) for number, (key, course) in costly[:SESSIONS]]
    yield card(
        "Sessions", table(f"The sessions that cost most come first{of}", _SESSION, rows[:SEEN])
    )
    if rows[SEEN:]:
        omitted = (
            f"; {len(costly) - SESSIONS:,} cost less and are left out" if costly[SESSIONS:] else ""
        )
        said = f"{several(len(rows) - SEEN, 'more session')}{omitted}"
        yield more(said, table(f"More sessions{of}", _SESSION, rows[SEEN:]))
    told = [
        (_title(number, one), one.decisions)
        for number, (_, one) in costly[:SESSIONS]
        if one.decisions
    ]
    if told:
        yield more("The plan in words", *(_words(title, words) for title, words in told))


def _words(title: str, told: Sequence[tuple[int, str]]) -> Html:
    items = (element("li", words, value=str(request + 1)) for request, words in told)
    return more(title, element("ol", *items, class_="events"))


def _tiles(tally: Tally) -> Iterator[Sequence[str]]:
    tokens = tally.tokens_before, tally.tokens_after
    if tally.priced:
        money = tally.money_before, tally.money_after
        yield "Cost of the input", judged(*money, change(*money)), _cost(tally)
        yield "Tokens sent", change(*tokens), _tokens(tally)
    else:
        yield "Tokens sent", judged(*tokens, change(*tokens)), _tokens(tally)
    known = f"of {several(len(tally.sessions), 'session')}"
    worst = "" if tally.worst is None else f"the worst at {percent(tally.worst)} of its cost"
    lost = f"{percent(tally.lost / tally.cost_before)} of all cost" if tally.losses else ""
    yield "Sessions that cost more", f"{tally.losses:,}", known, worst, lost
    largest = f"{in_short(tally.largest_before)} tokens as it came"
    yield "Largest prompt", f"{in_short(tally.largest_after)} tokens", largest


def _row(number: int, key: SessionKey, course: Course, most: int) -> list[str]:
    about = element("span", f"{key.model} ({key.api})", class_="faint under")
    return [
        element("span", _title(number, course), about),
        f"{course.planned:,}",
        pair(course.tokens_before, course.tokens_after, most),
        _cost(course),
        judged(
            course.cost_before, course.cost_after, change(course.cost_before, course.cost_after)
        ),
    ]


def _title(number: int, course: Course) -> str:
    """Return when a session began, or which one it is, and the name of its file."""
    when = f"{datetime.fromtimestamp(course.began, UTC):%Y-%m-%d %H:%M}" if course.began else ""
    return ", ".join(filter(None, (when or f"session {number}", Path(course.file).stem)))


def _cost(sums: Tally | Course) -> str:
    if sums.priced:
        return f"{in_money(sums.money_before)} → {in_money(sums.money_after)}"
    return f"{in_short(sums.cost_before)} → {in_short(sums.cost_after)}"


def _tokens(sums: Tally | Course) -> str:
    return f"{in_short(sums.tokens_before)} → {in_short(sums.tokens_after)}"


def _period(tally: Tally) -> str:
    """Return from when to when requests were asked, "" if that is not known of all."""
    times = [one.time for one in tally.spent]
    if not times or not all(times):
        return ""
    first, last = (
        f"{datetime.fromtimestamp(one, UTC):%Y-%m-%d %H:%M}" for one in (min(times), max(times))
    )
    return f"from {first} to {last} UTC"


def _chart(tally: Tally) -> Html:
    """Return the sums of costs so far: in USD if the price of every request is known."""
    spent = tally.spent
    dated = bool(_period(tally))
    if dated:
        spent = sorted(spent, key=lambda one: one.time)
    in_usd = tally.priced == tally.planned
    before = list(
        accumulate(one.before * ((one.price or 0) / 1e6 if in_usd else 1) for one in spent)
    )
    after = list(accumulate(one.after * ((one.price or 0) / 1e6 if in_usd else 1) for one in spent))
    days = dated and spent[-1].time - spent[0].time >= DAY

    def label(at: int) -> str:
        if not dated:
            return f"request {at + 1:,}"
        return f"{datetime.fromtimestamp(spent[at].time, UTC):{'%Y-%m-%d' if days else '%H:%M'}}"

    show = in_money if in_usd else in_short
    unit = "USD" if in_usd else "plain input tokens"
    when = f", {_period(tally)}" if dated else ""
    lines = Line("as it came", "came", before), Line("as planned", "sent", after)
    return chart(
        f"Cost of the input so far, in {unit}, request by request{when}.", show, lines, label
    )
