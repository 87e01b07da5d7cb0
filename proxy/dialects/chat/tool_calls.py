"""Collects the tool calls of one round, decides which are ours, and returns the parts that the client may see.

Servers differ. Some send the id with the first delta only, others (an old vLLM) send a new one with each. Names come in
pieces, repeatedly, or after the arguments (SGLang). The `index` is missing (Gemini, Mistral), always 0 with a new id
(Ollama), or changes within a call (Cerebras). This module accepts all of these, and the client sees 0, 1, 2.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from functools import cached_property

from msgspec import Raw

from proxy import rawjson
from proxy.dialects.chat.reply import CallDelta, signature
from proxy.dialects.rounds import MAX_REPLY, check_arguments
from proxy.dialects.tool_names import ToolNames
from proxy.dialects.values import NULL, Members, join, place, string, text_of
from proxy.plan.history import ToolCall
from proxy.plan.turn import Broken
from proxy.rawjson import NotJson

CALL_SIZE = 1024
"""Roughly the bytes that a call takes besides its arguments, so that endless empty calls also reach the size limit."""

_TEXT = {"function": "arguments", "custom": "input"}


class PartialCall:
    """One tool call as received so far. `ours` is None while its name may still be incomplete."""

    def __init__(self) -> None:
        self.id = ""
        self.ours: bool | None = None
        self.index = 0
        """Its place among the calls that the client sees."""
        self.pending: list[Members] = []
        """Entries received before it was known whose call this is."""
        self.lent: Members = {}
        """A signature that another call carried."""
        self.kind = "function"
        self.size = 0
        """The approximate number of bytes in its arguments."""
        self._name: list[str] = []
        self._name_size = 0
        self._arguments: list[str] = []
        self._object = _Object()
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
        arguments = _arguments(delta)
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
        return self._object.closed(self._arguments) and self._is_object

    @cached_property
    def _is_object(self) -> bool:
        try:
            rawjson.members(self.arguments.encode("utf-8", "replace"))
        except NotJson:
            return False
        return True

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

    def shown(self) -> Raw:
        """The call as the client sees it."""
        return Raw(rawjson.encode(rawjson.members(self.raw()) | self.lent))


class _Object:
    """Finds the end of a JSON object whose text arrives in pieces, and reads each piece once."""

    _marks = re.compile(r'[{}\[\]"]|\\.?', re.DOTALL)

    def __init__(self) -> None:
        self._read = 0
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._end = False
        self._more = False

    def closed(self, pieces: Sequence[str]) -> bool:
        """Whether the pieces, if they form an object, end where it ends.

        `pieces` must begin with the pieces of the previous call.
        """
        for piece in pieces[self._read :]:
            self._take(piece)
        self._read = len(pieces)
        return self._end and not self._more

    def _take(self, piece: str) -> None:
        at = 0
        if self._escaped:
            at, self._escaped = 1, False
        while not self._end:
            match = self._marks.search(piece, at)
            if match is None:
                return
            at = match.end()
            self._mark(match[0])
        self._more = self._more or not (not piece[at:] or piece[at:].isspace())

    def _mark(self, mark: str) -> None:
        if mark[0] == "\\":
            self._escaped = len(mark) == 1
        elif mark == '"':
            self._in_string = not self._in_string
        elif not self._in_string:
            self._depth += 1 if mark in "{[" else -1
            self._end = self._depth <= 0


class ToolCalls:
    """All calls of one round.

    `names` are the names of our tools; empty if the request has none of them. `theirs` are those of the client's.
    """

    def __init__(self, names: Sequence[str], *, numbered: bool, theirs: Collection[str] = ()) -> None:
        self.all: list[PartialCall] = []
        self.ours: list[PartialCall] = []
        self.theirs: list[PartialCall] = []
        """In the order in which the client sees them."""
        self.names = ToolNames(names, theirs)
        self._numbered = numbered
        """Whether the client reads a stream, where calls have an index."""
        self._open: dict[PartialCall, None] = {}
        self._by_index: dict[int, PartialCall] = {}
        self._by_id: dict[str, PartialCall] = {}
        self._size = 0

    def take(self, deltas: Sequence[CallDelta], *, whole: bool = False) -> list[Members]:
        """Take entries of `tool_calls`; returns the entries that the client may see now.

        In a `whole` reply each entry is a separate call. An entry that needs no change is returned as the same object.
        Raises Broken if the calls grow too large.
        """
        shown: list[Members] = []
        for delta in deltas:
            call = (None if whole else self._known(delta)) or self._begin(delta)
            self._size += call.add(delta)
            if call.ours is None:
                call.pending.append(delta.members)
                shown += self._decide(call)
            elif not call.ours:
                shown.append(self._numbering(delta.members, call))
            self._check_size(call)
        return shown

    def adopt(self, name: str, arguments: str) -> None:
        """Add a call of one of our tools that came as text."""
        function = Raw(rawjson.encode({"name": name, "arguments": arguments}))
        call = PartialCall()
        call.add(CallDelta({"function": function}))
        call.ours = True
        self.all.append(call)
        self.ours.append(call)

    def settle(self) -> list[Members]:
        """End the round, so that all names are complete; returns the entries that the client may see now."""
        return [entry for call in tuple(self._open) for entry in self._settle(call)]

    def _check_size(self, call: PartialCall) -> None:
        if call.ours is not False:
            check_arguments(call.size)
        if self._size > MAX_REPLY:
            raise Broken(f"tool calls of more than {MAX_REPLY} bytes")

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
        return None if last is None or last.whole else last

    def _begin(self, delta: CallDelta) -> PartialCall:
        call = PartialCall()
        self.all.append(call)
        self._open[call] = None
        self._size += CALL_SIZE
        index, id = place(delta.members.get("index")), text_of(delta.members.get("id"))
        if index is not None:
            self._by_index[index] = call
        if id:
            self._by_id[id] = call
        return call

    def _decide(self, call: PartialCall) -> list[Members]:
        """Return the entries kept back for a call once its name is complete or cannot become one of ours."""
        if call.named or not self.names.could_become(call.name):
            return self._settle(call)
        return []

    def _settle(self, call: PartialCall) -> list[Members]:
        del self._open[call]
        ours = self.names.recognised(call.name) if call.kind == "function" else ""
        call.ours = bool(ours)
        pending, call.pending = call.pending, []
        if ours:
            call.rename(ours)
            self.ours.append(call)
            return []
        call.index = len(self.theirs)
        self.theirs.append(call)
        if call.index == 0 and not call.signature:
            call.lent = next((one.signature for one in self.ours if one.signature), {})
            pending[0] = pending[0] | call.lent if call.lent else pending[0]
        return [self._numbering(entry, call) for entry in pending]

    def _numbering(self, entry: Members, call: PartialCall) -> Members:
        """Return the entry with the index that the client sees."""
        index = b"%d" % call.index
        if not self._numbered or not self.names or bytes(entry.get("index", NULL)) == index:
            return entry
        return {"index": Raw(index)} | entry | {"index": Raw(index)}


def _arguments(delta: CallDelta) -> str:
    """Return the next piece of the arguments. Some servers send an object instead of its text."""
    raw = delta.function.get(_TEXT[delta.kind])
    if raw is None or rawjson.is_null(raw) or rawjson.is_string(raw):
        return text_of(raw)
    return bytes(raw).decode()
