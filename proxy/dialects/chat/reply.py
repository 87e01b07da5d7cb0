"""A reply as it comes in: one event taken apart, and the message that a model wrote put together from its deltas.

    event ──parse──> Chunk (event, choice, delta; every member as the bytes it came as) ──encode──> event

A whole reply is a chunk as well, with its `message` for a delta: there is one way through, streamed or not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Raw

from proxy.core import rawjson
from proxy.core.rawjson import NotJson
from proxy.core.turn import Broken

MAX_REPLY = 32 << 20
"""Bytes of one round that are held, in text and in calls: some eight million tokens."""

Members = dict[str, Raw]

_Pieces = list[str | Raw]

EMPTY = Raw(b"{}")
NULL = Raw(b"null")
TEXTS = ("content", "reasoning_content", "reasoning", "refusal")
"""What a client shows as running text (`reasoning_content`: DeepSeek, llama.cpp; `reasoning`: OpenRouter, vLLM)."""

_BLOCKS = frozenset(("reasoning_details", "thinking_blocks", "reasoning_opaque", "reasoning_encrypted"))
"""Reasoning as gateways hand it on to be given back: signed or encrypted as a whole (OpenRouter, LiteLLM, Copilot)."""
_BLOCK_TEXTS = frozenset(("text", "summary", "thinking", "data", "signature"))
_NOTHING = (b"null", b'""', b"[]", b"{}")


# -- an event ---------------------------------------------------------------------------------------------------------


class CallDelta:
    """One entry of `tool_calls`: its members, and those of the function (or the custom tool) in it."""

    __slots__ = ("function", "kind", "members")

    def __init__(self, members: Members) -> None:
        self.members = members
        self.kind = "custom" if "custom" in members else "function"
        self.function = members_of(members.get(self.kind))


class Chunk:
    """One event of a reply; `raw` is None as soon as anything differs from the bytes that came.

    `choice` is None in events that are about no choice: usage at the end, content filters, errors.
    """

    __slots__ = ("calls", "choice", "delta", "key", "members", "name", "raw")

    def __init__(self, members: Members, choice: Members | None, delta: Members, key: str) -> None:
        self.members = members
        self.choice = choice
        self.delta = delta
        self.key = key
        """Where the delta stands in the choice: `delta`, or `message` in a whole reply."""
        self.calls: list[CallDelta] = []
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
        """Whether upstream says in the middle of a reply of status 200 that it cannot go on."""
        return not rawjson.is_null(self.members.get("error"))

    @property
    def void(self) -> bool:
        """Whether nothing is left of it that a client could use."""
        return self.choice is not None and not self.finish and _says_nothing(self.delta)

    def part(self, delta: Members) -> Chunk:
        """An event beside this one that has this delta, and no more of what this one says."""
        members = {key: raw for key, raw in self.members.items() if key not in ("usage", "error")}
        index = (self.choice or {}).get("index", Raw(b"0"))
        part = Chunk(members, {"index": index, self.key: EMPTY, "finish_reason": NULL}, delta, self.key)
        part.name = self.name
        return part

    def take(self, keys: Iterable[str]) -> Chunk:
        """These members of the delta, taken out into an event of their own; log probabilities go with the content."""
        part = self.part({key: self.delta[key] for key in keys})
        if self.choice and part.choice and "content" in part.delta and "logprobs" in self.choice:
            part.choice["logprobs"] = self.choice["logprobs"]
        self.drop(*part.delta)
        return part

    def take_end(self) -> Chunk:
        """How the reply ends, taken out into an event of its own: finish reason, usage and whatever stands beside."""
        end = Chunk(self.members, self.choice, {}, self.key)
        end.name = self.name
        end.put_choice("logprobs", NULL)
        self.members = self.part({}).members
        self.put_choice("finish_reason", NULL)
        return end

    def put(self, members: Members) -> None:
        self.members, self.raw = self.members | members, None

    def put_choice(self, key: str, raw: Raw) -> None:
        """Replace a member of the choice, where it has one of that name."""
        if self.choice and key in self.choice:
            self.choice, self.raw = self.choice | {key: raw}, None

    def put_delta(self, delta: Members) -> None:
        self.delta, self.raw = delta, None

    def drop(self, *keys: str) -> None:
        """Without these members of the delta. Log probabilities are only of text that is shown."""
        self.put_delta({key: raw for key, raw in self.delta.items() if key not in keys})
        if not any(text_of(self.delta.get(key)) for key in TEXTS):
            self.put_choice("logprobs", NULL)

    def json(self) -> bytes:
        if self.choice is None:
            return rawjson.encode(self.members)
        delta = {self.key: Raw(rawjson.encode(self.delta))} if self.delta or self.key in self.choice else {}
        choices = rawjson.array([rawjson.encode(self.choice | delta)])
        return rawjson.encode(self.members | {"choices": Raw(choices)})


def parse(data: bytes) -> Chunk:
    """An event's data, or a whole reply. Raises NotJson for every shape that is not known: it is to be left alone."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        raise NotJson("not UTF-8") from error
    members = rawjson.members(data)
    choices = [] if rawjson.is_null(members.get("choices")) else rawjson.elements(members["choices"])
    if len(choices) > 1:
        raise NotJson("several choices, where one was asked for")
    if not choices:
        return Chunk(members, None, {}, "delta")
    choice = rawjson.members(choices[0])
    key = "message" if "message" in choice else "delta"
    chunk = Chunk(members, choice, members_of(choice.get(key)), key)
    if not rawjson.is_null(chunk.delta.get("tool_calls")):
        chunk.calls = [CallDelta(rawjson.members(raw)) for raw in rawjson.elements(chunk.delta["tool_calls"])]
    return chunk


def as_events(whole: Chunk) -> list[Chunk]:
    """A whole reply as the events of a stream: for a server that streams one round and not the next."""
    end = whole.take_end()
    spent = end.usage
    events = [whole, end]
    for event in events:
        event.key = "delta"
        event.members = whole.members | {"object": Raw(b'"chat.completion.chunk"')}
        event.choice = {key: raw for key, raw in (event.choice or {}).items() if key != "message"} | {"delta": EMPTY}
    if spent is not None:
        events.append(Chunk(whole.members | {"choices": Raw(b"[]"), "usage": spent}, None, {}, "delta"))
    return events


def held(delta: Members) -> list[str]:
    """Which members of a delta only its own round may show: reasoning that is signed or encrypted."""
    return [key for key, raw in delta.items() if _is_signed(key, raw) and not rawjson.is_null(raw)]


def signature(members: Members) -> Members:
    """What signs a tool call: Gemini's stands beside the function, by one name or another."""
    return {key: raw for key, raw in members.items() if key not in ("id", "function", "custom") and _signs(key, raw)}


def _is_signed(key: str, raw: Raw) -> bool:
    return key in _BLOCKS or (key not in TEXTS and key != "tool_calls" and _signs(key, raw))


def _signs(key: str, raw: Raw) -> bool:
    return "signature" in key or b"signature" in bytes(raw)


def _says_nothing(delta: Members) -> bool:
    return all(bytes(raw) in _NOTHING for raw in delta.values())


# -- a message --------------------------------------------------------------------------------------------------------


class ReplyMessage:
    """A message folded from its deltas: strings join, lists grow, of everything else the last counts.

    Tool calls are not in here: see `toolcalls`.
    """

    def __init__(self) -> None:
        self._members: dict[str, Raw | _Pieces] = {}
        self._size = 0

    def add(self, delta: Members) -> None:
        """Raises Broken when it grows beyond MAX_REPLY."""
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
        """Raises Broken when it grows beyond MAX_REPLY."""
        self._extend(key, [text], len(text))

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
        """A member's text: that of a string, or of all parts that are text."""
        known = self._members.get(key)
        pieces = known if isinstance(known, list) else []
        return join(piece if isinstance(piece, str) else _part_text(piece) for piece in pieces)

    def has(self, key: str) -> bool:
        return key in self._members

    def speaks(self, key: str) -> bool:
        """Whether it has any text there."""
        known = self._members.get(key)
        return isinstance(known, list) and any(isinstance(piece, str) and piece for piece in known)

    def members(self) -> Members:
        """The message as it is shown: null and empty members and all."""
        return {key: _member(known) for key, known in self._members.items()}

    def history(self, calls: Sequence[Raw]) -> bytes | None:
        """The message as it goes back upstream; None where nothing is in it, which nobody would take."""
        said = {key: raw for key, raw in self.members().items() if bytes(raw) not in _NOTHING and key != "role"}
        if not said and not calls:
            return None
        message = {"role": Raw(b'"assistant"'), "content": NULL} | said
        return rawjson.encode(message | {"tool_calls": Raw(rawjson.array(calls))} if calls else message)


def text_of(raw: Raw | None) -> str:
    """A string's text; whatever else a server puts in its place is none."""
    if raw is None or not rawjson.is_string(raw):
        return ""
    try:
        return rawjson.string(raw)
    except NotJson:
        return ""


def members_of(raw: Raw | None) -> Members:
    """An object's members; none of null, or of what is not there. Raises NotJson."""
    return {} if raw is None or rawjson.is_null(raw) else rawjson.members(raw)


def object_of(raw: Raw | None) -> Members:
    """An object's members; none of anything else."""
    try:
        return members_of(raw)
    except NotJson:
        return {}


def string(text: str) -> Raw:
    return Raw(rawjson.encode(text))


def join(pieces: Iterable[str]) -> str:
    """The pieces as one. Servers that escape whatever is not ASCII can cut a surrogate pair in two."""
    text = "".join(pieces)
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    return text


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
    """A text that came before or behind an array of parts, as one of them."""
    return piece if isinstance(piece, Raw) else Raw(rawjson.encode({"type": "text", "text": piece}))


def _joined(items: list[Raw]) -> list[Raw]:
    """Reasoning streams as many pieces of few blocks: those join again, so that they can be given back."""
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
    """By type and index (OpenRouter); where there is none (LiteLLM) a block of thinking ends with its signature."""
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
