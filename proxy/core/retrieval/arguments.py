"""Reads the arguments of a call of our tools, which come from a model and may be anything."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from proxy.core.retrieval.definitions import Names

Tool = Literal["grep", "read_file"]

MAX_STRING = 1_000
"""Characters of an argument. Globs and patterns are compiled, and nobody writes longer ones."""

_ARGUMENTS = {"grep": ("pattern", "path", "glob", "limit"), "read_file": ("path", "offset", "limit", "column")}

_OTHER_WORDS = {
    **dict.fromkeys(("file_path", "filepath", "file", "filename", "file_name", "absolute_path"), "path"),
    **dict.fromkeys(("regex", "query", "search"), "pattern"),
    "include": "glob",
}
"""What clients' own tools call the same arguments, and models therefore send."""

_DIGITS = re.compile(r"\s*[0-9]{1,18}\s*")


class Useless(ValueError):
    """The arguments cannot be used. The text says what to send instead."""


def parsed(tool: Tool, arguments: str | bytes, names: Names) -> dict[str, Any]:
    """Parse the arguments as an object that has only members the tool knows. Raises Useless."""
    name = names[0] if tool == "grep" else names[1]
    takes = f"{name} takes one JSON object with {', '.join(_ARGUMENTS[tool])}; only {_ARGUMENTS[tool][0]} is required"
    try:
        given = msgspec.json.decode(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError) as error:
        raise Useless(f"The arguments cannot be read as JSON. {takes}.") from error
    if not isinstance(given, dict):
        raise Useless(f"The arguments are not a JSON object. {takes}.")
    known: dict[str, Any] = {}
    for key, value in given.items():
        meant = key if key in _ARGUMENTS[tool] else _OTHER_WORDS.get(key)
        if meant not in _ARGUMENTS[tool]:
            raise Useless(f'There is no argument "{brief(key)}". {takes}.')
        if key == meant or meant not in given:
            known[meant] = value
    return known


def string(given: Mapping[str, Any], key: str) -> str:
    """Return a string argument, or an empty string if it is missing. Raises Useless."""
    value = given.get(key)
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > MAX_STRING:
        raise Useless(f'"{key}" must be a string of at most {MAX_STRING} characters.')
    return value


def number(given: Mapping[str, Any], key: str, default: int, *, least: int = 0) -> int:
    """Return a whole number, or `default` if it is missing. Accepts a string too, which weaker models send.

    Raises Useless.
    """
    value = given.get(key)
    if value is None or value == "":
        return default
    if (isinstance(value, str) and _DIGITS.fullmatch(value)) or (isinstance(value, float) and value.is_integer()):
        value = int(value)
    if type(value) is not int or value < least:
        raise Useless(f'"{key}" must be a whole number, {least} or more.')
    return min(value, sys.maxsize)


def brief(text: str) -> str:
    """Shorten a model's own text for repeating it to the model."""
    return text if len(text) <= 200 else text[:200] + "…"
