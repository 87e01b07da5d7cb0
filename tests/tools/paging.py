"""Undoes paging, as the docstring of `proxy.tools.pages` says a reader can."""

from __future__ import annotations

import re

CONTINUE = re.compile(
    r"continue with \w+\(path=\"(?P<path>[^\"]*)\", offset=(?P<offset>\d+)(, column=(?P<column>\d+))?\)]$"
)


def undone(answer: str) -> tuple[str, dict[str, int] | None]:
    """The file's own text in an answer of read_file, and the arguments of the call that goes on, if
    any."""
    body, newline, last = answer.rpartition("\n")
    if not last.startswith("[lines"):
        return answer, None
    follow = CONTINUE.search(last)
    text = body if "; cut within line" in last or "without a newline" in last else body + newline
    arguments = (
        {key: int(value) for key, value in follow.groupdict().items() if value and key != "path"}
        if follow
        else None
    )
    return text, arguments
