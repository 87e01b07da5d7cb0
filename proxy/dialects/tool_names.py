"""Recognises our tools by the names that models write: `functions.grep`, `read_file<|channel|>commentary`.

Models that were trained with another format put its namespaces before a name and its channels after it, or write names
in its case: `Grep`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

BEFORE = frozenset(
    (
        *("functions", "function", "tools", "tool", "default_api", "default", "api", "tool_call", "call", "name"),
        *("assistant", "commentary", "analysis", "final", "channel", "start", "recipient", "to"),
    )
)
"""Words that models put before a tool's name."""
AFTER = frozenset(
    ("channel", "commentary", "analysis", "final", "constrain", "json", "code", "message", "call", "end", "start")
)
"""Words that models put after it. A number may stand there, too: `functions.grep:0`."""
LONGEST = 200
"""Characters of the longest name that can be one of ours with words before and after it."""

_BETWEEN = re.compile(r"[\s.:/=<|>\"'`()\[\]]+")


class ToolNames:
    """The names of our tools, and `theirs`, the names of the client's tools, which are always the client's."""

    def __init__(self, ours: Sequence[str], theirs: Collection[str] = ()) -> None:
        self._ours = ours
        self._theirs = theirs
        taken = {name.lower() for name in theirs}
        self._in_any_case = {name.lower(): name for name in ours if name.lower() not in taken}

    def __bool__(self) -> bool:
        """Whether the request has our tools."""
        return bool(self._ours)

    def recognised(self, name: str) -> str:
        """Return which of our tools a complete name means, or "" if it means none."""
        if name in self._ours:
            return name
        if name in self._theirs or len(name) > LONGEST:
            return ""
        words = _without_prefixes(_BETWEEN.split(name))
        return self._meant(words[0]) if words and all(map(_follows, words[1:])) else ""

    def could_become(self, beginning: str) -> bool:
        """Whether a name that begins like this may turn out to mean one of our tools."""
        if not self._ours or len(beginning) > LONGEST:
            return False
        *whole, last = _BETWEEN.split(beginning)
        words = _without_prefixes(whole)
        if not words:
            begins = any(name.startswith(last) for name in self._ours)
            return begins or any(word.startswith(last.lower()) for word in (*self._in_any_case, *BEFORE))
        if not self._meant(words[0]) or not all(map(_follows, words[1:])):
            return False
        return last.isdigit() or any(word.startswith(last.lower()) for word in AFTER)

    def _meant(self, word: str) -> str:
        """Return which of our tools a word names. In another case it may mean a tool of the client's instead."""
        return word if word in self._ours else self._in_any_case.get(word.lower(), "")


def _without_prefixes(words: Sequence[str]) -> list[str]:
    words = [word for word in words if word]
    first = next((place for place, word in enumerate(words) if word.lower() not in BEFORE), len(words))
    return words[first:]


def _follows(word: str) -> bool:
    return word.lower() in AFTER or word.isdigit()
