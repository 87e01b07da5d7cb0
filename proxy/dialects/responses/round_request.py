"""Builds the request of each round: the client's members unchanged, except those that the turn must change."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import Raw

from proxy.core import rawjson
from proxy.dialects.responses.request import has_tools, joined, with_tools
from proxy.dialects.values import Members, object_of, text_of, whole

LIMIT = "max_output_tokens"
LEAST = 16
"""The fewest tokens to which OpenAI lets a reply be limited."""


class RoundRequest(msgspec.Struct, frozen=True):
    """The input of a turn: the client's members, the entries to send, our tools and their names."""

    members: Members
    entries: Sequence[bytes | Raw]
    tools: list[bytes]
    names: tuple[str, str]
    max_rounds: int
    own: bytes = b""
    """The client's own body."""

    @property
    def streams(self) -> bool:
        return bytes(self.members.get("stream", b"")) == b"true"

    @property
    def stores(self) -> bool:
        """Whether upstream keeps replies, so that items may be named by their ids."""
        return bytes(self.members.get("store", b"")) != b"false"

    @property
    def wants_json(self) -> bool:
        """Whether the text has to be JSON. Two JSON texts are not JSON."""
        form = object_of(object_of(self.members.get("text")).get("format"))
        return text_of(form.get("type")) not in ("", "text")

    def used_up(self, spent: int) -> bool:
        """Whether too few tokens are left for another round's reply after `spent` tokens."""
        limit = whole(self.members.get(LIMIT))
        return bool(limit) and limit - spent < LEAST

    def first(self) -> bytes:
        """The body of the first round."""
        return rawjson.encode(self.members | self._additions(self.entries, self.tools))

    def later(self, entries: Sequence[bytes | Raw], spent: int, *, last: bool) -> bytes:
        """Return the body of a later round: with fewer tokens left, and without a forced call, which was already made.

        In the last round no call of our tools is answered. So they are left out, or, where there are no other tools,
        calls are forbidden.
        """
        alone = not has_tools(self.members.get("tools"))
        members = self.members | self._additions(entries, [] if last and not alone else self.tools)
        if limit := whole(self.members.get(LIMIT)):
            members[LIMIT] = Raw(b"%d" % max(limit - spent, LEAST))
        if _names_a_tool(members.get("tool_choice")):
            del members["tool_choice"]
        if last and alone:
            members["tool_choice"] = Raw(b'"none"')
        return rawjson.encode(members)

    def _additions(self, entries: Sequence[bytes | Raw], ours: list[bytes]) -> Members:
        tools = with_tools(self.members.get("tools"), ours)
        return {"input": joined(entries)} | ({} if tools is None else {"tools": tools})


def _names_a_tool(choice: Raw | None) -> bool:
    return text_of(object_of(choice).get("type")) not in ("", "allowed_tools")
