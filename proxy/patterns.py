"""Regular expressions from models and callers: hostile input, so RE2 and its linear time. The only home of re2."""

from __future__ import annotations

import math
import time

import re2  # type: ignore[import-untyped]

from proxy.core.search import Find, TooSlow

MAX_LENGTH = 1_000
"""Characters of a pattern. Nobody greps for more."""

MAX_MEM = 1 << 20
"""Bytes. RE2's default of 8 MiB lets a 720-character pattern compile for 10 s; this refuses it in 20 ms."""

STEPS = 1 << 29
"""The most that one call of RE2, which nothing can stop, may come to: a pattern's instructions times a line's bytes.

Where a pattern has too many states RE2 keeps to its slow engine, in which each of these takes a nanosecond.
"""

PIECES = 8
"""A call is to take an eighth of that, unless a line is longer."""


class Budget:
    """Seconds of processor time for one search, in whatever threads it runs."""

    def __init__(self, seconds: float) -> None:
        self._left = self._seconds = seconds

    def end(self) -> None:
        """Nobody waits any more: whoever still searches is to stop."""
        self._left = 0.0

    def spend(self, seconds: float) -> None:
        """Raises TooSlow where nothing is left."""
        self._left -= seconds
        if self._left <= 0:
            said = f"searching for the pattern took more than {self._seconds:g} seconds"
            raise TooSlow(f"{said}; make it simpler, or search fewer files")


def compile(pattern: str, budget: Budget | None = None) -> Find:
    """A matcher of `pattern` over UTF-8: `find(data, start)` is the offset of the first match from `start` on, or -1.

    Case-insensitive; `^` and `$` are a line's ends and no match goes beyond its line. RE2 runs without the
    interpreter's lock, and threads may share a matcher. Raises ValueError with a text for the pattern's author.
    """
    return _matcher("(?m)", pattern, _options(), budget)


def literal(text: str, budget: Budget | None = None) -> Find:
    """The same for the text itself, whatever its characters."""
    options = _options()
    options.literal = True
    return _matcher("", text, options, budget)


def _matcher(flags: str, pattern: str, options: re2.Options, budget: Budget | None) -> Find:
    if len(pattern) > MAX_LENGTH:
        raise ValueError(f"the pattern has {len(pattern)} characters; at most {MAX_LENGTH} are allowed")
    try:
        program = re2.compile(flags + pattern, options)
    except (re2.error, UnicodeEncodeError) as error:
        raise ValueError(_reason(error)) from error
    finally:
        re2.purge()  # its cache would keep the automata of 128 patterns that are never asked for again
    return _Matcher(program, budget or Budget(math.inf))


class _Matcher:
    """Searches some whole lines at a time, so that the budget can be looked at now and then."""

    def __init__(self, program: re2._Regexp, budget: Budget) -> None:
        self._search = program.search
        self._budget = budget
        self._most = STEPS // program.programsize

    def __call__(self, data: bytes, start: int) -> int:
        while True:
            stop = self._stop(data, start)
            begun = time.thread_time()
            match = self._search(data, start, stop)
            self._budget.spend(time.thread_time() - begun)
            if match:
                return int(match.start())
            if stop == len(data):
                return -1
            start = stop

    def _stop(self, data: bytes, start: int) -> int:
        """How far to search at once: to the end of a line. Raises TooSlow for one that is too long."""
        stop = data.find(b"\n", start + self._most // PIECES) + 1 or len(data)
        if stop - start > self._most:
            raise TooSlow(f"the pattern is too large for a line of {stop - start} bytes; make it shorter")
        return stop


def _options() -> re2.Options:
    options = re2.Options()
    options.max_mem = MAX_MEM
    options.log_errors = False
    options.case_sensitive = False
    options.never_capture = True  # groups would cost a second, slower pass over each match
    options.never_nl = True  # else `(?s)e.*q|e` reads the whole text anew for every match
    return options


def _reason(error: Exception) -> str:
    """What RE2 says against a pattern, which it says in bytes and with our prefix."""
    said = error.args[0]
    if not isinstance(said, bytes):
        return "the pattern is not valid Unicode"
    return said.decode("utf-8", "replace").replace("(?m)", "", 1)
