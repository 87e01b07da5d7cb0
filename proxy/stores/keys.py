"""Checks keys, `NAMESPACE/KIND/NAME`. A key that passes is safe for every store."""

from __future__ import annotations

import re

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
