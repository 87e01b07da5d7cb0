"""A folder as a store: one file a record, safe for any number of processes that share the folder.

A record is written whole to a file in `.tmp`, synced, and then *linked* to its name. Of the ways to publish a file only
`link(2)` fails where the name exists and shows no reader anything but the whole content: `rename(2)` would replace the
winner's bytes, and `O_EXCL` on the name itself would show an empty file first and leave half a one after a crash. So
the folder's file system must know hard links, as those of Unix and NFS do.

Folders are 0700, files 0600, whatever the umask. The folder itself keeps the mode it has, if it was there already.

Only regular files are records. A pipe, a device, a folder or a link in a record's place is never waited for and never
followed: the record counts as absent.
"""

from __future__ import annotations

import errno
import os
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import TypeVar

from proxy import regular_files
from proxy.errors import StoreFault
from proxy.regular_files import NotRegular
from proxy.stores.base import Damaged, Entry
from proxy.stores.keys import checked, checked_prefix, is_part
from proxy.stores.workers import Workers

T = TypeVar("T")

CLOSE_SECONDS = 3.0
"""That closing waits for what is under way: a write takes milliseconds, a disk that hangs takes for ever. Below the
server's grace for the end of a process."""

LEFTOVER_SECONDS = 3600.0
"""No put takes that long: a temporary file of this age belongs to a process that died."""

ATTEMPTS = 10
"""To publish a record while its folders are being removed by deletes."""

BATCH = 500
"""Entries listed in one go in a thread."""


class Folder:
    """The records of a folder, without asyncio: every method blocks and raises OSError."""

    def __init__(self, root: Path, damaged: Damaged = lambda key: None, clock: Callable[[], float] = time.time) -> None:
        self._root = root
        self._damaged = damaged
        self._temporary = root / ".tmp"
        self._clock = clock
        self._made = False
        self._tidied = 0.0

    def put(self, key: str, value: bytes) -> bool:
        """Publish `value` under `key` if that is free. A record that exists is touched: it is in use."""
        path = self._root / key
        try:
            os.utime(path, follow_symlinks=False)
        except FileNotFoundError:
            self._prepare()
            with self._written(value) as temporary:
                return _published(temporary, path)
        return False

    def get(self, key: str) -> bytes | None:
        """The value. A missing record is None, a missing folder an error: absence can be final, a lost disk not."""
        path = self._root / key
        try:
            return regular_files.read(path)
        except FileNotFoundError:
            self._prepare()
            self._root.stat()
        except NotRegular:
            self._damaged(key)
        return None

    def get_many(self, keys: Sequence[str]) -> Sequence[bytes | None]:
        """The values in the order of `keys`."""
        return [self.get(key) for key in keys]

    def walk(self, prefix: str) -> Iterator[Entry]:
        """The records below a prefix; whatever else lies in the folder is passed over."""
        self._prepare()
        for namespace in _within(self._root, "", prefix):
            for kind in _within(self._root / namespace, f"{namespace}/", prefix):
                yield from _records(self._root / namespace / kind, f"{namespace}/{kind}/", prefix)

    def delete(self, key: str) -> None:
        """Remove the record, and its folders where they are empty now: namespaces come and go."""
        path = self._root / key
        path.unlink(missing_ok=True)
        with suppress(OSError):
            path.parent.rmdir()
            path.parent.parent.rmdir()

    def _prepare(self) -> None:
        """Make the folder when it is first used, never again: one that vanishes is a fault, not an empty store.

        Where it cannot be made, whatever is asked for says so itself; a read-only folder can still be read.
        """
        with suppress(OSError):
            if not self._made:
                self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._made = True
            if self._clock() - self._tidied > LEFTOVER_SECONDS:
                self._tidied = self._clock()
                self._tidy()

    def _tidy(self) -> None:
        """Remove what processes left that died in the middle of a put."""
        for entry in os.scandir(self._temporary):
            with suppress(FileNotFoundError):
                if self._clock() - entry.stat().st_mtime > LEFTOVER_SECONDS:
                    os.unlink(entry.path)

    @contextmanager
    def _written(self, value: bytes) -> Iterator[Path]:
        """A synced file of this content under a temporary name, which is gone afterwards."""
        _make(self._temporary)
        path = self._temporary / uuid.uuid4().hex
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with open(descriptor, "wb") as file:
                os.fchmod(descriptor, 0o600)
                file.write(value)
                file.flush()
                os.fsync(descriptor)
            yield path
        finally:
            path.unlink()


def _published(temporary: Path, path: Path) -> bool:
    """Give the file its name, durably; False where somebody was first."""
    for _ in range(ATTEMPTS):
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        except FileNotFoundError:
            _make_parents(path)
        else:
            _sync(path.parent)
            return True
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


def _make_parents(path: Path) -> None:
    """The namespace's and the kind's folder. Whoever deletes their last record at the same moment removes them."""
    with suppress(FileNotFoundError):
        _make(path.parent.parent)
        _make(path.parent)


def _make(folder: Path) -> None:
    """Make one folder, private and durable, unless it is there."""
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        return
    folder.chmod(0o700)
    _sync(folder.parent)


def _sync(folder: Path) -> None:
    """Make a folder's entries durable: fsync of a file alone does not keep its name."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _within(folder: Path, above: str, prefix: str) -> list[str]:
    """The names of subfolders in which keys with this prefix can lie."""
    try:
        names = sorted(entry.name for entry in os.scandir(folder) if is_part(entry.name) and entry.is_dir())
    except FileNotFoundError:
        if not above:
            raise
        return []
    return [name for name in names if f"{above}{name}/".startswith(prefix) or prefix.startswith(f"{above}{name}/")]


def _records(folder: Path, above: str, prefix: str) -> Iterator[Entry]:
    """One folder's records, by name."""
    with suppress(FileNotFoundError):  # the folder was emptied and removed since it was listed
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            if is_part(entry.name) and f"{above}{entry.name}".startswith(prefix):
                with suppress(FileNotFoundError):
                    if entry.is_file(follow_symlinks=False):
                        found = entry.stat(follow_symlinks=False)
                        yield Entry(f"{above}{entry.name}", found.st_size, found.st_mtime)


class LocalStore:
    """`Folder` behind asyncio: blocking work in threads, OSError as StoreFault."""

    def __init__(self, root: Path, damaged: Damaged = lambda key: None, clock: Callable[[], float] = time.time) -> None:
        self._folder = Folder(root, damaged, clock)
        self._workers = Workers("store")

    async def put(self, key: str, value: bytes) -> bool:
        """Store durably if absent."""
        checked(key)
        return await self._run(f"put {key}", lambda: self._folder.put(key, value))

    async def get(self, key: str) -> bytes | None:
        """The value, or None."""
        checked(key)
        return await self._run(f"get {key}", lambda: self._folder.get(key))

    async def get_many(self, keys: Sequence[str]) -> Sequence[bytes | None]:
        """The values in the order of `keys`; one thread reads them all."""
        wanted = [checked(key) for key in keys]
        return await self._run(f"get {' '.join(wanted[:1])}", lambda: self._folder.get_many(wanted))

    async def list(self, prefix: str) -> AsyncGenerator[Entry, None]:
        """Every record whose key begins with `prefix`, sorted within its folder."""
        walk = self._folder.walk(checked_prefix(prefix))
        while batch := await self._run(f"list {prefix}", lambda: tuple(islice(walk, BATCH))):
            for entry in batch:
                yield entry

    async def delete(self, key: str) -> None:
        """Forget the record."""
        checked(key)
        await self._run(f"delete {key}", lambda: self._folder.delete(key))

    async def close(self) -> None:
        """Finish what is being written. StoreFault: it does not end."""
        if hanging := await self._workers.close(CLOSE_SECONDS):
            raise StoreFault(f"the store's folder hangs: {', '.join(hanging)}")

    async def _run(self, what: str, work: Callable[[], T]) -> T:
        try:
            return await self._workers.run(what, work)
        except OSError as error:
            raise StoreFault(f"the store's folder failed: {error.strerror or type(error).__name__}") from error
