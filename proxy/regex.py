"""Regular expressions from models and callers: hostile input, so RE2 and its linear time. The only home of re2."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Generator
from typing import TypeVar

import re2  # type: ignore[import-untyped]

from proxy.core.retrieval.search import Find, Line, LineTooLong, TooSlow
from proxy.threads import SLICE, WorkPool

T = TypeVar("T")

MAX_LENGTH = 1_000
"""Characters of a pattern. Nobody greps for more."""

MAX_MEM = 1 << 20
"""Bytes. RE2's default of 8 MiB lets a 720-character pattern compile for 10 s; this refuses it in 20 ms."""

STEPS = 1 << 24
"""What one call of RE2, which nothing can stop, comes to: a pattern's instructions times the bytes that it searches.

Where a pattern has too many states RE2 keeps to its slow engine, in which each of these takes 2 ns: 30 ms in all.
"""

LINE_STEPS = 8 * STEPS
"""As much where a line is long, which can only be searched at once: 0.3 s at worst. A longer line is refused."""

WORDS = re.compile(r"(?:[^\\^$.|?*+()\[\]{}]|\\[^\w\s])*")
"""Patterns that are only text. RE2 needs no more states for one than it has bytes, so it keeps to its fast engine: at
most 3 ns for each byte, however long the text.
"""

MAX_WORDS = 256
"""Instructions of such a pattern: the states of one this long fit into `MAX_MEM`."""


class Budget:
    """Seconds of processor time for the searches of one request, in whatever threads they run."""

    def __init__(self, seconds: float) -> None:
        self._left = self._seconds = seconds

    def end(self) -> None:
        """Nobody waits any more: whoever still searches is to stop."""
        self._left = 0.0

    @property
    def spent(self) -> float:
        """Seconds so far."""
        return self._seconds - self._left

    def spend(self, seconds: float) -> None:
        """Take note of time that was spent."""
        self._left -= seconds

    def check(self) -> None:
        """Raises TooSlow where nothing is left."""
        if self._left <= 0:
            said = f"searching took more than {self._seconds:g} seconds"
            raise TooSlow(f"{said}; make the pattern simpler, or search fewer files")


async def sliced(pool: WorkPool, caller: str, steps: Generator[object, None, T], budget: Budget) -> T:
    """The result of a search that stops many times on the way: in slices, between which other callers get their turn.

    It ends within a slice when the caller stops waiting or the pool closes. All time of its threads is charged to
    `budget`, at which the search itself has to look.
    """

    def work() -> tuple[float, tuple[T] | None]:
        begun = time.thread_time()
        while (spent := time.thread_time() - begun) < SLICE:
            try:
                next(steps)
            except StopIteration as stop:
                return time.thread_time() - begun, (stop.value,)
        return spent, None

    done = None
    while done is None:
        # Once it was begun there is no way back: the reply that waits for it may be half written.
        spent, done = await pool.run(caller, work, begun=True)
        budget.spend(spent)
    return done[0]


def compile(pattern: str, budget: Budget | None = None) -> Find:
    """A matcher of `pattern` over UTF-8; see `Find`. It raises TooSlow once `budget` is spent, and so does this.

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
    budget = budget or Budget(math.inf)
    budget.check()
    try:
        program = re2.compile(flags + pattern, options)
    except (re2.error, UnicodeEncodeError) as error:
        raise ValueError(_reason(error)) from error
    finally:
        re2.purge()  # its cache would keep the automata of 128 patterns that are never asked for again
    plain = options.literal or WORDS.fullmatch(pattern) is not None
    return _Matcher(program, budget, plain)


class _Matcher:
    """Searches some whole lines at a time, so that others can have their turn and the budget is looked at."""

    def __init__(self, program: re2._Regexp, budget: Budget, plain: bool) -> None:
        self._search = program.search
        self._budget = budget
        self._piece = STEPS // program.programsize
        self._longest = LINE_STEPS // (1 if plain and program.programsize <= MAX_WORDS else program.programsize)

    def __call__(self, data: bytes, start: int) -> int:
        self._budget.check()
        stop = self._stop(data, start)
        match = self._search(data, start, stop)
        if match:
            return int(match.start())
        return -1 if stop == len(data) else ~stop

    def _stop(self, data: bytes, start: int) -> int:
        """How far to search at once: to the end of a line. Raises TooSlow for one that is too long."""
        near = start + self._piece
        if near >= len(data):
            return len(data)
        if isinstance(data, Line):  # looked through for each of its matches it would take quadratic time
            stop = len(data)
        else:
            stop = data.rfind(b"\n", start, near) + 1 or data.find(b"\n", near) + 1 or len(data)
        if stop - start > self._longest:
            raise LineTooLong(f"the pattern is too large for a line of {stop - start} bytes; make it shorter")
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
