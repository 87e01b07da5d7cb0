"""Reads the replies of the chat API, and makes one of all rounds for the client.

Everything is shown at once, except:
- calls of our tools, and calls with an incomplete name that may turn out to be one of ours;
- text that may turn out to be calls of our tools, and text if the client wants JSON;
- signed reasoning that is one value, and all that comes behind a call of our tools: only a visible
  round may show it. Clients put a reply together member by member, so it may come at the reply's
  end. Behind blocks of an earlier round none is shown, because clients would join them.

All events of the client's reply have the first round's `id`, `created`, `model` and
`system_fingerprint`. The role is sent once, a blank line separates the texts of two rounds, and the
usage covers all rounds.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

from msgspec import Raw

from proxy import rawjson, sse
from proxy.dialects.chat import chunks
from proxy.dialects.chat.chunks import TEXTS, CallDelta, Chunk, PartialCall, ReplyMessage, ToolCalls
from proxy.dialects.entries import Entry
from proxy.dialects.refusals import is_error
from proxy.dialects.reply import (
    ORDINARY,
    Block,
    Call,
    ClientReply,
    Part,
    Round,
    ToolNames,
    check_arguments,
)
from proxy.dialects.request import ALLOWED, RoundRequest
from proxy.dialects.textcalls import TextCalls
from proxy.dialects.turn import Turn
from proxy.dialects.usage import UsageLedger
from proxy.errors import ProxyError
from proxy.plan.plan import ToolCall
from proxy.rawjson import NULL, Members, object_of, on_one_line, string, text_of

LIMITS = ("max_tokens", "max_completion_tokens")
STOPPED = frozenset(("length", "content_filter", "error"))
"""Finish reasons after which no round follows, since the last call may be incomplete (`error`:
OpenRouter)."""

CALLED = ("tool_calls", "function_call")
"""Finish reasons with which the client has to answer calls."""

CALL_SIZE = 1024
"""Roughly the bytes that a call takes besides its members, so that endless empty calls also reach
the size limit."""

FRAME = ("id", "created", "model", "system_fingerprint")
"""Members that all events of a reply share."""

NOTHING_NEW: Members = {
    "object": string("chat.completion.chunk"),
    "choices": Raw(b'[{"index":0,"delta":{},"finish_reason":null}]'),
}
"""The other members of an event that says nothing."""


class ChatRoundRequest(RoundRequest):
    limits = LIMITS
    listed = ALLOWED
    forms = (("response_format",),)

    @staticmethod
    def tool(definition: bytes) -> bytes:
        return rawjson.encode({"type": "function", "function": Raw(definition)})

    @property
    def wants_usage(self) -> bool:
        """Whether the client asks for the usage of its stream."""
        options = object_of(self.members.get("stream_options"))
        return bytes(options.get("include_usage", b"")) == b"true"

    @property
    def asks_usage(self) -> bool:
        options = self.members.get("stream_options")
        # upstream will say so
        mistaken = not rawjson.is_null(options) and not bytes(options or b"").startswith(b"{")
        return self.usage and self.streams and not self.wants_usage and not mistaken

    @staticmethod
    def assembled(members: Members, entries: Sequence[Entry], /) -> Members:
        return {"messages": Raw(rawjson.array(entries))}

    def _members(self, entries: Sequence[Entry], ours: Sequence[bytes]) -> Members:
        members = super()._members(entries, ours)
        if self.asks_usage:
            options = object_of(members.get("stream_options")) | {"include_usage": Raw(b"true")}
            members["stream_options"] = Raw(rawjson.encode(options))
        return members


class ChatRound(Round):
    """One reply of upstream. Its blocks are the calls."""

    ordinary = ORDINARY | {*CALLED, "tool_use"}
    stops = STOPPED
    blocks: list[PartialCall]
    _reply: ChatReply

    def __init__(self, request: ChatRoundRequest, names: ToolNames, reply: ChatReply) -> None:
        super().__init__(request, names, reply)
        self.message = ReplyMessage()
        self.spoken = TextCalls(names)
        self._text = Block(None if self._holds_text else True)
        self._calls = ToolCalls()
        self.blocks = self._calls.all
        self._signed: list[Part] = []
        self._called = False  # whether there is a call of the client's
        self._older = PartialCall()  # the older API's only call

    @property
    def theirs(self) -> list[PartialCall]:
        older = self._older
        return [*super().theirs, *([older] if older.ours == "" and older.name else [])]

    @property
    def empty(self) -> bool:
        return not self.theirs and not any(
            self.message.text(key).strip() for key in ("content", "refusal")
        )

    @property
    def _speaks(self) -> bool:
        """Whether there are words or calls."""
        return bool(self.blocks or self._older.name) or any(self.message.text(key) for key in TEXTS)

    def read(self, chunk: Chunk) -> list[Part]:
        if self.names and chunk.split:  # one message, whatever the choices
            self._reply.altered = True
            return [part for one in chunk.apart() for part in self.read(one)]
        if self.names and chunk.is_whole and not self._speaks:
            chunk.open_message()
        size = len(chunk.raw or b"")
        self.usage = chunk.usage or self.usage
        self.failed |= chunk.failed
        if chunk.choice is None and chunk.failed:
            return self.fail(chunk, size)
        ends = self.finish or (chunk.choice is None and self._reply.hides)
        if chunk.choice is None or (ends and chunk.usage is not None and not chunk.says):
            return self.put(
                chunk, self.closing if ends and chunk.usage is not None else self._loose, size
            )
        # all of the reply is kept
        self.grow(sum(len(memoryview(raw)) for raw in chunk.delta.values()))
        self.message.add(chunk.delta)
        split = [*self._split_text(chunk), *self._split_calls(chunk), *self._split_older(chunk)]
        if self.names and (signed := chunks.held(chunk.delta, aloud=self.thinks_aloud)):
            self._signed.append((chunk.take(signed), self._loose))
        parts: list[Part] = []
        if chunk.finish:
            self._take_reason(chunk)
            parts = self.settle()
            if not (split or (self.names and chunk.says)):
                return parts + self.put(chunk, self.closing, size)
            split.append((chunk.take_end(), self.closing))
        if chunk.delta or chunk.raw is not None:
            split.insert(0, (chunk, self._loose))
        for part, block in split:
            parts += self.put(part, block, size)
        return parts

    def extend(self, data: bytes) -> bool:
        reply = self._reply
        if self._holds_text or reply.hides or not reply.begun:
            return False
        delta = chunks.plain_delta(data)
        if not delta:
            return False
        texts = {key: text for key, text in delta.items() if text and key in TEXTS}
        if not self.spoken.extend(texts):
            return False
        for key, text in texts.items():
            self.grow(len(text))
            self.message.extend(key, [text])
            reply.message.extend(key, [text])
            reply.has_content = True
            reply.answers |= key not in chunks.THOUGHTS
        return True

    def settle(self) -> list[Part]:
        self._settle_texts()
        for call in self.blocks:
            self._decide(call, sure=True)
        if self._older.name:
            self._settle_older()
        return self.flow()

    def _settle_texts(self) -> None:
        """Take calls of ours out of the texts that end with them. Some servers send thoughts under
        two names."""
        known: dict[object, list[tuple[str, dict[str, Any]]]] = {}
        for found in self.spoken.settle(self.quotes):
            self._reply.hides = True
            key = str(found.text)
            self.message.cut(key, found.end, found.left)
            if key == "content" or found.calls not in known.values():
                for name, arguments in found.calls:
                    self._calls.adopt(name, json.dumps(arguments, ensure_ascii=False))
            known[key] = found.calls

    def _settle_older(self) -> None:
        """Gateways send the same call in both forms:
        https://github.com/langchain-ai/langchain/issues/31198"""
        older = self._older
        self._decide(older, sure=True)
        if older.ours and not any(call.ours == older.ours for call in self.blocks):
            self.blocks.append(older)
        if older.ours:
            self.message.parts.pop("function_call", None)

    def _take_reason(self, chunk: Chunk) -> None:
        """Take why a choice ends. Of several reasons, the client sees the one that says most, at
        the end."""
        if self.finish and self._reply.altered:
            ranked = sorted(
                (chunk.finish, self.finish),
                key=lambda one: (one not in self.ordinary, one in CALLED),
            )
            chunk.put_finish(string(ranked[-1]))
            for place, (part, block) in enumerate(self.held):
                if block is self.closing and part.finish:
                    part.put_finish(NULL)
                    self.held[place] = part, self._loose
        self.finish = chunk.finish

    def written(self, answered: Collection[Call]) -> list[bytes]:
        message = self.message.history(
            [call.sent() for call in self.blocks if not call.ours or call in answered]
        )
        return [] if message is None else [message]

    def release(self, *, visible: bool) -> list[Part]:
        parts = super().release(visible=visible)
        signed = self._signed
        self._signed = []
        if not visible or (self._later and self._reply.shows_blocks):
            return parts
        return parts + signed

    def _split_text(self, chunk: Chunk) -> list[Part]:
        """Split off what has to be held of the texts."""
        split: list[Part] = []
        for key in TEXTS:
            if rawjson.is_null(given := chunk.delta.get(key, NULL)):
                continue
            holds = self._holds_text and key == "content"
            of = self._text if holds else self._loose
            parts = (
                self._split_parts(chunk, of)
                if rawjson.is_array(given) and key == "content"
                else None
            )
            if rawjson.is_string(given):
                parts = self.spoken.take(key, text_of(given), of, chunk.saying(key))
            if parts is not None:
                split += parts
                chunk.take([key])
            elif holds and bytes(given) != b'""':
                split.append((chunk.take([key]), self._text))
        return split

    def _split_parts(self, chunk: Chunk, of: Block) -> list[Part] | None:
        """Return the parts of a content with a text that may be calls of ours, each as a separate
        event, or None."""
        texts = [(part, text_of(part.get("text"))) for part in chunk.parts]
        if all(self.spoken.passes(text) for _, text in texts):
            for _, text in texts:
                self.spoken.shown("content", text)
            return None
        split: list[Part] = []
        for part, text in texts:
            taken = self.spoken.take("content", text, of, chunk.listing(part)) if text else None
            split += [(chunk.holding(part), of)] if taken is None else taken
        return split

    def _split_calls(self, chunk: Chunk) -> list[Part]:
        """Split off the calls, each as a separate event, because some clients read only the first
        entry. An event with nothing but calls of the client's stays whole."""
        known = len(self.blocks)
        for delta in chunk.calls:
            delta.call = self._calls.take(delta)
        self.grow(CALL_SIZE * (len(self.blocks) - known))
        # once all entries of the event are known, of which a call may have several
        for delta in chunk.calls:
            self._decide(delta.call)
            if delta.call.ours != "":
                check_arguments(delta.call.size)
        if all(delta.call.ours == "" for delta in chunk.calls):
            return []
        chunk.take(["tool_calls"])
        deltas = chunk.calls
        chunk.calls = []
        split: list[Part] = []
        for delta in deltas:
            if delta.call.shown is not False:
                part = chunk.part(
                    {"tool_calls": Raw(rawjson.array([rawjson.encode(delta.members)]))}
                )
                part.calls = [delta]
                split.append((part, delta.call))
        return split

    def _split_older(self, chunk: Chunk) -> list[Part]:
        """Split off the older API's call, unless it is the client's."""
        older = self._older
        if not (self.names and object_of(chunk.delta.get("function_call"))):
            return []
        older.add(CallDelta({"function": chunk.delta["function_call"]}))
        check_arguments(0 if older.ours == "" else older.size)
        self._decide(older)
        if older.ours == "":
            return []
        part = chunk.take(["function_call"])
        return [] if older.shown is False else [(part, older)]

    def _decide(self, call: PartialCall, *, sure: bool = False) -> None:
        """Decide whose call it is, once its name is complete (`sure`) or cannot become one of
        ours."""
        if call.ours is not None or not (sure or call.named or self.names.excludes(call.name)):
            return
        call.ours = self.names.recognised(call.name) if call.kind == "function" else ""
        if not call.ours and self._reply.hides and not (self._called or call.signature):
            call.lent = next((one.signature for one in self.ours if one.signature), {})
        self._called |= not call.ours
        self.decide(call, shown=not call.ours)


class ChatReply(ClientReply):
    """The completion that the client gets."""

    blocks: list[PartialCall]

    def __init__(self, request: ChatRoundRequest, ledger: UsageLedger, *, streamed: bool) -> None:
        super().__init__(request, ledger, streamed=streamed)
        self.message = ReplyMessage()
        self._joints: set[str] = set()  # the texts that go on in another round
        # the frame, or that of the newest event before it: Azure's first one has no choice
        self._early: Members = {}
        self._finish: Raw = NULL
        self._usage: Raw | None = None

    @property
    def visible(self) -> tuple[str, list[ToolCall]]:
        return self.message.text(), [call.call() for call in self.blocks]

    @property
    def shows_blocks(self) -> bool:
        """Whether the client has seen blocks of reasoning."""
        return not chunks.BLOCKS.isdisjoint(self.message.parts)

    def go_on(self, ending: ChatRound) -> None:
        super().go_on(ending)
        self._joints = {key for key in TEXTS if self.message.text(key)}

    def put(self, chunk: Chunk, block: Block) -> bytes:
        if (
            chunk.choice is None
            and chunk.usage is not None
            and self.streamed
            and not self._request.wants_usage
        ):
            return b""
        if not self._frame:
            self._early = {key: chunk.members[key] for key in FRAME if key in chunk.members}
            self._frame = {} if chunk.choice is None else self._early
        if self.hides:
            self._join(chunk)
        if chunk.calls:
            self._number(chunk)
        used = (
            chunk.choice is None
            or chunk.finish
            or chunk.says
            or chunk.usage is not None
            or "role" in chunk.delta
        )
        if chunk.raw is None and not used:
            return b""  # nothing that a client could use is left
        self.message.add(chunk.delta)
        self.begun = "role" in self.message.parts
        self.has_content = self.has_content or chunk.says
        self.answers |= chunk.says_beside(chunks.THOUGHTS)
        self.ended |= bool(chunk.finish)
        if self.streamed:
            return sse.encode(chunk.json(), chunk.name) if chunk.raw is None else chunk.raw
        if chunk.choice is not None:
            self._finish = chunk.choice.get("finish_reason", NULL)
        self._usage = chunk.usage or self._usage
        return b""

    @staticmethod
    def is_sign(chunk: Chunk) -> bool:
        """Loops over a stream skip events without a choice."""
        return chunk.choice is not None

    def heartbeat(self) -> bytes:
        """Return an event with an empty delta."""
        if not self._early:
            return b""
        return sse.encode(rawjson.encode(self._early | NOTHING_NEW))

    def _join(self, chunk: Chunk) -> None:
        """Make an event one of the first round's reply."""
        frame = {key: raw for key, raw in self._frame.items() if chunk.members.get(key, raw) != raw}
        if frame:
            chunk.put(frame)
        if chunk.usage is not None:
            chunk.put({"usage": self._ledger.total(chunk.usage)})
        if "role" in chunk.delta and self.begun:
            chunk.take(["role"])
        for key in tuple(self._joints):
            if text := text_of(chunk.delta.get(key)):
                self._joints.remove(key)
                chunk.put_delta(chunk.delta | {key: string("\n\n" + text)})
        reason = "tool_calls" if self.blocks else "stop"
        if "function_call" in self.message.parts:
            reason = "function_call"
        if chunk.finish in ("stop", *CALLED) and chunk.finish != reason:
            chunk.put_finish(string(reason))

    def _number(self, chunk: Chunk) -> None:
        """Give the calls of an event the numbers that the client sees; in whole replies they have
        none. Where no tool is ours, nothing is touched."""
        entries: list[Members] = []
        for delta in chunk.calls:
            entry = delta.members
            call = delta.call
            if call.place is None:
                self._adopt(call)
                entry = entry | call.lent
            if self.streamed and self._names:
                number = {"index": Raw(b"%d" % (call.place or 0))}
                entry = number | entry | number
            entries.append(entry)
        if entries != [delta.members for delta in chunk.calls]:
            chunk.put_delta(
                chunk.delta | {"tool_calls": Raw(rawjson.array(map(rawjson.encode, entries)))}
            )

    def assembled(self) -> bytes:
        reply = rawjson.members(self.body)
        choice = rawjson.members(rawjson.elements(reply["choices"])[0])
        calls = [rawjson.encode(rawjson.members(call.raw()) | call.lent) for call in self.blocks]
        message = self.message.members() | (
            {"tool_calls": Raw(rawjson.array(calls))} if calls else {}
        )
        choice |= {"message": Raw(rawjson.encode(message)), "finish_reason": self._finish}
        spent = {} if self._usage is None else {"usage": self._usage}
        choices = Raw(rawjson.array([rawjson.encode(choice)]))
        return rawjson.encode(reply | self._frame | spent | {"choices": choices})


class ChatTurn(Turn):
    """The turn of the chat API: see `proxy.dialects.turn`."""

    rounds_as = ChatRound
    replies_as = ChatReply
    read = staticmethod(chunks.parse)
    events_of = staticmethod(chunks.as_events)
    last_event = sse.encode(sse.DONE)
    read_places = frozenset(
        (".choices[].delta.tool_calls[].function", ".choices[].delta.function_call")
    )
    _round: ChatRound
    _shown: ChatReply

    @staticmethod
    def failure(fault: ProxyError, said: bytes, number: int) -> bytes:
        members = on_one_line(said)
        return sse.encode(
            fault.body() if rawjson.is_null(members.get("error")) else rawjson.encode(members)
        )

    def _error_in(self, parsed: Chunk, data: bytes) -> bytes | None:
        failed = (
            parsed.failed or parsed.name == b"error" or (parsed.choice is None and is_error(data))
        )
        return None if parsed.says or not failed else data
