"""Finds lines: where a pattern matches in texts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec

Files = Mapping[str, str]
"""Path → whole text. May be lazy: a text is looked up only when it is read or searched."""

Find = Callable[[bytes, int], int]
"""Like `bytes.find` over UTF-8: takes an offset and returns where the first match at or after it begins, or -1. May
raise TooSlow.

If there is too much to search in one call, it returns `~offset`: no match begins before `offset`, the start of a line;
continue from there.
"""

LONG_LINE = 500
"""Characters. Of a longer line, only windows of this size around its matches are shown."""

LEAD = 150
"""Characters of a window before its match."""


_base64 = re.compile(rb"(?<![A-Za-z0-9+/])[A-Za-z0-9+/]{1000,}+={0,2}")
"""The bytes of an image or a file, which no pattern means."""


class TooSlow(ValueError):
    """The search takes more time than is allowed. The text says so, for the pattern's author."""


class LineTooLong(TooSlow):
    """A line is too long for this pattern, which can only be searched for in the whole line at once."""


class TextLine(bytes):
    """The bytes of one line: a search in it need not look for the line's end."""


class LineMatch(msgspec.Struct, frozen=True):
    """A matching line, or one window of a long line. `line` is 1-based; `column` is a 0-based character."""

    path: str
    line: int
    column: int
    text: str
    windowed: bool = False


def matches(files: Files, paths: Iterable[str], find: Find) -> Iterator[LineMatch | None]:
    """Yield every match in these files, file by file and line by line, with a None now and then as in `in_data`."""
    for path in paths:
        yield from in_data(path, searched(files[path]), find)
        yield None


def searched(text: str) -> bytes:
    """Return a text as it is searched: in UTF-8, with a word for the bytes of each image and file."""
    data = text.encode("utf-8", "replace")
    return _base64.sub(b"[base64]", data) if b"base64" in data else data


def in_data(path: str, data: bytes, find: Find) -> Iterator[LineMatch | None]:
    """Yield every match in a file's UTF-8, in one pass that does not visit the lines without a match.

    Yields None after each part without a match, so that the caller can let others have their turn.
    """
    number, start = 1, 0
    while start < len(data) and (found := find(data, start)) != -1:
        if found < 0:
            yield None
            number, start = number + data.count(b"\n", start, ~found), ~found
            continue
        line_start = data.rfind(b"\n", start, found) + 1 or start
        if line_start == len(data):
            return  # an empty match after the last line
        line_end = data.find(b"\n", found)
        line_end = len(data) if line_end < 0 else line_end
        number += data.count(b"\n", start, line_start)
        yield from _in_line(path, number, TextLine(data[line_start:line_end]), found - line_start, find)
        number, start = number + 1, line_end + 1


def _in_line(path: str, number: int, line: TextLine, at: int, find: Find) -> Iterator[LineMatch]:
    """Yield the line, in which a match begins at byte `at`, or the windows around its matches if it is long."""
    text = line.decode()
    if len(text) <= LONG_LINE:
        yield LineMatch(path, number, _length(line[:at]), text.removesuffix("\r"))
        return
    column = resume = 0
    while at >= 0:
        hit = column + _length(line[resume:at])
        stop = max(0, hit - LEAD) + LONG_LINE
        yield LineMatch(path, number, hit, _window(text, max(0, hit - LEAD), stop), windowed=True)
        if stop >= len(text):
            return
        resume += len(text[column:stop].encode())
        column, at = stop, find(line, resume)


def _length(data: bytes) -> int:
    """Count the characters of `data`. An empty match may cut it off within a character."""
    return len(data.decode("utf-8", "ignore"))


def _window(text: str, start: int, stop: int) -> str:
    return ("…" if start else "") + text[start:stop] + ("…" if stop < len(text) else "")
