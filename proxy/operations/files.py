"""The files that `/context_offload` wrote for one caller. The store has them under `NAMESPACE/files/NAME`.

A caller can also read, by its exact path, an original that the proxy moved for the same key.

The names of moved texts contain a digest of the text. Any other file has one more line in the store: the SHA-256 of its
content and its key. So a file that was cut off or changed is noticed. It counts as absent, but stays where it is until
the same file is written again: its caller may have no other copy, and people may still make something of it.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from typing import NoReturn

import msgspec

from proxy.errors import NotThere, StoreFault
from proxy.plan.labels import digest_in
from proxy.policy import Policy
from proxy.requests.archive import Archive
from proxy.stores import Entry, is_part
from proxy.stores.guarded import Put, Visit
from proxy.stores.memory import Missing
from proxy.telemetry.outcome import StoreError
from proxy.threads import WorkPool
from proxy.tools import names

KIND, ORIGINALS = "files", "originals"

SEAL_BYTES = 65
"""Bytes of the line with the digest, and of the break before it."""

AT_ONCE = 16
"""The most files that one call writes concurrently."""


class File(msgspec.Struct, frozen=True):
    """A stored file: its canonical name and its size in bytes."""

    name: str
    size: int


class CallerFiles:
    """One request's access to its caller's files. All methods raise StoreFault if the store does not answer."""

    def __init__(self, visit: Visit, namespace: str, policy: Policy, threads: WorkPool) -> None:
        self._visit = visit
        self._threads = threads
        self._namespace = namespace
        offloads = [policy.offload, *(rule.offload for rule in policy.rules)]
        self.damaged: dict[str, None] = {}
        """The names of the damaged files that were met, in order."""
        self._store_dirs = {names.canonical(offload.store_dir) for offload in offloads}

    @property
    def errors(self) -> Mapping[StoreError, int]:
        return self._visit.errors

    @property
    def archive(self) -> Archive:
        """What the caller's conversations moved."""
        return Archive(self._visit, self._namespace)

    async def put_all(self, files: Mapping[str, bytes]) -> None:
        """Write files durably, by name. Raises StoreFault if one exists with other content."""
        waiting = asyncio.Semaphore(AT_ONCE)

        async def put(name: str, content: bytes) -> None:
            async with waiting:
                await self._put(name, content)

        await asyncio.gather(*(put(name, content) for name, content in files.items()))

    async def put_next(self, stem: str, ending: str, content: bytes) -> str:
        """Write a file under the next free name: `STEM0ENDING`, `STEM1ENDING`, …; returns the name."""
        number = await self._next_number(stem, ending)
        while not await self._put_if_free(name := f"{stem}{number}{ending}", content):
            number += 1
        return name

    async def below(self, directory: str) -> list[File]:
        """Return the files below a directory, sorted by name."""
        begin = f"{directory}/" if directory else ""
        return await self._beginning(begin)

    async def read(self, name: str) -> bytes | None:
        """Return the content of the file or the original with this path, or None if there is neither."""
        keys = [key for key in (self._key(names.key_part(name)), self._original(name)) if key]
        found = await self._read([(key, name) for key in keys])
        return next((content for content in found if content is not None), None)

    async def read_many(self, wanted: Sequence[str]) -> Sequence[bytes | None]:
        """Return the contents in the order of the names, with None for each missing file."""
        return await self._read([(self._key(names.key_part(name)), name) for name in wanted]) if wanted else []

    def missing(self, name: str, path: str) -> NotThere:
        """Return the error for a file that could not be read. `path` is how the caller spells its name."""
        if name in self.damaged:
            return NotThere(
                f"The file {path!r} is damaged in the store: its content is not what was written. So it counts as "
                "missing; what is left of it is kept for this server's operators"
            )
        return NotThere(f"There is no file {path!r} among your files")

    async def _put(self, name: str, content: bytes) -> None:
        key = self._key(names.key_part(name))
        for _ in range(2):  # a damaged file, and one that is deleted meanwhile, gives way
            if await self._put_if_free(name, content):
                return
            [existing] = await self._stored([key])
            if existing is None:
                continue
            [there] = await self._read([(key, name)])
            if there == content:
                return
            if there is not None:
                break
            await self._visit.discard(key, existing)
        raise StoreFault(f"The store already has other content as {name}")

    async def _put_if_free(self, name: str, content: bytes) -> bool:
        key = self._key(names.key_part(name))
        value = await self._threads.run(self._namespace, lambda: stored(key, name, content))
        done = await self._visit.put(key, value, keep=False, sure=True)
        if done is Put.FAILED:
            _failed("keep a file")
        return done is Put.WRITTEN

    async def _next_number(self, stem: str, ending: str) -> int:
        taken = await self._beginning(stem)
        numbers = [file.name.removeprefix(stem).removesuffix(ending) for file in taken]
        return max((int(number) + 1 for number in numbers if number.isascii() and number.isdigit()), default=0)

    async def _beginning(self, text: str) -> list[File]:
        """Return the files whose names begin with `text`, sorted by name. Raises BadName if `text` is too long."""
        found = await self._visit.list(self._key(names.key_part(text)))
        if found is Missing.FAILED:
            _failed("list files")
        return await self._threads.run(self._namespace, lambda: _beginning(text, found))

    async def _read(self, wanted: Sequence[tuple[str, str]]) -> Sequence[bytes | None]:
        """Return the contents of these keys and names, with None where there is none or where it is damaged."""
        found = await self._stored([key for key, _ in wanted])
        contents = await self._threads.run(self._namespace, lambda: list(map(_whole, wanted, found)))
        for (key, name), value, content in zip(wanted, found, contents, strict=True):
            if value is not None and content is None:
                self._visit.damaged(key)
                self.damaged[name] = None
        return contents

    async def _stored(self, keys: Sequence[str]) -> Sequence[bytes | None]:
        found = await self._visit.read(keys)
        if found is Missing.FAILED:
            _failed("read a file")
        return found

    def _key(self, part: str) -> str:
        return f"{self._namespace}/{KIND}/{part}"

    def _original(self, name: str) -> str | None:
        directory, _, file = name.rpartition("/")
        return f"{self._namespace}/{ORIGINALS}/{file}" if directory in self._store_dirs and is_part(file) else None


def stored(key: str, name: str, content: bytes) -> bytes:
    """Return the content as it is stored: with a seal, unless the name tells the content."""
    return content if digest_in(name) else b"%b\n%b" % (content, _seal(key, content))


def _seal(key: str, content: bytes) -> bytes:
    digest = hashlib.sha256(content)
    digest.update(key.encode())
    return digest.hexdigest().encode()


def _whole(of: tuple[str, str], value: bytes | None) -> bytes | None:
    """Return the content of a stored file with this key and name, or None if it is not what was written."""
    key, name = of
    if value is None:
        return None
    if digest := digest_in(name):
        return value if hashlib.sha256(value).hexdigest().startswith(digest) else None
    if key.split("/")[1] == ORIGINALS:
        return value
    content = value[:-SEAL_BYTES]
    return content if value[-SEAL_BYTES:] == b"\n" + _seal(key, content) else None


def _beginning(text: str, entries: Sequence[Entry]) -> list[File]:
    named = ((names.name_of(entry.key.split("/", 2)[2]), entry.size) for entry in entries)
    files = [
        File(name, size if digest_in(name) else max(0, size - SEAL_BYTES))
        for name, size in named
        if name and name.startswith(text)
    ]
    return sorted(files, key=lambda file: file.name)


def _failed(task: str) -> NoReturn:
    raise StoreFault(f"The store did not {task}; nothing was changed, try again later")
