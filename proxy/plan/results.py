"""Messages that carry results although their role is another one: which of them the policy names, and how.

Some clients do not use the API's tools. They send a tool's result as a user or a system message. The policy's rules
recognise such a message by its role, by how its text begins, and by its place.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import IntEnum, StrEnum
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
        str, Meta(max_length=200, description="how their text begins; it stays in the context. A user rule needs one")
    ] = ""
    without: Annotated[
        str,
        Meta(max_length=200, description="a text that such a message must not contain, as it begins the user's own"),
    ] = ""
    after: Annotated[After | None, Meta(description="first_user: only after the user's first message")] = None


def _user(*prefixes: str, without: str = "") -> tuple[ResultRule, ...]:
    return tuple(ResultRule(role=ResultRole.USER, prefix=prefix, without=without) for prefix in prefixes)


PRESETS: Mapping[ResultPreset, tuple[ResultRule, ...]] = {
    ResultPreset.SMOLAGENTS: _user("Observation:", "Call id:", "Error:\n", without="\nNew task:\n"),
    ResultPreset.GPTME: (ResultRule(role=ResultRole.SYSTEM, after=After.FIRST_USER),),
    ResultPreset.CLINE: _user(
        *(
            f"[{tool}"
            for tool in (
                "access_mcp_resource",
                "browser_action",
                "execute_command",
                "list_code_definition_names",
                "list_files",
                "load_mcp_documentation",
                "read_file",
                "replace_in_file",
                "search_files",
                "use_mcp_tool",
                "web_fetch",
                "web_search",
                "write_to_file",
            )
        )
    ),
}
"""The rules of clients that we know. In smolagents, what the user says begins with `New task:`, and it
makes one message of it and of an observation before it. Cline's tools that ask
the user are left out, because their results are the user's own words."""


class Carries(IntEnum):
    """Whether a message carries a result, as far as its role and text say. The greater value holds."""

    NO = 0
    AFTER_FIRST_USER = 1
    YES = 2


def carried(role: str, texts: list[str], rules: Sequence[ResultRule]) -> tuple[Carries, int]:
    """Return whether a message of this role with these texts carries a result, and the length of its prefix."""
    first = texts[0] if texts else ""
    found = [rule for rule in rules if rule.role == role and first.startswith(rule.prefix)]
    found = [rule for rule in found if not (rule.without and rule.without in "".join(texts))]
    carries = max((Carries.AFTER_FIRST_USER if rule.after else Carries.YES for rule in found), default=Carries.NO)
    return carries, max((len(rule.prefix) for rule in found), default=0)


_error = re.compile(
    r"\s{0,9}(?:<(?:tool_use_)?error>|\[?error\b|exception\b|traceback \(most recent call last\)|fatal:|panic:"
    r"|command failed|[\w.]{1,60}(?:error|exception):|\{\s{0,9}\"error\"|exit code:? [1-9]|exited with code [1-9])",
    re.IGNORECASE,
)
"""How results begin that report an error, where the API has no member that says so: Claude Code's `Exit code 1` and
`<tool_use_error>`, Python's and Node's errors, git's and Go's."""


def reports_error(texts: Sequence[str]) -> bool:
    """Whether a result with these texts begins like an error."""
    return bool(texts) and _error.match(texts[0]) is not None
