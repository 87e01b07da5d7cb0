"""Builds the request of each round."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Raw

from proxy import rawjson
from proxy.dialects.messages.request import assembled, client_tool
from proxy.dialects.round_request import RoundRequest
from proxy.dialects.values import NULL, Members, object_of

LIMITS = ("max_tokens",)


class MessagesRoundRequest(RoundRequest):
    """The requests of a turn of the Messages API."""

    limits = LIMITS
    listed = None
    tool = staticmethod(client_tool)
    container: Raw = NULL
    """Where upstream's own tools ran in an earlier round. The next one goes on there: its files and processes are
    there, and upstream refuses to continue code without it."""

    @property
    def wants_json(self) -> bool:
        forms = self.members.get("output_format"), object_of(self.members.get("output_config")).get("format")
        return not all(map(rawjson.is_null, forms))

    def _assembled(self, entries: Sequence[bytes | Raw]) -> Members:
        made = assembled(self.members, entries)
        id = object_of(self.container).get("id", NULL)
        if rawjson.is_null(id):
            return made
        asked = object_of(self.members.get("container"))
        return made | {"container": Raw(rawjson.encode(asked | {"id": id})) if asked else id}

    def _without_calls(self, members: Members, *, bare: bool) -> Members:
        """Here the tools always stay: a history with calls is refused if none are defined."""
        return members | {"tool_choice": Raw(b'{"type":"none"}')}
