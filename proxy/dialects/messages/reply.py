"""Reads one reply of upstream and decides which blocks the client may see, because the round may have to be hidden.

Everything is shown at once, thinking included, except:
- calls of our tools, which are never shown;
- text if the client wants JSON (two texts are not), until it is known that the round is visible;
- the end, if something is hidden, because another round may follow.

A whole reply is read as the events of a stream, so both share one code path.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence

import msgspec
from msgspec import Raw

from proxy import rawjson
from proxy.dialects import parsing
from proxy.dialects.messages.blocks import THINKING, call_of
from proxy.dialects.rounds import MAX_REPLY, check_arguments
from proxy.dialects.tool_names import ToolNames
from proxy.dialects.usage import merged, with_prompt
from proxy.dialects.values import EMPTY, NULL, Members, join, object_of, place, string, text_of
from proxy.plan.history import ToolCall
from proxy.plan.turn import Broken
from proxy.rawjson import NotJson

START, DELTA, STOP = "content_block_start", "content_block_delta", "content_block_stop"
BEGIN, CLOSING, END = "message_start", "message_delta", "message_stop"

CALLED = "tool_use"
"""The type of a call that the client answers, and the reason why a reply with such a call stops."""
UNFINISHED = frozenset(("max_tokens", "model_context_window_exceeded", "refusal", "pause_turn", "compaction"))
"""Reasons for which a reply stops before the model is done. The client goes on from there, or gives up."""


class _Head(msgspec.Struct, frozen=True):
    type: str
    index: Raw = NULL
    message: Raw = NULL
    content_block: Raw = NULL
    delta: Raw = NULL
    usage: Raw = NULL


_head = msgspec.json.Decoder(_Head)
_anything = msgspec.json.Decoder(Raw)


class ReplyEvent:
    """One event of a reply. `raw` holds the bytes that came."""

    def __init__(self, data: bytes, raw: bytes = b"", name: bytes | None = None) -> None:
        """Raises NotJson for anything that is no event of this API; it must be left unchanged."""
        head = parsing.known(_head, data)
        self.data, self.raw, self.name = data, raw, name
        self.type = head.type
        self.index = place(head.index)
        self.message = head.message
        self.block = head.content_block
        self.delta = head.delta
        self.usage = head.usage


class Block:
    """One block of a reply, put together from its events."""

    def __init__(self, raw: Raw, names: ToolNames) -> None:
        self.members = object_of(raw)
        self.type = text_of(self.members.get("type"))
        self.name = names.recognised(text_of(self.members.get("name"))) if self.type == CALLED else ""
        """Which of our tools it calls."""
        self.shown: int | None = None
        """Its place among the blocks that the client sees."""
        self.ended = False
        self.kept: list[ReplyEvent] = []
        """Its events, as long as they must not be shown."""
        self.size = 0
        """The characters that came in events."""
        self._pieces: defaultdict[str, list[str]] = defaultdict(list)
        self._cited: list[Raw] = []

    @property
    def ours(self) -> bool:
        return bool(self.name)

    def grow(self, delta: Raw) -> None:
        """Add what an event brings. Texts of whatever name go on; a citation joins those before it."""
        for key, raw in object_of(delta).items():
            if key == "citation":
                self._cited.append(raw)
            elif key != "type" and rawjson.is_string(raw):
                self._pieces[key].append(text_of(raw))
                self.size += len(self._pieces[key][-1])

    @property
    def arguments(self) -> str:
        """A call's arguments as the model wrote them."""
        return join(self._pieces["partial_json"]) or bytes(self.members.get("input", EMPTY)).decode("utf-8", "replace")

    @property
    def whole(self) -> bool:
        """Whether this call is complete: upstream ends a block even if the model was stopped within it."""
        return self.ended and _is_object(self.arguments)

    def call(self) -> ToolCall:
        return ToolCall(text_of(self.members.get("id")), self.name or text_of(self.members.get("name")), self.arguments)

    def identify(self, id: str) -> None:
        self.members["id"] = string(id)

    def final(self) -> Members:
        """Return the complete block as it goes back upstream: a call of our tools has the tool's own name."""
        made = dict(self.members)
        for key, pieces in self._pieces.items():
            if key != "partial_json":
                made[key] = string(text_of(self.members.get(key)) + join(pieces))
        if self._pieces["partial_json"]:
            made["input"] = Raw(self.arguments.encode("utf-8", "replace")) if _is_object(self.arguments) else EMPTY
        if self._cited:
            made["citations"] = Raw(rawjson.array(self._cited))
        return made | ({"name": string(self.name)} if self.name else {})


Part = tuple[ReplyEvent, Block | None]
"""An event for the client, and the block that it is about."""


class MessagesRound:
    """Reads events. `names` are the names of our tools; empty if the request does not have them. `theirs` are those of
    the client's tools."""

    def __init__(self, names: Sequence[str], *, later: bool, holds_text: bool, theirs: Collection[str] = ()) -> None:
        self.blocks: list[Block] = []
        self._reason = ""  # why the reply stopped; empty until it is known
        self.failed = False
        self.over = False
        self.end: list[Part] = []
        self.container: Raw = NULL
        """Where upstream's own tools run."""
        self._usage: Members = {}
        self._names = ToolNames(names, theirs)
        self._later = later
        self._holds_text = holds_text and bool(names)
        self._has_ours = False
        self._by_index: dict[int, Block] = {}
        self._size = 0

    @property
    def ours(self) -> list[Block]:
        return [block for block in self.blocks if block.ours]

    @property
    def theirs(self) -> list[Block]:
        return [block for block in self.blocks if block.type == CALLED and not block.ours]

    @property
    def pieces(self) -> int:
        return len(self.blocks)

    @property
    def usage(self) -> Raw:
        return with_prompt(self._usage)

    @property
    def ended(self) -> bool:
        return bool(self._reason)

    @property
    def unfinished(self) -> bool:
        return self._reason in UNFINISHED

    @property
    def hides(self) -> bool:
        """Whether this turn has anything that the client does not see."""
        return self._later or self._has_ours

    @property
    def empty(self) -> bool:
        others = [block for block in self.blocks if not block.ours and block.type not in THINKING]
        return not any(block.type != "text" or text_of(block.final().get("text")).strip() for block in others)

    def say(self, text: str, seed: str) -> list[Part]:
        raw = Raw(rawjson.encode({"type": "text", "text": text}))
        index = max(self._by_index, default=-1) + 1
        return [part for event in _block_events(index, raw) for part in self.read(event)]

    def read(self, event: ReplyEvent) -> list[Part]:
        if event.type == BEGIN:
            message = object_of(event.message)
            self._usage = merged(self._usage, message.get("usage", NULL))
            self.container = message.get("container", NULL)
            return [] if self._later else [(event, None)]
        if event.type in (CLOSING, END):
            return self._ended(event)
        if event.type == "error":
            self.failed = self.over = True
            return [(event, None)]
        block = self._block(event)
        return [(event, None)] if block is None else self._about(block, event)

    def settle(self) -> list[Part]:
        return []  # a call has its name from its beginning

    def written(self, answered: Collection[object]) -> list[bytes]:
        """Return the blocks as the message that goes back upstream, which refuses texts without words."""
        kept = [(block.type, block.final()) for block in self.blocks if not block.ours or block in answered]
        content = [final for kind, final in kept if kind != "text" or text_of(final.get("text")).strip()]
        return [rawjson.encode({"role": "assistant", "content": content})]

    def release(self, *, visible: bool) -> list[Part]:
        found = [(event, block) for block in self.blocks if visible and not block.ours for event in block.kept]
        for block in self.blocks:
            block.kept = []
        self._holds_text = False
        return list(found)

    def _block(self, event: ReplyEvent) -> Block | None:
        if event.index is None:
            return None
        if event.type == START:
            block = self._by_index[event.index] = Block(event.block, self._names)
            self.blocks.append(block)
            self._has_ours |= block.ours
        return self._by_index.get(event.index)

    def _about(self, block: Block, event: ReplyEvent) -> list[Part]:
        if event.type == DELTA:
            block.grow(event.delta)
        block.ended = block.ended or event.type == STOP
        if not block.ours and not (self._holds_text and block.type == "text"):
            return [(event, block)]
        if block.ours:
            check_arguments(block.size)
        self._size += len(event.raw)
        if self._size > MAX_REPLY:
            raise Broken(f"more than {MAX_REPLY} bytes of a reply are held back")
        if not block.ours:
            block.kept.append(event)
        return []

    def _ended(self, event: ReplyEvent) -> list[Part]:
        if event.type == CLOSING:
            ended = object_of(event.delta)
            self._reason = text_of(ended.get("stop_reason")) or self._reason
            if not rawjson.is_null(ended.get("container")):
                self.container = ended["container"]
            self._usage = merged(self._usage, event.usage)
        self.over = self.over or event.type == END
        if self.hides:
            self.end.append((event, None))
            return []
        return [*self.release(visible=True), (event, None)]


def as_events(members: Members) -> Iterator[ReplyEvent]:
    """Return a whole reply as the events of a stream."""
    begun = members | {"content": Raw(b"[]"), "stop_reason": NULL, "stop_sequence": NULL}
    yield _made(BEGIN, message=begun)
    for index, raw in enumerate(rawjson.elements(members["content"])):
        yield from _block_events(index, raw)
    ended = {key: members.get(key, NULL) for key in ("stop_reason", "stop_sequence")}
    ended |= {key: members[key] for key in ("container",) if key in members}
    yield _made(CLOSING, delta=ended, usage=members.get("usage", EMPTY))
    yield _made(END)


_GROWING = ("text", "thinking", "signature")
"""Texts that are announced empty and come in events of their own."""


def _block_events(index: int, raw: Raw) -> Iterator[ReplyEvent]:
    block = object_of(raw)
    deltas: list[Members] = []
    begun = dict(block)
    if text_of(block.get("type")).endswith(CALLED):
        begun["input"] = EMPTY
        deltas.append({"type": string("input_json_delta"), "partial_json": string(call_of(block).arguments)})
    else:
        for key in _GROWING:
            if rawjson.is_string(block.get(key)):
                begun[key] = string("")
                deltas.append({"type": string(f"{key}_delta"), key: block[key]})
    if rawjson.is_array(block.get("citations")):
        begun["citations"] = Raw(b"[]")
        cited = rawjson.elements(block["citations"])
        deltas += [{"type": string("citations_delta"), "citation": one} for one in cited]
    yield _made(START, index=index, content_block=begun)
    for delta in deltas:
        yield _made(DELTA, index=index, delta=delta)
    yield _made(STOP, index=index)


def _made(type: str, **members: object) -> ReplyEvent:
    """Return an event of ours, or of a reply that is not a stream."""
    return ReplyEvent(rawjson.encode({"type": type, **members}), name=type.encode())


def _is_object(text: str) -> bool:
    try:
        raw, _ = rawjson.decode(_anything, text.encode("utf-8", "replace") or b"{}")
    except NotJson:
        return False
    return bytes(raw).lstrip().startswith(b"{")
