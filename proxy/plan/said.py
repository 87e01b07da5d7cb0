"""The user's own words in texts that are not the user's: which spans of a text they are.

Clients put what the user says in the middle of a turn into reminders, into the results of rejected calls, and into the
results of tools that ask. A span begins with one of these texts at the beginning of a line, and ends with the tag
around it, or with the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache

BEGINNINGS = (
    "The user sent a new message while you were working",  # Claude Code: a queued message, also within a result
    "The user doesn't want to proceed with this tool use",  # Claude Code: a rejected call, and what to do instead
    "The user doesn't want to take this action right now",
    "User has answered your questions",  # Claude Code's AskUserQuestion, opencode's question (tool/question.ts)
    "The user sent the following message",  # opencode (session/prompt.ts)
    "The user rejected permission to use this specific tool call",  # opencode (permission/index.ts)
    "User has provided the following answers",  # Qwen Code (tools/askUserQuestion.ts)
    "The tool call is rejected by the user",  # Kimi CLI (tools/utils.py), with the user's feedback
    "This tool call was rejected by the user",  # Cline (sdk/packages/shared/src/llms/tools.ts)
    "The user denied this operation",  # Cline and Roo Code (prompts/responses.ts)
    "The user approved this operation and provided the following context",  # Roo Code
    "The user provided the following feedback",  # Cline
    "<feedback>",  # Cline and Roo Code
    "<answer>",  # Cline's ask_followup_question
    "<user_message>",
)
TOOLS = (
    *("AskUserQuestion", "ExitPlanMode"),  # Claude Code; Kimi and Qwen Code have the first one too
    *("question", "plan_exit"),  # opencode
    "request_user_input",  # Codex
    *("ask_user", "exit_plan_mode"),  # Copilot CLI and Gemini CLI
    *("vscode_askQuestions", "ask_questions"),  # Copilot in VS Code
    "ask_user_question",  # Qwen Code
    *("ask_followup_question", "plan_mode_respond", "ask_question"),  # Cline and Roo Code
)
"""Tools whose results are the user's answers."""

MOST = 20
"""The most spans of one text. A text with more quotes what such texts look like."""

_tag = re.compile(r"<([\w-]{1,40})>")


_tool = re.compile(r"[\w-]+")


def is_tool(named: str) -> bool:
    """Whether a policy means a tool by this, as APIs let them be called, and not the beginning of a line."""
    return _tool.fullmatch(named) is not None


def spans(text: str, more: tuple[str, ...] = ()) -> tuple[tuple[int, int], ...]:
    """Return where the user speaks in this text: each span's beginning and end."""
    beginnings = (*BEGINNINGS, *more)
    if not any(beginning in text for beginning in beginnings):
        return ()
    found = list[tuple[int, int]]()
    for match in _pattern(beginnings).finditer(text):
        start = match.start(1)
        if not found or start >= found[-1][1]:
            found.append(_around(text, start))
    return tuple(found) if len(found) <= MOST else ()


def quoted(text: str, found: Iterable[tuple[int, int]], kept: int) -> Iterator[str]:
    """Yield the spans of a text that are not within its first `kept` characters."""
    for start, end in found:
        if end > kept:
            yield text[start:end]


@lru_cache(maxsize=64)
def _pattern(beginnings: tuple[str, ...]) -> re.Pattern[str]:
    """Return the pattern of a line that begins so, in the tag before it if there is one."""
    return re.compile(
        rf"^[ \t]*((?:<[\w-]{{1,40}}>\s{{0,8}})?(?:{'|'.join(map(re.escape, beginnings))}))", re.MULTILINE
    )


def _around(text: str, start: int) -> tuple[int, int]:
    """Return the span that begins here: to the end of the tag that it begins with or stands in, or of the text."""
    tag = _tag.match(text, start)
    if tag is None and (before := text.rfind("<", 0, start)) >= 0:
        tag = _tag.fullmatch(text[before:start].rstrip())
        start = before if tag else start
    end = text.find(f"</{tag[1]}>", start) if tag else -1
    return start, len(text) if end < 0 or tag is None else end + len(tag[1]) + 3
