"""Finds the lines of texts in which a pattern matches, and reports them to a model, file by file.

Lines have the numbers that `read_file` takes as its offset.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby

import msgspec

from proxy.plan.preview import line_count
from proxy.tools.find import Index
from proxy.tools.pages import line_start

# path → whole text. May be lazy: a text is looked up only when it is read or searched.
Files = Mapping[str, str]

Find = Callable[[bytes, int], int]
"""Like `bytes.find` over UTF-8: takes an offset and returns where the first match at or after it
begins, or -1. May raise TooSlow."""

LONG_LINE = 500
LEAD = 150
"""Characters: of a longer line, only windows of this size around its matches are shown, each with
so many before it."""
FEW = 5
"""Up to so many matches come with lines around them: a match alone often says nothing."""
AROUND = 3  # lines, on each side
NEIGHBOUR_CHARS = 200  # the most characters of a line around a match
SHORT_LINES = 40
SHORT_CHARS = 3_000
"""A named file up to this size is shown if nothing matches in it: a weak model often searches for
the wrong word."""

_base64 = re.compile(rb"(?<![A-Za-z0-9+/])[A-Za-z0-9+/]{1000,}+={0,2}")
"""The bytes of an image or a file, which no pattern means."""


class TooSlow(ValueError):
    """The search takes more time than is allowed. The text says so, for the pattern's author."""


class TextLine(bytes):
    """The bytes of one line: a search in it need not look for the line's end."""


class LineMatch(msgspec.Struct, frozen=True):
    """A matching line, or one window of a long line. `line` is 1-based; `column` is a 0-based
    character."""

    path: str
    line: int
    column: int
    text: str
    windowed: bool = False


def matches(files: Files, paths: Iterable[str], find: Find) -> Iterator[LineMatch]:
    """Yield every match in these files, file by file and line by line."""
    for path in paths:
        yield from in_data(path, searched(files[path]), find)


def searched(text: str) -> bytes:
    """Return a text as it is searched: in UTF-8, with a word for the bytes of each image and
    file."""
    data = text.encode("utf-8", "replace")
    return _base64.sub(b"[base64]", data) if b"base64" in data else data


def in_data(path: str, data: bytes, find: Find) -> Iterator[LineMatch]:
    """Yield every match in a file's UTF-8, in one pass that does not visit the lines without a
    match."""
    number = 1
    start = 0
    while start < len(data) and (found := find(data, start)) != -1:
        begin = data.rfind(b"\n", start, found) + 1 or start
        if begin == len(data):
            return  # an empty match after the last line
        end = data.find(b"\n", found)
        end = len(data) if end < 0 else end
        number += data.count(b"\n", start, begin)
        yield from _in_line(path, number, TextLine(data[begin:end]), found - begin, find)
        number = number + 1
        start = end + 1


def _in_line(path: str, number: int, line: TextLine, at: int, find: Find) -> Iterator[LineMatch]:
    """Yield the line, in which a match begins at byte `at`, or the windows around its matches if it
    is long."""
    text = line.decode()
    column = resume = 0
    while at >= 0:
        # an empty match may be within a character
        hit = column + len(line[resume:at].decode("utf-8", "ignore"))
        if len(text) <= LONG_LINE:
            yield LineMatch(path, number, hit, text.removesuffix("\r"))
            return
        start = max(0, hit - LEAD)
        stop = start + LONG_LINE
        window = ("…" if start else "") + text[start:stop] + ("…" if stop < len(text) else "")
        yield LineMatch(path, number, hit, window, windowed=True)
        if stop >= len(text):
            return
        resume += len(text[column:stop].encode())
        column = stop
        at = find(line, resume)


# -- reports ---------------------------------------------------------------------------------------


def report(
    files: Files,
    index: Index,
    head: str,
    found: Sequence[LineMatch],
    *,
    around: bool = False,
    foot: str = "",
) -> str:
    """List matches by file, with the lines around them if wanted, between a first and a last
    line."""
    lines = [head]
    for path, group in groupby(found, lambda match: match.path):
        lines += ["---", index.title(path), *_shown(files[path] if around else "", [*group])]
    return "\n".join([*lines, "---", foot] if foot else [*lines, "---"])


def short(files: Files, index: Index, path: str) -> str:
    """Return a short file in the form of a report, or nothing if it is not short."""
    text = files[path]
    if not text or len(text) > SHORT_CHARS or line_count(text) > SHORT_LINES:
        return ""
    lines = [_neighbour(place, line) for place, line in _lines(text, 0, SHORT_LINES)]
    return "\n".join(["---", f"{index.title(path)}, all of it", *lines])


def _shown(text: str, group: Sequence[LineMatch]) -> Iterator[str]:
    """Yield the matches of a file; with its `text`, also the lines around them unless a line is
    long."""
    if not text or any(match.windowed for match in group):
        for match in group:
            column = f", column {match.column}" if match.windowed else ""
            yield f"{match.line - 1}{column}: {match.text}"
        return
    hits = {match.line - 1: match.text for match in group}
    begun = False
    places = sorted(
        {place for hit in hits for place in range(max(hit - AROUND, 0), hit + AROUND + 1)}
    )
    for _, pairs in groupby(enumerate(places), lambda pair: pair[1] - pair[0]):
        block = [place for _, place in pairs]
        if begun:
            yield "…"
        for place, line in _lines(text, block[0], block[-1] + 1):
            yield f"{place}: {hits[place]}" if place in hits else _neighbour(place, line)
        begun = True


def _lines(text: str, first: int, stop: int) -> Iterator[tuple[int, str]]:
    """Yield the lines from `first` to `stop` with their numbers, as far as the text has them."""
    start = line_start(text, first)
    for place in range(first, stop):
        if start >= len(text):
            return
        end = text.find("\n", start)
        end = len(text) if end < 0 else end
        yield place, text[start:end].removesuffix("\r")
        start = end + 1


def _neighbour(place: int, line: str) -> str:
    return f"{place}- {line[:NEIGHBOUR_CHARS]}{'…' if len(line) > NEIGHBOUR_CHARS else ''}"
