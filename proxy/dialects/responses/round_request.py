"""Builds the request of each round: the client's members unchanged, except those that the turn must change."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import Raw

from proxy.core import rawjson
from proxy.dialects.reply_limits import lowered
from proxy.dialects.responses.request import has_tools, joined, tool_names, with_tools
from proxy.dialects.values import NULL, Members, object_of, text_of

LIMITS = ("max_output_tokens",)
"""Members that limit a reply."""
WITH_TOOLS = ("tools", "tool_choice", "parallel_tool_calls")
"""Members that upstreams refuse in a request without tools, `tools` itself if it is empty."""


class RoundRequest(msgspec.Struct, frozen=True):
    """The input of a turn: the client's members, the entries to send, our tools and their names."""

    members: Members
    entries: Sequence[bytes | Raw]
    tools: list[bytes]
    names: tuple[str, str]
    max_rounds: int
    own: bytes = b""
    """The client's own body."""
    left: int | None = None
    """Tokens of the window that `entries` leave for the reply; None if the window is not known."""

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

    @property
    def theirs(self) -> frozenset[str]:
        """The names of the client's own tools."""
        return tool_names(self.members.get("tools", NULL))

    def first(self) -> bytes:
        """The body of the first round."""
        limits = lowered(self.members, LIMITS, self.left)
        return rawjson.encode(self.members | limits | self._additions(self.entries, self.tools))

    def later(self, entries: Sequence[bytes | Raw], *, last: bool, bare: bool = False) -> bytes:
        """Return the body of a later round, without a forced call, which was already made.

        In the last round no call of our tools is answered. So ours are left out of it, or if there are no others, calls
        are forbidden. If `bare`, ours are left out in any case, because some servers call what is forbidden.
        """
        others = has_tools(self.members.get("tools"))
        limits = lowered(self.members, LIMITS, self.left, entries[len(self.entries) :])
        additions = self._additions(entries, [] if bare or (last and others) else self.tools)
        members = self.members | limits | additions
        if _names_a_tool(members.get("tool_choice")):
            del members["tool_choice"]
        if bare and not others:
            return rawjson.encode({key: raw for key, raw in members.items() if key not in WITH_TOOLS})
        if last and not others:
            members["tool_choice"] = Raw(b'"none"')
        return rawjson.encode(members)

    def _additions(self, entries: Sequence[bytes | Raw], ours: list[bytes]) -> Members:
        tools = with_tools(self.members.get("tools"), ours)
        return {"input": joined(entries)} | ({} if tools is None else {"tools": tools})


def _names_a_tool(choice: Raw | None) -> bool:
    return text_of(object_of(choice).get("type")) not in ("", "allowed_tools")
