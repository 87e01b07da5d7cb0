"""The `replay` command: says what policies would have done to recorded requests. It reads, and changes nothing."""

from __future__ import annotations

import asyncio
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from proxy.cli.progress import Progress, columns
from proxy.cli.recordings import RecordedRequest, named, requests
from proxy.core.forecast import Billed
from proxy.core.history import Unplannable
from proxy.core.plan import Role
from proxy.core.policy import Mode, Policy
from proxy.core.reasons import Reason
from proxy.policies import load_alone
from proxy.requests import prepare
from proxy.requests.attempt import foreseen
from proxy.requests.message_cache import MessageCache
from proxy.requests.prepare import PlannedRequest
from proxy.threads import Threads
from proxy.tokens import Tokens

DEFAULTS = "the defaults"
NOTES, LONGEST_NAME = 100, 30
"""Most characters of a line of the notes, and of a policy's name in the table."""

_NOTES = (
    "A session is all requests that begin with the same messages. Costs are of the input, in plain input tokens under "
    "each policy's prices, as if everything from the request before were cached, or as billed where a recording has "
    "upstream's usage. Reading back and different replies are not included."
)

Session = tuple[str, str, bytes]


@dataclass
class Tally:
    """What one policy would have done. Sums are over the requests that it plans."""

    name: str
    policy: Policy
    planned: int = 0
    billed: int = 0
    """Planned requests whose cost rests on upstream's numbers."""
    changed: int = 0
    """Planned requests that would have differed from what was sent."""
    events: int = 0
    tokens_before: int = 0
    tokens_after: int = 0
    cost_before: int = 0
    cost_after: int = 0
    unplanned: Counter[str] = field(default_factory=Counter)
    sessions: dict[Session, tuple[int, int]] = field(default_factory=dict)
    """The costs of each session, as it came and as planned."""

    async def add(self, recorded: RecordedRequest, reader: MessageCache) -> None:
        """Plan one request and count what comes of it."""
        planned, reason = await self._plan(recorded, reader)
        if planned is None:
            self.unplanned[reason] += 1
            return
        said = recorded.said
        billed = Billed(said.prompt, said.cached) if said is not None and said.cached is not None else None
        seen = foreseen(planned, billed)
        events, session = planned.plan.events, _session(planned)
        self.planned += 1
        self.billed += billed is not None
        self.changed += bool(seen.compacted or seen.compressed)
        self.events += bool(events) and events[-1].point == len(planned.past.items)
        self.tokens_before += planned.tokens
        self.tokens_after += seen.tokens
        self.cost_before += seen.before
        self.cost_after += seen.after
        before, after = self.sessions.get(session, (0, 0))
        self.sessions[session] = before + seen.before, after + seen.after

    async def _plan(self, recorded: RecordedRequest, reader: MessageCache) -> tuple[PlannedRequest | None, str]:
        """Return the plan, or why there is none."""
        dialect, chat = recorded.dialect, recorded.chat
        if dialect is None or chat is None:
            return None, recorded.reason or "other API"
        policy = self.policy.for_model(chat.model).planning
        if policy.offload.mode is Mode.OFF:
            return None, Reason.OFF
        try:
            planned = await prepare.plan(dialect, chat, policy, policy.upstream.context_window, reader)
        except Unplannable as error:
            return None, error.reason
        return planned, f"{Reason.FIELD} {chat.obstacle}"

    @property
    def losses(self) -> int:
        """Sessions that would have cost more."""
        return sum(after > before for before, after in self.sessions.values())

    @property
    def worst(self) -> float | None:
        """The cost of the session that fares worst, as a share of its cost as it came."""
        return max((after / before for before, after in self.sessions.values() if before), default=None)

    def summary(self) -> dict[str, object]:
        """Return everything as JSON has it."""
        names = ("planned", "billed", "changed", "events", "tokens_before", "tokens_after", "cost_before", "cost_after")
        figures = {name: getattr(self, name) for name in names}
        rest = {"sessions": len(self.sessions), "sessions_costing_more": self.losses, "worst_session": self.worst}
        return {"policy": printable(self.name), **figures, **rest, "unplanned": dict(self.unplanned)}


def run(
    files: Sequence[str],
    policies: Sequence[str],
    environment: Mapping[str, str],
    *,
    api: str | None = None,
    as_json: bool = False,
) -> None:
    """Replay the files under each policy, and print what it would have done. Raises UserMistake."""
    tallies = [Tally(name, load_alone(Path(name), environment)) for name in policies] or [Tally(DEFAULTS, Policy())]
    paths = named(files)
    with Progress(sys.stderr) as progress:
        count = replayed(paths, tallies, progress, api)
    if as_json:
        report: dict[str, object] = {"files": list(map(printable, files)), "requests": count}
        report["policies"] = [tally.summary() for tally in tallies]
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(report)).decode() + "\n")
    else:
        width = columns(sys.stdout)
        sys.stdout.write("".join(f"{line}\n" for line in table(count, len(paths), tallies, width)))
        sys.stdout.write(f"\n{textwrap.fill(_NOTES, min(width or NOTES, NOTES))}\n")


def replayed(files: Sequence[Path], tallies: Sequence[Tally], progress: Progress, api: str | None = None) -> int:
    """Give every request of the files to every tally; returns how many there were. Raises UserMistake.

    Files are read outside of the event loop, and its `run` is not used: both would keep Ctrl-C from ending this.
    """
    threads, count = Threads(), 0
    reader = MessageCache(Tokens(), threads.reading, threads.large)
    with closing(threads), asyncio.Runner() as runner:
        loop = runner.get_loop()
        for number, path in enumerate(files):
            for recorded in requests(path, api):
                count += 1
                for tally in tallies:
                    loop.run_until_complete(tally.add(recorded, reader))
                at = recorded.position
                progress.show(None if at is None else (number + at) / len(files), count)
    return count


def table(count: int, files: int, tallies: Sequence[Tally], width: int | None = None) -> Iterator[str]:
    """Yield the lines of the table, with a column for each policy.

    Columns that do not fit beside each other in `width` characters follow in a table of their own.
    """
    sessions = max(len(tally.sessions) for tally in tallies)
    yield f"{_several(count, 'request')}, {_several(sessions, 'session')}, {_several(files, 'file')}"
    rows = list(rows_of(count, tallies))
    titles, *cells = ([*column] for column in zip(*rows, strict=True))
    while cells:
        shown, taken = [titles], len(max(titles, key=len))
        while cells and (len(shown) == 1 or width is None or taken + _wide(cells[0]) <= width):
            taken += _wide(cells[0])
            shown.append(cells.pop(0))
        yield ""
        for title, *values in zip(*shown, strict=True):
            padded = (f"{value:>{_wide(column)}}" for value, column in zip(values, shown[1:], strict=True))
            yield "".join([f"{title:{len(max(titles, key=len))}}", *padded]).rstrip()


def _wide(column: Sequence[str]) -> int:
    """Return the characters of a column and of the gap before it."""
    return 2 + len(max(column, key=len))


def rows_of(count: int, tallies: Sequence[Tally]) -> Iterator[list[str]]:
    """Yield the table's rows: a title, and a cell for each policy. The first row has the policies' names."""

    def row(title: str, cell: Callable[[Tally], str]) -> list[str]:
        return [title, *map(cell, tallies)]

    yield row("", lambda one: _tail(printable(one.name)))
    yield row("requests planned", lambda one: f"{one.planned:,} of {count:,}")
    yield row("requests changed", lambda one: f"{one.changed:,} of {one.planned:,}")
    yield row("events", lambda one: f"{one.events:,}")
    yield row("tokens as they came", lambda one: f"{one.tokens_before:,}")
    yield row("tokens as planned", lambda one: f"{one.tokens_after:,}")
    yield row("  as a share", lambda one: _share(one.tokens_after, one.tokens_before))
    yield row("cost as it came", lambda one: f"{one.cost_before:,}")
    yield row("cost as planned", lambda one: f"{one.cost_after:,}")
    yield row("  as a share", lambda one: _share(one.cost_after, one.cost_before))
    yield row("  rests on billing", lambda one: f"{one.billed:,} of {one.planned:,}")
    yield row("sessions that cost more", lambda one: f"{one.losses:,} of {len(one.sessions):,}")
    yield row("  the worst one", lambda one: "-" if one.worst is None else f"{one.worst:.2f}")
    for reason in sorted({reason for tally in tallies for reason in tally.unplanned}):
        yield [f"not planned: {reason}", *(f"{tally.unplanned[reason]:,}" for tally in tallies)]


def _session(planned: PlannedRequest) -> Session:
    """Identify the session: its API, its model, and what it begins with, up to the user's first message."""
    roles = [item.role for item in planned.past.items]
    asked = roles.index(Role.USER) + 1 if Role.USER in roles else min(1, len(roles))
    return planned.dialect.name, planned.request.model, planned.chain[asked]


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.2f}" if whole else "-"


def _several(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def printable(text: str) -> str:
    """Return a file's name without what could control a terminal, or is no text."""
    return "".join(char if char.isprintable() else "\ufffd" for char in text)


def _tail(name: str, most: int = LONGEST_NAME) -> str:
    return name if len(name) <= most else "…" + name[1 - most :]
