"""The rows of one transaction, with what they add to the sums and to their sessions.

Rows are encoded and added up some dozens at a time, soon after their requests end. So the interpreter takes few steps
for each of them, and what they hold is at hand for the processor: to fetch it from memory later takes several times as
long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import count, repeat
from operator import add, attrgetter, floordiv, gt, itemgetter
from typing import Any, TypeVar

import msgspec

from proxy.dashboard.rows import (
    DAY,
    HOUR,
    HOURLY,
    KEYS,
    MOST,
    OK,
    STORED,
    SUMMED,
    SUMS,
    Seen,
    Values,
    decoded,
    storable,
)
from proxy.errors import Fault
from proxy.telemetry.outcome import Kind, Outcome

Row = tuple[float, str, bytes, int | None, bytes | None]
"""A request as it is written: when it ended, its namespace, its outcome's values, its session, and what was sent."""

T = TypeVar("T")
K = TypeVar("K")

_key = itemgetter(*map(STORED.index, ("namespace", *KEYS)))
_summed = itemgetter(*map(STORED.index, SUMMED))
_of_session = itemgetter(*map(STORED.index, ("new_event", "cost_before", "cost_after")))
_KIND, _STATUS = map(STORED.index, ("kind", "status"))
_namespace, _before, _after, _fault, _uses = (
    itemgetter(STORED.index(name)) for name in ("namespace", "cost_before", "cost_after", "fault", "tool_uses")
)
_session, _sent, _detail = map(attrgetter, ("session", "sent", "detail"))
_encode = msgspec.msgpack.Encoder().encode
_of_hour = itemgetter(*(SUMS.index(name) for name in HOURLY))
_KIND_OF_KEY = 1 + KEYS.index("kind")


class _Part(msgspec.Struct):
    """What a batch adds to one session. `first` and `last` are places in the batch."""

    began: float
    ended: float
    first: int
    last: int
    newest: Outcome
    requests: int
    events: int
    cost_before: int
    cost_after: int

    @classmethod
    def of(cls, rows: Sequence[tuple[int, float, Outcome, Values]]) -> _Part:
        """Return what some rows add: the place, time, outcome and values of each."""
        places, times, outcomes, values = zip(*rows, strict=True)
        totals = _totals(map(_of_session, values))
        return cls(times[0], times[-1], places[0], places[-1], outcomes[-1], len(rows), *totals)

    def and_then(self, later: _Part) -> _Part:
        return _Part(
            self.began,
            later.ended,
            self.first,
            later.last,
            later.newest,
            self.requests + later.requests,
            self.events + later.events,
            self.cost_before + later.cost_before,
            self.cost_after + later.cost_after,
        )


class Batch:
    """Rows, the oldest first."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.details: dict[int, bytes] = {}
        """What became of each message of a request, by the place of its row."""
        self.weights: dict[int, int] = {}
        """Bytes that descriptions of long requests take, by the same."""
        self._sums: dict[tuple[Any, ...], list[int]] = {}
        """By the hour, and by namespace and `KEYS`."""
        self._parts: dict[int, _Part] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def add(self, times: Sequence[float], outcomes: Sequence[Outcome], seen: Sequence[Seen]) -> None:
        """Add rows, or raise what a bug raises and add none."""
        if not outcomes:
            return
        outcomes, values = storable(outcomes)
        sessions, first = [*map(_session, seen)], len(self.rows)
        rows = [*zip(times, map(_namespace, values), map(_encode, values), sessions, map(_sent, seen), strict=True)]
        keys = [*zip(map(floordiv, times, repeat(HOUR)), map(_key, values), strict=False)]
        sums = {key: _amounts(several) for key, several in _grouped(keys, values).items()}
        grouped = _grouped(sessions, [*zip(count(first), times, outcomes, values, strict=False)])
        parts = {session: _Part.of(several) for session, several in grouped.items() if session is not None}
        # Nothing fails from here on.
        self.rows += rows
        for key, amounts in sums.items():
            _add(self._sums, key, amounts)
        for session, part in parts.items():
            known = self._parts.get(session)
            self._parts[session] = known.and_then(part) if known else part
        if any(map(_detail, seen)):
            self.details |= {place: one.detail for place, one in enumerate(seen, first) if one.detail}

    def describe(self, place: int, seen: Seen) -> None:
        """Say what a request shows whose row is there already."""
        ended, namespace, outcome, session, _ = self.rows[place]
        self.rows[place] = ended, namespace, outcome, session, seen.sent
        self.weights[place] = seen.weight
        if seen.detail:
            self.details[place] = seen.detail

    def only(self, wanted: Callable[[Row], bool]) -> Batch:
        """Return a batch of the rows that are wanted."""
        places = [place for place, row in enumerate(self.rows) if wanted(row)]
        return self if len(places) == len(self.rows) else self._part(places)

    def split(self, count: int) -> tuple[Batch, Batch]:
        """Return a batch of so many of the oldest rows, and one of the others."""
        return self._part(range(count)), self._part(range(count, len(self.rows)))

    def _part(self, places: Sequence[int]) -> Batch:
        """Return a batch of the rows in these places."""
        rows = [self.rows[place] for place in places]
        outcomes = [msgspec.convert(decoded(outcome), Outcome) for _, _, outcome, _, _ in rows]
        details = map(self.details.get, places)
        batch = Batch()
        batch.add(
            [time for time, *_ in rows],
            outcomes,
            [Seen(session, sent, detail) for (*_, session, sent), detail in zip(rows, details, strict=True)],
        )
        batch.weights = {new: self.weights[old] for new, old in enumerate(places) if old in self.weights}
        return batch

    # -- what a transaction adds --

    def namespaces(self) -> set[str]:
        return {namespace for _, (namespace, *_) in self._sums}

    def days(self) -> list[tuple[object, ...]]:
        """Return the sums of days with all keys."""
        found: dict[tuple[object, ...], list[int]] = {}
        for (hour, (namespace, *keys)), total in self._sums.items():
            _add(found, (int(hour * HOUR // DAY), namespace, *map(str, keys)), total)
        return [(*key, *total) for key, total in found.items()]

    def hours(self) -> list[tuple[object, ...]]:
        """Return the sums of hours. Costs of untouched requests are only compared with those of a holdout."""
        found: dict[tuple[object, ...], list[int]] = {}
        for (hour, key), total in self._sums.items():
            if (kind := key[_KIND_OF_KEY]) is not Kind.OBSERVED:
                spent = total if kind is not Kind.UNTOUCHED else _without_costs(total)
                _add(found, (int(hour), key[0]), [*_of_hour(spent)])
        return [(*key, *total) for key, total in found.items()]

    def sessions(self, first: int, number: Callable[[str], int]) -> list[tuple[object, ...]]:
        """Return the sums of sessions, if the first row has this id. `number` returns a namespace's number."""
        return [
            (
                session,
                number(newest.namespace),
                newest.tenant,
                newest.model,
                newest.dialect,
                str(newest.holdout),
                part.began,
                part.ended,
                first + part.first,
                first + part.last,
                part.requests,
                part.events,
                newest.tokens_before,
                newest.tokens_after,
                part.cost_before,
                part.cost_after,
            )
            for session, part in self._parts.items()
            for newest in (part.newest,)
        ]


def _grouped(keys: Sequence[K], values: Sequence[T]) -> dict[K, Sequence[T]]:
    """Return the values of each key."""
    if keys.count(keys[0]) == len(keys):
        return {keys[0]: values}
    found: dict[K, list[T]] = {}
    for key, value in zip(keys, values, strict=True):
        found.setdefault(key, []).append(value)
    return {**found}


def _totals(rows: Iterable[tuple[int, ...]]) -> list[int]:
    """Return the sums of a table's columns. No number, none of which is negative, counts for more than `MOST`."""
    columns = [*zip(*rows, strict=True)]
    totals = [*map(sum, columns)]
    if max(totals) > MOST:
        totals = [sum([min(one, MOST) for one in column]) for column in columns]
    return totals


def _amounts(requests: Sequence[Values]) -> list[int]:
    """Return what requests of one key add to `SUMS`."""
    kind, faults = requests[0][_KIND], len(requests) - [*map(_fault, requests)].count(Fault.NONE)
    planned = requests
    if kind is Kind.OBSERVED:  # as in the metrics: nothing was planned for another reply
        planned = [one for one in requests if one[_STATUS] == OK]
    if not planned:
        return [len(requests), faults, *[0] * (len(SUMS) - 2)]
    losses = 0 if kind is Kind.SUMMARY else sum(map(gt, map(_after, planned), map(_before, planned)))
    read = sum([min(sum([use.tokens for use in uses]), MOST) for uses in filter(None, map(_uses, planned))])
    return [len(requests), faults, losses, read, *_totals(map(_summed, planned))]


def _without_costs(total: list[int]) -> list[int]:
    return [0 if name.startswith("cost") else value for name, value in zip(SUMS, total, strict=True)]


def _add(sums: dict[tuple[Any, ...], list[int]], key: tuple[Any, ...], amounts: list[int]) -> None:
    total = sums.get(key)
    sums[key] = amounts if total is None else [*map(add, total, amounts)]
