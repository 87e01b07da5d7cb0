"""One client turn: as many rounds with upstream as it takes, and one reply to the client. No I/O, no clock.

    READY ──request──> READING ──(end of reply)──> DONE ──close──> the reply's last bytes
      ^                    └──our tools called──> CALLING ──answer──> DONE  (a mixed turn)
      └────────────────────────────answer────────────┘

Drive it: send `request()`, feed what comes back to `receive` (or `receive_whole`) and `end`, answer `calls`, again,
until it is DONE; write down `hidden`; then send what `close` gives. A call in the wrong state raises.

A stream and a whole reply go through the same lines: a whole reply is one large delta. What needs no change reaches
the client as the very bytes that came. While a round may still turn out to be hidden, only its end is held back.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from enum import Enum, auto

import msgspec
from msgspec import Raw

from proxy.core import rawjson, sse
from proxy.core.rawjson import NotJson
from proxy.core.reply import Members, Message, PartialCall, TooLarge, held, text_of
from proxy.core.request import with_tools
from proxy.core.transcript import Call

FRAME = ("id", "created", "model", "system_fingerprint")
"""What all events of a reply have in common; the first round's stand for the whole turn."""
LIMITS = ("max_tokens", "max_completion_tokens")
EMPTY = Raw(b"{}")


class State(Enum):
    READY = auto()
    READING = auto()
    CALLING = auto()
    DONE = auto()


class WrongState(RuntimeError):
    """The driver's mistake."""


class Broken(ValueError):
    """Upstream's reply cannot be carried on: it stopped within one of our calls, or outgrew all bounds."""


class Asked(msgspec.Struct, frozen=True):
    """What the turn is made of: the client's members, what to send for `messages`, our tools and their names."""

    members: Members
    messages: list[bytes | Raw]
    tools: list[bytes]
    names: tuple[str, str]
    max_rounds: int


class Hidden(msgspec.Struct, frozen=True):
    """What the client does not see of this turn, to be put back on its next request.

    `before` goes in front of the reply that it saw, `instead` in its place where the model wrote another (None: it is
    as seen), `after` directly behind it.
    """

    before: list[bytes]
    instead: bytes | None
    after: list[bytes]


class Usage(msgspec.Struct):
    """Tokens over all rounds, as upstream counted them."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0


class Turn:
    """The machine. Built once per client request; see the module's picture."""

    def __init__(self, asked: Asked) -> None:
        self.state = State.READY
        self.rounds = 0
        """Internal rounds so far."""
        self.spent = Usage()
        self._asked = asked
        self._stream = bytes(asked.members.get("stream", EMPTY)) == b"true"
        self._wants_usage = _wants_usage(asked.members)
        self._holds_text = _is_structured(asked.members)
        self._messages = list(asked.messages)
        self._frame: Members = {}
        self._texts: list[str] = []  # what the client has seen of each round's text
        self._shown: list[PartialCall] = []
        self._before: list[bytes] = []
        self._results = 0  # how many of the last ones there are our tools' newest answers
        self._instead: bytes | None = None
        self._after: list[bytes] = []
        self._visible = Message()  # of whole replies only: what the client is going to see,
        self._visible_calls: list[Members] = []  # and its calls
        self._whole = False
        self._role_shown = False
        self._failed = False  # upstream said so in the reply itself
        self._finish = ""
        self._usage: Members = {}
        self._usage_chunk: Members = {}
        self._template: Members = {}  # the newest event that ended a round, to end the turn with
        self._begin()

    def _begin(self) -> None:
        """Forget the last round."""
        self._message = Message()
        self._last_choice: Members = {}
        self._counted = False
        self._done = b""
        self._queue: list[bytes] = []  # held text
        self._signed: list[Members] = []
        self._over = False

    # -- what the driver calls --

    def request(self) -> bytes:
        """The body of the next round."""
        self._step(State.READY, State.READING)
        members = self._asked.members | {"messages": Raw(rawjson.array(self._messages))}
        tools = with_tools(members.get("tools"), self._asked.tools)
        if tools is not None:
            members["tools"] = tools
        if self._stream:
            members["stream_options"] = _with_usage(members.get("stream_options"))
        return rawjson.encode(self._follow_up(members) if self.rounds else members)

    def receive(self, event: sse.Event) -> bytes:
        """Take one event; what of it goes to the client now. Raises Broken."""
        self._require(State.READING)
        if event.data is None or self._over:
            return event.raw if not self._over else b""
        if event.data.strip() == sse.DONE:
            self._done = event.raw
            return self._end_of_round()
        try:
            chunk = rawjson.members(event.data)
            return self._chunk(chunk, rawjson.elements(chunk["choices"]), event)
        except (NotJson, KeyError):
            self._failed |= b'"error"' in event.data[:200]
            return event.raw
        except TooLarge as error:
            raise Broken(str(error)) from error

    def receive_whole(self, body: bytes) -> bytes:
        """Take a reply that is not a stream; what goes to the client, nothing as long as the turn is not over."""
        self._require(State.READING)
        self._whole = True
        try:
            reply = rawjson.members(body)
            choice = rawjson.members(rawjson.elements(reply["choices"])[0])
            delta = _as_delta(rawjson.members(choice["message"]))
            self._take_whole(reply, choice, delta)
        except (NotJson, KeyError, IndexError):
            self._failed = True
            self.state = State.DONE
            return body
        except TooLarge as error:
            raise Broken(str(error)) from error
        self._end_of_round()
        return body if self.state is State.DONE and not self._hiding else b""

    def end(self) -> bytes:
        """The stream has ended, with or without saying so. Raises Broken where it stopped within a call of ours."""
        if self.state is not State.READING or self._over:
            return b""
        if not self._failed and not self._last_choice and any(call.mine is not False for call in self._message.calls):
            raise Broken("the reply stopped within a tool call")
        return self._end_of_round()

    @property
    def calls(self) -> list[Call]:
        """The calls to answer now."""
        self._require(State.CALLING)
        return [call.call() for call in self._ours]

    def answer(self, answers: Sequence[str]) -> None:
        """The results of `calls`, in their order."""
        self._require(State.CALLING)
        results = [_result(call, text) for call, text in zip(self._ours, answers, strict=True)]
        whole = self._message.raw(self._message.calls)
        if len(self._ours) < len(self._message.calls):
            self._instead, self._after = whole, results
            self._finish = "tool_calls"
            self.state = State.DONE
            return
        self._before += [whole, *results]
        self._messages += [whole, *results]
        self._results = len(results)
        self.rounds += 1
        self.state = State.READY
        self._begin()
        if self._tokens_left() <= 0:
            self._finish = "length"
            self.state = State.DONE

    def reword(self, text: str) -> None:
        """Send the newest round once more with this for the results of our tools: upstream had no room for them."""
        self._step(State.READING, State.READY)
        content = {"content": Raw(rawjson.encode(text))}
        first = len(self._before) - self._results
        results = [rawjson.encode(rawjson.members(raw) | content) for raw in self._before[first:]]
        self._before[first:] = results
        self._messages[-len(results) :] = results
        self._begin()

    @property
    def hidden(self) -> Hidden | None:
        """What has to be remembered, once the turn is DONE; None where the client has seen it all."""
        self._require(State.DONE)
        if self._failed or not (self._before or self._after):
            return None
        return Hidden(self._before, self._instead, self._after)

    @property
    def visible(self) -> tuple[str, list[Call]]:
        """The text and the calls that the client has seen."""
        return "\n\n".join(filter(None, self._texts)), [call.call() for call in self._shown]

    @property
    def mixed(self) -> bool:
        """Whether calls of ours were answered beside calls of the client's."""
        return bool(self._after)

    def close(self) -> bytes:
        """What ends the reply, where anything was held back for it."""
        self._require(State.DONE)
        if self._failed or not self._hiding:
            return b""
        return self._closing_reply() if self._whole else self._closing_events()

    # -- states --

    def _require(self, state: State) -> None:
        if self.state is not state:
            raise WrongState(f"{self.state.name} instead of {state.name}")

    def _step(self, source: State, target: State) -> None:
        self._require(source)
        self.state = target

    @property
    def _ours(self) -> list[PartialCall]:
        return [call for call in self._message.calls if call.mine]

    @property
    def _hiding(self) -> bool:
        """Whether the client does not see the whole of this turn, so that its end is ours to write."""
        return self.rounds > 0 or any(call.mine for call in self._message.calls)

    @property
    def _last(self) -> bool:
        return self.rounds >= self._asked.max_rounds

    def _end_of_round(self) -> bytes:
        """The round's reply is complete: hand on what was held, or find that there are calls to answer."""
        self._over = True
        if self._failed:
            self.state = State.DONE
            return self._done
        self._count()
        released = self._released() if not self._last_choice else b""
        ours = self._ours
        self._texts.append("" if self._holds_text and ours else self._message.content)
        reason = text_of(self._last_choice.get("finish_reason"))
        if ours and reason != "length" and not self._last:
            for number, call in enumerate(ours):
                call.id = call.id or f"offload_{self.rounds}_{number}"
            self.state = State.CALLING
            return released
        self._finish = reason or "stop" if reason == "length" or not ours else "tool_calls" if self._shown else "stop"
        if any(self._texts[:-1]):
            self._instead = self._message.raw(call for call in self._message.calls if not call.mine)
        self.state = State.DONE
        return released if self._hiding else released + self._done

    # -- one event --

    def _chunk(self, chunk: Members, choices: list[Raw], event: sse.Event) -> bytes:
        self._notice(chunk)
        if not choices:
            return self._usage_only(chunk, event)
        choice = rawjson.members(choices[0])
        delta = {} if rawjson.is_null(choice.get("delta")) else rawjson.members(choice["delta"])
        kept = self._delta(delta)
        if not text_of(choice.get("finish_reason")):
            return self._text_or_call(chunk, choice, delta, kept, event)
        kept = self._settled(kept)
        self._template, self._last_choice = chunk, choice
        return self._finishing(chunk, choice, delta, kept, event)

    def _notice(self, chunk: Members) -> None:
        if not self._frame:
            self._frame = {key: chunk[key] for key in FRAME if key in chunk}
        if not rawjson.is_null(chunk.get("usage")):
            self._usage, self._counted = rawjson.members(chunk["usage"]), True

    def _usage_only(self, chunk: Members, event: sse.Event) -> bytes:
        if rawjson.is_null(chunk.get("usage")):
            return event.raw
        self._usage_chunk = chunk
        return event.raw if self._wants_usage and not self._hiding else b""

    def _text_or_call(self, chunk: Members, choice: Members, delta: Members, kept: Members, event: sse.Event) -> bytes:
        if kept is delta and not self.rounds:
            shown = event.raw
        elif not self._says_something(kept):
            return b""
        else:
            shown = self._event(chunk, choice | {"delta": Raw(rawjson.encode(kept))}, event)
        if self._holds_text and text_of(kept.get("content")):
            self._queue.append(shown)
            return b""
        self._role_shown |= "role" in kept
        return shown

    def _finishing(self, chunk: Members, choice: Members, delta: Members, kept: Members, event: sse.Event) -> bytes:
        """The event that ends the round: as it came, or what it says besides where something is hidden."""
        held_back = self._released()
        if not self._hiding:
            if kept is delta:
                return held_back + event.raw
            return held_back + self._event(chunk, choice | {"delta": Raw(rawjson.encode(kept))}, event)
        if self._holds_text and self._ours:
            kept = _except(kept, ("content",))
        if not self._says_something(kept):
            return held_back
        going_on = choice | {"delta": Raw(rawjson.encode(kept)), "finish_reason": Raw(b"null")}
        return held_back + self._event(chunk, going_on, event)

    def _says_something(self, kept: Members) -> bool:
        empty = (b"null", b'""', b"[]")
        return any(bytes(raw) not in empty for key, raw in kept.items() if key != "role" or not self._role_shown)

    def _released(self) -> bytes:
        """Held text, where the round turned out not to be a hidden one."""
        queue, self._queue = self._queue, []
        return b"" if self._ours else b"".join(queue)

    def _event(self, chunk: Members, choice: Members, event: sse.Event | None = None) -> bytes:
        data = rawjson.encode(chunk | self._frame | {"choices": Raw(rawjson.array([rawjson.encode(choice)]))})
        name = b"event: " + event.name + b"\n" if event is not None and event.name else b""
        return name + sse.encode(data)

    # -- what the client may see of a delta --

    def _delta(self, delta: Members) -> Members:
        """The client's part of it; the very same object where that is all of it."""
        first_text = not self._message.speaks
        self._message.add(delta)
        kept = delta
        if not rawjson.is_null(delta.get("tool_calls")):
            kept = self._with_calls(delta, rawjson.elements(delta["tool_calls"]))
        signed = held(kept)
        if signed:
            self._signed.append(signed)
            kept = _except(kept, signed)
        if self.rounds:
            kept = self._continued(kept, first_text)
        return kept

    def _continued(self, kept: Members, first_text: bool) -> Members:
        """In a later round: no second role, and a blank line between this round's text and what was shown before."""
        if "role" in kept and self._role_shown:
            kept = _except(kept, ("role",))
        text = text_of(kept.get("content"))
        if text and first_text and any(self._texts):
            kept = kept | {"content": Raw(rawjson.encode("\n\n" + text))}
        return kept

    def _with_calls(self, delta: Members, raws: list[Raw]) -> Members:
        before = len(raws)
        calls: list[Members] = []
        changed = False
        for raw in raws:
            shown = self._route(rawjson.members(raw))
            changed |= len(shown) != 1 or not _same(shown[0], raw)
            calls += shown
        if not changed and len(calls) == before:
            return delta
        return delta | {"tool_calls": Raw(rawjson.encode(calls))} if calls else _except(delta, ("tool_calls",))

    def _route(self, delta: Members) -> list[Members]:
        """Whose call is it? The client's deltas renumbered; nothing for ours or as long as that is not known."""
        call = self._message.call_of(delta)
        shown = [one for other in self._message.calls if other is not call for one in self._decide(other)]
        call.add(delta, rawjson.members(delta["function"]) if "function" in delta else {})
        if call.mine is None:
            call.pending.append(delta)
            return shown if call.undecided(self._asked.names) else shown + self._decide(call)
        return shown if call.mine else [*shown, _renumbered(delta, call)]

    def _decide(self, call: PartialCall) -> list[Members]:
        """The name is complete."""
        if call.mine is not None:
            return []
        call.mine = bool(self._asked.tools) and call.name in self._asked.names
        pending, call.pending = call.pending, []
        if call.mine:
            return []
        call.shown = len(self._shown)
        self._shown.append(call)
        if call.signed is None:
            pending = self._signed_for(pending)
        return [_renumbered(delta, call) for delta in pending]

    def _signed_for(self, pending: list[Members]) -> list[Members]:
        """Gemini signs the first of parallel calls. If that is ours, the client's first carries its signature."""
        theirs = [call for call in self._message.calls if call.mine is False]
        signed = next((call.signed for call in self._ours if call.signed is not None), None)
        if signed is None or len(theirs) > 1 or not pending:
            return pending
        return [pending[0] | {"extra_content": signed}, *pending[1:]]

    def _settled(self, kept: Members) -> Members:
        """At the end of a round: all names are complete, and signed reasoning may be shown where the round is."""
        late = [one for call in self._message.calls for one in self._decide(call)]
        if late:
            earlier = rawjson.elements(kept["tool_calls"]) if "tool_calls" in kept else []
            kept = kept | {"tool_calls": Raw(rawjson.array([*earlier, *map(rawjson.encode, late)]))}
        if self._signed and (self._shown or not self._ours):
            kept = kept | _all_of(self._signed)
        return kept

    # -- whole replies --

    def _take_whole(self, reply: Members, choice: Members, delta: Members) -> None:
        self._notice(reply)
        kept = self._settled(self._delta(delta))
        if self._holds_text and self._ours:
            kept = _except(kept, ("content",))
        self._visible.add(kept)
        shown = rawjson.elements(kept["tool_calls"]) if "tool_calls" in kept else []
        self._visible_calls += [_except(rawjson.members(raw), ("index",)) for raw in shown]
        self._template, self._last_choice = reply, choice

    def _closing_reply(self) -> bytes:
        message = rawjson.members(self._visible.raw(()))
        if self._visible_calls:
            message["tool_calls"] = Raw(rawjson.encode(self._visible_calls))
        choice = {"message": Raw(rawjson.encode(message)), "finish_reason": Raw(rawjson.encode(self._finish))}
        reply = self._template | self._frame | ({"usage": self._total()} if self._usage else {})
        return rawjson.encode(reply | {"choices": Raw(rawjson.array([rawjson.encode(self._last_choice | choice)]))})

    # -- the end of a turn that hid something --

    def _closing_events(self) -> bytes:
        finish = Raw(rawjson.encode(self._finish))
        choice = {"index": Raw(b"0")} | self._last_choice | {"delta": EMPTY, "finish_reason": finish}
        chunk = self._template
        if not rawjson.is_null(chunk.get("usage")):
            chunk = chunk | {"usage": self._total()}
        last = self._event(chunk, choice)
        if self._wants_usage and self._usage_chunk:
            last += sse.encode(rawjson.encode(self._usage_chunk | self._frame | {"usage": self._total()}))
        return last + (self._done or sse.encode(sse.DONE))

    def _total(self) -> Raw:
        """The last round's usage with the completion tokens of all: clients gauge their context by it."""
        prompt, completion = _whole(self._usage.get("prompt_tokens")), self.spent.completion
        totals = {"completion_tokens": completion, "total_tokens": prompt + completion}
        return Raw(rawjson.encode(self._usage | totals))

    def _count(self) -> None:
        if self._counted:
            self.spent.prompt += _whole(self._usage.get("prompt_tokens"))
            self.spent.completion += _whole(self._usage.get("completion_tokens"))
            self.spent.cached += _cached(self._usage)

    # -- follow-up rounds --

    def _follow_up(self, members: Members) -> Members:
        """What a later round asks differently: less to write, and no call that was already made by order."""
        spent = {key: Raw(b"%d" % left) for key, left in self._limits_left().items()}
        choice = members.get("tool_choice")
        if _names_a_tool(choice):
            members = _except(members, ("tool_choice",))
        if self._last and rawjson.is_null(self._asked.members.get("tools")):
            members = members | {"tool_choice": Raw(b'"none"')}
        return members | spent

    def _limits_left(self) -> dict[str, int]:
        limits = {key: _whole(self._asked.members.get(key)) for key in LIMITS}
        return {key: limit - self.spent.completion for key, limit in limits.items() if limit}

    def _tokens_left(self) -> int:
        return min(self._limits_left().values(), default=1)


def _wants_usage(members: Members) -> bool:
    options = members.get("stream_options")
    if options is None or rawjson.is_null(options):
        return False
    return bytes(rawjson.members(options).get("include_usage", EMPTY)) == b"true"


def _with_usage(options: Raw | None) -> Raw:
    given = {} if options is None or rawjson.is_null(options) else rawjson.members(options)
    return Raw(rawjson.encode(given | {"include_usage": Raw(b"true")}))


def _is_structured(members: Members) -> bool:
    """Whether the client asked for JSON: two texts joined are none."""
    wanted = members.get("response_format")
    return wanted is not None and bytes(wanted)[:1] == b"{" and text_of(rawjson.members(wanted).get("type")) != "text"


def _names_a_tool(choice: Raw | None) -> bool:
    if choice is None or bytes(choice)[:1] != b"{":
        return False
    return text_of(rawjson.members(choice).get("type")) != "allowed_tools"


def _as_delta(message: Members) -> Members:
    """A whole message as one delta: its calls numbered, as they would be in a stream."""
    if rawjson.is_null(message.get("tool_calls")):
        return message
    calls = [rawjson.members(raw) for raw in rawjson.elements(message["tool_calls"])]
    numbered = [rawjson.encode({"index": number} | call) for number, call in enumerate(calls)]
    return message | {"tool_calls": Raw(rawjson.array(numbered))}


def _result(call: PartialCall, text: str) -> bytes:
    return rawjson.encode({"role": "tool", "tool_call_id": call.id, "content": text})


def _renumbered(delta: Members, call: PartialCall) -> Members:
    index = b"%d" % (call.shown or 0)
    return delta if bytes(delta.get("index", EMPTY)) == index else delta | {"index": Raw(index)}


def _same(delta: Members, raw: Raw) -> bool:
    """Whether a call's delta goes on as it came."""
    return delta == rawjson.members(raw)


def _except(members: Members, keys: Container[str]) -> Members:
    return {key: raw for key, raw in members.items() if key not in keys}


def _all_of(parts: list[Members]) -> Members:
    """Lists that were held back, one behind the other."""
    keys = dict.fromkeys(key for part in parts for key in part)
    return {
        key: Raw(rawjson.array([raw for part in parts if key in part for raw in _items(part[key])])) for key in keys
    }


def _items(raw: Raw) -> list[Raw]:
    return rawjson.elements(raw) if rawjson.is_array(raw) else [raw]


def _whole(raw: Raw | None) -> int:
    text = b"" if raw is None else bytes(raw)
    return int(text) if text.isdigit() and len(text) < 12 else 0


def _cached(usage: Members) -> int:
    """Input tokens read from the upstream's cache: OpenAI's place for them, or DeepSeek's."""
    details = usage.get("prompt_tokens_details")
    if details is not None and bytes(details)[:1] == b"{":
        return _whole(rawjson.members(details).get("cached_tokens"))
    return _whole(usage.get("prompt_cache_hit_tokens"))
