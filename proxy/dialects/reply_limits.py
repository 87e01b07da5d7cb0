"""Lowers a request's own limit for the reply to the room that the window leaves, whatever the API calls the limit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Raw

from proxy.dialects.values import Members, object_of, whole

LEAST_REPLY = 1_000
"""The fewest tokens to which a limit is lowered. A shorter reply is of no use; upstream's refusal says more."""

ENTRY_BYTES = 3
"""Bytes of JSON for each token of the entries that a later round adds; English text has four or more."""

THINKING = (
    ("thinking", "budget_tokens"),
    ("reasoning", "max_tokens"),
    ("thinking_budget",),
    ("extra_body", "google", "thinking_config", "thinking_budget"),
)
"""The paths of members that set a budget for thinking: Anthropic's, OpenRouter's, Qwen's and Gemini's. Upstreams refuse
a limit that is not above this budget."""


def lowered(members: Members, limits: Iterable[str], left: int | None, added: Sequence[bytes | Raw] = ()) -> Members:
    """Return those of the members `limits` that have to change, with lower numbers.

    `left` is how many tokens of the window were left for the reply to the client's own request; None if the window is
    not known. `added` are the entries that this round has besides.
    """
    if left is None:
        return {}
    left -= sum(len(memoryview(raw)) for raw in added) // ENTRY_BYTES
    room = max(left, LEAST_REPLY, _thinking(members) + 1)
    return {limit: Raw(b"%d" % room) for limit in limits if whole(members.get(limit)) > room}


def lowest(changed: Members) -> int | None:
    """Return the lowest of the changed limits, None if none has changed."""
    return min(map(whole, changed.values()), default=None)


def _thinking(members: Members) -> int:
    """Return the largest budget for thinking; 0 if there is none."""
    return max(_number(members, path) for path in THINKING)


def _number(members: Members, path: Sequence[str]) -> int:
    for key in path[:-1]:
        members = object_of(members.get(key))
    return whole(members.get(path[-1]))
