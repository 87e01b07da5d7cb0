"""Writes what `grep` found, file by file. Lines have the numbers that `read_file` takes as its offset."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from proxy.plan.preview import line_count
from proxy.tools import pages
from proxy.tools.find import Index, relative
from proxy.tools.search import Files, LineMatch

FEW = 5
"""Up to so many matches come with the lines around them: a match alone often says nothing."""

AROUND = 3
"""Lines before and after a match."""

NEIGHBOUR_CHARS = 200
"""The most characters of a line around a match."""

SHORT_LINES, SHORT_CHARS = 40, 3_000
"""A named file up to this size is shown if nothing matches in it: a weak model often searches for the wrong word."""

LISTED = (20, 5, 0)
"""How many files an answer lists: the first of these numbers that its budget allows."""


class Reports:
    """Writes reports about the files of one request."""

    def __init__(self, files: Files, index: Index, store_dir: str) -> None:
        self._files = files
        self._index = index
        self._store_dir = store_dir

    def report(self, head: str, found: Sequence[LineMatch], around: bool, foot: str = "") -> str:
        """List matches by file, with the lines around them if wanted, between a first and a last line."""
        lines = [head]
        for path, group in groupby(found, lambda match: match.path):
            lines += ["---", self._title(path), *self._shown(path, list(group), around)]
        lines.append("---")
        return "\n".join([*lines, foot] if foot else lines)

    def short(self, path: str) -> str:
        """Return a short file in the form of a report, or nothing if it is not short."""
        text = self._files[path]
        if not text or len(text) > SHORT_CHARS or line_count(text) > SHORT_LINES:
            return ""
        return "\n".join(["---", f"{self._title(path)}, all of it", *_numbered(text, range(SHORT_LINES))])

    def listing(self, some: Sequence[str], total: int) -> str:
        """List files with what they are."""
        if not some:
            return f"{total} files exist."
        lines = [f"{path}: {about}" if (about := self._index.about(path)) else path for path in some]
        more = [f"and {total - len(some)} more"] if total > len(some) else []
        return "\n".join(["Files:", *lines, *more])

    def _title(self, path: str) -> str:
        about = self._index.about(path)
        return f"File: {relative(path, self._store_dir)}" + (f" ({about})" if about else "")

    def _shown(self, path: str, group: Sequence[LineMatch], around: bool) -> Iterator[str]:
        if not around or any(match.windowed for match in group):
            yield from map(_line, group)
            return
        hits = {match.line - 1: _line(match) for match in group}
        near = {place for hit in hits for place in range(max(hit - AROUND, 0), hit + AROUND + 1)} - set(hits)
        text, last = self._files[path], -1
        neighbours = {place: line for block in _blocks(near) for place, line in _lines(text, block)}
        for place in sorted([*hits, *neighbours]):
            if 0 <= last < place - 1:
                yield "…"
            yield hits.get(place) or _neighbour(place, neighbours[place])
            last = place


def _line(match: LineMatch) -> str:
    column = f", column {match.column}" if match.windowed else ""
    return f"{match.line - 1}{column}: {match.text}"


def _neighbour(place: int, line: str) -> str:
    return f"{place}- {line[:NEIGHBOUR_CHARS]}{'…' if len(line) > NEIGHBOUR_CHARS else ''}"


def _numbered(text: str, block: range) -> list[str]:
    return [_neighbour(place, line) for place, line in _lines(text, block)]


def _lines(text: str, block: range) -> Iterator[tuple[int, str]]:
    """Yield the lines of a block of consecutive places, as far as the text has them."""
    start = pages.line_start(text, block.start)
    for place in block:
        if start >= len(text):
            return
        end = text.find("\n", start)
        end = len(text) if end < 0 else end
        yield place, text[start:end].removesuffix("\r")
        start = end + 1


def _blocks(places: set[int]) -> Iterator[range]:
    """Yield the places as ranges of consecutive ones."""
    for _, group in groupby(enumerate(sorted(places)), lambda pair: pair[1] - pair[0]):
        block = [place for _, place in group]
        yield range(block[0], block[-1] + 1)
