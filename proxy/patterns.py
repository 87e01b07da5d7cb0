"""Regular expressions from models and callers: hostile input, so RE2 and its linear time. The only home of re2."""

from __future__ import annotations

from collections.abc import Callable

import re2  # type: ignore[import-untyped]

MAX_LENGTH = 1_000
"""Characters of a pattern. Nobody greps for more."""

MAX_MEM = 1 << 20
"""Bytes. RE2's default of 8 MiB lets a 720-character pattern compile for 10 s; this refuses it in 20 ms."""


def compile(pattern: str) -> Callable[[bytes, int], int]:
    """A matcher of `pattern` over UTF-8: `find(data, start)` is the offset of the first match from `start` on, or -1.

    Case-insensitive; `^` and `$` are a line's ends and no match goes beyond its line. RE2 runs without the
    interpreter's lock, and threads may share a matcher. Raises ValueError with a text for the pattern's author.
    """
    if len(pattern) > MAX_LENGTH:
        raise ValueError(f"the pattern has {len(pattern)} characters; at most {MAX_LENGTH} are allowed")
    try:
        search = re2.compile("(?m)" + pattern, _options()).search
    except (re2.error, UnicodeEncodeError) as error:
        raise ValueError(_reason(error)) from error
    finally:
        re2.purge()  # its cache would keep the automata of 128 patterns that are never asked for again

    def find(data: bytes, start: int) -> int:
        match = search(data, start)
        return match.start() if match else -1

    return find


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
