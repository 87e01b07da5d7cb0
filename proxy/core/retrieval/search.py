"""Finding lines: which files a path or a glob means, and where in them a pattern matches.

Paths are names in a mapping and nothing else, so no path, however spelled, leads out of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

import msgspec

Files = Mapping[str, str]
"""Path → whole text. May be lazy: a text is looked up only when it is read or searched."""

Find = Callable[[bytes, int], int]
"""Like `bytes.find` over UTF-8: the offset of the first match from a given offset on, or -1. May raise TooSlow.

One that has more to search than it should at once answers `~offset`: no match begins before `offset`, the start of a
line; ask again from there.
"""

LONG_LINE = 500
"""Characters. Of longer lines only windows of this size around their matches are shown."""

LEAD = 150
"""Characters of a window that stand before its match."""


class TooSlow(ValueError):
    """Looking for a pattern takes more time than there is; the text says so, for the pattern's author."""


class LineTooLong(TooSlow):
    """A line is too long for this pattern, which can only be looked for in the whole of it."""


class Line(bytes):
    """One line's bytes: whoever searches it need not look for its end."""


class LineMatch(msgspec.Struct, frozen=True):
    """A line that matches, or one window of a long line. `line` is 1-based, `column` a 0-based character."""

    path: str
    line: int
    column: int
    text: str
    windowed: bool = False


def named(path: str, paths: Sequence[str]) -> str | None:
    """The one file that `path` names. Slashes at its ends and leading directories may be missing, if one file fits."""
    if path in paths:
        return path
    wanted = _bare(path)
    exact = [known for known in paths if _bare(known) == wanted]
    ending = [known for known in paths if _bare(known).endswith(f"/{wanted}")]
    return next((found[0] for found in (exact, ending) if len(found) == 1), None)


def below(directory: str, paths: Iterable[str]) -> list[str]:
    """The files in `directory` and its subdirectories; all of them where it is empty, `.` or `/`."""
    wanted = _bare(directory)
    return [known for known in paths if not wanted or f"/{wanted}/" in f"/{_bare(known)}"]


def fitting(glob: str, paths: Iterable[str], directory: str) -> list[str]:
    """The files whose name fits `glob`; one with a slash is held against the path below `directory`."""
    glob = glob.strip().removeprefix("./").removeprefix("**/")
    subjects = ((path, relative(path, directory)) for path in paths)
    return [path for path, subject in subjects if fnmatchcase(subject if "/" in glob else _name(subject), glob)]


def relative(path: str, directory: str) -> str:
    """`path` as seen from `directory`, or whole where it lies elsewhere; no slash in front."""
    return _bare(path).removeprefix(_bare(directory) + "/")


def matches(files: Files, paths: Iterable[str], find: Find) -> Iterator[LineMatch | None]:
    """Every match in the files of these paths, file by file, line by line; None now and then as in `in_data`."""
    for path in paths:
        yield from in_data(path, files[path].encode("utf-8", "replace"), find)
        yield None


def _bare(path: str) -> str:
    """`path` without what does not tell files apart: space around it, `./`, slashes at its ends."""
    bare = path.strip().removeprefix("./").strip("/")
    return "" if bare == "." else bare


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def in_data(path: str, data: bytes, find: Find) -> Iterator[LineMatch | None]:
    """Every match in a file's UTF-8, in one pass; lines that do not match are never looked at one by one.

    None stands for a while in which nothing was found: whoever iterates can let others have their turn.
    """
    number, start = 1, 0
    while start < len(data) and (found := find(data, start)) != -1:
        if found < 0:
            yield None
            number, start = number + data.count(b"\n", start, ~found), ~found
            continue
        line_start = data.rfind(b"\n", start, found) + 1 or start
        if line_start == len(data):
            return  # an empty match behind the last line
        line_end = data.find(b"\n", found)
        line_end = len(data) if line_end < 0 else line_end
        number += data.count(b"\n", start, line_start)
        yield from _in_line(path, number, Line(data[line_start:line_end]), found - line_start, find)
        number, start = number + 1, line_end + 1


def _in_line(path: str, number: int, line: Line, at: int, find: Find) -> Iterator[LineMatch]:
    """The line of which byte `at` is known to match, or its windows."""
    text = line.decode()
    if len(text) <= LONG_LINE:
        yield LineMatch(path, number, _length(line[:at]), text.removesuffix("\r"))
        return
    column = resume = 0
    while at >= 0:
        hit = column + _length(line[resume:at])
        stop = max(0, hit - LEAD) + LONG_LINE
        yield LineMatch(path, number, hit, _window(text, max(0, hit - LEAD), stop), windowed=True)
        if stop >= len(text):
            return
        resume += len(text[column:stop].encode())
        column, at = stop, find(line, resume)


def _length(data: bytes) -> int:
    """Characters of `data`, which an empty match may end in the middle of one."""
    return len(data.decode("utf-8", "ignore"))


def _window(text: str, start: int, stop: int) -> str:
    return ("…" if start else "") + text[start:stop] + ("…" if stop < len(text) else "")
