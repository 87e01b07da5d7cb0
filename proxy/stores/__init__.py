"""Stores of write-once records: bytes under a key, written once and never changed.

A key is `NAMESPACE/KIND/NAME`, with `[A-Za-z0-9._-]` between the slashes. Any other key raises ValueError. If the
engine fails, every method raises `errors.StoreFault` and nothing else. Each engine has one module, imported only when
it is used.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol
from urllib.parse import SplitResult, unquote, urlsplit

import msgspec

from proxy.errors import UserMistake

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


def open_store(url: str, retention: Retention = lambda namespace: None, damaged: Damaged = lambda key: None) -> Store:
    """Return the store at a URL or a folder's path. Nothing connects yet, so the engine may start later.

    `url` is a path or `file://…` (`local.py`); `redis://`, `rediss://`, `redis+sentinel://` (`redis.py`); or `s3://`,
    `gs://`, `az://` (`objects.py`). `retention` is called for every put, so it can use reloaded policies. Raises
    UserMistake if the URL cannot be used or the engine's client library is not installed.
    """
    scheme = _scheme(url)
    if scheme not in _OPENERS:
        known = ", ".join(f"{name}://" for name in _OPENERS if name)
        raise UserMistake(f"no store is known for {scheme}://; a folder's path or one of {known}")
    try:
        _parts(url)
    except ValueError as error:
        # Python's own text may repeat the password.
        raise UserMistake("the store's URL: expected a host's name, or an IPv6 address in brackets") from error
    return _OPENERS[scheme](url, retention, damaged)


def expires_by_itself(url: str) -> bool:
    """Return whether the engine itself deletes records after their retention, so that no sweep is needed."""
    return _scheme(url) in _REDIS


def describe(url: str) -> str:
    """Return the URL without user, password and query, for logs."""
    parts = _parts(url)
    if parts is None:
        return url
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()


def _scheme(url: str) -> str:
    return url.partition("://")[0].lower() if "://" in url else ""


def _parts(url: str) -> SplitResult | None:
    """Return a URL's parts; None for a folder's path. Raises ValueError for brackets that hold no IPv6 address."""
    return urlsplit(url) if _scheme(url) else None


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


def _folder(url: str, retention: Retention, damaged: Damaged) -> Store:
    from proxy.stores.local import LocalStore

    folder = folder_of(url)
    assert folder is not None
    return LocalStore(folder, damaged)


def _redis(url: str, retention: Retention, damaged: Damaged) -> Store:
    try:
        from proxy.stores.redis import open_redis
    except ModuleNotFoundError as error:
        raise UserMistake("a Redis store needs: pip install 'offload-proxy[redis]'") from error
    return open_redis(url, retention, damaged)


def _objects(url: str, retention: Retention, damaged: Damaged) -> Store:
    try:
        from proxy.stores.objects import open_objects
    except ModuleNotFoundError as error:
        raise UserMistake("an object store needs: pip install 'offload-proxy[objects]'") from error
    return open_objects(url)


_REDIS = ("redis", "rediss", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster")

_OPENERS: Mapping[str, Callable[[str, Retention, Damaged], Store]] = {
    "": _folder,
    "file": _folder,
    **dict.fromkeys(_REDIS, _redis),
    **dict.fromkeys(("s3", "gs", "az"), _objects),
}
