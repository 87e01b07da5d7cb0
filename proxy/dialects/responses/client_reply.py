"""The reply as the client sees it: a single one, however many rounds it takes.

It has the first round's id, one beginning and one end. Sequence numbers and the places of items count on over all
rounds. The end lists exactly the items that were shown, and its usage covers all rounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Raw

from proxy import rawjson, sse
from proxy.dialects.responses.reply import BEGINNINGS, ENDINGS, ItemEvent, OutputItem, Part
from proxy.dialects.usage import UsageLedger, added
from proxy.dialects.values import Members, object_of, text_of, whole

FRAME = (
    "id",
    "created_at",
    "model",
    "previous_response_id",
    "tool_choice",
    "max_output_tokens",
    "max_tool_calls",
    "tools",
)
"""Members of the response that are the same at its beginning and at its end."""

USED = ("tool_usage",)
"""Members of the response that every round adds to."""


class ResponsesClientReply:
    """The reply so far. This class sends events at once; `WholeReply` keeps them for one reply at the end."""

    streamed = True

    def __init__(self, ledger: UsageLedger, names: Sequence[str]) -> None:
        self.items: list[OutputItem] = []
        """The items that the client sees."""
        self.id = ""
        self.hides = False
        """Whether upstream sent more than the client sees."""
        self._ledger = ledger
        self._names = names
        self._frame: Members = {}
        self._used: Members = {}
        self._number = -1

    @property
    def next_number(self) -> int:
        return self._number + 1

    def carry(self, response: Raw) -> None:
        """Carry over what upstream's own tools used in a round that another one follows."""
        found = object_of(response)
        self._used = added(self._used, {key: found[key] for key in USED if key in found})

    def finals(self) -> list[Raw]:
        """Return the complete items that the client sees."""
        return [item.final for item in self.items if item.final is not None]

    @property
    def seen(self) -> bool:
        return bool(self.items)

    def go_on(self) -> None:
        self.hides = True

    def show(self, parts: Iterable[Part]) -> bytes:
        return b"".join([self._put(event, item) for event, item in parts])

    def close(self, done: bytes) -> bytes:
        return done

    def _put(self, event: ItemEvent | None, item: OutputItem | None) -> bytes:
        self._adopt(item)
        if event is None:
            return b""
        changed = self._changes(event, item)
        return sse.encode(rawjson.encode(rawjson.members(event.data) | changed), event.name) if changed else event.raw

    def _adopt(self, item: OutputItem | None) -> None:
        if item is not None and item.shown is None:
            item.shown = len(self.items)
            self.items.append(item)

    def _changes(self, event: ItemEvent, item: OutputItem | None) -> Members:
        """Return the members of the event that differ from upstream's."""
        changed: Members = {}
        if item is not None and bytes(event.index).isdigit() and whole(event.index) != item.shown:
            changed["output_index"] = Raw(b"%d" % (item.shown or 0))
        if not rawjson.is_null(event.response) and (response := self._response(event)):
            changed["response"] = Raw(rawjson.encode(object_of(event.response) | response))
        if not rawjson.is_null(event.number):
            number, said = self.next_number, whole(event.number)
            self._number = number if self.hides or said < number else said
            if self._number != said:
                changed["sequence_number"] = Raw(b"%d" % self._number)
        return changed if event.raw or changed else {"sequence_number": Raw(b"%d" % self._number)}

    def _response(self, event: ItemEvent) -> Members:
        """Return the members of an event's response that differ from upstream's. The first response is the frame."""
        response = object_of(event.response)
        changed = self._without_ours(response)
        if event.type in BEGINNINGS or not self._frame:
            self._frame = self._frame or {key: (response | changed)[key] for key in FRAME if key in response}
            self.id = text_of(self._frame.get("id"))
        if event.type in ENDINGS and self.hides:
            changed |= {"output": Raw(rawjson.array(self.finals()))}
            changed |= {key: raw for key, raw in self._frame.items() if response.get(key) != raw}
            if not rawjson.is_null(response.get("usage")):
                changed["usage"] = self._ledger.total(response["usage"])
            if self._used:
                changed |= added(self._used, {key: response[key] for key in USED if key in response})
        return changed

    def _without_ours(self, response: Members) -> Members:
        """Return the lists of tools that upstream repeats without ours: all tools, and those to choose from."""
        choice = object_of(response.get("tool_choice"))
        allowed = self._others(choice)
        chosen = {"tool_choice": Raw(rawjson.encode(choice | allowed))} if allowed else {}
        return self._others(response) | chosen

    def _others(self, members: Members) -> Members:
        """Return the member `tools` without ours, if they are in it."""
        tools = members.get("tools")
        if not self._names or tools is None or not rawjson.is_array(tools):
            return {}
        listed = rawjson.elements(tools)
        others = [raw for raw in listed if text_of(object_of(raw).get("name")) not in self._names]
        return {"tools": Raw(rawjson.array(others))} if len(others) < len(listed) else {}


class ResponsesWholeReply(ResponsesClientReply):
    """A reply that is not a stream: upstream's own bytes if nothing in them is ours."""

    streamed = False

    def __init__(self, ledger: UsageLedger, names: Sequence[str]) -> None:
        super().__init__(ledger, names)
        self._only: bytes | None = None
        self._whole: bytes = b""
        self._end: Members = {}

    def take(self, body: bytes) -> None:
        """Take a round's body, which is the reply if it turns out to be the last."""
        self._whole = body

    def show(self, parts: Iterable[Part]) -> bytes:
        for event, item in parts:
            self._adopt(item)
            changed = {} if event is None else self._changes(event, item)
            if event is not None and event.type in ENDINGS:
                self._end = object_of(changed.get("response", event.response))
                self._only = None if "response" in changed else self._whole
        return b""

    def close(self, done: bytes) -> bytes:
        return rawjson.encode(self._end) if self._only is None else self._only
