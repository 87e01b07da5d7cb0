"""Stores of write-once records: bytes under a key, written once and never changed.

A key is `NAMESPACE/KIND/NAME`, with `[A-Za-z0-9._-]` between the slashes. Any other key raises
ValueError. If the engine fails, every method raises `errors.StoreFault` and nothing else. Each
engine has one module, imported only when it is used. It blocks: `Store` runs it in threads, in fair
turns.

`sweep` deletes records not put again within their tenant's retention, in stores that do not expire
them themselves. Every worker sweeps, at its own time: deleting a record twice is harmless, so no
leader is needed.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar
from urllib.parse import unquote, urlsplit

import msgspec

from proxy.errors import Overloaded, StoreBusy, StoreFault, StoreFull, UserMistake
from proxy.release import install
from proxy.threads import WorkPool, nobody_waits

T = TypeVar("T")

CLOSE_SECONDS = 1.5
"""How long closing waits for running operations. A write takes milliseconds, a disk that hangs
takes for ever. This is less than `guarded.CLOSING`, so that the log names what hangs."""

WAITING = 10_000
"""Most calls of one caller that may wait. If there are more, the engine cannot keep up, and they
would only fill memory."""

AT_ONCE = 1_100
"""Most batches of one call that wait at once: all of a request's, and few beside `WAITING`."""

# No part begins with a dot, so none can be `.`, `..` or a store's own working folder. 255 bytes is
# the longest file name on ext4, XFS and APFS. Three of them and a prefix stay below the 1,024 bytes
# that S3 and GCS allow for a key.
_PART = r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,254}"
_IS_PART = re.compile(_PART)
_IS_KEY = re.compile(rf"{_PART}/{_PART}/{_PART}")


def is_part(text: str) -> bool:
    """Return whether `text` can be one part of a key."""
    return _IS_PART.fullmatch(text) is not None


def is_key(text: str) -> bool:
    """Return whether `text` is a whole key."""
    return _IS_KEY.fullmatch(text) is not None


def checked(key: str) -> str:
    """Return `key`. Raises ValueError if it is not a key, which is a bug of ours and not a fault of
    the engine."""
    if not is_key(key):
        raise ValueError(f"not a key of the form NAMESPACE/KIND/NAME: {key!r:.300}")
    return key


def namespace_of(key: str) -> str:
    """Return the namespace of a key, which says whose record it is."""
    return key.partition("/")[0]


CHECKS = "health.checks"
"""The namespace of what is written to check a store. No tenant's name has a dot."""

Retention = Callable[[str], float | None]
"""Returns how many seconds to keep a namespace's records after they were last put, or None to keep
them forever."""

Damaged = Callable[[str], None]
"""Called, in any thread, with a key whose record is damaged or is not a record at all."""


class Entry(msgspec.Struct, frozen=True):
    """One record in a listing: `size` is in bytes, `modified` in seconds since the epoch."""

    key: str
    size: int
    modified: float


class Engine(Protocol):
    """What keeps the records. Its methods block, and each call has a thread of its own."""

    name: str
    """Begins the text of its faults."""
    errors: type[Exception]
    """What its methods raise if it fails."""
    threads: int
    """Most reads, and most writes, at once."""
    batch: int
    """Most keys of one call."""

    def put(self, key: str, value: bytes, *, sync: bool) -> bool:
        """Store the value if the key is absent; `sync`: durably. Returns False if the key exists;
        its value is unchanged, and durable too. If the engine can do so cheaply, the existing
        record then counts as used, so that its age counts from now."""

    def get_many(self, keys: Sequence[str]) -> Sequence[bytes | None]:
        """Return the values in the order of `keys`, with None for absent ones."""

    def renew(self, keys: Sequence[str], seconds: float) -> None:
        """Let the ages of those of these records that are older than so many seconds begin anew."""

    def pages(self, prefix: str) -> Iterator[Sequence[Entry]]:
        """Yield every record whose key begins with `prefix` once, some of them at a time."""

    def delete(self, keys: Sequence[str], until: float | None = None) -> None:
        """Delete these records; with `until`, in seconds since the epoch, only those that were not
        used since then. A missing key is not an error."""

    def discard(self, key: str, value: bytes) -> None:
        """Delete the record if it still has this value. Another one may have taken its place, which
        stays."""

    def reason(self, error: Exception) -> str:
        """Return what an error says, without the data that we sent."""

    def is_full(self, error: Exception) -> bool:
        """Return whether an error says that there is no room for a record."""


class Store:
    """Write-once records in an engine. The first writer wins, in any process on any machine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._reading = WorkPool("reading the store", engine.threads, WAITING)
        self._writing = WorkPool("writing to the store", engine.threads, WAITING)

    async def put(self, key: str, value: bytes, *, sync: bool = True) -> bool:
        """Store the value if the key is absent; `sync`: durably. Returns False if it exists; then
        it is marked as used."""
        work = partial(self._engine.put, checked(key), value, sync=sync)
        return await self._run(self._writing, key, work)

    async def get(self, key: str) -> bytes | None:
        """Return the value; None if the key is absent, or if something other than a record is in
        its place."""
        [value] = await self.get_many([key])
        return value

    async def get_many(self, keys: Sequence[str]) -> Sequence[bytes | None]:
        """Return the values in the order of `keys`, with None for absent ones."""
        return [
            value
            for values in await self._run_all(self._reading, self._engine.get_many, keys)
            for value in values
        ]

    async def renew(self, keys: Sequence[str], seconds: float) -> None:
        """Let the ages of those of these records that are older than so many seconds begin anew."""
        await self._run_all(self._writing, partial(self._engine.renew, seconds=seconds), keys)

    async def list(self, prefix: str) -> AsyncGenerator[Entry, None]:
        """Yield every record whose key begins with `prefix` once, in the engine's order.

        Records that are put or deleted during the listing may or may not appear. Anything that is
        not a record is skipped. Close the generator if you stop early.
        """
        pages = self._engine.pages(prefix)
        while (
            page := await self._run(self._reading, prefix, lambda: next(pages, None))
        ) is not None:
            for entry in page:
                yield entry

    async def delete(self, *keys: str) -> None:
        """Delete these records. A missing key is not an error."""
        await self._run_all(self._writing, self._engine.delete, keys)

    async def expire(self, listed: Collection[Entry]) -> None:
        """Delete these records, except those that were used since they were listed."""
        until = max((entry.modified for entry in listed), default=None)
        work = partial(self._engine.delete, until=until)
        await self._run_all(self._writing, work, [entry.key for entry in listed])

    async def discard(self, key: str, value: bytes) -> None:
        """Delete a damaged record, of which this value was read, and no record that has taken its
        place since."""
        await self._run(self._writing, key, partial(self._engine.discard, checked(key), value))

    async def close(self) -> None:
        """Finish running operations. Do not use the store afterwards. Raises StoreFault if some
        take longer than `CLOSE_SECONDS`."""
        pools = self._reading, self._writing
        if hanging := sum(await asyncio.gather(*(pool.ended(CLOSE_SECONDS) for pool in pools))):
            raise StoreFault(f"{self._engine.name} hangs: {hanging} operations have not ended")

    async def _run_all(
        self, pool: WorkPool, work: Callable[[Sequence[str]], T], keys: Sequence[str]
    ) -> Sequence[T]:
        wanted = [checked(key) for key in keys]
        size = self._engine.batch
        batches = [wanted[at : at + size] for at in range(0, len(wanted), size)]
        found = list[T]()
        for at in range(0, len(batches), AT_ONCE):
            some = (
                self._run(pool, batch[0], partial(work, batch))
                for batch in batches[at : at + AT_ONCE]
            )
            found += await asyncio.gather(*some)
        return found

    async def _run(self, pool: WorkPool, key: str, work: Callable[[], T]) -> T:
        try:
            return await pool.run(namespace_of(key), work)
        except Overloaded as full:
            raise StoreBusy(full.message) from full
        except self._engine.errors as error:
            fault = StoreFull if self._engine.is_full(error) else StoreFault
            # Not `from error`: a traceback would show its text, which can contain our data.
            raise fault(f"{self._engine.name} failed: {self._engine.reason(error)}") from None


_REDIS = ("redis", "rediss")
_OBJECTS = ("s3", "gs", "az")


def open_store(
    url: str, retention: Retention = lambda namespace: None, damaged: Damaged = lambda key: None
) -> Store:
    """Return the store at a URL or a folder's path. Nothing connects yet, so the engine may start
    later.

    `url` is a path or `file://…` (`local.py`); `redis://` or `rediss://` (`redis.py`); or `s3://`,
    `gs://`, `az://` (`objects.py`). `retention` is called for every put, so it can use reloaded
    policies. Raises UserMistake if the URL cannot be used or the engine's client library is not
    installed.
    """
    scheme = _scheme(url)
    if scheme not in ("", "file", *_REDIS, *_OBJECTS):
        known = ", ".join(f"{name}://" for name in ("file", *_REDIS, *_OBJECTS))
        single = "; of Redis, a single server" if scheme.startswith("redis") else ""
        raise UserMistake(
            f"no store is known for {scheme}://; a folder's path or one of {known}{single}"
        )
    try:
        if scheme:
            urlsplit(url)
    except ValueError as error:
        # Python's own text may repeat the password.
        raise UserMistake(
            "the store's URL: expected a host's name, or an IPv6 address in brackets"
        ) from error
    extra = "redis" if scheme in _REDIS else "objects"
    try:
        if (folder := folder_of(url)) is not None:
            from proxy.stores.local import Folder

            return Store(Folder(folder, damaged))
        if scheme in _REDIS:
            from proxy.stores.redis import open_redis

            return Store(open_redis(url, retention))
        from proxy.stores.objects import open_objects

        return Store(open_objects(url))
    except ModuleNotFoundError as error:
        raise UserMistake(f"a store at {scheme}:// needs: {install(extra)}") from error


def expires_by_itself(url: str) -> bool:
    """Return whether the engine itself deletes records after their retention, so that no sweep is
    needed."""
    return _scheme(url) in _REDIS


def describe(url: str) -> str:
    """Return the URL without user, password and query, for logs."""
    if not _scheme(url):
        return url
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()


def folder_of(url: str) -> Path | None:
    """Return the store's folder, or None for other engines. Raises UserMistake for a `file:` URL
    without a folder."""
    scheme = _scheme(url)
    if not scheme:
        return Path(url).expanduser()
    if scheme != "file":
        return None
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path:
        raise UserMistake(
            f"a folder's URL has three slashes and an absolute path, as in file:///var/lib/x; not {url}"
        )
    return Path(unquote(parts.path)).expanduser()


def _scheme(url: str) -> str:
    return url.partition("://")[0].lower() if "://" in url else ""


# -- retention --

SWEEP_SECONDS = 3600.0
AGAIN_SECONDS = 60.0
"""Seconds until the next sweep, and until another one if the store failed."""

BATCH = 100
"""Records that are deleted together, which takes a disk some milliseconds."""

WORK_SECONDS = 0.005
"""A listing of all records rests after so many seconds of work."""


async def sweep_always(
    store: Store,
    retention: Retention,
    *,
    warn: Callable[[str, str], None],
    swept: Callable[[int, float], None],
    seconds: float = SWEEP_SECONDS,
) -> None:
    """Sweep until cancelled. The first sweep starts after a random delay, so that workers take
    turns."""
    await asyncio.sleep(random.uniform(0, seconds))
    with nobody_waits():
        while True:
            pause = seconds
            try:
                await sweep(store, retention, swept)
            except StoreFault as fault:
                warn("store sweep", f"store: sweep: {fault.message}")
                pause = min(seconds, AGAIN_SECONDS)
            await asyncio.sleep(pause)


async def sweep(
    store: Store,
    retention: Retention,
    swept: Callable[[int, float], None] = lambda deleted, overdue: None,
    clock: Callable[[], float] = time.time,
) -> int:
    """Read the whole store once and delete all that has expired; returns how many records. Those
    that are used meanwhile stay, and count too. Raises StoreFault.

    `swept(deleted, overdue)` is called for every few records: how many were deleted, and
    how many seconds the oldest of them was past its retention; at the end of a sweep, none is.
    """
    now = clock()
    deleted = 0
    expired: dict[Entry, float] = {}

    async def delete() -> int:
        if not expired:
            return 0
        await store.expire(expired)
        swept(count := len(expired), max(expired.values()))
        expired.clear()
        return count

    async with aclosing(unhurried(store)) as entries:
        async for entry in entries:
            kept = retention(namespace_of(entry.key))
            if kept is not None and now - entry.modified > kept:
                expired[entry] = now - entry.modified - kept
            if len(expired) == BATCH:
                deleted += await delete()
    deleted += await delete()
    swept(0, 0.0)
    return deleted


async def unhurried(store: Store) -> AsyncGenerator[Entry, None]:
    """Yield every record once, resting as long as it, and whoever reads it, works. Close it if you
    stop early."""
    began = time.monotonic()
    async with aclosing(store.list("")) as entries:
        async for entry in entries:
            yield entry
            if (worked := time.monotonic() - began) >= WORK_SECONDS:
                await asyncio.sleep(worked)
                began = time.monotonic()
