"""Regular expressions from models and callers. Their input is hostile, so they run on RE2, which
takes linear time.

No other module imports re2.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import re2  # type: ignore[import-untyped]

from proxy.threads import breathe
from proxy.tools.search import Find, TextLine, TooSlow

MAX_LENGTH = 1_000
"""Characters of a pattern. Nobody needs more to grep."""

MAX_MEM = 1 << 20
"""Bytes of memory for a pattern. RE2's default of 8 MiB lets a 720-character pattern compile for 10
s; this limit refuses it in 20 ms."""

STEPS = 1 << 24
"""The most work for one call of RE2, which nothing can interrupt: a pattern's instructions times
the bytes it searches.

If a pattern has too many states, RE2 uses only its slow engine, in which each step takes 2 ns: 30
ms in all.
"""

LINE_STEPS = 8 * STEPS
"""The same limit for a long line, which can only be searched in one call: 0.3 s at worst. A longer
line is refused."""


class Budget:
    """Seconds of processor time for the searches of one request, in whichever threads they run."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.spent = 0.0

    def check(self) -> None:
        """Raises TooSlow if nothing is left."""
        if self.spent >= self._seconds:
            said = f"searching took more than {self._seconds:g} seconds"
            raise TooSlow(f"{said}; make the pattern simpler, or search fewer files")


def literal(text: str, budget: Budget | None = None) -> Find:
    """Like `compile`, but match `text` literally, whatever its characters."""
    return compile(text, budget, quote=re2.escape)


def compile(
    pattern: str, budget: Budget | None = None, *, quote: Callable[[str], str] = str
) -> Find:
    """Return a matcher of `pattern` over UTF-8; see `Find`. Both raise TooSlow once `budget` is
    spent.

    Matching ignores case; `^` and `$` match at the ends of a line, and no match extends beyond its
    line. RE2 releases the interpreter's lock, and threads may share a matcher. Raises ValueError
    with a text for the pattern's author.
    """
    if len(pattern) > MAX_LENGTH:
        raise ValueError(
            f"the pattern has {len(pattern)} characters; at most {MAX_LENGTH} are allowed"
        )
    budget = budget or Budget(math.inf)
    budget.check()
    options = re2.Options()
    options.max_mem = MAX_MEM
    options.log_errors = False
    options.case_sensitive = False
    options.never_capture = True  # groups would cost a second, slower pass over each match
    options.never_nl = True  # else `(?s)e.*q|e` reads the whole text anew for every match
    try:
        return _Matcher(re2.compile("(?m)" + quote(pattern), options), budget)
    except UnicodeEncodeError as error:
        raise ValueError("the pattern is not valid Unicode") from error
    except re2.error as error:
        raise ValueError(error.args[0].decode("utf-8", "replace").replace("(?m)", "", 1)) from error
    finally:
        # its cache would keep the automata of 128 patterns that are never asked for again
        re2.purge()


class _Matcher:
    """Searches a few whole lines at a time. In between, others have their turn and the budget is
    checked."""

    def __init__(self, program: re2._Regexp, budget: Budget) -> None:
        self._search = program.search
        self._budget = budget
        self._piece = STEPS // program.programsize
        self._longest = LINE_STEPS // program.programsize

    def __call__(self, data: bytes, start: int) -> int:
        while True:
            self._budget.check()
            stop = self._stop(data, start)
            begun = time.thread_time()
            match = self._search(data, start, stop)
            self._budget.spent += time.thread_time() - begun
            breathe()
            if match:
                return int(match.start())
            if stop == len(data):
                return -1
            start = stop

    def _stop(self, data: bytes, start: int) -> int:
        """Return how far to search in one call: to the end of a line. Raises TooSlow if that line
        is too long."""
        near = start + self._piece
        if near >= len(data):
            return len(data)
        # finding its end again for each match would take quadratic time
        if isinstance(data, TextLine):
            stop = len(data)
        else:
            stop = data.rfind(b"\n", start, near) + 1 or data.find(b"\n", near) + 1 or len(data)
        if stop - start > self._longest:
            raise TooSlow(
                f"the pattern is too large for a line of {stop - start} bytes; make it shorter"
            )
        return stop
