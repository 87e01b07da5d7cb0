"""Stores of write-once records. Each engine has one module, imported only when it is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from proxy.errors import UserMistake
from proxy.stores.base import Damaged, Entry, Retention, Store

__all__ = ["Entry", "Retention", "Store", "describe", "expires_by_itself", "folder_of", "open_store"]


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


_REDIS = ("redis", "rediss", "redis+sentinel", "rediss+sentinel")

_OPENERS: Mapping[str, Callable[[str, Retention, Damaged], Store]] = {
    "": _folder,
    "file": _folder,
    **dict.fromkeys(_REDIS, _redis),
    **dict.fromkeys(("s3", "gs", "az"), _objects),
}
