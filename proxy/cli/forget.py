"""`store forget`: deletes everything that is kept of a namespace, in any kind of store and beside it."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing

import msgspec

from proxy.cli import store
from proxy.cli.words import in_units, several
from proxy.dashboard import fleet
from proxy.dashboard.rows import Rows
from proxy.errors import DashboardFault, UserMistake
from proxy.requests import capture
from proxy.settings import Settings
from proxy.stores import Entry, Store, is_part

AT_ONCE = 32
"""Records that are deleted at once."""

RECENT = 60.0
"""Seconds since a record was written within which a proxy may still be writing others."""

SETTLED = 2.0
"""Seconds until a second look for what a proxy was still writing."""


def forget(settings: Settings, namespace: str, *, sure: bool) -> int:
    """Delete all that is kept of a namespace, and say what that was; ask first, unless `sure`.

    Returns the exit code: 1 if there is nothing, if the answer was no, or if more may come. No request waits until the
    texts that it moved are stored, so a proxy may go on writing after the caller's last one. Raises UserMistake and
    StoreFault.
    """
    if not is_part(namespace):
        raise UserMistake(f"{namespace!r}: expected a namespace, as `store ls` lists them")
    kept = _kept(settings, namespace, delete=False)
    if kept.lines() and not sure and not _confirmed(namespace, kept.lines()):
        return 1
    gone = _kept(settings, namespace, delete=True)  # also where there is nothing here: another replica may have rows
    if not gone.lines():
        sys.stderr.write(f"nothing is kept of {namespace}\n")
        return 1
    late = _Kept()
    if gone.recent:
        time.sleep(SETTLED)
        late = _kept(settings, namespace, delete=True)
    sys.stdout.write("".join(f"deleted {one}\n" for one in (*gone.lines(), *late.lines())))
    if late.lines():
        sys.stderr.write(f"more of {namespace} may come: end its conversations, then run this again\n")
    return 1 if late.lines() else 0


class _Kept(msgspec.Struct):
    """What is kept of a namespace. `rows` is None if the dashboard has neither rows nor sums."""

    entries: Sequence[Entry] = ()
    files: int = 0
    size: int = 0
    rows: int | None = None

    def lines(self) -> list[str]:
        """Return a line for each sort of what is kept."""
        lines = list[str]()
        if self.files:
            files = several(self.files, "file of captured requests", "files of captured requests")
            lines.append(f"{files}, {in_units(self.size)}")
        if self.rows is not None:
            lines.append(f"{several(self.rows, 'row')} of the dashboard, and their sums")
        return [*lines, *_records(self.entries)]

    @property
    def recent(self) -> bool:
        """Whether a proxy may be writing right now. How old captures are is not asked: there is one more look."""
        since = time.time() - RECENT
        return self.files > 0 or any(entry.modified > since for entry in self.entries)


def _kept(settings: Settings, namespace: str, *, delete: bool) -> _Kept:
    """Return what is kept, and delete it if wanted."""
    kept = _Kept()

    async def look(engine: Store) -> int:
        kept.entries = [entry async for entry in engine.list(f"{namespace}/")]
        return 0

    async def delete_all(engine: Store) -> int:
        await look(engine)
        if settings.dashboard is not None:  # for the dashboards of other replicas
            await engine.put(fleet.forgotten(namespace, time.time()), b"")
        keys = [entry.key for entry in kept.entries]
        for start in range(0, len(keys), AT_ONCE):
            await asyncio.gather(*map(engine.delete, keys[start : start + AT_ONCE]))
        return 0

    kept.files, kept.size = _captures(settings, namespace, delete=delete)
    kept.rows = _rows(settings, namespace, delete=delete)
    store.run(settings, delete_all if delete else look)
    return kept


def _records(entries: Sequence[Entry]) -> Iterator[str]:
    """Yield what there is in the store, for each kind."""
    for kind in sorted({entry.key.split("/")[1] for entry in entries}):
        sizes = [entry.size for entry in entries if entry.key.split("/")[1] == kind]
        yield f"{several(len(sizes), f'record of kind {kind}', f'records of kind {kind}')}, {in_units(sum(sizes))}"


def _captures(settings: Settings, namespace: str, *, delete: bool) -> tuple[int, int]:
    """Return the files of captures and their bytes, if the settings name their folder, and delete them if wanted."""
    if settings.capture is None:
        return 0, 0
    try:
        return capture.kept(settings.capture, namespace, delete=delete)
    except OSError as error:
        raise UserMistake(f"--capture {settings.capture}: {error.strerror}") from error


def _rows(settings: Settings, namespace: str, *, delete: bool) -> int | None:
    """Return how many rows the dashboard has, if the settings name its file, and delete them if wanted.

    None means that it has no sums either: these stay when the rows have left a full file.
    """
    if settings.dashboard is None:
        return None
    if not settings.dashboard.is_file():
        raise UserMistake(f"--dashboard {settings.dashboard}: there is no such file")
    try:
        with closing(Rows(settings.dashboard, settings.dashboard_limit)) as rows:
            count = rows.count(namespace)
            if delete:
                rows.forget(namespace, time.time())
    except (DashboardFault, sqlite3.Error) as error:
        raise UserMistake(f"--dashboard {settings.dashboard}: {error}") from error
    return count


def _confirmed(namespace: str, kept: list[str]) -> bool:
    """Ask on the terminal. Raises UserMistake if there is none."""
    if not sys.stdin.isatty():
        raise UserMistake(f"this would delete {'; '.join(kept)}: give --yes, as there is no terminal to ask")
    sys.stdout.write("".join(f"{one}\n" for one in kept))
    sys.stdout.write(f"Delete all of this of {namespace} for good? [y/N] ")
    sys.stdout.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")
