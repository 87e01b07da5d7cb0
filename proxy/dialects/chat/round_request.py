"""Builds the request of each round: the client's members unchanged, except those that the turn must change."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import Raw

from proxy.core import rawjson
from proxy.dialects.chat.request import has_tools, with_tools
from proxy.dialects.values import NULL, Members, object_of, text_of, whole

LIMITS = ("max_tokens", "max_completion_tokens")


class RoundRequest(msgspec.Struct, frozen=True):
    """The input of a turn: the client's members, the messages to send, our tools and their names."""

    members: Members
    messages: Sequence[bytes | Raw]
    tools: list[bytes]
    names: tuple[str, str]
    max_rounds: int

    @property
    def streams(self) -> bool:
        return bytes(self.members.get("stream", b"")) == b"true"

    @property
    def wants_usage(self) -> bool:
        options = object_of(self.members.get("stream_options"))
        return bytes(options.get("include_usage", b"")) == b"true"

    @property
    def wants_json(self) -> bool:
        """Whether the text has to be JSON. Two JSON texts joined are not JSON."""
        kind = text_of(object_of(self.members.get("response_format")).get("type"))
        return kind not in ("", "text")

    def left(self, spent: int) -> int | None:
        """Return the tokens left for the reply after `spent` tokens, or None if the client set no limit."""
        return min(self._limits(spent).values(), default=None)

    def first(self) -> bytes:
        """The body of the first round."""
        return rawjson.encode(self.members | self._additions(self.messages))

    def later(self, messages: Sequence[bytes | Raw], spent: int, *, last: bool) -> bytes:
        """Return the body of a later round: with fewer tokens left, and without a forced call, which was already made.

        In the last round no call of our tools is answered, so if there are no other tools, calls are forbidden.
        """
        limits = {key: Raw(b"%d" % left) for key, left in self._limits(spent).items()}
        members = self.members | limits | self._additions(messages)
        if _names_a_tool(members.get("tool_choice")):
            del members["tool_choice"]
        if last and not has_tools(self.members.get("tools", NULL)):
            members["tool_choice"] = Raw(b'"none"')
        return rawjson.encode(members)

    def _additions(self, messages: Sequence[bytes | Raw]) -> Members:
        additions = {"messages": Raw(rawjson.array(messages))}
        tools = with_tools(self.members.get("tools"), self.tools)
        if tools is not None:
            additions["tools"] = tools
        if self.streams and not self.wants_usage:
            additions |= self._usage_wanted()
        return additions

    def _usage_wanted(self) -> Members:
        options = self.members.get("stream_options")
        if not rawjson.is_null(options) and not bytes(options or b"").startswith(b"{"):
            return {}  # upstream will report the mistake
        return {"stream_options": Raw(rawjson.encode(object_of(options) | {"include_usage": Raw(b"true")}))}

    def _limits(self, spent: int) -> dict[str, int]:
        limits = {key: whole(self.members.get(key)) for key in LIMITS}
        return {key: limit - spent for key, limit in limits.items() if limit}


def _names_a_tool(choice: Raw | None) -> bool:
    return text_of(object_of(choice).get("type")) not in ("", "allowed_tools")
