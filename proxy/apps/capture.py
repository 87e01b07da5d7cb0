"""Captures whole requests for `offload-proxy replay`, as JSONL in a folder for each namespace.

A request is captured if the process was given a folder, the tenant's policy agrees, and upstream answered it. A line
has the request's body and the numbers that upstream billed; no header is captured, so no key is. Requests hand their
body over and go on. One thread writes, and what it cannot keep up with, or cannot write, is dropped.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import msgspec

from proxy import rawjson
from proxy.dialects.usage import Reported
from proxy.errors import UserMistake
from proxy.plan.turn import Request
from proxy.policies import Policies
from proxy.policies.tenants import retention, tenant_of
from proxy.policy import Policy
from proxy.rawjson import NotJson
from proxy.requests.exchange import Exchange
from proxy.requests.prepared import Prepared
from proxy.server.parts import Part
from proxy.server.process import Process
from proxy.settings import Settings
from proxy.stores import Retention
from proxy.telemetry.logs import Limited, event
from proxy.telemetry.outcome import Basis, Kind, Outcome

logger = logging.getLogger(__name__)

KEPT = 7 * 86_400.0
"""Seconds that captures are kept at most; a tenant's shorter retention counts."""
PART = 8 << 20
"""Bytes after which the next files begin, and the folder's size is looked at. Files are deleted whole."""
FILES = 10_000
"""Most files. Listing so many takes a thread a tenth of a second."""
EVERY = 600.0
"""Seconds after which the next files begin in any case."""
WAITING = 64 << 20
"""Bytes of bodies that wait to be written."""
CLOSING = 0.5
"""Seconds at the end for what still waits."""
SUFFIX = ".jsonl"

_OPEN = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW


def line(outcome: Outcome, body: bytes, when: float) -> bytes:
    """Return a capture, which is the client's body with something around it. Raises NotJson if it is no JSON."""
    head: dict[str, object] = {
        "custom_id": outcome.request_id,
        "time": datetime.fromtimestamp(when, UTC).isoformat(timespec="milliseconds"),
        "tenant": outcome.tenant,
        "namespace": outcome.namespace,
        "method": outcome.method,
        "url": outcome.path,
    }
    as_it_came = outcome.kind in (Kind.UNTOUCHED, Kind.OBSERVED)
    if as_it_came and outcome.usage is Basis.BILLED:
        head["usage"] = Reported(outcome.prompt_tokens, outcome.completion_tokens, outcome.cached_tokens)
    body = body.replace(b"\n", b" ").replace(b"\r", b" ")  # in JSON, these are never part of a string
    made = msgspec.json.encode(head)[:-1] + b',"body":' + body + b"}\n"
    rawjson.members(made)
    return made


class CaptureFolder:
    """The files of one folder. Methods block. Other processes may write to the folder as well."""

    def __init__(
        self, root: Path, limit: int, retention: Retention, warn: Limited, clock: Callable[[], float] = time.time
    ) -> None:
        self._root = root
        self._part = min(PART, limit // 4)
        self._room = limit - self._part
        self._retention = retention
        self._warn = warn
        self._clock = clock
        self._until = 0.0
        """When the next files begin."""
        self._name = ""
        self._written = 0

    def write(self, namespace: str, line: bytes) -> None:
        """Append a line to the namespace's newest file, or nothing if the disk has no room for it. Raises OSError."""
        if len(line) > self._room:
            raise OSError("a request is too large for --capture-limit")
        if self._written + len(line) > self._part or self._clock() >= self._until:
            self.sweep(len(line))
        self._written += len(line)
        folder = self._root / namespace
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(folder / self._name, _OPEN, 0o600)
        size, left = os.fstat(descriptor).st_size, memoryview(line)
        try:
            while left:
                left = left[os.write(descriptor, left) :]
        except OSError:
            os.ftruncate(descriptor, size)
            raise
        finally:
            os.close(descriptor)

    def sweep(self, coming: int = 0) -> None:
        """Begin new files. Delete what is too old, and then the oldest of whoever has most, until there is room for
        `coming` bytes. What cannot be deleted does not count."""
        now = self._clock()
        self._written, self._until = 0, now + EVERY
        self._name = f"{datetime.fromtimestamp(now, UTC):%Y%m%dT%H%M%S}-{uuid.uuid4().hex[:8]}{SUFFIX}"
        files: dict[str, deque[tuple[Path, int]]] = {}
        sizes: Counter[str] = Counter()
        for path, status in sorted(_sized(self._root.glob(f"*/*{SUFFIX}")), key=lambda file: file[1].st_mtime):
            namespace = path.parent.name
            kept, tenant = self._retention(namespace), tenant_of(namespace)
            if now - status.st_mtime > (KEPT if kept is None else min(kept, KEPT)):
                self._delete(path)
            else:
                files.setdefault(tenant, deque()).append((path, status.st_size))
                sizes[tenant] += status.st_size
        while files and (sizes.total() + coming > self._room or sum(map(len, files.values())) > FILES):
            tenant = max(files, key=sizes.__getitem__)
            path, size = files[tenant].popleft()
            self._delete(path)
            sizes[tenant] -= size
            if not files[tenant]:
                del files[tenant]

    def _delete(self, path: Path) -> None:
        try:
            _delete(path)
        except OSError as error:
            self._warn("sweep", f"captures are not deleted: {error.strerror}: {error.filename}")


class Captures(Part):
    """Takes the requests of one process; without a folder, none."""

    def __init__(
        self, settings: Settings, policies: Callable[[], Policies], clock: Callable[[], float] = time.time
    ) -> None:
        """Make the folder. Raises UserMistake if it cannot be used."""
        self._root, self._policies, self._clock = settings.capture, policies, clock
        self._warn = Limited(logger)
        self._waiting: queue.SimpleQueue[tuple[Outcome, bytes] | None] = queue.SimpleQueue()
        self._came = self._left = 0
        """Bytes of bodies that came, which the event loop counts, and of those no longer held, which the thread counts:
        with one writer each, they need no lock."""
        self._thread = threading.Thread(target=self._work, name="captures", daemon=True)
        if self._root is None:
            return
        self._folder = CaptureFolder(
            self._root, settings.capture_limit, lambda one: retention(one, policies()), self._warn, clock
        )
        try:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise UserMistake(f"--capture {self._root}: expected a directory: {error.strerror}") from error

    @classmethod
    def of(cls, process: Process) -> Captures:
        return cls(process.settings, process.policies)

    def watch(self, outcome: Outcome, prepared: Prepared | None, client: Exchange | None) -> None:
        if prepared is not None:
            self.take(outcome, prepared.tenant.policy, prepared.request)

    def take(self, outcome: Outcome, policy: Policy, chat: Request | None) -> None:
        """Capture an answered request if its tenant's policy agrees. It is written later, or dropped."""
        if self._root is None or chat is None or not policy.capture:
            return
        if outcome.status != 200 or outcome.kind is Kind.RELAY:
            return
        if self._came - self._left + len(chat.body) > WAITING:
            self._warn("slow", "requests are not captured: the disk does not keep up")
            return
        self._came += len(chat.body)
        self._waiting.put((outcome, chat.body))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Write what comes and delete what is old; at the end, write what waits, if that is soon done."""
        self.start()
        try:
            yield
        finally:
            self.close()

    def start(self) -> None:
        if self._root is None:
            return
        event(
            logger,
            "requests are captured, with all that they contain, of tenants whose policy has `capture: true`",
            logging.WARNING,
            folder=str(self._root),
            tenants=[policy.tenant for policy in self._policies().all() if policy.capture],
        )
        self._thread.start()

    def close(self) -> None:
        if self._thread.is_alive():
            self._waiting.put(None)
            self._thread.join(CLOSING)
            if self._thread.is_alive():
                self._warn("slow", "requests are not captured: the disk hangs")

    def _work(self) -> None:
        """Write until there is None to write. What fails now may succeed later."""
        self._try(self._folder.sweep)
        while True:
            try:
                one = self._waiting.get(timeout=EVERY)
            except queue.Empty:
                self._try(self._folder.sweep)
                continue
            if one is None:
                return
            self._try(partial(self._write, *one))
            self._left += len(one[1])

    def _write(self, outcome: Outcome, body: bytes) -> None:
        with suppress(NotJson):  # no body that was read as a request should be, but the file must stay readable
            self._folder.write(outcome.namespace, line(outcome, body, self._clock()))

    def _try(self, work: Callable[[], None]) -> None:
        try:
            work()
        except OSError as error:
            self._warn("disk", f"requests are not captured: {error.strerror or error}")


def kept(root: Path, namespace: str, *, delete: bool) -> tuple[int, int]:
    """Return how many files of captures a namespace has and their bytes, and delete them if wanted. Raises OSError."""
    os.stat(root)  # or a wrong name would be taken for a namespace without captures
    folder = root / namespace
    names = [name for name in os.listdir(folder) if name.endswith(SUFFIX)] if folder.is_dir() else []
    found = list(_sized(folder / name for name in names))
    for path, _ in found if delete else ():
        _delete(path)
    return len(found), sum(status.st_size for _, status in found)


def _sized(paths: Iterable[Path]) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield files of ours with what is known of them. Links, and what is deleted meanwhile, are left out."""
    for path in paths:
        with suppress(FileNotFoundError):
            if path.is_file() and not path.is_symlink() and not path.parent.is_symlink():
                yield path, path.stat()


def _delete(path: Path) -> None:
    """Delete a file, and its folder if that leaves it empty."""
    path.unlink(missing_ok=True)
    with suppress(OSError):
        path.parent.rmdir()
