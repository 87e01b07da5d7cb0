"""What becomes of a file of another version of the proxy: it gets what is missing, or makes place for a new one.

A column that is missing is added with its default, and rows that are not packed are packed by and by. Where that does
not do, the file is renamed, and its rows are no longer shown.
"""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing, suppress
from pathlib import Path

from proxy.dashboard.older import OLDER, begin_older, has_older, move_older
from proxy.dashboard.rows import SCHEMA

VERSION = 3
"""Raised when rows that were written before can no longer be read, or those written from now on by earlier versions."""

READABLE = frozenset({VERSION, 2, 1835354122})
"""The versions whose rows can be read. Those of version 2 were not packed. The last one is the first version, and had
all of an outcome's fields but those of `rows.ADDED`."""

OURS = frozenset({"secret", "namespaces", "details", "sessions"})
"""Tables by which a file of any version is known to be a dashboard's."""

WAIT = 5.0
"""Seconds to wait for another process that does the same."""

Columns = dict[str, tuple[str, int, str | None, int]]


def upgraded(connection: sqlite3.Connection) -> bool:
    """Add what a file lacks, within the caller's transaction. Returns False if that does not do."""
    if _version(connection) not in READABLE:
        return False
    begin_older(connection)
    with closing(sqlite3.connect(":memory:")) as wanted:
        wanted.executescript(SCHEMA + OLDER if has_older(connection) else SCHEMA)
        parts = wanted.execute("SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
        for kind, name, sql in parts:
            if kind == "table" and not _with_columns(connection, name, sql, _columns(wanted, name)):
                return False
        found = dict(connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'index'"))
        for kind, name, sql in parts:
            if kind == "index" and found.get(name) != sql:
                connection.execute(f"DROP INDEX IF EXISTS {name}")
                connection.execute(sql)
    connection.execute(f"PRAGMA user_version = {VERSION}")
    move_older(connection)  # the newest ones, after which streams go on
    return True


def set_aside(path: Path) -> Path | None:
    """Rename a dashboard's file of another version, and return its new name.

    Returns None if nothing was renamed: it is no dashboard's, it is in use, or another process has just done so.
    """
    old = aside(path)
    with closing(sqlite3.connect(path, timeout=WAIT, isolation_level=None)) as connection:
        try:
            began = os.stat(path).st_ino
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            if not tables >= OURS:
                return None
            # Without a log beside it, the file is all there is to rename, and closing it deletes nothing.
            if connection.execute("PRAGMA journal_mode = DELETE").fetchone()[0] != "delete":
                return None
            connection.execute("BEGIN EXCLUSIVE")
            if os.stat(path).st_ino != began or upgraded(connection):
                return None
            os.replace(path, old)
        except (sqlite3.Error, OSError):
            return None
    return old


def aside(path: Path) -> Path:
    """Return the name that a file of another version gets."""
    return path.with_name(f"{path.name}.old")


def expire(path: Path, before: float) -> None:
    """Delete the file that was set aside, if that was before this time."""
    old = aside(path)
    with suppress(OSError):
        if old.stat().st_mtime < before:
            old.unlink()


def _with_columns(connection: sqlite3.Connection, table: str, sql: str, wanted: Columns) -> bool:
    """Create a table or add the columns that it lacks. Returns False if new rows would not fit into it."""
    found = _columns(connection, table)
    if not found:
        connection.execute(sql)
        return True
    keys = {name: key for name, (_, _, _, key) in found.items() if key}
    if keys != {name: key for name, (_, _, _, key) in wanted.items() if key}:
        return False
    if any(filled and default is None for name, (_, filled, default, _) in found.items() if name not in wanted):
        return False
    for name, (kind, filled, _, _) in wanted.items():
        if name not in found:
            default = {"TEXT": "''", "BLOB": "x''"}.get(kind, "0")
            rule = f"NOT NULL DEFAULT {default}" if filled else ""
            connection.execute(f"ALTER TABLE {table} ADD COLUMN {name} {kind} {rule}")
    return True


def _columns(connection: sqlite3.Connection, table: str) -> Columns:
    """Return each column's type, whether it must have a value, its default, and its place in the primary key."""
    rows = connection.execute(f"PRAGMA table_info({table})")
    return {name: (kind, filled, default, key) for _, name, kind, filled, default, key in rows}


def _version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])
