"""The dashboard's file: plain tables in SQLite, written by every worker of a process group.

| table | a row for each |
|---|---|
| requests | request: the fields of its outcome, its session, and the tokens that were sent of each kind |
| details | request, the newest `DETAILED`: what became of its messages |
| sessions | session |
| sums | minute, hour or day, namespace and `KEYS` |
| fleet, fleet_sums, fleet_sessions | day of another replica, and its sums: see `fleet` |
| links | link that opens the dashboard once |
| forgotten | namespace that `store forget` deleted, for rows that other processes have yet to write |

A write-ahead log lets pages read while workers write. A worker waits up to `BUSY` seconds for another's transaction.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from hashlib import sha256
from operator import itemgetter
from pathlib import Path
from typing import TypeVar

from proxy.dashboard.recorded import DAY, SPANS, SUMS, SUMS_KEYS, Recorded, row_of, sessions_of, sums_of
from proxy.errors import DashboardFault
from proxy.telemetry.outcome import Outcome

T = TypeVar("T")

BUSY = 5.0
"""Seconds to wait for another process that writes. A batch takes some milliseconds."""

PAGE = 4096
"""Bytes of one page of the file."""

FULL, ROOM = 0.8, 0.05
"""The share of the allowed size above which the oldest rows are deleted, and the share of rows deleted at once."""

MOST_SUMS = 60_000
"""Most sums of each span, and at most one for two pages of the file. A client makes new ones with each model's name
that it invents."""

DETAILED = 20_000
"""Requests, the newest, whose messages are listed."""

REMEMBERED = 30 * DAY
"""Seconds for which a forgotten namespace is known: no process has a row that is older."""

_SESSION_SUMS = ("requests", "events", "reads", "tokens_before", "tokens_after", "cost_before", "cost_after")
_SESSION_NEWEST = ("last", "last_id", "holdout", "kind", "moved", "newest_before", "newest_after")
_SESSION_FIRST = ("namespace", "tenant", "model", "dialect", "began")

_REQUEST = ("time", "worker", "session", "kinds", *Outcome.__struct_fields__)
_SESSION = (*_SESSION_FIRST, *_SESSION_NEWEST, *_SESSION_SUMS)

FLEET_SUMS = (*SUMS_KEYS, *SUMS)
FLEET_SESSIONS = (
    "namespace", "tenant", "model", "holdout", "kind", "began", "last",
    "sessions", "requests", "known", "losses", "moved", "reads",
)  # fmt: skip
"""Sessions that began, and had their last request, in the same two hours. Of `known` ones the costs are known."""

FLEET: Mapping[str, Sequence[str]] = {
    "fleet": ("record", "name", "url", "time", "marker"),
    "fleet_sums": ("record", *FLEET_SUMS),
    "fleet_sessions": ("record", *FLEET_SESSIONS),
}

TABLES: Mapping[str, Sequence[str]] = {
    "requests": ("id INTEGER PRIMARY KEY AUTOINCREMENT", *_REQUEST),
    "details": ("id INTEGER PRIMARY KEY REFERENCES requests ON DELETE CASCADE", "detail"),
    "sessions": ("session INTEGER PRIMARY KEY", *_SESSION),
    "sums": (*SUMS_KEYS, *SUMS, f"PRIMARY KEY ({', '.join(SUMS_KEYS)})"),
    "forgotten": ("digest PRIMARY KEY", "time"),
    "secret": ("value", "exchanged"),
    "links": ("digest",),
    **FLEET,
}
"""Each table's columns."""

INDEXES = (
    "requests_by_time ON requests (time)",
    "requests_by_namespace ON requests (namespace, time)",
    "requests_by_session ON requests (session) WHERE session IS NOT NULL",
    "sessions_by_time ON sessions (last)",
    "sessions_by_namespace ON sessions (namespace, last)",
    "fleet_sums_by_record ON fleet_sums (record)",
    "fleet_sums_by_time ON fleet_sums (span, start)",
)

OURS = zlib.crc32(repr((TABLES, INDEXES)).encode()) >> 1
"""The `application_id` of a file with these tables (sqlite.org/pragma.html#pragma_application_id)."""


def insert(table: str, columns: Sequence[str], otherwise: str = "") -> str:
    """Return the statement that inserts a row of these columns."""
    return f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))}) {otherwise}"


def _adding(columns: Sequence[str]) -> str:
    return f"ON CONFLICT DO UPDATE SET {', '.join(f'{name} = {name} + excluded.{name}' for name in columns)}"


_NEWER = ", ".join(f"{name} = excluded.{name}" for name in _SESSION_NEWEST)
_ADD_REQUEST = insert("requests", ("id", *_REQUEST))
_ADD_SESSION = insert("sessions", ("session", *_SESSION), f"{_adding(_SESSION_SUMS)}, {_NEWER}")
_ADD_SUM = insert("sums", (*SUMS_KEYS, *SUMS), _adding(SUMS))


class Rows:
    """One connection that writes, for one thread. Raises DashboardFault if the file cannot be used, and
    `sqlite3.Error`."""

    def __init__(self, path: Path, size: int) -> None:
        self._pages = max(size // PAGE, 64)
        _create(path)
        self.connection = sqlite3.connect(path, timeout=BUSY, isolation_level=None, check_same_thread=False)
        try:
            self._prepare(path)
        except sqlite3.OperationalError:
            self.close()
            raise
        except (sqlite3.DatabaseError, DashboardFault) as error:
            self.close()
            raise DashboardFault(f"{path} is no file of a dashboard ({error}): name another, or delete it") from error

    def close(self) -> None:
        self.connection.close()

    def secret(self) -> bytes:
        """Return random bytes that all processes with this file share."""
        [value] = self.connection.execute("SELECT value FROM secret").fetchone()
        return bytes(value)

    def set_link(self, code: str) -> bool:
        """Let this code open the dashboard once, and no earlier one."""
        self.connection.execute("DELETE FROM links")
        return self.connection.execute("INSERT INTO links VALUES (?)", (digest(code),)).rowcount == 1

    def use_link(self, code: str) -> bool:
        """Return whether this code opens the dashboard. It does not open it again."""
        return self.connection.execute("DELETE FROM links WHERE digest = ?", (digest(code),)).rowcount == 1

    def write(self, recorded: Sequence[Recorded]) -> int:
        """Add rows, except those that were to be forgotten, and return how many. Makes room first."""
        self.trim()
        return self.within(partial(self._add, recorded))

    def trim(self) -> None:
        """Delete too many sums and the oldest rows while the file is nearly full."""
        if self._used() > FULL * self._pages:
            self._limit_sums()
        while self._used() > FULL * self._pages and self.within(self._shrink):
            pass

    def expire(self, retention: Callable[[str], float], now: float) -> None:
        """Delete rows that are older than their namespace's retention, in seconds, and too many sums."""
        run = self.connection.execute
        for namespace in self.namespaces():
            old = namespace, now - retention(namespace)
            run("DELETE FROM requests WHERE namespace = ? AND time < ?", old)
            for sessions in ("sessions", "fleet_sessions"):
                run(f"DELETE FROM {sessions} WHERE namespace = ? AND last < ?", old)
            for sums in ("sums", "fleet_sums"):
                run(f"DELETE FROM {sums} WHERE namespace = ? AND start + span <= ?", old)
        for span, kept in SPANS.items():
            run("DELETE FROM sums WHERE span = ? AND start < ?", (span, now - kept))
        self._limit_sums()
        run("DELETE FROM forgotten WHERE time < ?", (now - REMEMBERED,))
        run("UPDATE forgotten SET time = ?1 WHERE time > ?1", (now,))  # the clock was set back: what comes now is new

    def count(self, namespace: str) -> int | None:
        """Return how many requests of a namespace there are; None if there are not even sums of it."""
        query = "SELECT count(*), (SELECT count(*) FROM sums WHERE namespace = ?1) FROM requests WHERE namespace = ?1"
        count, sums = self.connection.execute(query, (namespace,)).fetchone()
        return int(count) if count or sums else None

    def forget(self, namespace: str, now: float) -> int:
        """Delete everything about a namespace, so that not even free pages of the file have it, and tell all processes
        not to write what they have of it so far. Returns how many requests were deleted."""
        self.connection.execute("PRAGMA secure_delete = ON")
        gone = self.within(partial(self.drop, namespace, now))
        self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        return gone

    def _limit_sums(self) -> None:
        for span in SPANS:
            while self.within(partial(self._thin, span)):
                pass

    # -- opening --

    def _prepare(self, path: Path) -> None:
        run = self.connection.execute
        if self._pragma("schema_version") and self._pragma("application_id") != OURS:
            raise DashboardFault("it has other tables")
        run("PRAGMA foreign_keys = ON")
        run(f"PRAGMA page_size = {PAGE}")
        if run("PRAGMA journal_mode = WAL").fetchone()[0] != "wal":
            raise DashboardFault("SQLite's write-ahead log needs a local disk")
        run("PRAGMA synchronous = NORMAL")
        run("PRAGMA journal_size_limit = 16777216")
        run(f"PRAGMA max_page_count = {self._pages}").fetchone()
        self.within(self._create_tables)

    def _create_tables(self) -> int:
        run = self.connection.execute
        run(f"PRAGMA application_id = {OURS}")
        for table, columns in TABLES.items():
            kind = "WITHOUT ROWID" if table == "sums" else ""
            run(f"CREATE TABLE IF NOT EXISTS {table} ({', '.join(columns)}) {kind}")
        for index in INDEXES:
            run(f"CREATE INDEX IF NOT EXISTS {index}")
        if not run("SELECT count(*) FROM secret").fetchone()[0]:
            run("INSERT INTO secret VALUES (?, 0)", (secrets.token_bytes(32),))
        return 0

    # -- within a transaction --

    def within(self, work: Callable[[], T]) -> T:
        """Do `work` in one transaction and return its result."""
        self.connection.execute("BEGIN IMMEDIATE")
        try:
            done = work()
            self.connection.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):
                self.connection.execute("ROLLBACK")
            raise
        return done

    def _add(self, recorded: Sequence[Recorded]) -> int:
        run, many = self.connection.execute, self.connection.executemany
        forgotten = dict(run("SELECT digest, time FROM forgotten"))
        if forgotten:
            recorded = [one for one in recorded if one.time > forgotten.get(digest(one.outcome.namespace), 0.0)]
        if not recorded:
            return 0
        [newest] = run("SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = 'requests'").fetchone()
        rows = [row_of(id, one) for id, one in enumerate(recorded, newest + 1)]
        details = [(row["id"], one.detail) for row, one in zip(rows, recorded, strict=True) if one.detail]
        many(_ADD_REQUEST, map(itemgetter("id", *_REQUEST), rows))
        many(insert("details", ("id", "detail")), details)
        many(_ADD_SESSION, map(itemgetter("session", *_SESSION), sessions_of(rows)))
        many(_ADD_SUM, sums_of(rows))
        run("DELETE FROM details WHERE id <= ?", (rows[-1]["id"] - DETAILED,))
        return len(rows)

    def _shrink(self) -> int:
        """Delete a share of all rows, the oldest, and return how many."""
        first, last = self.connection.execute("SELECT min(id), max(id) FROM requests").fetchone()
        if first is None:
            return 0
        leaving = first + int((last - first) * ROOM)
        self.connection.execute("DELETE FROM sessions WHERE last_id <= ?", (leaving,))
        return self.connection.execute("DELETE FROM requests WHERE id <= ?", (leaving,)).rowcount

    def _thin(self, span: int) -> int:
        """Where there are too many sums, delete the oldest and smallest of the tenant that has most, and return how
        many: what one tenant invents costs no other one's sums."""
        run, most = self.connection.execute, self.most_sums
        if run("SELECT count(*) FROM sums WHERE span = ?", (span,)).fetchone()[0] <= most:
            return 0
        largest = "SELECT tenant FROM sums WHERE span = ?1 GROUP BY tenant ORDER BY count(*) DESC, tenant LIMIT 1"
        keys = ", ".join(SUMS_KEYS)
        return run(
            f"""DELETE FROM sums WHERE ({keys}) IN (SELECT {keys} FROM sums WHERE span = ?1 AND tenant = ({largest})
            ORDER BY start, requests LIMIT ?2)""",
            (span, max(most // 4, 1)),
        ).rowcount

    def drop(self, namespace: str, now: float) -> int:
        """Delete everything about a namespace, and return how many requests that were. Rows from before `now` that come
        later are not written."""
        run = self.connection.execute
        run("INSERT OR REPLACE INTO forgotten VALUES (?, ?)", (digest(namespace), now))
        for table in ("fleet_sums", "fleet_sessions", "sessions", "sums", "requests"):
            gone = run(f"DELETE FROM {table} WHERE namespace = ?", (namespace,)).rowcount
        return gone

    def namespaces(self) -> list[str]:
        """Return the namespaces of which there is anything."""
        tables = ("requests", "sessions", "sums", "fleet_sums")
        found = self.connection.execute(" UNION ".join(f"SELECT namespace FROM {table}" for table in tables))
        return [namespace for (namespace,) in found.fetchall()]

    @property
    def most_sums(self) -> int:
        """The most sums of each span, and of all other replicas."""
        return min(MOST_SUMS, self._pages // 2)

    def _used(self) -> int:
        return self._pragma("page_count") - self._pragma("freelist_count")

    def _pragma(self, name: str) -> int:
        [value] = self.connection.execute(f"PRAGMA {name}").fetchone()
        return int(value)


def digest(name: str) -> bytes:
    """Return that by which a name is known that the file is not to have."""
    return sha256(name.encode()).digest()


def _create(path: Path) -> None:
    """Create the file if there is none, for its owner alone. Raises DashboardFault.

    One that is there is not opened: closing it would end the locks that this process has on it
    (sqlite.org/howtocorrupt.html, 2.2).
    """
    try:
        if not os.path.lexists(path):
            path.touch(0o600)
        if path.is_symlink() or not path.is_file():
            raise DashboardFault(f"{path} is no regular file: name another")
        path.chmod(0o600)
    except OSError as error:
        raise DashboardFault(f"{path} cannot be written: {error.strerror}") from error
