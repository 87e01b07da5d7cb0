"""Reads a text in pages that fit a budget and together make up the text, every character of it.

A line ends only at `\\n`. If a page does not reach the end of the text, we add a last line in
brackets, which begins with `[lines`. It says how to continue if the budget cut the page short of
what was asked for, and not otherwise: weak models take it for an order. We also add one if the
page's own last line looks like ours. If a page ends inside a line, or at the end of a text without
a final newline, the newline before our line is ours too, and our line says so.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import msgspec

from proxy.plan.preview import line_count, line_feeds

OURS = "[lines"  # the beginning of our line
CHARACTERS_PER_TOKEN = 3  # the first guess at a page's size; English and code have 3 to 5


class Span(msgspec.Struct, frozen=True):
    """A part of a text: characters `start` to `stop`. It starts `column` characters into `line`,
    which is 0-based."""

    start: int
    stop: int
    line: int
    column: int
    lines: int  # lines of the whole text


def line_start(text: str, number: int, start: int = 0) -> int:
    """Return where the line `number` lines below the one at `start` begins, or the text's length if
    there is none. Halves the text and counts: going from newline to newline takes seconds if a body
    is full of them."""
    low = start
    high = len(text)
    while high - low > 1:
        middle = (low + high) // 2
        lines = line_feeds(text, low, middle)
        if lines >= number:
            high = middle
        else:
            low = middle
            number = number - lines
    return high if number else low


def span(text: str, line: int, limit: int = sys.maxsize, column: int = 0) -> Span | None:
    """Return `limit` lines from `line` on, without its first `column` characters; None if there is
    no text there."""
    start = line_start(text, line)
    if start + column >= (line_start(text, 1, start) if column else len(text)):
        return None
    return Span(start + column, line_start(text, limit, start), line, column, line_count(text))


def page(text: str, span: Span, call: str, budget: int, count: Callable[[str], int]) -> str | None:
    """Return as much of `span` as `budget` tokens hold, including our last line; None if not even
    one character fits. The page is cut at the end of a line, or within a line that exceeds the
    budget alone. `call` is the call that our line gives for continuing, up to the arguments that
    vary: `read_file(path="…"`. `count` is called about ten times, on texts of at most twice the
    budget."""

    def shown(size: int) -> str:
        stop = span.start + size
        if stop < span.stop:
            stop = text.rfind("\n", span.start, stop) + 1 or stop
        part = text[span.start : stop]
        ours = _ours(part, span, len(text), call)
        return part + ours if part.endswith("\n") or not ours else f"{part}\n{ours}"

    size = largest(
        span.stop - span.start,
        budget * CHARACTERS_PER_TOKEN,
        lambda size: count(shown(size)) <= budget,
    )
    return shown(size) if size else None


def largest(size: int, guess: int, fits: Callable[[int], bool]) -> int:
    """Find a number up to `size` that fits, at most 3 % below one that does not or `size` itself; 0
    if none fits."""
    low = 0
    high = max(1, min(guess, size))
    while fits(high):
        if high == size:
            return size
        low = high
        high = min(2 * high, size)
    while high - low > 1 + low // 32:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _ours(part: str, span: Span, end: int, call: str) -> str:
    """Return the bracketed line after a page, or nothing if the page ends the text and needs
    none."""
    stop = span.start + len(part)
    whole_lines = part.endswith("\n")
    last = span.line + part.count("\n") - whole_lines
    where = f"{OURS} {span.line}-{last} of {span.lines}"
    if stop == end:
        # Could a reader take the file's own last line for ours? Readers differ in what ends a line.
        said = part.rstrip()
        lines = (said.rpartition("\n")[2], *said.splitlines()[-1:])
        ambiguous = any(line.lstrip().startswith(OURS) for line in lines)
        return (
            f"{where}; end of file{'' if whole_lines else ' without a newline'}]"
            if ambiguous
            else ""
        )
    if stop == span.stop:
        return f"{where}]"
    if whole_lines:
        return f"{where}; continue with {call}, offset={last + 1})]"
    column = span.column + len(part)
    return (
        f"{where}; cut within line {last}; continue with {call}, offset={last}, column={column})]"
    )
