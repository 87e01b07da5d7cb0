"""The files that `/context_offload` wrote for one caller. The store has them under `NAMESPACE/files/NAME`.

A caller can also read, by its exact path, an original that the proxy moved for the same key.

The names of moved texts contain a digest of the text, so a text that was cut off or changed is noticed. It counts as
absent, but stays where it is until the same text is written again: people may still make something of it.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NoReturn

import msgspec

from proxy.errors import NotThere, StoreFault
from proxy.operations import names
from proxy.plan.preview import digest_in
from proxy.policy import Policy
from proxy.requests.archive import Archive
from proxy.stores import Entry, is_part
from proxy.stores.guarded import Missing, Put, Visit
from proxy.threads import WorkPool

KIND, ORIGINALS = "files", "originals"

TRIES = 8
"""How often a call tries to replace a damaged file: others may be doing the same."""
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
    def errors(self) -> Mapping[str, int]:
        return self._visit.errors

    @property
    def archive(self) -> Archive:
        """What the caller's conversations moved."""
        return Archive(self._visit, self._namespace, partial(self._threads.run, self._namespace))

    async def put_all(self, files: Mapping[str, bytes]) -> None:
        """Write files durably, by name. Raises StoreFault if one exists with other content."""
        waiting = asyncio.Semaphore(AT_ONCE)

        async def put(name: str, content: bytes) -> None:
            async with waiting:
                await self._put(name, content)

        await asyncio.gather(*(put(name, content) for name, content in files.items()))

    async def put_next(self, stem: str, ending: str, content: bytes) -> str:
        """Write a file under the next free name: `STEM0ENDING`, `STEM1ENDING`, …; returns the name."""
        taken = [file.name.removeprefix(stem).removesuffix(ending) for file in await self._beginning(stem)]
        number = max((int(one) + 1 for one in taken if one.isascii() and one.isdigit()), default=0)
        while not await self._put_if_free(name := f"{stem}{number}{ending}", content):
            number += 1
        return name

    async def below(self, directory: str) -> list[File]:
        """Return the files below a directory, sorted by name."""
        return await self._beginning(f"{directory}/" if directory else "")

    async def read(self, name: str) -> bytes | None:
        """Return the content of the file or the original with this path, or None if there is neither."""
        directory, _, file = name.rpartition("/")
        original = f"{self._namespace}/{ORIGINALS}/{file}" if directory in self._store_dirs and is_part(file) else ""
        found = await self._read([(key, name) for key in (self._key(name), original) if key])
        return next((content for content in found if content is not None), None)

    async def read_many(self, wanted: Sequence[str]) -> Sequence[bytes | None]:
        """Return the contents in the order of the names, with None for each missing file."""
        return await self._read([(self._key(name), name) for name in wanted]) if wanted else []

    def missing(self, name: str, path: str) -> NotThere:
        """Return the error for a file that could not be read. `path` is how the caller spells its name."""
        if name in self.damaged:
            return NotThere(
                f"The file {path!r} is damaged in the store: its content is not what was written. So it counts as "
                "missing; what is left of it is kept for this server's operators"
            )
        return NotThere(f"There is no file {path!r} among your files")

    async def _put(self, name: str, content: bytes) -> None:
        for _ in range(TRIES):  # other content can only be damaged, as the name tells it, and gives way
            if await self._put_if_free(name, content):
                return
            [existing] = await self._stored([self._key(name)])
            if existing == content:
                return
            if existing is not None:
                await self._visit.discard(self._key(name))
        raise StoreFault(f"The store already has other content as {name}")

    async def _put_if_free(self, name: str, content: bytes) -> bool:
        done = await self._visit.put(self._key(name), content, keep=False, sure=True)
        if done is Put.FAILED:
            _failed("keep a file")
        return done is Put.WRITTEN

    async def _beginning(self, text: str) -> list[File]:
        """Return the files whose names begin with `text`, sorted by name. Raises BadName if `text` is too long."""
        found = await self._visit.list(self._key(text))
        if found is Missing.FAILED:
            _failed("list files")
        return await self._threads.run(self._namespace, lambda: _beginning(text, found))

    async def _read(self, wanted: Sequence[tuple[str, str]]) -> Sequence[bytes | None]:
        """Return the contents of these keys and names, with None where there is none or where it is damaged."""
        found = await self._stored([key for key, _ in wanted])
        whole = await self._threads.run(self._namespace, lambda: [*map(_is_whole, (name for _, name in wanted), found)])
        for (key, name), is_whole in zip(wanted, whole, strict=True):
            if not is_whole:
                self._visit.damaged(key)
                self.damaged[name] = None
        return [content if is_whole else None for content, is_whole in zip(found, whole, strict=True)]

    async def _stored(self, keys: Sequence[str]) -> Sequence[bytes | None]:
        found = await self._visit.read(keys)
        if found is Missing.FAILED:
            _failed("read a file")
        return found

    def _key(self, name: str) -> str:
        return f"{self._namespace}/{KIND}/{names.key_part(name)}"


def _is_whole(name: str, content: bytes | None) -> bool:
    """Whether this content is what the name says, or there is none."""
    digest = digest_in(name)
    return content is None or not digest or hashlib.sha256(content).hexdigest().startswith(digest)


def _beginning(text: str, entries: Sequence[Entry]) -> list[File]:
    named = ((names.name_of(entry.key.split("/", 2)[2]) or "", entry.size) for entry in entries)
    return sorted(
        (File(name, size) for name, size in named if name and name.startswith(text)), key=lambda file: file.name
    )


def _failed(task: str) -> NoReturn:
    raise StoreFault(f"The store did not {task}; nothing was changed, try again later")
