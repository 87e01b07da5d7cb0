"""The plan's values: messages as the plan sees them, and its decisions about them. A message is a
function of an entry's bytes and of the policy alone.

All sizes are tokens. `planner` makes plans, and everyone else reads `Plan`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from enum import IntEnum
from functools import cached_property
from operator import attrgetter

import msgspec
from msgspec import Raw

from proxy.plan.preview import PREVIEW_CHARS, Label, Shape, Spans
from proxy.plan.texts import Carries, ResultRule, is_tool
from proxy.policy import Offload

PATIENCE = 8
"""How many of the client's requests an event waits for its snapshot. A summary takes one to four of
them. Each request that waits carries the old content once more, but breaking the prefix a second
time costs about ten times as much."""
WINDOW_MARGIN = 0.05
"""Upstream counts a few per cent more tokens than we do, because of chat templates and other
vocabularies."""
CEILING_SHARE = 0.6
"""The most of a known window that the history may take before results move: the rest is for what
the model reads next, its reply, the system prompt and the definitions of tools."""
LEADING_SHARES = 8  # the window's parts in which the planner counts leading system messages


class Role(IntEnum):
    SYSTEM = 0
    USER = 1
    ASSISTANT = 2
    TOOL = 3
    SEALED = 4  # what only upstream can read, such as its own summary. It always stays where it is.


# -- a message, without its texts ------------------------------------------------------------------

Count = Callable[[str], int]
Breakpoint = tuple[str, bytes]
"""A cache breakpoint: the member that sets it, and its value."""


def digest(raw: bytes | Raw) -> bytes:
    """Identifies an entry's bytes."""
    return hashlib.sha256(raw).digest()


class ToolCall(msgspec.Struct, frozen=True, gc=False):
    """A tool call of a model. `arguments` is the text as the model wrote it."""

    id: str
    name: str
    arguments: str


class Piece(msgspec.Struct, frozen=True, gc=False):
    """A text, an image or a file that can be moved. `part` is its place in the entry; None for the
    only text."""

    part: int | None
    digest: str  # of the text; see `preview.digest`
    tokens: int
    preview: int  # tokens of its replacement at an event; `tokens` where that would not be smaller
    first_preview: int  # the same for a text that the model has not seen yet
    label: Label  # what it is. A result has a general label until `Naming` has found its call.
    opening: int = 0
    """The first characters of it that stay in any case: they tell the client's model that a result
    follows."""
    name: str = ""  # the name of the file that it moves to; empty until `Naming` has given it one
    spans: Spans = ()  # where the user speaks in it; see `said`
    # what it is, if it is the JSON of an image or a file: `image, image/png, 34 kB`
    media: str = ""

    def named(self, name: str, label: Label) -> Piece:
        """Return the piece with its name and label, and with the tokens that they add to its
        replacement."""
        return msgspec.structs.replace(
            self,
            name=name,
            label=label,
            preview=min(self.preview + label.tokens, self.tokens),
            first_preview=min(self.first_preview + label.tokens, self.tokens),
        )


REPLACED_BYTES = 600
TOKEN_BYTES = 5
"""Bytes that the replacement of a message takes when it was made, and for each token of it."""

MESSAGE_BYTES = 520
PIECE_BYTES = 300
CALL_BYTES = 180
MARK_BYTES = 60
"""Bytes that a message, each of its pieces, and each of its calls take, without the texts of names,
ids and labels."""


class Message(msgspec.Struct, frozen=True, dict=True):
    """Everything that the plan needs of one message, without its text."""

    digest: bytes  # of the bytes as they came
    role: Role
    meaning: bytes
    tokens: int
    pieces: tuple[Piece, ...]
    calls: tuple[tuple[str, str], ...]  # id and name of each tool call that it makes
    answers: str  # the id of the tool call whose result it is; empty for other messages
    sealed: str = ""
    """What in it is not known to be safe to move or to cut: the path of a member, or words that are
    none. Then it and its step stay as they are. Empty: everything is known."""
    user_speaks: bool = False
    """Whether the user speaks in it, whoever sends it; see `said`. It stays, and a moved text
    leaves these words."""
    failed: bool = False  # whether it is a result that reports an error; see `texts.reports_error`
    # whether the policy's `results` name it, as far as that does not depend on its place
    carries: Carries = Carries.NO
    # what the results of its calls are called, in the order of the calls
    labels: tuple[Label, ...] = ()
    # what marks each of its calls that has an id; see `recognise.mark`
    marks: tuple[bytes, ...] = ()
    fixed: int = 0  # tokens of images and audio, which cannot cause an event
    has_place: bool = False  # whether it has the name of the folder of moved texts
    names: frozenset[str] = frozenset()  # what looks like the names of moved texts
    breakpoints: tuple[Breakpoint, ...] = ()  # the client's cache breakpoints, all in one spelling

    @cached_property
    def replaced(self) -> dict[bool, bytes]:
        """What stands for the entry once it has moved, as far as it was made: with a first preview
        (True) or without."""
        return {}

    @property
    def preview(self) -> int:
        """Its tokens once it moved at an event."""
        return self.tokens - sum([piece.tokens - piece.preview for piece in self.pieces])

    @property
    def first_preview(self) -> int:
        """Its tokens once it moved at first sight."""
        return self.tokens - sum([piece.tokens - piece.first_preview for piece in self.pieces])

    def size(self) -> int:
        """About how many bytes it takes."""
        size = MESSAGE_BYTES + len(self.answers)
        if self.pieces:
            size += sum([PIECE_BYTES + len(piece.name) + len(piece.media) for piece in self.pieces])
            preview = self.preview
            size += REPLACED_BYTES + TOKEN_BYTES * preview if preview < self.tokens else 0
        if self.calls:
            size += sum([CALL_BYTES + len(id) + len(name) for id, name in self.calls])
            size += sum(map(Label.size, self.labels)) + MARK_BYTES * len(self.marks)
        return size


def moved_pieces(message: Message, first_preview: bool) -> list[Piece]:
    """The pieces of a moved message that are worth moving."""
    left = attrgetter("first_preview" if first_preview else "preview")
    return [piece for piece in message.pieces if left(piece) < piece.tokens]


class Reading(msgspec.Struct, frozen=True):
    """What a `Message` depends on besides the bytes: the shape of replacements, the limit for
    unseen results, and the rules that name messages with results."""

    shape: Shape
    unseen_limit: int
    results: tuple[ResultRule, ...] = ()
    user_openings: tuple[str, ...] = ()  # further texts with which the user's words begin
    harmless: tuple[str, ...] = ()  # paths of members that we do not know, and that seal nothing

    @classmethod
    def of(
        cls, offload: Offload, window: int | None = None, harmless: tuple[str, ...] = ()
    ) -> Reading:
        shape = Shape(offload.store_dir, PREVIEW_CHARS)
        beginnings = tuple(named for named in offload.said if not is_tool(named))
        limit = offload.unseen_limit(window)
        return cls(shape, limit, offload.result_rules(), beginnings, harmless)


# -- what the plan decides about it ----------------------------------------------------------------


class Item(msgspec.Struct, frozen=True, gc=False):
    """One message as the plan sees it. Only messages that may ever be moved have previews that are
    smaller."""

    # the part that it plays: TOOL for every message that carries a result, whatever its role in the
    # API
    role: Role
    tokens: int  # as the client sent it
    # once it moved at first sight; `tokens` where that would not make it smaller
    first_preview: int
    preview: int  # once it moved at an event; `tokens` where that would not make it smaller
    fixed: int = 0  # tokens of images and audio, which cannot cause an event
    stays: bool = False
    """A cut leaves it in its place, because a call or a result near it fits into no pair; see
    `Pairing`."""
    stays_before: int = 0  # so many messages directly before it turn out to stay as well


class Move(msgspec.Struct, frozen=True, gc=False):
    """A message whose text has moved out of the context: a result, or a large user message.
    `first_preview`: it was too large to be sent even once. `event`: the ordinal (from 1) of the
    event that left only a reference to it; 0 where no event has yet."""

    first_preview: bool
    event: int


def live(item: Item, move: Move | None) -> int:
    """A message's tokens after its move, if it has one."""
    if move is None:
        return item.tokens
    return item.preview if move.event else item.first_preview


class SummaryBoundary(msgspec.Struct, frozen=True):
    """Everything before message `end` becomes a snapshot, except the leading system messages and
    the `pins`. Pins are user messages, small later system messages, and messages that stay because
    their calls and results do not pair."""

    end: int
    pins: frozenset[int]
    event: int  # the ordinal of the event that fixed it


class Cause(IntEnum):
    """Why an event happened."""

    TOTAL = 0  # the history exceeded the ceiling
    EARLY = 1  # old results moved because that pays
    WINDOW = 2  # the request did not fit the window
    ASKED = 3  # the client asked for compaction
    EXPIRED = 4  # upstream's cache had expired, so that writing the prompt again cost nothing extra


class OffloadEvent(msgspec.Struct, frozen=True):
    """A request point at which the context was rewritten. Everything before `answered` had been
    answered by then."""

    point: int
    answered: int
    cause: Cause = Cause.TOTAL
    total: int = 0  # tokens of the history before the event
    rewritten: int = 0  # those from the first change on, which upstream has to read again
    # seconds since the request before it, where upstream's cache had expired meanwhile
    pause: int = 0


class Standing(msgspec.Struct, frozen=True):
    """How far a history is from its next event."""

    total: int  # tokens of the history as planned, without a prefill at its end
    ceiling: int
    results: int = 0  # results that are large enough to move, and have not
    old: int = 0  # those that the model has answered `keep_views` times
    new: int = 0  # those among the newest messages, which stay for now
    held: int = 0  # results of that size that may not move
    free: int = 0
    """Tokens that an event would free now: what the mode moves or, where it would summarise, what
    that replaces."""
    full: bool = False  # whether the request does not fit the window
    task: int = 0  # tokens of the user's first message, which always stays
    # requests after which moving the newest old results would pay; None if it never does
    pays_after: int | None = None


class Plan(msgspec.Struct, frozen=True):
    """The moves and boundaries for a request. Indexes count the client's messages."""

    moves: dict[int, Move]
    boundaries: tuple[SummaryBoundary, ...]
    events: tuple[OffloadEvent, ...]
    live: int  # tokens of the request as planned, tool definitions left out
    fits: bool  # whether that is within the window
    waited: int = 0  # the client's requests since the latest event
    used: int = 0
    """Where the newest reply begins that the model gave before this request. The hidden rounds
    before it have been used: an answer of our tools stays whole in the request after its reply and
    becomes a pointer in the next one."""
    standing: Standing = Standing(0, 0)  # how far the next event is

    @property
    def empty(self) -> bool:
        return not (self.moves or self.boundaries)

    @property
    def first(self) -> int:
        """The first request point whose request had references, and therefore our tools. The plan
        is not empty."""
        points = [event.point for event in self.events]
        return min(
            [*points, *(index + 1 for index, move in self.moves.items() if move.first_preview)],
            default=0,
        )

    def before(self, event: int) -> Plan:
        """The plan of the request before that event (ordinals from 1)."""
        answered = self.events[event - 1].answered
        plan = self.without(event)
        moves = {index: move for index, move in plan.moves.items() if index < answered}
        return msgspec.structs.replace(plan, moves=moves)

    def shown(self, boundary: SummaryBoundary | None) -> Plan:
        """The part of this plan that is sent while `boundary` is the latest one whose snapshot
        exists. An event with a boundary waits for its snapshot, so that the prefix breaks once and
        not twice: everything that the event moves is before the boundary, and the snapshot will
        replace it."""
        newest = self.boundaries[-1] if self.boundaries else None
        if newest is None or newest == boundary or newest.event < len(self.events):
            return self
        return self if self.waited >= PATIENCE else self.without(newest.event)

    def without(self, event: int) -> Plan:
        """The plan without that event and all later ones. Results that moved before they were seen
        stay moved."""
        moves = {
            index: move if move.event < event else Move(first_preview=True, event=0)
            for index, move in self.moves.items()
            if move.first_preview or move.event < event
        }
        boundaries = tuple(boundary for boundary in self.boundaries if boundary.event < event)
        return msgspec.structs.replace(
            self, moves=moves, boundaries=boundaries, events=self.events[: event - 1]
        )


class Room(msgspec.Struct, frozen=True):
    """The room that upstream has. `window` None: not known. `aside`: tokens of the tool definitions
    and the reply."""

    window: int | None = None
    aside: int = 0
    reply: int = 0  # the part of `aside` that is kept free for the reply
    preamble: int = 0
    """Tokens of text that precedes the history and is no part of it. It counts like leading system
    messages."""

    def holds(self, live: int) -> bool:
        return self.window is None or self.left(live) >= 0

    def ceiling(self, total: int) -> int:
        """The tokens of history above which results move at any price, where the policy allows
        `total`."""
        return total if self.window is None else min(total, int(self.window * CEILING_SHARE))

    def left(self, live: int) -> int:
        """Tokens left beside `live` tokens of messages. The window must be known."""
        assert self.window is not None
        return int(self.window * (1 - WINDOW_MARGIN)) - self.aside - self.preamble - live

    def reserved(self, leading: int) -> int:
        """The tokens to plan with for leading system messages of `leading` tokens: whole eighths of
        the window. Many agents rewrite their system prompt on every turn. As long as it stays
        within the same eighth, its size changes no decision about the past."""
        share = max((self.window or 0) // LEADING_SHARES, 1)
        return max(-(-(self.preamble + leading) // share), 1) * share - self.preamble
