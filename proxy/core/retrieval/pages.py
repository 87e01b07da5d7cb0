"""Reading a text in pages that fit a budget and concatenate to the text, every character of it.

A line ends at `\\n` only. A page that does not reach the text's end is followed by one last line of ours in brackets,
which begins with `[lines` and says how to go on; so is one whose own last line could be taken for it. Where a page ends
inside a line, or at a text's end without a newline, the newline before our line is ours as well, and our line says so.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import msgspec

OURS = "[lines"
"""How our line begins."""

CHARACTERS_PER_TOKEN = 3
"""First guess at a page's size; English and code have 3 to 5."""


class Span(msgspec.Struct, frozen=True):
    """A part of a text: characters `start` to `stop`, the first of them `column` characters into the 0-based `line`."""

    start: int
    stop: int
    line: int
    column: int
    lines: int
    """Of the whole text."""


def line_count(text: str) -> int:
    """Lines of `text`; what follows the last newline is one, if anything does."""
    return text.count("\n") + (text[-1:] not in ("", "\n"))


def line_start(text: str, number: int, start: int = 0) -> int:
    """Where the line begins that is `number` lines below the one at `start`, or the text's length.

    By halving and counting: going from newline to newline takes seconds where a body is full of them.
    """
    low, high = start, len(text)
    while high - low > 1:
        middle = (low + high) // 2
        lines = text.count("\n", low, middle)
        if lines >= number:
            high = middle
        else:
            low, number = middle, number - lines
    return high if number else low


def span(text: str, line: int, limit: int = sys.maxsize, column: int = 0) -> Span | None:
    """`limit` lines from `line` on, without the first `column` characters; None where there is no text."""
    start = line_start(text, line)
    if start + column >= (line_start(text, 1, start) if column else len(text)):
        return None
    return Span(start + column, line_start(text, limit, start), line, column, line_count(text))


def page(text: str, span: Span, call: str, budget: int, count: Callable[[str], int]) -> str | None:
    """As much of `span` as `budget` tokens hold, our last line included; None where not one character fits.

    Cut at a line's end, or within a line that alone is over the budget. `call` is what our line gives to go on with,
    up to the arguments that vary: `read_file(path="…"`. `count` is called some ten times, on at most twice the budget.
    """

    def shown(size: int) -> str:
        part = text[span.start : _cut(text, span, size)]
        ours = _ours(part, span, span.start + len(part) == len(text), call)
        return part + ours if part.endswith("\n") or not ours else f"{part}\n{ours}"

    size = largest(span.stop - span.start, budget * CHARACTERS_PER_TOKEN, lambda size: count(shown(size)) <= budget)
    return shown(size) if size else None


def largest(size: int, guess: int, fits: Callable[[int], bool]) -> int:
    """A number from 1 to `size` that fits, at most 3 % below one that does not (or `size` itself); 0 if none does."""
    low, high = 0, max(1, min(guess, size))
    while fits(high):
        if high == size:
            return size
        low, high = high, min(2 * high, size)
    while high - low > 1 + low // 32:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _cut(text: str, span: Span, size: int) -> int:
    """Where a page of at most `size` characters ends: behind its last newline, if it has one."""
    stop = span.start + size
    if stop >= span.stop:
        return span.stop
    return text.rfind("\n", span.start, stop) + 1 or stop


def _ours(part: str, span: Span, ends: bool, call: str) -> str:
    """The bracketed line behind a page, or nothing where a page ends the text and needs none."""
    whole_lines = part.endswith("\n")
    last = span.line + part.count("\n") - whole_lines
    where = f"{OURS} {span.line}-{last} of {span.lines}"
    if ends:
        return f"{where}; end of file{'' if whole_lines else ' without a newline'}]" if _looks_like_ours(part) else ""
    if whole_lines:
        return f"{where}; continue with {call}, offset={last + 1})]"
    column = span.column + len(part)
    return f"{where}; cut within line {last}; continue with {call}, offset={last}, column={column})]"


def _looks_like_ours(part: str) -> bool:
    """Whether a reader could take the last line of `part`, a file's own, for one of ours."""
    return any(line.lstrip().startswith(OURS) for line in part.rstrip().splitlines()[-1:])
