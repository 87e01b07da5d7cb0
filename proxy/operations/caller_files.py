"""The files that `/context_offload` wrote for one caller. The store has them under `NAMESPACE/files/NAME`.

A caller can also read, by its exact path, an original that the proxy moved for the same key.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import NoReturn

import msgspec

from proxy.core.policy import Policy
from proxy.core.retrieval import names
from proxy.errors import StoreFault
from proxy.stores.base import Entry
from proxy.stores.guarded import Put, Visit
from proxy.stores.keys import is_part
from proxy.stores.memory import Missing
from proxy.telemetry.outcome import StoreError
from proxy.threads import Threads

KIND, ORIGINALS = "files", "originals"

AT_ONCE = 16
"""The most files that one call writes concurrently."""


class File(msgspec.Struct, frozen=True):
    """A stored file: its canonical name and its size in bytes."""

    name: str
    size: int


class CallerFiles:
    """One request's access to its caller's files. All methods raise StoreFault if the store does not answer."""

    def __init__(self, visit: Visit, namespace: str, policy: Policy, threads: Threads) -> None:
        self._visit = visit
        self._threads = threads
        self._namespace = namespace
        offloads = [policy.offload, *(rule.offload for rule in policy.rules)]
        self._store_dirs = {names.canonical(offload.store_dir) for offload in offloads}

    @property
    def errors(self) -> Mapping[StoreError, int]:
        return self._visit.errors

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
        found = await self._read(keys)
        return next((content for content in found if content is not None), None)

    async def read_many(self, wanted: Sequence[str]) -> Sequence[bytes | None]:
        """Return the contents in the order of the names, with None for each missing file."""
        return await self._read([self._key(names.key_part(name)) for name in wanted]) if wanted else []

    async def _put(self, name: str, content: bytes) -> None:
        if not await self._put_if_free(name, content):
            [existing] = await self.read_many([name])
            if existing != content:
                raise StoreFault(f"The store already has other content as {name}")

    async def _put_if_free(self, name: str, content: bytes) -> bool:
        done = await self._visit.put(self._key(names.key_part(name)), content, keep=False, sure=True)
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
        return await self._threads.reading.run(self._namespace, lambda: _beginning(text, found))

    async def _read(self, keys: Sequence[str]) -> Sequence[bytes | None]:
        found = await self._visit.read(keys)
        if found is Missing.FAILED:
            _failed("read a file")
        return found

    def _key(self, part: str) -> str:
        return f"{self._namespace}/{KIND}/{part}"

    def _original(self, name: str) -> str | None:
        directory, _, file = name.rpartition("/")
        return f"{self._namespace}/{ORIGINALS}/{file}" if directory in self._store_dirs and is_part(file) else None


def _beginning(text: str, entries: Sequence[Entry]) -> list[File]:
    named = ((names.name_of(entry.key.split("/", 2)[2]), entry.size) for entry in entries)
    files = (File(name, size) for name, size in named if name and name.startswith(text))
    return sorted(files, key=lambda file: file.name)


def _failed(task: str) -> NoReturn:
    raise StoreFault(f"The store did not {task}; nothing was changed, try again later")
