"""Server-sent events cut out of bytes, each with the very bytes that it came as (HTML standard, 9.2.5 and 9.2.6).

Lines end at CR, LF or CRLF and nowhere else: U+2028 stands raw in JSON, and a decoder that splits there breaks it.
"""

from __future__ import annotations

import re

import msgspec

LIMIT = 32 << 20
"""Bytes that one event may have. A whole reply fits; what never ends must not fill the memory."""

MAX_LINES = 10_000
"""Lines of an event that are looked at. More of them are comments or data of nobody's; as they came they go on."""

BOM = b"\xef\xbb\xbf"
DONE = b"[DONE]"

_end = re.compile(rb"\n\n|\n\r\n?|\r\n\r\n?|\r\n\n|\r\r\n?")
"""An empty line behind a line's end. Where it ends in CR, an LF that belongs to it may be yet to come."""
_longest_end = 4
_lines = re.compile(rb"\r\n|\r|\n")


class ServerSentEvent(msgspec.Struct, frozen=True, gc=False):
    """One event. `raw` is what came, up to and with its empty line; `data` is None where it has no data field."""

    raw: bytes
    data: bytes | None
    name: bytes | None = None


class TooLarge(ValueError):
    """An event that does not end within LIMIT."""


class EventDecoder:
    """Feed it bytes as they come; the events' raw bytes add up to them."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._searched = 0
        self._begun = False

    def feed(self, chunk: bytes) -> list[ServerSentEvent]:
        """The events that are complete now. Raises TooLarge."""
        if not self._rest and chunk.endswith(b"\n\n") and chunk.find(b"\n\n") == len(chunk) - 2 and b"\r" not in chunk:
            return [self._event(chunk)]  # one write of the server, one event: the usual case
        self._rest += chunk
        events = [self._event(raw) for raw in self._complete()]
        if len(self._rest) > LIMIT:
            raise TooLarge(f"an event of more than {LIMIT} bytes")
        return events

    def flush(self) -> list[ServerSentEvent]:
        """What stands behind the last empty line: an event that nothing ended."""
        rest, self._rest, self._searched = bytes(self._rest), bytearray(), 0
        return [self._event(rest)] if rest else []

    def _complete(self) -> list[bytes]:
        raws: list[bytes] = []
        rest, start = self._rest, 0
        while match := _end.search(rest, max(start, self._searched)):
            if match.end() == len(rest) and rest.endswith(b"\r"):
                break  # the line feed of this CRLF may come with the next bytes
            raws.append(bytes(rest[start : match.end()]))
            start = self._searched = match.end()
        del rest[:start]
        self._searched = max(len(rest) - _longest_end + 1, 0)
        return raws

    def _event(self, raw: bytes) -> ServerSentEvent:
        text = raw
        if not self._begun:
            self._begun, text = True, raw.removeprefix(BOM)
        if text.startswith(b"data: ") and text.find(b"\n") == len(text) - 2 and b"\r" not in text:
            return ServerSentEvent(raw, text[6:-2])
        return _parsed(raw, text)


def _parsed(raw: bytes, text: bytes) -> ServerSentEvent:
    if text.count(b"\n") + text.count(b"\r") > 2 * MAX_LINES:
        return ServerSentEvent(raw, None)
    data: list[bytes] = []
    name = None
    for line in _lines.split(text):
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            data.append(value)
        elif field == b"event":
            name = value
    return ServerSentEvent(raw, b"\n".join(data) if data else None, name)


def encode(data: bytes, name: bytes | None = None) -> bytes:
    """An event with this data, which is JSON on one line or DONE."""
    named = b"event: " + name + b"\n" if name else b""
    return named + b"data: " + data + b"\n\n"


def comment(text: bytes) -> bytes:
    """A line that clients skip: it keeps connections open while there is nothing to say."""
    return b": " + text + b"\n\n"
