"""The `replay` command: says what policies would have done to recorded requests. It reads, and
changes nothing."""

from __future__ import annotations

import asyncio
import os
import sys
import textwrap
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, closing
from dataclasses import replace
from itertools import chain
from pathlib import Path

import msgspec

from proxy.apps.capture import captured
from proxy.apps.offline import opened
from proxy.apps.replay import proof
from proxy.apps.replay.formats import ADDRESSED, HAR
from proxy.apps.replay.recordings import (
    BODY,
    LeftOut,
    Record,
    RecordedRequest,
    Recordings,
    below,
    named,
)
from proxy.apps.replay.report import outline, page, unmoved
from proxy.apps.replay.tally import Tally
from proxy.apps.verify.asking import Purse
from proxy.errors import UserMistake
from proxy.plan.forecast import CAUSES
from proxy.policies import defaults, load, load_alone
from proxy.policy import Profile
from proxy.requests.cache import MessageCache
from proxy.settings import Settings
from proxy.stores import describe, is_part
from proxy.terminal import harmless, percent, several, table
from proxy.threads import WorkPool
from proxy.tokens import Tokens, counter

DEFAULTS = "the defaults"
MOST_MONEY = 1_000_000
HOME = "the home directory"
REASONS = 20
"""Most reasons for leaving out files that are shown."""
ASIDE = 5
"""Most members that are named as left aside."""
NOTES = 100
LONGEST_NAME = 30
"""Most characters of a line of the notes, and of a policy's name in the table."""

_NOTES = (
    "A session is all requests that begin with the same messages. It counts as dearer from one per cent on.",
    "Costs are of the input, in plain input tokens under each policy's prices, as if everything from the request "
    "before were cached, or as billed where a recording has upstream's usage.",
    "Reading back and different replies are not included.",
)


def _report(html: str) -> Path:
    """Return the file for the report. Raises UserMistake if it cannot be one."""
    report = Path(html).resolve()
    named = report.suffix.lower() in (".html", ".htm")
    if not named or not report.parent.is_dir() or report.is_dir():
        raise UserMistake(f"--html {html}: expected a file in a folder, whose name ends in .html")
    return report


def replay(settings: Settings, chosen: Namespace) -> int:
    """Replay the files under each policy, and print what it would have done; to a file as well with
    `--html`.

    Without files it takes the sessions that agents keep in the home directory, or with `--store`
    the captures of a store. `--profile` compares the three profiles. Raises UserMistake and
    StoreFault.
    """
    files = chosen.files
    html = chosen.html
    environment = settings.environment
    policies = [(name, load_alone(Path(name), environment)) for name in chosen.policy or ()]
    if chosen.profile:
        policies += [(one.value, defaults(one)) for one in Profile]
    tallies = [
        Tally(name, policy, html is not None)
        for name, policy in policies or [(DEFAULTS, defaults())]
    ]
    if chosen.store and files:
        raise UserMistake("give files, or --store")
    if chosen.namespace and not chosen.store:
        raise UserMistake("--namespace needs --store: a file has all that it holds")
    report = _report(html) if html else None
    if chosen.verify:
        return _verify(settings, chosen, report)
    if chosen.budget:
        raise UserMistake("--budget is for --verify")

    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        read = _Read(settings, chosen, loop)
        count = _replayed(read.requests, tallies, loop)
    recordings = read.recordings
    sources = read.sources
    left_out = [harmless(line) for line in sentences(recordings.left_out.values())]
    if not count:
        raise UserMistake("\n".join(left_out))
    best = recommended(tallies) if chosen.profile else None
    rows = list(rows_of(count, tallies))
    notes = [harmless(note) for note in (*_NOTES, *notes_of(recordings, tallies[0]))]
    if report:
        _write(report, page(count, sources, tallies, best, rows, notes, _named(recordings)))
    if chosen.json:
        names = [harmless(source) for source in sources]
        found = [{"policy": harmless(tally.name), **tally.figures()} for tally in tallies]
        figures = msgspec.json.encode(
            {"files": names, "requests": count, "left_out": left_out, "policies": found}
        )
        sys.stdout.write(msgspec.json.format(figures).decode() + "\n")
        return 0
    sessions = max(len(tally.sessions) for tally in tallies)
    partly = f", {len(recordings.left_out):,} of them left out or read in part" if left_out else ""
    shown = [
        *(harmless(line) for line in headline(tallies)),
        *([recommendation(best)] if chosen.profile else []),
        "",
        f"{several(count, 'request')}, {several(sessions, 'session')}, {read.described}{partly}",
        "",
        table(rows, right=True),
        *(f"left out: {line}" for line in left_out),
        *([""] if left_out else []),
        textwrap.fill(" ".join(notes), NOTES),
    ]
    sys.stdout.write("".join(f"{line}\n" for line in shown))
    return 0


class _Read:
    """What the command is to read: its `requests`, the names of their `sources`, and what is `said`
    of them."""

    def __init__(
        self, settings: Settings, chosen: Namespace, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.recordings = Recordings()
        if chosen.store:
            self.sources = [describe(settings.store)]
            records = _captures(settings, chosen.namespace, loop)
            self.requests = self.recordings.captured(Path(self.sources[0]), records)
            self.described = f"captures of {harmless(self.sources[0])}"
        else:
            paths = named(chosen.files) if chosen.files else _at_home(settings.environment)
            self.sources = chosen.files or [HOME]
            self.requests = chain.from_iterable(map(self.recordings.requests, paths))
            self.described = several(len(paths), "file")


def _write(report: Path, page: str) -> None:
    """Raises UserMistake if that is not possible."""
    try:
        report.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserMistake(f"--html {report}: cannot be written: {error.strerror}") from error


def _verify(settings: Settings, chosen: Namespace, report: Path | None) -> int:
    """Ask captured requests again, and print what comes of it; to a page as well with `--html`.
    Raises UserMistake and StoreFault."""
    given = chosen.policy or []
    if chosen.profile or len(given) > 1:
        raise UserMistake("--verify takes one --policy, and no --profile")
    if not (chosen.store or chosen.files):
        raise UserMistake(
            "--verify asks captured requests again: give --store, or files of requests"
        )
    budget = _money(chosen.budget) if chosen.budget else None
    environment = settings.environment
    if given:
        policy = load_alone(Path(given[0]), environment)
    else:
        policy = load(None, environment, settings.upstream, settings.built_in).all()[0]
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        read = _Read(settings, chosen, loop)
        draw = proof.Draw(policy)
        if not _replayed(read.requests, [draw], loop):
            raise UserMistake("\n".join(sentences(read.recordings.left_out.values())))
        drawn = draw.order()
        proof.check(drawn, draw, budget)
        made = proof.Proof(policy, environment, Purse(budget or 0.0))
        sys.stderr.write(proof.before(made, draw, drawn))
        proof.run(made, settings, drawn, runner)
    if chosen.json:
        found = msgspec.json.encode(proof.found(made, draw))
        sys.stdout.write(msgspec.json.format(found).decode() + "\n")
    else:
        sys.stdout.write("".join(f"{harmless(line)}\n" for line in proof.lines(made, draw)))
    if report:
        _write(report, proof.page(made, draw, Path(given[0]).name if given else DEFAULTS))
    return 0 if made.asked else 1


def _money(text: str) -> float:
    """Return USD. Raises UserMistake."""
    try:
        money = float(text)
    except ValueError:
        money = -1.0
    if not 0 <= money <= MOST_MONEY:
        raise UserMistake(f"--budget {text}: expected USD, such as 2.00")
    return money


def _named(recordings: Recordings) -> list[str]:
    """Return what is left out, without the folders of files."""
    left = recordings.left_out.items()
    return list(
        sentences(
            replace(one, place=one.place.replace(str(path), path.name, 1)) for path, one in left
        )
    )


def _at_home(environment: Mapping[str, str]) -> list[Path]:
    """Return the sessions that agents keep in the home directory, each agent's oldest first, and
    say which they are. Raises UserMistake if there are none."""
    home = Path(environment.get("HOME") or Path.home())
    set_by_user = environment.get("CLAUDE_CONFIG_DIR")
    claude = [Path(set_by_user)] if set_by_user else [home / ".claude", home / ".config" / "claude"]
    codex = Path(environment.get("CODEX_HOME") or home / ".codex")
    data = Path(environment.get("XDG_DATA_HOME") or home / ".local" / "share")
    agents = {
        "Claude Code": ([one / "projects" for one in claude], "*.jsonl"),
        "Codex": ([codex / "sessions", codex / "archived_sessions"], "rollout-*.jsonl"),
        "opencode": ([data / "opencode"], "opencode.db"),
    }
    found: list[Path] = []
    for name, (folders, files) in agents.items():
        kept = [file for folder in folders if folder.is_dir() for file in below(folder, [files])]
        if ordered := sorted(kept, key=_written):
            place = os.path.commonpath([file.parent for file in ordered])
            sys.stderr.write(f"{name}: {several(len(ordered), 'file')} in {harmless(place)}\n")
            found += ordered
    if not found:
        raise UserMistake(
            "replay: found no sessions of Claude Code, Codex or opencode in the home directory; give a FILE (see "
            "replay --help)"
        )
    sys.stderr.write("They are read here; nothing leaves this machine.\n\n")
    return found


def _written(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:  # a link that leads nowhere
        return 0


def _captures(
    settings: Settings, namespace: str | None, loop: asyncio.AbstractEventLoop
) -> Iterator[Record]:
    """Yield the captures of a store, or those of one namespace, the oldest first. Raises
    UserMistake and StoreFault."""
    if namespace and not is_part(namespace):
        raise UserMistake(
            f"--namespace {namespace!r}: expected a namespace, as `store ls` lists them"
        )
    run = loop.run_until_complete
    held = AsyncExitStack()
    try:
        store = run(held.enter_async_context(opened(settings)))
        for key in run(captured(store, namespace)):
            value = run(store.get(key))
            if value is not None:  # a proxy may delete it meanwhile
                yield Record(key, value)
    finally:
        run(held.aclose())


def _replayed(
    requests: Iterable[RecordedRequest],
    tallies: Sequence[Tally | proof.Draw],
    loop: asyncio.AbstractEventLoop,
) -> int:
    """Give every request to every tally; returns how many there were.

    Requests are read outside of the event loop, and a runner's `run` is not used: both would keep
    Ctrl-C from ending this.
    """
    threads = WorkPool("work")
    count = 0
    shown = sys.stderr.isatty()
    counter()  # once, and not by each thread
    reader = MessageCache(Tokens(), threads)
    with closing(threads):
        for recorded in requests:
            count += 1
            for tally in tallies:
                loop.run_until_complete(tally.add(recorded, reader))
            if shown and count % 100 == 0:
                sys.stderr.write(f"\r{several(count, 'request')} ")
    if shown:
        sys.stderr.write("\r" + 40 * " " + "\r")
    return count


def sentences(left_out: Iterable[LeftOut]) -> Iterator[str]:
    """Yield why files are left out, wholly or in part: a line for each reason."""
    reasons: dict[str, list[LeftOut]] = {}
    for one in left_out:
        reasons.setdefault(one.why, []).append(one)
    for why, (first, *others) in [*reasons.items()][:REASONS]:
        files = f" (and {several(len(others), 'more file')})" if others else ""
        more = first.more + sum(one.more for one in others)
        records = (
            f"; {more:,} more of {'their' if others else 'its'} records cannot be read either"
            if more
            else ""
        )
        yield f"{first.place}{files}: {why}{records}"
    if len(reasons) > REASONS:
        yield f"more files, for {several(len(reasons) - REASONS, 'other reason')}"


def headline(tallies: Sequence[Tally]) -> Iterator[str]:
    """Yield what matters first: of each policy money or tokens, and sessions that are dearer."""
    for tally in tallies:
        name = f"{_tail(tally.name)}: " if len(tallies) > 1 else ""
        yield name + outline(tally)
        if waits := unmoved(tally):
            yield name + waits


def notes_of(recordings: Recordings, tally: Tally) -> Iterator[str]:
    """Yield how recordings were read."""
    if tally.sources.keys() - {BODY, HAR, ADDRESSED}:
        kinds = (f"{name} ({several(number, 'request')})" for name, number in tally.sources.items())
        yield f"Read as: {', '.join(kinds)}."
    if aside := sorted(recordings.aside):
        more = f" and {len(aside) - ASIDE} more" if aside[ASIDE:] else ""
        yield (
            f"Only a log has these members: {', '.join(aside[:ASIDE])}{more}. A client that sends one needs it in the "
            "policy's `upstream.members`."
        )
    if tally.expanded:
        yield (
            f"Whole conversations count as one request for each reply in them ({several(tally.expanded, 'request')})."
        )


def recommended(tallies: Sequence[Tally]) -> Tally | None:
    """Return the cheapest one whose dearer sessions lose at most a tenth of what the others save."""
    fit = [one for one in tallies if one.won > 0 and 10 * one.lost <= one.won]
    return min(fit, key=lambda one: one.cost_after / one.cost_before, default=None)


def recommendation(best: Tally | None) -> str:
    if best is None:
        return "recommended: none, because no profile saves enough on these recordings"
    return (
        f"recommended: {best.name}, the cheapest profile whose dearer sessions lose at most a tenth of what the others "
        "save"
    )


def rows_of(count: int, tallies: Sequence[Tally]) -> Iterator[list[str]]:
    """Yield the table's rows: a title, and a cell for each policy. The first row has the policies'
    names."""

    def row(title: str, cell: Callable[[Tally], str]) -> list[str]:
        return [title, *map(cell, tallies)]

    def share(part: int, whole: int) -> str:
        return percent(part / whole) if whole else "-"

    yield row("", lambda one: _tail(one.name))
    yield row("requests planned", lambda one: f"{one.planned:,} of {count:,}")
    yield row("requests changed", lambda one: f"{one.changed:,} of {one.planned:,}")
    yield row("events", lambda one: f"{one.events:,}")
    for cause in sorted(
        {cause for tally in tallies for cause in tally.causes}, key=list(CAUSES).index
    ):
        yield [f"  {CAUSES[cause]}", *(f"{tally.causes[cause]:,}" for tally in tallies)]
    yield row("tokens as they came", lambda one: f"{one.tokens_before:,}")
    yield row("tokens as planned", lambda one: f"{one.tokens_after:,}")
    yield row("  as a share", lambda one: share(one.tokens_after, one.tokens_before))
    yield row("cost as it came", lambda one: f"{one.cost_before:,}")
    yield row("cost as planned", lambda one: f"{one.cost_after:,}")
    yield row("  as a share", lambda one: share(one.cost_after, one.cost_before))
    yield row("  rests on billing", lambda one: f"{one.billed:,} of {one.planned:,}")
    yield row("sessions that are dearer", lambda one: f"{one.losses:,} of {len(one.sessions):,}")
    yield row("  the worst one", lambda one: "-" if one.worst is None else percent(one.worst))
    yield row("  what they lose", lambda one: share(one.lost, one.cost_before))
    for reason in sorted({reason for tally in tallies for reason in tally.unplanned}):
        yield [f"not planned: {reason}", *(f"{tally.unplanned[reason]:,}" for tally in tallies)]


def _tail(name: str) -> str:
    name = harmless(name)
    return name if len(name) <= LONGEST_NAME else "…" + name[1 - LONGEST_NAME :]
