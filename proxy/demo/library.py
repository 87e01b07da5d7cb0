"""What the agent reads: the sources of this machine's Python standard library, page by page."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from proxy.errors import UserMistake

PAGE_LINES = 500
"""Lines of a page: coding agents read a few hundred at a time."""

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


class Page(NamedTuple):
    path: str
    first: int
    text: str
    """With a line before it that says which lines these are."""


class Question(NamedTuple):
    """A question for the line of a file that begins with a certain text."""

    path: str
    begins: str
    line: str


def pages(path: str, root: Path | None = None) -> Iterator[Page]:
    """Yield the pages of a module of `READING`; none of anything else."""
    file = (root or Path(sysconfig.get_paths()["stdlib"])) / path
    if path not in READING or not file.is_file():
        return
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    for start in range(0, len(lines), PAGE_LINES):
        part = lines[start : start + PAGE_LINES]
        head = f"{path}, lines {start + 1}-{start + len(part)} of {len(lines)}\n"
        yield Page(path, start + 1, head + "".join(part))


def reading_list(tokens: int, count: Callable[[str], int], root: Path | None = None) -> list[Page]:
    """Return whole modules' pages with at least so many tokens. Raises UserMistake if the sources have fewer."""
    chosen: list[Page] = []
    for path in READING:
        found = list(pages(path, root))
        chosen += found
        tokens -= sum(count(page.text) for page in found)
        if tokens <= 0:
            return chosen
    raise UserMistake("the demo reads the standard library's sources, and this Python has too few of them")


def question(path: str, root: Path | None = None) -> Question:
    """Return a question for a constant on the first page that the file mentions once. Raises UserMistake."""
    texts = [page.text for page in pages(path, root)]
    lines = [line for text in texts for line in text.splitlines()]
    for line in reversed(lines[: PAGE_LINES + 1]):
        found = _CONSTANT.match(line)
        if found and sum(other.startswith(found[0]) for other in lines) == 1:
            return Question(path, found[0].strip(), line)
    raise UserMistake(f"{path} is not what the demo expects of the standard library")
