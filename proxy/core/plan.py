"""The fold: what would have been moved, and when, had the client adopted every earlier decision.

The client sends its whole history every time and never sees what went upstream. So the plan walks the history from
its start and does at each *request point* (a place where the client asked) what would have been done there and then.
A decision depends on nothing but the history before it and the policy: every later request reaches it again, on any
replica, and the upstream's prefix cache stays warm. No clock, no record, no randomness may come in here.

    items ──> Fold.add ──> at each request point: Fold._consider ──> events ──> Plan

All sizes are tokens. Every comparison with a threshold is strict.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from enum import IntEnum

import msgspec

from proxy.core.policy import Mode, Offload

SUMMARY_REQUEST_TOKENS = 500
"""What the task behind the conversation costs in a summary call, about."""
OUTPUT_PRICE = 5
"""An output token in input tokens: 5 at Anthropic's, 4 to 8 at OpenAI's price lists (2025)."""
PATIENCE = 8
"""Requests of the client for which an event waits for its snapshot. A summary takes one to four of them. Each carries
what the event frees once more; to break the prefix a second time costs about ten times as much."""
WINDOW_MARGIN = 0.05
"""Our counts and the upstream's differ: chat templates and other vocabularies add some per cent."""


class Role(IntEnum):
    SYSTEM = 0
    USER = 1
    ASSISTANT = 2
    TOOL = 3


class Item(msgspec.Struct, frozen=True, gc=False):
    """One message as the plan sees it."""

    role: Role
    tokens: int
    """As the client sent it."""
    glimpse: int
    """After compaction at first sight; `tokens` where that would not make it smaller."""
    brief: int
    """After compaction at an event; `tokens` where that would not make it smaller."""
    fixed: int = 0
    """Images and audio, which are no reason for an event."""


class Move(msgspec.Struct, frozen=True, gc=False):
    """A tool result whose text is out of the context.

    `glimpse`: it was too large to be sent even once. `event`: the ordinal (from 1) of the event that left only a
    reference of it, 0 where none did yet.
    """

    glimpse: bool
    event: int


def live(item: Item, move: Move | None) -> int:
    """What a message takes under the move decided for it."""
    if move is None:
        return item.tokens
    return item.brief if move.event else item.glimpse


class Cut(msgspec.Struct, frozen=True):
    """Everything before message `end` becomes a snapshot, but system messages and the user messages `pins`."""

    end: int
    pins: frozenset[int]
    event: int
    """The ordinal of the event that fixed it."""


class Event(msgspec.Struct, frozen=True):
    """A request point at which the context was rewritten.

    `turn` is where its user turn begins; what stands before `answered` had been sent, and answered, by then.
    """

    point: int
    turn: int
    answered: int


class Plan(msgspec.Struct, frozen=True):
    """What is to be moved. Indexes are those of the client's messages."""

    moves: dict[int, Move]
    cuts: tuple[Cut, ...]
    events: tuple[Event, ...]
    live: int
    """Tokens of the request as planned, tool definitions left out."""
    fits: bool
    """Whether that is within the window."""
    waited: int = 0
    """The client's requests since the latest event."""

    @property
    def empty(self) -> bool:
        return not (self.moves or self.cuts)

    @property
    def first(self) -> int:
        """The first request point from which references were sent, so that our tools were there to be called.

        Meaningless where the plan is empty.
        """
        points = [event.point for event in self.events]
        return min([*points, *(index + 1 for index, move in self.moves.items() if move.glimpse)], default=0)

    @property
    def turn(self) -> int:
        """Where the user turn of the newest event begins: what is older than that may shrink."""
        return self.events[-1].turn if self.events else 0

    def before(self, event: int) -> Plan:
        """The plan of the request before that event (ordinals from 1)."""
        answered = self.events[event - 1].answered
        plan = self._without(event)
        moves = {index: move for index, move in plan.moves.items() if index < answered}
        return msgspec.structs.replace(plan, moves=moves)

    def shown(self, cut: Cut | None) -> Plan:
        """What is sent of this plan while `cut` is the latest whose snapshot exists.

        An event that has a cut waits for its snapshot, so that the prefix breaks once and not twice: everything that it
        moves stands before the cut and will be gone with it.
        """
        newest = self.cuts[-1] if self.cuts else None
        if newest is None or newest == cut or newest.event < len(self.events):
            return self
        return self if self.waited >= PATIENCE else self._without(newest.event)

    def _without(self, event: int) -> Plan:
        """As if that event and those behind it had not been; what was moved at first sight stays so."""
        moves = {
            index: move if move.event < event else Move(glimpse=True, event=0)
            for index, move in self.moves.items()
            if move.glimpse or move.event < event
        }
        cuts = tuple(cut for cut in self.cuts if cut.event < event)
        return msgspec.structs.replace(self, moves=moves, cuts=cuts, events=self.events[: event - 1])


class Room(msgspec.Struct, frozen=True):
    """What upstream has room for. `window` None: not known. `aside`: tool definitions and the reply."""

    window: int | None = None
    aside: int = 0

    def holds(self, live: int) -> bool:
        return self.window is None or self.left(live) >= 0

    def left(self, live: int) -> int:
        """Tokens to spare beside `live` tokens of messages; only where the window is known."""
        assert self.window is not None
        return int(self.window * (1 - WINDOW_MARGIN)) - self.aside - live


class Fold:
    """The plan's state after the items so far. Each item costs the same, however many came before.

    A border walks along with the history: where the recent window begins. Sums are kept for what lies before it, since
    only that can be moved; a *gain* is what one event would free of it by compaction.
    """

    def __init__(self, offload: Offload, room: Room, entering: int = 0) -> None:
        self._offload = offload
        self._room = room
        self._entering = entering
        compacting = offload.mode is Mode.COMPACT
        self._keep = offload.keep_for_compaction() if compacting else offload.keep_for_compression()
        self._snapshot = offload.compress.snapshot_tokens
        self._enough = max(offload.min_saved_tokens, 1)
        self.items: list[Item] = []
        """Those taken so far."""
        self._live: list[int] = []  # per message, after the decisions so far; 0 for what a cut has taken
        self._step: list[int] = []  # per message, where its step begins
        self._moves: dict[int, Move] = {}
        self._cuts: list[Cut] = []
        self._events: list[Event] = []
        self._waited = 0
        self._unanswered = 0  # where what the model has not yet answered begins
        self._turn = 0
        self._total = 0
        self._head = 0  # live tokens up to the end of the first system message: a snapshot stands behind it
        self._rent = 0.0
        self._border = 0
        self._before = 0  # live tokens before the border
        self._movable = 0  # of these, without system messages
        self._fixed = 0  # of these, images and audio
        self._gains: list[int] = []  # the messages that an event would compact now
        self._gain = 0
        self._gain_from = 0  # live tokens before the first of them
        self._fitted = 0  # all before it was moved already because the window was full
        self._pins = Pins(offload.pin_user_tokens)

    def add(self, item: Item) -> None:
        """Take the history's next message; an assistant message shows that the client had asked before it."""
        index = len(self.items)
        if item.role is Role.ASSISTANT:
            if index and self.items[-1].role is not Role.ASSISTANT:
                self._request_point()
            self._unanswered = index + 1
        elif item.role is Role.USER:
            self._turn = index
        self._append(index, item)

    def plan(self) -> Plan:
        """The plan for a request that ends here. The fold itself can go on."""
        if not self.items or self.items[-1].role is Role.ASSISTANT:
            return self._decided()  # a prefill ends the history: its request point, the one before it, is behind us
        ended = self.copy()
        ended._request_point()
        return ended._decided()

    def copy(self) -> Fold:
        """Another one in the same state."""
        other = object.__new__(Fold)
        other.__dict__.update(self.__dict__)
        other.items, other._live, other._step = self.items.copy(), self._live.copy(), self._step.copy()
        other._moves, other._cuts, other._events = self._moves.copy(), self._cuts.copy(), self._events.copy()
        other._gains, other._pins = self._gains.copy(), self._pins.copy()
        return other

    def _decided(self) -> Plan:
        return Plan(
            moves=dict(self._moves),
            cuts=tuple(self._cuts),
            events=tuple(self._events),
            live=self._total,
            fits=self._room.holds(self._total),
            waited=self._waited if self._events else 0,
        )

    def _append(self, index: int, item: Item) -> None:
        live = item.tokens
        limit = self._offload.max_unseen_tool_tokens
        if item.role is Role.TOOL and item.tokens > limit and item.glimpse < item.tokens:
            live = item.glimpse
            self._moves[index] = Move(glimpse=True, event=0)
        in_step = item.role is Role.TOOL and index > 0
        self._step.append(self._step[-1] if in_step else index)
        self.items.append(item)
        self._live.append(live)
        self._total += live
        if item.role is Role.SYSTEM and not self._head:
            self._head = self._total

    # -- at a request point -------------------------------------------------------------------------------------

    def _request_point(self) -> None:
        self._waited += 1
        self._advance(self._window(self._keep))
        self._rent += self._offload.cached_read * self._removable()
        if not self._room.holds(self._total):
            self._fit()
        elif self._offloadable > self._offload.max_total_tokens:
            self._consider()

    def _window(self, keep: int) -> int:
        """Where the recent window begins: `keep` messages or all that is unanswered, widened to whole steps."""
        size = len(self.items)
        start = min(size - min(keep, size), self._unanswered)
        return self._step[start] if start < size else size

    def _advance(self, border: int) -> None:
        for index in range(self._border, border):
            self._leave_behind(index)
        self._border = max(self._border, border)

    def _leave_behind(self, index: int) -> None:
        """Message `index` is no longer recent: count it among what can be moved."""
        item, live = self.items[index], self._live[index]
        if self._compactable(index):
            self._gain_from = self._gain_from if self._gains else self._before
            self._gain += live - item.brief
            self._gains.append(index)
        self._before += live
        if item.role is Role.SYSTEM:
            return
        self._movable += live
        self._fixed += item.fixed
        if item.role is Role.USER:
            self._pins.add(index, live)

    def _compactable(self, index: int) -> bool:
        item = self.items[index]
        return (
            item.role is Role.TOOL
            and self._offload.mode is not Mode.COMPRESS
            and item.tokens > self._offload.max_tool_message_tokens
            and self._live[index] > item.brief
        )

    @property
    def _offloadable(self) -> int:
        return self._movable - self._fixed - self._pins.tokens

    @property
    def _compressible(self) -> int:
        """What a cut here would free, as the messages stand: an earlier snapshot makes room for the new one."""
        return self._movable - self._pins.tokens - (0 if self._cuts else self._snapshot)

    def _removable(self) -> int:
        """What an event would free now. Carrying it is the rent that in the end pays for the event."""
        if self._offload.mode is Mode.COMPACT or self._gain >= self._enough:
            return self._gain
        return max(self._compressible, 0)

    def _consider(self) -> None:
        """An event, if it frees enough and carrying on has cost as much as breaking the prefix will."""
        cut = self._wants_cut()
        if (self._compressible if cut else self._gain) < self._enough:
            return
        urgent = self._offloadable > 2 * self._offload.max_total_tokens
        if urgent or self._rent >= self._price(cut):
            self._event(self._gains, cut)

    def _wants_cut(self) -> bool:
        """Whether compaction alone leaves too much."""
        if self._offload.mode is not Mode.AUTO:
            return self._offload.mode is Mode.COMPRESS
        left = self._offloadable - self._gain
        ratio = (self._total - self._gain) / self._total
        return left > self._offload.max_total_tokens and ratio > self._offload.compact_ratio_threshold

    def _price(self, cut: bool) -> float:
        """What an event costs, in tokens of plain input: what is left behind its first change is written anew.

        What it frees is not, and does not count: on 111 recorded runs above 30,000 tokens, counting it as well costs
        0.83 of no proxy in the median and 1.27 at worst (writing at 1.25), and this 0.73 and 1.17.
        """
        read, write = self._offload.cached_read, self._offload.cache_write
        left = self._total - (self._compressible if cut else self._gain)
        if self._entering and not self._moves and not self._cuts:
            behind = left + self._entering
        else:
            behind = max(left - (self._head if cut else self._gain_from), 0)
        summary = read * self._total + SUMMARY_REQUEST_TOKENS + OUTPUT_PRICE * self._snapshot
        return (write - read) * behind + (summary if cut else 0)

    def _fit(self) -> None:
        """The request is above the window: move all that was seen, then compress all before what was not."""
        unseen = self._window(0)
        moved = [index for index in range(self._fitted, unseen) if self._live[index] > self.items[index].brief]
        freed = sum(self._live[index] - self.items[index].brief for index in moved)
        self._advance(unseen)
        self._fitted = unseen
        cut = not self._room.holds(self._total - freed) and self._cut_helps(freed)
        if moved or cut:
            self._event(moved, cut)

    def _cut_helps(self, freed: int) -> bool:
        """Whether a summary makes the request fit, or at least saves what an event must save.

        A request that is too large whatever we do must not pay for a summary at every turn.
        """
        if self._offload.mode is Mode.COMPACT:
            return False
        fits = self._room.holds(self._total - self._compressible)
        return self._compressible - freed >= (1 if fits else self._enough)

    # -- events -------------------------------------------------------------------------------------------------

    def _event(self, moved: Iterable[int], cut: bool) -> None:
        self._events.append(Event(len(self.items), self._turn, self._unanswered))
        self._waited = 0
        for index in moved:
            self._shrink(index)
        self._gains, self._gain, self._rent = [], 0, 0.0
        if cut:
            self._cut()

    def _shrink(self, index: int) -> None:
        item = self.items[index]
        freed = self._live[index] - item.brief
        self._live[index] = item.brief
        self._total -= freed
        self._before -= freed
        self._movable -= freed
        glimpsed = index in self._moves and self._moves[index].glimpse
        self._moves[index] = Move(glimpse=glimpsed, event=len(self._events))

    def _cut(self) -> None:
        """Everything before the border but system messages and pins becomes one snapshot, an earlier one included."""
        pins = self._pins.settle()
        freed = self._compressible
        for index in range(self._cuts[-1].end if self._cuts else 0, self._border):
            if self.items[index].role is not Role.SYSTEM and index not in pins:
                self._live[index] = 0
        self._total -= freed
        self._before -= freed
        self._movable = self._pins.tokens
        self._fixed = sum(self.items[index].fixed for index in pins)
        self._cuts.append(Cut(end=self._border, pins=pins, event=len(self._events)))


class Pins:
    """Which user messages a cut leaves alone: the first always, then from the newest back, as many as fit.

    The first stands outside of the budget: it mostly states the task and its rules, and a long one must not cost the
    newest its place. Messages are added as they leave the recent window; all of it costs the same per message.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._first: tuple[int, int] | None = None
        self._others: deque[tuple[int, int]] = deque()
        self.tokens = 0

    def add(self, index: int, tokens: int) -> None:
        """Message `index` is the newest; what no longer fits beside it falls out."""
        self.tokens += tokens
        if self._first is None:
            self._first = (index, tokens)
            self._budget += tokens
            return
        self._others.append((index, tokens))
        while self.tokens > self._budget:
            self.tokens -= self._others.popleft()[1]

    def copy(self) -> Pins:
        other = object.__new__(Pins)
        other.__dict__.update(self.__dict__)
        other._others = self._others.copy()
        return other

    def settle(self) -> frozenset[int]:
        """The indexes of those pinned now. What fell out before is taken by the cut and does not come back."""
        first = [] if self._first is None else [self._first]
        return frozenset(index for index, _ in (*first, *self._others))


def fold(items: Iterable[Item], offload: Offload, room: Room, entering: int = 0) -> Plan:
    """The plan for a history: a pure function of it, the policy and the room upstream has.

    `entering`: tokens of the tool definitions that come with the first event and stand before everything else, so that
    nothing of the prefix survives it; 0 where they are there from the start.
    """
    return folded(items, offload, room, entering).plan()


def folded(items: Iterable[Item], offload: Offload, room: Room, entering: int = 0) -> Fold:
    """The fold over these items, for a history that goes on."""
    state = Fold(offload, room, entering)
    for item in items:
        state.add(item)
    return state
