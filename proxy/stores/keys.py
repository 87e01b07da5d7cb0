"""The form of keys, `NAMESPACE/KIND/NAME`. A key that was checked here is safe for every store."""

from __future__ import annotations

import re

# No part begins with a dot, so that none is `.`, `..` or a store's own working folder. 255 bytes is the longest file
# name of ext4, XFS and APFS; three of them stay below the 1,024 bytes that S3 and GCS allow a key, prefix included.
_PART = r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,254}"
_IS_PART = re.compile(_PART)
_IS_KEY = re.compile(rf"{_PART}/{_PART}/{_PART}")
_IS_PREFIX = re.compile(rf"(?:{_PART}(?:/{_PART}){{0,2}}/?)?")


def is_part(text: str) -> bool:
    """Whether `text` can be one part of a key."""
    return _IS_PART.fullmatch(text) is not None


def is_key(text: str) -> bool:
    """Whether `text` is a whole key."""
    return _IS_KEY.fullmatch(text) is not None


def checked(key: str) -> str:
    """`key` itself. Raises ValueError if it is not a key: that is our own bug, not a fault of the engine."""
    if not is_key(key):
        raise ValueError(f"not a key of the form NAMESPACE/KIND/NAME: {key!r:.300}")
    return key


def checked_prefix(prefix: str) -> str:
    """`prefix` itself. Raises ValueError if no key can begin with it."""
    if not _IS_PREFIX.fullmatch(prefix):
        raise ValueError(f"no key begins like this: {prefix!r:.300}")
    return prefix


def namespace_of(key: str) -> str:
    """The namespace of a key: whose record it is."""
    return key.partition("/")[0]
