"""Splits JSON into its members without changing them: the client's number spellings, escapes and key order stay.

msgspec does this at memory speed, but refuses half a surrogate pair (`"\\ud83d"`), which JavaScript's `slice` leaves in
tool results every day. Such escapes are masked for msgspec at the same length, and the results are unmasked.

msgspec holds the interpreter's lock during each call. Skipping a value costs at most about a nanosecond for each byte;
the expensive part is making an object for each element. So elements are counted before any objects are made.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import msgspec
from msgspec import Raw

T = TypeVar("T")

NULL = Raw(b"null")

MAX_ELEMENTS = 100_000
"""The most elements of one array, and so the most messages of a request. msgspec makes so many in about 6 ms."""

MAX_MEMBERS = 10_000
"""The most members of one object. msgspec makes so many in about 4 ms; no schema we know has a hundred in one place."""

MAX_SURROGATES = 50_000
"""The most escapes of surrogates in JSON in which not all of them are pairs. Masking so many takes 40 ms, and unmasking
them takes as long."""

MAX_VALUES = 8_000_000
"""The most comma-separated values in all that msgspec reads in one call. Skipping each takes it up to 8 ns, so this
many hold the interpreter for 60 ms. A body of the default size has so many if every value has fewer than 8 bytes."""

_PIECE = 1 << 20
"""Bytes that one step reads: about a millisecond of work, after which other threads get their turn."""

_ESCAPE = 6
"""Bytes of the longest escape, `\\u0000`."""

_QUOTE, _COMMA, _BACKSLASH, _OPEN = b'",\\['
_SPACE = b" \t\r\n"

_MASK = b"\x7f"
"""Replaces the backslash of a surrogate's escape: a JSON string may contain DEL unescaped (RFC 8259, 7)."""

_REFUSED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

_members = msgspec.json.Decoder(dict[str, Raw])
_elements = msgspec.json.Decoder(list[Raw])
_string = msgspec.json.Decoder(str)
_surrogate = re.compile(rb"\\(?<!\\\\)((?:\\\\)*+)(?=u[dD][89a-fA-F])")
"""The beginning of a run of backslashes. If their number is odd, the last one begins the escape."""
_masked = re.compile(rb"\x7f(?=u[dD][89a-fA-F])")
_LOOKAHEAD = 3
"""Bytes after a mask that distinguish it from an ordinary DEL."""
_inside = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
_whole_strings = re.compile(rb'[^"]*+(?:"(?:[^"\\]++|\\.)*+"[^"]*+)*+', re.DOTALL)
"""Matches as far as possible without cutting a string in two."""
_a_string = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_innermost = re.compile(rb"\[,*+\]")
_MARKS = bytes.maketrans(b"{}", b"[]")
_NO_MARKS = bytes(set(range(256)).difference(b"{}[],"))


class NotJson(ValueError):
    """The bytes are not the expected JSON. Code that catches this leaves the bytes unchanged."""


class TooManyElements(NotJson):
    """The JSON has more elements in one array or object than we make objects of."""


def check_utf8(body: bytes) -> None:
    """Raises NotJson unless all of `body` is UTF-8: msgspec checks only the strings that it decodes (RFC 8259, 8.1)."""
    if body.isascii():
        return
    view, decoder = memoryview(body), codecs.getincrementaldecoder("utf-8")()
    try:
        for start in range(0, len(view), _PIECE):
            decoder.decode(view[start : start + _PIECE], final=start + _PIECE >= len(view))
    except UnicodeDecodeError as error:
        raise NotJson(str(error)) from error


def members(raw: bytes | Raw) -> dict[str, Raw]:
    """Return an object's members, each as its original bytes. If a key is repeated, the last one counts.

    Raises NotJson.
    """
    if len(memoryview(raw)) > MAX_MEMBERS:
        _bound(raw, MAX_MEMBERS)
    try:
        return _members.decode(raw)
    except _REFUSED:
        found, _ = decode(_members, raw)
        return {_unmasked_key(key): unmasked(value) for key, value in found.items()}


def elements(raw: bytes | Raw) -> list[Raw]:
    """Return an array's elements, each as its original bytes. Raises NotJson."""
    _bound(raw, MAX_ELEMENTS)
    found, masked = decode(_elements, raw)
    return list(map(unmasked, found)) if masked else found


def string(raw: bytes | Raw) -> str:
    """Return a string's text, which may contain lone surrogates. Raises NotJson."""
    if len(memoryview(raw)) <= _PIECE:
        try:
            return _string.decode(raw)
        except _REFUSED:
            return _text(raw)
    view = _stripped(memoryview(raw))
    if len(view) < 2 or view[0] != _QUOTE or view[-1] != _QUOTE:
        raise NotJson("not a string")
    return _joined([_text(b'"%b"' % piece) for piece in pieces(view[1:-1])])


def decode(decoder: msgspec.json.Decoder[T], raw: bytes | Raw) -> tuple[T, bool]:
    """Decode `raw`, and say whether its bytes were masked first; if so, every Raw in the result must be `unmasked`.

    Raises NotJson.
    """
    if _values_above(raw, MAX_VALUES):
        raise NotJson(f"more than {MAX_VALUES} values")
    try:
        return decoder.decode(raw), False
    except _REFUSED as strict:
        whole = bytes(raw)
        if b"\\u" not in whole or _masked.search(whole):
            raise NotJson(str(strict)) from strict
        if whole.count(b"\\ud") + whole.count(b"\\uD") > MAX_SURROGATES:
            raise NotJson(f"half a surrogate pair, and more than {MAX_SURROGATES} escapes of surrogates") from strict
    try:
        return decoder.decode(b"".join(_surrogate.sub(rb"\1" + _MASK, piece) for piece in pieces(whole))), True
    except _REFUSED as error:
        raise NotJson(str(error)) from error


def unmasked(raw: Raw) -> Raw:
    """Restore the original bytes of a value that was decoded from masked bytes."""
    view, found = memoryview(raw), None
    for at in range(0, len(view), _PIECE):
        for mask in _masked.finditer(view[at : at + _PIECE + _LOOKAHEAD]):
            found = found or bytearray(view)
            found[at + mask.start()] = _BACKSLASH
    return raw if found is None else Raw(found)


def pieces(raw: bytes | memoryview) -> Iterator[bytes]:
    """Yield the bytes in pieces of about a megabyte, none of which begins within an escape or a character."""
    view, at = memoryview(raw), 0
    while len(view) - at > _PIECE:
        piece = bytes(view[at : at + _PIECE])
        end = len(piece)
        # In a run of backslashes, the first begins an escape, and so does every second one after it.
        last = piece.rfind(b"\\") + 1
        run = len(piece[:last].rstrip(b"\\"))
        if run:
            end = run
        elif end - last < _ESCAPE:
            end = (last - 1) // 2 * 2
        while view[at + end] & 0xC0 == 0x80:
            end -= 1
        yield piece[:end]
        at += end
    yield bytes(view[at:])


def encode(value: Any) -> bytes:
    """Encode our own value as compact JSON. Lone surrogates are written as escapes again."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return b"".join(_escaped(value))


def encoded(values: list[Any]) -> list[bytes]:
    """Encode a list as `encode` does, in parts to be joined, so that no long text in it is encoded in one step."""
    if not any([isinstance(value, str) and len(value) > _PIECE for value in values]):
        return [encode(values)]
    found = [b"["]
    try:
        for place, value in enumerate(values):
            found.append(b"," if place else b"")
            found += _quoted(value) if isinstance(value, str) else [msgspec.json.encode(value)]
    except UnicodeEncodeError:
        return list(_escaped(values))
    return [*found, b"]"]


def _quoted(text: str) -> list[bytes]:
    inner = [msgspec.json.encode(text[at : at + _PIECE])[1:-1] for at in range(0, len(text), _PIECE)]
    return [b'"', *inner, b'"']


def _escaped(value: Any) -> Iterator[bytes]:
    """Encode like `json`, but long texts in pieces."""
    if isinstance(value, str) and len(value) > _PIECE:
        yield b'"'
        for at in range(0, len(value), _PIECE):
            yield json.dumps(value[at : at + _PIECE])[1:-1].encode()
        yield b'"'
    elif isinstance(value, list | tuple) and value:
        for place, item in enumerate(value):
            yield b"," if place else b"["
            yield from _escaped(item)
        yield b"]"
    elif isinstance(value, dict) and value:
        for place, (key, item) in enumerate(value.items()):
            yield (b"," if place else b"{") + json.dumps(key).encode() + b":"
            yield from _escaped(item)
        yield b"}"
    else:
        yield json.dumps(value, separators=(",", ":")).encode()


def array(items: Iterable[bytes | Raw]) -> bytes:
    """Join elements that are JSON already into an array."""
    return b"[" + b",".join(items) + b"]"


def is_string(raw: Raw | None) -> bool:
    return raw is not None and bytes(memoryview(raw)[:1]) == b'"'


def is_array(raw: Raw | None) -> bool:
    return raw is not None and bytes(memoryview(raw)[:1]) == b"["


def is_null(raw: Raw | None) -> bool:
    return raw is None or raw is NULL or (len(memoryview(raw)) == 4 and bytes(raw) == b"null")


def more_than(raw: bytes | Raw, most: int, *, deep: bool = False) -> bool:
    """Whether an array or object has more than `most` elements. Reads each byte at most once.

    `deep` also counts the elements of everything nested in it. For bytes that are not JSON, the answer is arbitrary.
    """
    if len(memoryview(raw)) <= 2 * most:
        return False
    # Usually even all commas, including those in strings, are too few, and counting them is fast.
    return commas(raw) >= most and _separators(memoryview(raw), most, deep) >= most


def _bound(raw: bytes | Raw, most: int) -> None:
    if more_than(raw, most):
        raise TooManyElements(f"more than {most} elements in one place")


def commas(raw: bytes | Raw) -> int:
    """Count the commas, including those in strings."""
    view = memoryview(raw)
    return sum(bytes(view[at : at + _PIECE]).count(b",") for at in range(0, len(view), _PIECE))


def _values_above(raw: bytes | Raw, most: int) -> bool:
    """Whether there are more than `most` commas outside of strings."""
    if len(memoryview(raw)) <= 2 * most or commas(raw) <= most:
        return False
    return _separators(memoryview(raw), most + 1, deep=True) > most


def _separators(view: memoryview, most: int, deep: bool) -> int:
    """Count the commas between elements until there are `most`: in the outermost array or object, or (`deep`) in all.

    All but one loop is C's: 13 MB of nested arrays would otherwise take seconds.
    """
    found = depth = 0
    for piece in _without_strings(view):
        if found >= most:
            break
        if deep:
            found += piece.count(b",")
            continue
        marks = piece.translate(_MARKS, _NO_MARKS)
        for mark in _innermost.sub(b"", marks) if depth else marks:
            if mark == _COMMA:
                found += depth == 1
            else:
                depth += 1 if mark == _OPEN else -1
    return found


def _without_strings(view: memoryview) -> Iterator[bytes]:
    """Yield what is outside of strings, in pieces."""
    at = 0
    while at < len(view):
        start, at = at, _end(_whole_strings, view, at, _PIECE // 8)
        if at == start:  # a string that is longer than one step
            at = _end_of_string(view, at + 1)
        else:
            yield _a_string.sub(b"", bytes(view[start:at]))


def _end_of_string(view: memoryview, at: int) -> int:
    """Return the place after the closing quote, or one beyond the end if there is none."""
    start = -1
    while start < at < len(view) and view[at] != _QUOTE:
        start, at = at, _end(_inside, view, at)
    return at + 1


def _stripped(view: memoryview) -> memoryview:
    """Remove the white space around `view`."""
    left, right = bytes(view[:_PIECE]), bytes(view[-_PIECE:])
    return view[len(left) - len(left.lstrip(_SPACE)) : len(view) - len(right) + len(right.rstrip(_SPACE))]


def _end(pattern: re.Pattern[bytes], view: memoryview, at: int, size: int = _PIECE) -> int:
    match = pattern.match(view, at, at + size)
    return match.end() if match else at


def _text(raw: bytes | Raw) -> str:
    """Decode a string. Raises NotJson."""
    try:
        return _string.decode(raw)
    except _REFUSED as strict:
        if b"\\u" not in bytes(raw):
            raise NotJson(str(strict)) from strict
    try:
        value = json.loads(bytes(raw))
    except (ValueError, RecursionError) as error:
        raise NotJson(str(error)) from error
    if not isinstance(value, str):
        raise NotJson("not a string")
    return value


def _joined(texts: list[str]) -> str:
    """Join the pieces of a text, including surrogate pairs that were split between two of them."""
    for place in range(len(texts) - 1):
        high, low = texts[place][-1:], texts[place + 1][:1]
        if "\ud800" <= high <= "\udbff" and "\udc00" <= low <= "\udfff":
            character = (high + low).encode("utf-16", "surrogatepass").decode("utf-16")
            texts[place : place + 2] = texts[place][:-1], character + texts[place + 1][1:]
    return "".join(texts)


def _unmasked_key(key: str) -> str:
    return string(_masked.sub(rb"\\", msgspec.json.encode(key)))


def encodable(text: str) -> str:
    """Return the text with `?` for each half of a surrogate pair, which UTF-8 cannot encode."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()
