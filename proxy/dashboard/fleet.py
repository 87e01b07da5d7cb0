"""What all replicas saw together, by way of the store that they share.

Once a minute a replica puts the sums of each day that has changed into the store, and copies those of the others into
its own file, from which the pages read both. A record never changes: `DAY.REPLICA.VERSION` is put, then the version
before it is deleted. So nobody waits for another replica, and one that is gone stays in the sums.
"""

from __future__ import annotations

import asyncio
import re
import sqlite3
import time
import zlib
from collections.abc import Callable, Collection, Sequence
from contextlib import aclosing, closing, suppress
from functools import partial
from hashlib import sha256
from typing import TypeVar

import msgspec

from proxy.dashboard.rows import DAY, FLEET_SESSIONS, FLEET_SUMS, HOUR, OURS, REMEMBERED, Rows, digest, insert
from proxy.errors import DashboardFault, StoreFault
from proxy.stores import Store

T = TypeVar("T")

NAMESPACE = "dashboard"
ALL_SUMS, FORGOTTEN = f"{NAMESPACE}/sums/", f"{NAMESPACE}/forgotten/"
SUMS = f"{ALL_SUMS}{OURS:x}."
"""What the keys of replicas' sums begin with, and those of namespaces that all replicas are to forget. A version with
other tables has other keys: during an upgrade, each counts for itself."""

EVERY = 60.0
"""Seconds between two exchanges."""

REST = 200
"""An exchange takes at most this part of the time: to list keys, a Redis is gone through as a whole."""

KEPT = 31 * DAY
"""Seconds for which sums are exchanged, as far as pages show them."""

AT_ONCE = 50
"""Records that are read together."""

_TOLD = re.compile(r"(?:[0-9a-f]{2})+\.[0-9]{1,12}(?:\.[0-9]+)?")
MOST_BYTES = 64 << 20
"""Most bytes of one replica's sums of a day, unpacked."""
_RECORD = re.compile(r"([0-9]{1,6})\.([0-9a-f]{16})\.([0-9]{1,12})")
"""A day, a replica and a version."""


class Share(msgspec.Struct, frozen=True):
    """One day of one replica: its name and address, and the rows of its sums and of its sessions' sums."""

    name: str
    url: str
    sums: Sequence[Sequence[str | int | float | None]]
    sessions: Sequence[Sequence[str | int | float | None]]


def forgotten(namespace: str, now: float) -> str:
    """Return the key of a record that has all replicas forget a namespace."""
    return f"{FORGOTTEN}{digest(namespace).hex()}.{int(now)}"


class Fleet:
    """One replica of a fleet, with its dashboard's file. `name` and `url` are what others show of it."""

    def __init__(
        self,
        rows: Callable[[], Rows],
        store: Store,
        name: str,
        url: str,
        warn: Callable[[str, str], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._rows, self._store = rows, store
        self._name, self._url = name, url
        self._warn, self._clock = warn, clock

    async def run(self) -> None:
        """Exchange sums until cancelled."""
        while True:
            began = time.monotonic()
            try:
                await self.exchange()
            except (StoreFault, DashboardFault, sqlite3.Error, OverflowError) as error:
                self._warn("fleet", f"the dashboard cannot exchange sums with other replicas: {error}")
            await asyncio.sleep(max(EVERY, REST * (time.monotonic() - began)))

    async def exchange(self) -> None:
        """Put what has changed, and copy what others have put. Raises StoreFault, DashboardFault and sqlite3.Error."""
        now = self._clock()
        replica = await self._file(lambda rows: _turn(rows, now))
        if replica is None:
            return  # another worker of this replica does it
        for record, marker in (await self._file(lambda rows: _changed(rows, now, replica))).items():
            share = await self._file(partial(_share, day=int(record.split(".")[0]), name=self._name, url=self._url))
            await self._store.put(f"{SUMS}{record}", await asyncio.to_thread(_encoded, share))
            await self._file(partial(_note, record=record, share=share, at=now, marker=marker))
        listed: dict[str, float] = {}
        async with aclosing(self._store.list(f"{NAMESPACE}/")) as entries:
            async for entry in entries:
                if entry.key.startswith((ALL_SUMS, FORGOTTEN)):  # a tenant may have this name
                    listed[entry.key] = entry.modified
        if old := [key for key, at in listed.items() if now - at > KEPT + DAY]:
            await self._store.delete(*old)
        told = [key.removeprefix(FORGOTTEN) for key in listed if key.startswith(FORGOTTEN)]
        await self._file(lambda rows: _forget(rows, told, now))
        sums = {key.removeprefix(SUMS): at for key, at in listed.items() if key.startswith(SUMS)}
        await self._collect(sums, replica)

    async def _collect(self, listed: dict[str, float], replica: str) -> None:
        """Bring the file in line with the records that are listed, the newest days first."""
        newest: dict[tuple[int, str], tuple[int, str]] = {}
        for record in listed:
            if found := _RECORD.fullmatch(record):
                place = int(found[1]), found[2]
                newest[place] = max(newest.get(place, (0, "")), (int(found[3]), record))
        current = {record for _, record in newest.values()}
        known = await self._file(lambda rows: _known(rows, current))
        mine = {record for record in listed if f".{replica}." in record}
        if stale := (listed.keys() - current) | (mine - known):
            await self._store.delete(*(f"{SUMS}{record}" for record in stale))
        fresh = [newest[place][1] for place in sorted(newest, reverse=True) if newest[place][1] not in known | mine]
        for start in range(0, len(fresh), AT_ONCE):
            some = fresh[start : start + AT_ONCE]
            values = await self._store.get_many([f"{SUMS}{record}" for record in some])
            for record, value in zip(some, values, strict=True):
                if share := await asyncio.to_thread(_decoded, value):
                    with suppress(OverflowError):  # a number that no replica of ours counts to
                        await self._file(partial(_note, record=record, share=share, at=listed[record]))

    async def _file(self, work: Callable[[Rows], T]) -> T:
        """Do `work` on the file, in a thread."""

        def opened() -> T:
            with closing(self._rows()) as rows:
                return rows.within(lambda: work(rows))

        return await asyncio.to_thread(opened)


def _encoded(share: Share) -> bytes:
    return zlib.compress(msgspec.msgpack.encode(share), 1)


def _decoded(value: bytes | None) -> Share | None:
    """Return a share; None if it was replaced just now, or is damaged or another version's."""
    try:
        share = msgspec.msgpack.decode(zlib.decompressobj().decompress(value or b"", MOST_BYTES), type=Share)
    except (zlib.error, msgspec.MsgspecError):
        return None
    whole = all(len(row) == len(FLEET_SUMS) for row in share.sums)
    whole = whole and all(len(row) == len(FLEET_SESSIONS) for row in share.sessions)
    return share if whole else None


# -- on the file, each within a transaction --


def _turn(rows: Rows, now: float) -> str | None:
    """Return what all workers with this file call their replica; None if another one has exchanged sums just now."""
    query = "UPDATE secret SET exchanged = ?1 WHERE exchanged NOT BETWEEN ?1 - ?2 AND ?1"
    turn = rows.connection.execute(query, (now, EVERY / 2)).rowcount == 1
    return sha256(rows.secret()).hexdigest()[:16] if turn else None


def _changed(rows: Rows, now: float, replica: str) -> dict[str, str]:
    """Return the records to put, each with a marker that changes whenever its day's sums do."""
    run, since, found, markers = rows.connection.execute, now // DAY * DAY - KEPT, dict[str, str](), dict[int, str]()
    for table, at in (("sums", "start"), ("sessions", "last")):
        query = f"SELECT CAST({at} / {DAY} AS INTEGER), count(*), sum(requests) FROM {table} WHERE {at} >= ? GROUP BY 1"
        for day, *amounts in run(query, (since,)):
            markers[day] = f"{markers.get(day, '')} {table} {amounts}"
    put = dict(run("SELECT record, marker FROM fleet WHERE record GLOB ?", (f"*.{replica}.*",)))
    before = {int(record.split(".")[0]): record for record in put}
    for day, marker in markers.items():
        last = before.pop(day, "0")
        if put.get(last) != marker:
            version = max(int(now), int(last.rpartition(".")[2]) + 1)
            found[f"{day}.{replica}.{version}"] = marker
    rows.connection.executemany("DELETE FROM fleet WHERE record = ?", [(record,) for record in before.values()])
    return found


def _share(rows: Rows, day: int, name: str, url: str) -> Share:
    """Return a day of this replica."""
    run, between = rows.connection.execute, (day * DAY, (day + 1) * DAY)
    hours = ", ".join(f"CAST({at} / {HOUR} AS INTEGER) * {HOUR}" for at in ("began", "last"))
    sessions = f"""SELECT namespace, tenant, model, holdout, kind, {hours}, count(*), sum(requests),
        sum(cost_before > 0), sum(cost_before > 0 AND cost_after > cost_before), sum(moved), sum(reads)
        FROM sessions WHERE last >= ? AND last < ? GROUP BY 1, 2, 3, 4, 5, 6, 7"""
    sums = f"SELECT {', '.join(FLEET_SUMS)} FROM sums WHERE start >= ? AND start < ?"
    return Share(name, url, run(sums, between).fetchall(), run(sessions, between).fetchall())


def _note(rows: Rows, record: str, share: Share, at: float, marker: str = "") -> None:
    """Take in a record in place of its earlier versions. One of this replica has a marker, and its sums are there."""
    run, many = rows.connection.execute, rows.connection.executemany
    run("DELETE FROM fleet WHERE record GLOB ?", (f"{record.rpartition('.')[0]}.*",))
    run("INSERT INTO fleet VALUES (?, ?, ?, ?, ?)", (record, share.name, share.url, at, marker))
    [there] = run("SELECT count(*) FROM fleet_sums").fetchone()
    if not marker and there + len(share.sums) + len(share.sessions) <= rows.most_sums:  # else older days are left out
        many(insert("fleet_sums", ("record", *FLEET_SUMS)), ((record, *row) for row in share.sums))
        many(insert("fleet_sessions", ("record", *FLEET_SESSIONS)), ((record, *row) for row in share.sessions))


def _known(rows: Rows, current: Collection[str]) -> set[str]:
    """Drop the records that are gone. Returns those that are left."""
    known = {record for (record,) in rows.connection.execute("SELECT record FROM fleet")}
    gone = [(record,) for record in known.difference(current)]
    rows.connection.executemany("DELETE FROM fleet WHERE record = ?", gone)
    return known.intersection(current)


def _forget(rows: Rows, told: Collection[str], now: float) -> None:
    """Forget namespaces that another replica was told to forget."""
    done = dict(rows.connection.execute("SELECT digest, time FROM forgotten"))
    for one in told:
        if _TOLD.fullmatch(one):  # else it is not ours
            name, _, since = one.partition(".")
            known, at = bytes.fromhex(name), float(since)
            if now - at < REMEMBERED and at > done.get(known, 0.0):
                rows.drop(known, at)
