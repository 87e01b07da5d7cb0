"""`store forget`: deletes everything that is kept of a namespace, in any kind of store and beside it."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
import time
from contextlib import closing
from typing import NamedTuple

from proxy.cli import store
from proxy.cli.words import several
from proxy.dashboard import fleet
from proxy.dashboard.rows import Rows
from proxy.errors import DashboardFault, UserMistake
from proxy.requests import capture
from proxy.settings import Settings
from proxy.stores import Store, is_part

AT_ONCE = 32
"""Records that are deleted at once."""
SETTLED = 2.0
"""Seconds until a second look for what a proxy was still writing."""


class Kept(NamedTuple):
    """How much is kept of a namespace. `rows` is None if the dashboard has neither rows nor sums."""

    records: int
    files: int
    rows: int | None

    def __bool__(self) -> bool:
        return bool(self.records or self.files or self.rows is not None)

    def __str__(self) -> str:
        rows = "" if self.rows is None else f", {several(self.rows, 'row')} of the dashboard and their sums"
        return f"{several(self.records, 'record')}, {several(self.files, 'file')} of captured requests{rows}"


def forget(settings: Settings, namespace: str, *, sure: bool) -> int:
    """Delete all that is kept of a namespace, and say what that was; ask first, unless `sure`.

    Returns the exit code: 1 if there is nothing, if the answer was no, or if more may come. No request waits until the
    texts that it moved are stored, so a proxy may go on writing after the caller's last one. Raises UserMistake and
    StoreFault.
    """
    if not is_part(namespace):
        raise UserMistake(f"{namespace!r}: expected a namespace, as `store ls` lists them")
    kept = _kept(settings, namespace, delete=False)
    if kept and not sure and not _confirmed(namespace, kept):
        return 1
    gone = _kept(settings, namespace, delete=True)  # also where there is nothing here: another replica may have rows
    if not gone:
        sys.stderr.write(f"nothing is kept of {namespace}\n")
        return 1
    sys.stdout.write(f"deleted {gone}\n")
    time.sleep(SETTLED)
    if late := _kept(settings, namespace, delete=True):
        sys.stdout.write(f"deleted {late}\n")
        sys.stderr.write(f"more of {namespace} may come: end its conversations, then run this again\n")
    return 1 if late else 0


def _kept(settings: Settings, namespace: str, *, delete: bool) -> Kept:
    keys: list[str] = []

    async def in_store(engine: Store) -> int:
        keys.extend([entry.key async for entry in engine.list(f"{namespace}/")])
        if delete and settings.dashboard is not None:  # for the dashboards of other replicas
            await engine.put(fleet.forgotten(namespace, time.time()), b"")
        for start in range(0, len(keys) if delete else 0, AT_ONCE):
            await asyncio.gather(*map(engine.delete, keys[start : start + AT_ONCE]))
        return 0

    files, rows = 0, None
    if settings.capture is not None:
        try:
            files, _ = capture.kept(settings.capture, namespace, delete=delete)
        except OSError as error:
            raise UserMistake(f"--capture {settings.capture}: {error.strerror}") from error
    if settings.dashboard is not None:
        rows = _rows(settings, namespace, delete=delete)
    store.run(settings, in_store)
    return Kept(len(keys), files, rows)


def _rows(settings: Settings, namespace: str, *, delete: bool) -> int | None:
    """Return how many rows the dashboard has; None if it has no sums either, which stay when rows leave a full file."""
    if settings.dashboard is None or not settings.dashboard.is_file():
        raise UserMistake(f"--dashboard {settings.dashboard}: there is no such file")
    try:
        with closing(Rows(settings.dashboard, settings.dashboard_limit)) as rows:
            count = rows.count(namespace)
            if delete:
                rows.forget(namespace, time.time())
    except (DashboardFault, sqlite3.Error) as error:
        raise UserMistake(f"--dashboard {settings.dashboard}: {error}") from error
    return count


def _confirmed(namespace: str, kept: Kept) -> bool:
    """Ask on the terminal. Raises UserMistake if there is none."""
    if not sys.stdin.isatty():
        raise UserMistake(f"this would delete {kept}: give --yes, as there is no terminal to ask")
    sys.stdout.write(f"{kept}\nDelete all of this of {namespace} for good? [y/N] ")
    sys.stdout.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")
