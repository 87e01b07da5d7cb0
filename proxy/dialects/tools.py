"""Arrays of tool definitions, which every API has: the client's, followed by ours."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Raw

from proxy import rawjson
from proxy.dialects.values import text_of


def with_tools(defined: Raw | None, ours: Sequence[bytes]) -> Raw | None:
    """Return the client's array of tools followed by ours, or None if there are no tools at all."""
    return Raw(rawjson.array([*elements(defined), *ours])) if ours else defined


def has_tools(defined: Raw | None) -> bool:
    """Whether an array of tools has any. Upstream refuses a `tool_choice` without tools."""
    return bool(elements(defined))


def elements(defined: Raw | None) -> list[Raw]:
    """Return the definitions in an array of tools that `parse` has accepted."""
    return [] if defined is None or rawjson.is_null(defined) else rawjson.elements(defined)


def tool_name(raw: Raw) -> str:
    """Return the name in one definition, where it is no further inside, as in chat."""
    return text_of(rawjson.members(raw).get("name"))
