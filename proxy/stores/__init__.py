"""Stores of write-once records: bytes under a key, written once and never changed.

A key is `NAMESPACE/KIND/NAME`, with `[A-Za-z0-9._-]` between the slashes. Any other key raises ValueError. If the
engine fails, every method raises `errors.StoreFault` and nothing else. Each engine has one module, imported only when
it is used.

`sweep` deletes records not put again within their tenant's retention, in stores that do not expire them themselves.
Every worker sweeps, at its own time: deleting a record twice is harmless, so no leader is needed.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

import msgspec

from proxy.errors import StoreFault, UserMistake
from proxy.threads import nobody_waits

# No part begins with a dot, so none can be `.`, `..` or a store's own working folder. 255 bytes is the longest file
# name on ext4, XFS and APFS. Three of them and a prefix stay below the 1,024 bytes that S3 and GCS allow for a key.
_PART = r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,254}"
_IS_PART = re.compile(_PART)
_IS_KEY = re.compile(rf"{_PART}/{_PART}/{_PART}")
_IS_PREFIX = re.compile(rf"(?:{_PART}(?:/{_PART}){{0,2}}/?)?")


def is_part(text: str) -> bool:
    """Return whether `text` can be one part of a key."""
    return _IS_PART.fullmatch(text) is not None


def is_key(text: str) -> bool:
    """Return whether `text` is a whole key."""
    return _IS_KEY.fullmatch(text) is not None


def checked(key: str) -> str:
    """Return `key`. Raises ValueError if it is not a key, which is a bug of ours and not a fault of the engine."""
    if not is_key(key):
        raise ValueError(f"not a key of the form NAMESPACE/KIND/NAME: {key!r:.300}")
    return key


def checked_prefix(prefix: str) -> str:
    """Return `prefix`. Raises ValueError if no key can begin with it."""
    if not _IS_PREFIX.fullmatch(prefix):
        raise ValueError(f"no key begins like this: {prefix!r:.300}")
    return prefix


def namespace_of(key: str) -> str:
    """Return the namespace of a key, which says whose record it is."""
    return key.partition("/")[0]


Retention = Callable[[str], float | None]
"""Returns how many seconds to keep a namespace's records after they were last put, or None to keep them forever."""

Damaged = Callable[[str], None]
"""Called, in any thread, with a key whose record is damaged or is not a record at all."""


class Entry(msgspec.Struct, frozen=True):
    """One record in a listing: `size` is in bytes, `modified` in seconds since the epoch."""

    key: str
    size: int
    modified: float


class Store(Protocol):
    """Write-once records. The first writer wins, in any process on any machine."""

    async def put(self, key: str, value: bytes) -> bool:
        """Store the value if the key is absent, durably if anybody waits for it. Returns False if the key exists; its
        value is unchanged.

        If the engine can do so cheaply, putting an existing record also marks it as used, so that its age counts from
        now.
        """

    async def get(self, key: str) -> bytes | None:
        """Return the value, or None if there is none or if something other than a record is in its place."""

    async def get_many(self, keys: Sequence[str]) -> Sequence[bytes | None]:
        """Return the values in the order of `keys`, with None for absent ones."""

    def list(self, prefix: str) -> AsyncGenerator[Entry, None]:
        """Yield every record whose key begins with `prefix` once, in the engine's order.

        Records that are put or deleted during the listing may or may not appear. Anything that is not a record is
        skipped. Close the generator if you stop early.
        """

    async def delete(self, *keys: str) -> None:
        """Delete these records. A missing key is not an error."""

    async def close(self) -> None:
        """Finish running operations and close the engine. Do not use the store afterwards.

        Raises StoreFault, naming the operations that hang, if some do not finish.
        """


_REDIS = ("redis", "rediss", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster")
_OBJECTS = ("s3", "gs", "az")


def open_store(url: str, retention: Retention = lambda namespace: None, damaged: Damaged = lambda key: None) -> Store:
    """Return the store at a URL or a folder's path. Nothing connects yet, so the engine may start later.

    `url` is a path or `file://…` (`local.py`); `redis://`, `rediss://`, `redis+sentinel://` (`redis.py`); or `s3://`,
    `gs://`, `az://` (`objects.py`). `retention` is called for every put, so it can use reloaded policies. Raises
    UserMistake if the URL cannot be used or the engine's client library is not installed.
    """
    scheme = _scheme(url)
    if scheme not in ("", "file", *_REDIS, *_OBJECTS):
        known = ", ".join(f"{name}://" for name in ("file", *_REDIS, *_OBJECTS))
        raise UserMistake(f"no store is known for {scheme}://; a folder's path or one of {known}")
    try:
        if scheme:
            urlsplit(url)
    except ValueError as error:
        # Python's own text may repeat the password.
        raise UserMistake("the store's URL: expected a host's name, or an IPv6 address in brackets") from error
    extra = "redis" if scheme in _REDIS else "objects"
    try:
        if (folder := folder_of(url)) is not None:
            from proxy.stores.local import LocalStore

            return LocalStore(folder, damaged)
        if scheme in _REDIS:
            from proxy.stores.redis import open_redis

            return open_redis(url, retention, damaged)
        from proxy.stores.objects import open_objects

        return open_objects(url)
    except ModuleNotFoundError as error:
        raise UserMistake(f"a store at {scheme}:// needs: pip install 'offload-proxy[{extra}]'") from error


def expires_by_itself(url: str) -> bool:
    """Return whether the engine itself deletes records after their retention, so that no sweep is needed."""
    return _scheme(url) in _REDIS


def describe(url: str) -> str:
    """Return the URL without user, password and query, for logs."""
    if not _scheme(url):
        return url
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()


def folder_of(url: str) -> Path | None:
    """Return the store's folder, or None for other engines. Raises UserMistake for a `file:` URL without a folder."""
    scheme = _scheme(url)
    if not scheme:
        return Path(url).expanduser()
    if scheme != "file":
        return None
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path:
        raise UserMistake(f"a folder's URL has three slashes and an absolute path, as in file:///var/lib/x; not {url}")
    return Path(unquote(parts.path)).expanduser()


def _scheme(url: str) -> str:
    return url.partition("://")[0].lower() if "://" in url else ""


# -- retention --

SWEEP_SECONDS, AGAIN_SECONDS = 3600.0, 60.0
"""Seconds until the next sweep, and until another one if the store failed."""

BATCH = 100
"""Records that are deleted together, which takes a disk some milliseconds."""

WORK_SECONDS = 0.005
"""A sweep rests after so many seconds of work."""


async def sweep_always(
    store: Store,
    retention: Retention,
    *,
    warn: Callable[[str, str], None],
    swept: Callable[[int, float], None],
    seconds: float = SWEEP_SECONDS,
) -> None:
    """Sweep until cancelled. The first sweep starts after a random delay, so that workers take turns."""
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
    """Read the whole store once and delete all that has expired; returns how many records. Raises StoreFault.

    It rests as long as it works. `swept(deleted, overdue)` is called for every few records: how many were deleted, and
    how many seconds the oldest of them was past its retention; at the end of a sweep, none is.
    """
    now, deleted, began = clock(), 0, time.monotonic()
    expired: dict[str, float] = {}

    async def delete() -> int:
        if not expired:
            return 0
        await store.delete(*expired)
        swept(count := len(expired), max(expired.values()))
        expired.clear()
        return count

    async with aclosing(store.list("")) as entries:
        async for entry in entries:
            kept = retention(namespace_of(entry.key))
            if kept is not None and now - entry.modified > kept:
                expired[entry.key] = now - entry.modified - kept
            if len(expired) == BATCH:
                deleted += await delete()
            if (worked := time.monotonic() - began) >= WORK_SECONDS:
                await asyncio.sleep(worked)
                began = time.monotonic()
    deleted += await delete()
    swept(0, 0.0)
    return deleted
