"""Reads the replies of the Messages API, and makes one of all rounds for the client.

Everything is shown at once, thinking included, except calls of our tools, what of a text may be
such calls, and text if the client wants JSON.

The client's reply has the first round's id, one beginning and one end. The blocks' numbers count on
over all rounds. The end says why the last round stopped, and its usage covers all rounds.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterator
from functools import partial
from typing import Any, Literal, Self

import msgspec
from msgspec import Raw

from proxy import rawjson, sse
from proxy.dialects.messages.blocks import THINKING, call_of, result, spoken
from proxy.dialects.messages.request import CREDIT, MessagesRoundRequest
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
    is_object,
)
from proxy.dialects.textcalls import TextCalls
from proxy.dialects.turn import Turn
from proxy.dialects.usage import merged
from proxy.errors import ProxyError
from proxy.plan.plan import ToolCall
from proxy.rawjson import (
    EMPTY,
    NULL,
    Members,
    elements_of,
    join,
    object_of,
    on_one_line,
    place,
    string,
    text_of,
)

START = "content_block_start"
DELTA = "content_block_delta"
STOP = "content_block_stop"
BEGIN = "message_start"
CLOSING = "message_delta"
END = "message_stop"

CALLED = "tool_use"
"""The type of a call that the client answers, and the reason why a reply with such a call stops."""
FALLBACK = "fallback"
"""The type of a block behind which another model goes on. No call before the last such block is to
be answered, and none may be sent back.

https://platform.claude.com/docs/en/build-with-claude/refusals-and-fallback
"""
UNFINISHED = frozenset(
    ("max_tokens", "model_context_window_exceeded", "refusal", "pause_turn", "compaction")
)
"""Reasons for which a reply stops before the model is done. The client goes on from there, or gives
up."""
FRAME = ("id", "model")
"""Members of the reply that are those of its first round."""
NOT_STOPPED: Members = {"stop_reason": NULL, "stop_sequence": NULL}
STOPPED = ("stop_reason", "stop_sequence", "stop_details", "container")
"""Members of a whole reply that a stream's last event but one has in its delta."""


class _Head(msgspec.Struct, frozen=True):
    type: str = ""
    index: Raw = NULL
    message: Raw = NULL
    content_block: Raw = NULL
    delta: Raw = NULL
    usage: Raw = NULL


class _Piece(msgspec.Struct, gc=False):
    """An event that brings nothing but texts of a block."""

    type: Literal["content_block_delta"]
    index: int
    delta: dict[str, str]


_pieces = msgspec.json.Decoder(_Piece)


class ReplyEvent(Event):
    """One event of a reply."""

    decoder = msgspec.json.Decoder(_Head)


class ReplyBlock(Call):
    """One block of a reply, put together from its events."""

    def __init__(self, raw: Raw, names: ToolNames) -> None:
        super().__init__()
        self.members = object_of(raw)
        self.type = text_of(self.members.get("type"))
        self.ours = (
            names.recognised(text_of(self.members.get("name"))) if self.type == CALLED else ""
        )
        self.ended = self.void = False
        self.size = 0  # the characters that came in events
        self._pieces: defaultdict[str, list[str]] = defaultdict(list)
        self._cited: list[Raw] = []

    @classmethod
    def called(cls, name: str, arguments: str) -> Self:
        """Return a call of one of our tools that was written in a text."""
        made = cls(
            Raw(rawjson.encode({"type": CALLED, "id": "", "name": name, "input": EMPTY})),
            ToolNames((name,)),
        )
        made.ended = True
        made._pieces["partial_json"].append(arguments)
        made.shown = False
        return made

    def cut(self, key: str, end: str, left: str) -> None:
        """Replace the end of a text."""
        written = text_of(self.members.get(key)) + join(self._pieces[key])
        self.members[key] = string("")
        self._pieces[key] = [written.removesuffix(end) + left]

    def grow(self, delta: Raw) -> None:
        """Add what an event brings. Texts of whatever name go on; a citation joins those before
        it."""
        for key, raw in object_of(delta).items():
            if key == "citation":
                self._cited.append(raw)
            elif key != "type" and rawjson.is_string(raw):
                self.extend(key, text_of(raw))

    def extend(self, key: str, text: str) -> None:
        """Add a piece of one of its texts."""
        self._pieces[key].append(text)
        self.size += len(text)

    @property
    def thinks(self) -> bool:
        return self.type in THINKING

    @property
    def arguments(self) -> str:
        """A call's arguments as the model wrote them."""
        given = self.members.get("input", EMPTY)
        return (
            join(self._pieces["partial_json"])
            or text_of(given)
            or bytes(given).decode("utf-8", "replace")
        )

    @property
    def is_complete(self) -> bool:
        """Whether this call is complete: upstream ends a block even if the model was stopped within
        it."""
        return self.ended and is_object(self.arguments)

    def call(self) -> ToolCall:
        return ToolCall(
            text_of(self.members.get("id")),
            self.ours or text_of(self.members.get("name")),
            self.arguments,
        )

    def identify(self, id: str) -> None:
        self.members["id"] = string(id)

    def result(self, text: str, part: str) -> bytes:
        return result(text_of(self.members.get("id")), text, part)

    def final(self) -> Members:
        """Return the complete block as it goes back upstream: a call of our tools has the tool's
        own name."""
        made = dict(self.members)
        for key, pieces in self._pieces.items():
            if key != "partial_json":
                made[key] = string(text_of(self.members.get(key)) + join(pieces))
            elif pieces:
                made["input"] = Raw(as_object(self.arguments).encode("utf-8", "replace"))
        if self.ours:
            made["input"] = Raw(as_object(self.arguments).encode("utf-8", "replace"))
        if self._cited:
            made["citations"] = Raw(rawjson.array(self._cited))
        return made | ({"name": string(self.ours)} if self.ours else {})

    @property
    def says(self) -> bool:
        """Whether it has words, or is no text. Upstream refuses texts without words."""
        return self.type != "text" or bool(text_of(self.final().get("text")).strip())


_SPOKEN = {"text": "text", "thinking": "thinking"}
"""Blocks with a text of the model's, and its member."""


def _piece(index: int, key: str, text: str) -> ReplyEvent:
    """Return an event with a piece of a block's text."""
    return ReplyEvent.made(DELTA, index=index, delta={"type": f"{key}_delta", key: string(text)})


class MessagesRound(Round):
    """One reply of upstream."""

    ordinary = ORDINARY | {CALLED}
    stops = UNFINISHED
    blocks: list[ReplyBlock]
    container: Raw = NULL
    """Where upstream's own tools run."""
    credit = ""
    """Upstream's token for the request if the model refused it."""
    _fallback = 0  # the place of the last block behind which another model goes on

    def __init__(
        self, request: MessagesRoundRequest, names: ToolNames, reply: MessageReply
    ) -> None:
        super().__init__(request, names, reply)
        self.spoken = TextCalls(names)
        self._usage: Members = {}
        self._by_index: dict[int | None, ReplyBlock] = {}

    @property
    def theirs(self) -> list[ReplyBlock]:
        return [block for block in self.blocks if block.type == CALLED and not block.ours]

    @property
    def empty(self) -> bool:
        return not any(
            block.says for block in self.blocks if not block.ours and block.type not in THINKING
        )

    def read(self, event: ReplyEvent) -> list[Part]:
        head = event.decoded
        size = len(event.raw)
        if event.type == BEGIN:
            message = object_of(head.message)
            self.container = message.get("container", NULL)
            self._spend(message.get("usage", NULL))
            return [] if self._later else self.put(event, self._loose, size)
        if event.type == "error":
            self.over = True
            return self.fail(event, size)
        if event.type == CLOSING:
            ended = object_of(head.delta)
            self.credit = text_of(object_of(ended.get("stop_details")).get(CREDIT))
            self.finish = text_of(ended.get("stop_reason")) or self.finish
            if not rawjson.is_null(ended.get("container")):
                self.container = ended["container"]
            self._spend(head.usage)
        self.over |= event.type == END
        if event.type in (CLOSING, END):
            return self.put(event, self.closing, size)
        return self._in_block(event, size)

    def extend(self, data: bytes) -> bool:
        try:
            event = _pieces.decode(data)
        except rawjson.REFUSED:
            return False
        block = self._by_index.get(event.index)
        if block is None or not block.shown or block.place != event.index:
            return False
        piece = event.delta.get(_SPOKEN.get(block.type, ""))
        if piece and not self.spoken.extend({block: piece}):
            return False
        for key, text in event.delta.items():
            if key != "type":
                block.extend(key, text)
                self.grow(len(text))
        return True

    def _in_block(self, event: ReplyEvent, size: int) -> list[Part]:
        index = place(event.decoded.index)
        if event.type == START:
            return self._begun(event, index)
        block = self._by_index.get(index)
        if block is None:
            return self.put(event, self._loose, size)
        if event.type == DELTA:
            block.grow(event.decoded.delta)
            self.grow(len(memoryview(event.decoded.delta)))  # all of the reply is kept
            key = _SPOKEN.get(block.type, "")
            if key and (piece := text_of(object_of(event.decoded.delta).get(key))):
                return self._say(event, block, key, piece, size)
        if event.type == STOP:
            block.ended = True
            if not self.spoken.waits(block):
                self._show(block)
        if block.ours:
            check_arguments(block.size)
        return self.put(event, block, size)

    def _say(
        self, event: ReplyEvent, block: ReplyBlock, key: str, piece: str, size: int
    ) -> list[Part]:
        """Take a piece of a text; what may be a call of ours is held."""
        index = place(event.decoded.index)
        made = partial(_piece, 0 if index is None else index, key)
        parts = self.spoken.take(block, piece, block, made, waits=block.type == "text")
        if parts is None:
            self._show(block)
            parts = [(event, block)]
        waiting = (one for one in self.blocks if self.held and one.shown is None)
        for one in (block, *waiting):
            if self.spoken.begun(one):
                self._show(one)
        shown = self.flow()
        for made_event, of in parts:
            shown += self.put(made_event, of, size)
        return shown

    def _show(self, block: ReplyBlock) -> None:
        """Show a text whose first words are certainly no call of ours."""
        if block.shown is None and not self._holds_text:
            self.decide(block, shown=True)

    def _spend(self, usage: Raw) -> None:
        """Bring the usage up to date with what an event says."""
        self._usage = merged(self._usage, usage)
        self.usage = Raw(rawjson.encode(self._usage))

    def _begun(self, event: ReplyEvent, index: int | None) -> list[Part]:
        """Take a block's beginning. One of a text waits for its first words; some gateways send
        these with it."""
        size = len(event.raw)
        block = self._by_index[index] = ReplyBlock(event.decoded.content_block, self.names)
        if block.type == FALLBACK:
            self._fallback = len(self.blocks)
        self.blocks.append(block)
        spoken = bool(self.names) and block.type == "text"
        if block.ours or not (spoken or (self._holds_text and block.type == "text")):
            self.decide(block, shown=not block.ours)
        key = _SPOKEN.get(block.type, "")
        piece = text_of(block.members.get(key)) if key else ""
        if not (self.names and piece):
            return self.put(event, block, size)
        empty = {
            "content_block": Raw(
                rawjson.encode(object_of(event.decoded.content_block) | {key: string("")})
            )
        }
        parts = self.put(
            ReplyEvent(rawjson.encode(rawjson.members(event.data) | empty), name=event.name),
            block,
            size,
        )
        return parts + self._say(event, block, key, piece, size)

    def settle(self) -> list[Part]:
        for block in self.blocks[: self._fallback]:
            block.void = block.type == CALLED
        self.blocks = [block for block in self.blocks if not block.void]
        for found in self.spoken.settle(self.quotes):
            self._reply.hides = True
            text: Any = found.text
            text.cut(_SPOKEN[text.type], found.end, found.left)
            if text.shown is None and not text.says:
                self.decide(text, shown=False)
            calls = [
                (name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in found.calls
            ]
            self.blocks += [ReplyBlock.called(*call) for call in calls]
        for one in self.blocks:
            if one.type == "text":
                self._show(one)
        return self.flow()

    def written(self, answered: Collection[Call]) -> list[bytes]:
        kept = [block for block in self.blocks if not block.ours or block in answered]
        content = [block.final() for block in kept if block.says]
        return [rawjson.encode({"role": "assistant", "content": content})] if content else []


class MessageReply(ClientReply):
    """The message that the client gets."""

    blocks: list[ReplyBlock]
    _container: Raw = NULL
    _end: Members | None = None
    _ends: bytes = b""
    """Ends of blocks that a round left open, which the client gets before anything else."""

    def go_on(self, ending: MessagesRound) -> None:
        super().go_on(ending)
        left_open = [
            block for block in ending.blocks if block.place is not None and not block.ended
        ]
        self._ends = b"".join(
            [ReplyEvent.made(STOP, index=one.place).encoded({}) for one in left_open]
        )
        self._request.credited = False
        if not rawjson.is_null(ending.container):
            self._request.container = self._container = ending.container

    @property
    def visible(self) -> tuple[str, list[ToolCall]]:
        return spoken(block.final() for block in self.blocks if not block.void)

    def put(self, event: ReplyEvent, block: Block) -> bytes:
        changed: Members = {}
        if isinstance(block, ReplyBlock):
            if block.place is None:
                self._adopt(block)
            if place(event.decoded.index) != block.place:
                changed["index"] = Raw(b"%d" % (block.place or 0))
        elif event.type == BEGIN:
            message = object_of(event.decoded.message)
            self.begun = True
            self._frame = {key: message[key] for key in FRAME if key in message}
        elif event.type == CLOSING:
            changed = self._closing(event) if self.hides else {}
            end = changed.get("delta", event.decoded.delta)
            usage = changed.get("usage", event.decoded.usage)
            self.ended = True
            self._end = object_of(end) | {"usage": usage}
        ends = self._ends
        self._ends = b""
        return ends + event.encoded(changed) if self.streamed else b""

    def _closing(self, event: ReplyEvent) -> Members:
        """Return the members of the last event but one that are not the last round's."""
        ended = object_of(event.decoded.delta)
        other = Members()
        if text_of(ended.get("stop_reason")) == CALLED and not any(
            block.type == CALLED for block in self.blocks
        ):
            other["stop_reason"] = string("end_turn")
        if not rawjson.is_null(self._container) and rawjson.is_null(ended.get("container")):
            other["container"] = self._container
        changed = {"delta": Raw(rawjson.encode(ended | other))} if other else {}
        if not rawjson.is_null(event.decoded.usage):
            changed["usage"] = self._ledger.total(event.decoded.usage)
        return changed

    @staticmethod
    def is_sign(event: ReplyEvent) -> bool:
        """Claude Code 2.1.197 skips pings, and hangs up after five minutes of nothing else."""
        return event.type != "ping"

    def heartbeat(self) -> bytes:
        """Return the last event but one of a reply, with no reason to stop. It may come at any
        place, also in a block; the SDKs replace what it says by what the last such event says."""
        if not self.begun:
            return b""
        return ReplyEvent.made(CLOSING, delta=NOT_STOPPED, usage={"output_tokens": 0}).encoded({})

    def assembled(self) -> bytes:
        last = object_of(Raw(self.body))
        content = Raw(rawjson.array(rawjson.encode(block.final()) for block in self.blocks))
        ended = {
            key: value
            for key, value in (self._end or {}).items()
            if key in last or value is not NULL
        }
        return rawjson.encode(last | self._frame | {"content": content} | ended)


_GROWING = {
    "text": {"text": "text_delta"},
    "thinking": {"thinking": "thinking_delta", "signature": "signature_delta"},
    "compaction": {"content": "compaction_delta"},
}
"""Texts of blocks that are announced empty and come in events of their own, with the types of
these."""


def as_events(members: Members) -> Iterator[ReplyEvent]:
    """Return a whole reply as the events of a stream."""
    begun = members | {"content": Raw(b"[]")} | NOT_STOPPED
    yield ReplyEvent.made(BEGIN, message=begun)
    for index, block in enumerate(map(object_of, rawjson.elements(members["content"]))):
        start = dict(block)
        deltas = list[Members]()
        if text_of(block.get("type")).endswith(CALLED):
            start["input"] = EMPTY
            deltas.append(
                {
                    "type": string("input_json_delta"),
                    "partial_json": string(call_of(block).arguments),
                }
            )
        else:
            for key, type in _GROWING.get(text_of(block.get("type")), {}).items():
                if rawjson.is_string(block.get(key)):
                    start[key] = NULL if key == "content" else string("")
                    deltas.append({"type": string(type), key: block[key]})
        if rawjson.is_array(block.get("citations")):
            start["citations"] = Raw(b"[]")
            deltas += [
                {"type": string("citations_delta"), "citation": one}
                for one in elements_of(block["citations"])
            ]
        yield ReplyEvent.made(START, index=index, content_block=start)
        for delta in deltas:
            yield ReplyEvent.made(DELTA, index=index, delta=delta)
        yield ReplyEvent.made(STOP, index=index)
    ended = NOT_STOPPED | {key: members[key] for key in STOPPED if key in members}
    yield ReplyEvent.made(CLOSING, delta=ended, usage=members.get("usage", EMPTY))
    yield ReplyEvent.made(END)


# -- errors of our own -----------------------------------------------------------------------------

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(fault: ProxyError) -> bytes:
    """`code` is ours, as in the other APIs."""
    kind = TYPES.get(fault.status, "invalid_request_error" if fault.status < 500 else "api_error")
    code = {} if fault.code is None else {"code": fault.code}
    return rawjson.encode(
        {"type": "error", "error": {"type": kind, "message": fault.message, **code}}
    )


class MessagesTurn(Turn):
    """The turn of the Messages API: see `proxy.dialects.turn`."""

    rounds_as = MessagesRound
    replies_as = MessageReply
    read = staticmethod(ReplyEvent)
    events_of = staticmethod(as_events)
    call_ids = "toolu"

    @staticmethod
    def failure(fault: ProxyError, said: bytes, number: int) -> bytes:
        members = on_one_line(said)
        return sse.encode(
            rawjson.encode(members) if object_of(members.get("error")) else error_body(fault),
            b"error",
        )

    @property
    def credit(self) -> str:
        return self._round.credit if isinstance(self._round, MessagesRound) else ""

    def _error_in(self, parsed: ReplyEvent, data: bytes) -> bytes | None:
        return data if parsed.type == "error" else None
