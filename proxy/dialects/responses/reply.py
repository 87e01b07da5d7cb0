"""Reads the replies of the Responses API, and makes one of all rounds for the client.

Everything is shown at once, except calls of our tools, calls without a name, which may turn out to
be one of ours, what of a text may be such calls, text if the client wants JSON, and reasoning
behind a call of our tools: it belongs to the item directly after it, and is shown or hidden with
that. Upstream refuses reasoning without its item, so a reply of which the client has seen the
reasoning and not the item goes back as upstream made it (`Hidden.instead`).

The client's reply has the first round's id, one beginning and one end. Sequence numbers and the
places of items count on over all rounds. The end lists exactly the items that were shown, and its
usage covers all rounds.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any, Literal, Self

import msgspec
from msgspec import Raw

from proxy import rawjson, sse
from proxy.dialects.reply import (
    ORDINARY,
    Block,
    Call,
    ClientReply,
    Event,
    Part,
    Round,
    ToolNames,
    as_object,
    check_arguments,
)
from proxy.dialects.responses.items import (
    arguments_of,
    call_of,
    is_answered,
    lasts,
    output,
    spoken,
    without_id,
)
from proxy.dialects.responses.request import NAMESPACE, ResponsesRoundRequest, stores
from proxy.dialects.textcalls import TextCalls
from proxy.dialects.turn import Turn
from proxy.errors import ProxyError
from proxy.plan.plan import ToolCall
from proxy.plan.turn import Continuation, State
from proxy.rawjson import (
    NULL,
    Members,
    elements_of,
    integer,
    object_of,
    on_one_line,
    place,
    string,
    text_of,
)

IN_PROGRESS = "response.in_progress"
BEGINNINGS = ("response.created", "response.queued", IN_PROGRESS)
ENDINGS = {
    "response.completed": "completed",
    "response.incomplete": "incomplete",
    "response.failed": "failed",
}
"""The events that end a stream, and the status of the reply."""
FINAL = frozenset((*ENDINGS.values(), "cancelled"))
"""The statuses of a reply that has ended. Gateways end a stream with events of their own that have
one: https://github.com/decolua/9router/issues/2142 (`response.done`)"""
SPOKEN = {
    "response.output_text.delta": "content",
    "response.reasoning_text.delta": "content",
    "response.reasoning_summary_text.delta": "summary",
}
"""The events with a piece of a text, and the member of the item that lists it."""
TEXTS = ("content", "summary")
"""Members of an item that list its texts."""
ADDED = "response.output_item.added"
DONE = "response.output_item.done"
FRAME = (
    *(
        "id",
        "created_at",
        "model",
        "previous_response_id",
        "tool_choice",
        "max_output_tokens",
        "max_tool_calls",
    ),
    "tools",
)
"""Members of the response that are the same at its beginning and at its end."""

ECHOED = ("caller", "agent")
"""Members of a call that its result repeats: the program or the agent that made it."""

NOT_ANSWERED = "(not answered: the turn ended with this call)"
"""The result of a call with which a turn ended, because upstream keeps the call and wants a
result."""


class _Head(msgspec.Struct, frozen=True):
    type: str = ""
    sequence_number: Raw = NULL
    output_index: Raw = NULL
    item_id: Raw = NULL
    item: Raw = NULL
    response: Raw = NULL
    delta: Raw = NULL
    content_index: Raw = NULL
    summary_index: Raw = NULL
    text: Raw = NULL
    part: Raw = NULL


class _Piece(msgspec.Struct, gc=False):
    """An event that brings nothing but a piece of a text or of a call's arguments."""

    type: Literal[
        "response.output_text.delta",
        "response.reasoning_text.delta",
        "response.reasoning_summary_text.delta",
        "response.function_call_arguments.delta",
    ]
    delta: str
    output_index: int
    sequence_number: int | None = None
    content_index: int | None = None
    summary_index: int | None = None
    response: None = None


_pieces = msgspec.json.Decoder(_Piece)


class ItemEvent(Event):
    """One event of a reply."""

    decoder = msgspec.json.Decoder(_Head)


def ended_as(event: ItemEvent) -> str:
    """Return the status of the reply that this event ends; empty if it does not end it."""
    if event.type in ENDINGS:
        return ENDINGS[event.type]
    if rawjson.is_null(event.decoded.response):
        return ""
    status = text_of(object_of(event.decoded.response).get("status"))
    if status in FINAL:
        return status
    return "completed" if event.type == "response.done" else ""


class OutputItem(Call):
    """One item of a reply."""

    def __init__(self, raw: Raw) -> None:
        super().__init__()
        self.members = object_of(raw)
        self.ours = None
        self.final: Raw | None = None  # the complete item
        self.size = 0  # about how many bytes of it came in pieces
        self.before: list[OutputItem] = []  # the reasoning that belongs to it
        self.cuts: list[tuple[str, str]] = []  # ends of its texts, and what is left of them

    @classmethod
    def called(cls, name: str, arguments: str, before: list[OutputItem]) -> Self:
        """Return a call of one of our tools that was written in a text."""
        members = {
            "type": "function_call",
            "call_id": "",
            "name": name,
            "arguments": arguments,
            "status": "completed",
        }
        made = cls(Raw(rawjson.encode(members)))
        made.complete(Raw(rawjson.encode(members)))
        made.ours = name
        made.before = before
        return made

    @property
    def type(self) -> str:
        return text_of(self.members.get("type"))

    @property
    def thinks(self) -> bool:
        return self.type == "reasoning"

    @property
    def call_id(self) -> str:
        return text_of(self.members.get("call_id"))

    def complete(self, raw: Raw) -> None:
        """Take the item as it is at its end."""
        self.final = raw
        self.members = object_of(raw)

    def cut(self, end: str, left: str) -> None:
        """Replace the end of one of its texts."""
        self.cuts.append((end, left))
        if self.final is not None:
            self.complete(self.without(self.final))

    def without(self, raw: Raw) -> Raw:
        """Return the item, one of its parts or one of its texts, without what was cut."""
        if rawjson.is_string(raw):
            text = text_of(raw)
            for end, left in self.cuts:
                text = text.removesuffix(end) + left if text.endswith(end) else text
            return string(text)
        members = object_of(raw)
        if rawjson.is_string(members.get("text")):
            return Raw(rawjson.encode(members | {"text": self.without(members["text"])}))
        listed = {key: elements_of(members[key]) for key in TEXTS if key in members}
        made = {
            key: Raw(rawjson.array(map(self.without, parts)))
            for key, parts in listed.items()
            if parts
        }
        return Raw(rawjson.encode(members | made)) if made else raw

    @property
    def texts(self) -> dict[tuple[str, int], str]:
        """Its texts, by the member that lists them and by their places."""
        return {
            (key, number): text_of(object_of(part).get("text"))
            for key in TEXTS
            for number, part in enumerate(elements_of(self.members.get(key)))
        }

    @property
    def blank(self) -> bool:
        """Whether it was a text of which nothing is left."""
        return bool(self.cuts) and not any(text.strip() for text in self.texts.values())

    @property
    def is_complete(self) -> bool:
        """Whether this call is complete: an item that upstream stopped within says so, or has no
        end."""
        return self.final is not None and text_of(self.members.get("status")) in ("", "completed")

    def call(self) -> ToolCall:
        """Return the call. Its result names the `call_id` and no other id."""
        return call_of(self._with_our_name() | {"id": NULL}, self.type)

    def identify(self, id: str) -> None:
        self.complete(Raw(rawjson.encode(self.members | {"call_id": string(id)})))

    def written(self) -> Raw | None:
        """Return the complete item as it goes back upstream: a call of our tools has the tool's own
        name."""
        made = self._with_our_name()
        if self.type == "function_call":
            arguments = as_object(arguments_of(made.get("arguments", NULL)))
            made = made | {"arguments": string(arguments)}
            if arguments == text_of(self.members.get("arguments")):
                made["arguments"] = self.members["arguments"]  # with upstream's escapes
        return (
            self.final if self.final is None or made == self.members else Raw(rawjson.encode(made))
        )

    def result(self, text: str, part: str) -> bytes:
        """Return the result of this call, with an image or a file behind its text."""
        return output(
            self.call_id,
            text,
            part,
            {key: self.members[key] for key in ECHOED if key in self.members},
        )

    def _with_our_name(self) -> Members:
        return self.members | {"name": string(self.ours)} if self.ours else self.members


def _piece(event: ItemEvent, text: str) -> ItemEvent:
    """Return the event of a text's piece with another one."""
    return ItemEvent(
        rawjson.encode(rawjson.members(event.data) | {"delta": string(text)}), name=event.name
    )


def _nothing(text: str) -> None:
    """Return no event for a piece of a text that comes only with its item."""


def _is_new_call(raw: Raw, calls: Collection[str]) -> bool:
    members = object_of(raw)
    return (
        text_of(members.get("type")) == "function_call"
        and text_of(members.get("call_id")) not in calls
    )


class ResponsesRound(Round):
    """One reply of upstream."""

    ordinary = ORDINARY | {"completed"}
    stops = frozenset(("incomplete", "cancelled"))
    blocks: list[OutputItem]
    _reply: ResponsesReply

    def __init__(
        self, request: ResponsesRoundRequest, names: ToolNames, reply: ResponsesReply
    ) -> None:
        super().__init__(request, names, reply)
        self.spoken = TextCalls(names)
        self._stored = stores(request.members)
        self._aloud = request.gets_reasoning_back
        self._known: dict[int | str | None, OutputItem] = {}  # by index, and by each id
        self._reasoning: list[OutputItem] = []  # that no item has followed yet

    @property
    def theirs(self) -> list[OutputItem]:
        """The calls that the client answers. What upstream executes itself has its result in the
        reply."""
        results = {item.call_id for item in self.blocks if item.type.endswith("_output")} - {""}
        calls = [
            item for item in self.blocks if item.ours == "" and is_answered(item.type, item.members)
        ]
        return [item for item in calls if item.call_id not in results]

    @property
    def leaves_thinking(self) -> bool:
        return any(one.shown for item in self.ours for one in item.before)

    @property
    def empty(self) -> bool:
        others = [item for item in self.blocks if not item.ours and not item.thinks]
        return not any(
            item.type != "message" or spoken([item.final])[0].strip()
            for item in others
            if item.final
        )

    def read(self, event: ItemEvent) -> list[Part]:
        size = len(event.raw)
        if event.type in BEGINNINGS:
            self.id = text_of(object_of(event.decoded.response).get("id"))
            return [] if self._later else self.put(event, self._loose, size)
        if ended := ended_as(event):
            return self._ended(event, ended)
        if event.type == "error":
            return self.fail(event, size)
        item = self._item(event)
        if item is None:
            return self.put(event, self._loose, size)
        parts: list[Part] = []
        if event.type == DONE:
            item.complete(event.decoded.item)
            parts = self._scan(item)
        self._decide(item, sure=event.type == DONE)
        if item.ours:
            item.size += len(memoryview(event.decoded.delta))
            check_arguments(item.size)
        if event.type in SPOKEN and self.names:
            return self._say(event, item, size)
        return parts + self.put(event, item, size)

    def extend(self, data: bytes) -> bool:
        try:
            event = _pieces.decode(data)
        except rawjson.REFUSED:
            return False
        item = self._known.get(event.output_index)
        if item is None or not item.shown or item.place != event.output_index:
            return False
        if event.sequence_number not in (None, self._reply.next_number):
            return False
        key = SPOKEN.get(event.type)
        if key:
            number = event.content_index if key == "content" else event.summary_index
            if not self.spoken.extend({(item, (key, number or 0)): event.delta}):
                return False
        if event.sequence_number is not None:
            self._reply.next_number += 1
        return True

    def _say(self, event: ItemEvent, item: OutputItem, size: int) -> list[Part]:
        """Take a piece of a text; what may be a call of ours is held."""
        piece = text_of(event.decoded.delta)
        key = SPOKEN[event.type]
        number = place(
            event.decoded.content_index if key == "content" else event.decoded.summary_index
        )
        text = item, (key, number or 0)
        if not piece:
            return self.put(event, item, size)
        parts = self.spoken.take(
            text, piece, item, partial(_piece, event), waits=item.type == "message"
        )
        if parts is None:
            self._show(item)
            parts = [(event, item)]
        else:
            self._reply.split = True
            if self.spoken.begun(text):
                self._show(item)
        shown = self.flow()
        for made, of in parts:
            shown += self.put(made, of, size)
        return shown

    def _scan(self, item: OutputItem) -> list[Part]:
        """Look for calls of ours in an item's texts that did not come in pieces. Returns the parts
        to show."""
        shown: list[Part] = []
        if item.type not in ("message", "reasoning") or not self.names:
            return shown
        for key, text in item.texts.items():
            if text and not self.spoken.known((item, key)):
                parts = (
                    self.spoken.take(
                        (item, key), text, item, _nothing, waits=item.type == "message"
                    )
                    or []
                )
                for _, of in parts:
                    if of is not item:
                        shown += self.put(None, of, 0)
        if not any(self.spoken.waits((item, key)) for key in item.texts):
            self._show(item)
        return shown + self.flow()

    def _show(self, item: OutputItem) -> None:
        """Show a message that certainly begins with no call of ours."""
        if item.type == "message" and item.shown is None and not self._holds_text:
            self.decide(item, shown=True)

    def _item(self, event: ItemEvent) -> OutputItem | None:
        """Return the item that an event is about.

        Some servers give no index (llama.cpp), the same one or the same id to several items, or an
        id that changes within an item (Copilot), and some announce no item.
        """
        index = place(event.decoded.output_index)
        if event.type not in (ADDED, DONE):
            return self._known.get(index) or self._known.get(text_of(event.decoded.item_id))
        members = object_of(event.decoded.item)
        ids = [
            *filter(
                None,
                map(text_of, (event.decoded.item_id, members.get("id"), members.get("call_id"))),
            )
        ]
        keys: list[str | int] = [*ids] if index is None else [*ids, index]
        type = text_of(members.get("type"))
        item = next(
            (one for key in keys if (one := self._known.get(key)) and type == one.type), None
        )
        over = (
            item is not None
            and item.final is not None
            and not any(self._known.get(id) is item for id in ids)
        )
        if event.type == ADDED or item is None or over:
            item = self._begin(event.decoded.item)
        self._known |= dict.fromkeys(keys, item)
        return item

    def _begin(self, raw: Raw) -> OutputItem:
        self.blocks.append(item := OutputItem(raw))
        if item.thinks:
            self._reasoning.append(item)
        else:
            item.before = self._reasoning
            self._reasoning = []
        return item

    def _ended(self, event: ItemEvent, status: str) -> list[Part]:
        self.finish = status
        self.over = True
        response = object_of(event.decoded.response)
        self.usage = response.get("usage")
        self.id = text_of(response.get("id")) or self.id
        parts = list[Part]()
        listed = elements_of(response.get("output"))
        if len(listed) == len(self.blocks):  # some servers end no item by itself
            for item, raw in zip(self.blocks, listed, strict=True):
                if item.final is None:
                    item.complete(raw)
        # some gateways send only the end, in which all items are listed, or list calls only there
        else:
            calls = {item.call_id for item in self.blocks}
            for raw in (
                listed if not self.blocks else [raw for raw in listed if _is_new_call(raw, calls)]
            ):
                item = self._begin(raw)
                item.complete(raw)
                parts += self._scan(item)
                self._decide(item, sure=True)
                parts += self.put(None, item, len(memoryview(raw)))
        for item in self.blocks:
            parts += self._scan(item)
        parts += self.settle()
        if self.finish == "failed":
            return parts + self.fail(event, len(event.raw))
        return parts + self.put(event, self.closing, len(event.raw))

    def settle(self) -> list[Part]:
        self._settle_texts()
        for item in self.blocks:
            self._show(item)
            self._decide(item, sure=True)
        return self.flow()

    def _settle_texts(self) -> None:
        """Take calls of ours out of the texts that end with them. Thoughts that nothing follows are
        theirs."""
        for found in self.spoken.settle(self.quotes):
            self._reply.hides = True
            text: Any = found.text
            item: OutputItem = text[0]
            before: list[OutputItem] = []
            if item in self._reasoning:
                before = self._reasoning
                self._reasoning = []
            item.cut(found.end, found.left)
            if item.shown is None and item.blank:
                self.decide(item, shown=False)
            calls = [
                (name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in found.calls
            ]
            self.blocks += [OutputItem.called(*call, before) for call in calls]
            for one in (*before, *self.blocks[-len(calls) :]):
                if one.shown is None:
                    self.decide(one, shown=False)

    def _decide(self, item: OutputItem, *, sure: bool) -> None:
        """Decide whether an item is a call of our tools. `sure`: its name is complete."""
        name = text_of(item.members.get("name"))
        if item.ours is not None or not (name or sure or item.type != "function_call"):
            return
        single = item.type == "function_call" and not text_of(item.members.get(NAMESPACE))
        item.ours = self.names.recognised(name) if single else ""
        if item.thinks and self._aloud and self.thinks_aloud:
            self.decide(item, shown=True)
        if self.names and (item.thinks or item.type == "message"):
            for one in [] if self._holds_text else item.before:
                if one.shown is None:
                    self.decide(one, shown=True)
            return
        for one in (*item.before, item):
            if one.shown is None:
                self.decide(one, shown=not item.ours)

    def written(self, answered: Collection[Call]) -> list[bytes]:
        left = [item for item in self.blocks if item.ours and item not in answered]
        left_out = {
            *left,
            *(one for item in left for one in item.before),
            *(one for one in self.blocks if one.blank),
        }
        raws = [
            bytes(raw)
            for item in self.blocks
            if item not in left_out and (raw := item.written()) is not None
        ]
        if self._stored:
            return raws
        return [rawjson.encode(without_id(rawjson.members(raw))) for raw in raws if lasts(Raw(raw))]


class ResponsesReply(ClientReply):
    """The response that the client gets."""

    blocks: list[OutputItem]
    id = ""
    split = False  # whether an event was split or joined, so that upstream's numbers no longer fit
    _beginning: Raw | None = None
    _end: Members | None = None

    @property
    def visible(self) -> tuple[str, list[ToolCall]]:
        return spoken(self._finals())

    def _finals(self) -> list[Raw]:
        return [item.final for item in self.blocks if item.final is not None]

    def put(self, event: ItemEvent | None, block: Block) -> bytes:
        if block.place is None and isinstance(block, OutputItem):
            self._adopt(block)
        if event is None:
            return b""
        head = event.decoded
        changed = Members()
        if (
            None not in (block.place, place(head.output_index))
            and place(head.output_index) != block.place
        ):
            changed["output_index"] = Raw(b"%d" % (block.place or 0))
        if isinstance(block, OutputItem) and block.cuts:
            given = {"item": head.item, "text": head.text, "part": head.part}
            changed |= {
                key: block.without(raw) for key, raw in given.items() if not rawjson.is_null(raw)
            }
        response = object_of(head.response)
        ends = bool(ended_as(event))
        if not rawjson.is_null(head.response) and (others := self._response(response, ends=ends)):
            changed["response"] = Raw(rawjson.encode(response | others))
        if not rawjson.is_null(head.sequence_number):
            said = integer(head.sequence_number)
            number = self.next_number if self.hides or self.split else max(said, self.next_number)
            self.next_number = number + 1
            if number != said or not event.raw:
                changed["sequence_number"] = Raw(b"%d" % number)
        if event.type in BEGINNINGS:
            self._beginning = changed.get("response", head.response)
        if ends:
            self.ended = True
            self._end = object_of(changed.get("response", head.response))
            self.altered = "response" in changed
        return event.encoded(changed) if self.streamed else b""

    def heartbeat(self) -> bytes:
        """Return the event that says that the response is in progress. Codex counts it, and no
        other one may come at any place."""
        if self._beginning is None:
            return b""
        members: Members = {"response": self._beginning}
        if self.next_number:  # some servers number no events
            members["sequence_number"] = Raw(b"%d" % self.next_number)
            self.next_number += 1
        return ItemEvent.made(IN_PROGRESS, **members).encoded({})

    def _response(self, response: Members, *, ends: bool) -> Members:
        """Return the members of an event's response that differ from upstream's. The first response
        is the frame."""
        # what upstream repeats of the request is as the client wrote it
        changed = self._others(response)
        chosen = self._request.members.get("tool_choice")
        if chosen is not None and self._others(object_of(response.get("tool_choice"))):
            changed["tool_choice"] = chosen
        if not self.begun:
            self.begun = True
            self._frame = {key: (response | changed)[key] for key in FRAME if key in response}
            self.id = text_of(self._frame.get("id"))
        if ends and self.hides:
            changed |= {"output": Raw(rawjson.array(self._finals()))}
            changed |= {key: raw for key, raw in self._frame.items() if response.get(key) != raw}
            if not rawjson.is_null(response.get("usage")):
                changed["usage"] = self._ledger.total(response["usage"])
        return changed

    def _others(self, members: Members) -> Members:
        """Return the member `tools` without ours, if they are in it."""
        listed = (
            rawjson.elements(members["tools"])
            if self._names and rawjson.is_array(members.get("tools"))
            else []
        )
        others = [raw for raw in listed if text_of(object_of(raw).get("name")) not in self._names]
        return {"tools": Raw(rawjson.array(others))} if len(others) < len(listed) else {}

    def assembled(self) -> bytes:
        """The whole reply, once it has ended; empty if it has no end."""
        return rawjson.encode(self._end) if self._end else b""


def as_events(members: Members) -> Iterator[ItemEvent]:
    """Return a whole reply as the events of a stream: of each item, that it begins and that it is
    done. Their numbers are set when they are shown."""
    status = text_of(members.get("status")) or "completed"
    begun = members | {"status": string("in_progress"), "output": Raw(b"[]"), "usage": NULL}
    yield ItemEvent.made("response.created", sequence_number=0, response=begun)
    for index, raw in enumerate(rawjson.elements(members["output"])):
        for type in (ADDED, DONE):
            yield ItemEvent.made(type, sequence_number=0, output_index=index, item=raw)
    ending = next((type for type, ends in ENDINGS.items() if ends == status), "response.completed")
    yield ItemEvent.made(ending, sequence_number=0, response=members)


class ResponsesTurn(Turn):
    """The turn of the Responses API: see `proxy.dialects.turn`."""

    rounds_as = ResponsesRound
    replies_as = ResponsesReply
    read = staticmethod(ItemEvent)
    events_of = staticmethod(as_events)
    _request: ResponsesRoundRequest
    _shown: ResponsesReply

    def __init__(self, request: ResponsesRoundRequest) -> None:
        super().__init__(request)
        self._earlier: list[str] = []  # the ids of the rounds before this one

    @staticmethod
    def failure(fault: ProxyError, said: bytes, number: int) -> bytes:
        """The documented event has the error's members itself, and the SDKs read them from `error`,
        as upstream writes it, so both are there."""
        told = on_one_line(said)
        error = object_of(told.get("error")) or (told if "message" in told else {})
        error = error or rawjson.members(rawjson.members(fault.body())["error"])
        known = {name: error.get(name, NULL) for name in ("code", "message", "param")}
        members = {"type": "error", "sequence_number": number, **known, "error": error}
        return sse.encode(rawjson.encode(members), b"error")

    def _error_in(self, parsed: ItemEvent, data: bytes) -> bytes | None:
        if parsed.type not in ("error", "response.failed"):
            return None
        error = object_of(parsed.decoded.response).get("error")
        return data if rawjson.is_null(error) else rawjson.encode({"error": error})

    @property
    def continuation(self) -> Continuation | None:
        """Upstream keeps calls of ours that were not answered, too, and refuses what follows them
        without results."""
        self._require(State.DONE)
        if not (stores(self._request.members) and self._shown.id and self._round.id):
            return None
        dropped = [
            item for item in self._round.ours if item.call_id and item not in self._answering
        ]
        after = (*self._after, *(item.result(NOT_ANSWERED, "") for item in dropped))
        rounds = (*self._earlier, self._round.id)
        same = rounds == (self._shown.id,) and not after
        return (
            None if same else Continuation(self._shown.id, rounds, after, self._shown.assembled())
        )

    def _go_on(self, answers: Sequence[str], parts: Sequence[str] = ()) -> None:
        self._earlier += [self._round.id] if self._round.id else []
        super()._go_on(answers, parts)
