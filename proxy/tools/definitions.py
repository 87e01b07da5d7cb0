"""What a model is told about `grep` and `read_file`, and what it means by the arguments that it
sends.

Models write what they know from other tools: `file_path` for `path`, `start_line` for `offset`, a
list of paths, or flags that we do not have. What can be meant is done, and what is ignored is
named. No dialect's field names stand here.
"""

from __future__ import annotations

import re
import sys
from itertools import islice
from typing import Any, Literal

import msgspec

Tool = Literal["grep", "read_file"]
Names = tuple[str, str]

NAMES: Names = ("grep", "read_file")  # the names of our tools
OTHER_NAMES: Names = ("offload_grep", "offload_read_file")
"""Their names if the client has a tool with either name, or may have one."""

DEFAULT_MATCHES = 50
# characters of an argument. Globs and patterns are compiled, and nobody writes longer ones.
MAX_STRING = 1_000
MAX_MEMBERS = 50
MAX_IGNORED = 5
"""The most members of a list that are looked at, and the most ignored arguments that are named."""


LEFT_EMPTY = "Give an empty string, or 0, for what you do not need."
"""What strict tools say: their calls have all parameters."""


def definitions(
    names: Names, store_dir: str, *, others: bool = False, strict: bool = False
) -> list[bytes]:
    """Return both tools as JSON objects of `name`, `description` and `parameters`. Equal arguments
    give equal bytes. `others`: a search without a path also goes through what this user's last
    conversations moved. `strict`: every server that checks schemas strictly takes these, as they
    have no optional parameter.

    Every request of an agent has them, so a short run costs what they weigh
    (`requests.planned.OUR_TOOLS_TOKENS`)."""
    grep, read_file = names
    everything = "all, and this user's last conversations" if others else "all"
    describe = _strict_definition if strict else _definition
    return [
        describe(
            grep,
            f"Print the matching lines of the full texts moved from this conversation to"
            f" {store_dir}, ignoring case.",
            "pattern",
            pattern=("string", "RE2 regex"),
            path=("string", f"File, or its call's path, URL or command (default: {everything})"),
            glob=("string", "Such as *.txt"),
            limit=("integer", f"Matches (default: {DEFAULT_MATCHES})"),
        ),
        describe(
            read_file,
            f"Read a whole text. Only {grep} and {read_file} know {store_dir}.",
            "path",
            path=("string", f"As for {grep}"),
            offset=("integer", "First line, from 0"),
            limit=("integer", "Lines (default: all)"),
            column=("integer", "First character, in a long line"),
        ),
    ]


def _definition(name: str, description: str, required: str, **properties: tuple[str, str]) -> bytes:
    """Describe a tool in plain JSON Schema: `strict` with its nullable unions upsets weaker
    servers."""
    described = {
        key: {"type": kind, "description": text} for key, (kind, text) in properties.items()
    }
    parameters = {"type": "object", "properties": described, "required": [required]}
    return msgspec.json.encode({"name": name, "description": description, "parameters": parameters})


def _strict_definition(
    name: str, description: str, required: str, **properties: tuple[str, str]
) -> bytes:
    loose = msgspec.json.decode(
        _definition(name, f"{description} {LEFT_EMPTY}", required, **properties)
    )
    loose["parameters"] |= {"required": list(properties), "additionalProperties": False}
    return msgspec.json.encode(loose | {"strict": True})


# -- arguments -------------------------------------------------------------------------------------

_ARGUMENTS = {
    "grep": ("pattern", "path", "glob", "limit"),
    "read_file": ("path", "offset", "limit", "column"),
}
_RANGES = ("startline", "endline", "viewrange")
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
"""What clients' own tools call the same arguments, and models therefore send. Case and underscores
do not matter."""
_ENVELOPES = ("arguments", "args", "input", "parameters", "params", "kwargs")
"""Members that hold all arguments, where a model wraps them once more."""
_DIGITS = re.compile(r"\s*[0-9]{1,18}\s*")


class Useless(ValueError):
    """The arguments cannot be used. The text says what to send instead."""


class Arguments(msgspec.Struct, frozen=True):
    """A call's arguments, as they are meant. Of several paths, each stands on a line of its own."""

    tool: Tool
    pattern: str = ""
    path: str = ""
    glob: str = ""
    limit: int = 0  # 0: it has none, as models also write 0 or -1 where they want everything
    offset: int | None = None
    column: int = 0
    note: str = ""  # a line that names ignored arguments; empty if there are none
    fault: str = ""  # why the arguments cannot be used, and what to send instead


def parsed(tool: Tool, arguments: str | bytes, names: Names = NAMES) -> Arguments:
    """Return what these arguments mean."""
    try:
        return _parsed(tool, arguments, names)
    except Useless as useless:
        return Arguments(tool, fault=str(useless))


def _parsed(tool: Tool, arguments: str | bytes, names: Names) -> Arguments:
    """Raises Useless."""
    takes = _ARGUMENTS[tool]
    usage = f"{names[NAMES.index(tool)]} takes one JSON object with {', '.join(takes)}"
    meant: dict[str, Any] = {}
    ignored: list[str] = []
    for key, value in _object(arguments, takes[0], f"{usage}; only {takes[0]} is required").items():
        word = _meaning(key)
        if key in takes:
            meant[key] = value  # goes before every other word for it
        elif word in takes or (word in _RANGES and tool == "read_file"):
            meant.setdefault(word, value)
        else:
            ignored.append(key)
    given = {**_lines(meant), **meant}
    some = ", ".join(f'"{brief(key)}"' for key in ignored[:MAX_IGNORED])
    note = (
        f"[ignored: {some}{', …' if len(ignored) > MAX_IGNORED else ''}; {usage}]\n"
        if ignored
        else ""
    )

    def string(key: str) -> str:
        value = "" if given.get(key) is None else given[key]
        if not isinstance(value, str) or len(value) > MAX_STRING:
            raise Useless(f'{note}"{key}" must be a string of at most {MAX_STRING} characters.')
        return value

    def number(key: str) -> int | None:
        value = given.get(key)
        if value is None or value == "":
            return None
        whole = _integer(value)
        if whole is None or (whole < 0 and key != "limit"):
            raise Useless(f'{note}"{key}" must be a whole number, 0 or more.')
        return min(max(whole, 0), sys.maxsize)

    given["path"] = _paths(given.get("path"))
    return Arguments(
        tool,
        pattern=string("pattern"),
        path=string("path"),
        glob=string("glob"),
        limit=number("limit") or 0,
        offset=number("offset"),
        column=number("column") or 0,
        note=note,
    )


def _object(arguments: str | bytes, required: str, usage: str) -> dict[str, Any]:
    """Decode the arguments, also if they are wrapped or encoded twice. A bare string is the
    required argument."""
    try:
        given = msgspec.json.decode(arguments) if arguments.strip() else {}
        if isinstance(given, str):
            given = (
                msgspec.json.decode(given) if given.lstrip().startswith("{") else {required: given}
            )
    except (ValueError, RecursionError) as error:
        raise Useless(f"The arguments cannot be read as JSON. {usage}.") from error
    if isinstance(given, dict) and len(given) == 1:
        [(key, inner)] = given.items()
        given = inner if key in _ENVELOPES and isinstance(inner, dict) else given
    if not isinstance(given, dict):
        raise Useless(f"The arguments are not a JSON object. {usage}.")
    return given


def _meaning(key: str) -> str:
    """Return the argument that is meant by this name; empty if none is."""
    return _OTHER_WORDS.get(re.sub(r"[^a-z]", "", key[:MAX_STRING].lower()), "")


def _lines(given: dict[str, Any]) -> dict[str, int]:
    """Return offset and limit for a range of lines. Tools that have ranges count lines from 1."""
    both = given.get("viewrange")
    first, last = (
        both
        if isinstance(both, list) and len(both) == 2
        else (given.get("startline"), given.get("endline"))
    )
    start = max(_integer(first) or 1, 1)
    stop = _integer(last)
    found = {} if start == 1 else {"offset": start - 1}
    return found if stop is None or stop < start else {**found, "limit": stop - start + 1}


def _integer(value: Any) -> int | None:
    """Return a whole number, also if it is written as a string or as a float; None if it is
    none."""
    if (isinstance(value, str) and _DIGITS.fullmatch(value)) or (
        isinstance(value, float) and value.is_integer()
    ):
        value = int(value)
    return value if type(value) is int else None


def _paths(value: Any) -> Any:
    """Return a list of paths, or of objects that have one each, as one text, and any other value as
    it is."""
    if not isinstance(value, list | dict):
        return value
    paths = []
    for member in islice(value, MAX_MEMBERS) if isinstance(value, list) else [value]:
        if isinstance(member, dict):
            member = next((inner for key, inner in member.items() if _meaning(key) == "path"), "")
        if isinstance(member, str):
            paths.append(member)
    return "\n".join(paths)


def brief(text: str) -> str:
    """Shorten a model's own text for repeating it to the model on one line."""
    text = text[:201].replace("\n", ", ")
    return text if len(text) <= 200 else text[:200] + "…"
