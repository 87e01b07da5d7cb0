"""The client's ONE reply, made of what upstream says in all rounds.

A reply of upstream is a sequence of *blocks*: texts, thoughts, calls, and whatever else. Each block
is

    held     until it is known whose it is, and everything that came after it waits;
    shown    where the client may see it;
    hidden   where it is a call of our tools or belongs to one, or must not be seen of a hidden round.

So what the client sees is a subsequence of upstream's blocks, in upstream's order. The end of a
round is a block, too: it is hidden if another round follows.

A dialect reads upstream's events into blocks (`Round`), and writes the blocks' events for the
client (`ClientReply`). A
*part* is an event and the block that it is about. A whole reply is read as the events of a stream, so both share one
code path.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, ClassVar, Self

import msgspec
from msgspec import Raw

from proxy import rawjson, sse
from proxy.dialects.request import RoundRequest, decoded
from proxy.dialects.usage import UsageLedger
from proxy.plan.plan import ToolCall
from proxy.plan.turn import Broken
from proxy.rawjson import Members

MAX_REPLY = 32 << 20
"""The most bytes that are kept of one round: about eight million tokens."""
LARGE = 2_000
"""A candidate of so many characters is read again only when it has grown by an eighth: all takes
linear time."""
MAX_ARGUMENTS = 1 << 20
"""The most bytes of arguments for one call of our tools; a search pattern and a path need a few
hundred."""


def check_arguments(size: int) -> None:
    """Raises Broken if a call of our tools has so many bytes of arguments that it is endless."""
    if size > MAX_ARGUMENTS:
        raise Broken(f"more than {MAX_ARGUMENTS} bytes of arguments for a call")


ORDINARY = frozenset(("", "stop", "eos", "end_turn"))
"""How upstream says, in any API, that the model was done (`eos`: TGI). With any other word, it may
have been stopped: `model_length` (Mistral), `SAFETY` (Gemini)."""


def is_object(arguments: str) -> bool:
    """Whether a call's arguments are a complete JSON object."""
    try:
        rawjson.members(arguments.encode("utf-8", "replace"))
    except rawjson.NotJson:
        return False
    return True


def as_object(arguments: str) -> str:
    """Return a call's arguments as they go back upstream. Servers refuse a history in which those
    of a call are no object (vLLM), so an empty one stands for whatever else a model wrote."""
    return arguments if is_object(arguments) else "{}"


class Block:
    """A piece of a reply."""

    def __init__(self, shown: bool | None = None) -> None:
        self.shown = shown  # whether the client sees it; None while it is held
        # which of our tools it calls; empty for none, None while its name is not known
        self.ours: str | None = ""
        self.place: int | None = None  # its place among the blocks that the client sees

    @property
    def thinks(self) -> bool:
        """Whether it is the model's thinking."""
        return False


class Candidate(Block):
    """A piece of a text that may be calls of our tools: see `textcalls`. `of` is the block that it
    belongs to."""

    def __init__(self, text: str, of: Block, event: Callable[[str], Any]) -> None:
        super().__init__()
        self.text = text
        self.of = of
        self.next = 0  # how many characters it has to have before it is read again
        self.event = event

    def grow(self, text: str) -> None:
        self.text = text
        self.next = len(text) + len(text) // 8 if len(text) > LARGE else 0

    @property
    def verdict(self) -> bool | None:
        """Whether the client sees it; None while that is not known."""
        return self.of.shown if self.shown else self.shown


class Call(Block, ABC):
    """A block that may be a call."""

    @property
    @abstractmethod
    def is_complete(self) -> bool:
        """Whether it is complete although the reply is not."""

    @abstractmethod
    def call(self) -> ToolCall: ...

    @abstractmethod
    def identify(self, id: str) -> None:
        """Give the call this id."""

    @abstractmethod
    def result(self, text: str, part: str) -> bytes:
        """Return the entry with its result: a text, and an image or a file behind it if there is
        one."""


Part = tuple[Any, Block]


class Event:
    """One event of a stream of JSON objects that have a type, or its name alone says it. `raw`
    holds the bytes that came, if it is upstream's."""

    decoder: ClassVar[msgspec.json.Decoder[Any]]
    """Decodes the members that the API's events may have."""

    def __init__(self, data: bytes, raw: bytes = b"", name: bytes | None = None) -> None:
        """Raises NotJson for anything that is no event of the API; it must be left unchanged."""
        self.data = data
        self.raw = raw
        self.name = name
        self.decoded = decoded(self.decoder, data)
        self.type: str = self.decoded.type or (name or b"").decode("utf-8", "replace")
        if not self.type:
            raise rawjson.NotJson("an event without a type")

    @classmethod
    def made(cls, type: str, **members: object) -> Self:
        """Return an event of ours, or of a reply that is not a stream."""
        return cls(rawjson.encode({"type": type, **members}), name=type.encode())

    def encoded(self, changed: Members) -> bytes:
        """Return the event for the client, with these members in place of its own."""
        if self.raw and not changed:
            return self.raw
        return sse.encode(rawjson.encode(rawjson.members(self.data) | changed), self.name)


class Round(ABC):
    """Reads one reply of upstream, and decides what of it the client may see. `names` are empty
    where the request does not have our tools; `reply` is what the client has seen of earlier
    rounds."""

    ordinary: ClassVar[frozenset[str]]
    """The values of `finish` that say that the model was done, `ORDINARY` among them."""
    stops: ClassVar[frozenset[str]]
    """Those that always say that it was stopped before."""

    def __init__(self, request: RoundRequest, names: ToolNames, reply: ClientReply) -> None:
        self.blocks: list[Any] = []
        self.finish = ""  # how upstream said that the reply ends; empty until it is known
        self.failed = False  # whether upstream reports an error
        self.over = False  # whether upstream has said that nothing more comes
        self.usage: Raw | None = None
        self.id = ""
        self.names = names
        self.closing = Block(None if names else True)  # what upstream says at the reply's end
        self.held: deque[Part] = deque()
        self._request = request
        self._reply = reply
        self._later = reply.begun
        self._holds_text = bool(names) and request.wants_json  # because two JSON texts are not JSON
        self._loose = Block(True)  # what belongs to no block
        self._size = 0

    @abstractmethod
    def read(self, event: Any) -> list[Part]:
        """Return the parts to show now, of this event and of earlier ones that were held. Raises
        Broken."""

    @abstractmethod
    def extend(self, data: bytes) -> bool:
        """Take an event that only continues what is passed on to the client as it comes. Returns
        whether it is one; if not, nothing has changed. Called only while nothing is held, with
        events that name none of our tools."""

    @abstractmethod
    def settle(self) -> list[Part]:
        """Decide whose the remaining calls are, now that the reply has ended. Returns the parts to
        show."""

    @abstractmethod
    def written(self, answered: Collection[Call]) -> list[bytes]:
        """Return the reply as entries for upstream. Of our tools' calls, it has only those that are
        `answered`."""

    @property
    @abstractmethod
    def empty(self) -> bool:
        """Whether the model said nothing and called nothing but our tools."""

    @property
    def ours(self) -> list[Any]:
        """The calls of our tools."""
        return [block for block in self.blocks if block.ours]

    @property
    def thinks_aloud(self) -> bool:
        """Whether thinking is shown as it comes: the model has called none of our tools in this
        turn."""
        return not (self.names and (self._reply.hides or self.ours))

    @property
    def leaves_thinking(self) -> bool:
        """Whether the client has seen thinking that upstream takes back only with a call of
        ours."""
        return False

    @property
    def theirs(self) -> list[Any]:
        """The calls that the client answers."""
        return [block for block in self.blocks if block.ours == ""]

    @property
    def unfinished(self) -> bool:
        """Whether the model was stopped before it was done, so that its last call may be
        incomplete.

        With a word that we do not know, it was stopped if that call is incomplete.
        """
        if self.finish in self.stops or self.finish in self.ordinary:
            return self.finish in self.stops
        called = {*self.ours, *self.theirs}
        calls = [block for block in self.blocks if block in called]
        return bool(calls) and not calls[-1].is_complete

    @property
    def sound(self) -> bool:
        """Whether the reply can be used although upstream did not say that it ends: the model said
        something, and every call of our tools is complete."""
        return all(call.is_complete for call in self.ours) and bool(self.ours or not self.empty)

    def quotes(self) -> bool:
        """Whether a call in a text is a quotation: upstream has sent calls of our tools as calls
        before."""
        return self._reply.native or self._request.native

    # -- the queue --

    def put(self, event: Any, block: Block, size: int) -> list[Part]:
        """Take the next part, of so many bytes. Returns the parts to show now. Raises Broken if too
        much is held."""
        if block.shown and not self.held and not isinstance(block, Candidate):
            return [(event, block)]
        self.grow(size)
        if block.shown is False:
            return []
        self.held.append((event, block))
        return self.flow()

    def grow(self, size: int) -> None:
        """Count bytes that are kept. Raises Broken if they are too many."""
        self._size += size
        if self._size > MAX_REPLY:
            raise Broken(f"more than {MAX_REPLY} bytes of a reply are kept")

    def decide(self, block: Block, *, shown: bool) -> None:
        """Decide about a block that is held. `flow` then returns what no longer waits."""
        block.shown = shown
        self._reply.hides |= not shown

    def flow(self) -> list[Part]:
        """Return the parts that no longer wait."""
        shown: list[Part] = []
        while self.held:
            event, block = self.held[0]
            candidate = block if isinstance(block, Candidate) else None
            decided = candidate.verdict if candidate else block.shown
            if decided is None:
                break
            self.held.popleft()
            if decided and candidate is None:
                shown.append((event, block))
            elif decided and candidate and (made := candidate.event(candidate.text)) is not None:
                shown.append((made, candidate.of))
        return shown

    def release(self, *, visible: bool) -> list[Part]:
        """Decide about everything that is still held but the end, because it is known whether the
        round is hidden."""
        self._holds_text = False
        blocks = [block for _, block in self.held]
        for block in [*blocks, *(one.of for one in blocks if isinstance(one, Candidate))]:
            if block.shown is None and block is not self.closing:
                self.decide(block, shown=visible)
        return self.flow()

    def close(self, *, visible: bool) -> list[Part]:
        """Decide about everything that is still held."""
        parts = self.release(visible=visible)
        self.closing.shown = visible
        return parts + self.flow()

    def fail(self, event: Any, size: int) -> list[Part]:
        """Take an error, with which the reply ends. Everything that came before it is shown."""
        self.failed = True
        return self.settle() + self.close(visible=True) + self.put(event, self._loose, size)


class ClientReply(ABC):
    """The reply as the client sees it, so far. `streamed`: it gets events at once, else all at the
    end."""

    next_number = 0
    """The sequence number of the next event, where an API has them."""

    def __init__(self, request: RoundRequest, ledger: UsageLedger, *, streamed: bool) -> None:
        self.streamed = streamed
        self.blocks: list[Any] = []  # the blocks that the client sees
        self.has_content = False  # whether the client has seen anything but the reply's beginning
        self.answers = False  # whether it has seen anything but thinking besides
        self.begun = False  # whether it has a beginning, so that no other one may follow
        self.ended = False  # whether the client has seen how it ends
        self.hides = False  # whether upstream sent more than the client sees
        # the last round's body, if it was no stream: the reply, if nothing in it had to change
        self.body = b""
        self.native = False  # whether upstream has called our tools, and not only in a text
        self.altered = False  # whether it may not be sent as it came, even if nothing is hidden
        self._request: Any = request
        self._ledger = ledger
        self._names = request.names if request.tools else ()
        self._frame: Members = {}  # what all rounds share: members of the first one

    @property
    @abstractmethod
    def visible(self) -> tuple[str, list[ToolCall]]:
        """The text and the calls that the client has seen."""

    @abstractmethod
    def put(self, event: Any, block: Block) -> bytes:
        """Take the next part; returns its bytes for the client, none if it gets no stream. Raises
        Broken."""

    @abstractmethod
    def assembled(self) -> bytes:
        """Return the whole reply."""

    @staticmethod
    def is_sign(event: Any, /) -> bool:
        """Whether clients take this event for a sign of life."""
        return True

    @abstractmethod
    def heartbeat(self) -> bytes:
        """Return an event that is a sign of life and says nothing else; empty before the reply has
        a beginning."""

    def go_on(self, ending: Any) -> None:
        """Prepare for another round after this one, which must look like a continuation."""
        self.hides = True

    def _adopt(self, block: Any) -> None:
        """Give a block that is shown for the first time its place in the reply."""
        block.place = len(self.blocks)
        self.has_content = True
        self.answers |= not block.thinks
        self.blocks.append(block)


# -- the names of our tools ------------------------------------------------------------------------

_MARK = r"""[\s.:/=<|>"'`()\[\]]"""
_BEFORE = (
    *(
        "functions",
        "function",
        "tools",
        "tool",
        "default_api",
        "default",
        "api",
        "tool_call",
        "call",
        "name",
    ),
    *("assistant", "commentary", "analysis", "final", "channel", "start", "recipient", "to"),
)
_AFTER = r"channel|commentary|analysis|final|constrain|json|code|message|call|end|start|\d+"
_WRITTEN = re.compile(
    rf"(?:{_MARK}|(?:{'|'.join(_BEFORE)})(?={_MARK}))*([\w-]+)(?:{_MARK}|(?<={_MARK})(?:{_AFTER})(?={_MARK}|$))*",
    re.IGNORECASE,
)
"""A name with what models put before and after it: `functions.grep:0`,
`read_file<|channel|>commentary`."""
LONGEST = 200
"""Characters of the longest name that can be one of ours with words before and after it."""


class ToolNames:
    """The names of our tools, and `theirs`, the names of the client's tools, which are always the
    client's.

    Models write ours in the format that they were trained with, or in its case: `Grep`.
    """

    def __init__(self, ours: Sequence[str], theirs: Collection[str] = ()) -> None:
        self._ours = ours
        self._theirs = theirs
        taken = {name.lower() for name in theirs}
        self._in_any_case = {name.lower(): name for name in ours if name.lower() not in taken}
        self._words = [name.lower().encode() for name in ours]

    def __bool__(self) -> bool:
        """Whether the request has our tools."""
        return bool(self._ours)

    def recognised(self, name: str) -> str:
        """Return which of our tools a complete name means, or "" if it means none."""
        if name in self._ours:
            return name
        if name in self._theirs or len(name) > LONGEST or not (written := _WRITTEN.fullmatch(name)):
            return ""
        word = written[1]
        return word if word in self._ours else self._in_any_case.get(word.lower(), "")

    def mentioned(self, data: bytes) -> bool:
        """Whether bytes have one of our tools' names anywhere, in any case."""
        if not self._words:
            return False
        return any(map(data.lower().__contains__, self._words))

    def named_in(self, data: bytes) -> bool:
        """Whether bytes that cannot be read have one of our tools' names as a string, so that they
        may call it."""
        return any(b'"%b"' % name.encode() in data for name in self._ours)

    def theirs(self, name: str) -> bool:
        """Whether this is one of the client's tools."""
        return name in self._theirs

    def excludes(self, beginning: str) -> bool:
        """Whether a name that begins like this is none of ours, whatever follows."""
        if not self._ours:
            return True
        if not re.fullmatch(r"[\w-]+", beginning):
            return False
        return not any(word.startswith(beginning.lower()) for word in (*self._ours, *_BEFORE))
