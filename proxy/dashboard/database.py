"""The dashboard's file: SQLite with a write-ahead log, which every worker of a process group opens for itself.

Each worker writes its own rows, in batches and in one thread, and waits up to `BUSY` seconds for another's batch to
end. So no process must be chosen, and none is missed when it ends.
"""

from __future__ import annotations

import logging
import os
import secrets
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from proxy.dashboard import statements
from proxy.dashboard.batch import Batch
from proxy.dashboard.file import create, drop, logs, moved
from proxy.dashboard.older import has_older, move_older, newest_older
from proxy.dashboard.rows import DAY, HOUR, KEYS, NO_ROW, SCHEMA
from proxy.dashboard.versions import READABLE, VERSION, set_aside, upgraded
from proxy.errors import DashboardFault
from proxy.policies.tenants import tenant_of

logger = logging.getLogger(__name__)

BUSY = 5.0
"""Seconds to wait for another process that writes. A batch takes a few milliseconds."""

PAGE = 4096
"""Bytes of one page of the file."""

FULL, SMALL_FULL, ROOM = 0.9, 0.75, 0.05
"""The share of the allowed size above which the oldest rows are deleted, that of a small file, and the share of rows
deleted at once."""

SPARE = 1_024
"""Pages that stay free where this is less than the share that does, because a batch may take as many."""

LEAVING = 5_000
"""Most rows that one batch deletes, so that the others' batches do not wait for long."""

SUMS_KEPT, SUMS_A_PAGE = 60_000, 2
"""Most sums of hours, and of days, in all and for each page of the file. A client can make one with every request, as
it chooses the model's name and its own key."""

COUNTED_AGAIN = 20
"""Batches after which the sums are counted again."""

FORGETTING = 30 * 86_400.0
"""Seconds after which no process has rows any more that were to be forgotten. None keeps rows for longer."""

KNOWN = 10_000
"""Namespaces whose numbers are remembered."""

AT_ONCE = 32
"""Most steps of packing rows of an earlier version after a batch of new ones, while the file is full."""

COUNT = "CAST(total(count) AS INTEGER)"
"""The number of rows in packs. A sum fails where somebody else wrote numbers that are too large."""

DETAILED = 20_000
"""Requests, the newest, whose messages are listed."""


class OtherVersion(DashboardFault):
    """The file is of a version of the proxy whose rows cannot be read, or no dashboard's."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path} is of another version of the proxy: name another file, or delete it")


def opened(path: Path, size: int) -> Database:
    """Open the file for writing. One of another version is set aside for it. Raises DashboardFault."""
    try:
        return Database(path, size)
    except OtherVersion:
        old = set_aside(path)
        database = Database(path, size)
        if old is not None:
            reason = "was of another version of the proxy: its rows are kept for 30 days"
            logger.warning("%s %s, in %s", path, reason, old)
        return database


class _Leaving(NamedTuple):
    """A pack that may be deleted."""

    first: int
    last: int
    rows: int
    newest: float


class Database:
    """One connection, for one thread. Raises DashboardFault if the file cannot be used, and `sqlite3.Error`."""

    def __init__(self, path: Path, size: int) -> None:
        self._path = path
        self._pages = max(size // PAGE, 64)
        self._full = max(SMALL_FULL * self._pages, min(FULL * self._pages, self._pages - SPARE))
        self._sums = min(SUMS_KEPT, SUMS_A_PAGE * self._pages)
        self._batches = 0
        self._known: dict[str, int] = {}
        self._version = -1
        self._forgotten: dict[bytes, float] = {}
        self.older = False
        """Whether there are rows of an earlier version that are still to be packed."""
        create(path)
        self.gone = moved(path)
        """Whether the file has been removed or replaced, and rows would be lost with it."""
        self.connection = sqlite3.connect(path, timeout=BUSY, isolation_level=None, check_same_thread=False)
        try:
            self._prepare()
        except sqlite3.OperationalError:
            self.connection.close()
            raise
        except sqlite3.DatabaseError as error:
            self.connection.close()
            raise DashboardFault(
                f"{path} is no usable file of a dashboard ({error}): name another, or delete it"
            ) from error
        except DashboardFault:
            self.connection.close()
            raise
        self._logs = logs(path)
        self._values = self.connection.getlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER)

    def close(self) -> None:
        self.leave()
        self.connection.close()

    def leave(self) -> None:
        """Leave nothing beside the file that has taken the place of this one, if any has. What is there later is not
        ours, even if its number is."""
        if self.gone():
            with suppress(OSError):
                drop(self._logs)
            self._logs = {}

    def secret(self) -> bytes:
        """Return random bytes that all processes with this file share."""
        [value] = self.connection.execute("SELECT value FROM secret").fetchone()
        return bytes(value)

    def write(self, batch: Batch) -> int:
        """Add these rows but those that were to be forgotten, make room for the next ones, and return how many were
        added."""
        try:
            added = self._within(lambda: self._add(batch))
        except sqlite3.OperationalError:
            if self.used() < self._full:
                raise
            self.trim()
            self._limit_sums()
            added = self._within(lambda: self._add(batch))
        with suppress(sqlite3.OperationalError):  # these rows are written, and the next batch makes room again
            self.trim()
            self._batches += 1
            if self._batches % COUNTED_AGAIN == 0:
                self._limit_sums()
        return added

    def trim(self) -> None:
        """Delete the oldest rows while the file is nearly full, or first pack some of an earlier version: new rows do
        not wait for all of those."""
        if self.used() <= self._full:
            return
        for _ in range(AT_ONCE):
            if not self.upgrade() or self.used() <= self._full:
                break
        while not self.older and self.used() > self._full and self._within(self._shrink):
            pass

    def upgrade(self) -> int:
        """Pack the newest rows of an earlier version, and return how many; 0 if there are none left."""
        if not self.older:
            return 0
        [secure] = self.connection.execute("PRAGMA secure_delete").fetchone()
        self.connection.execute("PRAGMA secure_delete = ON")  # or `forget` would leave what they were in free pages
        moved = self._within(lambda: move_older(self.connection))
        self.connection.execute(f"PRAGMA secure_delete = {secure}")
        self.older = moved > 0
        if not self.older:
            self._limit_pages()
        return moved

    def used(self) -> int:
        """Return how many pages of the file hold something."""
        return self._pragma("page_count") - self._pragma("freelist_count")

    def expire(self, retention: Callable[[str], float], now: float) -> int:
        """Delete rows that are older than their namespace's retention, in seconds, until about `LEAVING` have left, and
        return how many."""
        run, deleted = self.connection.execute, 0
        for namespace, name in run("SELECT id, name FROM namespaces").fetchall():
            since = now - retention(name)
            deleted += self._within(partial(self._delete_old, namespace, since, LEAVING - deleted))
            run("DELETE FROM sessions WHERE namespace = ? AND last < ?", (namespace, since))
            run("DELETE FROM hours WHERE namespace = ? AND hour < ?", (name, since // HOUR))
            run("DELETE FROM days WHERE namespace = ? AND day < ?", (name, since // DAY))
            if deleted >= LEAVING:
                break
        run("DELETE FROM forgotten WHERE time < ?", (now - FORGETTING,))
        if run("UPDATE forgotten SET time = ? WHERE time > ?", (now, now)).rowcount:
            self._version = -1  # the clock was set back: rows from now on are new ones
        self._limit_sums()
        self._within(self._drop_namespaces)
        run("PRAGMA incremental_vacuum(1000)").fetchall()
        return deleted

    def count(self, namespace: str) -> int | None:
        """Return how many requests of a namespace there are; None if there are not even sums of it."""
        while self.upgrade():
            pass
        counted = f"SELECT {COUNT} FROM packs WHERE namespace = known.id"
        query = f"SELECT ({counted}) FROM namespaces known WHERE name = ?"
        found = self.connection.execute(query, (namespace,)).fetchone()
        return None if found is None else int(found[0])

    def forget(self, namespace: str, now: float) -> int:
        """Delete everything about a namespace, so that not even free pages of the file have it, and tell all processes
        not to write what they have of it so far. Returns how many requests were deleted."""
        self.connection.execute("PRAGMA secure_delete = ON")
        while self.upgrade():
            pass
        gone = self._within(partial(self._forget, namespace, now))
        self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        self._known, self._version = {}, -1  # the number of the namespace may be given to another
        return gone

    def _limit_sums(self) -> None:
        """Delete sums while there are too many, of the tenant that has most, so that none loses those of another."""
        for table, keys in (("days", ("day", "namespace", *KEYS)), ("hours", ("hour", "namespace"))):
            while self.connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0] > self._sums:
                self._within(partial(self._thin, table, keys))
                self._within(self._drop_namespaces)

    # -- opening --

    def _prepare(self) -> None:
        run = self.connection.execute
        self._check_version()
        self.connection.create_function("tenant_of", 1, tenant_of, deterministic=True)
        run(f"PRAGMA page_size = {PAGE}")
        run("PRAGMA auto_vacuum = INCREMENTAL")
        if run("PRAGMA journal_mode = WAL").fetchone()[0] != "wal":
            raise DashboardFault(f"{self._path} cannot have a write-ahead log of SQLite: name a file on a local disk")
        run("PRAGMA synchronous = NORMAL")
        run("PRAGMA journal_size_limit = 16777216")
        self._within(self._create_tables)
        run("SELECT max(last) FROM packs").fetchone()
        self.older = has_older(self.connection)
        self._limit_pages()

    def _limit_pages(self) -> None:
        """Set how far the file may grow: further while it has rows of an earlier version, whose messages' descriptions
        take more room before their rows take less."""
        room = self._pragma("page_count") * 5 // 4 + SPARE if self.older else 0
        self.connection.execute(f"PRAGMA max_page_count = {max(self._pages, room)}").fetchone()

    def _check_version(self) -> None:
        """Raises OtherVersion if the file holds tables, and not ours of a version that can be read."""
        if self._pragma("schema_version") and self._pragma("user_version") not in READABLE:
            raise OtherVersion(self._path)

    def _create_tables(self) -> int:
        run = self.connection.execute
        if not self._pragma("schema_version"):
            for statement in filter(str.strip, SCHEMA.split(";")):
                run(statement)
            run("INSERT INTO secret VALUES (?)", (secrets.token_bytes(32),))
            run(f"PRAGMA user_version = {VERSION}")
        elif not upgraded(self.connection):
            raise OtherVersion(self._path)
        return 0

    # -- within a transaction --

    def _within(self, work: Callable[[], int]) -> int:
        """Do `work` in one transaction and return its result."""
        self.connection.execute("BEGIN IMMEDIATE")
        try:
            done = work()
            self.connection.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):
                self.connection.execute("ROLLBACK")
            self._known.clear()
            raise
        return done

    def _add(self, batch: Batch) -> int:
        run = self.connection.execute
        if (version := self._pragma("data_version")) != self._version:
            self._known, self._version = {}, version  # another process may have deleted a namespace
            self._forgotten = dict(run("SELECT digest, time FROM forgotten"))
        batch = self._remembered(batch) if self._forgotten else batch
        if not len(batch):
            return 0
        first = run(f"SELECT coalesce(max(last), 0) + 1 FROM packs WHERE last < {NO_ROW}").fetchone()[0]
        if self.older:
            first = max(first, newest_older(self.connection) + 1)
        for insertion, rows in (
            (statements.ADD_PACK, batch.packs(first, self._namespace, os.getpid())),
            (statements.ADD_DETAIL, batch.listed(first, self._namespace) if batch.details else []),
            (statements.ADD_DAY, batch.days()),
            (statements.ADD_HOUR, batch.hours()),
            (statements.ADD_SESSION, batch.sessions(first, self._namespace)),
        ):
            self._insert(insertion, rows)
        if batch.details:
            run("DELETE FROM details WHERE id <= ?", (first - DETAILED,))
        return len(batch)

    def _remembered(self, batch: Batch) -> Batch:
        """Return the rows of a batch but those that were to be forgotten before they were written."""
        return batch.since({name: self._forgotten.get(_digest(name), 0.0) for name in batch.namespaces()})

    def _insert(self, insertion: statements.Insertion, rows: Sequence[tuple[object, ...]]) -> None:
        """Add rows, many with each statement."""
        most, start = self._values // len(insertion.columns), 0
        while start < len(rows):
            size = next(size for size in statements.SIZES if size <= min(len(rows) - start, most))
            self.connection.execute(insertion.of(size), [*chain.from_iterable(rows[start : start + size])])
            start += size

    def _namespace(self, name: str) -> int:
        if name not in self._known:
            if len(self._known) >= KNOWN:
                self._known.clear()
            self.connection.execute("INSERT OR IGNORE INTO namespaces (name) VALUES (?)", (name,))
            [self._known[name]] = self.connection.execute(
                "SELECT id FROM namespaces WHERE name = ?", (name,)
            ).fetchone()
        return self._known[name]

    def _shrink(self) -> int:
        """Delete a share of all rows, the oldest, and return how many."""
        [first, last] = self.connection.execute("SELECT min(last), max(last) FROM packs").fetchone()
        if first is None:
            return 0
        leaving = self._oldest(min(int((last - first) * ROOM) + 1, LEAVING))
        for table, id in (("packs", "last"), ("details", "id"), ("sessions", "last_id")):
            self.connection.execute(f"DELETE FROM {table} WHERE {id} <= ?", (leaving[-1].last,))
        return sum(one.rows for one in leaving)

    def _delete_old(self, namespace: int, since: float, most: int) -> int:
        """Delete about so many rows of a namespace that are older than this, and return how many. Where the clock was
        ahead for a while, they need not be the first ones."""
        leaving = self._oldest(most, "WHERE namespace = ? AND newest < ?", namespace, since)
        run = self.connection.executemany
        run("DELETE FROM packs WHERE last = ?", ((one.last,) for one in leaving))
        ids = ((namespace, one.first, one.last) for one in leaving)
        run("DELETE FROM details WHERE namespace = ? AND id BETWEEN ? AND ?", ids)
        return sum(one.rows for one in leaving)

    def _oldest(self, rows: int, condition: str = "", *values: object) -> list[_Leaving]:
        """Return the oldest packs, until they have so many rows together."""
        found, count = list[_Leaving](), 0
        columns = "first, last, CAST(count AS INTEGER), CAST(newest AS REAL)"
        for one in self.connection.execute(f"SELECT {columns} FROM packs {condition} ORDER BY last", values):
            if count >= rows:
                break
            found.append(_Leaving(*one))
            count += found[-1].rows
        return found

    def _thin(self, table: str, keys: Sequence[str]) -> int:
        """Delete a share of the sums of the tenant that has most: the oldest, and then those of the fewest requests."""
        run, columns = self.connection.execute, ", ".join(keys)
        [most] = run(
            f"SELECT tenant_of(namespace) AS owner FROM {table} GROUP BY owner ORDER BY count(*) DESC, owner LIMIT 1"
        ).fetchone()
        return run(
            f"""DELETE FROM {table} WHERE ({columns}) IN (SELECT {columns} FROM {table} WHERE tenant_of(namespace) = ?
            ORDER BY {keys[0]}, requests LIMIT {max(self._sums // 4, 1)})""",
            (most,),
        ).rowcount

    def _drop_namespaces(self) -> int:
        """Delete the names of namespaces of which nothing else is left."""
        self._known.clear()
        if self.older:
            return 0
        return self.connection.execute(
            """DELETE FROM namespaces WHERE NOT EXISTS (SELECT 1 FROM packs WHERE namespace = namespaces.id)
            AND NOT EXISTS (SELECT 1 FROM sessions WHERE namespace = namespaces.id)
            AND name NOT IN (SELECT namespace FROM days) AND name NOT IN (SELECT namespace FROM hours)"""
        ).rowcount

    def _forget(self, name: str, now: float) -> int:
        run = self.connection.execute
        run("INSERT OR REPLACE INTO forgotten VALUES (?, ?)", (_digest(name), now))
        found = run("SELECT id FROM namespaces WHERE name = ?", (name,)).fetchone()
        if found is None:
            return 0
        namespace = found[0]
        [count] = run(f"SELECT {COUNT} FROM packs WHERE namespace = ?", (namespace,)).fetchone()
        for table in ("packs", "details", "sessions"):
            run(f"DELETE FROM {table} WHERE namespace = ?", (namespace,))
        run("DELETE FROM hours WHERE namespace = ?", (name,))
        run("DELETE FROM days WHERE namespace = ?", (name,))
        run("DELETE FROM namespaces WHERE id = ?", (namespace,))
        return int(count)

    def _pragma(self, name: str) -> int:
        [value] = self.connection.execute(f"PRAGMA {name}").fetchone()
        return int(value)


def _digest(namespace: str) -> bytes:
    """Return that by which a namespace is known that is to be forgotten."""
    return sha256(namespace.encode()).digest()
