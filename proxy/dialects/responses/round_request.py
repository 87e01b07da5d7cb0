"""Builds the request of each round."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Raw

from proxy.dialects.responses.request import function_tool, joined
from proxy.dialects.round_request import RoundRequest
from proxy.dialects.values import Members, object_of, text_of

LIMITS = ("max_output_tokens",)


class ResponsesRoundRequest(RoundRequest):
    """The requests of a turn of the Responses API."""

    limits = LIMITS
    listed = ""
    tool = staticmethod(function_tool)

    @property
    def wants_json(self) -> bool:
        form = object_of(object_of(self.members.get("text")).get("format"))
        return text_of(form.get("type")) not in ("", "text")

    @property
    def stores(self) -> bool:
        """Whether upstream keeps replies, so that items may be named by their ids."""
        return bytes(self.members.get("store", b"")) != b"false"

    def _assembled(self, entries: Sequence[bytes | Raw]) -> Members:
        return {"input": joined(entries)}
