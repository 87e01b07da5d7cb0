"""Reads the replies of the chat API, and makes one of all rounds for the client.

Everything is shown at once, except:
- calls of our tools, and calls with an incomplete name that may turn out to be one of ours;
- text that may turn out to be a call of our tools (see `calls`), and text if the client wants JSON;
- signed reasoning, which only a visible round may show. Clients put a reply together member by member, so it may come
  at the reply's end.

All events of the client's reply have the first round's `id`, `created`, `model` and `system_fingerprint`. The role is
sent once, a blank line separates the texts of two rounds, and the usage covers all rounds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from msgspec import Raw

from proxy import rawjson, sse
from proxy.dialects.chat.calls import PartialCall, ToolCalls, calls_in, could_be_call, is_named
from proxy.dialects.chat.chunks import TEXTS, Chunk, ReplyMessage, as_events, held, parse, plain_delta
from proxy.dialects.chat.request import ChatRoundRequest
from proxy.dialects.refusals import is_error
from proxy.dialects.reply import Block, Call, ClientReply, Part, Round, ToolNames, check_arguments
from proxy.dialects.turn import Turn
from proxy.dialects.usage import CHAT, UsageLedger
from proxy.errors import ProxyError
from proxy.plan.message import ToolCall
from proxy.rawjson import NULL, Members, on_one_line, string, text_of

STOPPED = frozenset(("length", "content_filter", "error"))
"""Finish reasons after which no round follows, since the last call may be incomplete (`error`: OpenRouter)."""

FRAME = ("id", "created", "model", "system_fingerprint")
"""Members that all events of a reply share."""


class ChatRound(Round[PartialCall]):
    """One reply of upstream. Its blocks are the calls."""

    def __init__(self, asked: ChatRoundRequest, names: ToolNames, reply: ChatReply) -> None:
        super().__init__(asked, names, reply)
        self.message = ReplyMessage()
        self.undecided = bool(names)
        """Whether the text may still turn out to be a call of ours."""
        self._text = Block(None if names else True)
        self._beginning = ""
        self._calls = ToolCalls()
        self.blocks = self._calls.all
        self._signed: list[Chunk] = []
        self._finish = ""  # the finish reason; empty until it is known
        self._called = False  # whether there is a call of the client's

    @property
    def theirs(self) -> list[PartialCall]:
        return [call for call in self.blocks if call.ours == ""]

    @property
    def ended(self) -> bool:
        return bool(self._finish)

    @property
    def unfinished(self) -> bool:
        return self._finish in STOPPED

    @property
    def empty(self) -> bool:
        return not self.theirs and not any(self.message.text(key).strip() for key in ("content", "refusal"))

    def read(self, chunk: Chunk) -> list[Part]:
        size = len(chunk.raw or b"")
        self.usage = chunk.usage or self.usage
        if chunk.choice is None:
            if chunk.failed:
                return self.fail(chunk, size)
            ends = chunk.usage is not None and (self.ended or self.hides)
            return self.put(chunk, self.closing if ends else self._loose, size)
        self.failed |= chunk.failed
        self.message.add(chunk.delta)
        split = self._split_text(chunk) if self._text.shown is None else []
        if chunk.calls:
            split += self._split_calls(chunk)
        if self._injected and (signed := held(chunk.delta)):
            self._signed.append(chunk.take(signed))
            self.grow(size)
        parts: list[Part] = []
        if chunk.finish:
            self._finish = chunk.finish
            parts = self.settle()
            if not (split or (self._injected and chunk.says())):
                return parts + self.put(chunk, self.closing, size)
            split.append((chunk.take_end(), self.closing))
        if chunk.delta or chunk.raw is not None:
            split.insert(0, (chunk, self._loose))
        for part, block in split:
            parts += self.put(part, block, size)
        return parts

    def settle(self) -> list[Part]:
        if self.undecided:
            self._decide_text()
        for call in self.blocks:
            self._decide(call, sure=True)
        return self.flow()

    def written(self, answered: Collection[Call]) -> list[bytes]:
        message = self.message.history([call.raw() for call in self.blocks if not call.ours or call in answered])
        return [] if message is None else [message]

    def release(self, *, visible: bool) -> list[Part]:
        parts = super().release(visible=visible)
        signed, self._signed = self._signed, []
        return [*parts, *((chunk, self._loose) for chunk in signed)] if visible else parts

    # -- text --

    def _split_text(self, chunk: Chunk) -> list[Part]:
        """Split off the text if it has to be held."""
        content = chunk.delta.get("content", NULL)
        if rawjson.is_null(content):
            return []
        if self.undecided and not is_named(self._beginning):
            self._beginning += text_of(content)
            if not could_be_call(self._beginning, self.names):
                self._show_text()
        holds = self.undecided and bool(self._beginning.strip())
        if self._text.shown or not (holds or (self._holds_text and bytes(content) != b'""')):
            return []
        return [(chunk.take(["content"]), self._text)]

    def _show_text(self) -> None:
        self.undecided = False
        if not self._holds_text:
            self.decide(self._text, shown=True)

    def _decide_text(self) -> None:
        """Take a text that consists of calls of ours for these calls."""
        found = calls_in(self.message.text(), self.names)
        self._show_text()
        if found:
            self.message.forget("content")
            self.decide(self._text, shown=False)
        for name, arguments in found:
            self._decide(self._calls.adopt(name, arguments), sure=True)

    # -- calls --

    def _split_calls(self, chunk: Chunk) -> list[Part]:
        """Split off the calls, each as a separate event, because some clients read only the first entry. An event with
        nothing but calls of the client's stays whole."""
        called = [self._calls.take(delta) for delta in chunk.calls]
        for call in called:
            self._decide(call)
            if call.ours != "":
                check_arguments(call.size)
        if all(call.ours == "" for call in called):
            chunk.called = called
            return []
        chunk.drop(["tool_calls"])
        made = zip(chunk.calls, called, strict=True)
        chunk.calls = []
        return [(chunk.calling(delta, call), call) for delta, call in made if call.shown is not False]

    def _decide(self, call: PartialCall, *, sure: bool = False) -> None:
        """Decide whose call it is, once its name is complete (`sure`) or cannot become one of ours."""
        if call.ours is not None or not (sure or call.named or self.names.excludes(call.name)):
            return
        ours = self.names.recognised(call.name) if call.kind == "function" else ""
        if ours:
            call.rename(ours)
        elif self.hides and not (self._called or call.signature):
            call.lent = next((one.signature for one in self.ours if one.signature), {})
        call.ours, self._called = ours, self._called or not ours
        self.decide(call, shown=not ours)


class ChatReply(ClientReply):
    """The completion that the client gets."""

    _asked: ChatRoundRequest
    blocks: list[PartialCall]

    def __init__(self, asked: ChatRoundRequest, ledger: UsageLedger, *, streamed: bool) -> None:
        super().__init__(asked, ledger, streamed=streamed)
        self.message = ReplyMessage()
        self._shows_usage = not streamed or asked.wants_usage
        self._numbered = streamed and bool(self._names)  # a call of a whole reply has no number
        self._frame: Members = {}
        self._joints: set[str] = set()  # the texts that go on in another round
        self._finish: Raw = NULL
        self._usage: Raw | None = None

    @property
    def started(self) -> bool:
        """Whether an id and a role were sent, so that the next events may hold only text."""
        return bool(self._frame) and self.message.has("role")

    @property
    def seen(self) -> bool:
        return bool(self.blocks) or not self.message.silent

    @property
    def visible(self) -> tuple[str, list[ToolCall]]:
        return self.message.text(), [call.call() for call in self.blocks]

    def go_on(self, ending: ChatRound) -> None:  # type: ignore[override]
        super().go_on(ending)
        self._joints = {key for key in TEXTS if self.message.text(key)}

    def _put(self, chunk: Chunk, block: Block) -> bytes:
        if chunk.choice is None and chunk.usage is not None and not self._shows_usage:
            return b""
        if chunk.choice is not None and not self._frame:
            self._frame = {key: chunk.members[key] for key in FRAME if key in chunk.members}
        if self.hides:
            self._join(chunk)
        if chunk.called:
            self._number(chunk)
        if chunk.raw is None and chunk.void:
            return b""
        self.message.add(chunk.delta)
        if self.streamed:
            return sse.encode(chunk.json(), chunk.name) if chunk.raw is None else chunk.raw
        if chunk.choice is not None:
            self._finish = chunk.choice.get("finish_reason", NULL)
        self._usage = chunk.usage or self._usage
        return b""

    def _join(self, chunk: Chunk) -> None:
        """Make an event one of the first round's reply."""
        frame = {key: raw for key, raw in self._frame.items() if chunk.members.get(key, raw) != raw}
        if frame:
            chunk.put(frame)
        if chunk.usage is not None:
            chunk.put({"usage": self._ledger.total(chunk.usage)})
        if "role" in chunk.delta and self.message.has("role"):
            chunk.put_delta({key: raw for key, raw in chunk.delta.items() if key != "role"})
        for key in tuple(self._joints):
            if text := text_of(chunk.delta.get(key)):
                self._joints.remove(key)
                chunk.put_delta(chunk.delta | {key: string("\n\n" + text)})
        reason = "tool_calls" if self.blocks else "stop"
        if chunk.finish in ("tool_calls", "stop") and chunk.finish != reason:
            chunk.put_choice("finish_reason", string(reason))

    def _number(self, chunk: Chunk) -> None:
        """Give the calls of an event the numbers that the client sees. Where no tool is ours, nothing is touched."""
        changed: dict[int, Members] = {}
        for place, (delta, call) in enumerate(zip(chunk.calls, chunk.called, strict=True)):
            entry = delta.members
            if call.place is None:
                self._adopt(call)
                call.number = Raw(b"%d" % (len(self.blocks) - 1))
                if call.lent:
                    entry = changed[place] = entry | call.lent
            if self._numbered and entry.get("index") != call.number:
                changed[place] = {"index": call.number} | entry | {"index": call.number}
        if changed:
            entries = [changed.get(place, delta.members) for place, delta in enumerate(chunk.calls)]
            chunk.put_delta(chunk.delta | {"tool_calls": Raw(rawjson.array(map(rawjson.encode, entries)))})

    def _assembled(self) -> bytes:
        reply = rawjson.members(self._body)
        choice = rawjson.members(rawjson.elements(reply["choices"])[0])
        calls = {"tool_calls": Raw(rawjson.array([call.shown_as() for call in self.blocks]))} if self.blocks else {}
        message = Raw(rawjson.encode(self.message.members() | calls))
        choices = Raw(rawjson.array([rawjson.encode(choice | {"message": message, "finish_reason": self._finish})]))
        spent = {} if self._usage is None else {"usage": self._usage}
        return rawjson.encode(reply | self._frame | spent | {"choices": choices})


class ChatTurn(Turn):
    """The turn of the chat API: see `proxy.dialects.turn`."""

    usage = CHAT
    rounds_as = ChatRound
    replies_as = ChatReply
    _asked: ChatRoundRequest
    _round: ChatRound
    _shown: ChatReply
    _quick = False  # whether an event with text only has to be noted and nothing else

    def _take(self, event: sse.ServerSentEvent, data: bytes) -> bytes:
        if self._quick and (delta := plain_delta(data)) is not None:
            self._round.message.add_plain(delta)
            self._shown.message.add_plain(delta)
            return event.raw
        out = super()._take(event, data)
        plain = not (self._shown.hides or self._round.waiting or self._round.undecided or self._asked.wants_json)
        self._quick = plain and self._shown.started
        return out

    def _parsed(self, event: sse.ServerSentEvent, data: bytes) -> Chunk:
        chunk = parse(data)
        chunk.raw, chunk.name = event.raw, event.name
        return chunk

    def _error_in(self, parsed: Chunk, data: bytes) -> bytes | None:
        failed = parsed.failed or parsed.name == b"error" or (parsed.choice is None and is_error(data))
        return None if parsed.says() or not failed else data

    def _events_of(self, body: bytes) -> Iterable[Chunk]:
        events = as_events(body)
        self._done = sse.encode(sse.DONE)
        return events

    def _result(self, call: PartialCall, text: str, part: str) -> bytes:
        return rawjson.encode({"role": "tool", "tool_call_id": call.id, "content": text})

    def error_event(self, fault: ProxyError, said: bytes = b"") -> bytes:
        return error_event(fault, said)


def error_event(fault: ProxyError, said: bytes = b"") -> bytes:
    """Return the event that ends a stream: upstream's own error if it has this API's shape, else the fault."""
    members = on_one_line(said)
    return sse.encode(fault.body() if rawjson.is_null(members.get("error")) else rawjson.encode(members))
