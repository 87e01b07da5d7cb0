"""Builds the request of each round."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Raw

from proxy import rawjson
from proxy.dialects.chat.request import function_tool
from proxy.dialects.round_request import ALLOWED, RoundRequest
from proxy.dialects.values import Members, object_of, text_of

LIMITS = ("max_tokens", "max_completion_tokens")


class ChatRoundRequest(RoundRequest):
    """The requests of a turn of the chat API."""

    limits = LIMITS
    listed = ALLOWED
    tool = staticmethod(function_tool)

    @staticmethod
    def chosen(name: str) -> bytes:
        return rawjson.encode({"type": "function", "function": {"name": name}})

    @property
    def wants_json(self) -> bool:
        kind = text_of(object_of(self.members.get("response_format")).get("type"))
        return kind not in ("", "text")

    @property
    def wants_usage(self) -> bool:
        """Whether the client asks for the usage of its stream."""
        options = object_of(self.members.get("stream_options"))
        return bytes(options.get("include_usage", b"")) == b"true"

    @property
    def asks_usage(self) -> bool:
        return self.usage and self.streams and not self.wants_usage and bool(self._usage_wanted())

    def _assembled(self, entries: Sequence[bytes | Raw]) -> Members:
        return {"messages": Raw(rawjson.array(entries))}

    def _members(self, entries: Sequence[bytes | Raw], ours: Sequence[bytes]) -> Members:
        members = super()._members(entries, ours)
        return members | self._usage_wanted() if self.asks_usage else members

    def _usage_wanted(self) -> Members:
        options = self.members.get("stream_options")
        if not rawjson.is_null(options) and not bytes(options or b"").startswith(b"{"):
            return {}  # upstream will report the mistake
        return {"stream_options": Raw(rawjson.encode(object_of(options) | {"include_usage": Raw(b"true")}))}
