"""The rows of one transaction, with what they add to the sums and to their sessions.

Rows are encoded and added up about a hundred at a time, soon after their requests end. So the interpreter takes few
steps for each of them, and what they hold is at hand for the processor: to fetch it from memory later takes several
times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from operator import add, attrgetter, floordiv, gt, itemgetter
from typing import Any

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

_keys = itemgetter(*map(STORED.index, ("namespace", *KEYS)))
_summed = itemgetter(*map(STORED.index, SUMMED))
_of_session = itemgetter(*map(STORED.index, ("new_event", "cost_before", "cost_after")))
_NAMESPACE, _KIND, _STATUS, _FAULT, _USES, _BEFORE, _AFTER = map(
    STORED.index, ("namespace", "kind", "status", "fault", "tool_uses", "cost_before", "cost_after")
)
_session, _sent, _detail = map(attrgetter, ("session", "sent", "detail"))
_first = itemgetter(0)
_encode = msgspec.msgpack.Encoder().encode
_of_hour = itemgetter(*(SUMS.index(name) for name in HOURLY))
_KIND_OF_KEY = 2 + KEYS.index("kind")


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
        """By the hour, the namespace and `KEYS`."""
        self._parts: dict[int, _Part] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def add(self, times: Sequence[float], outcomes: Sequence[Outcome], seen: Sequence[Seen]) -> None:
        """Add rows, or raise what a bug raises and add none."""
        if not outcomes:
            return
        outcomes, values, fields = storable(outcomes)
        sessions, start = tuple(map(_session, seen)), len(self.rows)
        rows = [*zip(times, fields[_NAMESPACE], map(_encode, values), sessions, map(_sent, seen), strict=True)]
        hours = tuple(map(floordiv, times, repeat(HOUR)))
        sums = {
            key: _amounts(fields if len(places) == len(rows) else _of(places, values))
            for key, places in _grouped(hours, *_keys(fields)).items()
        }
        costs, parts = [*zip(*_of_session(fields), strict=True)], dict[int, _Part]()
        for (session,), places in _grouped(sessions).items():
            if session is not None:
                first, last = places[0], places[-1]
                total = _totals(_of(places, costs))
                parts[session] = _Part(
                    times[first], times[last], start + first, start + last, outcomes[last], len(places), *total
                )
        # Nothing fails from here on.
        self.rows += rows
        for key, amounts in sums.items():
            _add(self._sums, key, amounts)
        for session, part in parts.items():
            known = self._parts.get(session)
            self._parts[session] = known.and_then(part) if known else part
        if any(map(_detail, seen)):
            self.details |= {place: one.detail for place, one in enumerate(seen, start) if one.detail}

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
        return {namespace for _, namespace, *_ in self._sums}

    def days(self) -> list[tuple[object, ...]]:
        """Return the sums of days with all keys."""
        found: dict[tuple[object, ...], list[int]] = {}
        for (hour, namespace, *keys), total in self._sums.items():
            _add(found, (int(hour * HOUR // DAY), namespace, *map(str, keys)), total)
        return [(*key, *total) for key, total in found.items()]

    def hours(self) -> list[tuple[object, ...]]:
        """Return the sums of hours. Costs of untouched requests are only compared with those of a holdout."""
        found: dict[tuple[object, ...], list[int]] = {}
        for key, total in self._sums.items():
            hour, namespace, *_ = key
            if (kind := key[_KIND_OF_KEY]) is not Kind.OBSERVED:
                spent = total if kind is not Kind.UNTOUCHED else _without_costs(total)
                _add(found, (int(hour), namespace), [*_of_hour(spent)])
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


def _grouped(*columns: tuple[Any, ...]) -> dict[tuple[Any, ...], Sequence[int]]:
    """Return the places of each key, which has a value of each column."""
    count, key = len(columns[0]), tuple(map(_first, columns))
    if {*map(tuple.count, columns, key)} == {count}:
        return {key: range(count)}
    found: dict[tuple[Any, ...], list[int]] = {}
    for place, key in enumerate(zip(*columns, strict=True)):
        found.setdefault(key, []).append(place)
    return {**found}


def _of(places: Iterable[int], rows: Sequence[Values]) -> list[Values]:
    """Return the columns of the rows in these places."""
    return [*zip(*map(rows.__getitem__, places), strict=True)]


def _totals(columns: Iterable[Sequence[int]]) -> list[int]:
    """Return the sums of columns. No number, none of which is negative, counts for more than `MOST`."""
    columns = [*columns]
    totals = [*map(sum, columns)]
    if max(totals) > MOST:
        totals = [sum([min(one, MOST) for one in column]) for column in columns]
    return totals


def _amounts(fields: Sequence[Values]) -> list[int]:
    """Return what requests of one key add to `SUMS`. `fields` has all their values of each field."""
    kind, count = fields[_KIND][0], len(fields[_KIND])
    faults = count - fields[_FAULT].count(Fault.NONE)
    if kind is Kind.OBSERVED:  # as in the metrics: nothing was planned for another reply
        fields = [*zip(*(one for one in zip(*fields, strict=True) if one[_STATUS] == OK), strict=True)]
    if not fields:
        return [count, faults, *[0] * (len(SUMS) - 2)]
    losses = 0 if kind is Kind.SUMMARY else sum(map(gt, fields[_AFTER], fields[_BEFORE]))
    read = sum([min(sum([use.tokens for use in uses]), MOST) for uses in filter(None, fields[_USES])])
    return [count, faults, losses, read, *_totals(_summed(fields))]


def _without_costs(total: list[int]) -> list[int]:
    return [0 if name.startswith("cost") else value for name, value in zip(SUMS, total, strict=True)]


def _add(sums: dict[tuple[Any, ...], list[int]], key: tuple[Any, ...], amounts: list[int]) -> None:
    total = sums.get(key)
    sums[key] = amounts if total is None else [*map(add, total, amounts)]
