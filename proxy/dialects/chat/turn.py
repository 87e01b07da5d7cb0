"""One client turn: any number of rounds with upstream, and one reply to the client. It uses no I/O and no clock.

    READY ──request──> READING ──end──> DONE ──close──> the reply's last bytes
      ^                   └──our tools called──> CALLING ──answer──> DONE  (a mixed turn)
      └────────────────────────────answer──────────┘

To drive it, send `request()`, feed the reply to `receive` (or `receive_whole`), call `end`, and answer `calls`. Repeat
until it is DONE. Then store `hidden` and send the bytes from `close`. A call in the wrong state raises WrongState.

Streams and whole replies share the same code, which treats a whole reply as one large event. Events that need no change
are sent to the client byte for byte.
"""

from __future__ import annotations

from collections.abc import Sequence

from proxy.core import rawjson, sse
from proxy.core.history import ToolCall
from proxy.core.rawjson import NotJson
from proxy.core.turn import Broken, HiddenRound, State, Usage, WrongState
from proxy.dialects import overflow
from proxy.dialects.chat import errors
from proxy.dialects.chat.client_reply import USAGE, ClientReply, WholeReply
from proxy.dialects.chat.plain import plain_delta
from proxy.dialects.chat.reply import Chunk, as_events, parse
from proxy.dialects.chat.round import Round
from proxy.dialects.chat.round_request import RoundRequest
from proxy.dialects.chat.tool_calls import PartialCall, identify
from proxy.dialects.last_words import NO_MORE, SAID_NOTHING
from proxy.dialects.refusals import is_error
from proxy.dialects.usage import UsageLedger
from proxy.dialects.values import string
from proxy.errors import ProxyError

STOPPED = frozenset(("length", "content_filter", "error"))
"""Finish reasons after which no round follows, since the last call may be incomplete (`error`: OpenRouter)."""


class ChatTurn:
    """The state machine in the picture above. Each client request has its own."""

    def __init__(self, asked: RoundRequest) -> None:
        self.state = State.READY
        self.rounds = 0
        """Hidden rounds so far."""
        self._asked = asked
        self._names = asked.names if asked.tools else ()
        self._theirs = asked.theirs if asked.tools else frozenset()
        self._ledger = UsageLedger(USAGE)
        self._shown = ClientReply(self._ledger)
        self._before: list[bytes] = []
        self._results = 0  # how many of the last entries are the newest answers of our tools
        self._after: list[bytes] = []
        self._answering: list[PartialCall] = []
        self._instead: bytes | None = None
        self._spoke = False  # whether earlier rounds showed any text
        self._failed = False  # upstream said so in the reply itself
        self._pressed = False  # whether it was asked once more, without our tools
        self._refusal: bytes | None = None
        self._bare = False  # whether the client's own request is sent
        self._done = b""
        self._begin_round()

    # -- what the driver calls --

    def request(self) -> bytes:
        """The body of the next round."""
        self._step(State.READY, State.READING)
        self._done = b""
        self._begin_round()
        if self._bare:
            return self._asked.own
        if not self.rounds:
            return self._asked.first()
        return self._asked.later([*self._asked.messages, *self._before], last=self._last, bare=self._pressed)

    def receive(self, event: sse.ServerSentEvent) -> bytes:
        """Take one event of a stream; returns the bytes for the client. Raises Broken."""
        self._require(State.READING)
        if self._done:
            return b""
        if event.data is None:
            return self._as_it_came(event)
        if event.data.strip() == sse.DONE:
            self._done = event.raw
            return b""
        if self._quick and self._takes_plain(event.data):
            return event.raw
        return self._take_event(event, event.data)

    def receive_whole(self, body: bytes) -> bytes:
        """Take a reply that is not a stream; returns the bytes for the client. Raises Broken.

        If the first reply is not a stream, the client gets no stream either, and `close` returns its whole reply.
        """
        self._require(State.READING)
        if not self.rounds:
            self._shown = WholeReply(self._ledger)
            self._begin_round()
        self._done = sse.encode(sse.DONE)
        try:
            chunk = parse(body)
        except NotJson:
            self._note_refusal(None, body)
            return self._take_unknown(body)
        self._note_refusal(chunk, body)
        if self._refusal is not None and self._shown.streamed:
            return b""
        if chunk.key != "message":
            return self._take_unknown(body)
        if not self._shown.streamed:
            chunk.raw = body
            return self._take(chunk)
        return b"".join(map(self._take, as_events(chunk)))

    @property
    def streams(self) -> bool:
        """Whether the client asked for a stream."""
        return self._asked.streams

    @property
    def over(self) -> bool:
        """Whether the round's reply has said that it is complete, so that nothing more needs to be received."""
        return bool(self._done)

    def end(self) -> bytes:
        """End the round's reply, whether or not upstream said it was complete; returns the bytes for the client.

        Raises Broken if it was not, and has a call of ours or follows one: the client does not see where it stopped.
        """
        self._require(State.READING)
        parts = self._round.settle()
        if (self._round.calls.ours or self.rounds) and not (self._done or self._round.finish or self._failed):
            raise Broken("the reply stopped before its end")
        self._ledger.add(self._round.usage)
        self._answering = self._to_answer()
        if self._answering:
            self.state = State.CALLING
            self._identify(self._answering)
            if self._round.calls.theirs:
                parts += self._round.release(visible=False)
        elif self._mute and not self._pressed:
            self._press()
        else:
            self.state = State.DONE
            parts += self._finish()
        return self._shown.show(parts)

    @property
    def calls(self) -> list[ToolCall]:
        """The calls to answer now."""
        self._require(State.CALLING)
        return [call.call() for call in self._answering]

    def answer(self, answers: Sequence[str]) -> None:
        """Take the results of `calls`, in the same order."""
        self._require(State.CALLING)
        if self._round.calls.theirs:
            self._finish_mixed(self._results_of(answers))
        else:
            self.rounds += 1
            self._go_on(self._results_of(answers))

    def reword(self, text: str) -> None:
        """Prepare to resend the newest round with `text` in place of our tools' results, which did not fit."""
        self._step(State.READING, State.READY)
        first = len(self._before) - self._results
        content = {"content": string(self._told(text))}
        self._before[first:] = [rawjson.encode(rawjson.members(raw) | content) for raw in self._before[first:]]

    @property
    def refusal(self) -> bytes | None:
        """Upstream's error, if this round's reply is nothing else and the client has seen nothing of any reply."""
        return self._refusal

    @property
    def asks_usage(self) -> bool:
        """Whether the request asks for usage that the client did not ask for."""
        return self._asked.asks_usage

    def start_over(self) -> bool:
        """Prepare to send the client's own request. Returns False, doing nothing, if the client has seen anything."""
        if self._bare or not self._unseen:
            return False
        self._bare, self._names, self._theirs, self.state = True, (), frozenset(), State.READY
        self._before, self._after, self._answering, self._results = [], [], [], 0
        self._failed, self._spoke, self._refusal, self._instead = False, False, None, None
        if self._shown.streamed:
            self._shown.go_on()
        else:
            self._shown = WholeReply(self._ledger)
        return True

    @property
    def hidden(self) -> HiddenRound | None:
        """The rounds to store once the turn is DONE; None if the client has seen everything."""
        self._require(State.DONE)
        if self._failed or not (self._before or self._after):
            return None
        return HiddenRound(tuple(self._before), self._instead, tuple(self._after))

    @property
    def continuation(self) -> None:
        """Every request of this API has the whole history, so none goes on from a reply by its id."""
        return None

    @property
    def visible(self) -> tuple[str, list[ToolCall]]:
        """The text and the calls that the client has seen."""
        return self._shown.message.text(), [call.call() for call in self._round.calls.theirs]

    @property
    def mixed(self) -> bool:
        """Whether calls of ours were answered beside calls that the client answers."""
        return bool(self._after)

    @property
    def spent(self) -> Usage:
        """Tokens over all rounds."""
        return self._ledger.spent

    def close(self) -> bytes:
        """Return the last bytes of the reply, or the whole reply if it is not a stream."""
        self._require(State.DONE)
        kept = [chunk for chunk in (self._round.end, self._round.bill) if chunk is not None]
        calls = [call.shown() for call in self._round.calls.theirs]
        return self._shown.show(self._billed(kept)) + self._shown.close(self._done, calls)

    def is_overflow(self, status: int, body: bytes) -> bool:
        """Whether this refusal of a round means that it has too many tokens."""
        return overflow.is_overflow(status, body)

    def error_event(self, fault: ProxyError, said: bytes = b"") -> bytes:
        """The event that ends a stream after a failure: upstream's refusal `said`, if it is usable, or `fault`."""
        return errors.event(fault, said)

    # -- states --

    def _require(self, state: State) -> None:
        if self.state is not state:
            raise WrongState(f"{self.state.name} instead of {state.name}")

    def _step(self, source: State, target: State) -> None:
        self._require(source)
        self.state = target

    # -- one event --

    def _begin_round(self) -> None:
        self._quick = False  # until an event has named the reply
        self._round = Round(
            self._names,
            numbered=self._shown.streamed,
            later=self.rounds > 0 and not self._bare,
            holds_text=self._asked.wants_json,
            theirs=self._theirs,
        )

    def _takes_plain(self, data: bytes) -> bool:
        """Record an event that holds only text, as most do. Returns False, recording nothing, if it holds more."""
        delta = plain_delta(data)
        if delta is None:
            return False
        for message in (self._round.message, self._shown.message):
            message.add_plain(delta)
        return True

    def _take_event(self, event: sse.ServerSentEvent, data: bytes) -> bytes:
        try:
            chunk = parse(data)
        except NotJson:
            self._note_refusal(None, data, event.name)
            return self._as_it_came(event)
        chunk.raw, chunk.name = event.raw, event.name
        self._note_refusal(chunk, data, event.name)
        out = self._take(chunk)
        quick = self._shown.started and not (self.rounds or self._bare or self._asked.wants_json)
        self._quick = quick and not self._round.undecided
        return out

    def _note_refusal(self, chunk: Chunk | None, data: bytes, name: bytes | None = None) -> None:
        """Take an error for a refusal if the client has seen nothing. `chunk` is None if it has an unknown shape."""
        if self._refusal is not None or not self._unseen or (chunk is not None and not chunk.says_nothing):
            return
        failed = chunk is not None and chunk.failed
        if failed or name == b"error" or ((chunk is None or chunk.choice is None) and is_error(data)):
            self._failed, self._refusal = True, data

    @property
    def _unseen(self) -> bool:
        """Whether the client has seen nothing of the reply but a role. A whole reply is sent at the end."""
        return not self._shown.streamed or (self._shown.message.silent and not self._round.calls.theirs)

    def _take(self, chunk: Chunk) -> bytes:
        self._failed |= chunk.failed
        return self._shown.show(self._billed(self._round.read(chunk)))

    def _billed(self, chunks: list[Chunk]) -> list[Chunk]:
        """Leave out the usage event of a stream if the client did not ask for it."""
        if self._asked.wants_usage or not self._shown.streamed:
            return chunks
        return [chunk for chunk in chunks if chunk.choice is not None or chunk.usage is None]

    def _as_it_came(self, event: sse.ServerSentEvent) -> bytes:
        return event.raw if self._shown.streamed else b""

    def _take_unknown(self, body: bytes) -> bytes:
        """Take a body that is not a chat completion. The client gets it unchanged, if that is still possible."""
        self._failed = True
        if not isinstance(self._shown, WholeReply):
            raise Broken("neither a stream nor a chat completion")
        self._shown.verbatim(body)
        return b""

    # -- the end of a round --

    @property
    def _last(self) -> bool:
        return self.rounds >= self._asked.max_rounds

    @property
    def _mute(self) -> bool:
        """Whether the turn would end without an answer: the model only called our tools, or said nothing after it."""
        if self._failed or self._bare or self._round.finish in STOPPED or not (self._round.finish or self._done):
            return False
        only_ours = bool(self._round.calls.ours) and not self._round.calls.theirs
        return only_ours or (self.rounds > 0 and self._silent)

    @property
    def _silent(self) -> bool:
        """Whether the client has got nothing that it could use."""
        return self._round.empty and not self._shown.message.text().strip()

    def _to_answer(self) -> list[PartialCall]:
        """Return the calls of our tools to answer; the others are dropped."""
        ours, theirs = self._round.calls.ours, self._round.calls.theirs
        if self._failed or self._last:
            return []
        if self._round.finish in STOPPED:
            return [call for call in ours if call.complete] if theirs else []
        return ours

    def _press(self) -> None:
        """Have the model asked once more, without our tools. Calls of them get an answer that says so."""
        self._answering = self._round.calls.ours
        self._identify(self._answering)
        self.rounds += 1
        self._pressed = True
        self._go_on(self._results_of([""] * len(self._answering)))

    def _finish(self) -> list[Chunk]:
        """End the turn with this round; returns the parts to show. Calls of our tools are not answered."""
        parts = self._round.release(visible=True)
        if self._mute:
            self._finish_with("stop")
        if self._mute and self._silent:
            parts += self._round.say(SAID_NOTHING.format(*self._asked.names))
        elif self._spoke:
            self._instead = self._round.history(self._round.calls.theirs)
        return parts

    def _finish_mixed(self, results: list[bytes]) -> None:
        """End a mixed turn. The client answers its own calls next and does not see ours."""
        if self._round.finish not in STOPPED:
            self._finish_with("tool_calls")
        answering = set(self._answering)
        answered = [call for call in self._round.calls.all if not call.ours or call in answering]
        self._instead, self._after = self._round.history(answered), results
        self.state = State.DONE

    def _go_on(self, results: list[bytes]) -> None:
        message = self._round.history(self._round.calls.all)
        if message is not None and results:
            self._before += [message, *results]
        self._results = len(results)
        self._ledger.carry(self._round.usage)
        self._spoke = self._shown.go_on()
        self.state = State.READY

    def _told(self, answer: str) -> str:
        """Return the newest answer, with a line that says so if the next round is the last."""
        return f"{answer}\n\n{NO_MORE.format(*self._asked.names)}".lstrip() if self._last else answer

    def _results_of(self, answers: Sequence[str]) -> list[bytes]:
        calls = self._answering
        if not self._round.calls.theirs:
            answers = [*answers[:-1], *map(self._told, answers[-1:])]
        return [_result(call, text) for call, text in zip(calls, answers, strict=True)]

    def _finish_with(self, reason: str) -> None:
        if self._round.end is not None:
            self._round.end.put_choice("finish_reason", string(reason))

    def _identify(self, calls: list[PartialCall]) -> None:
        identify(calls, self._round.calls.theirs, [*self._asked.messages, *self._before])


def _result(call: PartialCall, text: str) -> bytes:
    return rawjson.encode({"role": "tool", "tool_call_id": call.id, "content": text})
