"""Recognises calls of our tools that a model wrote as text, because its server did not parse them.

llama.cpp, for one, ignores `tool_choice: none` and then shows the call's JSON. Only a text that consists of such calls
and nothing else is taken for them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from proxy.dialects.tool_names import ToolNames

LONGEST = 64 << 10
"""Most characters of a text that is read as calls. A search pattern and a path take a few hundred."""
HEAD = 400
"""Most characters that may come before the name. More are not held back, because they are no call."""

_MARKS = re.compile(
    r"\s+|;|```\w*(?=\s|$)|</?\w*tool_?calls?\w*>|</?function_calls?>|</?tools?>|<\|\w*\|>|\[/?TOOL_CALLS\]"
)
"""What stands around calls: code fences, and the tags of chat templates."""
_PART_OF_MARK = re.compile(r"`{1,3}\w*|<\|?/?\w*\|?|\[/?[A-Z_]*")
_NAMED = re.compile(r'"(?:name|tool|tool_name|function)"\s*:\s*"([^"]*)("?)')
_NAMES = ("name", "tool", "tool_name", "function")
_ARGUMENTS = ("arguments", "parameters", "args", "input")


def could_be_call(beginning: str, names: ToolNames) -> bool:
    """Whether a text that begins like this may consist of calls of our tools."""
    rest = beginning[_after_marks(beginning, 0) :]
    if not rest or _PART_OF_MARK.fullmatch(rest):
        return True
    if rest[0] not in "{[":
        return False
    if named := _NAMED.search(rest):
        name, complete = named.groups()
        return bool(names.recognised(name)) if complete else names.could_become(name)
    return len(rest) <= HEAD


def is_named(beginning: str) -> bool:
    """Whether the text has got as far as a call's name, so that `could_be_call` will not change."""
    named = _NAMED.search(beginning)
    return named is not None and bool(named[2])


def calls_in(text: str, names: ToolNames) -> list[tuple[str, str]]:
    """Return name and arguments of each call if the text consists of calls of our tools; otherwise nothing."""
    if len(text) > LONGEST:
        return []
    try:
        values = list(_values(text))
    except (ValueError, RecursionError):
        return []
    calls = [_call(value, names) for value in values]
    return [call for call in calls if call is not None] if None not in calls else []


def _values(text: str) -> Iterator[Any]:
    """Yield the JSON values of a text that has nothing else but marks. Raises ValueError."""
    decoder = json.JSONDecoder()
    at = _after_marks(text, 0)
    while at < len(text):
        value, at = decoder.raw_decode(text, at)
        at = _after_marks(text, at)
        if isinstance(value, dict) and isinstance(value.get("tool_calls"), list):
            value = value["tool_calls"]
        yield from value if isinstance(value, list) else [value]


def _after_marks(text: str, at: int) -> int:
    while match := _MARKS.match(text, at):
        if match.end() == at:
            break
        at = match.end()
    return at


def _call(value: Any, names: ToolNames) -> tuple[str, str] | None:
    """Return a call's name and arguments, or None if this is no call of one of our tools."""
    if not isinstance(value, dict):
        return None
    inner = value["function"] if isinstance(value.get("function"), dict) else value
    name = next((inner[key] for key in _NAMES if isinstance(inner.get(key), str)), "")
    arguments: Any = next((inner[key] for key in _ARGUMENTS if key in inner), {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    ours = names.recognised(name)
    return (ours, json.dumps(arguments, ensure_ascii=False)) if ours and isinstance(arguments, dict) else None
