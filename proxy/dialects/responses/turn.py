"""One client turn: any number of rounds with upstream, and one reply to the client. It uses no I/O and no clock.

The states are those of `proxy.dialects.Turn`. `reply` reads a round and decides what may be shown, and `client_reply`
makes one reply of all rounds. Events that need no change are sent to the client byte for byte.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from msgspec import Raw

from proxy.core import rawjson, sse
from proxy.core.history import ToolCall
from proxy.core.rawjson import NotJson
from proxy.core.turn import Broken, Continuation, HiddenRound, State, Usage, WrongState
from proxy.dialects import overflow
from proxy.dialects.last_words import NO_MORE, SAID_NOTHING
from proxy.dialects.refusals import is_error
from proxy.dialects.responses import errors
from proxy.dialects.responses.client_reply import USAGE, ClientReply, WholeReply
from proxy.dialects.responses.items import output, said
from proxy.dialects.responses.reply import MAX_ARGUMENTS, Event, OutputItem, Round, as_events
from proxy.dialects.responses.round_request import RoundRequest
from proxy.dialects.usage import UsageLedger
from proxy.dialects.values import object_of, string, text_of
from proxy.errors import ProxyError


class ResponsesTurn:
    """A turn of the Responses API. Each client request has its own."""

    def __init__(self, asked: RoundRequest) -> None:
        self.state = State.READY
        self.rounds = 0
        """Hidden rounds so far."""
        self._asked = asked
        self._names = asked.names if asked.tools else ()
        self._theirs = asked.theirs if asked.tools else frozenset()
        self._ledger = UsageLedger(USAGE)
        self._shown = ClientReply(self._ledger, self._names)
        self._before: list[bytes] = []
        self._results = 0  # how many of the last entries are the newest answers of our tools
        self._after: list[bytes] = []
        self._answering: list[OutputItem] = []
        self._instead: bytes | None = None
        self._spoke = False  # whether earlier rounds showed any item
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
            parsed = Event(event.data, event.raw, event.name)
        except NotJson:
            self._note_foreign(event.data, event.name)
            return self._as_it_came(event)
        self._note_refusal(parsed)
        return self._take(parsed)

    def receive_whole(self, body: bytes) -> bytes:
        """Take a reply that is not a stream; returns the bytes for the client. Raises Broken.

        If the first reply is not a stream, the client gets no stream either, and `close` returns its whole reply.
        """
        self._require(State.READING)
        if not self.rounds:
            self._shown = WholeReply(self._ledger, self._names)
        if is_error(body):
            self._refusal = body
            if self._shown.streamed:
                return b""
        try:
            events = list(as_events(rawjson.members(body)))
        except (NotJson, KeyError):
            return self._take_unknown(body)
        if isinstance(self._shown, WholeReply):
            self._shown.take(body)
        return b"".join(map(self._take, events))

    @property
    def streams(self) -> bool:
        """Whether the client asked for a stream."""
        return self._asked.streams

    @property
    def over(self) -> bool:
        """Whether the round's reply has said that it is complete, so that nothing more needs to be received."""
        return bool(self._done) or self._round.end is not None

    def end(self) -> bytes:
        """End the round's reply, whether or not upstream said it was complete; returns the bytes for the client.

        Raises Broken if it was not, and has a call of ours or follows one: the client does not see where it stopped.
        """
        self._require(State.READING)
        parts = self._round.settle()
        if (self._round.ours or self.rounds) and not (self._round.status or self._done):
            raise Broken("the reply stopped before its end")
        self._ledger.add(self._round.usage)
        self._answering = self._to_answer()
        if self._answering:
            self.state = State.CALLING
            self._identify(self._answering)
            if self._round.theirs:
                parts += self._round.release(visible=False)
        elif self._mute and not self._pressed:
            self._press()
        else:
            self.state = State.DONE
            parts += self._round.release(visible=True)
            if self._mute and self._silent:
                parts += self._round.say(SAID_NOTHING.format(*self._asked.names), f"msg_{self._seed()}")
        return self._show_last(parts)

    @property
    def calls(self) -> list[ToolCall]:
        """The calls to answer now."""
        self._require(State.CALLING)
        return [item.call() for item in self._answering]

    def answer(self, answers: Sequence[str]) -> None:
        """Take the results of `calls`, in the same order."""
        self._require(State.CALLING)
        if self._round.theirs:
            answering = set(self._answering)
            answered = [item for item in self._round.items if not item.ours or item in answering]
            self._instead, self._after = rawjson.array(self._kept(answered)), self._results_of(answers)
            self.state = State.DONE
        else:
            self.rounds += 1
            self._go_on(self._results_of(answers))

    def reword(self, text: str) -> None:
        """Prepare to resend the newest round with `text` in place of our tools' results, which did not fit."""
        self._step(State.READING, State.READY)
        first = len(self._before) - self._results
        written = {"output": string(self._told(text))}
        self._before[first:] = [rawjson.encode(rawjson.members(raw) | written) for raw in self._before[first:]]

    @property
    def refusal(self) -> bytes | None:
        """Upstream's error, if this round's reply is nothing else and the client has seen nothing of any reply."""
        return self._refusal

    @property
    def asks_usage(self) -> bool:
        """Whether the request asks for usage that the client did not ask for. Here, every stream reports it."""
        return False

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
            self._shown = WholeReply(self._ledger, ())
        return True

    @property
    def hidden(self) -> HiddenRound | None:
        """The rounds to store once the turn is DONE; None if the client has seen everything."""
        self._require(State.DONE)
        if self._round.failed or not (self._before or self._after):
            return None
        return HiddenRound(tuple(self._before), self._instead, tuple(self._after))

    @property
    def continuation(self) -> Continuation | None:
        """How a request goes on that names the id that the client saw, after hidden rounds that upstream has stored."""
        if self.hidden is None or not (self._asked.stores and self._shown.id and self._round.id):
            return None
        return Continuation(self._shown.id, self._round.id, tuple(self._after))

    @property
    def visible(self) -> tuple[str, list[ToolCall]]:
        """The text and the calls that the client has seen."""
        return said(self._shown.finals())

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
        kept = [] if self._round.end is None else [(self._round.end, None)]
        return self._shown.show(kept) + self._shown.close(self._done)

    def is_overflow(self, status: int, body: bytes) -> bool:
        """Whether this refusal of a round means that it has too many tokens."""
        return overflow.is_overflow(status, body)

    def error_event(self, fault: ProxyError, said: bytes = b"") -> bytes:
        """The event that ends a stream after a failure: upstream's refusal `said`, if it is usable, or `fault`."""
        return errors.event(fault, said, self._shown.next_number)

    # -- states --

    def _require(self, state: State) -> None:
        if self.state is not state:
            raise WrongState(f"{self.state.name} instead of {state.name}")

    def _step(self, source: State, target: State) -> None:
        self._require(source)
        self.state = target

    # -- one event --

    def _begin_round(self) -> None:
        later = bool(self._shown.id) if self._bare else self.rounds > 0
        holds_text = self._asked.wants_json
        self._round = Round(self._names, later=later, holds_text=holds_text, theirs=self._theirs)

    def _note_refusal(self, event: Event) -> None:
        if self._unseen and event.type in ("error", "response.failed"):
            error = object_of(event.response).get("error")
            self._refusal = event.data if rawjson.is_null(error) else rawjson.encode({"error": error})
        elif not event.type:
            self._note_foreign(event.data, event.name)

    def _note_foreign(self, data: bytes, name: bytes | None) -> None:
        """Take data that is no event of this API for a refusal if it is an error, as gateways send them."""
        if self._unseen and self._refusal is None and (name == b"error" or is_error(data)):
            self._refusal = data

    @property
    def _unseen(self) -> bool:
        """Whether the client has seen nothing of the reply but its beginning. A whole reply is sent at the end."""
        return not (self._shown.streamed and self._shown.items)

    def _take(self, event: Event) -> bytes:
        parts = self._round.read(event)
        self._shown.hides |= self._round.hides
        return self._shown.show(parts)

    def _as_it_came(self, event: sse.ServerSentEvent) -> bytes:
        return event.raw if self._shown.streamed else b""

    def _take_unknown(self, body: bytes) -> bytes:
        """Take a body that is not a response. The client gets it unchanged, if that is still possible."""
        self._round.status = "failed"
        if not isinstance(self._shown, WholeReply):
            raise Broken("neither a stream nor a response")
        self._shown.verbatim(body)
        return b""

    # -- the end of a round --

    @property
    def _last(self) -> bool:
        return self.rounds >= self._asked.max_rounds

    def _to_answer(self) -> list[OutputItem]:
        """Return the calls of our tools to answer; the others are dropped. Raises Broken for an endless one."""
        ours, theirs = self._round.ours, self._round.theirs
        if self._round.failed or self._last:
            return []
        if any(len(item.call().arguments) > MAX_ARGUMENTS for item in ours):
            raise Broken(f"more than {MAX_ARGUMENTS} bytes of arguments for a call")
        if self._round.status == "incomplete":
            return [item for item in ours if item.whole] if theirs else []
        return ours

    @property
    def _mute(self) -> bool:
        """Whether the turn would end without an answer: the model only called our tools, or said nothing after it."""
        if self._round.status in ("failed", "incomplete") or not (self._round.status or self._done):
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
        return [output(item.call().id, text) for item, text in zip(self._answering, answers, strict=True)]

    def _show_last(self, parts: list[tuple[Event, OutputItem | None]]) -> bytes:
        """Show the last parts of a round. Items for which no events came are shown at the reply's end."""
        self._shown.hides |= self._round.hides
        out = self._shown.show(parts)
        for item in self._round.items:
            if not (item.ours or item.lost or item.kept) and self._is_shown(item):
                self._shown.adopt(item)
        if self.state is State.DONE and self._spoke:
            self._instead = rawjson.array(
                self._kept([item for item in self._round.items if not (item.ours or item.lost)])
            )
        return out

    def _is_shown(self, item: OutputItem) -> bool:
        return self.state is State.DONE or (bool(self._round.theirs) and (item.released or item.type != "message"))

    def _go_on(self, results: list[bytes]) -> None:
        if results:
            self._before += [*map(bytes, self._kept(self._round.items)), *results]
        self._results = len(results)
        self._ledger.carry(self._round.usage)
        self._spoke = bool(self._shown.items)
        self.state = State.READY

    def _kept(self, items: Sequence[OutputItem]) -> list[Raw]:
        """Return the items as they go back upstream. Where it stores nothing, no item is found by its id, and reasoning
        that is not in the item itself is lost."""
        raws = [raw for item in items if (raw := item.written()) is not None]
        if self._asked.stores:
            return raws
        found = [rawjson.members(raw) for raw in raws]
        return [
            Raw(rawjson.encode({key: raw for key, raw in members.items() if key != "id"}))
            for members in found
            if text_of(members.get("type")) != "reasoning" or text_of(members.get("encrypted_content"))
        ]

    def _identify(self, calls: list[OutputItem]) -> None:
        """Give calls without an id, or with a duplicate one, an id that is deterministic and unique to this turn."""
        seed = self._seed()
        known = {item.call().id for item in self._round.theirs}
        for number, item in enumerate(calls):
            if not text_of(item.members.get("call_id")) or item.call().id in known:
                item.identify(f"call_{seed}_{number}")
            known.add(item.call().id)

    def _seed(self) -> str:
        sent = [*self._asked.entries, *self._before]
        return hashlib.sha256(b"%d %b" % (len(sent), bytes(sent[-1]) if sent else b"")).hexdigest()[:16]
