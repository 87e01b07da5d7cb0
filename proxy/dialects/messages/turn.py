"""One client turn: any number of rounds with upstream, and one reply to the client. It uses no I/O and no clock.

The states are those of `proxy.dialects.Turn`. `reply` reads a round and decides what may be shown, and `client_reply`
makes one reply of all rounds. Events that need no change are sent to the client byte for byte.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from proxy.core import rawjson, sse
from proxy.core.history import ToolCall
from proxy.core.rawjson import NotJson
from proxy.core.turn import Broken, Continuation, HiddenRound, State, Usage, WrongState
from proxy.dialects import overflow
from proxy.dialects.last_words import NO_MORE, SAID_NOTHING
from proxy.dialects.messages import errors
from proxy.dialects.messages.blocks import result, said
from proxy.dialects.messages.client_reply import MessageStream, WholeMessage
from proxy.dialects.messages.costs import USAGE, with_prompt
from proxy.dialects.messages.reply import MAX_ARGUMENTS, Block, Part, ReplyEvent, RoundReply, as_events
from proxy.dialects.messages.round_request import RoundRequest
from proxy.dialects.refusals import is_error
from proxy.dialects.usage import UsageLedger
from proxy.dialects.values import string, text_of
from proxy.errors import ProxyError


class MessagesTurn:
    """A turn of the Messages API. Each client request has its own."""

    asks_usage = False
    """Every stream reports its usage."""
    continuation: Continuation | None = None
    """Every request has the whole history."""

    def __init__(self, asked: RoundRequest) -> None:
        self.state = State.READY
        self.rounds = 0
        """Hidden rounds so far."""
        self._asked = asked
        self._names = asked.names if asked.tools else ()
        self._theirs = asked.theirs if asked.tools else frozenset()
        self._ledger = UsageLedger(USAGE)
        self._shown = MessageStream(self._ledger)
        self._before: list[bytes] = []
        self._results = 0  # how many of the last entries are the newest answers of our tools
        self._after: list[bytes] = []
        self._answering: list[Block] = []
        self._instead: bytes | None = None
        self._spoke = False  # whether earlier rounds showed any block
        self._refusal: bytes | None = None
        self._bare = False  # whether the client's own request is sent
        self._pressed = False  # whether it was asked once more, without our tools
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
        return self._asked.later([*self._asked.entries, *self._before], last=self._last, bare=self._pressed)

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
        try:
            parsed = ReplyEvent(event.data, event.raw, event.name)
        except NotJson:
            return self._as_it_came(event)
        if parsed.type == "error" and self._unseen:
            self._refusal = parsed.data
        return self._take(parsed)

    def receive_whole(self, body: bytes) -> bytes:
        """Take a reply that is not a stream; returns the bytes for the client. Raises Broken.

        If the first reply is not a stream, the client gets no stream either, and `close` returns its whole reply.
        """
        self._require(State.READING)
        if not self.rounds:
            self._shown = WholeMessage(self._ledger)
        if is_error(body):
            self._refusal = body
            if self._shown.streamed:
                return b""
        try:
            events = list(as_events(rawjson.members(body)))
        except (NotJson, KeyError):
            return self._take_unknown(body)
        if isinstance(self._shown, WholeMessage):
            self._shown.take(body)
        return b"".join(map(self._take, events))

    @property
    def streams(self) -> bool:
        """Whether the client asked for a stream."""
        return self._asked.streams

    @property
    def over(self) -> bool:
        """Whether the round's reply has said that it is complete, so that nothing more needs to be received."""
        return bool(self._done) or self._round.over

    def end(self) -> bytes:
        """End the round's reply, whether or not upstream said it was complete; returns the bytes for the client.

        Raises Broken if it was not, and has a call of ours or follows one: the client does not see where it stopped.
        """
        self._require(State.READING)
        if (self._round.ours or self.rounds) and not (self._round.reason or self._round.failed or self._done):
            raise Broken("the reply stopped before its end")
        self._ledger.add(with_prompt(self._round.usage))
        self._answering = self._to_answer()
        parts: list[Part] = []
        if self._answering:
            self.state = State.CALLING
            self._identify(self._answering)
            parts = self._round.release(visible=False) if self._round.theirs else []
        elif self._mute and not self._pressed:
            self._press()
        else:
            self.state = State.DONE
            parts = self._round.release(visible=True)
        out = self._show(parts)
        if self.state is State.DONE:
            if self._spoke:
                self._instead = self._message([block for block in self._round.blocks if not block.ours])
            if self._mute and self._silent:
                out += self._show(self._round.say(SAID_NOTHING.format(*self._asked.names)))
        return out

    @property
    def calls(self) -> list[ToolCall]:
        """The calls to answer now."""
        self._require(State.CALLING)
        return [block.call() for block in self._answering]

    def answer(self, answers: Sequence[str]) -> None:
        """Take the results of `calls`, in the same order."""
        self._require(State.CALLING)
        if self._round.theirs:
            answering = set(self._answering)
            self._instead = self._message([one for one in self._round.blocks if not one.ours or one in answering])
            self._after = self._results_of(answers)
            self.state = State.DONE
        else:
            self.rounds += 1
            self._go_on(self._results_of(answers))

    def reword(self, text: str) -> None:
        """Prepare to resend the newest round with `text` in place of our tools' results, which did not fit."""
        self._step(State.READING, State.READY)
        first = len(self._before) - self._results
        written = {"content": string(self._told(text))}
        self._before[first:] = [rawjson.encode(rawjson.members(raw) | written) for raw in self._before[first:]]

    @property
    def refusal(self) -> bytes | None:
        """Upstream's error, if this round's reply is nothing else and the client has seen nothing of any reply."""
        return self._refusal

    def start_over(self) -> bool:
        """Prepare to send the client's own request instead of the next round. Returns False, doing nothing, if the
        client has seen anything of the reply."""
        if self._bare or not self._unseen:
            return False
        self._bare, self._names, self.state = True, (), State.READY
        self._before, self._after, self._answering, self._results = [], [], [], 0
        self._spoke, self._refusal, self._instead = False, None, None
        if self._shown.streamed:
            self._shown.hides = True
        else:
            self._shown = WholeMessage(self._ledger)
        return True

    @property
    def hidden(self) -> HiddenRound | None:
        """The rounds to store once the turn is DONE; None if the client has seen everything."""
        self._require(State.DONE)
        if self._round.failed or not (self._before or self._after):
            return None
        return HiddenRound(tuple(self._before), self._instead, tuple(self._after))

    @property
    def visible(self) -> tuple[str, list[ToolCall]]:
        """The text and the calls that the client has seen."""
        return said(block.final() for block in self._shown.blocks)

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
        return self._show([(event, None) for event in self._round.end]) + self._shown.close(self._done)

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
        later = self._shown.begun if self._bare else self.rounds > 0
        self._round = RoundReply(self._names, later=later, holds_text=self._asked.wants_json, theirs=self._theirs)

    def _take(self, event: ReplyEvent) -> bytes:
        return self._show(self._round.read(event))

    def _show(self, parts: Sequence[Part]) -> bytes:
        self._shown.hides |= self._round.hides
        return self._shown.show(parts)

    @property
    def _unseen(self) -> bool:
        """Whether the client has seen nothing of the reply but its beginning. A whole reply is sent at the end."""
        return not (self._shown.streamed and self._shown.blocks)

    def _as_it_came(self, event: sse.ServerSentEvent) -> bytes:
        return event.raw if self._shown.streamed else b""

    def _take_unknown(self, body: bytes) -> bytes:
        """Take a body that is no message. The client gets it unchanged, if that is still possible."""
        self._round.failed = True
        if not isinstance(self._shown, WholeMessage):
            raise Broken("neither a stream nor a message")
        self._shown.take(body, verbatim=True)
        return b""

    # -- the end of a round --

    @property
    def _last(self) -> bool:
        return self.rounds >= self._asked.max_rounds

    def _to_answer(self) -> list[Block]:
        """Return the calls of our tools to answer; the others are dropped. Raises Broken for an endless one."""
        ours, theirs = self._round.ours, self._round.theirs
        if self._round.failed or self._last:
            return []
        if any(len(block.arguments) > MAX_ARGUMENTS for block in ours):
            raise Broken(f"more than {MAX_ARGUMENTS} bytes of arguments for a call")
        if self._round.unfinished:
            return [block for block in ours if block.whole] if theirs else []
        return ours

    @property
    def _mute(self) -> bool:
        """Whether the turn would end without an answer: the model only called our tools, or said nothing after it."""
        if self._round.failed or self._round.unfinished or not (self._round.reason or self._done):
            return False
        only_ours = bool(self._round.ours) and not self._round.theirs
        return only_ours or (self.rounds > 0 and self._silent)

    @property
    def _silent(self) -> bool:
        """Whether the client has got nothing that it could use."""
        return self._round.empty and not self.visible[0].strip()

    def _press(self) -> None:
        """Have the model asked once more, without our tools. Calls of them get an answer that says so."""
        self._answering = self._round.ours
        self._identify(self._answering)
        self.rounds += 1
        self._pressed = True
        self._go_on(self._results_of([""] * len(self._answering)))

    def _told(self, answer: str) -> str:
        """Return the newest answer, with a line that says so if the next round is the last."""
        return f"{answer}\n\n{NO_MORE.format(*self._asked.names)}".lstrip() if self._last else answer

    def _results_of(self, answers: Sequence[str]) -> list[bytes]:
        if not self._round.theirs:
            answers = [*answers[:-1], *map(self._told, answers[-1:])]
        return [result(block.call().id, text) for block, text in zip(self._answering, answers, strict=True)]

    def _go_on(self, results: list[bytes]) -> None:
        if results:
            self._before += [self._message(self._round.blocks), *results]
        self._results = len(results)
        self._ledger.carry(with_prompt(self._round.usage))
        self._spoke = bool(self._shown.blocks)
        self.state = State.READY

    def _message(self, blocks: Sequence[Block]) -> bytes:
        """Return the blocks as the message that goes back upstream, which refuses texts without words."""
        finals = [(block.type, block.final()) for block in blocks]
        kept = [final for kind, final in finals if kind != "text" or text_of(final.get("text")).strip()]
        return rawjson.encode({"role": "assistant", "content": kept})

    def _identify(self, calls: list[Block]) -> None:
        """Give calls without an id, or with a duplicate one, an id that is deterministic and unique to this turn."""
        seed = self._seed()
        known = {block.call().id for block in self._round.theirs}
        for number, block in enumerate(calls):
            if not block.call().id or block.call().id in known:
                block.identify(f"toolu_{seed}_{number}")
            known.add(block.call().id)

    def _seed(self) -> str:
        sent = [*self._asked.entries, *self._before]
        return hashlib.sha256(b"%d %b" % (len(sent), bytes(sent[-1]) if sent else b"")).hexdigest()[:16]
