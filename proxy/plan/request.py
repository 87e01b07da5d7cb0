"""A client's request as far as we look into it: a few members decoded, and all of them kept as raw bytes."""

from __future__ import annotations

import re
from collections.abc import Collection

import msgspec
from msgspec import Raw

from proxy import rawjson

ENTRY = 512
"""Bytes that looking at an entry counts as, whatever its length."""

MAX_NAME = 40
"""The most characters that a log or a header shows of a member's name."""
_NAMELESS = re.compile(r"[^\w.-]", re.ASCII)
"""What no member's name has that an API defines, so that nobody can write into a log or a header."""


class Request(msgspec.Struct, frozen=True):
    """What a dialect's `parse` finds in a body. An entry is the unit of history that the plan counts in."""

    body: bytes
    members: dict[str, Raw]
    """All top-level members as raw JSON."""
    entries: list[Raw]
    model: str
    stream: bool
    tools: Raw
    """The client's tool definitions; `null` where it sent none."""
    reply_tokens: int
    """How many tokens the client reserved for the reply; 0 where it did not say."""
    names: tuple[str, str] | None
    """What our two tools are called in this request; None where there is no room for them."""
    theirs: frozenset[str]
    """The names of all tools that the client defines, wherever it does."""
    obstacle: str
    """The field that keeps us from offloading, because our tools do not work with it. Empty: there is none."""
    bound: bool = False
    """Whether the model may not call our tools, as `tool_choice` says, so that it could not read what was moved."""
    unknown: tuple[str, ...] = ()
    """The top-level members that we do not know. They may mean anything, so the history is not touched."""
    preamble: Raw = rawjson.NULL
    """Text that precedes the history and is no part of it; `null` where there is none."""
    unsent: bool = False
    """Whether upstream keeps this beginning of a conversation, so that its client may never send it again."""
    continues: str = ""
    """The id of an earlier reply, if upstream keeps the history and the request goes on from there."""

    def obstacle_beside(self, known: Collection[str]) -> str:
        """Return the obstacle, or an unknown member that is not among these `known` ones; empty if there is none."""
        name = self.obstacle or next((name for name in self.unknown if name not in known), "")
        return _NAMELESS.sub("?", name[:MAX_NAME])

    @property
    def has_tools(self) -> bool:
        """Whether the client sent tools of its own, as agents do."""
        return bytes(self.tools).strip() not in (b"null", b"[]", b"")

    @property
    def size(self) -> int:
        """Bytes that work on all of the request looks through, for `threads`."""
        return max(len(self.body), len(self.entries) * ENTRY)
