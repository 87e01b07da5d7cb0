"""A folder as a store: one file for each record, safe for any number of processes that share the
folder.

The store writes a record in full to a file in `.tmp`, syncs it, and then *links* it to its name.
Only `link(2)` both fails if the name exists and never shows a reader partial content: `rename(2)`
would replace the winner's bytes, and `O_EXCL` on the name itself would first show an empty file and
leave half a file after a crash. So the folder's file system must support hard links, as those of
Unix and NFS do.

What nobody waits for is not synced, or one tenant's thousands of originals would take the disk from
what others wait for. After a power failure such a record can be missing, or damaged, which its seal
shows. A later put that is synced makes it durable.

Folders have mode 0700 and files 0600. If the store's folder already exists, it keeps its mode.

Only regular files that we may read are records. A pipe, a device, a folder or a link in a record's
place counts as absent.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory

from proxy.stores import Damaged, Entry, is_part

LEFTOVER_SECONDS = 3600.0
"""A temporary file older than this belongs to a process that died, because no put takes that
long."""

ATTEMPTS = 10
"""Attempts to publish a record while deletes keep removing its folders."""

PAGE = 500
"""Records of one page of a listing."""


class Folder:
    """The records of a folder."""

    name = "the store's folder"
    threads = 8
    batch = 1_000
    errors: type[Exception] = OSError

    def __init__(self, root: Path, damaged: Damaged = lambda key: None) -> None:
        self._root = root
        self._temporary = root / ".tmp"
        self._damaged = damaged
        self._prepare()

    def put(self, key: str, value: bytes, *, sync: bool = True) -> bool:
        """Publish `value` if `key` is absent. If it exists, update its file's time, as the record
        is in use."""
        path = self._root / key
        with suppress(FileNotFoundError):
            if sync:
                _sync_record(path)
            os.utime(path, follow_symlinks=False)
            return False
        self._prepare()
        _make(self._temporary)
        with NamedTemporaryFile(dir=self._temporary) as file:  # private
            file.write(value)
            file.flush()
            if sync:
                os.fsync(file.fileno())
            return _published(file.name, path, sync)

    def get(self, key: str) -> bytes | None:
        """Return the value, or None if there is no record.

        If the store's folder has vanished, this raises an error once, because the absence of its
        records may not be final: a disk may come back. The folder is made again.
        """
        path = self._root / key
        try:
            if stat.S_ISREG(path.lstat().st_mode):
                return path.read_bytes()
        except FileNotFoundError:
            if self._root.exists():
                return None
            self._prepare()
            raise
        except PermissionError:
            path.lstat()  # raises the error again if it is the folder that may not be entered
        self._damaged(key)
        return None

    def get_many(self, keys: Sequence[str]) -> Sequence[bytes | None]:
        return [self.get(key) for key in keys]

    def renew(self, keys: Sequence[str], seconds: float) -> None:
        for key in keys:
            path = self._root / key
            with suppress(FileNotFoundError):
                if time.time() - path.lstat().st_mtime > seconds:
                    os.utime(path, follow_symlinks=False)

    def pages(self, prefix: str) -> Iterator[Sequence[Entry]]:
        """A listing of everything also removes the temporary files of processes that died in the
        middle of a put."""
        self._prepare()
        with suppress(FileNotFoundError):
            for entry in () if prefix else os.scandir(self._temporary):
                with suppress(OSError):
                    if time.time() - entry.stat().st_mtime > LEFTOVER_SECONDS:
                        os.unlink(entry.path)
        records = self._below("", prefix)
        while page := tuple(islice(records, PAGE)):
            yield page

    def delete(self, keys: Sequence[str], until: float | None = None) -> None:
        """Remove the records and the folders that this leaves empty, because namespaces come and
        go."""
        for key in keys:
            path = self._root / key
            with suppress(FileNotFoundError):
                if until is None or path.lstat().st_mtime <= until:
                    path.unlink()
        for folder in {(self._root / key).parent for key in keys}:
            with suppress(OSError):
                folder.rmdir()
                folder.parent.rmdir()

    def discard(self, key: str, value: bytes) -> None:
        """Take the file away, look at what it is, and put it back if it is another one."""
        if self.get(key) != value:
            return
        path = self._root / key
        _make(self._temporary)
        with TemporaryDirectory(dir=self._temporary) as folder, suppress(FileNotFoundError):
            aside = Path(folder, "record")
            path.rename(aside)
            if aside.read_bytes() != value:
                _published(str(aside), path, sync=False)

    def reason(self, error: Exception) -> str:
        return getattr(error, "strerror", None) or type(error).__name__

    def is_full(self, error: Exception) -> bool:
        return getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)

    def _prepare(self) -> None:
        """Make the store's folder, unless it is there. If this fails, the operation itself reports
        the error."""
        with suppress(OSError):
            if not self._root.exists():
                self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
                _sync(self._root.parent)

    def _below(self, above: str, prefix: str) -> Iterator[Entry]:
        """Yield the records whose keys begin with `prefix` in the folder `above`, a path with a
        slash at its end. Skips anything else in it."""
        for entry in self._scanned(above):
            path = above + entry.name
            folder = f"{path}/"
            if above.count("/") < 2:
                if (folder.startswith(prefix) or prefix.startswith(folder)) and _is_folder(entry):
                    yield from self._below(folder, prefix)
            elif path.startswith(prefix):
                with suppress(FileNotFoundError):
                    if entry.is_file(follow_symlinks=False):
                        status = entry.stat(follow_symlinks=False)
                        yield Entry(path, status.st_size, status.st_mtime)

    def _scanned(self, above: str) -> Iterator[os.DirEntry[str]]:
        try:
            with os.scandir(self._root / above) as entries:
                yield from (entry for entry in entries if is_part(entry.name))
        except FileNotFoundError:
            if not above:  # the others may be removed after they were listed
                raise


def _is_folder(entry: os.DirEntry[str]) -> bool:
    with suppress(OSError):  # a link that leads to itself
        return entry.is_dir()
    return False


def _published(temporary: str, path: Path, sync: bool) -> bool:
    """Give the file its name. Returns False if another writer was first."""
    for _ in range(ATTEMPTS):
        try:
            os.link(temporary, path)
        except FileExistsError:
            if sync:
                with suppress(FileNotFoundError):  # it was deleted at once
                    _sync_record(path)
            return False
        except FileNotFoundError:
            # a delete of their last record may remove the folders again at once
            with suppress(FileNotFoundError):
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
        _sync(folder.parent)


def _sync_record(path: Path) -> None:
    """Make a record durable that another put may have written without that, and its name."""
    if stat.S_ISREG(path.lstat().st_mode):
        with suppress(PermissionError):  # whoever reads it notices
            _sync(path, os.O_NOFOLLOW)
        _sync(path.parent)


def _sync(path: Path, flags: int = os.O_DIRECTORY) -> None:
    """Make a file's bytes durable, or a folder's entries, because fsync of a file does not save its
    name."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
