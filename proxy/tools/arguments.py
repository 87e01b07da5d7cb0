"""Reads the arguments of a call of our tools, which come from a model and may be anything.

Models write what they know from other tools: `file_path` for `path`, `start_line` for `offset`, a list of paths, or
flags that we do not have. What can be meant is done, and what is ignored is named.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Literal

import msgspec

from proxy.tools.definitions import Names

Tool = Literal["grep", "read_file"]

MAX_STRING = 1_000
"""Characters of an argument. Globs and patterns are compiled, and nobody writes longer ones."""

MAX_MEMBERS, MAX_IGNORED = 50, 5
"""The most members of a list that are looked at, and the most ignored arguments that are named."""

_ARGUMENTS = {"grep": ("pattern", "path", "glob", "limit"), "read_file": ("path", "offset", "limit", "column")}

_OTHER_WORDS = {
    word: key
    for key, words in {
        "path": "paths file files filename filenames filepath filepaths absolutepath relativepath relativeworkspacepath"
        " targetfile target uri url source location document reference directory directorypath dir folder",
        "pattern": "regex regexp query search searchpattern searchterm searchtext searchquery term keyword text string",
        "glob": "include includepattern filepattern globpattern fileglob",
        "limit": "maxresults maxmatches maxcount headlimit head maxlines numlines linecount lines",
        "offset": "line start from",
        "startline": "linestart startlineonebased startlineoneindexed startlinenumber firstline",
        "endline": "lineend endlineonebased endlineoneindexed endlineoneindexedinclusive endlinenumber lastline",
        "viewrange": "linerange range",
    }.items()
    for word in (key, *words.split())
}
"""What clients' own tools call the same arguments, and models therefore send. Case and underscores do not matter."""

_ENVELOPES = ("arguments", "args", "input", "parameters", "params", "kwargs")
"""Members that hold all arguments, where a model wraps them once more."""

_DIGITS = re.compile(r"\s*[0-9]{1,18}\s*")


class Useless(ValueError):
    """The arguments cannot be used. The text says what to send instead."""


def parsed(tool: Tool, arguments: str | bytes, names: Names) -> tuple[dict[str, Any], list[str]]:
    """Parse the arguments. Return those that the tool has, and the names of the others. Raises Useless."""
    takes = _ARGUMENTS[tool]
    given = _object(arguments, takes[0], f"{usage(tool, names)}; only {takes[0]} is required")
    known: dict[str, Any] = {}
    meant: dict[str, Any] = {}
    ignored: list[str] = []
    for key, value in given.items():
        word = _OTHER_WORDS.get(_plain(key), "")
        if key in takes:
            known[key] = value
        elif word in takes:
            meant.setdefault(word, value)
        elif tool == "read_file" and word in ("startline", "endline", "viewrange"):
            meant[word] = value
        else:
            ignored.append(key)
    return {**_lines(meant), **meant, **known}, ignored


def usage(tool: Tool, names: Names) -> str:
    """Say what a tool takes."""
    name = names[0] if tool == "grep" else names[1]
    return f"{name} takes one JSON object with {', '.join(_ARGUMENTS[tool])}"


def _object(arguments: str | bytes, required: str, takes: str) -> dict[str, Any]:
    """Decode the arguments, also if they are wrapped or encoded twice. A bare string is the required argument."""
    try:
        given = msgspec.json.decode(arguments) if arguments.strip() else {}
        if isinstance(given, str):
            given = msgspec.json.decode(given) if given.lstrip().startswith("{") else {required: given}
    except (ValueError, RecursionError) as error:
        raise Useless(f"The arguments cannot be read as JSON. {takes}.") from error
    if isinstance(given, dict) and len(given) == 1:
        [(key, inner)] = given.items()
        given = inner if key in _ENVELOPES and isinstance(inner, dict) else given
    if not isinstance(given, dict):
        raise Useless(f"The arguments are not a JSON object. {takes}.")
    return given


def _plain(key: str) -> str:
    """Return an argument's name as `_OTHER_WORDS` spells it."""
    return re.sub(r"[^a-z]", "", key[:MAX_STRING].lower())


def _lines(meant: Mapping[str, Any]) -> dict[str, int]:
    """Return offset and limit for a range of lines. Tools that have ranges count lines from 1."""
    both = meant.get("viewrange")
    first, last = both if isinstance(both, list) and len(both) == 2 else (meant.get("startline"), meant.get("endline"))
    start = _whole(first)
    start = max(start, 1) if start is not None else 1
    stop = _whole(last)
    found = {} if start == 1 else {"offset": start - 1}
    return found if stop is None or stop < start else {**found, "limit": stop - start + 1}


def _whole(value: Any) -> int | None:
    """Return a whole number, also if it is written as a string or as a float; None if it is none."""
    if (isinstance(value, str) and _DIGITS.fullmatch(value)) or (isinstance(value, float) and value.is_integer()):
        value = int(value)
    return value if type(value) is int else None


def path_of(given: Mapping[str, Any]) -> str:
    """Return the path. Of several, each stands on a line of its own. Raises Useless."""
    value = given.get("path")
    if isinstance(value, list | dict):
        value = "\n".join(_paths(value))
    return string({"path": value}, "path")


def _paths(value: list[Any] | dict[str, Any]) -> Iterator[str]:
    """Yield the paths in a list of paths, or of objects that have one each."""
    for member in islice(value, MAX_MEMBERS) if isinstance(value, list) else [value]:
        if isinstance(member, dict):
            member = next((inner for key, inner in member.items() if _OTHER_WORDS.get(_plain(key)) == "path"), "")
        if isinstance(member, str):
            yield member


def string(given: Mapping[str, Any], key: str) -> str:
    """Return a string argument, or an empty string if it is missing. Raises Useless."""
    value = given.get(key)
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > MAX_STRING:
        raise Useless(f'"{key}" must be a string of at most {MAX_STRING} characters.')
    return value


def number(given: Mapping[str, Any], key: str, default: int) -> int:
    """Return a whole number, or `default` if it is missing. Accepts a string too, which weaker models send.

    Raises Useless.
    """
    value = given.get(key)
    if value is None or value == "":
        return default
    whole = _whole(value)
    if whole is None or whole < 0:
        raise Useless(f'"{key}" must be a whole number, 0 or more.')
    return min(whole, sys.maxsize)


def at_most(given: Mapping[str, Any], default: int) -> int:
    """Return the limit. Models also write 0 or -1 where they want everything. Raises Useless."""
    whole = _whole(given.get("limit"))
    return default if whole is not None and whole < 1 else number(given, "limit", default)


def noted(ignored: list[str], tool: Tool, names: Names) -> str:
    """Return the line that names ignored arguments; empty if there are none."""
    if not ignored:
        return ""
    some = ", ".join(f'"{brief(key)}"' for key in ignored[:MAX_IGNORED])
    return f"[ignored: {some}{', …' if len(ignored) > MAX_IGNORED else ''}; {usage(tool, names)}]\n"


def brief(text: str) -> str:
    """Shorten a model's own text for repeating it to the model on one line."""
    text = text[:201].replace("\n", ", ")
    return text if len(text) <= 200 else text[:200] + "…"
