"""Takes events of the chat API apart, and puts the model's message together from their deltas.

    event ──parse──> Chunk (event, choice, delta; every member as the bytes it came as) ──json──> event

A whole reply becomes such events, too, so streams and whole replies share one code path.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import msgspec
from msgspec import Raw

from proxy import rawjson
from proxy.dialects.reply import MAX_REPLY
from proxy.plan.turn import Broken
from proxy.rawjson import EMPTY, NULL, Members, NotJson, join, members_of, object_of, string, text_of

_Pieces = list[str | Raw]

TEXTS = ("content", "reasoning_content", "reasoning", "refusal")
"""Members that a client shows as running text (`reasoning_content`: DeepSeek, llama.cpp; `reasoning`: OpenRouter,
vLLM)."""

_PLAIN = frozenset((*TEXTS, "role", "tool_calls", "function_call"))
_BLOCKS = frozenset(("reasoning_details", "thinking_blocks", "reasoning_opaque", "reasoning_encrypted"))
"""Members with reasoning that the client must send back: gateways sign or encrypt it as a whole (OpenRouter, LiteLLM,
Copilot)."""
_BLOCK_TEXTS = frozenset(("text", "summary", "thinking", "data", "signature"))
_NOTHING = (b"null", b'""', b"[]", b"{}")
_NO_ERROR = (*_NOTHING, b"false", b"0")


# -- an event ---------------------------------------------------------------------------------------------------------


class _PlainChoice(msgspec.Struct, gc=False):
    delta: dict[str, str | None]
    finish_reason: None = None


class _Plain(msgspec.Struct, gc=False):
    """An event that holds nothing but text. Events that this type rejects are parsed in full."""

    choices: tuple[_PlainChoice]
    usage: None = None
    error: None = None


_plain = msgspec.json.Decoder(_Plain)


def plain_delta(data: bytes) -> dict[str, str | None] | None:
    """Return the texts of an event, or None if it holds anything else."""
    try:
        delta = _plain.decode(data).choices[0].delta
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return delta if delta.keys() <= _PLAIN else None


class CallDelta:
    """One entry of `tool_calls`: its members, and the members of its function (or custom tool)."""

    __slots__ = ("function", "kind", "members")

    def __init__(self, members: Members) -> None:
        self.members = members
        self.kind = "custom" if "custom" in members else "function"
        self.function = members_of(members.get(self.kind))


class Chunk:
    """One event of a reply. `raw` holds the bytes that came, or None once anything has been changed.

    `choice` is None in events without a choice: usage at the end, content filters, errors.
    """

    __slots__ = ("called", "calls", "choice", "delta", "members", "name", "raw")

    def __init__(self, members: Members, choice: Members | None, delta: Members) -> None:
        self.members = members
        self.choice = choice
        self.delta = delta
        self.calls: list[CallDelta] = []
        """The entries of its `tool_calls`."""
        self.called: list[Any] = []
        """The call that each of them is about, once that is known."""
        self.raw: bytes | None = None
        self.name: bytes | None = None

    @property
    def usage(self) -> Raw | None:
        usage = self.members.get("usage")
        return None if rawjson.is_null(usage) else usage

    @property
    def finish(self) -> str:
        return text_of(self.choice.get("finish_reason")) if self.choice else ""

    @property
    def failed(self) -> bool:
        """Whether upstream reports an error within a reply of status 200."""
        return any(bytes(part.get("error", NULL)) not in _NO_ERROR for part in (self.members, self.choice or {}))

    def says(self, *besides: str) -> bool:
        """Whether the delta holds anything but a role and these members."""
        return any(bytes(raw) not in _NOTHING for key, raw in self.delta.items() if key not in ("role", *besides))

    @property
    def void(self) -> bool:
        """Whether the event holds nothing that a client could use."""
        return self.choice is not None and not (self.finish or self.says() or "role" in self.delta)

    def part(self, delta: Members) -> Chunk:
        """Return a new event of the same reply with this delta, without this event's usage, error or finish reason."""
        members = {key: raw for key, raw in self.members.items() if key not in ("usage", "error")}
        part = Chunk(members, {"index": Raw(b"0"), "delta": EMPTY, "finish_reason": NULL}, delta)
        part.name = self.name
        return part

    def calling(self, delta: CallDelta, call: object) -> Chunk:
        """Return a new event with this entry of `tool_calls`."""
        part = self.part({"tool_calls": Raw(rawjson.array([rawjson.encode(delta.members)]))})
        part.calls, part.called = [delta], [call]
        return part

    def take(self, keys: Iterable[str]) -> Chunk:
        """Move these members of the delta to a new event and return it."""
        part = self.part({key: self.delta[key] for key in keys})
        self.drop(part.delta)
        return part

    def take_end(self) -> Chunk:
        """Move the finish reason, the usage and other members of the reply's end to a new event and return it."""
        end = Chunk(self.members, self.choice, {})
        end.name = self.name
        self.members, self.raw = self.part({}).members, None
        self.put_choice("finish_reason", NULL)
        return end

    def put(self, members: Members) -> None:
        self.members, self.raw = self.members | members, None

    def put_choice(self, key: str, raw: Raw) -> None:
        """Replace a member of the choice, if it has one of that name."""
        if self.choice and key in self.choice:
            self.choice, self.raw = self.choice | {key: raw}, None

    def put_delta(self, delta: Members) -> None:
        self.delta, self.raw = delta, None

    def drop(self, keys: Collection[str]) -> None:
        """Remove these members of the delta."""
        self.put_delta({key: raw for key, raw in self.delta.items() if key not in keys})

    def json(self) -> bytes:
        if self.choice is None:
            return rawjson.encode(self.members)
        delta = {"delta": Raw(rawjson.encode(self.delta))} if self.delta or "delta" in self.choice else {}
        choices = rawjson.array([rawjson.encode(self.choice | delta)])
        return rawjson.encode(self.members | {"choices": Raw(choices)})


def parse(data: bytes, key: str = "delta") -> Chunk:
    """Parse an event's data, or a whole reply if `key` is `message`. Raises NotJson for any unknown shape, which must
    be left unchanged."""
    rawjson.check_utf8(data)
    members = rawjson.members(data)
    choices = [] if rawjson.is_null(members.get("choices")) else rawjson.elements(members["choices"])
    if len(choices) > 1:
        raise NotJson("several choices, where one was asked for")
    if not choices:
        return Chunk(members, None, {})
    choice = rawjson.members(choices[0])
    chunk = Chunk(members, choice, members_of(choice.get(key)))
    if not rawjson.is_null(chunk.delta.get("tool_calls")):
        chunk.calls = [CallDelta(rawjson.members(raw)) for raw in rawjson.elements(chunk.delta["tool_calls"])]
    return chunk


def as_events(body: bytes) -> list[Chunk]:
    """Return a whole reply as the events of a stream. Raises NotJson for a body that is none."""
    whole = parse(body, "message")
    if whole.choice is None or "message" not in whole.choice or (whole.failed and not whole.says()):
        raise NotJson("no chat completion")
    whole.members = whole.members | {"object": Raw(b'"chat.completion.chunk"')}
    whole.choice = {key: raw for key, raw in whole.choice.items() if key != "message"} | {"delta": EMPTY}
    for number, call in enumerate(whole.calls):
        call.members = {"index": Raw(b"%d" % number)} | call.members | {"index": Raw(b"%d" % number)}
    if whole.calls:
        whole.delta["tool_calls"] = Raw(rawjson.array([rawjson.encode(call.members) for call in whole.calls]))
    spent = whole.usage
    end = whole.take_end()
    if spent is None:
        return [whole, end]
    end.members = whole.members
    return [whole, end, Chunk(whole.members | {"choices": Raw(b"[]"), "usage": spent}, None, {})]


def held(delta: Members) -> list[str]:
    """Return the members of a delta that only a visible round may show: signed or encrypted reasoning."""
    return [key for key, raw in delta.items() if _is_signed(key, raw) and not rawjson.is_null(raw)]


def signature(members: Members) -> Members:
    """Return the members that sign a tool call. Gemini puts them beside the function, under varying names."""
    return {key: raw for key, raw in members.items() if key not in ("id", "function", "custom") and _signs(key, raw)}


def _is_signed(key: str, raw: Raw) -> bool:
    return key in _BLOCKS or (key not in TEXTS and key != "tool_calls" and _signs(key, raw))


def _signs(key: str, raw: Raw) -> bool:
    return "signature" in key or b"signature" in bytes(raw)


# -- a message --------------------------------------------------------------------------------------------------------


class ReplyMessage:
    """A message built from its deltas: strings are joined, lists are extended, and other values are replaced.

    Tool calls are kept elsewhere: see `calls`.
    """

    def __init__(self) -> None:
        self._members: dict[str, Raw | _Pieces] = {}
        self._size = 0

    def add(self, delta: Members) -> None:
        """Add a delta. Raises Broken if the message grows beyond MAX_REPLY."""
        for key, raw in delta.items():
            if key == "tool_calls":
                continue
            if key == "role" or rawjson.is_null(raw):
                self._members.setdefault(key, raw)
            elif rawjson.is_string(raw):
                self.add_text(key, text_of(raw))
            else:
                self._add_other(key, raw)

    def add_text(self, key: str, text: str) -> None:
        """Add text to a member. Raises Broken if the message grows beyond MAX_REPLY."""
        self._extend(key, [text], len(text))

    def add_plain(self, delta: dict[str, str | None]) -> None:
        """Add a delta that holds only text. Raises Broken if the message grows beyond MAX_REPLY."""
        for key, text in delta.items():
            if text and key in TEXTS:
                self.add_text(key, text)

    def _add_other(self, key: str, raw: Raw) -> None:
        try:
            self._extend(key, rawjson.elements(raw), len(memoryview(raw)))
        except NotJson:
            self._members[key] = raw

    def _extend(self, key: str, pieces: Sequence[str | Raw], size: int) -> None:
        known = self._members.get(key)
        if isinstance(known, list):
            known += pieces
        else:
            self._members[key] = list(pieces)
        self._size += size
        if self._size > MAX_REPLY:
            raise Broken(f"a reply of more than {MAX_REPLY} bytes")

    def text(self, key: str = "content") -> str:
        """Return a member's text: the string, or the joined texts of its text parts."""
        known = self._members.get(key)
        pieces = known if isinstance(known, list) else []
        return join(piece if isinstance(piece, str) else _part_text(piece) for piece in pieces)

    def has(self, key: str) -> bool:
        return key in self._members

    def forget(self, key: str) -> None:
        """Remove a member that turned out to be something else."""
        self._members.pop(key, None)

    @property
    def silent(self) -> bool:
        """Whether the message has nothing but a role, if anything."""
        return not any(_speaks(known) for key, known in self._members.items() if key != "role")

    def members(self) -> Members:
        """Return the message as the client sees it, including null and empty members."""
        return {key: _member(known) for key, known in self._members.items()}

    def history(self, calls: Sequence[Raw]) -> bytes | None:
        """Return the message for upstream, or None if it is empty, because upstreams refuse empty messages."""
        said = {key: raw for key, raw in self.members().items() if bytes(raw) not in _NOTHING and key != "role"}
        if not said and not calls:
            return None
        message = {"role": Raw(b'"assistant"'), "content": NULL} | said
        return rawjson.encode(message | {"tool_calls": Raw(rawjson.array(calls))} if calls else message)


def _speaks(known: Raw | _Pieces) -> bool:
    return bytes(known) not in _NOTHING if isinstance(known, Raw) else any(piece != "" for piece in known)


def _part_text(raw: Raw) -> str:
    return text_of(object_of(raw).get("text"))


def _member(known: Raw | _Pieces) -> Raw:
    if isinstance(known, Raw):
        return known
    strings = [piece for piece in known if isinstance(piece, str)]
    if strings and len(strings) == len(known):
        return string(join(strings))
    return Raw(rawjson.array(_joined([_part(piece) for piece in known if piece != ""])))


def _part(piece: str | Raw) -> Raw:
    """Return a text that came before or after an array of parts as one more part."""
    return piece if isinstance(piece, Raw) else Raw(rawjson.encode({"type": "text", "text": piece}))


def _joined(items: list[Raw]) -> list[Raw]:
    """Join the streamed pieces of each block of reasoning, so that the blocks can be sent back."""
    try:
        pieces = [rawjson.members(raw) for raw in items]
    except NotJson:
        return items
    blocks: list[list[Members]] = []
    for piece in pieces:
        if blocks and _continues(blocks[-1][-1], piece):
            blocks[-1].append(piece)
        else:
            blocks.append([piece])
    return [Raw(rawjson.encode(_merged(block))) for block in blocks]


def _continues(last: Members, piece: Members) -> bool:
    """Whether a piece belongs to the same block as the last one.

    They must have the same type and index (OpenRouter). Without an index (LiteLLM), a thinking block ends with its
    signature.
    """
    if any(last.get(key) != piece.get(key) for key in ("type", "index")):
        return False
    return "index" in piece or ("thinking" in piece and not text_of(last.get("signature")))


def _merged(pieces: list[Members]) -> Members:
    if len(pieces) == 1:
        return pieces[0]
    merged: Members = {}
    for piece in pieces:
        merged |= {key: raw for key, raw in piece.items() if key not in merged or not rawjson.is_null(raw)}
    texts = {key: join(text_of(piece.get(key)) for piece in pieces) for key in merged if key in _BLOCK_TEXTS}
    return merged | {key: string(text) for key, text in texts.items() if text}
