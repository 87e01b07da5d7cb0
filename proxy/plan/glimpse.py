"""Which part of a moved text stays: its beginning, or of a result that the model has not seen yet,
more than that.

What stays is a function of the text and of the number of characters, so each later request and each
replica shows the same.
"""

from __future__ import annotations

import ast
import re
from typing import Any

import msgspec

GAP = "\n[...]\n"
"""Stands where something was left out."""

OPENED = 1 << 20
"""Most characters of a text that is opened: to look into more takes longer than a few
milliseconds."""

SCANNED = 1 << 18
"""Characters in which lines that define things are looked for, and in which noise may come
first."""

DEFINITIONS = 3
"""The fewest lines that define something by which a text is taken for code."""

LINES_A_DEFINITION = 100
"""Code defines something in one of so many lines at least."""

_WRAPPED = ("text", "content", "output", "result", "stdout")
"""Members that hold a result's text in what MCP servers, frameworks and shells put around it."""

_REPR = re.compile(r"[\w=\[({' ,]*\btext=('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")")
"""What Python prints of an MCP result: `meta=None content=[TextContent(type='text', text='…'`."""

_NUMBER = r"(?>[ \t]*\d+[ \t]*?[:|\t\u2192][ ]?)?+"
_DEFINITION = re.compile(
    rf"^{_NUMBER}(?P<indent>[ \t]*+)(?:(?:export|default|public|private|protected|internal|static|final|abstract|async"
    r"|pub(?:\([a-z]+\))?|unsafe|extern|virtual|override|inline|const|data|sealed)[ \t]+)*"
    r"(?:def|class|func|fn|function|fun|interface|struct|enum|trait|impl|type|module|namespace|record|object)"
    r"[ \t]+[(\w][^\n]*",
    re.MULTILINE,
)
"""A line that defines something in the common languages, also behind the line's number as `cat -n`
prints it. What precedes the words is read in one way only, so that it takes linear time."""

_NOISE = re.compile(
    r"[^\n]*(?:"
    r"^\s*\Z"
    r"|^\S+:\d+: \w*Warning\b"
    r"|^\s*\[?(?:warning|warn)\b\]?[:\s]"
    r"|^npm (?:warn|notice)\b"
    r"|\d%\|"
    r"|\b\d{1,3}%[ \t]*\[?[#=>\u2588. ]"
    r"|^\s*(?:Collecting|Downloading|Downloaded|Requirement already satisfied|Looking in (?:links|indexes)|Obtaining"
    r"|Using cached|Preparing|Installing|Building wheel|Get:\d+|Hit:\d+|Reading package|Unpacking|Selecting"
    r"|Resolving|Fetching|Compiling|Setting up)\b"
    r")",
    re.IGNORECASE,
)
"""A line of warnings or progress, as pip, apt, npm, cargo, tqdm and Python's `warnings` print
them."""


def opened(text: str) -> str:
    """Return the text inside a wrapper such as `{"type":"text","text":"…"}`; the text itself if it
    has none."""
    if len(text) > OPENED:
        return text
    inner = ""
    if text.lstrip()[:1] in ("{", "[", '"'):
        try:
            inner = _inside(msgspec.json.decode(text))
        except (ValueError, RecursionError):
            return text
    elif match := _REPR.match(text):
        try:
            inner = str(ast.literal_eval(match[1]))
        except (ValueError, SyntaxError):
            return text
    return inner if 2 * len(inner) > len(text) else text


def _inside(value: Any) -> str:
    """Return the text that a decoded wrapper holds; empty if the value is not a wrapper."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        blocks = [_inside(one) if isinstance(one, dict) else "" for one in value]
        return "\n".join(blocks) if all(blocks) else ""
    if isinstance(value, dict):
        return next((inner for key in _WRAPPED if (inner := _inside(value.get(key)))), "")
    return ""


def beginning(text: str, chars: int) -> str:
    """Return the first characters that say something: warnings and progress at a program's
    beginning are left out."""
    start = _noise(text)
    return text[:chars] if not start else f"[...] {text[start : start + chars - len('[...] ')]}"


def _noise(text: str) -> int:
    """Return where the first line begins after warnings and progress; 0 if there is no such
    line."""
    at = 0
    within = False
    limit = min(len(text), SCANNED)
    while at < limit:
        end = text.find("\n", at, limit)
        if end < 0:
            return 0
        line = text[at:end]
        # the source line that Python shows below its warning
        below = within and line[:1] in (" ", "\t")
        within = below or _NOISE.match(line) is not None
        if not within:
            return at
        at = end + 1
    return 0


def glimpse(text: str, chars: int) -> str:
    """Return what a model sees of a result before it has seen all of it. Code: its beginning, and
    the lines that define things. Anything else: its beginning and its end."""
    if len(text) <= chars:
        return text
    half = (chars - len(GAP)) // 2
    start = _noise(text)
    head = text[start : start + half]
    lines = _definitions(text, start + half, half - len(GAP))
    if lines:
        return f"{head}{GAP}{lines}"
    return f"{head}{GAP}{text[len(text) - half :]}"


def _definitions(text: str, start: int, chars: int) -> str:
    """Return as many lines behind `start` that define something as fit, rather outer ones; none if
    it is no code."""
    found = list(_DEFINITION.finditer(text, 0, min(len(text), SCANNED)))
    if len(found) < DEFINITIONS or len(found) * LINES_A_DEFINITION < text.count("\n", 0, SCANNED):
        return ""
    behind = [match for match in found if match.start() >= start]
    chosen = []
    for match in sorted(behind, key=lambda match: (len(match["indent"]), match.start())):
        chars -= len(match[0]) + 1
        if chars < 0:
            break
        chosen.append(match)
    return "\n".join(match[0] for match in sorted(chosen, key=lambda match: match.start()))
