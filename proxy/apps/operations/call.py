"""One call of an operation: the caller's files and how the caller names them, and the envelope of
every reply.

A caller's paths are names in the caller's own namespace, never paths on a server. `/workspace/x`,
`workspace//x/` and `./workspace/x` are one name, because the namespace is the only root. Replies to
a caller keep the caller's spelling; only keys are made from canonical names. The store has the
files that `/context_offload` wrote under `NAMESPACE/files/NAME`. A caller can also read, by its
exact path, an original that the proxy moved for the same key.

The names of moved texts contain a digest of the text, so a text that was cut off or changed is
noticed. It counts as absent, but stays where it is until the same text is written again: people may
still make something of it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ParamSpec, Protocol, TypeVar
from urllib.parse import quote, unquote

import msgspec
from msgspec import Raw

from proxy import rawjson
from proxy.errors import NotThere, ProxyError, StoreFault
from proxy.plan.preview import digest_in
from proxy.policies.tenants import Tenant
from proxy.policy import Policy
from proxy.requests.archive import Archive
from proxy.requests.exchange import Exchange
from proxy.requests.records import original_of
from proxy.requests.rounds import Services
from proxy.stores import is_part
from proxy.stores.guarded import Put, Visit
from proxy.threads import WorkPool

P = ParamSpec("P")
T = TypeVar("T")

KIND = "files"
ORIGINALS = "originals"

KEY_BYTES = 255
"""The most bytes of one part of a store's key (the longest file name of ext4, XFS and APFS)."""

FIRST = "_"
"""Begins every part: a key's part must not begin with a dot, but a name may."""

WRITING = 10.0
"""Most seconds that a call waits for files of its caller that are being written."""

AT_ONCE = 16
"""The most files that one call writes concurrently."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")

# -- names --


class BadName(ValueError):
    """The path is not a name. The text gives the reason, for its author."""


def canonical(spelled: str) -> str:
    """Return the name that a path means, or an empty string for the namespace itself. Raises
    BadName."""
    if _CONTROL.search(spelled):
        raise BadName(f"{shown(spelled)} has a control character in it")
    try:
        spelled.encode()
    except UnicodeEncodeError as error:
        raise BadName(f"{shown(spelled)} is not valid Unicode") from error
    segments: list[str] = []
    for segment in spelled.split("/"):
        if segment == "..":
            if not segments:
                raise BadName(f"{shown(spelled)} leads out of your files")
            segments.pop()
        elif segment not in ("", "."):
            segments.append(segment)
    return "/".join(segments)


def joined(directory: str, name: str) -> str:
    """Join a file's name to its directory, and keep the directory's spelling."""
    return f"{directory.rstrip('/')}/{name}"


def key_part(name: str) -> str:
    """Return a canonical name as a part of a store's key: as in a URL, with `.` for `%`. The parts
    of two names that begin alike begin alike. Raises BadName if it is too long."""
    quoted = quote(name, safe="").replace(".", "%2E").replace("~", "%7E")
    part = FIRST + quoted.replace("%", ".")
    if len(part) > KEY_BYTES:
        raise BadName(f"{shown(name)} is too long: {len(part)} bytes when stored, of {KEY_BYTES}")
    return part


def name_of(part: str) -> str | None:
    """Return the name that a key's part encodes, or None if it is not one of ours."""
    try:
        return (
            unquote(part.removeprefix(FIRST).replace(".", "%"), errors="strict")
            if part.startswith(FIRST)
            else None
        )
    except UnicodeDecodeError:
        return None


def shown(text: str) -> str:
    """Shorten and escape a path for a message, on one line."""
    return ascii(text if len(text) <= 100 else text[:100] + "…")


# -- files --


class File(msgspec.Struct, frozen=True):
    """A stored file: its canonical name and its size in bytes."""

    name: str
    size: int


class CallerFiles:
    """One request's access to its caller's files. All methods raise StoreFault if the store does
    not answer."""

    def __init__(self, visit: Visit, namespace: str, policy: Policy, threads: WorkPool) -> None:
        self._visit = visit
        self._namespace = namespace
        self._run = partial(threads.run, namespace)
        self._store_dirs = {canonical(one.offload.store_dir) for one in (policy, *policy.rules)}
        self.archive = Archive(visit, namespace, self._run)
        """What the caller's conversations moved."""
        self.damaged: dict[str, None] = {}
        """The names of the damaged files that were met, in order."""

    async def put_all(self, files: Mapping[str, bytes]) -> None:
        """Write files durably, whose names tell their contents. Raises StoreFault if one cannot be
        written."""
        waiting = asyncio.Semaphore(AT_ONCE)

        async def put(name: str, content: bytes) -> None:
            async with waiting:
                if not await self._visit.put_intact(
                    self._key(name), content, lambda key, there: there == content
                ):
                    raise _failed("keep a file")

        await asyncio.gather(*(put(name, content) for name, content in files.items()))

    async def put_next(self, stem: str, ending: str, content: bytes) -> str:
        """Write a file under the next free name: `STEM0ENDING`, `STEM1ENDING`, …; returns the
        name."""
        taken = [
            file.name.removeprefix(stem).removesuffix(ending)
            for file in await self._beginning(stem)
        ]
        number = max((int(one) + 1 for one in taken if one.isascii() and one.isdigit()), default=0)
        while not await self._put_if_free(name := f"{stem}{number}{ending}", content):
            number += 1
        return name

    async def _put_if_free(self, name: str, content: bytes) -> bool:
        done = await self._visit.put(self._key(name), content, keep=False, sure=True)
        if done is Put.FAILED:
            raise _failed("keep a file")
        return done is Put.WRITTEN

    async def below(self, directory: str) -> list[File]:
        """Return the files below a directory, sorted by name."""
        return await self._beginning(f"{directory}/" if directory else "")

    async def _beginning(self, text: str) -> list[File]:
        """Return the files whose names begin with `text`, sorted by name. Raises BadName if `text`
        is too long."""
        found = await self._visit.list(self._key(text))
        if found is None:
            raise _failed("list files")

        def named() -> list[File]:
            files = [File(name_of(entry.key.split("/", 2)[2]) or "", entry.size) for entry in found]
            ours = [file for file in files if file.name and file.name.startswith(text)]
            return sorted(ours, key=lambda file: file.name)

        return await self._run(named)

    async def read(self, name: str) -> bytes | None:
        """Return the content of the file or the original with this path, or None if there is
        neither."""
        directory, _, file = name.rpartition("/")
        keys = [self._key(name)]
        if directory in self._store_dirs and is_part(file):
            keys.append(f"{self._namespace}/{ORIGINALS}/{file}")
        found = await self._undamaged(keys, [name] * len(keys))
        return next((content for content in found if content is not None), None)

    async def read_many(self, wanted: Sequence[str]) -> Sequence[bytes | None]:
        """Return the contents in the order of the names, with None for each missing file."""
        return await self._undamaged([self._key(name) for name in wanted], wanted) if wanted else []

    async def _undamaged(self, keys: Sequence[str], names: Sequence[str]) -> Sequence[bytes | None]:
        """Return the contents of these keys, with None where there is none or where it is not what
        the name says."""
        found = await self._stored(keys)
        whole = await self._run(lambda: [*map(_intact, keys, names, found)])
        for key, name, content, kept in zip(keys, names, found, whole, strict=True):
            if content is not None and kept is None:
                self._visit.damaged(key)
                self.damaged[name] = None
        return whole

    async def _stored(self, keys: Sequence[str]) -> Sequence[bytes | None]:
        found = await self._visit.read(keys)
        if found is None:
            raise _failed("read a file")
        return found

    def missing(self, name: str, path: str) -> NotThere:
        """Return the error for a file that could not be read. `path` is how the caller spells its
        name."""
        if name in self.damaged:
            return NotThere(
                f"The file {path!r} is damaged in the store: its content is not what was written. So it counts as "
                "missing; what is left of it is kept for this server's operators"
            )
        return NotThere(f"There is no file {path!r} among your files")

    def _key(self, name: str) -> str:
        return f"{self._namespace}/{KIND}/{key_part(name)}"


def _intact(key: str, name: str, content: bytes | None) -> bytes | None:
    """Return the content unless it is damaged. A file whose name tells no digest cannot be
    checked."""
    if content is None or (key.split("/")[1] == KIND and not digest_in(name)):
        return content
    return original_of(name.rpartition("/")[2], content)


def _failed(task: str) -> StoreFault:
    return StoreFault(f"The store did not {task}; nothing was changed, try again later")


# -- the call and its reply --


class Looking(Protocol):
    """Whoever looks into a caller's files: a call of an operation, or a command that reads the
    store itself."""

    tenant: Tenant
    shelf: CallerFiles

    async def read(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `work` in a thread when it is this caller's turn, and return its result."""

    async def search(self, work: Callable[[], None]) -> None:
        """The same for work that goes on from what this call has begun."""

    async def written(self) -> bool:
        """Wait for texts of this caller that are being written. Returns whether there were any."""


@dataclass
class OperationCall:
    """Everything that an operation needs to do its work."""

    services: Services
    client: Exchange
    tenant: Tenant
    shelf: CallerFiles
    messages: Sequence[Raw] = ()
    """Those of the request's body, as they came."""
    noted: dict[str, Any] = field(default_factory=lambda: {"mode": "off"})
    """What the operation adds to its outcome."""

    async def read(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `work` in a thread when it is this caller's turn, and return its result."""
        return await self.services.threads.run(self.tenant.namespace, lambda: work(*args, **kwargs))

    async def search(self, work: Callable[[], None]) -> None:
        await self.services.threads.run(self.tenant.namespace, work, begun=True)

    async def written(self) -> bool:
        return await self.services.background.ended(f"{self.tenant.namespace}/", WRITING)


def envelope(
    answer: str,
    messages: Iterable[bytes | Raw] = (),
    metadata: Mapping[str, Any] = {},
    *,
    success: bool = True,
) -> bytes:
    """Return the body of a reply. Messages are raw JSON and keep their bytes."""
    said = rawjson.encode(answer)
    more = rawjson.encode(metadata)
    return b'{"success":%b,"answer":%b,"messages":%b,"metadata":%b}' % (
        rawjson.encode(success), said, rawjson.array(messages), more
    )  # fmt: skip


def refusal(messages: Iterable[bytes | Raw] = ()) -> Callable[[ProxyError], bytes]:
    """Return a function that takes an error and returns a body with the reason and the caller's own
    messages.

    The messages are included so that a failed call cannot lose them.
    """
    own = list(messages)
    return lambda error: envelope(
        error.message, own, {"error": error.code or error.kind}, success=False
    )
