"""Reads one reply of upstream and decides which items the client may see, because the round may have to be hidden.

Everything is shown at once, except:
- calls of our tools, which are never shown, and calls without a name, which may turn out to be one of ours;
- what only a visible round may show: reasoning, until an item of the client's follows it, because a client that sends
  it back without the call after it is refused; and text if the client wants JSON (two texts are not);
- the end, if something is hidden, because another round may follow.

A whole reply is read as the events of a stream, so both share one code path.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import msgspec
from msgspec import Raw

from proxy import rawjson
from proxy.dialects import parsing
from proxy.dialects.responses.items import call_of, is_answered, said, without_id
from proxy.dialects.responses.request import NAMESPACE
from proxy.dialects.rounds import MAX_REPLY, check_arguments
from proxy.dialects.tool_names import ToolNames
from proxy.dialects.values import NULL, Members, object_of, place, string, text_of
from proxy.plan.history import ToolCall
from proxy.plan.turn import Broken
from proxy.rawjson import NotJson

BEGINNINGS = ("response.created", "response.queued", "response.in_progress")
ENDINGS = {"response.completed": "completed", "response.incomplete": "incomplete", "response.failed": "failed"}
"""The events that end a stream, and the status of the reply."""
ADDED, DONE = "response.output_item.added", "response.output_item.done"


class _Head(msgspec.Struct, frozen=True):
    type: str
    sequence_number: Raw = NULL
    output_index: Raw = NULL
    item_id: Raw = NULL
    item: Raw = NULL
    response: Raw = NULL
    delta: Raw = NULL


_head = msgspec.json.Decoder(_Head)


class ItemEvent:
    """One event of a reply. `raw` holds the bytes that came."""

    def __init__(self, data: bytes, raw: bytes = b"", name: bytes | None = None) -> None:
        """Raises NotJson for anything that is no event of this API; it must be left unchanged."""
        head = parsing.known(_head, data)
        self.data, self.raw, self.name = data, raw, name
        self.type = head.type
        self.number = head.sequence_number
        self.index = head.output_index
        self.item_id = text_of(head.item_id)
        self.delta = head.delta
        self.item = head.item
        self.response = head.response


class OutputItem:
    """One item of a reply. `ours` is None while its name is not known."""

    def __init__(self, index: int, raw: Raw) -> None:
        self.members = object_of(raw)
        self.index = index
        """Its place among upstream's items."""
        self.shown: int | None = None
        """Its place among the items that the client sees."""
        self.final: Raw | None = None
        """The complete item."""
        self.ours: bool | None = None
        self._name = ""  # which of our tools it calls
        self.released = False
        """Whether its events are shown as they arrive."""
        self.size = 0
        """About how many bytes of it came in pieces."""
        self.kept: list[ItemEvent] = []

    @property
    def type(self) -> str:
        return text_of(self.members.get("type"))

    @property
    def id(self) -> str:
        return text_of(self.members.get("id"))

    @property
    def call_id(self) -> str:
        return text_of(self.members.get("call_id"))

    def complete(self, raw: Raw) -> None:
        """Take the item as it is at its end."""
        self.final, self.members = raw, object_of(raw)

    def decide(self, names: ToolNames, *, sure: bool) -> None:
        """Decide whether it is a call of our tools. `sure`: its name is complete."""
        name = text_of(self.members.get("name"))
        if name or sure or self.type != "function_call":
            single = self.type == "function_call" and not text_of(self.members.get(NAMESPACE))
            self._name = names.recognised(name) if single else ""
            self.ours = bool(self._name)

    @property
    def whole(self) -> bool:
        """Whether this call is complete: an item that upstream stopped within says so, or has no end."""
        return self.final is not None and text_of(self.members.get("status")) in ("", "completed")

    def call(self) -> ToolCall:
        """Return the call. Its result names the `call_id` and no other id."""
        return call_of(self.members | self._renamed | {"id": NULL}, self.type)

    def written(self) -> Raw | None:
        """Return the complete item as it goes back upstream: a call of our tools has the tool's own name."""
        if self.final is None or self.members.get("name") == self._renamed.get("name", self.members.get("name")):
            return self.final
        return Raw(rawjson.encode(self.members | self._renamed))

    @property
    def _renamed(self) -> Members:
        return {"name": string(self._name)} if self._name else {}

    def identify(self, id: str) -> None:
        self.complete(Raw(rawjson.encode(self.members | {"call_id": string(id)})))


Part = tuple[ItemEvent | None, OutputItem | None]
"""An event for the client, and the item that it is about. An item without an event is shown at the reply's end."""


class ResponsesRound:
    """Reads events. `names` are the names of our tools; empty if the request does not have them. `theirs` are those of
    the client's tools. `stored`: upstream keeps replies."""

    def __init__(
        self, names: Sequence[str], *, later: bool, holds_text: bool, stored: bool = True, theirs: Collection[str] = ()
    ) -> None:
        self.items: list[OutputItem] = []
        self.failed = False
        self.usage: Raw | None = None
        self.id = ""
        self.end: list[Part] = []
        self._status = ""  # how the reply ended; empty until it is known
        self._stored = stored
        self._has_ours = False
        self._names = ToolNames(names, theirs)
        self._later = later
        self._holds_text = holds_text
        self._by_index: dict[int, OutputItem] = {}
        self._by_id: dict[str, OutputItem] = {}
        self._reasoning: list[OutputItem] = []  # what is held until an item of the client's follows
        self._size = 0

    @property
    def ours(self) -> list[OutputItem]:
        return [item for item in self.items if item.ours]

    @property
    def theirs(self) -> list[OutputItem]:
        """The calls that the client answers. What upstream executes itself has its result in the reply."""
        results = {item.call_id for item in self.items if item.type.endswith("_output")} - {""}
        return [
            item
            for item in self.items
            if item.ours is False and is_answered(item.type, item.members) and item.call_id not in results
        ]

    @property
    def pieces(self) -> int:
        return len(self.items)

    @property
    def ended(self) -> bool:
        return bool(self._status)

    @property
    def over(self) -> bool:
        return self.ended

    @property
    def unfinished(self) -> bool:
        return self._status == "incomplete"

    @property
    def hides(self) -> bool:
        """Whether this turn has anything that the client does not see."""
        return self._later or self._has_ours

    @property
    def empty(self) -> bool:
        others = [item for item in self.items if not item.ours and item.type != "reasoning"]
        return not any(item.type != "message" or said([item.final])[0].strip() for item in others if item.final)

    def say(self, text: str, seed: str) -> list[Part]:
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        message = {
            "type": "message",
            "id": f"msg_{seed}",
            "status": "completed",
            "role": "assistant",
            "content": [part],
        }
        raw = Raw(rawjson.encode(message))
        item = self._begin(max(self._by_index, default=-1) + 1, raw)
        item.complete(raw)
        item.decide(self._names, sure=True)
        return [(event, item) for event in _item_events(item.index, raw)]

    def read(self, event: ItemEvent) -> list[Part]:
        if event.type in BEGINNINGS:
            self.id = text_of(object_of(event.response).get("id"))
            return [] if self._later else [(event, None)]
        if event.type in ENDINGS:
            return self._ended(event)
        if event.type == "error":
            self.failed = True
            return [(event, None)]
        item = self._item(event)
        return [(event, None)] if item is None else self._about(item, event)

    def settle(self) -> list[Part]:
        shown: list[Part] = []
        for item in self.items:
            if item.ours is None:
                self._decide(item, sure=True)
                shown += [] if item.ours or self._waits(item) else self._release(item)
        return shown

    def release(self, *, visible: bool) -> list[Part]:
        kept = self._without(self.ours)
        released = [item for item in kept if visible or item.released or item.type != "message"]
        parts = [part for item in released for part in self._flushed(item)]
        return [*parts, *((None, item) for item in released)]

    def written(self, answered: Collection[object]) -> list[bytes]:
        """Return the items. Where upstream stores nothing, no item is found by its id, and reasoning that is not in the
        item itself is lost."""
        kept = self._without([call for call in self.ours if call not in answered])
        raws = [bytes(raw) for item in kept if (raw := item.written()) is not None]
        if self._stored:
            return raws
        return [
            rawjson.encode(without_id(members))
            for members in map(rawjson.members, raws)
            if text_of(members.get("type")) != "reasoning" or text_of(members.get("encrypted_content"))
        ]

    def _without(self, calls: Collection[OutputItem]) -> list[OutputItem]:
        """Return the items but these calls and the reasoning for them, which upstream refuses without them. What the
        client has seen of that stays."""
        kept, before = list[OutputItem](), False
        for item in reversed(self.items):
            before = item in calls or (before and item.type == "reasoning")
            if not before or (item.released and item not in calls):
                kept.append(item)
        return kept[::-1]

    def _item(self, event: ItemEvent) -> OutputItem | None:
        """Return the item that an event is about. Some servers announce none and send each only at its end."""
        index = place(event.index)
        if index is None:
            return self._by_id.get(event.item_id)
        item = self._by_index.get(index)
        if item is None and event.type in (ADDED, DONE):
            item = self._begin(index, event.item)
        return item

    def _begin(self, index: int, raw: Raw) -> OutputItem:
        item = self._by_index[index] = OutputItem(index, raw)
        self.items.append(item)
        if item.id:
            self._by_id[item.id] = item
        return item

    def _about(self, item: OutputItem, event: ItemEvent) -> list[Part]:
        if event.type == DONE:
            item.complete(event.item)
        self._decide(item, sure=event.type == DONE)
        if item.ours:
            self._grow(len(event.raw), item)
            item.size += len(memoryview(event.delta))
            check_arguments(item.size)
            return []
        item.kept.append(event)
        if self._waits(item):
            self._grow(len(event.raw), item)
            return []
        return self._release(item)

    def _decide(self, item: OutputItem, *, sure: bool) -> None:
        """Decide whether an item is a call of our tools. `sure`: its name is complete."""
        if item.ours is not None:
            return
        item.decide(self._names, sure=sure)
        if item.ours:
            self._has_ours = True
            item.kept.clear()
        elif item.type == "reasoning":
            self._reasoning.append(item)

    def _grow(self, size: int, item: OutputItem) -> None:
        self._size += size
        if self._size > MAX_REPLY:
            raise Broken(f"more than {MAX_REPLY} bytes of a reply, the last of them in a {item.type[:64]}")

    def _waits(self, item: OutputItem) -> bool:
        if item.ours is None:
            return True
        if item.released or not self._names:
            return False
        return item.type == "reasoning" or (item.type == "message" and self._holds_text)

    def _release(self, item: OutputItem) -> list[Part]:
        """Return the item's events, and before them those of the reasoning that belongs to it."""
        if item.released:
            return self._flushed(item)
        item.released = True
        belonging, self._reasoning = self._reasoning, []
        return [part for one in (*belonging, item) for part in self._flushed(one)]

    def _flushed(self, item: OutputItem) -> list[Part]:
        item.released = True
        kept, item.kept = item.kept, []
        return [(event, item) for event in kept]

    def _ended(self, event: ItemEvent) -> list[Part]:
        self._status = ENDINGS[event.type]
        self.failed |= self._status == "failed"
        response = object_of(event.response)
        self.usage = response.get("usage")
        self.id = text_of(response.get("id")) or self.id
        self._complete(response)
        shown = self.settle()
        if self.hides and not self.failed:
            self.end = [(event, None)]
            return shown
        return [*shown, *self.release(visible=True), (event, None)]

    def _complete(self, response: Members) -> None:
        """Take the reply's items as they are listed at its end, for servers that sent no events for some of them."""
        try:
            listed = rawjson.elements(response["output"]) if rawjson.is_array(response.get("output")) else []
        except NotJson:
            return
        for index, raw in enumerate(listed):
            id = text_of(object_of(raw).get("id"))
            item = self._by_id.get(id) or self._by_index.get(index) or self._begin(index, raw)
            if item.final is None:
                item.complete(raw)


def as_events(members: Members) -> Iterator[ItemEvent]:
    """Return a whole reply as the events of a stream."""
    status = text_of(members.get("status")) or "completed"
    begun = members | {"status": string("in_progress"), "output": Raw(b"[]"), "usage": NULL}
    yield _made("response.created", response=begun)
    for index, raw in enumerate(rawjson.elements(members["output"])):
        yield from _item_events(index, raw)
    ending = next((type for type, ends in ENDINGS.items() if ends == status), "response.completed")
    yield _made(ending, response=members)


def _item_events(index: int, raw: Raw) -> Iterator[ItemEvent]:
    item = object_of(raw)
    about = {"output_index": index, "item_id": item.get("id", NULL)}
    yield _made(ADDED, output_index=index, item=_begun(item))
    for event in _contents(item):
        yield _made(**event, **about)
    yield _made(DONE, output_index=index, item=raw)


def _begun(item: Members) -> Members:
    """Return an item as it is announced: without what its other events will bring."""
    type = text_of(item.get("type"))
    empty = {"message": {"content": Raw(b"[]")}, "function_call": {"arguments": Raw(b'""')}}.get(type, {})
    return item | empty | ({"status": string("in_progress")} if "status" in item else {})


def _contents(item: Members) -> Iterator[dict[str, object]]:
    """Yield the members of the events between an item's beginning and its end."""
    type = text_of(item.get("type"))
    if type == "function_call":
        arguments = item.get("arguments", NULL)
        yield {"type": "response.function_call_arguments.delta", "delta": arguments}
        yield {"type": "response.function_call_arguments.done", "arguments": arguments, "name": item.get("name", NULL)}
    if type == "message" and rawjson.is_array(item.get("content")):
        for place, part in enumerate(map(object_of, rawjson.elements(item["content"]))):
            kind = "refusal" if "refusal" in part else "text"
            named = "refusal" if kind == "refusal" else "output_text"
            text, about = part.get(kind, NULL), {"content_index": place}
            more: dict[str, object] = {} if kind == "refusal" else {"logprobs": []}
            yield {"type": "response.content_part.added", "part": part | {kind: Raw(b'""')}, **about}
            yield {"type": f"response.{named}.delta", "delta": text, **about, **more}
            yield {"type": f"response.{named}.done", kind: text, **about, **more}
            yield {"type": "response.content_part.done", "part": part, **about}


def _made(type: object, **members: object) -> ItemEvent:
    """Return an event of ours. Its number is set when it is shown."""
    return ItemEvent(rawjson.encode({"type": type, "sequence_number": 0, **members}), name=str(type).encode())
