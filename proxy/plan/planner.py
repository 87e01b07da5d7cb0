"""The planner: decides what to move, and when, as if the client had adopted every earlier decision.

The client sends its whole history every time and never sees the request that went upstream. So the planner walks the
history from the start and, at each *request point* (a place where the client asked), decides as it would have then. A
decision depends only on the history before it and on the policy. So every later request reaches it again, on any
replica, and the upstream's prompt cache stays warm. No clock, record or random number may influence it.

    items ──> Fold.add ──> at each request point: Fold._request_point ──> events ──> Plan

One rule decides. Old results stay until the model has answered `keep_views` times with them in view. Then the newest
ones move as soon as seven more requests with them would cost more than writing the rest of the prompt again. And
whenever the history exceeds its ceiling, the oldest results move until half of that is left, whatever it costs. In the
modes that summarise, a snapshot replaces the history where moving results leaves too much. A request that does not fit
the window is made to fit.

All sizes are tokens. A ceiling or a window is exceeded only above it.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable
from itertools import islice
from math import ceil
from typing import Self

from proxy.plan.context import Messages, OldHistory
from proxy.plan.plan import Cause, Item, Move, OffloadEvent, Plan, Role, Room, Standing, SummaryBoundary
from proxy.policy import Mode, Offload

LEAST_SHARE = 10
"""An event at the ceiling frees at least one part in so many of it, because it breaks the prompt cache."""
PAYBACK = 7
"""Results move early if that pays within so many more requests. Tuned on half of the recorded runs: 5 and 10 change the
medians by less than 0.02, and 14 makes the worst runs dearer."""
REACH = 128
"""The most results that are looked at in one request, which bounds its work. Older ones wait for the ceiling."""


class Fold:
    """The planner's state after the items so far. Each item takes constant time, however many came before."""

    def __init__(self, offload: Offload, room: Room, tool_definition_tokens: int = 0) -> None:
        self._offload = offload
        self._room = room
        self._tool_definition_tokens = tool_definition_tokens
        self._keep = offload.keep_recent()
        self._unseen_limit = offload.unseen_limit(room.window)
        self._ceiling = room.ceiling(offload.max_total_tokens)
        self._least = least_freed(self._ceiling)
        self.messages = Messages()
        """The messages so far."""
        self._old = OldHistory(offload)
        self._answered = deque([0] * offload.keep_views, maxlen=offload.keep_views)  # by the latest requests
        self._moves: dict[int, Move] = {}
        self._boundaries: list[SummaryBoundary] = []
        self._events: list[OffloadEvent] = []
        self._waited = 0
        self._fitted = 0  # everything before this index was moved when the window was full
        self._results = 0  # those that are large and have not moved
        self._pays_after: int | None = None
        self._standing = Standing(0, self._ceiling)

    def add(self, item: Item) -> None:
        """Add the history's next message. An assistant message shows that the client asked just before it."""
        if item.role is Role.ASSISTANT and not self.messages.answered:
            self._request_point()
        first_sight = item.role is Role.TOOL and item.tokens > self._unseen_limit and item.first_preview < item.tokens
        if first_sight:
            self._moves[len(self.messages.items)] = Move(first_preview=True, event=0)
        live = item.first_preview if first_sight else item.tokens
        self._results += self._old.large(item, live)
        self.messages.append(item, live)

    def plan(self) -> Plan:
        """The plan for a request that ends here. The fold itself can continue."""
        if self.messages.answered:
            return self._decided()  # the history ends in a prefill, whose request point came before it
        ended = self.copy()
        ended._request_point()
        return ended._decided()

    def copy(self) -> Self:
        """An independent fold in the same state."""
        other = copy.copy(self)
        other.messages, other._old = self.messages.copy(), self._old.copy()
        other._answered = self._answered.copy()
        other._moves, other._boundaries = self._moves.copy(), self._boundaries.copy()
        other._events = self._events.copy()
        return other

    @property
    def pins(self) -> int:
        """The number of pins of all boundaries together, which take most of its memory where there are many."""
        return sum([len(boundary.pins) for boundary in self._boundaries])

    def _decided(self) -> Plan:
        messages = self.messages
        live = messages.leading_tokens + messages.total
        return Plan(
            moves=dict(self._moves),
            boundaries=tuple(self._boundaries),
            events=tuple(self._events),
            live=live,
            fits=self._room.holds(live),
            waited=self._waited if self._events else 0,
            used=messages.reply_before if messages.answered else messages.reply,
            standing=self._standing,
        )

    # -- the rule ------------------------------------------------------------------------------------------------------

    def _request_point(self) -> None:
        """The client asks here: have an event if the window, the ceiling or the prices demand one."""
        messages = self.messages
        self._waited += 1
        self._answered.append(messages.unanswered)
        # Clients that make one reply of a finished turn's steps show fewer answers than there were.
        seen = max(self._answered[0], min(messages.turn, messages.unanswered))
        self._old.advance(messages, messages.window(self._keep), messages.window(self._keep, seen))
        self._pays_after = None
        if not self._holds(messages.total):
            self._fit()
        elif messages.total > self._ceiling:
            self._at_ceiling()
        else:
            self._move_early()
        self._standing = self._stands()

    def _holds(self, live: int) -> bool:
        """Whether upstream has room for so many tokens behind the leading system messages."""
        return self._room.holds(self._room.reserved(self.messages.leading_tokens) + live)

    def _at_ceiling(self) -> None:
        """The history exceeds its ceiling: summarise it if moving results leaves too much, or move the oldest ones."""
        if self._wants_summary() and self._compressible >= self._least:
            self._event(self._old.oldest(self.messages, self._old.gain), Cause.TOTAL, boundary=True)
        elif self._old.gain >= self._least:
            self._event(self._old.oldest(self.messages, self.messages.total - self._ceiling // 2), Cause.TOTAL)

    def _wants_summary(self) -> bool:
        """Whether moving results alone leaves too much."""
        if self._old.crowded:
            return False
        if self._offload.mode is not Mode.AUTO:
            return self._offload.mode is Mode.COMPRESS
        left = self.messages.total - self._old.gain
        return left > max(self._ceiling, self._offload.compact_ratio_threshold * self.messages.total)

    @property
    def _compressible(self) -> int:
        """Tokens that a summary here would free. An earlier snapshot makes room for the new one."""
        snapshot = 0 if self._boundaries else self._offload.compress.snapshot_tokens
        return self._old.movable - self._old.pinned - snapshot

    def _stands(self) -> Standing:
        """How far the next event is, with what `_at_ceiling` or `_fit` would demand of it."""
        messages, full = self.messages, not self._holds(self.messages.total)
        summarises = self._may_summarise if full else self._wants_summary()
        return Standing(
            total=messages.total,
            ceiling=self._ceiling,
            results=self._results,
            old=len(self._old.seen),
            free=max(self._old.gain, self._compressible if summarises else 0),
            full=full,
            task=messages.task,
            pays_after=self._pays_after,
        )

    @property
    def _may_summarise(self) -> bool:
        return self._offload.mode is not Mode.COMPACT and not self._old.crowded

    def _move_early(self) -> None:
        """Move the newest of the results that were seen often enough if that pays: of several ways the best one."""
        old, read = self._old, self._offload.cached_read
        freed, most, first = 0, 0.0, -1
        for gain in islice(reversed(old.seen), REACH):
            freed += self.messages.shrinkable(gain.index)
            price = (self._offload.cache_write - read) * self._rewritten(self.messages.total - freed, old.before(gain))
            gained = read * freed * PAYBACK - price
            if gained >= most if first < 0 else gained > most:  # the first may break even; others have to be better
                most, first = gained, gain.index
            if read:
                requests = ceil(price / (read * freed))
                self._pays_after = min(requests, self._pays_after or requests)
        if first >= 0 and read:
            self._event(old.newest(self.messages, first), Cause.EARLY)

    def _rewritten(self, left: int, kept: int) -> int:
        """The tokens that an event writes again which leaves so many, the first `kept` of them as they were.

        The first event adds our tools, which come before the messages, so the leading ones are written again as well.
        """
        if self._tool_definition_tokens and not self._moves and not self._boundaries:
            return left + self._tool_definition_tokens + _rounded_up(self.messages.leading_tokens)
        return max(left - kept, 0)

    def _fit(self) -> None:
        """The request exceeds the window: move every seen result, then summarise everything before the unseen ones."""
        unseen = self.messages.window(0)
        self._old.advance(self.messages, unseen)
        gains = self._old.oldest(self.messages, self._old.gain)
        moved = sorted({*gains, *filter(self.messages.movable, range(self._fitted, unseen))})
        freed = sum(map(self.messages.shrinkable, moved))
        self._fitted = unseen
        boundary = not self._holds(self.messages.total - freed) and self._summary_helps(freed)
        if moved or boundary:
            self._event(moved, Cause.WINDOW, boundary=boundary)

    def _summary_helps(self, freed: int) -> bool:
        """Whether a summary makes the request fit, or at least frees half of the ceiling.

        A request that cannot be made to fit must not pay for a summary at every turn.
        """
        if not self._may_summarise:
            return False
        fits = self._holds(self.messages.total - self._compressible)
        return self._compressible - freed >= (1 if fits else least_freed(self._ceiling, full=True))

    # -- what an event does --------------------------------------------------------------------------------------------

    def _event(self, moved: Iterable[int], cause: Cause, *, boundary: bool = False) -> None:
        """Rewrite the context here: `moved` become references and, with `boundary`, old history becomes a snapshot."""
        messages, total = self.messages, self.messages.total
        for index in moved:
            self._results -= self._old.large(messages.items[index], messages.live[index])
            self._old.shrunk(index, messages.shrink(index))
            at_first_sight = index in self._moves and self._moves[index].first_preview
            self._moves[index] = Move(first_preview=at_first_sight, event=len(self._events) + 1)
        if boundary:
            self._summarise()
        self._events.append(OffloadEvent(len(messages.items), messages.unanswered, cause, total))
        self._waited, self._pays_after = 0, None

    def _summarise(self) -> None:
        """Replace all old history, an earlier snapshot included, by one snapshot; leading messages and pins stay."""
        messages, old = self.messages, self._old
        pins = old.settle()
        replies = frozenset(messages.replies_between(sorted(pins), old.end))
        old.movable += sum(map(messages.restore, replies))
        kept = sum(messages.live[index] for index in replies)
        freed = self._compressible - kept
        pins |= replies
        messages.take(range(self._boundaries[-1].end if self._boundaries else 0, old.end), pins, freed)
        old.taken(self._offload.compress.snapshot_tokens, kept)
        self._boundaries.append(SummaryBoundary(end=old.end, pins=pins, event=len(self._events) + 1))


def fold(items: Iterable[Item], offload: Offload, room: Room, tool_definition_tokens: int = 0) -> Plan:
    """The plan for a history: a pure function of the history, the policy and the upstream's room.

    `tool_definition_tokens`: tokens of the tool definitions that the first event adds before everything else, so that
    the whole prefix is lost; 0 if they are present from the start.
    """
    state = Fold(offload, room, tool_definition_tokens)
    for item in items:
        state.add(item)
    return state.plan()


def least_freed(ceiling: int, *, full: bool = False) -> int:
    """The least tokens that an event frees; `full`: one after which the request still exceeds the window."""
    return max(ceiling // (2 if full else LEAST_SHARE), 1)


def _rounded_up(tokens: int) -> int:
    """Round up to a power of two, so that a system prompt that is edited on every turn hardly ever changes a price."""
    return 1 << max(tokens - 1, 0).bit_length()
