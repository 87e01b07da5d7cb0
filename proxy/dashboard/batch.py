"""The rows of one transaction, with what they add to the sums and to their sessions.

Rows are encoded and added up soon after their requests end. Much about a request is at hand for the processor then; for
the same work on a thousand rows at once it has to fetch them from memory, which takes several times as long.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from operator import add, itemgetter
from typing import Any

import msgspec

from proxy.dashboard.rows import (
    DAY,
    HOUR,
    HOURLY,
    KEYS,
    MOST,
    NOTHING_SEEN,
    OK,
    STORED,
    SUMMED,
    SUMS,
    Seen,
    decoded,
    storable,
    values_of,
)
from proxy.dashboard.sessions import Unseen
from proxy.errors import Fault
from proxy.telemetry.outcome import Kind, Outcome

logger = logging.getLogger(__name__)

Values = tuple[Any, ...]

_key = itemgetter(*map(STORED.index, ("namespace", *KEYS)))
_summed = itemgetter(*map(STORED.index, SUMMED))
_KIND, _STATUS, _FAULT, _USES = map(STORED.index, ("kind", "status", "fault", "tool_uses"))
_BEFORE, _AFTER = map(STORED.index, ("cost_before", "cost_after"))
_encode = msgspec.msgpack.Encoder().encode
_of_hour = itemgetter(*(SUMS.index(name) for name in HOURLY))
_KIND_OF_KEY = 2 + KEYS.index("kind")


class Packed(msgspec.Struct, gc=False):
    """A request as it is written."""

    time: float
    namespace: str
    outcome: bytes
    """The outcome's values."""
    session: int | None
    seen: Seen | Unseen
    """What it shows, which may have to be described first."""
    weight: int = 0
    """Bytes of a long request that are held for it, or of its description."""

    def describe(self) -> Seen:
        """Return what it shows, and hold nothing else of its request."""
        if isinstance(self.seen, Unseen):
            self.seen = shown(self.seen)
            self.weight = self.seen.weight
        return self.seen


class _Part(msgspec.Struct):
    """What a batch adds to one session. `first` and `last` are places in the batch."""

    began: float
    ended: float
    first: int
    last: int
    newest: Outcome
    requests: int = 0
    events: int = 0
    cost_before: int = 0
    cost_after: int = 0


class Batch:
    """Rows, the oldest first."""

    def __init__(self) -> None:
        self.rows: list[Packed] = []
        self._sums: dict[tuple[Any, ...], list[int]] = {}
        """By hour, namespace and `KEYS`."""
        self._parts: dict[int, _Part] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def add(self, time: float, outcome: Outcome, seen: Seen | Unseen) -> Packed:
        """Add a row and return it, or raise what a bug raises and add nothing."""
        outcome = storable(outcome)
        values = values_of(outcome)
        key, amounts = (time // HOUR, *_key(values)), _amounts(values)
        row = Packed(time, outcome.namespace, _encode(values), seen.session, seen)
        if row.session is not None:
            self._add_to_session(row.session, time, outcome)
        total = self._sums.get(key)
        self._sums[key] = amounts if total is None else [*map(add, total, amounts)]
        self.rows.append(row)
        return row

    def _add_to_session(self, session: int, time: float, outcome: Outcome) -> None:
        place = len(self.rows)
        part = self._parts.get(session)
        if part is None:
            part = self._parts[session] = _Part(time, time, place, place, outcome)
        part.ended, part.last, part.newest = time, place, outcome
        part.requests += 1
        part.events += outcome.new_event
        part.cost_before += min(outcome.cost_before, MOST)
        part.cost_after += min(outcome.cost_after, MOST)

    def only(self, wanted: Callable[[Packed], bool]) -> Batch:
        """Return a batch of the rows that are wanted."""
        return self if all(map(wanted, self.rows)) else _again(filter(wanted, self.rows))

    def split(self, count: int) -> tuple[Batch, Batch]:
        """Return a batch of so many of the oldest rows, and one of the others."""
        return _again(self.rows[:count]), _again(self.rows[count:])

    # -- what a transaction adds --

    def namespaces(self) -> set[str]:
        return {key[1] for key in self._sums}

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
            if (kind := key[_KIND_OF_KEY]) is not Kind.OBSERVED:
                spent = total if kind is not Kind.UNTOUCHED else _without_costs(total)
                _add(found, (int(key[0]), key[1]), [*_of_hour(spent)])
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


def shown(unseen: Unseen) -> Seen:
    """Return what a request shows. A bug there costs no row."""
    try:
        return unseen.seen()
    except Exception:
        logger.exception("a bug, in describing a request for the dashboard")
        return NOTHING_SEEN


def _again(rows: Iterable[Packed]) -> Batch:
    """Return a batch of rows that were part of another one."""
    batch = Batch()
    for row in rows:
        batch.add(row.time, msgspec.convert(decoded(row.outcome), Outcome), row.seen)
        batch.rows[-1] = row
    return batch


def _amounts(values: Values) -> list[int]:
    """Return what a request adds to `SUMS`."""
    kind, faulty = values[_KIND], values[_FAULT] is not Fault.NONE
    if kind is Kind.OBSERVED and values[_STATUS] != OK:  # as in the metrics: nothing was planned for another reply
        return [1, faulty, *[0] * (len(SUMS) - 2)]
    summed, uses = _summed(values), values[_USES]
    if max(summed) > MOST:
        summed = [min(one, MOST) for one in summed]
    loss = kind is not Kind.SUMMARY and values[_AFTER] > values[_BEFORE]
    return [1, faulty, loss, min(sum([use.tokens for use in uses]), MOST) if uses else 0, *summed]


def _without_costs(total: list[int]) -> list[int]:
    return [0 if name.startswith("cost") else value for name, value in zip(SUMS, total, strict=True)]


def _add(sums: dict[tuple[object, ...], list[int]], key: tuple[object, ...], amounts: list[int]) -> None:
    total = sums.get(key)
    sums[key] = amounts if total is None else [*map(add, total, amounts)]
