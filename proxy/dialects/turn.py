"""One client turn: any number of rounds with upstream, and one reply to the client. It uses no I/O
and no clock.

    READY ──request──> READING ──end──> DONE ──close──> the reply's last bytes
      ^                   └──our tools called──> CALLING ──answer──> DONE  (a mixed turn)
      └────────────────────────────answer──────────┘

To drive it, send `request()`, feed the reply to `receive` (or `receive_whole`), call `end`, and
answer `calls`. Repeat until it is DONE. Then store `hidden` and send the bytes from `close`. A call
in the wrong state raises WrongState.

This machine is the same for every API. A dialect knows how a reply is read, how one reply is made
of all rounds (see `reply`), and how our results are written. Events that need no change are sent to
the client byte for byte.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from typing import Any, ClassVar

from proxy import rawjson, sse
from proxy.dialects.refusals import is_error
from proxy.dialects.reply import Call, ClientReply, Part, Round, ToolNames, check_arguments
from proxy.dialects.request import RoundRequest
from proxy.dialects.unread import calls_in
from proxy.dialects.usage import UsageLedger
from proxy.errors import ProxyError
from proxy.plan.plan import ToolCall
from proxy.plan.recognise import Hidden
from proxy.plan.turn import Broken, Continuation, State, WrongState
from proxy.rawjson import Members, NotJson
from proxy.tools.answer import REPEATED

MAX_CIRCLES = 2
"""Rounds in a row that only repeat calls which were answered before. Then the next round is the
last: a small model goes on until its rounds are used up, and each of them costs time."""
NO_MORE = "({} and {} cannot be called again in this turn: answer now, with what you have.)"
"""The last line of the answers before the last round."""


class Turn(ABC):
    """The state machine in the picture above. Each client request has its own."""

    rounds_as: ClassVar[type[Round]]
    replies_as: ClassVar[type[ClientReply]]
    last_event: ClassVar[bytes] = b""
    """What follows the events of a whole reply."""
    read_places: ClassVar[frozenset[str]] = frozenset()
    """Where the events of a stream have calls with names in pieces, of which the round knows whose
    they are."""
    call_ids: ClassVar[str] = "call"
    """How ids begin that we give to calls."""

    _round: Round

    def __init__(self, request: RoundRequest) -> None:
        self.state = State.READY
        self.rounds = 0  # hidden rounds so far
        self.streams = request.streams  # whether the client asked for a stream
        # whether the request asks for usage that the client did not ask for
        self.asks_usage = request.asks_usage
        self.refusal: bytes | None = None
        """Upstream's error, if this round's reply is nothing else and the client has seen nothing
        of any reply."""
        self._request = request
        self._ledger = UsageLedger()
        self.spent = self._ledger.spent  # tokens over all rounds
        self.signs = 0  # how many events the client has got that it takes for signs of life
        self._shown = self.replies_as(request, self._ledger, streamed=True)
        self._circles = 0  # the newest rounds that only repeated calls
        self._before: list[bytes] = []
        self._after: list[bytes] = []
        self._instead: bytes | None = None
        self._answering: Sequence[Call] = ()
        self._answers: Sequence[str] = ()
        self._parts: Sequence[str] = ()  # of the same calls, "" for those without one
        self._given: set[str] = set()  # the ids that we gave to calls
        self._spoke = False  # whether the client has seen anything of earlier rounds
        self._pressed = False  # whether the model was asked once more, without our tools
        self._bare = False  # whether the client's own request is sent
        self._unknown: bytes | None = None  # a body that is no reply, for the client
        self._done = b""

    # -- what the dialect knows --

    @staticmethod
    @abstractmethod
    def read(data: bytes, raw: bytes, name: bytes | None, /) -> Any:
        """Return an event as the round reads it. Raises NotJson for anything else, which must be
        left unchanged."""

    @staticmethod
    @abstractmethod
    def events_of(members: Members, /) -> Iterable[Any]:
        """Return a whole reply as the round reads it. Raises NotJson or KeyError for anything
        else."""

    @abstractmethod
    def _error_in(self, parsed: Any, data: bytes) -> bytes | None:
        """Return the error that an event with this data is, if it is nothing else."""

    @staticmethod
    @abstractmethod
    def failure(fault: ProxyError, said: bytes, number: int, /) -> bytes:
        """Return the event that ends a stream after a failure; `number` is its place. Upstream's
        refusal `said` is used instead of `fault` if it has the shape that clients of this API
        know."""

    # -- what the driver calls --

    def request(self) -> bytes:
        """The body of the next round."""
        self._require(State.READY)
        self.state = State.READING
        self._done = b""
        injected = self._request.tools and not self._bare
        names = ToolNames(self._request.names, self._request.theirs) if injected else ToolNames(())
        self._round = self.rounds_as(self._request, names, self._shown)
        if self._bare:
            return self._request.client_body
        if not (self.rounds or self._before):
            return self._request.first()
        return self._request.later(
            [*self._request.entries, *self._before], last=self._last, bare=self._pressed
        )

    def resume(self, before: Sequence[bytes]) -> None:
        """Begin behind these hidden rounds, with which the same request was refused."""
        self._require(State.READY)
        self._before = list(before)

    def receive(self, event: sse.ServerSentEvent) -> bytes:
        """Take one event of a stream; returns the bytes for the client. Raises Broken."""
        self._require(State.READING)
        if self._done:
            return b""
        reading = self._round
        if event.data is not None:
            waits = reading.held or not self._shown.streamed
            if not waits and not reading.names.mentioned(event.data) and reading.extend(event.data):
                self.signs += 1
                return event.raw
            if event.data.strip() == sse.DONE:
                self._done = event.raw
                return b""
            try:
                parsed = self.read(event.data, event.raw, event.name)
            except NotJson:
                if event.name == b"error" or is_error(event.data):
                    self._refuse(event.data)
                elif reading.names.named_in(event.data):
                    raise Broken(
                        "an event that cannot be read names a tool of the proxy's"
                    ) from None
            else:
                return self._read(parsed, event.data)
        return event.raw if self._shown.streamed else b""

    def receive_whole(self, body: bytes) -> bytes:
        """Take a reply that is not a stream; returns the bytes for the client. Raises Broken.

        If the first reply is not a stream, the client gets no stream either, and `close` returns
        its whole reply.
        """
        self._require(State.READING)
        if not (self.rounds or self._bare):
            self._shown.streamed = False
        try:
            rawjson.check_utf8(body)
            events = list(self.events_of(rawjson.members(body)))
        except (NotJson, KeyError):  # the client gets it unchanged, if that is still possible
            self._round.failed = True
            if is_error(body):
                self.refusal = body
            elif self._round.names.named_in(body):
                raise Broken("a reply that cannot be read names a tool of the proxy's") from None
            elif self._shown.streamed:
                raise Broken("neither a stream nor a whole reply of this API") from None
            self._unknown = body
            return b""
        self._shown.body = body
        self._done = self.last_event
        return b"".join([self._read(event, body) for event in events])

    @property
    def over(self) -> bool:
        """Whether the round's reply has said that it is complete, so that nothing more needs to be
        received."""
        return bool(self._done) or self._round.over

    @property
    def complete(self) -> bool:
        """Whether upstream has said how the newest round's reply ends."""
        return self.over or bool(self._round.finish)

    def end(self) -> bytes:
        """End the round's reply, whether or not upstream said it was complete; returns the bytes
        for the client.

        Raises Broken if it has a call of ours or follows one, upstream did not say that it was
        complete, and it does not look so: the client does not see where it stopped.
        """
        self._require(State.READING)
        ending = self._round
        parts = ending.settle()
        ended = self._done or ending.finish or ending.failed
        if (ending.ours or self.rounds) and not (ended or ending.sound):
            raise Broken("the reply stopped before its end")
        self._ledger.add(ending.usage)
        self._answering = self._to_answer()
        if self._answering:
            self.state = State.CALLING
            self._identify()
            return self._show(
                parts
                + (ending.release(visible=True) if ending.theirs else ending.close(visible=False))
            )
        # ask once more, without our tools; calls of them are told so
        if self._mute and not self._pressed:
            out = self._show(parts + ending.close(visible=False))
            self._pressed = True
            self._answering = ending.ours
            self._identify()
            self._go_on([""] * len(self._answering))
            return out
        self.state = State.DONE
        parts += ending.release(visible=True)
        if self._spoke or ending.leaves_thinking:
            self._instead = rawjson.array(ending.written(()))
        return self._show(parts if self._shown.hides else parts + ending.close(visible=True))

    @property
    def calls(self) -> list[ToolCall]:
        """The calls of our tools to answer now."""
        self._require(State.CALLING)
        return [call.call() for call in self._answering]

    def answer(self, answers: Sequence[str], parts: Sequence[str] = ()) -> None:
        """Take the results of `calls`, in the same order, and the images and files among them as
        parts of results."""
        self._require(State.CALLING)
        if self._round.theirs:  # the client answers its own calls next and does not see ours
            self._instead = rawjson.array(self._round.written(frozenset(self._answering)))
            self._after = self._results(answers, parts)
            self.state = State.DONE
        else:
            self._go_on(answers, parts)

    def reword(self, text: str, *, only_parts: bool = False) -> None:
        """Prepare to resend the newest round with `text` in place of our tools' results, which did
        not fit, or only of those with a part, which upstream did not take."""
        self._require(State.READING)
        self.state = State.READY
        first = len(self._before) - len(self._answering)
        pairs = zip(self._answers, self._parts, strict=True)
        answers = [answer if only_parts and not part else text for answer, part in pairs]
        self._before[first:] = self._results(self._with_notice(answers))

    def start_over(self) -> bool:
        """Prepare to send the client's own request instead of the next round.

        Returns False, doing nothing, if the client has seen more of the reply than its beginning
        and thinking.
        """
        if self._bare or (self._shown.streamed and self._shown.answers):
            return False
        self.state = State.READY
        self._bare = True
        self._before = []
        self._after = []
        self._instead = None
        self._answering = ()
        self._spoke = not self._unseen
        self.refusal = None
        self._unknown = None
        if self._shown.streamed:
            self._shown.hides = True
        else:
            self._shown = self.replies_as(self._request, self._ledger, streamed=False)
        return True

    def error_event(self, fault: ProxyError, said: bytes = b"") -> bytes:
        return self.failure(fault, said, self._shown.next_number)

    def heartbeat(self) -> bytes:
        """Return an event by which the client knows that its stream is alive. Before the reply's
        beginning and after its end there is none, and a comment keeps the connection open."""
        return (b"" if self._shown.ended else self._shown.heartbeat()) or sse.comment(b"working")

    @property
    def visible(self) -> tuple[str, list[ToolCall]]:
        """The text and the calls that the client has seen."""
        return self._shown.visible

    @property
    def hidden(self) -> Hidden | None:
        """The rounds to store once the turn is DONE; None if the client has seen everything."""
        self._require(State.DONE)
        if self._round.failed or not (self._before or self._after or self._instead is not None):
            return None
        return Hidden(tuple(self._before), self._instead, tuple(self._after))

    @property
    def continuation(self) -> Continuation | None:
        """How a request goes on from the DONE turn's hidden rounds; None if upstream does not keep
        the history."""
        return None

    @property
    def before(self) -> Sequence[bytes]:
        """The hidden rounds so far behind which the model was asked."""
        return self._before

    @property
    def credit(self) -> str:
        """Upstream's token for the request if the model refused it; empty without such a token."""
        return ""

    @property
    def hides(self) -> bool:
        """Whether upstream has sent more than the client sees."""
        return self._shown.hides

    @property
    def mixed(self) -> bool:
        """Whether calls of ours were answered beside calls that the client answers."""
        return bool(self._after)

    def close(self) -> bytes:
        """Return the last bytes of the reply, or the whole reply if it is not a stream. Raises
        Broken."""
        self._require(State.DONE)
        if self._unknown is not None:
            return self._unknown
        out = self._show(self._round.close(visible=True))
        shown = self._shown
        if shown.streamed:
            return out + self._done
        whole = shown.assembled() if shown.hides or shown.altered else shown.body
        self._check(whole)
        return whole

    # -- one event --

    def _require(self, state: State) -> None:
        if self.state is not state:
            raise WrongState(f"{self.state.name} instead of {state.name}")

    def _read(self, parsed: Any, data: bytes) -> bytes:
        if (error := self._error_in(parsed, data)) is not None:
            self._refuse(error)
        return self._show(self._round.read(parsed))

    def _show(self, parts: Sequence[Part]) -> bytes:
        shown: list[bytes] = []
        for event, block in parts:
            shown.append(self._shown.put(event, block))
            self.signs += bool(shown[-1]) and self._shown.is_sign(event)
        out = b"".join(shown)
        if self._round.names.mentioned(out):
            for event in sse.EventDecoder().feed(out):
                self._check(event.data or b"", self.read_places)
        return out

    def _check(self, shown: bytes, read: Collection[str] = ()) -> None:
        """Raises Broken if the client would get a call of ours, which stood where none is read."""
        if calls_in(shown, self._round.names, read):
            raise Broken("a call of a tool of the proxy's stands where no call is read")

    @property
    def _unseen(self) -> bool:
        """Whether the client has seen nothing of the reply. A whole reply is sent at the end."""
        return not (self._shown.streamed and self._shown.has_content)

    def _refuse(self, error: bytes) -> None:
        if self.refusal is None and self._unseen:
            self.refusal = error
            self._round.failed = True

    # -- the end of a round --

    @property
    def _last(self) -> bool:
        """Whether the next round is the last one in which our tools could be called."""
        return self.rounds >= self._request.max_rounds or self._circles >= MAX_CIRCLES

    def _to_answer(self) -> Sequence[Call]:
        """Return the calls of our tools to answer; the others are dropped. Raises Broken for an
        endless one."""
        ending = self._round
        if ending.failed or self._last:
            return ()
        for call in ending.ours:
            check_arguments(len(call.call().arguments))
        if ending.unfinished:
            return [call for call in ending.ours if call.is_complete] if ending.theirs else ()
        return ending.ours

    @property
    def _mute(self) -> bool:
        """Whether the turn would end without an answer: the model only called our tools, or said
        nothing after it."""
        ending = self._round
        if self._bare or ending.failed or ending.unfinished or not (ending.finish or self._done):
            return False
        said_nothing = self.rounds > 0 and ending.empty and not self.visible[0].strip()
        return said_nothing or (bool(ending.ours) and not ending.theirs)

    def _go_on(self, answers: Sequence[str], parts: Sequence[str] = ()) -> None:
        """Prepare another round, in which the model reads these answers."""
        self.rounds += 1
        self._answers = answers
        self._parts = parts or [""] * len(answers)
        self._circles = self._circles + 1 if answers and set(answers) == {REPEATED} else 0
        if answers:
            self._before += self._round.written(frozenset(self._answering))
            self._before += self._results(self._with_notice(answers), parts)
        self._ledger.carry(self._round.usage)
        self._spoke = self._shown.has_content
        self._shown.native |= any(call.call().id not in self._given for call in self._round.ours)
        self._shown.go_on(self._round)
        self.state = State.READY

    def _with_notice(self, answers: Sequence[str]) -> Sequence[str]:
        """Return the answers, the newest with a line that says so if the next round is the last."""
        if not (self._last and answers):
            return answers
        notice = NO_MORE.format(*self._request.names)
        return [*answers[:-1], f"{answers[-1]}\n\n{notice}".lstrip()]

    def _results(self, answers: Sequence[str], parts: Sequence[str] = ()) -> list[bytes]:
        made = zip(self._answering, answers, parts or [""] * len(answers), strict=True)
        return [call.result(text, part) for call, text, part in made]

    def _identify(self) -> None:
        """Give calls without an id, or with a duplicate one, an id that is deterministic and unique
        to this turn."""
        known = {"", *(call.call().id for call in self._round.theirs)}
        newest = (self._before or self._request.entries or [b""])[-1]
        place = len(self._request.entries) + len(self._before)
        seed = hashlib.sha256(b"%d %b" % (place, newest)).hexdigest()[:16]
        for number, call in enumerate(self._answering):
            if call.call().id in known:
                call.identify(f"{self.call_ids}_{seed}_{number}")
                self._given.add(call.call().id)
            known.add(call.call().id)
