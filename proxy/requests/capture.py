"""Captures whole requests for `offload-proxy replay`, as JSONL in a folder for each namespace.

A request is captured if the process was given a folder, the tenant's policy agrees, and upstream answered it. A line
has the request's body and the numbers that upstream billed; no header is captured, so no key is. Requests hand their
body over and go on. One thread writes, and what it cannot keep up with, or cannot write, is dropped.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from proxy import rawjson
from proxy.dialects.usage import Reported
from proxy.errors import Overloaded, UserMistake
from proxy.lru import Lru
from proxy.policies.tenants import retention, tenant_of
from proxy.rawjson import NotJson
from proxy.stores import Retention
from proxy.telemetry.logs import Limited, event
from proxy.telemetry.outcome import Basis, Kind, Outcome
from proxy.threads import WorkPool

if TYPE_CHECKING:
    from proxy.plan.turn import Request
    from proxy.policies import Policies
    from proxy.policy import Policy
    from proxy.settings import Settings

logger = logging.getLogger(__name__)

KEPT = 7 * 86_400.0
"""Seconds that captures are kept at most; a tenant's shorter retention counts."""
PART, PART_SECONDS = 16 << 20, 3_600.0
"""Bytes, and seconds, after which a namespace's next file begins. Files are deleted whole."""
FILES = 10_000
"""Most files. Listing so many takes a thread a tenth of a second."""
UNCHECKED = 8 << 20
"""Bytes written before the folder's size is looked at again."""
EVERY = 600.0
"""Seconds between two looks for old files."""
WAITING = 64 << 20
"""Bytes of bodies that wait to be written; one tenant may have half of it."""
CLOSING = 0.5
"""Seconds at the end for what still waits, and as many for what is being written."""
SUFFIX = ".jsonl"

_OPEN = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class Captured(msgspec.Struct, frozen=True):
    """A request to be written."""

    outcome: Outcome
    body: bytes
    time: float

    def line(self) -> bytes:
        """Return the line, which is the client's body with something around it. Raises NotJson if it is no JSON."""
        outcome = self.outcome
        head: dict[str, object] = {
            "custom_id": outcome.request_id,
            "time": datetime.fromtimestamp(self.time, UTC).isoformat(timespec="milliseconds"),
            "tenant": outcome.tenant,
            "namespace": outcome.namespace,
            "method": outcome.method,
            "url": outcome.path,
        }
        as_it_came = outcome.kind in (Kind.UNTOUCHED, Kind.OBSERVED)
        if as_it_came and outcome.usage is Basis.BILLED:
            head["usage"] = Reported(outcome.prompt_tokens, outcome.completion_tokens, outcome.cached_tokens)
        body = self.body.replace(b"\n", b" ").replace(b"\r", b" ")  # in JSON, these are never part of a string
        line = msgspec.json.encode(head)[:-1] + b',"body":' + body + b"}\n"
        rawjson.members(line)
        return line


class CaptureFolder:
    """The files of one folder. Methods block, and raise OSError. Other processes may write to the folder as well."""

    def __init__(self, root: Path, limit: int, retention: Retention, clock: Callable[[], float] = time.time) -> None:
        self._root = root
        self._step, self._most = min(UNCHECKED, limit // 4), min(PART, limit // 8)
        self._room = limit - self._step
        self._retention = retention
        self._clock = clock
        self._parts: Lru[str, tuple[Path, float]] = Lru(FILES)
        """The file that each namespace's next line goes to, and when it was begun."""
        self._unchecked = self._step

    def write(self, namespace: str, line: bytes) -> None:
        """Append a line to the namespace's file."""
        if len(line) > self._room:
            raise OSError("a request is too large for --capture-limit")
        if self._unchecked + len(line) > self._step:
            self.sweep(len(line))
        self._unchecked += len(line)
        try:
            descriptor = os.open(self._part(namespace), _OPEN, 0o600)
        except OSError:
            self._parts.discard(namespace)  # the next line goes to another file
            raise
        try:
            os.fchmod(descriptor, 0o600)
            _append(descriptor, line)
        finally:
            os.close(descriptor)

    def sweep(self, coming: int = 0) -> OSError | None:
        """Delete what is too old, and then the oldest of whoever has most, until there is room for `coming` bytes.

        Returns the first error that concerns one namespace's folder. It does not keep the others from being swept.
        """
        now, self._unchecked = self._clock(), 0
        missed: list[OSError] = []
        files: dict[str, deque[tuple[Path, int]]] = {}
        sizes: Counter[str] = Counter()
        count = 0
        for path, status in sorted(_files(self._root, missed), key=lambda file: file[1].st_mtime):
            namespace = path.parent.name
            kept, tenant = self._retention(namespace), tenant_of(namespace)
            if now - status.st_mtime > (KEPT if kept is None else min(kept, KEPT)):
                _delete(path, missed)
                continue
            files.setdefault(tenant, deque()).append((path, status.st_size))
            sizes[tenant] += status.st_size
            count += 1
        while files and (sizes.total() + coming > self._room or count > FILES):
            tenant = max(files, key=sizes.__getitem__)
            path, size = files[tenant].popleft()
            _delete(path, missed)
            sizes[tenant] -= size
            count -= 1
            if not files[tenant]:
                del files[tenant]
        return missed[0] if missed else None

    def _part(self, namespace: str) -> Path:
        """Return the file for the next line. Its folder exists."""
        folder, now = self._root / namespace, self._clock()
        self._root.mkdir(mode=0o700, exist_ok=True)
        _make(folder)
        part = self._parts.get(namespace)
        if part is None or now - part[1] > PART_SECONDS or _size(part[0]) > self._most:
            name = f"{datetime.fromtimestamp(now, UTC):%Y%m%dT%H%M%S}-{uuid.uuid4().hex[:8]}{SUFFIX}"
            part = folder / name, now
            self._parts.put(namespace, part)
        return part[0]


class Captures:
    """Takes the requests of one process; without a folder, none. All methods run on its event loop."""

    def __init__(
        self, settings: Settings, policies: Callable[[], Policies], clock: Callable[[], float] = time.time
    ) -> None:
        """Make the folder. Raises UserMistake if it cannot be used."""
        self._root, self._policies, self._clock = settings.capture, policies, clock
        self._folder = _folder(settings, lambda namespace: retention(namespace, policies()), clock)
        self._threads = WorkPool("captures", 1)
        self._warn = Limited(logger)
        self._waiting: deque[Captured] = deque()
        self._held: Counter[str] = Counter()
        """Bytes that wait, or are being written, by tenant."""
        self._told = asyncio.Event()

    def take(self, outcome: Outcome, policy: Policy, chat: Request | None) -> None:
        """Capture an answered request if its tenant's policy agrees. It is written later, or dropped."""
        if self._folder is None or chat is None or not policy.capture:
            return
        if outcome.status != 200 or outcome.kind is Kind.RELAY:
            return
        size, tenant = len(chat.body), outcome.tenant
        if self._held[tenant] + size > WAITING // 2 or self._held.total() + size > WAITING:
            self._warn("slow", "requests are not captured: the disk does not keep up")
            return
        self._held[tenant] += size
        self._waiting.append(Captured(outcome, chat.body, self._clock()))
        self._told.set()

    async def run(self) -> None:
        """Write what comes, and delete what is old, until cancelled; then write what waits, if that is soon done."""
        if self._folder is None:
            return
        event(
            logger,
            "requests are captured, with all that they contain, of tenants whose policy has `capture: true`",
            logging.WARNING,
            folder=str(self._root),
            tenants=[policy.tenant for policy in self._policies().all() if policy.capture],
        )
        clock = asyncio.get_running_loop().time
        try:
            while True:
                await self._work(self._folder.sweep)
                until = clock() + EVERY
                while (left := until - clock()) > 0:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(left):
                            await self._told.wait()
                    self._told.clear()
                    await self._drain(self._folder)
        finally:
            await self._close(self._folder)

    async def _close(self, folder: CaptureFolder) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSING):
                await self._drain(folder)
        if self._waiting or await self._threads.ended(CLOSING):
            self._warn("slow", "requests are not captured: the disk hangs")

    async def _drain(self, folder: CaptureFolder) -> None:
        while self._waiting:
            one = self._waiting.popleft()
            await self._work(partial(_write, folder, one))
            self._held[one.outcome.tenant] -= len(one.body)
            if not self._held[one.outcome.tenant]:
                del self._held[one.outcome.tenant]

    async def _work(self, work: Callable[[], OSError | None]) -> None:
        try:
            if missed := await self._threads.run("", work):
                self._warn("sweep", f"captures are not deleted: {missed.strerror}: {missed.filename}")
        except (OSError, Overloaded) as error:
            reason = getattr(error, "strerror", None) or error
            self._warn("disk", f"requests are not captured: {reason}")


def _write(folder: CaptureFolder, one: Captured) -> None:
    with suppress(NotJson):  # no body that was read as a request should be, but the file must stay readable
        folder.write(one.outcome.namespace, one.line())


def _folder(settings: Settings, retention: Retention, clock: Callable[[], float]) -> CaptureFolder | None:
    if settings.capture is None:
        return None
    try:
        settings.capture.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UserMistake(f"--capture {settings.capture}: expected a directory: {error.strerror}") from error
    return CaptureFolder(settings.capture, settings.capture_limit, retention, clock)


def kept(root: Path, namespace: str, *, delete: bool) -> tuple[int, int]:
    """Return how many files of captures a namespace has and their bytes, and delete them if wanted. Raises OSError."""
    os.stat(root)  # or a wrong name would be taken for a namespace without captures
    folder = root / namespace
    found = [(path, status.st_size) for path, status in _within(folder)] if _is_folder(folder) else []
    for path, _ in found if delete else ():
        _delete(path)
    return len(found), sum(size for _, size in found)


def _files(root: Path, missed: list[OSError]) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield the captures of all namespaces. Errors that concern only one of them are added to `missed`."""
    for folder in os.scandir(root):
        try:
            if folder.is_dir(follow_symlinks=False):
                yield from _within(Path(folder.path))
        except OSError as error:
            missed.append(error)


def _within(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield the captures of a namespace. What is deleted meanwhile is left out, and so is anything else."""
    with suppress(FileNotFoundError):
        for file in os.scandir(folder):
            if file.name.endswith(SUFFIX) and file.is_file(follow_symlinks=False):
                with suppress(FileNotFoundError):
                    yield Path(file.path), file.stat(follow_symlinks=False)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _size(file: Path) -> int:
    """Return the size of a file; 0 if it has been deleted."""
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


def _append(descriptor: int, line: bytes) -> None:
    """Write the whole line, or nothing if the disk has no room for it."""
    size, left = os.fstat(descriptor).st_size, memoryview(line)
    try:
        while left:
            left = left[os.write(descriptor, left) :]
    except OSError:
        os.ftruncate(descriptor, size)
        raise


def _make(folder: Path) -> None:
    """Make a folder that only its owner can read, whatever the umask. Raises OSError if a link is in its place."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
        folder.chmod(0o700)
    if folder.is_symlink():
        raise NotADirectoryError(errno.ENOTDIR, "A link is no directory", str(folder))


def _delete(path: Path, missed: list[OSError] | None = None) -> None:
    """Delete a file, and its folder if that leaves it empty. Adds an error to `missed`, or else raises it."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        if missed is None:
            raise
        missed.append(error)
    with suppress(OSError):
        path.parent.rmdir()
