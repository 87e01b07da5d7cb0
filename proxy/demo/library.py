"""The agent's tool: it really reads the sources of this machine's Python standard library."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from proxy.errors import UserMistake

PAGE_LINES = 500
"""Lines that one `read_source` returns: coding agents read a few hundred at a time."""

READING = (
    "argparse.py",
    "asyncio/base_events.py",
    "tarfile.py",
    "http/client.py",
    "subprocess.py",
    "pickle.py",
    "difflib.py",
    "inspect.py",
    "logging/__init__.py",
    "unittest/mock.py",
    "typing.py",
)
"""Large modules in every Python since 3.11, in the order in which the demo reads them."""

_CONSTANT = re.compile(r"_?[A-Z][A-Z_]{3,} = (?=.{8})")
"""How lines begin that make good questions."""

READ_SOURCE = "read_source"

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": READ_SOURCE,
            "description": f"{PAGE_LINES} lines of a source file of Python's standard library, from line `first` on.",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}, "first": {"type": "integer", "minimum": 1}},
                "required": ["path"],
            },
        },
    }
]


class Question(NamedTuple):
    """A question for the line of a file that begins with a certain text."""

    path: str
    begins: str
    line: str


class Library:
    """The sources of `READING` below `root`."""

    def __init__(self, root: Path | None = None) -> None:
        root = root or Path(sysconfig.get_paths()["stdlib"])
        self._texts = {
            path: (root / path).read_text(encoding="utf-8", errors="replace")
            for path in READING
            if (root / path).is_file()
        }

    def page(self, path: str, first: int = 1) -> str:
        """`PAGE_LINES` lines, after a header line with their numbers."""
        if path not in self._texts:
            return f"There is no {path}."
        lines = self._texts[path].splitlines(keepends=True)
        last = min(first + PAGE_LINES - 1, len(lines))
        return f"{path}, lines {first}-{last} of {len(lines)}\n" + "".join(lines[first - 1 : last])

    def reading_list(self, tokens: int, count: Callable[[str], int]) -> list[str]:
        """Modules with at least so many tokens in total. Raises UserMistake if the sources have fewer."""
        chosen: list[str] = []
        for path, text in self._texts.items():
            chosen.append(path)
            tokens -= count(text)
            if tokens <= 0:
                return chosen
        raise UserMistake("the demo reads the standard library's sources, and this Python has too few of them")

    def question(self, path: str) -> Question:
        """A question for a constant on the first page that the file mentions once. Raises UserMistake."""
        lines = self._texts[path].splitlines()
        for line in reversed(lines[:PAGE_LINES]):
            found = _CONSTANT.match(line)
            if found and sum(other.startswith(found[0]) for other in lines) == 1:
                return Question(path, found[0].strip(), line)
        raise UserMistake(f"{path} is not what the demo expects of the standard library")
