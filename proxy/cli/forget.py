"""`store forget`: deletes everything that is kept of a namespace, in any kind of store and beside it."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
import time
from collections.abc import Iterator
from contextlib import closing

from proxy.cli import store
from proxy.dashboard.database import Database
from proxy.dashboard.versions import aside
from proxy.errors import DashboardFault, UserMistake
from proxy.requests import captures
from proxy.settings import Settings
from proxy.stores import Entry, Store
from proxy.stores.keys import is_part

AT_ONCE = 32
"""Records that are deleted at once."""


def forget(settings: Settings, namespace: str, *, sure: bool) -> int:
    """Delete all that is kept of a namespace, and say what that was; ask first, unless `sure`.

    Returns the exit code: 1 if there is nothing, or if the answer was no. Raises UserMistake and StoreFault.
    """
    if not is_part(namespace):
        raise UserMistake(f"{namespace!r}: expected a namespace, as `store ls` lists them")
    entries: list[Entry] = []

    async def look(engine: Store) -> int:
        entries.extend([entry async for entry in engine.list(f"{namespace}/")])
        return 0

    async def delete(engine: Store) -> int:
        for start in range(0, len(entries), AT_ONCE):
            await asyncio.gather(*(engine.delete(entry.key) for entry in entries[start : start + AT_ONCE]))
        return 0

    store.run(settings, look)
    beside = (_captures, _rows)
    kept = [*_records(entries), *(line for look in beside for line in look(settings, namespace, delete=False))]
    if not kept:
        list(_rows(settings, namespace, delete=True))  # a proxy that runs may have rows that it has yet to write
        sys.stderr.write(f"nothing is kept of {namespace}\n")
        return 1
    if not sure and not _confirmed(namespace, kept):
        return 1
    deleted = [*(line for one in beside for line in one(settings, namespace, delete=True)), *_records(entries)]
    store.run(settings, delete)
    sys.stdout.write("".join(f"deleted {one}\n" for one in deleted))
    return 0


def _records(entries: list[Entry]) -> Iterator[str]:
    """Yield what there is in the store, for each kind."""
    for kind in sorted({entry.key.split("/")[1] for entry in entries}):
        sizes = [entry.size for entry in entries if entry.key.split("/")[1] == kind]
        yield _described(len(sizes), f"record of kind {kind}", sum(sizes), plural=f"records of kind {kind}")


def _captures(settings: Settings, namespace: str, *, delete: bool) -> Iterator[str]:
    """Yield what there is among the captures, if the settings name their folder, and delete it if wanted."""
    if settings.capture is None:
        return
    try:
        count, size = captures.kept(settings.capture, namespace, delete=delete)
    except OSError as error:
        raise UserMistake(f"--capture {settings.capture}: {error.strerror}") from error
    if count:
        yield _described(count, "file of captured requests", size, plural="files of captured requests")


def _rows(settings: Settings, namespace: str, *, delete: bool) -> Iterator[str]:
    """Yield what the dashboard has recorded, if the settings name its file, and delete it if wanted."""
    if settings.dashboard is None:
        return
    if not settings.dashboard.is_file():
        raise UserMistake(f"--dashboard {settings.dashboard}: there is no such file")
    try:
        with closing(Database(settings.dashboard, settings.dashboard_limit)) as database:
            count = database.count(namespace)
            if delete:
                database.forget(namespace, time.time())
    except (DashboardFault, sqlite3.Error) as error:
        raise UserMistake(f"--dashboard {settings.dashboard}: {error}") from error
    if delete and (old := aside(settings.dashboard)).exists():
        sys.stderr.write(f"{old} is of another version of the proxy and may have rows of {namespace}: delete it\n")
    if count is not None:  # the sums stay when the rows have left a full file
        yield f"{count} {'row' if count == 1 else 'rows'} of the dashboard, and their sums"


def _confirmed(namespace: str, kept: list[str]) -> bool:
    """Ask on the terminal. Raises UserMistake if there is none."""
    if not sys.stdin.isatty():
        raise UserMistake(f"this would delete {'; '.join(kept)}: give --yes, as there is no terminal to ask")
    sys.stdout.write("".join(f"{one}\n" for one in kept))
    sys.stdout.write(f"Delete all of this of {namespace} for good? [y/N] ")
    sys.stdout.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _described(count: int, noun: str, size: int, plural: str) -> str:
    return f"{count} {noun if count == 1 else plural}, {store.in_units(size)}"
