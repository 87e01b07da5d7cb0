"""What a message's own text says of it: that it carries a result, that it reports an error, or that
the user speaks.

Some clients do not use the API's tools. They send a tool's result as a user or a system message.
The policy's rules recognise such a message by its role, by how its text begins, and by its place.

Clients put what the user says in the middle of a turn into reminders, into the results of rejected
calls, and into the results of tools that ask. A *span* is such a part of a text. It begins with one
of `BEGINNINGS` at the beginning of a line, and ends with the tag around it, or with the text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import IntEnum, StrEnum
from functools import lru_cache
from typing import Annotated

import msgspec
from msgspec import Meta


class ResultRole(StrEnum):
    USER = "user"
    SYSTEM = "system"


class After(StrEnum):
    FIRST_USER = "first_user"


class ResultPreset(StrEnum):
    SMOLAGENTS = "smolagents"
    GPTME = "gptme"
    CLINE = "cline"


class ResultRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Messages that are planned as tool results although their role is another one."""

    role: Annotated[ResultRole, Meta(description="the role that the client gives them")]
    prefix: Annotated[
        str,
        Meta(
            max_length=200,
            description="how their text begins; it stays in the context. A user rule needs one",
        ),
    ] = ""
    without: Annotated[
        str,
        Meta(
            max_length=200,
            description="a text that such a message must not contain, as it begins the user's own",
        ),
    ] = ""
    after: Annotated[
        After | None, Meta(description="first_user: only after the user's first message")
    ] = None


def _user(*prefixes: str, without: str = "") -> tuple[ResultRule, ...]:
    return tuple(
        ResultRule(role=ResultRole.USER, prefix=prefix, without=without) for prefix in prefixes
    )


PRESETS: Mapping[ResultPreset, tuple[ResultRule, ...]] = {
    ResultPreset.SMOLAGENTS: _user("Observation:", "Call id:", "Error:\n", without="\nNew task:\n"),
    ResultPreset.GPTME: (ResultRule(role=ResultRole.SYSTEM, after=After.FIRST_USER),),
    ResultPreset.CLINE: _user(
        *(
            "[access_mcp_resource",
            "[browser_action",
            "[execute_command",
            "[list_code_definition_names",
            "[list_files",
        ),
        *(
            "[load_mcp_documentation",
            "[read_file",
            "[replace_in_file",
            "[search_files",
            "[use_mcp_tool",
            "[web_fetch",
        ),
        *("[web_search", "[write_to_file"),
    ),
}
"""The rules of clients that we know. Smolagents makes one message of an observation and of what the
user says, which begins with `New task:`. Cline's tools that ask the user are left out: their
results are the user's own words."""


class Carries(IntEnum):
    """Whether a message carries a result, as far as its role and text say. The greater value
    holds."""

    NO = 0
    AFTER_FIRST_USER = 1
    YES = 2


def carried(role: str, texts: list[str], rules: Sequence[ResultRule]) -> tuple[Carries, int]:
    """Return whether a message of this role with these texts carries a result, and the length of
    its prefix."""
    first = texts[0] if texts else ""
    found = [rule for rule in rules if rule.role == role and first.startswith(rule.prefix)]
    found = [rule for rule in found if not (rule.without and rule.without in "".join(texts))]
    carries = max(
        (Carries.AFTER_FIRST_USER if rule.after else Carries.YES for rule in found),
        default=Carries.NO,
    )
    return carries, max((len(rule.prefix) for rule in found), default=0)


_error = re.compile(
    r"\s{0,9}(?:<(?:tool_use_)?error>|\[?error\b|exception\b|traceback \(most recent call last\)|fatal:|panic:"
    r"|command failed|[\w.]{1,60}(?:error|exception):|\{\s{0,9}\"error\"|exit code:? [1-9]|exited with code [1-9])",
    re.IGNORECASE,
)
"""How results begin that report an error, where the API has no member that says so: Claude Code's
`Exit code 1` and `<tool_use_error>`, Python's and Node's errors, git's and Go's."""


def reports_error(texts: Sequence[str]) -> bool:
    """Whether a result with these texts begins like an error."""
    return bool(texts) and _error.match(texts[0]) is not None


_missing = re.compile(
    r"no such file|not found|(?:does not|doesn't) exist|(?:can|could) ?not (?:find|open|read)|enoent"
    r"|outside|not allowed|denied|not (?:with)?in the (?:workspace|project)|invalid path",
    re.IGNORECASE,
)
"""How tools say that a path is nothing to them: shells and ripgrep, Node, Claude Code, opencode,
Cline, and the MCP server for files, which names the folders that are allowed."""

MISSING_CHARS = 2_000
"""The most characters of a result that only says so."""


def misses_file(texts: Sequence[str]) -> bool:
    """Whether the result of a call with a path, which has these texts, says that nothing is
    there."""
    if sum(map(len, texts)) > MISSING_CHARS:
        return False
    return reports_error(texts) or any(_missing.search(text) for text in texts)


# -- the user's own words --------------------------------------------------------------------------

BEGINNINGS = (
    # Claude Code: a queued message, also within a result
    "The user sent a new message while you were working",
    # Claude Code: a rejected call, and what to do instead
    "The user doesn't want to proceed with this tool use",
    "The user doesn't want to take this action right now",
    "Permission for this tool use was denied",  # Claude Code: a rejected call of a subagent
    # Claude Code's AskUserQuestion, opencode's question (tool/question.ts)
    "User has answered your questions",
    "The user sent the following message",  # opencode (session/prompt.ts)
    "The user rejected permission to use this specific tool call",  # opencode (permission/index.ts)
    "User has provided the following answers",  # Qwen Code (tools/askUserQuestion.ts)
    "[The user sent a new message while you were working",  # Qwen Code (channels)
    "Plan rejected. User feedback:",  # Gemini CLI (tools/exit-plan-mode.ts)
    "User steering update:\n",  # Gemini CLI (utils/fastAckHelper.ts)
    "User hints:\n",
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

MOST = 20  # the most spans of one text. A text with more quotes what such texts look like.

_tag = re.compile(r"<([\w-]{1,40})>")
_tool = re.compile(r"[\w-]+")


def is_tool(named: str) -> bool:
    """Whether a policy means a tool by this, as APIs let them be called, and not the beginning of a
    line."""
    return _tool.fullmatch(named) is not None


def spans(text: str, more: tuple[str, ...] = ()) -> tuple[tuple[int, int], ...]:
    """Return where the user speaks in this text: each span's beginning and end."""
    beginnings = (*BEGINNINGS, *more)
    if not any(beginning in text for beginning in beginnings):
        return ()
    found = list[tuple[int, int]]()
    starts = {
        match.start(1) for pattern in _patterns(beginnings) for match in pattern.finditer(text)
    }
    for start in sorted(starts):
        if found and start < found[-1][1]:
            continue
        # It ends with the tag that it begins with or stands in, or with the text.
        tag = _tag.match(text, start)
        if tag is None and (before := text.rfind("<", 0, start)) >= 0:
            tag = _tag.fullmatch(text[before:start].rstrip())
            start = before if tag else start
        end = text.find(f"</{tag[1]}>", start) if tag else -1
        found.append((start, len(text) if end < 0 or tag is None else end + len(tag[1]) + 3))
    return tuple(found) if len(found) <= MOST else ()


@lru_cache(maxsize=64)
def _patterns(beginnings: tuple[str, ...]) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return the patterns of a line that begins so, in the tag before it if there is one, or in
    words behind `Error: `, and of a reminder, which may also begin within a line."""
    begun = "|".join(map(re.escape, beginnings))
    line = rf"^[ \t]*(?:\w{{0,40}}Error: (?!<))?((?:<[\w-]{{1,40}}>\s{{0,8}})?(?:{begun}))"
    return re.compile(line, re.MULTILINE), re.compile(
        rf"(<system-[\w-]{{1,32}}>\s{{0,8}}(?:{begun}))"
    )
