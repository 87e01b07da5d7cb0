"""The dashboard's file by its path: it is made for its owner alone, and may be removed or replaced at any time."""

from __future__ import annotations

import fcntl
import os
import sqlite3
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from proxy.errors import DashboardFault


def create(path: Path) -> None:
    """Create the file, for its owner alone. Raises DashboardFault."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise DashboardFault(f"{path} is no regular file: name another")
            os.fchmod(descriptor, 0o600)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise DashboardFault(f"{path} cannot be written: {error.strerror}") from error


def unreadable(error: Exception) -> DashboardFault:
    """Return the fault of a page that cannot read the file, with what to do."""
    passes = isinstance(error, sqlite3.OperationalError)  # it is locked, was just replaced, or the query took too long
    cure = "try again" if passes else "delete it, or name another with --dashboard"
    return DashboardFault(f"The dashboard's file cannot be read ({error}): {cure}")


def moved(path: Path) -> Callable[[], bool]:
    """Return a function that returns whether `path` no longer names the same file."""
    began = _identity(path)
    return lambda: _identity(path) != began


def logs(path: Path) -> dict[Path, object]:
    """Return the files that SQLite keeps beside an open one, each with its identity."""
    return {one: _identity(one) for one in (path.with_name(path.name + end) for end in ("-shm", "-wal"))}


def drop(logs: Mapping[Path, object]) -> None:
    """Delete these files, unless others have taken their names. SQLite would take what a file that was replaced has
    left in them for a part of the one in its place. One process does so at a time: between the look and the deletion,
    another could open the new file."""
    for path, identity in logs.items():
        with _alone(path.parent):
            if identity is not None and _identity(path) == identity:
                path.unlink(missing_ok=True)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait for other processes that do the same in this folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
