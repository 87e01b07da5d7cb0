"""What all replicas saw together, by way of the store that they share.

Once a minute a replica puts the sums of each day that has changed into the store, and copies those
of the others into its own file, from which the pages read both. A record never changes: a new
version is put, then the one before it is deleted. So nobody waits for another replica, and one that
is gone stays in the sums.
"""

from __future__ import annotations

import asyncio
import re
import sqlite3
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import aclosing, closing, suppress
from functools import partial
from hashlib import sha256
from typing import Any, TypeVar

import msgspec

from proxy.apps.dashboard.rows import (
    DAY,
    FLEET_SESSIONS,
    FLEET_SUMS,
    HOUR,
    OURS,
    REMEMBERED,
    Rows,
    digest,
    insert,
)
from proxy.errors import DashboardFault, StoreFault
from proxy.plan.prices import DEARER
from proxy.stores import Store

T = TypeVar("T")

NAMESPACE = "dashboard"
ALL_SUMS = f"{NAMESPACE}/sums/"
FORGOTTEN = f"{NAMESPACE}/forgotten/"
SUMS = f"{ALL_SUMS}{OURS:x}."
"""What the keys of replicas' sums begin with, and those of namespaces that all replicas are to
forget. A version with other tables has other keys: during an upgrade, each counts for itself."""

EVERY = 60.0
"""Seconds between two exchanges."""

REST = 200
"""An exchange takes at most this part of the time: to list keys, a Redis is gone through as a
whole."""

KEPT = 31 * DAY
"""Seconds for which sums are exchanged, as far as pages show them."""

AT_ONCE = 50
"""Records that are read together."""

MOST_BYTES = 64 << 20
"""Most bytes of one replica's sums of a day, unpacked."""

_RECORD = re.compile(r"[0-9]{6}\.[0-9a-f]{16}\.[0-9]{12}\.[0-9a-f]{16}")
"""A day and a replica, which together are a *place*, when the record was put, and a mark that
changes whenever the sums do. In this order, a later record of a place is greater."""

_TOLD = re.compile(rf"{FORGOTTEN}((?:[0-9a-f]{{2}})+)\.([0-9]{{1,12}})")
"""The digest of a namespace that is to be forgotten, and when that was said."""


class Share(msgspec.Struct, frozen=True):
    """One day of one replica: its name and address, and the rows of its sums and of its sessions'
    sums."""

    name: str
    url: str
    sums: Sequence[Sequence[str | int | float | None]]
    sessions: Sequence[Sequence[str | int | float | None]]


def forgotten(namespace: str, now: float) -> str:
    """Return the key of a record that has all replicas forget a namespace."""
    return f"{FORGOTTEN}{digest(namespace).hex()}.{int(now)}"


class Fleet:
    """One replica of a fleet, with its dashboard's file. `name` and `url` are what others show of
    it."""

    def __init__(
        self,
        rows: Callable[[], Rows],
        store: Store,
        name: str,
        url: str,
        warn: Callable[[str, str], None],
        clock: Callable[[], float] = time.time,
        upstreams: Collection[str] = (),
    ) -> None:
        """`upstreams`: the addresses of its policies. Proxies in front of others are no replicas of
        this one."""
        self._rows = rows
        self._store = store
        self._name = name
        self._url = url
        self._warn = warn
        self._clock = clock
        self._sums = f"{SUMS}{sha256(' '.join(sorted(upstreams)).encode()).hexdigest()[:8]}."

    async def run(self) -> None:
        """Exchange sums until cancelled."""
        while True:
            began = time.monotonic()
            try:
                await self.exchange()
            except (StoreFault, DashboardFault, sqlite3.Error, OverflowError) as error:
                self._warn(
                    "fleet", f"the dashboard cannot exchange sums with other replicas: {error}"
                )
            await asyncio.sleep(max(EVERY, REST * (time.monotonic() - began)))

    async def exchange(self) -> None:
        """Put what has changed, and copy what others have put. Raises StoreFault, DashboardFault
        and sqlite3.Error."""
        now = self._clock()
        replica = await self._file(lambda rows: _turn(rows, now))
        if replica is None:
            return  # another worker of this replica does it
        # which a tenant may be called, too
        async with aclosing(self._store.list(f"{NAMESPACE}/")) as entries:
            listed = {entry.key: entry.modified async for entry in entries}
        told = [found for key in listed if (found := _TOLD.fullmatch(key))]
        await self._file(lambda rows: _forget(rows, told, now))
        records = sorted(
            key.removeprefix(self._sums) for key in listed if key.startswith(self._sums)
        )
        dated = [
            one for one in records if _RECORD.fullmatch(one) and int(one[:6]) * DAY > now - KEPT
        ]
        newest = {one.rsplit(".", 2)[0]: one for one in dated}
        others = {one for place, one in newest.items() if not place.endswith(replica)}
        mine = await self._put(newest, replica, now)
        current = {f"{self._sums}{one}" for one in others | mine}
        stale = [key for key in listed if key.startswith(self._sums) and key not in current]
        stale += [found[0] for found in told if now - float(found[2]) > KEPT]
        # Those of other versions, and of other upstreams.
        old = (key for key, at in listed.items() if key.startswith(ALL_SUMS) and now - at > KEPT)
        if stale := [*stale, *(key for key in old if not key.startswith(self._sums))]:
            await self._store.delete(*stale)
        await self._collect(others)

    async def _put(self, newest: Mapping[str, str], replica: str, now: float) -> set[str]:
        """Put the days that have changed, and return the records of all days of this replica."""
        marks = await self._file(lambda rows: _marks(rows, now, f"{self._name} {self._url}"))
        current = set[str]()
        for day, mark in marks.items():
            place = f"{day:06}.{replica}"
            record = newest.get(place, "")
            if not record.endswith(mark):
                record = f"{place}.{int(now):012}.{mark}"
                share = await self._file(partial(_share, day=day, name=self._name, url=self._url))
                await self._store.put(f"{self._sums}{record}", share)
            current.add(record)
        return current

    async def _collect(self, others: Collection[str]) -> None:
        """Bring the file in line with the others' records, the newest days first."""
        known = await self._file(lambda rows: _known(rows, others))
        fresh = sorted(set(others) - known, reverse=True)
        for start in range(0, len(fresh), AT_ONCE):
            some = fresh[start : start + AT_ONCE]
            values = await self._store.get_many([f"{self._sums}{record}" for record in some])
            for record, value in zip(some, values, strict=True):
                if share := await asyncio.to_thread(_decoded, value):
                    with suppress(OverflowError):  # a number that no replica of ours counts to
                        await self._file(partial(_note, record=record, share=share))

    async def _file(self, work: Callable[[Rows], T]) -> T:
        """Do `work` on the file, in a thread."""

        def opened() -> T:
            with closing(self._rows()) as rows:
                return rows.within(lambda: work(rows))

        return await asyncio.to_thread(opened)


def _decoded(value: bytes | None) -> Share | None:
    """Return a share; None if it was replaced just now, or is damaged or another version's."""
    try:
        share = msgspec.msgpack.decode(
            zlib.decompressobj().decompress(value or b"", MOST_BYTES), type=Share
        )
    except (zlib.error, msgspec.MsgspecError):
        return None
    whole = all(len(row) == len(FLEET_SUMS) for row in share.sums)
    whole = whole and all(len(row) == len(FLEET_SESSIONS) for row in share.sessions)
    return share if whole else None


# -- on the file, each within a transaction --


def _turn(rows: Rows, now: float) -> str | None:
    """Return what all workers with this file call their replica; None if another one has exchanged
    sums just now."""
    query = "UPDATE secret SET exchanged = ?1 WHERE exchanged NOT BETWEEN ?1 - ?2 AND ?1"
    turn = rows.connection.execute(query, (now, EVERY / 2)).rowcount == 1
    return sha256(rows.secret()).hexdigest()[:16] if turn else None


def _marks(rows: Rows, now: float, about: str) -> dict[int, str]:
    """Return the marks of all days that have sums."""
    found: dict[int, Any] = defaultdict(lambda: sha256(about.encode()))
    for table, at in (("sums", "start"), ("sessions", "last")):
        query = f"SELECT CAST({at} / {DAY} AS INTEGER), count(*), sum(requests) FROM {table} WHERE {at} >= ? GROUP BY 1"
        for day, *amounts in rows.connection.execute(query, ((now - KEPT) // DAY * DAY + DAY,)):
            found[day].update(f"{table} {amounts}".encode())
    return {day: mark.hexdigest()[:16] for day, mark in found.items()}


def _share(rows: Rows, day: int, name: str, url: str) -> bytes:
    """Return a day of this replica, as its record has it."""
    run = rows.connection.execute
    between = (day * DAY, (day + 1) * DAY)
    hours = ", ".join(f"CAST({at} / {HOUR} AS INTEGER) * {HOUR}" for at in ("began", "last"))
    sessions = f"""SELECT namespace, tenant, model, holdout, kind, {hours}, count(*), sum(requests),
        sum(cost_before > 0), sum(cost_before > 0 AND cost_after > cost_before * {DEARER}), sum(moved), sum(reads),
        max(largest_before), max(largest_after)
        FROM sessions WHERE last >= ? AND last < ? GROUP BY 1, 2, 3, 4, 5, 6, 7"""
    sums = f"SELECT {', '.join(FLEET_SUMS)} FROM sums WHERE start >= ? AND start < ?"
    share = Share(name, url, run(sums, between).fetchall(), run(sessions, between).fetchall())
    return zlib.compress(msgspec.msgpack.encode(share), 1)


def _note(rows: Rows, record: str, share: Share) -> None:
    """Take in another replica's record."""
    run = rows.connection.execute
    many = rows.connection.executemany
    about = record, share.name, share.url, int(record.split(".")[2])
    if not run("INSERT OR IGNORE INTO fleet VALUES (?, ?, ?, ?)", about).rowcount:
        return  # another worker was first
    [there] = run("SELECT count(*) FROM fleet_sums").fetchone()
    # else older days are left out
    if there + len(share.sums) + len(share.sessions) <= rows.most_sums:
        many(insert("fleet_sums", ("record", *FLEET_SUMS)), ((record, *row) for row in share.sums))
        many(
            insert("fleet_sessions", ("record", *FLEET_SESSIONS)),
            ((record, *row) for row in share.sessions),
        )


def _known(rows: Rows, current: Collection[str]) -> set[str]:
    """Drop the records that are gone. Returns those that are left."""
    known = {record for (record,) in rows.connection.execute("SELECT record FROM fleet")}
    gone = [(record,) for record in known.difference(current)]
    rows.connection.executemany("DELETE FROM fleet WHERE record = ?", gone)
    return known.intersection(current)


def _forget(rows: Rows, told: Iterable[re.Match[str]], now: float) -> None:
    """Forget namespaces that another replica was told to forget."""
    done = dict(rows.connection.execute("SELECT digest, time FROM forgotten"))
    for found in told:
        known = bytes.fromhex(found[1])
        at = float(found[2])
        if now - at < REMEMBERED and at > done.get(known, 0.0):
            rows.drop(known, at)
