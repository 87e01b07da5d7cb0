"""The dashboard's file: plain tables in SQLite, written by every worker of a process group.

| table | a row for each |
|---|---|
| requests | request: the fields of its outcome, its session, and the tokens that were sent of each kind |
| details | request, the newest `DETAILED`: what became of its messages |
| sessions | session |
| sums | minute, hour or day, namespace and `KEYS` |
| fleet, fleet_sums, fleet_sessions | day of another replica, and its sums: see `fleet` |
| secret | file: random bytes, when sums were last exchanged, and the digest of the link that opens the dashboard once |
| forgotten | namespace that `store forget` deleted, for rows that other processes have yet to write |

A write-ahead log lets pages read while workers write. A worker waits up to `BUSY` seconds for
another's transaction.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from errno import EACCES
from hashlib import sha256
from operator import add, itemgetter
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from proxy.errors import DashboardFault
from proxy.plan.prices import DEARER
from proxy.telemetry.outcome import Kind, Outcome

T = TypeVar("T")
Row = dict[str, Any]

MINUTE = 60
HOUR = 3600
DAY = 86_400

SPANS = {MINUTE: 2 * HOUR, HOUR: 8 * DAY, DAY: 31 * DAY}
"""Sums are kept by these spans, each for so many seconds. A tenant's retention may be shorter."""

BUSY = 5.0
"""Seconds to wait for another process that writes. A batch takes some milliseconds."""

PAGE = 4096
"""Bytes of one page of the file."""

FULL = 0.8
ROOM = 0.05
"""The share of the allowed size above which the oldest rows are deleted, and the share of rows
deleted at once."""

MOST_SUMS = 60_000
"""Most sums of each span, and at most one for two pages of the file. A client makes new ones with
each model's name that it invents."""

DETAILED = 20_000
"""Requests, the newest, whose messages are listed."""

REMEMBERED = 30 * DAY
"""Seconds for which a forgotten namespace is known: no process has a row that is older."""

TEXTS = ("method", "path", "model", "obstacle", "detail")
"""Fields of an outcome that the client or upstream worded."""

LONGEST_TEXT = 200
"""Most characters of those."""

MOST = 10**12
"""The most that a number counts for, as in the metrics: upstream may report any."""

KEYS = ("tenant", "model", "dialect", "kind", "usage", "holdout", "miss")
"""Fields of an outcome by which sums are kept apart, beside the namespace."""

SUMS_KEYS = ("span", "start", "namespace", *KEYS)
"""The columns by which sums are kept apart."""

_FIELDS = msgspec.structs.fields(Outcome)

SUMMED = tuple(
    one.name
    for one in _FIELDS
    if one.type in (int, bool) and one.name not in ("stream", "status", "messages", "events")
)
"""Fields of an outcome that are added up."""

SUMS = ("requests", "faults", "losses", "reads", "retrieved_tokens", *SUMMED)
"""The columns of sums: requests, those that went wrong, those that were dearer than as they came,
calls of our tools, the tokens that these read back, and the sums of fields."""

NESTED = tuple(
    one.name for one in _FIELDS if one.default in ((), msgspec.NODEFAULT) and not one.required
)
"""Fields of an outcome that are no numbers or texts. The file has their JSON."""

_REQUEST = ("time", "worker", "session", "kinds", *Outcome.__struct_fields__)
_SESSION_SUMS = (
    "requests",
    "events",
    "reads",
    "tokens_before",
    "tokens_after",
    "cost_before",
    "cost_after",
)
_SESSION_NEWEST = ("last", "last_id", "holdout", "kind", "moved", "newest_before", "newest_after")
_SESSION_LARGEST = ("largest_before", "largest_after")
_SESSION_NAMES = ("session", "namespace", "tenant", "model", "dialect", "began")
_SESSION = (*_SESSION_NAMES, *_SESSION_NEWEST, *_SESSION_LARGEST, *_SESSION_SUMS)

FLEET_SUMS = (*SUMS_KEYS, *SUMS)
FLEET_SESSIONS = (
    "namespace", "tenant", "model", "holdout", "kind", "began", "last",
    "sessions", "requests", "known", "losses", "moved", "reads", "largest_before", "largest_after",
)  # fmt: skip
"""Sessions that began, and had their last request, in the same two hours. Of `known` ones the costs
are known, and `losses` of them were dearer. The largest prompt of them all is as it came, and as it
was sent."""

TABLES: Mapping[str, Sequence[str]] = {
    "requests": ("id INTEGER PRIMARY KEY AUTOINCREMENT", *_REQUEST),
    "details": ("id INTEGER PRIMARY KEY REFERENCES requests ON DELETE CASCADE", "detail"),
    "sessions": ("session INTEGER PRIMARY KEY", *_SESSION[1:]),
    "sums": (*SUMS_KEYS, *SUMS, f"PRIMARY KEY ({', '.join(SUMS_KEYS)})"),
    "forgotten": ("digest PRIMARY KEY", "time"),
    "secret": ("value", "exchanged", "link"),
    "fleet": ("record PRIMARY KEY", "name", "url", "time"),
    "fleet_sums": ("record REFERENCES fleet ON DELETE CASCADE", *FLEET_SUMS),
    "fleet_sessions": ("record REFERENCES fleet ON DELETE CASCADE", *FLEET_SESSIONS),
}
"""Each table's columns."""

INDEXES = (
    "requests_by_time ON requests (time)",
    "requests_by_namespace ON requests (namespace, time)",
    "requests_by_session ON requests (session) WHERE session IS NOT NULL",
    "sessions_by_time ON sessions (last)",
    "sessions_by_namespace ON sessions (namespace, last)",
    "fleet_sums_by_record ON fleet_sums (record)",
    "fleet_sessions_by_record ON fleet_sessions (record)",
    "fleet_sums_by_time ON fleet_sums (span, start)",
)

OURS = zlib.crc32(repr((TABLES, INDEXES)).encode()) >> 1
"""The `application_id` of a file with these tables
(sqlite.org/pragma.html#pragma_application_id)."""


def insert(
    table: str,
    columns: Sequence[str],
    added: Sequence[str] = (),
    replaced: Sequence[str] = (),
    largest: Sequence[str] = (),
) -> str:
    """Return the statement that inserts a row of these columns. If it is there, some are `added`
    to, some are `replaced`, and of some the `largest` value stays."""
    changes = [f"{name} = {name} + excluded.{name}" for name in added]
    changes += [f"{name} = excluded.{name}" for name in replaced]
    changes += [f"{name} = max({name}, excluded.{name})" for name in largest]
    statement = (
        f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"
    )
    return f"{statement} ON CONFLICT DO UPDATE SET {', '.join(changes)}" if changes else statement


_ADD_REQUEST = insert("requests", ("id", *_REQUEST))
_ADD_DETAIL = insert("details", ("id", "detail"))
_ADD_SESSION = insert("sessions", _SESSION, _SESSION_SUMS, _SESSION_NEWEST, _SESSION_LARGEST)
_ADD_SUM = insert("sums", (*SUMS_KEYS, *SUMS), SUMS)
_request = itemgetter("id", *_REQUEST)
_session = itemgetter(*_SESSION)
_keys = itemgetter("namespace", *KEYS)
_sums = itemgetter(*SUMS)


class Recorded(msgspec.Struct, frozen=True):
    """A request that ended: when, in seconds since the epoch, how, and what it shows beside its
    outcome."""

    time: float
    outcome: Outcome
    session: int | None = None
    """Identifies its session, in 63 bits; None if it has no history."""
    kinds: Sequence[int] | None = None
    """The tokens that were sent of each of `describe.KINDS`."""
    detail: bytes | None = None
    """What became of its messages: see `describe`."""


def _row(id: int, recorded: Recorded) -> Row:
    """Return a request's values as SQLite can have them, with those by which it counts in sums."""
    outcome = recorded.outcome
    row: Row = msgspec.to_builtins(outcome)
    for name in TEXTS:
        text = row[name]
        if len(text) > LONGEST_TEXT or not text.isascii():
            row[name] = text[:LONGEST_TEXT].encode("utf-8", "replace").decode()
    for name in SUMMED:
        if not -MOST <= row[name] <= MOST:
            row[name] = MOST if row[name] > 0 else -MOST
    for name in NESTED:
        row[name] = msgspec.json.encode(row[name]).decode() if row[name] else ""
    row["id"] = id
    row["time"] = recorded.time
    row["worker"] = os.getpid()
    row["session"] = recorded.session
    row["kinds"] = msgspec.json.encode(recorded.kinds).decode() if recorded.kinds else ""
    row["requests"] = 1
    row["faults"] = int(bool(outcome.fault))
    row["losses"] = int(
        outcome.kind != Kind.SUMMARY and outcome.cost_after > outcome.cost_before * DEARER
    )
    row["reads"] = sum(use.calls for use in outcome.tool_uses)
    row["retrieved_tokens"] = min(sum(use.tokens for use in outcome.tool_uses), MOST)
    return row


def _sums_of(rows: Iterable[Row]) -> list[tuple[Any, ...]]:
    """Return what requests add to the sums of minutes, hours and days."""
    found: dict[tuple[Any, ...], list[int]] = {}
    for row in rows:
        amounts = [*_sums(row)]
        if (
            row["kind"] == Kind.OBSERVED and row["status"] != 200
        ):  # as in the metrics: nothing was planned for its reply
            amounts[2:] = [0] * (len(SUMS) - 2)
        for span in SPANS:
            key = span, int(row["time"] // span * span), *_keys(row)
            found[key] = [*map(add, found[key], amounts)] if key in found else amounts
    return [(*key, *amounts) for key, amounts in found.items()]


def _as_session(row: Row) -> tuple[Any, ...]:
    """Return what a request adds to its session."""
    began_and_last = {
        "began": row["time"],
        "last": row["time"],
        "last_id": row["id"],
        "events": row["new_event"],
    }
    newest = {
        "newest_before": row["tokens_before"],
        "newest_after": row["tokens_after"],
        "moved": row["compacted"],
    }
    largest = {"largest_before": row["tokens_before"], "largest_after": row["tokens_after"]}
    amounts: tuple[Any, ...] = _session(row | began_and_last | newest | largest)
    return amounts


class Rows:
    """One connection that writes, for one thread. Raises DashboardFault if the file cannot be used,
    and `sqlite3.Error`."""

    def __init__(self, path: Path, size: int) -> None:
        self._pages = max(size // PAGE, 64)
        self.most_sums = min(MOST_SUMS, self._pages // 2)
        """The most sums of each span, and of all other replicas."""
        _create(path)
        self.connection = sqlite3.connect(
            path, timeout=BUSY, isolation_level=None, check_same_thread=False
        )
        self.close = self.connection.close
        try:
            self._prepare(path)
        except sqlite3.OperationalError:
            self.close()
            raise
        except OSError as error:
            self.close()
            raise _unwritable(path, error) from error
        except (sqlite3.DatabaseError, DashboardFault) as error:
            self.close()
            why = f"{path} is not a dashboard file of this version ({error}): name another, or delete it"
            raise DashboardFault(why) from error

    def _prepare(self, path: Path) -> None:
        run = self.connection.execute
        if self._pragma("schema_version") and self._pragma("application_id") != OURS:
            raise DashboardFault("it has other tables")
        path.chmod(0o600)  # not before it is known to be ours
        run("PRAGMA foreign_keys = ON")
        run(f"PRAGMA page_size = {PAGE}")
        if run("PRAGMA journal_mode = WAL").fetchone()[0] != "wal":
            raise DashboardFault("SQLite's write-ahead log needs a local disk")
        run("PRAGMA synchronous = NORMAL")
        run("PRAGMA journal_size_limit = 16777216")
        run(f"PRAGMA max_page_count = {self._pages}").fetchone()

        def create() -> None:
            run(f"PRAGMA application_id = {OURS}")
            for table, columns in TABLES.items():
                kind = "WITHOUT ROWID" if table == "sums" else ""
                run(f"CREATE TABLE IF NOT EXISTS {table} ({', '.join(columns)}) {kind}")
            for index in INDEXES:
                run(f"CREATE INDEX IF NOT EXISTS {index}")
            if not run("SELECT count(*) FROM secret").fetchone()[0]:
                run("INSERT INTO secret VALUES (?, 0, NULL)", (secrets.token_bytes(32),))

        self.within(create)

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

    def secret(self) -> bytes:
        """Return random bytes that all processes with this file share. Raises DashboardFault if the
        file is damaged there."""
        [value] = self.connection.execute("SELECT value FROM secret").fetchone()
        if not isinstance(value, bytes):
            raise DashboardFault("its file is damaged: delete it")
        return value

    # -- what comes --

    def write(self, recorded: Sequence[Recorded]) -> int:
        """Add rows, except those that were to be forgotten, and return how many. While the file is
        nearly full, too many sums and the oldest rows make room."""
        if self._nearly_full():
            self._limit_sums()
        while self._nearly_full() and self.within(self._shrink):
            pass
        return self.within(lambda: self._add(recorded))

    def _add(self, recorded: Sequence[Recorded]) -> int:
        run = self.connection.execute
        many = self.connection.executemany
        forgotten = dict(run("SELECT digest, time FROM forgotten"))
        if forgotten:
            recorded = [
                one
                for one in recorded
                if one.time > forgotten.get(digest(one.outcome.namespace), 0.0)
            ]
        if not recorded:
            return 0
        [newest] = run(
            "SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = 'requests'"
        ).fetchone()
        rows = [_row(id, one) for id, one in enumerate(recorded, newest + 1)]
        many(_ADD_REQUEST, map(_request, rows))
        many(
            _ADD_DETAIL,
            [(id, one.detail) for id, one in enumerate(recorded, newest + 1) if one.detail],
        )
        many(_ADD_SESSION, [_as_session(row) for row in rows if row["session"] is not None])
        many(_ADD_SUM, _sums_of(rows))
        run("DELETE FROM details WHERE id <= ?", (newest + len(rows) - DETAILED,))
        return len(rows)

    # -- what leaves --

    def _nearly_full(self) -> bool:
        return self._pragma("page_count") - self._pragma("freelist_count") > FULL * self._pages

    def _shrink(self) -> int:
        """Delete a share of all rows, the oldest, and return how many."""
        first, last = self.connection.execute("SELECT min(id), max(id) FROM requests").fetchone()
        if first is None:
            return 0
        leaving = first + int((last - first) * ROOM)
        self.connection.execute("DELETE FROM sessions WHERE last_id <= ?", (leaving,))
        return self.connection.execute("DELETE FROM requests WHERE id <= ?", (leaving,)).rowcount

    def _limit_sums(self) -> None:
        """Where there are too many sums, delete the oldest and smallest of the tenants that have
        most: what one tenant invents costs no other one's sums."""
        run = self.connection.execute
        keys = ", ".join(SUMS_KEYS)
        places = "row_number() OVER (PARTITION BY tenant ORDER BY start DESC, requests DESC)"
        most = f"SELECT {keys} FROM sums WHERE span = ? ORDER BY {places} LIMIT -1 OFFSET ?"
        for span in SPANS:
            if (
                run("SELECT count(*) FROM sums WHERE span = ?", (span,)).fetchone()[0]
                > self.most_sums
            ):
                run(f"DELETE FROM sums WHERE ({keys}) IN ({most})", (span, self.most_sums * 3 // 4))

    def expire(self, retention: Callable[[str], float], now: float) -> None:
        """Delete rows that are older than their namespace's retention, in seconds, and too many
        sums."""
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
        # the clock was set back: what comes now is new
        run("UPDATE forgotten SET time = ?1 WHERE time > ?1", (now,))

    def count(self, namespace: str) -> int | None:
        """Return how many requests of a namespace there are; None if there are not even sums of
        it."""
        query = "SELECT count(*), (SELECT count(*) FROM sums WHERE namespace = ?1) FROM requests WHERE namespace = ?1"
        count, sums = self.connection.execute(query, (namespace,)).fetchone()
        return int(count) if count or sums else None

    def forget(self, namespace: str, now: float) -> int:
        """Delete everything about a namespace, so that not even the log of the file has it, and
        tell all processes not to write what they have of it so far. Returns how many requests were
        deleted."""
        gone = self.within(lambda: self.drop(digest(namespace), now))
        self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        return gone

    def drop(self, known: bytes, now: float) -> int:
        """Within a transaction, delete everything about the namespace with this digest, and
        overwrite it in the file. Rows from before `now` that come later are not written. Returns
        how many requests were deleted."""
        run = self.connection.execute
        gone = 0
        run("PRAGMA secure_delete = ON")
        run("INSERT OR REPLACE INTO forgotten VALUES (?, ?)", (known, now))
        for namespace in self.namespaces():
            if digest(namespace) == known:
                for table in ("fleet_sums", "fleet_sessions", "sessions", "sums", "requests"):
                    gone = run(f"DELETE FROM {table} WHERE namespace = ?", (namespace,)).rowcount
        return gone

    def namespaces(self) -> list[str]:
        """Return the namespaces of which there is anything."""
        tables = ("requests", "sessions", "sums", "fleet_sums")
        found = self.connection.execute(
            " UNION ".join(f"SELECT namespace FROM {table}" for table in tables)
        )
        return [namespace for (namespace,) in found.fetchall()]

    def _pragma(self, name: str) -> int:
        return int(self.connection.execute(f"PRAGMA {name}").fetchone()[0])


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
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.touch(0o600)
        if path.is_symlink() or not path.is_file():
            raise DashboardFault(f"{path} is no regular file: name another")
        if not os.access(path, os.R_OK | os.W_OK):
            raise PermissionError(EACCES, os.strerror(EACCES))
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> DashboardFault:
    return DashboardFault(f"{path} cannot be written: {error.strerror}")
