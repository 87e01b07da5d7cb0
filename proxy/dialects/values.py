"""Reads JSON values leniently: a member of another type than expected counts as absent."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from msgspec import Raw

from proxy import rawjson
from proxy.rawjson import NotJson

Members = dict[str, Raw]

EMPTY = Raw(b"{}")
NULL = rawjson.NULL


def text_of(raw: Raw | None) -> str:
    """Return a string's text, or "" if the value is not a string."""
    if raw is None or not rawjson.is_string(raw):
        return ""
    try:
        return rawjson.string(raw)
    except NotJson:
        return ""


def members_of(raw: Raw | None) -> Members:
    """Return an object's members; empty for null or a missing value. Raises NotJson for anything else."""
    return {} if raw is None or rawjson.is_null(raw) else rawjson.members(raw)


def object_of(raw: Raw | None) -> Members:
    """Return an object's members; empty for anything else."""
    try:
        return members_of(raw)
    except NotJson:
        return {}


def on_one_line(body: bytes) -> Members:
    """Return the members of a body, none of them with a line break; empty for anything but an object."""
    try:
        return rawjson.members(msgspec.json.format(body, indent=-1))
    except (NotJson, msgspec.MsgspecError):
        return {}


def string(text: str) -> Raw:
    return Raw(rawjson.encode(text))


def join(pieces: Iterable[str]) -> str:
    """Join the pieces. Servers that escape all non-ASCII characters may split a surrogate pair between two pieces."""
    text = "".join(pieces)
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    return text


def place(raw: Raw | None) -> int | None:
    """Return an index, or None for anything else."""
    text = b"" if raw is None else bytes(raw)
    return int(text) if text.isdigit() and len(text) < 10 else None


def number(raw: Raw) -> int | float | None:
    """Return a number that is not negative, or None for anything else, or if it is so large that sums could fail."""
    text = bytes(raw)
    if not text[:1].isdigit() or len(text) > 32:
        return None
    found = int(text) if text.isdigit() else float(text)
    return found if found < 1e18 else None


def whole(raw: Raw | None) -> int:
    """Return a number of tokens, or 0 for anything else."""
    text = b"" if raw is None else bytes(raw)
    return int(text) if text.isdigit() and len(text) < 12 else 0
