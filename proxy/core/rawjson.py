"""JSON cut into its members without touching them: number spellings, escapes and key order stay the client's.

msgspec does it at memory speed, but refuses half a surrogate pair (`"\\ud83d"`), which JavaScript's `slice` leaves in
tool results every day. The standard library takes those, so it stands behind.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec
from msgspec import Raw

T = TypeVar("T")

_members = msgspec.json.Decoder(dict[str, Raw])
_elements = msgspec.json.Decoder(list[Raw])
_string = msgspec.json.Decoder(str)
_lenient = json.JSONDecoder()
_space = re.compile(r"[ \t\r\n]*")


class NotJson(ValueError):
    """Not the JSON that was looked for. Whoever gets this leaves the bytes alone."""


def members(raw: bytes | Raw) -> dict[str, Raw]:
    """An object's members, each as the bytes that it came as; of a repeated key the last one counts."""
    return _decode(_members, raw, _lenient_members)


def elements(raw: bytes | Raw) -> list[Raw]:
    """An array's elements, each as the bytes that it came as."""
    return _decode(_elements, raw, _lenient_elements)


def string(raw: bytes | Raw) -> str:
    """A string's text; it can hold lone surrogates."""
    return _decode(_string, raw, _lenient_string)


def encode(value: Any) -> bytes:
    """JSON for values of ours, compact; lone surrogates go out as the escapes they came as."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":")).encode()


def array(items: Iterable[bytes | Raw]) -> bytes:
    """An array of elements that are JSON already."""
    return b"[" + b",".join(items) + b"]"


def is_string(raw: Raw | None) -> bool:
    return raw is not None and bytes(memoryview(raw)[:1]) == b'"'


def is_array(raw: Raw | None) -> bool:
    return raw is not None and bytes(memoryview(raw)[:1]) == b"["


def is_null(raw: Raw | None) -> bool:
    return raw is None or bytes(raw) == b"null"


def _decode(decoder: msgspec.json.Decoder[T], raw: bytes | Raw, lenient: Callable[[str], T]) -> T:
    try:
        return decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as strict:
        if b"\\u" not in bytes(raw):
            raise NotJson(str(strict)) from strict
    try:
        return lenient(bytes(raw).decode())
    except (ValueError, RecursionError) as error:
        raise NotJson(str(error)) from error


def _lenient_string(text: str) -> str:
    value = json.loads(text)
    if not isinstance(value, str):
        raise NotJson("not a string")
    return value


def _lenient_elements(text: str) -> list[Raw]:
    found: list[Raw] = []
    at = _open(text, "[")
    while text[at : at + 1] != "]":
        end = _lenient.raw_decode(text, at)[1]
        found.append(Raw(text[at:end].encode()))
        at = _next(text, end, "]")
    return _closed(text, at, found)


def _lenient_members(text: str) -> dict[str, Raw]:
    found: dict[str, Raw] = {}
    at = _open(text, "{")
    while text[at : at + 1] != "}":
        key, end = _lenient.raw_decode(text, at)
        at = _skip(text, _skip(text, end) + 1)
        end = _lenient.raw_decode(text, at)[1]
        found[key] = Raw(text[at:end].encode())
        at = _next(text, end, "}")
    return _closed(text, at, found)


def _skip(text: str, at: int) -> int:
    match = _space.match(text, at)
    return match.end() if match else at


def _open(text: str, bracket: str) -> int:
    at = _skip(text, 0)
    if text[at : at + 1] != bracket:
        raise NotJson(f"does not begin with {bracket}")
    return _skip(text, at + 1)


def _next(text: str, end: int, bracket: str) -> int:
    """Where the next element begins, or the closing bracket stands."""
    at = _skip(text, end)
    if text[at : at + 1] == ",":
        return _skip(text, at + 1)
    if text[at : at + 1] != bracket:
        raise NotJson(f"no comma and no {bracket} at {at}")
    return at


def _closed(text: str, at: int, found: T) -> T:
    if text[at + 1 :].strip(" \t\r\n"):
        raise NotJson("something stands behind the end")
    return found
