"""The rows of one transaction, with what they add to the sums and to their sessions.

Rows are packed and added up about a hundred at a time, soon after their requests end. So the interpreter takes few
steps for each of them, and what they hold is at hand for the processor: to fetch it from memory later takes several
times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from operator import add, floordiv, gt, itemgetter
from typing import Any, TypeVar

import msgspec

from proxy.dashboard.packs import APART, SPAN, Pack, PackedRow, entries, pack, with_sent
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
    Sent,
    Shown,
    Table,
    named,
    storable,
    together,
)
from proxy.errors import Fault
from proxy.telemetry.outcome import Kind, Outcome

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

_KEYS = [STORED.index(name) for name in ("namespace", *KEYS)]
_SUMMED = [STORED.index(name) for name in SUMMED]
_OF_SESSION = [STORED.index(name) for name in ("new_event", "cost_before", "cost_after")]
_NAMESPACE, _KIND, _STATUS, _FAULT, _USES, _BEFORE, _AFTER = map(
    STORED.index, ("namespace", "kind", "status", "fault", "tool_uses", "cost_before", "cost_after")
)
_keys = itemgetter(*_KEYS)
_first = itemgetter(0)
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
        self.details: dict[int, bytes] = {}
        """What became of each message of a request, by the place of its row."""
        self.weights: dict[int, int] = {}
        """Bytes that descriptions of long requests take, by the same."""
        self._count = 0
        self._packs: list[Pack] = []
        self._late: dict[int, Sent] = {}
        """What was sent in requests that were described after their rows were packed."""
        self._sums: dict[tuple[Any, ...], list[int]] = {}
        """By the hour, the namespace and `KEYS`."""
        self._parts: dict[int, _Part] = {}

    def __len__(self) -> int:
        return self._count

    def add(self, times: Sequence[float], outcomes: Sequence[Outcome], shown: Shown) -> None:
        """Add up to `SPAN` rows, or raise what a bug raises and add none."""
        if not outcomes:
            return
        outcomes, table = storable(outcomes)
        start, (sessions, sent, details) = self._count, shown
        packs, sums, parts = list[Pack](), dict[tuple[Any, ...], list[int]](), dict[int, _Part]()
        for namespace, places in _grouped(table.column(_NAMESPACE)).items():
            some, ended = table.part(places), _at(places, times)
            ids = range(start, start + len(times)) if some is table else [start + place for place in places]
            packs.append(pack(namespace, ids, ended, some, _at(places, sessions), _at(places, sent)))
            for key, own in _by_key(ended, some).items():
                sums[key] = _amounts(some.part(own))
        costs = [*map(table.column, _OF_SESSION)]
        for session, places in _grouped(sessions).items():
            if session is not None:
                first, last = places[0], places[-1]
                totals = [_sum(_at(places, column)) for column in costs]
                parts[session] = _Part(
                    times[first], times[last], start + first, start + last, outcomes[last], len(places), *totals
                )
        # Nothing fails from here on.
        self._packs += packs
        self._count += len(times)
        for key, amounts in sums.items():
            _add(self._sums, key, amounts)
        for session, part in parts.items():
            known = self._parts.get(session)
            self._parts[session] = known.and_then(part) if known else part
        if details:
            self.details |= {start + place: detail for place, detail in details.items()}

    def describe(self, place: int, seen: Seen) -> None:
        """Say what a request shows whose row is there already."""
        self._late[place] = seen.sent
        self.weights[place] = seen.weight
        if seen.detail:
            self.details[place] = seen.detail

    def since(self, times: Mapping[str, float]) -> Batch:
        """Return a batch of the rows of requests that ended after this time of their namespace."""
        if all(one.oldest > times[one.namespace] for one in self._packs):
            return self
        rows = self.rows()
        return self._part([place for place, row in enumerate(rows) if row.time > times[row.values[_NAMESPACE]]], rows)

    def split(self, count: int) -> tuple[Batch, Batch]:
        """Return a batch of so many of the oldest rows, and one of the others."""
        rows = self.rows()
        return self._part(range(count), rows), self._part(range(count, len(rows)), rows)

    def rows(self) -> list[PackedRow]:
        """Return the rows. Their ids are their places."""
        found = [row for one in self._packed() for row in entries(one.places[0], 0, one.sessions, one.rows, one.sent)]
        return sorted(found, key=_first)

    def _part(self, places: Sequence[int], rows: Sequence[PackedRow]) -> Batch:
        """Return a batch of the rows in these places."""
        batch = Batch()
        for some in _close_together([rows[place] for place in places]):
            seen = [Seen(row.session, row.sent, self.details.get(row.id)) for row in some]
            outcomes = [msgspec.convert(named(row.values), Outcome) for row in some]
            batch.add([row.time for row in some], outcomes, together(seen))
        batch.weights = {new: self.weights[old] for new, old in enumerate(places) if old in self.weights}
        return batch

    def _packed(self) -> list[Pack]:
        return [with_sent(one, self._late) for one in self._packs] if self._late else self._packs

    # -- what a transaction adds --

    def namespaces(self) -> set[str]:
        return {namespace for _, namespace, *_ in self._sums}

    def packs(self, first: int, number: Callable[[str], int], worker: int) -> list[tuple[object, ...]]:
        """Return the packs, if the first row has this id. `number` returns a namespace's number."""
        return [one.written(first, number(one.namespace), worker) for one in self._packed()]

    def listed(self, first: int, number: Callable[[str], int]) -> list[tuple[object, ...]]:
        """Return what became of messages, if the first row has this id."""
        names = {place: one.namespace for one in self._packs for place in one.places if place in self.details}
        return [(first + place, number(names[place]), detail) for place, detail in self.details.items()]

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
                part.cost_before,
                part.cost_after,
                newest.tokens_before,
                newest.tokens_after,
                str(newest.kind),
            )
            for session, part in self._parts.items()
            for newest in (part.newest,)
        ]


def _close_together(rows: Iterable[PackedRow]) -> Iterator[list[PackedRow]]:
    """Yield rows that may be packed together, in their order."""
    some: list[PackedRow] = []
    for row in rows:
        if some and (len(some) == SPAN or abs(row.time - some[0].time) > APART):
            yield some
            some = []
        some.append(row)
    if some:
        yield some


def _grouped(keys: Sequence[K]) -> dict[K, Sequence[int]]:
    """Return the places of each key."""
    if keys.count(keys[0]) == len(keys):
        return {keys[0]: range(len(keys))}
    found: dict[K, list[int]] = {}
    for place, key in enumerate(keys):
        found.setdefault(key, []).append(place)
    return {**found}


def _by_key(times: Sequence[float], table: Table) -> dict[tuple[Any, ...], Sequence[int]]:
    """Return the places of each hour, namespace and `KEYS`."""
    first, last = min(times) // HOUR, max(times) // HOUR
    if first == last and table.others.keys().isdisjoint(_KEYS):
        return {(first, *_keys(table.first)): range(len(times))}
    return _grouped([*zip(map(floordiv, times, repeat(HOUR)), *map(table.column, _KEYS), strict=True)])


def _at(places: Sequence[int], rows: Sequence[T]) -> Sequence[T]:
    return rows if len(places) == len(rows) else [rows[place] for place in places]


def _sum(numbers: Sequence[int]) -> int:
    """Return the sum of numbers, none of which is negative, or counts for more than `MOST`."""
    total = sum(numbers)
    return total if total <= MOST else sum([min(one, MOST) for one in numbers])


def _amounts(table: Table) -> list[int]:
    """Return what requests of one key add to `SUMS`."""
    kind, count = table.first[_KIND], len(table.rows)
    faults = count - table.column(_FAULT).count(Fault.NONE)
    if kind is Kind.OBSERVED:  # as in the metrics: nothing was planned for another reply
        replied = [place for place, status in enumerate(table.column(_STATUS)) if status == OK]
        if not replied:
            return [count, faults, *[0] * (len(SUMS) - 2)]
        table = table.part(replied)
    first, others, size = table.first, table.others, len(table.rows)
    losses = 0 if kind is Kind.SUMMARY else sum(map(gt, table.column(_AFTER), table.column(_BEFORE)))
    read = sum([min(sum([use.tokens for use in uses]), MOST) for uses in filter(None, table.column(_USES))])
    totals = [_sum(others[at]) if at in others else min(first[at], MOST) * size for at in _SUMMED]
    return [count, faults, losses, read, *totals]


def _without_costs(total: list[int]) -> list[int]:
    return [0 if name.startswith("cost") else value for name, value in zip(SUMS, total, strict=True)]


def _add(sums: dict[tuple[Any, ...], list[int]], key: tuple[Any, ...], amounts: list[int]) -> None:
    total = sums.get(key)
    sums[key] = amounts if total is None else [*map(add, total, amounts)]
