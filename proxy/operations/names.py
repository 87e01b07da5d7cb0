"""A caller's paths: names in the caller's own namespace, never paths on a server; and their spelling in a store's keys.

`/workspace/x`, `workspace//x/` and `./workspace/x` are one name, because the namespace is the only root. Replies to a
caller keep the caller's spelling; only keys are made from canonical names.
"""

from __future__ import annotations

import re
from urllib.parse import quote, unquote

KEY_BYTES = 255
"""The most bytes of one part of a store's key (the longest file name of ext4, XFS and APFS)."""

FIRST = "_"
"""Begins every part: a key's part must not begin with a dot, but a name may."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class BadName(ValueError):
    """The path is not a name. The text gives the reason, for its author."""


def canonical(spelled: str) -> str:
    """Return the name that a path means, or an empty string for the namespace itself. Raises BadName."""
    if _CONTROL.search(spelled):
        raise BadName(f"{_shown(spelled)} has a control character in it")
    try:
        spelled.encode()
    except UnicodeEncodeError as error:
        raise BadName(f"{_shown(spelled)} is not valid Unicode") from error
    segments: list[str] = []
    for segment in spelled.split("/"):
        if segment == "..":
            if not segments:
                raise BadName(f"{_shown(spelled)} leads out of your files")
            segments.pop()
        elif segment not in ("", "."):
            segments.append(segment)
    return "/".join(segments)


def joined(directory: str, name: str) -> str:
    """Join a file's name to its directory, and keep the directory's spelling."""
    return f"{stem(directory)}/{name}"


def stem(directory: str) -> str:
    """Return a directory in the form that precedes `/NAME`."""
    return directory.rstrip("/")


def key_part(name: str) -> str:
    """Return a canonical name as a part of a store's key: as in a URL, with `.` for `%`. The parts of two names that
    begin alike begin alike. Raises BadName if it is too long."""
    quoted = quote(name, safe="").replace(".", "%2E").replace("~", "%7E")
    part = FIRST + quoted.replace("%", ".")
    if len(part) > KEY_BYTES:
        raise BadName(f"{_shown(name)} is too long: {len(part)} bytes when stored, of {KEY_BYTES}")
    return part


def name_of(part: str) -> str | None:
    """Return the name that a key's part encodes, or None if it is not one of ours."""
    try:
        return unquote(part.removeprefix(FIRST).replace(".", "%"), errors="strict") if part.startswith(FIRST) else None
    except UnicodeDecodeError:
        return None


def _shown(text: str) -> str:
    """Shorten and escape a path for a message, on one line."""
    return ascii(text if len(text) <= 100 else text[:100] + "…")
