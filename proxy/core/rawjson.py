"""JSON cut into its members without touching them: number spellings, escapes and key order stay the client's.

msgspec does it at memory speed, but refuses half a surrogate pair (`"\\ud83d"`), which JavaScript's `slice` leaves in
tool results every day. Those are masked for it: same length, and undone in what it returns.

msgspec holds the interpreter's lock for as long as one call takes. Skipping over a value costs about a nanosecond for
each byte or less; what costs is making an object for each element. So elements are counted before they are made.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import msgspec
from msgspec import Raw

T = TypeVar("T")

MAX_ELEMENTS = 100_000
"""Elements of one array: as many messages as a request may have. To make them takes msgspec about 6 ms."""

MAX_MEMBERS = 10_000
"""Members of one object. To make them takes msgspec about 4 ms; no schema that we know has a hundred in one place."""

MAX_SURROGATES = 50_000
"""Escapes of surrogates, where not all of them are pairs. To mask so many takes 40 ms, and to undo it as long."""

MAX_VALUES = 8_000_000
"""Values between commas, in all of what msgspec looks at in one call: skipping over each takes it up to 8 ns, so this
many hold the interpreter for 60 ms. A body of the default size has as many where every value has fewer than 8 bytes."""

_PIECE = 1 << 20
"""Bytes that one step looks at: about a millisecond, after which other threads get their turn."""

_ESCAPE = 6
"""Bytes of the longest escape, `\\u0000`."""

_QUOTE, _COMMA, _BACKSLASH = b'",\\'
_SPACE = b" \t\r\n"

_MASK = b"\x7f"
"""Stands for the backslash of a surrogate's escape: DEL may stand in a JSON string as it is (RFC 8259, 7)."""

_REFUSED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

_members = msgspec.json.Decoder(dict[str, Raw])
_elements = msgspec.json.Decoder(list[Raw])
_string = msgspec.json.Decoder(str)
_surrogate = re.compile(rb"\\(?<!\\\\)((?:\\\\)*+)(?=u[dD][89a-fA-F])")
"""Where a run of backslashes begins: of an odd number of them, the last one is the escape's."""
_masked = re.compile(rb"\x7f(?=u[dD][89a-fA-F])")
_LOOKAHEAD = 3
"""Bytes behind a mask that tell it from a DEL."""
_outside = re.compile(rb'[^"{}\[\],]*+(?:"(?:[^"\\]++|\\.)*+"[^"{}\[\],]*+)*+', re.DOTALL)
"""Up to the next bracket or comma that is outside of strings."""
_inside = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
_whole_strings = re.compile(rb'[^"]*+(?:"(?:[^"\\]++|\\.)*+"[^"]*+)*+', re.DOTALL)
"""As far as no string is cut in two."""
_a_string = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)


class NotJson(ValueError):
    """Not the JSON that was looked for. Whoever gets this leaves the bytes alone."""


class TooManyElements(NotJson):
    """JSON, with more elements in one array or object than we make objects of."""


def members(raw: bytes | Raw) -> dict[str, Raw]:
    """An object's members, each as the bytes that it came as; of a repeated key the last one counts."""
    if len(memoryview(raw)) > MAX_MEMBERS:
        _bound(raw, MAX_MEMBERS)
    try:
        return _members.decode(raw)
    except _REFUSED:
        found, _ = decode(_members, raw)
        return {_unmasked_key(key): unmasked(value) for key, value in found.items()}


def elements(raw: bytes | Raw) -> list[Raw]:
    """An array's elements, each as the bytes that it came as."""
    _bound(raw, MAX_ELEMENTS)
    found, masked = decode(_elements, raw)
    return list(map(unmasked, found)) if masked else found


def string(raw: bytes | Raw) -> str:
    """A string's text; it can hold lone surrogates."""
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
    """What the decoder makes of it, and whether that is of masked bytes: then every Raw in it has to be `unmasked`.

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
    """The bytes that came, of a value of masked ones."""
    view, found = memoryview(raw), None
    for at in range(0, len(view), _PIECE):
        for mask in _masked.finditer(view[at : at + _PIECE + _LOOKAHEAD]):
            found = found or bytearray(view)
            found[at + mask.start()] = _BACKSLASH
    return raw if found is None else Raw(found)


def pieces(raw: bytes | memoryview) -> Iterator[bytes]:
    """The bytes in pieces of about a megabyte, none of which begins within an escape or a character."""
    view, at = memoryview(raw), 0
    while len(view) - at > _PIECE:
        piece = bytes(view[at : at + _PIECE])
        end = len(piece)
        # An escape begins where a run of backslashes does, and at every other one of them.
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
    """JSON for values of ours, compact; lone surrogates go out as the escapes they came as."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return b"".join(_escaped(value))


def _escaped(value: Any) -> Iterator[bytes]:
    """As `json` writes it, but long texts in pieces."""
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
    """An array of elements that are JSON already."""
    return b"[" + b",".join(items) + b"]"


def is_string(raw: Raw | None) -> bool:
    return raw is not None and bytes(memoryview(raw)[:1]) == b'"'


def is_array(raw: Raw | None) -> bool:
    return raw is not None and bytes(memoryview(raw)[:1]) == b"["


def is_null(raw: Raw | None) -> bool:
    return raw is None or (len(memoryview(raw)) == 4 and bytes(raw) == b"null")


def more_than(raw: bytes | Raw, most: int, *, deep: bool = False) -> bool:
    """Whether an array or an object has more elements than that, at no more cost than looking at each byte once.

    `deep`: counting those of all that is in it as well. What is no JSON has any number of them.
    """
    if len(memoryview(raw)) <= 2 * most:
        return False
    # Most of the time there are fewer commas than that in all, those in strings included.
    return commas(raw) >= most and _separators(memoryview(raw), most, deep) >= most


def _bound(raw: bytes | Raw, most: int) -> None:
    if more_than(raw, most):
        raise TooManyElements(f"more than {most} elements in one place")


def commas(raw: bytes | Raw) -> int:
    """How many there are, those in strings included."""
    view = memoryview(raw)
    return sum(bytes(view[at : at + _PIECE]).count(b",") for at in range(0, len(view), _PIECE))


def _values_above(raw: bytes | Raw, most: int) -> bool:
    """Whether there are more commas outside of strings than that."""
    if len(memoryview(raw)) <= 2 * most or commas(raw) <= most:
        return False
    view, found, at = memoryview(raw), 0, 0
    while at < len(view) and found <= most:
        start, at = at, _end(_whole_strings, view, at, _PIECE // 8)
        found += _a_string.sub(b"", bytes(view[start:at])).count(b",")
        if at == start:  # a string that one step does not reach the end of
            at = _end_of_string(view, at + 1)
    return found > most


def _separators(view: memoryview, most: int, deep: bool) -> int:
    """Commas between elements, of the outermost array or object or of any, up to `most` of them."""
    found = depth = at = 0
    while at < len(view) and found < most:
        start, at = at, _end(_outside, view, at)
        if at == len(view):
            break
        mark = view[at]
        if mark in b"{[":
            depth += 1
        elif mark in b"}]":
            depth -= 1
        elif mark == _COMMA:
            found += deep or depth == 1
        elif mark == _QUOTE and at == start:  # a string that one step does not reach the end of
            at = _end_of_string(view, at + 1)
            continue
        else:
            continue
        at += 1
    return found


def _end_of_string(view: memoryview, at: int) -> int:
    """Behind the closing quote, or the end where there is none."""
    start = -1
    while start < at < len(view) and view[at] != _QUOTE:
        start, at = at, _end(_inside, view, at)
    return at + 1


def _stripped(view: memoryview) -> memoryview:
    """Without white space around it."""
    left, right = bytes(view[:_PIECE]), bytes(view[-_PIECE:])
    return view[len(left) - len(left.lstrip(_SPACE)) : len(view) - len(right) + len(right.rstrip(_SPACE))]


def _end(pattern: re.Pattern[bytes], view: memoryview, at: int, size: int = _PIECE) -> int:
    match = pattern.match(view, at, at + size)
    return match.end() if match else at


def _text(raw: bytes | Raw) -> str:
    """A string's text."""
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
    """The text that was cut into these, and a surrogate pair with it here and there."""
    for place in range(len(texts) - 1):
        high, low = texts[place][-1:], texts[place + 1][:1]
        if "\ud800" <= high <= "\udbff" and "\udc00" <= low <= "\udfff":
            character = (high + low).encode("utf-16", "surrogatepass").decode("utf-16")
            texts[place : place + 2] = texts[place][:-1], character + texts[place + 1][1:]
    return "".join(texts)


def _unmasked_key(key: str) -> str:
    return string(_masked.sub(rb"\\", msgspec.json.encode(key)))
