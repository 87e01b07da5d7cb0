"""Rows of earlier versions, which were rows of SQLite, one for each request. They are packed by and by."""

from __future__ import annotations

import sqlite3
from contextlib import suppress
from typing import Any

import msgspec

from proxy.dashboard.packs import SPAN, pack
from proxy.dashboard.rows import HOUR, NO_ROW, STORED, Damaged, completed, converted, table, unpacked
from proxy.dashboard.statements import ADD_PACK

OLDER = """
CREATE TABLE older (
    id INTEGER PRIMARY KEY, time REAL NOT NULL, namespace INTEGER NOT NULL, session INTEGER, worker INTEGER NOT NULL,
    outcome BLOB NOT NULL, sent BLOB
);
"""
"""Where they are. It was `requests`, and still is for the process of an earlier version that has the file open: it
would go on giving ids, which are given to rows in packs, too. So it finds no table: its rows wait, and
those that still wait when it ends are only in the log."""

_KIND = STORED.index("kind")


class _Row(msgspec.Struct, array_like=True, frozen=True):
    id: int
    time: float
    namespace: int
    session: int | None
    worker: int
    outcome: bytes
    sent: bytes | None


def has_older(connection: sqlite3.Connection) -> bool:
    """Return whether there may be any that are still to be packed."""
    return _has(connection, "older")


def begin_older(connection: sqlite3.Connection) -> None:
    """Take the table from processes of earlier versions, within the caller's transaction."""
    if _has(connection, "requests"):
        connection.execute("ALTER TABLE requests RENAME TO older")


def newest_older(connection: sqlite3.Connection) -> int:
    """Return the id of the newest of them; 0 if there are none left."""
    if not has_older(connection):
        return 0
    return int(connection.execute(f"SELECT coalesce(max(id), 0) FROM older WHERE id < {NO_ROW}").fetchone()[0])


def move_older(connection: sqlite3.Connection) -> int:
    """Pack the newest of them, whose ids fit into a pack, within the caller's transaction, but those that are damaged.

    Returns how many there were; 0 if there are none left. More at once would keep requests waiting: functions of C
    handle them, which let no other thread in between.
    """
    run = connection.execute
    if not has_older(connection):
        return 0
    columns = ", ".join(_Row.__struct_fields__)
    first = f"SELECT min(max(id), max(id) / {SPAN} * {SPAN}) FROM older"
    found = run(f"SELECT {columns} FROM older WHERE id >= ({first}) ORDER BY id DESC").fetchall()
    if not found:
        run("DROP TABLE older")
        return 0
    ids = found[-1][0], found[0][0]
    namespace = "coalesce((SELECT namespace FROM older WHERE older.id = details.id), 0)"
    run(f"UPDATE details SET namespace = {namespace} WHERE id BETWEEN ? AND ?", ids)
    run("DELETE FROM older WHERE id BETWEEN ? AND ?", ids)
    groups: dict[tuple[float, ...], list[tuple[_Row, tuple[Any, ...]]]] = {}
    for values in reversed(found):
        with suppress(Damaged):
            row = converted(values, _Row)
            outcome = tuple(completed(unpacked(row.outcome, list[Any])))
            alike = row.namespace, row.worker, row.time // HOUR, len(outcome)  # they leave together
            groups.setdefault(alike, []).append((row, outcome))
    for group in groups.values():
        rows, outcomes = zip(*group, strict=True)
        _, times, _, sessions, _, _, sent = zip(*map(msgspec.structs.astuple, rows), strict=True)
        # What is written has the namespace's number, and ids instead of places in a batch.
        one = pack("", [row.id for row in rows], times, table(outcomes), sessions, sent)
        run(ADD_PACK.of(1), one.written(0, rows[0].namespace, rows[0].worker))
        kinds = [(str(outcome[_KIND]), row.session, row.id) for row, outcome in group]
        connection.executemany("UPDATE sessions SET kind = ? WHERE session = ? AND last_id = ?", kinds)
    return len(found)


def _has(connection: sqlite3.Connection, name: str) -> bool:
    return bool(connection.execute("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?", (name,)).fetchall())
