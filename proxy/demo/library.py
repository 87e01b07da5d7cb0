"""The agent's tools: they really list, read and search the sources of this machine's Python standard library."""

from __future__ import annotations

import json
import re
import sysconfig
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from proxy.errors import UserMistake

PAGE_LINES = 500
"""Lines that one `read_source` returns: coding agents read a few hundred at a time."""

FOUND_LINES = 60

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

_NOT_LISTED = {"__pycache__", "test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3"}
_TELLING = (re.compile(r"_?[A-Z][A-Z_]{3,} = (?=.{8})"), re.compile(r"(?:class|def) \w+\((?=\w)"))
"""Beginnings of lines that make good questions: constants first."""

DEFINITIONS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "description": about, "parameters": parameters}}
    for name, about, parameters in (
        ("list_sources", "The source files of Python's standard library, with their sizes.", {"type": "object"}),
        (
            "read_source",
            f"{PAGE_LINES} lines of a source file, from line `first` on.",
            {
                "type": "object",
                "properties": {"path": {"type": "string"}, "first": {"type": "integer", "minimum": 1}},
                "required": ["path"],
            },
        ),
        (
            "search_sources",
            "Lines of the source files that match a regular expression.",
            {"type": "object", "properties": {"pattern": {"type": "string"}}, "required": ["pattern"]},
        ),
    )
]

TOOLS = frozenset(definition["function"]["name"] for definition in DEFINITIONS)


class Question(msgspec.Struct, frozen=True):
    """A question for the line of a file that begins with a certain text."""

    path: str
    begins: str
    line: str


class Library:
    """The sources below `root`."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = root or Path(sysconfig.get_paths()["stdlib"])

    def call(self, name: str, arguments: str) -> str:
        """A tool's result; `arguments` is JSON as the model wrote it. Raises KeyError for an unknown tool."""
        tools: dict[str, Callable[..., str]] = {
            "list_sources": self.listing,
            "read_source": self.page,
            "search_sources": self.search,
        }
        return tools[name](**json.loads(arguments or "{}"))

    def listing(self) -> str:
        """A line for each file: its path and size."""
        return "".join(f"{path} {(self.root / path).stat().st_size} bytes\n" for path in self._paths)

    def page(self, path: str, first: int = 1) -> str:
        """`PAGE_LINES` lines, after a header line with their numbers."""
        if path not in self._paths:
            return f"There is no {path}."
        lines = self._text(path).splitlines(keepends=True)
        last = min(first + PAGE_LINES - 1, len(lines))
        return f"{path}, lines {first}-{last} of {len(lines)}\n" + "".join(lines[first - 1 : last])

    def search(self, pattern: str) -> str:
        """The first `FOUND_LINES` lines that match, as `path:line:text`."""
        wanted = re.compile(pattern)
        found = []
        for path in self._paths:
            for number, line in enumerate(self._text(path).splitlines(), 1):
                if wanted.search(line):
                    found.append(f"{path}:{number}:{line}\n")
                if len(found) == FOUND_LINES:
                    return "".join(found) + "… and more\n"
        return "".join(found) or "No match.\n"

    def reading_list(self, tokens: int, count: Callable[[str], int]) -> list[str]:
        """Modules with at least so many tokens in total. Raises UserMistake if the sources have fewer."""
        chosen: list[str] = []
        for path in (path for path in READING if path in self._paths):
            chosen.append(path)
            tokens -= count(self._text(path))
            if tokens <= 0:
                return chosen
        raise UserMistake(f"the demo reads the standard library's sources, and too few are in {self.root}")

    def question(self, path: str, first: int = 1) -> Question:
        """A question for the last suitable line of the page of `path` that begins at line `first`."""
        text = self._text(path)
        page = text.splitlines()[first - 1 : first - 1 + PAGE_LINES]
        for telling in _TELLING:
            for line in reversed(page):
                found = telling.match(line)
                if found and f"\n{text}".lower().count("\n" + found[0].lower()) == 1:
                    return Question(path, found[0].strip(), line)
        raise UserMistake(f"{path} is not what the demo expects of the standard library")

    @cached_property
    def _paths(self) -> list[str]:
        return sorted(self._walk(self.root))

    def _walk(self, folder: Path) -> Iterator[str]:
        for path in folder.iterdir():
            if path.is_dir() and path.name not in _NOT_LISTED:
                yield from self._walk(path)
            elif path.suffix == ".py":
                yield path.relative_to(self.root).as_posix()

    def _text(self, path: str) -> str:
        return (self.root / path).read_text(encoding="utf-8", errors="replace")
