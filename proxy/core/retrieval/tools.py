"""The tools that the proxy answers itself: their definitions, and how `grep` and `read_file` answer from given texts.

Arguments come from a model. Whatever they are, they get an answer that fits its budget, and an error says what to send
instead. This module has no dialect's field names: `definitions` gives name, description and parameters.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Literal

import msgspec

from proxy.core.retrieval import pages
from proxy.core.retrieval.search import (
    Files,
    Find,
    LineMatch,
    LineTooLong,
    TooSlow,
    below,
    fitting,
    matches,
    named,
    relative,
)

Tool = Literal["grep", "read_file"]
Result = Literal["ok", "empty", "refused", "budget"]
Names = tuple[str, str]

NAMES: Names = ("grep", "read_file")
"""The names of our tools."""

OTHER_NAMES: Names = ("offload_grep", "offload_read_file")
"""Their names if the client has a tool with either name."""

BUDGET_USED_UP = "budget used up: answer with what you have"
"""The only answer that is given even if it exceeds the budget."""

TOO_MANY = "not answered: at most {most} calls are answered at once; send this call again if it is still needed"
"""The answer to calls beyond that number."""

DEFAULT_MATCHES = 50

MAX_MATCHES = 1_000
"""The most matches that are shown or counted: one pattern over one endless line must not keep a thread for minutes."""

MAX_STRING = 1_000
"""Characters of an argument. Globs and patterns are compiled, and nobody writes longer ones."""

TOKENS_PER_MATCH = 20
"""The first guess at the size of a match."""

LISTED = (20, 5, 0)
"""How many of the existing files an answer names: the first of these numbers that its budget allows."""

_ARGUMENTS = {"grep": ("pattern", "path", "glob", "limit"), "read_file": ("path", "offset", "limit", "column")}

_DIGITS = re.compile(r"\s*[0-9]{1,18}\s*")


class ToolAnswer(msgspec.Struct, frozen=True):
    """The answer to the model. `result`: ok; empty, if there is nothing; refused, if the arguments are wrong; budget,
    if there is no room."""

    text: str
    result: Result
    tokens: int


class _Short(Exception):
    """An answer that gives a reason instead of content. `listing`: it also names the existing files."""

    def __init__(self, text: str, result: Result = "refused", *, listing: bool = False) -> None:
        super().__init__(text)
        self.text, self.result, self.listing = text, result, listing


class _Room(msgspec.Struct, frozen=True):
    """The material for an answer, and the most that it may cost."""

    names: Names
    files: Files
    store_dir: str
    budget: int
    count: Callable[[str], int]

    def fits(self, text: str) -> bool:
        return self.count(text) <= self.budget


def answer(
    tool: Tool,
    arguments: str | bytes,
    files: Files,
    store_dir: str,
    budget_tokens: int,
    count: Callable[[str], int],
    matcher: Callable[[str], Find],
    names: Names = NAMES,
) -> ToolAnswer:
    """Run `answering` to its end and return its result."""
    steps = answering(tool, arguments, files, store_dir, budget_tokens, count, matcher, names)
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            told: ToolAnswer = stop.value
            return told


def answering(
    tool: Tool,
    arguments: str | bytes,
    files: Files,
    store_dir: str,
    budget_tokens: int,
    count: Callable[[str], int],
    matcher: Callable[[str], Find],
    names: Names = NAMES,
) -> Generator[None, None, ToolAnswer]:
    """Answer a call with these JSON arguments from `files`, in at most `budget_tokens` as counted by `count`.

    It yields often, so that others can have their turn. `matcher` compiles a pattern; if it refuses one, it raises
    ValueError with a text. Never raises because of anything that a model or a file's text may contain.
    """
    room = _Room(names, files, store_dir, budget_tokens, count)
    result: Result = "ok"
    text: str | None
    try:
        given = _parsed(tool, arguments, names)
        text = (yield from _grep(given, room, matcher)) if tool == "grep" else _read(given, room)
    except _Short as short:
        text, result = next(filter(room.fits, _wordings(short, list(files))), None), short.result
    if text is None:
        text, result = BUDGET_USED_UP, "budget"
    return ToolAnswer(text, result, count(text))


def too_many(most: int, count: Callable[[str], int]) -> ToolAnswer:
    """Return the answer to a call beyond the first `most` of a round."""
    text = TOO_MANY.format(most=most)
    return ToolAnswer(text, "refused", count(text))


def _grep(given: Mapping[str, Any], room: _Room, matcher: Callable[[str], Find]) -> Generator[None, None, str | None]:
    pattern, path, glob = _string(given, "pattern"), _string(given, "path") or room.store_dir, _string(given, "glob")
    limit = _number(given, "limit", DEFAULT_MATCHES, least=1)
    about = f'for pattern "{pattern}" in path "{_brief(path)}"' + (f' (filter: "{_brief(glob)}")' if glob else "")
    try:
        find = _compiled(pattern, matcher)
        found = yield from _found(matches(room.files, _searched(path, glob, room), find))
    except LineTooLong as error:
        read = f"or read the file in parts: {room.names[1]} takes offset and column"
        raise _Short(f"This pattern cannot be used: {error}, {read}.") from error
    except TooSlow as error:
        raise _Short(f"This pattern cannot be used: {error}.") from error
    if not found:
        raise _Short(f"No matches {about}.", "empty", listing=True)
    most = min(limit, len(found), MAX_MATCHES)

    def report(shown: int) -> str:
        return _report(found, shown, limit, about, room.store_dir)

    shown = pages.largest(most, 1 + room.budget // TOKENS_PER_MATCH, lambda shown: room.fits(report(shown)))
    return report(shown) if shown or room.fits(report(0)) else None


def _found(searching: Iterator[LineMatch | None]) -> Generator[None, None, list[LineMatch]]:
    """Return the first matches, up to one more than are counted."""
    found: list[LineMatch] = []
    for match in searching:
        yield
        if match is not None:
            found.append(match)
        if len(found) > MAX_MATCHES:
            break
    return found


def _compiled(pattern: str, matcher: Callable[[str], Find]) -> Find:
    if not pattern:
        raise _Short('"pattern" is missing or empty: send a regular expression, such as {"pattern": "error"}.')
    try:
        return matcher(pattern)
    except TooSlow:
        raise
    except ValueError as error:
        raise _Short(
            f"This pattern cannot be used: {error}. The syntax is RE2's, without look-ahead, look-behind and"
            " back-references; put a backslash before ( [ { * + ? . | ^ $ \\ to search for the character itself."
        ) from error


def _searched(path: str, glob: str, room: _Room) -> list[str]:
    """Return the files that these arguments of grep select."""
    file = named(path, list(room.files))
    paths = [file] if file is not None else below(path, room.files)
    if not paths:
        raise _Short(f'There is no file or directory "{_brief(path)}".', listing=True)
    if not glob:
        return paths
    fits = fitting(glob, paths, room.store_dir)
    if not fits:
        raise _Short(f'No file in "{_brief(path)}" fits the glob "{_brief(glob)}".', "empty", listing=True)
    return fits


def _report(found: Sequence[LineMatch], shown: int, limit: int, about: str, store_dir: str) -> str:
    """List the first `shown` matches by file, and say how many more there are."""
    over = "+" if len(found) > MAX_MATCHES else ""
    total = min(len(found), MAX_MATCHES)
    lines = [f"Found {total}{over} {'match' if total == 1 else 'matches'} {about}:"]
    for path, group in groupby(found[:shown], lambda match: match.path):
        lines += ["---", f"File: {relative(path, store_dir)}", *map(_line, group)]
    lines.append("---")
    if shown < total or over:
        more = "send a larger limit, or narrow" if shown == limit < MAX_MATCHES else "narrow"
        lines.append(f"[first {shown} of {total}{over} matches; for the rest {more} the pattern, the path or the glob]")
    return "\n".join(lines)


def _line(match: LineMatch) -> str:
    column = f", column {match.column}" if match.windowed else ""
    return f"L{match.line}{column}: {match.text}"


def _read(given: Mapping[str, Any], room: _Room) -> str | None:
    path = _existing(_string(given, "path"), room)
    line, column = _number(given, "offset", 0), _number(given, "column", 0)
    limit = _number(given, "limit", sys.maxsize, least=1)
    text = room.files[path]
    span = pages.span(text, line, limit, column)
    if span is None:
        raise _Short(_past_end(text, line, column), "empty")
    return pages.page(text, span, f'{room.names[1]}(path="{path}"', room.budget, room.count)


def _existing(path: str, room: _Room) -> str:
    """Return the file that read_file's argument names."""
    if not path:
        raise _Short('"path" is missing: send the path of a file.', listing=True)
    known = named(path, list(room.files))
    if known is None and below(path, room.files):
        raise _Short(f'"{_brief(path)}" is a directory: send the path of one file.', listing=True)
    if known is None:
        raise _Short(f'There is no file "{_brief(path)}".', listing=True)
    return known


def _past_end(text: str, line: int, column: int) -> str:
    """Explain, in a bracketed line like those of `pages`, why there is nothing to show."""
    lines = pages.line_count(text)
    if not lines:
        return f"{pages.OURS} 0 of 0; the file is empty]"
    if line >= lines:
        return f"{pages.OURS} 0-{lines - 1} of {lines}; offset {line} is past the end]"
    return f"{pages.OURS} {line}-{line} of {lines}; column {column} is past the end of line {line}]"


def _parsed(tool: Tool, arguments: str | bytes, names: Names) -> dict[str, Any]:
    """Parse the arguments as an object that has only members the tool knows."""
    name = names[0] if tool == "grep" else names[1]
    takes = f"{name} takes one JSON object with {', '.join(_ARGUMENTS[tool])}; only {_ARGUMENTS[tool][0]} is required"
    try:
        given = msgspec.json.decode(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError) as error:
        raise _Short(f"The arguments cannot be read as JSON. {takes}.") from error
    if not isinstance(given, dict):
        raise _Short(f"The arguments are not a JSON object. {takes}.")
    unknown = next((key for key in given if key not in _ARGUMENTS[tool]), None)
    if unknown is not None:
        raise _Short(f'There is no argument "{_brief(unknown)}". {takes}.')
    return given


def _string(given: Mapping[str, Any], key: str) -> str:
    """Return a string argument, or an empty string if it is missing."""
    value = given.get(key)
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > MAX_STRING:
        raise _Short(f'"{key}" must be a string of at most {MAX_STRING} characters.')
    return value


def _number(given: Mapping[str, Any], key: str, default: int, *, least: int = 0) -> int:
    """Return a whole number, or `default` if it is missing. Accepts a string too, which weaker models send."""
    value = given.get(key)
    if value is None or value == "":
        return default
    if (isinstance(value, str) and _DIGITS.fullmatch(value)) or (isinstance(value, float) and value.is_integer()):
        value = int(value)
    if type(value) is not int or value < least:
        raise _Short(f'"{key}" must be a whole number, {least} or more.')
    return min(value, sys.maxsize)


def _wordings(short: _Short, paths: Sequence[str]) -> list[str]:
    """Return the answer in all its lengths, longest first."""
    if not short.listing:
        return [short.text]
    return [f"{short.text} {_listing(paths[:most], len(paths))}" for most in LISTED]


def _listing(some: Sequence[str], total: int) -> str:
    if not total:
        return "There are no files."
    if not some:
        return f"{total} files exist."
    more = f" and {total - len(some)} more" if total > len(some) else ""
    return f"Files: {', '.join(some)}{more}."


def _brief(text: str) -> str:
    """Shorten a model's own text for repeating it to the model."""
    return text if len(text) <= 200 else text[:200] + "…"


def definitions(names: Names, store_dir: str) -> list[bytes]:
    """Return both tools as JSON objects of `name`, `description` and `parameters`. Equal arguments give equal bytes."""
    grep, read_file = names
    own = f"These paths are for {grep} and {read_file} only: they mean nothing to the user or to any other tool."
    path = f"A file below {store_dir}"
    return [
        _definition(
            grep,
            f"Search the full texts that were moved out of this conversation into files below {store_dir}, the ones it"
            f" mentions as stored there. Line by line, case-insensitive. Lines are numbered from 1 here and from 0 in"
            f" {read_file}: L118 is offset 117. {own}",
            "pattern",
            pattern=("string", "Regular expression in RE2 syntax: no look-around, no back-references"),
            path=("string", f"{path}, or {store_dir} for all of them (default)"),
            glob=("string", "Only files whose name fits, such as *.txt"),
            limit=("integer", f"At most so many matches (default {DEFAULT_MATCHES})"),
        ),
        _definition(
            read_file,
            f"Read a file below {store_dir}: the full text of something that was moved out of this conversation. Gives"
            f" the whole file or as much as fits; then a last line in brackets says how to go on. {own}",
            "path",
            path=("string", path),
            offset=("integer", "First line, counted from 0 (default 0)"),
            limit=("integer", "Number of lines (default: all)"),
            column=(
                "integer",
                "First character within the first line, counted from 0, for very long lines (default 0)",
            ),
        ),
    ]


def _definition(name: str, description: str, required: str, **properties: tuple[str, str]) -> bytes:
    """Describe a tool in plain JSON Schema: `strict` with its nullable unions upsets weaker servers."""
    described = {key: {"type": kind, "description": text} for key, (kind, text) in properties.items()}
    parameters = {"type": "object", "properties": described, "required": [required]}
    return msgspec.json.encode({"name": name, "description": description, "parameters": parameters})
