"""A folder as a store: one file for each record, safe for any number of processes that share the folder.

The store writes a record in full to a file in `.tmp`, syncs it, and then *links* it to its name. Only `link(2)` both
fails if the name exists and never shows a reader partial content: `rename(2)` would replace the winner's bytes, and
`O_EXCL` on the name itself would first show an empty file and leave half a file after a crash. So the folder's file
system must support hard links, as those of Unix and NFS do.

What nobody waits for is not synced, or one tenant's thousands of originals would take the disk from what others wait
for. After a power failure such a record can be missing, or damaged, which its seal shows.

Folders have mode 0700 and files 0600, whatever the umask. If the store's folder already exists, it keeps its mode.

Only regular files that we may read are records. The store never waits for or follows a pipe, a device, a folder or a
link in a record's place: the record counts as absent.
"""

from __future__ import annotations

import errno
import os
import stat
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

from proxy.errors import Overloaded, StoreBusy, StoreFault
from proxy.stores import Damaged, Entry, checked, checked_prefix, is_part, namespace_of
from proxy.threads import WorkPool, comes_later

T = TypeVar("T")

CLOSE_SECONDS = 1.5
"""How long closing waits for running operations. A write takes milliseconds, a disk that hangs takes for ever. This is
less than `guarded.CLOSING`, so that the log names what hangs."""

LEFTOVER_SECONDS = 3600.0
"""A temporary file older than this belongs to a process that died, because no put takes that long."""

ATTEMPTS = 10
"""Attempts to publish a record while deletes keep removing its folders."""

BATCH = 500
"""Entries that one call into a thread lists."""

THREADS, WAITING = 8, 10_000
"""Threads for calls into the operating system, and the most calls of one caller that may wait for one. If there are
more, the disk cannot keep up, and they would only fill memory."""


class _NotRegular(OSError):
    """The path is a folder, a pipe, a socket, a device or a link."""


class Folder:
    """The records of a folder, without asyncio: methods block, and raise OSError if the file system fails."""

    def __init__(self, root: Path, damaged: Damaged = lambda key: None, clock: Callable[[], float] = time.time) -> None:
        self._root = root
        self._damaged = damaged
        self._temporary = root / ".tmp"
        self._clock = clock
        self._made = False
        self._tidied = 0.0

    def put(self, key: str, value: bytes, *, sync: bool = True) -> bool:
        """Publish `value` if `key` is absent. If it exists, update its file's time, as the record is in use."""
        path = self._root / key
        try:
            os.utime(path, follow_symlinks=False)
        except FileNotFoundError:
            self._prepare()
            with self._written(value, sync) as temporary:
                return _published(temporary, path, sync)
        return False

    def get(self, key: str) -> bytes | None:
        """Return the value, or None if there is no record.

        If the store's folder has vanished, this raises an error once, because the absence of its records may not be
        final: a disk may come back. The folder is made again.
        """
        path = self._root / key
        try:
            return _read(path)
        except FileNotFoundError:
            vanished = self._made and not self._root.exists()
            self._prepare()
            if vanished:
                raise
            self._root.stat()
        except _NotRegular:
            self._damaged(key)
        except PermissionError:
            path.lstat()  # raises the error again if it is the folder that may not be entered
            self._damaged(key)
        return None

    def get_many(self, keys: Sequence[str]) -> Sequence[bytes | None]:
        return [self.get(key) for key in keys]

    def walk(self, prefix: str) -> Iterator[Entry]:
        """Yield the records below a prefix, and skip anything else in the folder."""
        self._prepare()
        for namespace in _within(self._root, "", prefix):
            for kind in _within(self._root / namespace, f"{namespace}/", prefix):
                yield from _records(self._root / namespace / kind, f"{namespace}/{kind}/", prefix)

    def delete(self, keys: Sequence[str]) -> None:
        """Remove the records and the folders that this leaves empty, because namespaces come and go."""
        for key in keys:
            (self._root / key).unlink(missing_ok=True)
        for folder in {(self._root / key).parent for key in keys}:
            with suppress(OSError):
                folder.rmdir()
                folder.parent.rmdir()

    def _prepare(self) -> None:
        """Make the folder at its first use, and again if it has vanished. Remove the temporary files of processes that
        died in the middle of a put.

        If this fails, the operation itself reports the error. A read-only folder can still be read.
        """
        with suppress(OSError):
            if not self._made or not self._root.exists():
                self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._made = True
            now = self._clock()
            if now - self._tidied > LEFTOVER_SECONDS:
                self._tidied = now
                for entry in os.scandir(self._temporary):
                    with suppress(FileNotFoundError):
                        if now - entry.stat().st_mtime > LEFTOVER_SECONDS:
                            os.unlink(entry.path)

    @contextmanager
    def _written(self, value: bytes, sync: bool) -> Iterator[Path]:
        """Write a file under a temporary name, which is removed afterwards."""
        _make(self._temporary)
        path = self._temporary / uuid.uuid4().hex
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with open(descriptor, "wb") as file:
                os.fchmod(descriptor, 0o600)
                file.write(value)
                file.flush()
                if sync:
                    os.fsync(descriptor)
            yield path
        finally:
            path.unlink()


def _published(temporary: Path, path: Path, sync: bool) -> bool:
    """Give the file its name. Returns False if another writer was first."""
    for _ in range(ATTEMPTS):
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        except FileNotFoundError:
            with suppress(FileNotFoundError):  # a delete of their last record may remove the folders again at once
                _make(path.parent.parent)
                _make(path.parent)
        else:
            if sync:
                _sync(path.parent)
            return True
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


def _make(folder: Path) -> None:
    """Make one folder, private and durable, unless it exists."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
        folder.chmod(0o700)
        _sync(folder.parent)


def _sync(folder: Path) -> None:
    """Make a folder's entries durable, because fsync of a file does not save its name."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(path: Path) -> bytes:
    """Read a regular file. Raises _NotRegular for anything else, or another OSError."""
    try:
        # Without O_NONBLOCK, opening a pipe waits for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:  # a link (EMLINK on FreeBSD), a socket, or a device without a driver
        if error.errno in (errno.ELOOP, errno.EMLINK, errno.ENXIO, errno.ENODEV):
            raise _NotRegular(error.errno, "Not a regular file") from error
        raise
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise _NotRegular(errno.EINVAL, "Not a regular file")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)


def _within(folder: Path, above: str, prefix: str) -> list[str]:
    """Return the names of the subfolders that can contain keys with this prefix."""
    names = list[str]()
    try:
        for entry in os.scandir(folder):
            with suppress(OSError):  # a link that leads to itself
                if is_part(entry.name) and entry.is_dir():
                    names.append(entry.name)
    except FileNotFoundError:
        if not above:
            raise
    below = {name: f"{above}{name}/" for name in sorted(names)}
    return [name for name, path in below.items() if path.startswith(prefix) or prefix.startswith(path)]


def _records(folder: Path, above: str, prefix: str) -> Iterator[Entry]:
    """Yield one folder's records."""
    with suppress(FileNotFoundError), os.scandir(folder) as entries:  # the folder may be removed after it was listed
        for entry in entries:
            if is_part(entry.name) and f"{above}{entry.name}".startswith(prefix):
                with suppress(FileNotFoundError):
                    if entry.is_file(follow_symlinks=False):
                        found = entry.stat(follow_symlinks=False)
                        yield Entry(f"{above}{entry.name}", found.st_size, found.st_mtime)


class LocalStore:
    """`Folder` for asyncio: one call in one thread, and StoreFault for OSError."""

    def __init__(self, root: Path, damaged: Damaged = lambda key: None, clock: Callable[[], float] = time.time) -> None:
        self._folder = Folder(root, damaged, clock)
        self._threads = WorkPool("store", THREADS, WAITING)

    async def put(self, key: str, value: bytes) -> bool:
        return await self._run(partial(self._folder.put, checked(key), value, sync=not comes_later()), key)

    async def get(self, key: str) -> bytes | None:
        [value] = await self.get_many([key])
        return value

    async def get_many(self, keys: Sequence[str]) -> Sequence[bytes | None]:
        wanted = [checked(key) for key in keys]
        return await self._run(partial(self._folder.get_many, wanted), "".join(wanted[:1]))

    async def list(self, prefix: str) -> AsyncGenerator[Entry, None]:
        walk = self._folder.walk(checked_prefix(prefix))
        while batch := await self._run(lambda: tuple(islice(walk, BATCH)), prefix):
            for entry in batch:
                yield entry

    async def delete(self, *keys: str) -> None:
        wanted = [checked(key) for key in keys]
        await self._run(partial(self._folder.delete, wanted), "".join(wanted[:1]))

    async def close(self) -> None:
        """Finish running operations. Raises StoreFault if some hang longer than `CLOSE_SECONDS`."""
        if hanging := await self._threads.ended(CLOSE_SECONDS):
            raise StoreFault(f"the store's folder hangs: {hanging} operations have not ended")

    async def _run(self, work: Callable[[], T], key: str) -> T:
        try:
            return await self._threads.run(namespace_of(key), work)
        except OSError as error:
            raise StoreFault(f"the store's folder failed: {error.strerror or type(error).__name__}") from error
        except Overloaded as full:
            raise StoreBusy(full.message) from full
