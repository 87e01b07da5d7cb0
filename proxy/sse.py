"""An incremental decoder of server-sent events that keeps each event's bytes (HTML standard, 9.2.5
and 9.2.6).

Lines end at CR, LF or CRLF and nowhere else. U+2028 may occur unescaped in JSON, and splitting
there would break it.
"""

from __future__ import annotations

import re

import msgspec

LIMIT = 32 << 20
"""The most bytes of one event. A whole reply fits; an event that never ends must not fill the
memory."""

MAX_LINES = 10_000
"""The most lines of an event that is parsed. An event with more passes through unchanged; no server
sends one."""

BOM = b"\xef\xbb\xbf"
DONE = b"[DONE]"

_end = re.compile(rb"\n\n|\n\r\n?|\r\n\r\n?|\r\n\n|\r\r\n?")
"""The end of a line and the empty line after it. If the match ends in CR, its LF may still
arrive."""
_longest_end = 4
_lines = re.compile(rb"\r\n|\r|\n")
_nothing = [b"", b""]


class ServerSentEvent(msgspec.Struct, frozen=True, gc=False):
    """One event. `raw` holds its bytes, up to and including the empty line; `data` is None if it
    has no data field."""

    raw: bytes
    data: bytes | None
    name: bytes | None = None


class TooLarge(ValueError):
    """An event has more than LIMIT bytes."""


class EventDecoder:
    """Decodes bytes as they arrive. The raw bytes of all events add up to the bytes fed."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._searched = 0
        self._begun = False

    @property
    def held(self) -> int:
        """How many bytes of an unfinished event are held."""
        return len(self._rest)

    def feed(self, chunk: bytes) -> list[ServerSentEvent]:
        """Return the events that these bytes complete. Raises TooLarge."""
        if not self._rest and (usual := _usual(chunk)):
            self._begun = True
            return [usual]
        self._rest += chunk
        events = []
        rest = self._rest
        start = 0
        while match := _end.search(rest, max(start, self._searched)):
            if match.end() == len(rest) and rest.endswith(b"\r"):
                break  # the line feed of this CRLF may come with the next bytes
            events.append(self._event(bytes(rest[start : match.end()])))
            start = self._searched = match.end()
        del rest[:start]
        self._searched = max(len(rest) - _longest_end + 1, 0)
        if len(rest) > LIMIT:
            raise TooLarge(f"an event of more than {LIMIT} bytes")
        return events

    def flush(self) -> list[ServerSentEvent]:
        """Return the unfinished event after the last empty line, if any."""
        rest = bytes(self._rest)
        self._rest = bytearray()
        self._searched = 0
        return [self._event(rest)] if rest else []

    def _event(self, raw: bytes) -> ServerSentEvent:
        text = raw if self._begun else raw.removeprefix(BOM)
        self._begun = True
        if usual := _usual(raw):
            return usual
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


def _usual(raw: bytes) -> ServerSentEvent | None:
    """Return the event that these bytes are if it is as most servers write it: a line of data, and
    at most a name before it."""
    if b"\r" in raw:
        return None
    lines = raw.split(b"\n", 3)
    name = None
    if lines[0].startswith(b"event: "):
        name = lines.pop(0)[7:]
    if lines[1:] == _nothing and lines[0].startswith(b"data: "):
        return ServerSentEvent(raw, lines[0][6:], name)
    return None


def encode(data: bytes, name: bytes | None = None) -> bytes:
    """Return the bytes of an event with this data, which is JSON on one line or DONE."""
    named = b"event: " + name + b"\n" if name else b""
    return named + b"data: " + data + b"\n\n"


def comment(text: bytes) -> bytes:
    """Return a comment, which clients skip; it keeps a silent connection open."""
    return b": " + text + b"\n\n"
