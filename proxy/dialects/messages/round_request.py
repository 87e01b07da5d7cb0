"""Builds the request of each round: the client's members unchanged, except those that the turn must change."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import Raw

from proxy.core import rawjson
from proxy.dialects.messages.request import assembled, has_tools, tool_names, with_tools
from proxy.dialects.reply_limits import lowered
from proxy.dialects.values import NULL, Members, object_of, string, text_of

LIMITS = ("max_tokens",)
"""Members that limit a reply."""
SERIAL = "disable_parallel_tool_use"


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
    def wants_json(self) -> bool:
        """Whether the text has to be JSON. Two JSON texts are not JSON."""
        forms = self.members.get("output_format"), object_of(self.members.get("output_config")).get("format")
        return not all(map(rawjson.is_null, forms))

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

        In the last round no call of our tools is answered, and if `bare`, none may be made. So ours are left out of
        it, or if there are no others, calls are forbidden: a history with calls is refused if no tools are defined.
        """
        others = has_tools(self.members.get("tools"))
        limits = lowered(self.members, LIMITS, self.left, entries[len(self.entries) :])
        additions = self._additions(entries, [] if (last or bare) and others else self.tools)
        members = self.members | limits | additions
        choice = object_of(members.get("tool_choice"))
        if text_of(choice.get("type")) == "tool":
            kept = {SERIAL: choice[SERIAL]} if SERIAL in choice else {}
            members["tool_choice"] = Raw(rawjson.encode({"type": string("auto"), **kept}))
        if (last or bare) and not others:
            members["tool_choice"] = Raw(b'{"type":"none"}')
        return rawjson.encode(members)

    def _additions(self, entries: Sequence[bytes | Raw], ours: list[bytes]) -> Members:
        tools = with_tools(self.members.get("tools"), ours)
        return assembled(self.members, entries) | ({} if tools is None else {"tools": tools})
