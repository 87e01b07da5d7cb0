"""Builds the request of each round: the client's members unchanged, except those that the turn must change."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import Raw

from proxy.core import rawjson
from proxy.dialects.chat.request import has_tools, tool_names, with_tools
from proxy.dialects.reply_limits import lowered
from proxy.dialects.values import NULL, Members, object_of, text_of

LIMITS = ("max_tokens", "max_completion_tokens")
"""Members that limit a reply. Each round gets the client's own, so that hidden rounds take nothing from its answer."""
WITH_TOOLS = ("tools", "tool_choice", "parallel_tool_calls")
"""Members that upstreams refuse in a request without tools, `tools` itself if it is empty."""


class RoundRequest(msgspec.Struct, frozen=True):
    """The input of a turn: the client's members, the messages to send, our tools and their names."""

    members: Members
    messages: Sequence[bytes | Raw]
    tools: list[bytes]
    names: tuple[str, str]
    max_rounds: int
    own: bytes = b""
    """The client's own body."""
    usage: bool = True
    """Whether to ask for the usage of a stream if the client did not."""
    left: int | None = None
    """Tokens of the window that `messages` leave for the reply; None if the window is not known."""

    @property
    def streams(self) -> bool:
        return bytes(self.members.get("stream", b"")) == b"true"

    @property
    def wants_usage(self) -> bool:
        options = object_of(self.members.get("stream_options"))
        return bytes(options.get("include_usage", b"")) == b"true"

    @property
    def asks_usage(self) -> bool:
        """Whether the request asks for the usage of its stream although the client did not."""
        return self.usage and self.streams and not self.wants_usage and bool(self._usage_wanted())

    @property
    def wants_json(self) -> bool:
        """Whether the text has to be JSON. Two JSON texts joined are not JSON."""
        kind = text_of(object_of(self.members.get("response_format")).get("type"))
        return kind not in ("", "text")

    @property
    def theirs(self) -> frozenset[str]:
        """The names of the client's own tools."""
        return tool_names(self.members.get("tools", NULL))

    def first(self) -> bytes:
        """The body of the first round."""
        return rawjson.encode(self.members | lowered(self.members, LIMITS, self.left) | self._additions(self.messages))

    def later(self, messages: Sequence[bytes | Raw], *, last: bool, bare: bool = False) -> bytes:
        """Return the body of a later round, without a forced call, which was already made.

        In the last round no call of our tools is answered. So ours are left out of it, or if there are no others, calls
        are forbidden. If `bare`, ours are left out in any case, because some servers call what is forbidden.
        """
        others = has_tools(self.members.get("tools", NULL))
        limits = lowered(self.members, LIMITS, self.left, messages[len(self.messages) :])
        members = self.members | limits | self._additions(messages, ours=not (bare or (last and others)))
        if _names_a_tool(members.get("tool_choice")):
            del members["tool_choice"]
        if bare and not others:
            members = {key: raw for key, raw in members.items() if key not in WITH_TOOLS}
        elif last and not others:
            members["tool_choice"] = Raw(b'"none"')
        return rawjson.encode(members)

    def _additions(self, messages: Sequence[bytes | Raw], *, ours: bool = True) -> Members:
        additions = {"messages": Raw(rawjson.array(messages))}
        tools = with_tools(self.members.get("tools"), self.tools if ours else [])
        if tools is not None:
            additions["tools"] = tools
        if self.asks_usage:
            additions |= self._usage_wanted()
        return additions

    def _usage_wanted(self) -> Members:
        options = self.members.get("stream_options")
        if not rawjson.is_null(options) and not bytes(options or b"").startswith(b"{"):
            return {}  # upstream will report the mistake
        return {"stream_options": Raw(rawjson.encode(object_of(options) | {"include_usage": Raw(b"true")}))}


def _names_a_tool(choice: Raw | None) -> bool:
    return text_of(object_of(choice).get("type")) not in ("", "allowed_tools")
