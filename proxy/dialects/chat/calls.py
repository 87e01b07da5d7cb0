"""Tells the tool calls of one round apart, and puts each together from its deltas.

Servers differ. Some send the id with the first delta only, others (an old vLLM) send a new one with each. Names come in
pieces, repeatedly, or after the arguments (SGLang). The `index` is missing (Gemini, Mistral), always 0 with a new id
(Ollama), or changes within a call (Cerebras). This module accepts all of these, and the client sees 0, 1, 2.

Other servers do not parse all calls (llama.cpp ignores `tool_choice: none`), so a text that consists of calls of our
tools and nothing else is taken for them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from msgspec import Raw

from proxy import rawjson
from proxy.dialects.chat.chunks import CallDelta, signature
from proxy.dialects.reply import MAX_REPLY, Call, ToolNames, is_object
from proxy.plan.message import ToolCall
from proxy.plan.turn import Broken
from proxy.rawjson import NULL, Members, join, place, string, text_of

CALL_SIZE = 1024
"""Roughly the bytes that a call takes besides its arguments, so that endless empty calls also reach the size limit."""

_TEXT = {"function": "arguments", "custom": "input"}


class PartialCall(Call):
    """One tool call as received so far."""

    def __init__(self) -> None:
        super().__init__()
        self.ours = None
        self.id = ""
        self.number = NULL
        """Its number in the client's stream."""
        self.lent: Members = {}
        """A signature that another call carried."""
        self.kind = "function"
        self.size = 0
        """The approximate number of bytes in its arguments."""
        self._name: list[str] = []
        self._name_size = 0
        self._arguments: list[str] = []
        self._members: Members = {}
        self._function: Members = {}

    def add(self, delta: CallDelta) -> int:
        """Take one delta; returns its size in bytes."""
        self.kind = delta.kind if delta.function else self.kind
        self.id = self.id or text_of(delta.members.get("id"))
        piece = text_of(delta.function.get("name"))
        if piece and not self.named and (len(piece) != self._name_size or piece != self.name):
            self._name.append(piece)
            self._name_size += len(piece)
        arguments = _piece(delta)
        if arguments:
            self._arguments.append(arguments)
        others = {key: raw for key, raw in delta.members.items() if key not in ("index", "id", delta.kind)}
        self._members |= others
        self._function |= delta.function
        self.size += len(arguments)
        return len(piece) + len(arguments) + sum(len(memoryview(raw)) for raw in others.values())

    @property
    def name(self) -> str:
        if len(self._name) > 1:
            self._name = ["".join(self._name)]
        return self._name[0] if self._name else ""

    @property
    def arguments(self) -> str:
        return join(self._arguments)

    @property
    def named(self) -> bool:
        """Whether the name is probably complete, because arguments follow it."""
        return bool(self._name and self._arguments)

    @property
    def whole(self) -> bool:
        """Whether the arguments are a complete JSON object."""
        return is_object(self.arguments)

    def rename(self, name: str) -> None:
        """Use this name from now on, in place of the one that the model wrote."""
        self._name, self._name_size = [name], len(name)

    @property
    def signature(self) -> Members:
        return signature(self._members)

    def identify(self, id: str) -> None:
        self.id = id

    def call(self) -> ToolCall:
        return ToolCall(self.id, self.name, self.arguments)

    def raw(self) -> Raw:
        """The call as the model made it, for the message that goes back upstream."""
        function = {"name": string(self.name), _TEXT[self.kind]: string(self.arguments)}
        members = {key: raw for key, raw in self._members.items() if not rawjson.is_null(raw)}
        start = {"id": string(self.id)} if self.id else {}
        call = start | {"type": string(self.kind)} | members
        return Raw(rawjson.encode(call | {self.kind: Raw(rawjson.encode(self._function | function))}))

    def shown_as(self) -> Raw:
        """The call as the client sees it."""
        return Raw(rawjson.encode(rawjson.members(self.raw()) | self.lent))


class ToolCalls:
    """All calls of one round."""

    def __init__(self) -> None:
        self.all: list[PartialCall] = []
        self._by_index: dict[int, PartialCall] = {}
        self._by_id: dict[str, PartialCall] = {}
        self._size = 0

    def take(self, delta: CallDelta) -> PartialCall:
        """Add an entry of `tool_calls` to its call, and return that. Raises Broken if the calls grow too large."""
        call = self._known(delta) or self._begin(delta)
        self._size += call.add(delta)
        if self._size > MAX_REPLY:
            raise Broken(f"tool calls of more than {MAX_REPLY} bytes")
        return call

    def adopt(self, name: str, arguments: str) -> PartialCall:
        """Add a call that came as text."""
        function = Raw(rawjson.encode({"name": name, "arguments": arguments}))
        call = PartialCall()
        call.add(CallDelta({"function": function}))
        self.all.append(call)
        return call

    def _known(self, delta: CallDelta) -> PartialCall | None:
        """Return the call that a delta continues, or None if it begins a new one."""
        index, id = place(delta.members.get("index")), text_of(delta.members.get("id"))
        name = text_of(delta.function.get("name"))
        last = self.all[-1] if self.all else None
        if index is not None and index in self._by_index:
            call = self._by_index[index]
            return None if name and id and call.id and id != call.id else call
        if not id and not name:
            return last
        if index is not None:
            return None
        if id:
            return self._by_id.get(id)
        return None if last is None or last.named else last

    def _begin(self, delta: CallDelta) -> PartialCall:
        call = PartialCall()
        self.all.append(call)
        self._size += CALL_SIZE
        index, id = place(delta.members.get("index")), text_of(delta.members.get("id"))
        if index is not None:
            self._by_index[index] = call
        if id:
            self._by_id[id] = call
        return call


def _piece(delta: CallDelta) -> str:
    """Return the next piece of the arguments. Some servers send an object instead of its text."""
    raw = delta.function.get(_TEXT[delta.kind])
    if raw is None or rawjson.is_null(raw) or rawjson.is_string(raw):
        return text_of(raw)
    return bytes(raw).decode()


# -- calls as text -----------------------------------------------------------------------------------------------------

LONGEST = 64 << 10
"""Most characters of a text that is read as calls. A search pattern and a path take a few hundred."""
HEAD = 400
"""Most characters that may come before the name. More are not held back, because they are no call."""

_MARKS = re.compile(
    r"\s+|;|```\w*(?=\s|$)|</?\w*tool_?calls?\w*>|</?function_calls?>|</?tools?>|<\|\w*\|>|\[/?TOOL_CALLS\]"
)
"""What stands around calls: code fences, and the tags of chat templates."""
_PART_OF_MARK = re.compile(r"`{1,3}\w*|<\|?/?\w*\|?|\[/?[A-Z_]*")
_NAMED = re.compile(r'"(?:name|tool|tool_name|function)"\s*:\s*"([^"]*)("?)')
_NAMES = ("name", "tool", "tool_name", "function")
_ARGUMENTS = ("arguments", "parameters", "args", "input")


def could_be_call(beginning: str, names: ToolNames) -> bool:
    """Whether a text that begins like this may consist of calls of our tools."""
    rest = beginning[_after_marks(beginning, 0) :]
    if not rest or _PART_OF_MARK.fullmatch(rest):
        return True
    if rest[0] not in "{[":
        return False
    if named := _NAMED.search(rest):
        name, complete = named.groups()
        return not complete or bool(names.recognised(name))
    return len(rest) <= HEAD


def is_named(beginning: str) -> bool:
    """Whether the text has got as far as a call's name, so that `could_be_call` will not change."""
    named = _NAMED.search(beginning)
    return named is not None and bool(named[2])


def calls_in(text: str, names: ToolNames) -> list[tuple[str, str]]:
    """Return name and arguments of each call if the text consists of calls of our tools; otherwise nothing."""
    if len(text) > LONGEST:
        return []
    try:
        values = list(_values(text))
    except (ValueError, RecursionError):
        return []
    calls = [_call(value, names) for value in values]
    return [call for call in calls if call is not None] if None not in calls else []


def _values(text: str) -> Iterator[Any]:
    """Yield the JSON values of a text that has nothing else but marks. Raises ValueError."""
    decoder = json.JSONDecoder()
    at = _after_marks(text, 0)
    while at < len(text):
        value, at = decoder.raw_decode(text, at)
        at = _after_marks(text, at)
        if isinstance(value, dict) and isinstance(value.get("tool_calls"), list):
            value = value["tool_calls"]
        yield from value if isinstance(value, list) else [value]


def _after_marks(text: str, at: int) -> int:
    while match := _MARKS.match(text, at):
        if match.end() == at:
            break
        at = match.end()
    return at


def _call(value: Any, names: ToolNames) -> tuple[str, str] | None:
    """Return a call's name and arguments, or None if this is no call of one of our tools."""
    if not isinstance(value, dict):
        return None
    inner = value["function"] if isinstance(value.get("function"), dict) else value
    name = next((inner[key] for key in _NAMES if isinstance(inner.get(key), str)), "")
    arguments: Any = next((inner[key] for key in _ARGUMENTS if key in inner), {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    ours = names.recognised(name)
    return (ours, json.dumps(arguments, ensure_ascii=False)) if ours and isinstance(arguments, dict) else None
