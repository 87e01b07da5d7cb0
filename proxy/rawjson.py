"""Splits JSON into its members without changing them: the client's number spellings, escapes and
key order stay.

msgspec does this at memory speed, but refuses half a surrogate pair (`"\\ud83d"`), which
JavaScript's `slice` leaves in tool results every day. Such escapes are masked for msgspec at the
same length, and the results are unmasked.

Skipping a value costs about a nanosecond for each byte; the expensive part is making an object for
each element. So nothing here makes more objects than the limits below allow, whatever comes in.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable
from functools import cache
from typing import Any, TypeGuard, TypeVar

import msgspec
from msgspec import Raw

T = TypeVar("T")

Members = dict[str, Raw]

NULL = Raw(b"null")
EMPTY = Raw(b"{}")

MAX_ELEMENTS = 20_000
"""The most elements of one array, and so the most messages of a request. msgspec makes so many in
about 2 ms."""

UNCOUNTED = 256 << 10
"""The elements of an array of up to so many bytes are not counted first: msgspec makes objects of
all of them in 10 ms."""

MAX_STRINGS = 100_000
"""The most strings and keys in one object, at any depth, and so its most members. msgspec makes so
many in 40 ms."""

MAX_COMMAS = 8_000_000
"""The most commas in all that msgspec reads in one call. Skipping the value after each takes it up
to 8 ns, and holds the interpreter: 60 ms. Texts have one in ten bytes at most."""

_PIECE = 1 << 20

_DEL = b"\x7f"
"""A JSON string may contain it unescaped (RFC 8259, 7), so it can mask a backslash."""

REFUSED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for what a decoder does not take."""

_members = msgspec.json.Decoder(dict[str, Raw])
_elements = msgspec.json.Decoder(list[Raw])
_string = msgspec.json.Decoder(str)
_half = re.compile("[\ud800-\udfff]")


class NotJson(ValueError):
    """The bytes are not the expected JSON. Code that catches this leaves the bytes unchanged."""


class TooManyElements(NotJson):
    """The JSON has more elements in one array or object than we make objects of."""


def check_utf8(body: bytes) -> None:
    """Raises NotJson unless all of `body` is UTF-8: msgspec checks only the strings that it decodes
    (RFC 8259, 8.1)."""
    if body.isascii():
        return
    view = memoryview(body)
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for start in range(0, len(view), _PIECE):
            decoder.decode(view[start : start + _PIECE], final=start + _PIECE >= len(view))
    except UnicodeDecodeError as error:
        raise NotJson(str(error)) from error


def members(raw: bytes | Raw, *, checked: bool = False) -> Members:
    """Return an object's members, each as its original bytes. If a key is repeated, the last one
    counts.

    `checked`: the caller knows that they are few. Raises NotJson.
    """
    if not checked and strings(raw) > MAX_STRINGS:
        raise TooManyElements(f"more than {MAX_STRINGS} strings in one object")
    try:
        return _members.decode(raw)
    except REFUSED:
        found, _ = decode(_members, raw)
    keys = (text(msgspec.json.encode(key).replace(_DEL, b"\\")) for key in found)
    return dict(zip(keys, map(unmasked, found.values()), strict=True))


def elements(raw: bytes | Raw) -> list[Raw]:
    """Return an array's elements, each as its original bytes. Raises NotJson."""
    many = len(memoryview(raw)) > UNCOUNTED and commas(raw) >= MAX_ELEMENTS
    found, masked = decode(_bounded_elements(MAX_ELEMENTS) if many else _elements, raw)
    if many:
        values = msgspec.structs.astuple(found)
        found = list(
            values[: next((at for at, value in enumerate(values) if value is NULL), len(values))]
        )
    if len(found) > MAX_ELEMENTS:
        raise TooManyElements(f"more than {MAX_ELEMENTS} elements in one place")
    return list(map(unmasked, found)) if masked else found


def text(raw: bytes | Raw) -> str:
    """Return a string's text, which may contain lone surrogates. Raises NotJson."""
    try:
        return _string.decode(raw)
    except REFUSED as strict:
        if b"\\u" not in bytes(raw):
            raise NotJson(str(strict)) from strict
    try:
        value = json.loads(bytes(raw))
    except (ValueError, RecursionError) as error:
        raise NotJson(str(error)) from error
    if not isinstance(value, str):
        raise NotJson("not a string")
    return value


def decode(decoder: msgspec.json.Decoder[T], raw: bytes | Raw) -> tuple[T, bool]:
    """Decode `raw`, and say whether its bytes were masked first; if so, every Raw in the result
    must be `unmasked`.

    Raises NotJson.
    """
    if len(memoryview(raw)) > MAX_COMMAS and commas(raw) > MAX_COMMAS:
        raise TooManyElements(f"more than {MAX_COMMAS} commas")
    try:
        return decoder.decode(raw), False
    except REFUSED as error:
        refused = str(error)  # the error itself would hold this frame, which holds it
    whole = bytes(raw)
    if b"\\u" in whole and _DEL not in whole:
        # Escaped backslashes are masked in pairs, and then the backslash of each surrogate's
        # escape.
        whole = (
            whole.replace(rb"\\", 2 * _DEL)
            .replace(rb"\ud", _DEL + b"ud")
            .replace(rb"\uD", _DEL + b"uD")
        )
        try:
            return decoder.decode(whole), True
        except REFUSED as error:
            refused = str(error)
    if "of at most length" in refused:
        raise TooManyElements(f"more than {MAX_ELEMENTS} elements in one place")
    raise NotJson(refused)


def unmasked(raw: Raw) -> Raw:
    """Restore the original bytes of a value that was decoded from masked bytes."""
    return Raw(bytes(raw).replace(_DEL, b"\\"))


@cache
def _bounded_elements(most: int) -> msgspec.json.Decoder[Any]:
    """Return a decoder that stops at the element after the last of `most`; making it takes 40 ms
    once."""
    fields = [(f"_{place}", Raw, NULL) for place in range(most)]
    return msgspec.json.Decoder(
        msgspec.defstruct("Elements", fields, array_like=True, forbid_unknown_fields=True)
    )


def encode(value: Any) -> bytes:
    """Encode our own value as compact JSON. Halves of surrogate pairs are written as escapes
    again."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return _encoded_with_halves(value)


def _encoded_with_halves(value: Any) -> bytes:
    if isinstance(value, str):
        parts = _half.split(value)
        halves = [*_half.findall(value), ""]
        written = [
            msgspec.json.encode(part)[1:-1] + json.dumps(half)[1:-1].encode()
            for part, half in zip(parts, halves, strict=True)
        ]
        return b'"%b"' % b"".join(written)
    if isinstance(value, list | tuple):
        return array(map(_encoded_with_halves, value))
    if isinstance(value, dict):
        pairs = (
            (_encoded_with_halves(key), _encoded_with_halves(item)) for key, item in value.items()
        )
        return b"{%b}" % b",".join(b"%b:%b" % pair for pair in pairs)
    return msgspec.json.encode(value)


def array(items: Iterable[bytes | Raw]) -> bytes:
    """Join elements that are JSON already into an array."""
    return b"[" + b",".join(items) + b"]"


def is_string(raw: Raw | None) -> TypeGuard[Raw]:
    return raw is not None and bytes(memoryview(raw)[:1]) == b'"'


def is_array(raw: Raw | None) -> TypeGuard[Raw]:
    return raw is not None and bytes(memoryview(raw)[:1]) == b"["


def is_object(raw: Raw | None) -> TypeGuard[Raw]:
    return raw is not None and bytes(memoryview(raw)[:1]) == b"{"


def is_null(raw: Raw | None) -> bool:
    return raw is None or raw is NULL or (len(memoryview(raw)) == 4 and bytes(raw) == b"null")


def commas(raw: bytes | Raw) -> int:
    """Count the commas, including those in strings."""
    return bytes(raw).count(b",")


def strings(raw: bytes | Raw) -> int:
    """Return a number that is not below that of the strings: no backslash precedes their opening
    quotes. 0: few."""
    if len(memoryview(raw)) <= MAX_STRINGS:
        return 0
    whole = bytes(raw)
    return whole.count(b'"') - whole.count(rb"\"")


def encodable(text: str) -> str:
    """Return the text with `?` for each half of a surrogate pair, which UTF-8 cannot encode."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


# -- lenient reading: a value of another type than expected counts as absent -----------------------


def text_of(raw: Raw | None) -> str:
    """Return a string's text, or "" if the value is not a string."""
    if raw is None or not is_string(raw):
        return ""
    try:
        return text(raw)
    except NotJson:
        return ""


def members_of(raw: Raw | None) -> Members:
    """Return an object's members; empty for null or a missing value. Raises NotJson for anything
    else."""
    return {} if raw is None or is_null(raw) else members(raw)


def object_of(raw: Raw | None) -> Members:
    """Return an object's members; empty for anything else."""
    try:
        return members_of(raw)
    except NotJson:
        return {}


def elements_of(raw: Raw | None) -> list[Raw]:
    """Return an array's elements; none of anything else. Raises NotJson if it has too many."""
    return elements(raw) if is_array(raw) else []


def on_one_line(body: bytes) -> Members:
    """Return the members of a body, none of them with a line break; empty for anything but an
    object."""
    try:
        return members(msgspec.json.format(body, indent=-1))
    except (NotJson, msgspec.MsgspecError):
        return {}


def string(text: str) -> Raw:
    return Raw(encode(text))


def join(pieces: Iterable[str]) -> str:
    """Join the pieces. Servers that escape all non-ASCII characters may split a surrogate pair
    between two pieces."""
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
    """Return a number that is not negative, or None for anything else, or if it is so large that
    sums could fail."""
    text = bytes(raw)
    if not text[:1].isdigit() or len(text) > 32:
        return None
    found = int(text) if text.isdigit() else float(text)
    return found if found < 1e18 else None


def integer(raw: Raw | None) -> int:
    """Return a number of tokens, or 0 for anything else."""
    text = b"" if raw is None else bytes(raw)
    return int(text) if text.isdigit() and len(text) < 12 else 0
