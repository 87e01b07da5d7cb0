"""Takes events of the chat API apart, and puts the model's message and its tool calls together from
their deltas.

    event ──parse──> Chunk (event, choice, delta; every member as the bytes it came as) ──json──> event

A whole reply becomes such events, too, so streams and whole replies share one code path.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import groupby
from typing import Any, Literal

import msgspec
from msgspec import Raw

from proxy import rawjson
from proxy.dialects.reply import Call, as_object, is_object
from proxy.plan.plan import ToolCall
from proxy.rawjson import (
    EMPTY,
    NULL,
    Members,
    NotJson,
    elements_of,
    join,
    members_of,
    object_of,
    place,
    string,
    text_of,
)

TEXTS = ("content", "reasoning_content", "reasoning", "refusal")
"""Members that a client shows as running text (`reasoning_content`: DeepSeek, llama.cpp;
`reasoning`: OpenRouter, vLLM)."""

_PLAIN = frozenset((*TEXTS, "role", "tool_calls", "function_call"))
BLOCKS = frozenset(("reasoning_details", "thinking_blocks"))
"""Members with reasoning that the client must send back: gateways sign or encrypt its blocks, which
come in pieces (OpenRouter, LiteLLM)."""
_OPAQUE = frozenset(("reasoning_opaque", "reasoning_encrypted"))
"""The same as one value (Copilot)."""
THOUGHTS = frozenset(("reasoning_content", "reasoning", *BLOCKS, *_OPAQUE))
"""All members with reasoning alone."""
_BLOCK_TEXTS = frozenset(("text", "summary", "thinking", "data", "signature"))
_NOTHING = (b"null", b'""', b"[]", b"{}")
_NO_ERROR = (*_NOTHING, b"false", b"0")


# -- an event --------------------------------------------------------------------------------------


class _PlainChoice(msgspec.Struct, gc=False):
    delta: dict[str, str | None]
    finish_reason: None = None
    index: Literal[0] = 0
    error: None = None


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
    except rawjson.REFUSED:
        return None
    return delta if delta.keys() <= _PLAIN else None


_FLAT = ("name", "arguments")


class CallDelta:
    """One entry of `tool_calls`: its members, the members of its function (or custom tool), and the
    call that it is about, once that is known. `choice` is the number of the choice that it came
    in."""

    __slots__ = ("call", "choice", "function", "kind", "members")
    call: PartialCall

    def __init__(self, members: Members, choice: int = 0) -> None:
        self.members = members
        self.choice = choice
        self.kind = "custom" if "custom" in members else "function"
        self.function = members_of(members.get(self.kind))
        if self.kind not in members:  # gateways to the Responses API write it as there
            self.function = {key: members[key] for key in _FLAT if key in members}


class Chunk(msgspec.Struct, eq=False):
    """One event of a reply. `raw` holds the bytes that came, or None once anything has been
    changed.

    `choice` is None in events without a choice: usage at the end, content filters, errors.
    """

    members: Members
    choice: Members | None = None
    delta: Members = {}
    name: bytes | None = None
    raw: bytes | None = None
    calls: list[CallDelta] = []
    """The entries of its `tool_calls`."""
    others: list[Raw] = []
    """The choices behind the first one: Copilot splits one reply of a Claude model into several."""

    @property
    def usage(self) -> Raw | None:
        """Moonshot has it in the choice."""
        found = [part.get("usage") for part in (self.members, self.choice or {})]
        return next((usage for usage in found if not rawjson.is_null(usage)), None)

    @property
    def finish(self) -> str:
        return text_of(self.choice.get("finish_reason")) if self.choice else ""

    @property
    def failed(self) -> bool:
        """Whether upstream reports an error within a reply of status 200."""
        return any(
            bytes(part.get("error", NULL)) not in _NO_ERROR
            for part in (self.members, self.choice or {})
        )

    @property
    def says(self) -> bool:
        """Whether the delta holds anything but a role."""
        return self.says_beside(())

    def says_beside(self, keys: Collection[str]) -> bool:
        """Whether the delta holds anything but a role and these members."""
        return any(
            bytes(raw) not in _NOTHING
            for key, raw in self.delta.items()
            if key != "role" and key not in keys
        )

    def part(self, delta: Members) -> Chunk:
        """Return a new event of the same reply with this delta, without this event's usage, error
        or finish reason."""
        members = {key: raw for key, raw in self.members.items() if key not in ("usage", "error")}
        return Chunk(
            members, {"index": Raw(b"0"), "delta": EMPTY, "finish_reason": NULL}, delta, self.name
        )

    @property
    def split(self) -> bool:
        """Whether this is more, or something else, than the first choice."""
        return bool(self.others) or place((self.choice or {}).get("index")) not in (0, None)

    def apart(self, key: str = "delta") -> list[Chunk]:
        """Return an event for each choice, each as the first one. The last has what belongs to no
        choice."""
        found = [self, *(_of_choice(self.members, raw, key) for raw in self.others)]
        for one in found:
            one.name = self.name
            one.raw = None
            one.others = []
            one.choice = (one.choice or {}) | {"index": Raw(b"0")}
        for one in found[:-1]:
            one.members = self.part({}).members
        return found

    @property
    def is_whole(self) -> bool:
        """Whether it has a message instead of a delta. Gateways that only act as if they streamed
        send the whole reply as one event."""
        return not self.delta and rawjson.is_object((self.choice or {}).get("message"))

    def open_message(self) -> None:
        """Read a whole message as a delta."""
        choice = self.choice or {}
        others = {key: raw for key, raw in choice.items() if key != "message"}
        made = _of_choice(
            self.members, Raw(rawjson.encode(others | {"delta": choice["message"]})), "delta"
        )
        self.choice = made.choice
        self.delta = made.delta
        self.calls = made.calls
        self.put({"object": Raw(b'"chat.completion.chunk"')})

    @property
    def parts(self) -> list[Members]:
        """The parts of its content (Mistral); none if that is a string."""
        given = self.delta.get("content")
        return list(map(object_of, rawjson.elements(given))) if rawjson.is_array(given) else []

    def take(self, keys: Iterable[str]) -> Chunk:
        """Move these members of the delta to a new event and return it."""
        part = self.part({key: self.delta[key] for key in keys})
        self.put_delta({key: raw for key, raw in self.delta.items() if key not in part.delta})
        return part

    def saying(self, key: str) -> Callable[[str], Chunk]:
        """Return what makes an event of the same reply with a text as this member."""
        return lambda text: self.part({key: string(text)})

    def listing(self, part: Members) -> Callable[[str], Chunk]:
        """Return what makes an event of the same reply with this part of the content and another
        text."""
        return lambda text: self.holding(part | {"text": string(text)})

    def holding(self, part: Members) -> Chunk:
        """Return a new event of the same reply with this part of the content."""
        return self.part({"content": Raw(rawjson.array([rawjson.encode(part)]))})

    def take_end(self) -> Chunk:
        """Move the finish reason, the usage and other members of the reply's end to a new event and
        return it."""
        end = Chunk(self.members, self.choice, {}, self.name)
        self.members = self.part({}).members
        self.raw = None
        self.put_finish(NULL)
        return end

    def put(self, members: Members) -> None:
        self.members = self.members | members
        self.raw = None

    def put_finish(self, reason: Raw) -> None:
        self.choice = (self.choice or {}) | {"finish_reason": reason}
        self.raw = None

    def put_delta(self, delta: Members) -> None:
        self.delta = delta
        self.raw = None

    def json(self) -> bytes:
        if self.choice is None:
            return rawjson.encode(self.members)
        delta = (
            {"delta": Raw(rawjson.encode(self.delta))}
            if self.delta or "delta" in self.choice
            else {}
        )
        choices = rawjson.array([rawjson.encode(self.choice | delta), *self.others])
        return rawjson.encode(self.members | {"choices": Raw(choices)})


def parse(data: bytes, raw: bytes, name: bytes | None) -> Chunk:
    """Parse an event. Raises NotJson for any unknown shape, which must be left unchanged."""
    rawjson.check_utf8(data)
    chunk = _chunk(rawjson.members(data), "delta")
    chunk.raw = raw
    chunk.name = name
    return chunk


def _chunk(members: Members, key: str) -> Chunk:
    """Return the event with these members, whose choice has this `key`. Raises NotJson."""
    choices = (
        [] if rawjson.is_null(members.get("choices")) else rawjson.elements(members["choices"])
    )
    if not choices:
        return Chunk(members)
    chunk = _of_choice(members, choices[0], key)
    chunk.others = choices[1:]
    return chunk


def _of_choice(members: Members, raw: Raw, key: str) -> Chunk:
    """Return the event with these members and this choice. Raises NotJson."""
    choice = rawjson.members(raw)
    chunk = Chunk(members, choice, members_of(choice.get(key)))
    older = chunk.delta.get("function_call", NULL)
    if bytes(older) not in _NOTHING:
        rawjson.members(older)
    if not rawjson.is_null(chunk.delta.get("tool_calls")):
        number = place(choice.get("index")) or 0
        entries = rawjson.elements(chunk.delta["tool_calls"])
        chunk.calls = [CallDelta(rawjson.members(entry), number) for entry in entries]
    return chunk


def as_events(members: Members) -> list[Chunk]:
    """Return a whole reply as the events of a stream. Raises NotJson for anything else."""
    whole = _chunk(members, "message")
    if whole.choice is None or "message" not in whole.choice or (whole.failed and not whole.says):
        raise NotJson("no chat completion")
    whole.members = whole.members | {"object": Raw(b'"chat.completion.chunk"')}
    choices = whole.apart("message") if whole.others else [whole]
    for number, one in enumerate(choices[1:], 1):
        one.choice = (one.choice or {}) | {"index": Raw(b"%d" % number)}
    ends = [_end_of_choice(one) for one in choices]
    if (spent := ends[-1].usage) is None:
        return [*choices, *ends]
    ends[-1].members = choices[-1].members
    return [*choices, *ends, Chunk(choices[-1].members | {"choices": Raw(b"[]"), "usage": spent})]


def _end_of_choice(one: Chunk) -> Chunk:
    """Make a whole reply's choice one of a stream; returns the event that ends it."""
    one.choice = {key: raw for key, raw in (one.choice or {}).items() if key != "message"} | {
        "delta": EMPTY
    }
    for number, call in enumerate(one.calls):
        call.members = (
            {"index": Raw(b"%d" % number)} | call.members | {"index": Raw(b"%d" % number)}
        )
    if one.calls:
        one.delta["tool_calls"] = Raw(
            rawjson.array([rawjson.encode(call.members) for call in one.calls])
        )
    return one.take_end()


def held(delta: Members, *, aloud: bool) -> list[str]:
    """Return the members of a delta that only a visible round may show: signed or encrypted
    reasoning, but for blocks of it if thinking is shown as it comes."""

    def waits(key: str, raw: Raw) -> bool:
        if key in (*TEXTS, "tool_calls") or rawjson.is_null(raw):
            return False
        if key in BLOCKS:
            return not aloud
        return key in _OPAQUE or _signs(key, raw)

    return [key for key, raw in delta.items() if waits(key, raw)]


def _signs(key: str, raw: Raw) -> bool:
    return "signature" in key or b"signature" in bytes(raw)


# -- tool calls ------------------------------------------------------------------------------------

_TEXT = {"function": "arguments", "custom": "input"}


class PartialCall(Call):
    """One tool call as received so far."""

    def __init__(self) -> None:
        super().__init__()
        self.ours = None
        self.id = ""
        self.lent: Members = {}  # A signature that another call carried
        self.kind = "function"
        self.size = 0  # the characters of its arguments
        self._name: list[str] = []
        self._name_size = 0
        self._arguments: list[str] = []
        self._members: Members = {}
        self._function: Members = {}

    def add(self, delta: CallDelta) -> None:
        self.kind = delta.kind if delta.function else self.kind
        self.id = self.id or text_of(delta.members.get("id"))
        name = text_of(delta.function.get("name"))
        given = delta.function.get(_TEXT[delta.kind], NULL)
        # some servers send an object instead of its text
        arguments = (
            text_of(given)
            if rawjson.is_null(given) or rawjson.is_string(given)
            else bytes(given).decode()
        )
        if name and not self.named and (len(name) != self._name_size or name != self.name):
            self._name.append(name)
            self._name_size += len(name)
        if arguments:
            self._arguments.append(arguments)
            self.size += len(arguments)
        self._members |= {
            key: raw
            for key, raw in delta.members.items()
            if key not in ("index", "id", delta.kind, *_FLAT)
        }
        self._function |= delta.function

    @property
    def name(self) -> str:
        """The name as the model wrote it, or that of our tool."""
        if len(self._name) > 1:
            self._name = ["".join(self._name)]
        return self.ours or (self._name[0] if self._name else "")

    @property
    def arguments(self) -> str:
        return join(self._arguments)

    @property
    def named(self) -> bool:
        """Whether the name is probably complete, because arguments follow it."""
        return bool(self._name and self._arguments)

    @property
    def is_complete(self) -> bool:
        """Whether the arguments are a complete JSON object."""
        return is_object(self.arguments)

    @property
    def signature(self) -> Members:
        """The members that sign the call. Gemini puts them beside the function, under varying
        names."""
        return {
            key: raw for key, raw in self._members.items() if key not in _TEXT and _signs(key, raw)
        }

    def identify(self, id: str) -> None:
        self.id = id

    def call(self) -> ToolCall:
        return ToolCall(self.id, self.name, self.arguments)

    def result(self, text: str, part: str) -> bytes:
        return rawjson.encode({"role": "tool", "tool_call_id": self.id, "content": text})

    def sent(self) -> Raw:
        """The call for the message that goes back upstream."""
        return self._written(
            as_object(self.arguments) if self.kind == "function" else self.arguments
        )

    def raw(self) -> Raw:
        """The call as the model made it."""
        return self._written(self.arguments)

    def _written(self, arguments: str) -> Raw:
        function = self._function | {"name": string(self.name), _TEXT[self.kind]: string(arguments)}
        members = {key: raw for key, raw in self._members.items() if not rawjson.is_null(raw)}
        start = {"id": string(self.id)} if self.id else {}
        call = (
            start
            | {"type": string(self.kind)}
            | members
            | {self.kind: Raw(rawjson.encode(function))}
        )
        return Raw(rawjson.encode(call))


class ToolCalls:
    """All calls of one round, told apart.

    Servers differ. Some send the id with the first delta only, others (an old vLLM) send a new one
    with each. Names come in pieces, repeatedly, or after the arguments (SGLang). The `index` is
    missing (Gemini, Mistral), always 0 with a new id (Ollama), or changes within a call (Cerebras),
    and each choice counts from 0. All of these are accepted, and the client sees 0, 1, 2.
    """

    def __init__(self) -> None:
        self.all: list[PartialCall] = []
        # by choice and index, and by id
        self._known: dict[tuple[int, int] | str | None, PartialCall] = {}

    def take(self, delta: CallDelta) -> PartialCall:
        """Add an entry of `tool_calls` to its call, and return that."""
        number = place(delta.members.get("index"))
        id = text_of(delta.members.get("id"))
        index = None if number is None else (delta.choice, number)
        call = self._continued(index, id, text_of(delta.function.get("name")))
        if call is None:
            self.all.append(call := PartialCall())
        if not call.id:
            self._known |= {key: call for key in (index, id) if key not in (None, "")}
        call.add(delta)
        return call

    def adopt(self, name: str, arguments: str) -> PartialCall:
        """Add a call that came as text."""
        self.all.append(call := PartialCall())
        call.add(
            CallDelta({"function": Raw(rawjson.encode({"name": name, "arguments": arguments}))})
        )
        return call

    def _continued(self, index: tuple[int, int] | None, id: str, name: str) -> PartialCall | None:
        """Return the call that a delta with these continues, or None if it begins a new one."""
        if call := self._known.get(index):
            return None if name and id and call.id and id != call.id else call
        last = self.all[-1] if self.all else None
        if not id and not name:
            return last
        if index is not None:
            return None
        if id and (name or id in self._known):
            return self._known.get(id)
        return None if last is None or (last.id if id else last.named) else last


# -- a message -------------------------------------------------------------------------------------


class ReplyMessage:
    """A message built from its deltas: strings are joined, lists are extended, and other values are
    replaced.

    Tool calls are kept elsewhere.
    """

    def __init__(self) -> None:
        self.parts: dict[str, Raw | list[str | Raw]] = {}

    def add(self, delta: Members) -> None:
        for key, raw in delta.items():
            if key == "role" or rawjson.is_null(raw):
                self.parts.setdefault(key, raw)
            elif key == "function_call":
                self.parts[key] = _one_call(self.parts.get(key), raw)
            elif key != "tool_calls":
                try:
                    self.extend(
                        key, [text_of(raw)] if rawjson.is_string(raw) else rawjson.elements(raw)
                    )
                except NotJson:
                    self.parts[key] = raw

    def extend(self, key: str, pieces: Sequence[str | Raw]) -> None:
        known = self.parts.get(key)
        if isinstance(known, list):
            known += pieces
        else:
            self.parts[key] = list(pieces)

    def text(self, key: str = "content") -> str:
        """Return a member's text: the string, or the joined texts of its text parts."""
        known = self.parts.get(key)
        pieces = known if isinstance(known, list) else []
        return join(
            piece if isinstance(piece, str) else text_of(object_of(piece).get("text"))
            for piece in pieces
        )

    def cut(self, key: str, end: str, left: str) -> None:
        """Replace the end of a text, which may stand in several pieces."""
        known: Any = self.parts[key]
        rest = len(self.text(key).removesuffix(end))
        pieces: list[str | Raw] = []
        for piece in known:
            text = piece if isinstance(piece, str) else text_of(object_of(piece).get("text"))
            stays = text[:rest]
            rest -= len(stays)
            if stays == text:
                pieces.append(piece)
            elif stays:
                pieces.append(stays)
        pieces += [left] if left.strip() else []
        says = any(not isinstance(piece, str) or piece.strip() for piece in pieces)
        self.parts[key] = pieces if says else NULL

    def members(self) -> Members:
        """Return the message as the client sees it, including null and empty members."""
        return {
            key: _joined(known) if isinstance(known, list) else known
            for key, known in self.parts.items()
        }

    def history(self, calls: Sequence[Raw]) -> bytes | None:
        """Return the message for upstream, or None if it is empty, because upstreams refuse empty
        messages."""
        said = {
            key: raw
            for key, raw in self.members().items()
            if bytes(raw) not in _NOTHING and key != "role"
        }
        if not said and not calls:
            return None
        message = {"role": Raw(b'"assistant"'), "content": NULL} | said
        return rawjson.encode(
            message | {"tool_calls": Raw(rawjson.array(calls))} if calls else message
        )


def _one_call(known: Any, piece: Raw) -> Raw:
    """Return the older API's call with one more piece of its name or its arguments."""
    before = object_of(known if isinstance(known, Raw) else None)
    more = object_of(piece)
    joined = {
        key: string(text_of(before[key]) + text_of(more[key]))
        for key in before.keys() & more.keys()
    }
    return Raw(rawjson.encode(before | more | joined))


def _joined(pieces: list[str | Raw]) -> Raw:
    """Return a text, or else an array in which the streamed pieces of each block of reasoning are
    one, so that the blocks can be sent back. A text before or after an array of parts becomes one
    more part."""
    strings = [piece for piece in pieces if isinstance(piece, str)]
    if strings and len(strings) == len(pieces):
        return string(join(strings))
    items: list[Raw] = []
    for texts, run in groupby(filter(None, pieces), key=lambda piece: isinstance(piece, str)):
        found: Any = list(run)
        items += [Raw(rawjson.encode({"type": "text", "text": join(found)}))] if texts else found
    blocks: list[list[Members]] = []
    try:
        for part in map(rawjson.members, items):
            if blocks and _continues(blocks[-1][-1], part):
                blocks[-1].append(part)
            else:
                blocks.append([part])
    except NotJson:
        return Raw(rawjson.array(items))
    return Raw(rawjson.array([rawjson.encode(_merged(block)) for block in blocks]))


def _continues(last: Members, piece: Members) -> bool:
    """Whether a piece belongs to the same block as the last one: they must have the same type and
    index (OpenRouter). Without an index (LiteLLM), a thinking block ends with its signature."""
    if any(last.get(key) != piece.get(key) for key in ("type", "index")):
        return False
    return "index" in piece or ("thinking" in piece and not text_of(last.get("signature")))


def _merged(pieces: list[Members]) -> Members:
    if len(pieces) == 1:
        return pieces[0]
    merged: Members = {}
    for piece in pieces:
        merged |= {
            key: raw for key, raw in piece.items() if key not in merged or not rawjson.is_null(raw)
        }
    texts = {
        key: join(text_of(piece.get(key)) for piece in pieces)
        for key in merged
        if key in _BLOCK_TEXTS
    }
    if rawjson.is_array(merged.get("thinking")):  # Mistral
        merged["thinking"] = Raw(
            rawjson.array(part for piece in pieces for part in elements_of(piece.get("thinking")))
        )
    return merged | {key: string(text) for key, text in texts.items() if text}
