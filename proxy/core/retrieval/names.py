"""A caller's paths: names in the caller's own namespace, never paths of a server, and what they are in a store's keys.

`/workspace/x`, `workspace//x/` and `./workspace/x` are one name: the namespace is all the root that there is. What a
caller is told is spelled as the caller spelled it; only keys are made of canonical names.
"""

from __future__ import annotations

import re

KEY_BYTES = 255
"""The longest part that a store's key may have (the longest file name of ext4, XFS and APFS)."""

FIRST = "_"
"""Before every part: a key's part must not begin with a dot, and a name may."""

_SPECIAL = re.compile(rb"[^A-Za-z0-9_-]")
_ESCAPED = re.compile(r"\.(\.|-|[0-9a-f]{2})")
_ESCAPES = {b"/": b".-", b".": b".."}
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class BadName(ValueError):
    """No name: the text says why, for whoever wrote it."""


def canonical(spelled: str) -> str:
    """The name that a path means; empty for the namespace itself. Raises BadName."""
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
    """The path of a file in a directory that is spelled like this."""
    return f"{stem(directory)}/{name}"


def stem(directory: str) -> str:
    """A directory as it stands before `/NAME`."""
    return directory.rstrip("/")


def key_part(name: str) -> str:
    """A canonical name as a part of a store's key. Raises BadName where it is too long."""
    part = beginning(name)
    if len(part) > KEY_BYTES:
        raise BadName(f"{_shown(name)} is too long: {len(part)} bytes when stored, of {KEY_BYTES}")
    return part


def beginning(name: str) -> str:
    """How the key's part of every name begins that begins with `name`."""
    return FIRST + _SPECIAL.sub(_escaped, name.encode()).decode()


def name_of(part: str) -> str | None:
    """The name that a key's part stands for; None where it is none of ours."""
    if not part.startswith(FIRST):
        return None
    raw = _ESCAPED.sub(_unescaped, part[len(FIRST) :]).encode("latin-1")
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None


def _escaped(match: re.Match[bytes]) -> bytes:
    return _ESCAPES.get(match[0]) or b".%02x" % match[0][0]


def _unescaped(match: re.Match[str]) -> str:
    code = match[1]
    return {".": ".", "-": "/"}.get(code) or chr(int(code, 16))


def _shown(text: str) -> str:
    """A path for a message: readable, on one line, not too long."""
    return ascii(text if len(text) <= 100 else text[:100] + "…")
