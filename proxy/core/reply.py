"""A reply put together from its deltas: the message that a model wrote, and its tool calls while they come in.

Servers differ in how they stream a call. Ids stand on the first delta only, names arrive in pieces or are repeated,
`index` is missing, or always 0 with a new id. All of that is taken here.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from msgspec import Raw

from proxy.core import rawjson
from proxy.core.transcript import Call

MAX_ARGUMENTS = 1 << 20
"""Bytes of arguments for one call of ours; a search pattern and a path need a few hundred."""
MAX_REPLY = 64 << 20
"""Bytes of one reply that are held in memory."""

Members = dict[str, Raw]

SIGNED = ("reasoning_details", "thinking_blocks")
"""Where gateways put reasoning that is signed or encrypted (OpenRouter, LiteLLM)."""


class TooLarge(ValueError):
    """A reply that grows beyond all reason."""


class PartialCall:
    """One tool call as far as it has come. `mine` is None as long as its name may still grow."""

    def __init__(self) -> None:
        self.id = ""
        self.name = ""
        self.mine: bool | None = None
        self.shown: int | None = None
        """Its index in what the client sees."""
        self.pending: list[Members] = []
        """Deltas held back until it is known whose call it is."""
        self._arguments: list[str] = []
        self._size = 0
        self._extras: Members = {}

    @property
    def arguments(self) -> str:
        return "".join(self._arguments)

    @property
    def signed(self) -> Raw | None:
        """Gemini's thought signature, which stands beside the function."""
        return self._extras.get("extra_content")

    def add(self, delta: Members, function: Members) -> None:
        """Take one delta. Raises TooLarge."""
        self.id = self.id or text_of(delta.get("id"))
        piece = text_of(function.get("name"))
        if not self._arguments and piece != self.name:
            self.name += piece
        arguments = text_of(function.get("arguments"))
        if arguments:
            self._arguments.append(arguments)
            self._size += len(arguments)
            if self.mine is not False and self._size > MAX_ARGUMENTS:
                raise TooLarge(f"more than {MAX_ARGUMENTS} bytes of arguments for {self.name}")
        self._extras |= {key: raw for key, raw in delta.items() if key not in ("index", "id", "function")}

    def undecided(self, names: Iterable[str]) -> bool:
        """Whether the name may still become, or stop being, one of these."""
        return not self._arguments and any(name.startswith(self.name) for name in names)

    def call(self) -> Call:
        return Call(self.id, self.name, self.arguments)

    def raw(self) -> Raw:
        """The call as it stands in a message."""
        kept = {"type": Raw(b'"function"')} | {
            key: raw for key, raw in self._extras.items() if not rawjson.is_null(raw)
        }
        function = {"name": self.name, "arguments": self.arguments}
        return Raw(rawjson.encode({"id": self.id, **kept, "function": function}))


class Message:
    """One round's assistant message, folded from its deltas: strings join, lists grow, of the rest the last counts."""

    def __init__(self) -> None:
        self.calls: list[PartialCall] = []
        self._by_index: dict[int, PartialCall] = {}
        self._texts: dict[str, list[str]] = {"content": []}
        self._lists: dict[str, list[Raw]] = {}
        self._others: Members = {}
        self._size = 0

    @property
    def speaks(self) -> bool:
        """Whether there is any text yet."""
        return any(self._texts["content"][:1])

    @property
    def content(self) -> str:
        return "".join(self._texts["content"])

    def add(self, delta: Members) -> None:
        """Take everything of a delta but its tool calls. Raises TooLarge."""
        for key, raw in delta.items():
            if key in ("role", "tool_calls") or rawjson.is_null(raw):
                continue
            self._size += len(memoryview(raw))
            if rawjson.is_string(raw):
                if text := rawjson.string(raw):
                    self._texts.setdefault(key, []).append(text)
            elif rawjson.is_array(raw):
                self._lists.setdefault(key, []).extend(rawjson.elements(raw))
            else:
                self._others[key] = raw
        if self._size > MAX_REPLY:
            raise TooLarge(f"a reply of more than {MAX_REPLY} bytes")

    def call_of(self, delta: Members) -> PartialCall:
        """The call that a delta belongs to, a new one where it begins one."""
        index, id = _index(delta.get("index")), text_of(delta.get("id"))
        if index is None:
            known = next((call for call in self.calls if id and call.id == id), None)
            call = known or (None if id or not self.calls else self.calls[-1])
        else:
            call = self._by_index.get(index)
            if call and id and call.id and call.id != id:
                call = None
        return call or self._begin(index)

    def _begin(self, index: int | None) -> PartialCall:
        call = PartialCall()
        self.calls.append(call)
        if index is not None:
            self._by_index[index] = call
        return call

    def raw(self, calls: Iterable[PartialCall]) -> bytes:
        """The message with these of its calls."""
        texts = {key: "".join(pieces) for key, pieces in self._texts.items() if key != "content"}
        lists = {key: _joined(items) for key, items in self._lists.items()}
        message = {"role": "assistant", "content": self.content or None, **texts, **lists, **self._others}
        raws = [call.raw() for call in calls]
        return rawjson.encode({**message, "tool_calls": raws} if raws else message)


def text_of(raw: Raw | None) -> str:
    """A string's text; whatever else a server puts in its place is none."""
    return rawjson.string(raw) if raw is not None and rawjson.is_string(raw) else ""


def held(delta: Members) -> Members:
    """The part of a delta that only its own round may show: reasoning that is signed or encrypted."""
    return {
        key: delta[key]
        for key in SIGNED
        if key in delta and (b'"signature"' in bytes(delta[key]) or b'"data"' in bytes(delta[key]))
    }


def _index(raw: Raw | None) -> int | None:
    text = b"" if raw is None else bytes(raw)
    return int(text) if text.isdigit() and len(text) < 6 else None


def _joined(items: list[Raw]) -> list[Raw]:
    """Reasoning arrives as many pieces of few blocks; pieces of one block join again."""
    joined: list[Members] = []
    for raw in items:
        try:
            item = rawjson.members(raw)
        except rawjson.NotJson:
            return items
        if joined and "index" in item and _block(item) == _block(joined[-1]):
            joined[-1] |= _merged(joined[-1], item)
        else:
            joined.append(item)
    return [Raw(msgspec.json.encode(item)) for item in joined]


def _block(item: Members) -> tuple[bytes, bytes]:
    return bytes(item.get("type", Raw(b""))), bytes(item.get("index", Raw(b"")))


def _merged(first: Members, second: Members) -> Members:
    return {
        key: Raw(rawjson.encode(text_of(first.get(key)) + text_of(raw)))
        if key in ("text", "summary", "data", "signature") and rawjson.is_string(raw)
        else raw
        for key, raw in second.items()
    }
