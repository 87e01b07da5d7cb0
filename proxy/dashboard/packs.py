"""Rows as the file keeps them: up to some dozens of one namespace together, by columns.

What all of them agree in is written once. So a row takes a fraction of the time that it would take as one of SQLite's,
and half the space. A pack is never changed: rows leave with the others of their namespace and of the same minute,
or of the same hour if an earlier version wrote them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import repeat
from typing import Any, NamedTuple

import msgspec

from proxy.dashboard.rows import Damaged, Sent, Table, Values, unpacked

SPAN = 256
"""Ids from the first row of a pack to its last, at most. Rows of other namespaces may have some of them."""

APART = 60.0
"""Most seconds between the ends of requests that are packed together: their rows are deleted together, too."""

NO_SESSION = -1
"""The number in place of a session's, which has 63 bits."""

_encode = msgspec.msgpack.Encoder().encode


class Pack(msgspec.Struct, frozen=True):
    """Rows of one namespace, to be written."""

    namespace: str
    places: Sequence[int]
    """Of the rows, in their order."""
    oldest: float
    newest: float
    """When the rows' requests ended, in seconds since the epoch."""
    sessions: bytes
    """Of each row in 8 bytes; of all in 8 bytes if they are of the same. SQLite looks for sessions in it."""
    rows: bytes
    """See `Columns`."""
    sent: bytes
    """What was sent, as a list; empty if nothing is known of any."""

    def written(self, first: int, namespace: int, worker: int) -> tuple[object, ...]:
        """Return the values of `statements.ADD_PACK`, if the row at place 0 has this id."""
        ids = first + self.places[-1], first + self.places[0]
        return *ids, namespace, worker, len(self.places), self.newest, self.sessions, self.rows, self.sent


class Columns(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What is kept of outcomes. Each has as many values as the first."""

    times: list[float]
    values: list[Any]
    """Of the first row, in the order of `STORED`."""
    others: dict[int, list[Any]]
    """The values of all rows, of the fields in which they differ."""
    places: list[int] = []
    """The distances of the rows' ids from the first one; empty if there is no other between them."""


class PackedRow(NamedTuple):
    """A row, as it is read. Whoever else wrote to the file may have put anything into `values` and `sent`."""

    id: int
    time: float
    worker: int
    session: int | None
    values: Values
    """Of its outcome, in the order of `STORED`."""
    sent: Any


def pack(
    namespace: str,
    places: Sequence[int],
    times: Sequence[float],
    table: Table,
    sessions: Sequence[int | None],
    sent: Sequence[Sent],
) -> Pack:
    """Return rows as a pack. Raises what a value raises that is none of its field's."""
    apart = () if places[-1] - places[0] == len(places) - 1 else [place - places[0] for place in places]
    if places[-1] - places[0] >= SPAN:
        raise ValueError("the rows of a pack are too far apart")
    return Pack(
        namespace,
        places,
        min(times),
        max(times),
        _sessions(sessions),
        _encode((times, table.first, table.others, apart)),
        b"" if sent.count(None) == len(sent) else _encode(sent),
    )


def with_sent(pack: Pack, late: dict[int, Sent]) -> Pack:
    """Return a pack that has also what was sent in rows that were described since. They are named by their places."""
    if late.keys().isdisjoint(pack.places):
        return pack
    known = unpacked(pack.sent, list[Any]) if pack.sent else repeat(None)
    sent = [late.get(place, one) for place, one in zip(pack.places, known, strict=False)]
    return msgspec.structs.replace(pack, sent=_encode(sent))


def entries(
    first: int, worker: int, sessions: bytes, rows: bytes, sent: bytes | None, *, only: int | None = None
) -> list[PackedRow]:
    """Return the rows of a pack, of which `first` is the first one's id; if `only` is given, those of that session.

    Raises Damaged.
    """
    columns, places, numbers = checked(sessions, rows)
    times, values, others, _ = msgspec.structs.astuple(columns)
    count = len(times)
    try:
        known = unpacked(sent, list[Any]) if sent else [None] * count
        if len(known) != count:
            raise Damaged("this is not what was sent in the rows of a pack")
        beside = [places, times, numbers, known]
        if only is not None:
            wanted = [at for at, session in enumerate(beside[2]) if session == only]
            count = len(wanted)
            beside = [[column[at] for at in wanted] for column in beside]
            others = {field: [column[at] for at in wanted] for field, column in others.items()}
        fields = [others[at] if at in others else repeat(value, count) for at, value in enumerate(values)]
        return [
            PackedRow(first + place, time, worker, session, row, one)
            for place, time, session, one, row in zip(*beside, zip(*fields, strict=True), strict=True)
        ]
    except (ValueError, TypeError) as error:
        raise Damaged(str(error)) from error


def checked(sessions: bytes, rows: bytes) -> tuple[Columns, Sequence[int], Sequence[int | None]]:
    """Return a pack's columns, the places of its rows, and their sessions. Raises Damaged unless all are of one
    length."""
    columns = unpacked(rows, Columns)
    count = len(columns.times)
    places: Sequence[int] = columns.places or range(count)
    try:
        numbers = _numbers(sessions, count)
    except (struct.error, TypeError) as error:
        raise Damaged(str(error)) from error
    if {*map(len, (places, numbers, *columns.others.values()))} != {count}:
        raise Damaged("these are not the rows of a pack")
    if not count or not 0 <= min(places) <= max(places) < SPAN:
        raise Damaged("these are not the ids of a pack")
    return columns, places, numbers


def name(session: int) -> bytes:
    """Return a session as `Pack.sessions` has it."""
    return struct.pack("<q", session)


def _sessions(sessions: Sequence[int | None]) -> bytes:
    if sessions.count(sessions[0]) == len(sessions):
        sessions = sessions[:1]
    numbers = [NO_SESSION if one is None else one for one in sessions]
    return struct.pack(f"<{len(numbers)}q", *numbers)


def _numbers(sessions: bytes, count: int) -> Sequence[int | None]:
    numbers = struct.unpack(f"<{len(sessions) // 8}q", sessions)
    numbers = numbers * count if len(numbers) == 1 else numbers
    return [None if one == NO_SESSION else one for one in numbers] if NO_SESSION in numbers else numbers
