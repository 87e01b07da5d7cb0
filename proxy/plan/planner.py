"""The planner: decides what to move, and when, as if the client had adopted every earlier decision.

The client sends its whole history every time and never sees the request that went upstream. So the planner walks the
history from the start and, at each *request point* (a place where the client asked), decides as it would have then. A
decision depends only on the history before it, the policy and the window. So every later request reaches it again, on
any replica, and the upstream's prompt cache stays warm. No clock or random number may influence it, and of all records
only a pause: that upstream's cache had expired at this point of the history.

    items ──> Fold.add ──> at each request point: Fold._request_point ──> events ──> Plan

One rule decides. Old results stay until the model has answered `keep_views` times with them in view. Then the newest
ones move as soon as seven more requests with them would cost more than writing the rest of the prompt again. Where
upstream's cache has expired, all of them move, because everything is written again there in any case. And whenever the
history exceeds its ceiling, the oldest results move until half of that is left, whatever it costs. In the modes that
summarise, a snapshot replaces the history where moving results leaves too much. A request that does not fit the window
is made to fit.

All sizes are tokens. A ceiling or a window is exceeded only above it.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Collection, Iterable
from math import ceil
from typing import Self

from proxy.plan.context import Messages
from proxy.plan.plan import Cause, Item, Move, OffloadEvent, Plan, Role, Room, Standing, SummaryBoundary
from proxy.policy import Mode, Offload

LEAST_SHARE = 10
"""An event at the ceiling frees at least one part in so many of it, because it breaks the prompt cache."""
PAYBACK = 7
"""Results move early if that pays within so many more requests. Tuned on half of the recorded runs: 5 and 10 change the
medians by less than 0.02, and 14 makes the worst runs dearer."""
REACH = 256
"""The last messages among which results move early, which bounds the work. Older ones wait for the ceiling."""


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
        self.messages = Messages(offload)
        """The messages so far."""
        self._answered = deque([0] * offload.keep_views, maxlen=offload.keep_views)  # by the latest requests
        self._end = 0  # where the recent window begins
        self._seen = 0  # where what the model has answered fewer than `keep_views` times begins
        self._moves: dict[int, Move] = {}
        self._boundaries: list[SummaryBoundary] = []
        self._events: list[OffloadEvent] = []
        self._waited = 0
        self._fitted = 0  # everything before this index was moved when the window was full
        self._pays_after: int | None = None
        self._pause = 0

    def add(self, item: Item, pause: int = 0) -> None:
        """Add the history's next message. An assistant message shows that the client asked just before it, `pause`
        seconds after the request before if upstream's cache had expired by then."""
        if item.role is Role.ASSISTANT and not self.messages.answered:
            self._request_point(pause)
        first_sight = item.role is Role.TOOL and item.tokens > self._unseen_limit and item.first_preview < item.tokens
        if first_sight:
            self._moves[len(self.messages.items)] = Move(first_preview=True, event=0)
        live = item.first_preview if first_sight else item.tokens
        self.messages.append(item, live)

    def plan(self, pause: int = 0) -> Plan:
        """The plan for a request that ends here, after a pause as above. The fold itself can continue."""
        if self.messages.answered:
            return self._decided()  # the history ends in a prefill, whose request point came before it
        ended = self.copy()
        ended._request_point(pause)
        return ended._decided()

    def copy(self) -> Self:
        """An independent fold in the same state."""
        other = copy.copy(self)
        other.messages, other._answered = self.messages.copy(), self._answered.copy()
        other._moves, other._events = self._moves.copy(), self._events.copy()
        other._boundaries = self._boundaries.copy()
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
            standing=self._stands(),
        )

    # -- the rule ------------------------------------------------------------------------------------------------------

    def _request_point(self, pause: int) -> None:
        """The client asks here: have an event if the window, the ceiling or the prices demand one."""
        messages, self._pause = self.messages, pause
        self._waited += 1
        self._answered.append(messages.unanswered)
        # Clients that make one reply of a finished turn's steps show fewer answers than there were.
        seen = max(self._answered[0], min(messages.turn, messages.unanswered))
        self._end = max(self._end, messages.window(self._keep))
        self._seen = max(self._seen, messages.window(self._keep, seen))
        self._pays_after = None
        if not self._holds(messages.total):
            self._fit()
        elif messages.total > self._ceiling:
            self._at_ceiling()
        else:
            self._move_early()

    def _holds(self, live: int) -> bool:
        """Whether upstream has room for so many tokens behind the leading system messages."""
        return self._room.holds(self._room.reserved(self.messages.leading_tokens) + live)

    def _at_ceiling(self) -> None:
        """The history exceeds its ceiling: summarise it if moving results leaves too much, or move the oldest ones."""
        messages = self.messages
        if self._wants_summary() and self._compressible() >= self._least:
            self._event(messages.oldest(self._end), Cause.TOTAL, boundary=True)
        elif self._gain() >= self._least:
            self._event(messages.oldest(self._end, messages.total - self._ceiling // 2), Cause.TOTAL)

    def _gain(self) -> int:
        """Tokens that moving everything that may move would free."""
        return sum(map(self.messages.shrinkable, self.messages.oldest(self._end)))

    def _wants_summary(self) -> bool:
        """Whether moving results alone leaves too much."""
        if self.messages.crowded:
            return False
        if self._offload.mode is not Mode.AUTO:
            return self._offload.mode is Mode.COMPRESS
        left = self.messages.total - self._gain()
        return left > max(self._ceiling, self._offload.compact_ratio_threshold * self.messages.total)

    def _compressible(self) -> int:
        """Tokens that a summary here would free. An earlier snapshot makes room for the new one."""
        pinned = sum(self.messages.pins(self._end).values())
        return self.messages.old(self._end) - pinned - self._offload.compress.snapshot_tokens

    def _stands(self) -> Standing:
        """How far the next event is, with what `_at_ceiling` or `_fit` would demand of it."""
        messages, full = self.messages, not self._holds(self.messages.total)
        summarises = self._may_summarise if full else self._wants_summary()
        return Standing(
            total=messages.total,
            ceiling=self._ceiling,
            results=sum(1 for _ in messages.results(len(messages.items))),
            old=sum(1 for _ in messages.results(self._seen)),
            free=max(self._gain(), self._compressible() if summarises else 0),
            full=full,
            task=messages.task,
            pays_after=self._pays_after,
        )

    @property
    def _may_summarise(self) -> bool:
        return self._offload.mode is not Mode.COMPACT and not self.messages.crowded

    def _move_early(self) -> None:
        """Move the newest of the results that were seen often enough if that pays: of several ways the best one."""
        messages, read = self.messages, self._offload.cached_read
        taken, freed, behind, end = list[int](), 0, 0, len(messages.items)
        most, best = 0.0, list[int]()
        for index in messages.results(self._seen):
            if index < len(messages.items) - REACH or not read:
                break
            taken.append(index)
            freed += messages.shrinkable(index)
            behind += sum(messages.live[index:end])
            end = index
            price = (self._offload.cache_write - read) * self._rewritten(behind - freed, freed)
            gained = read * freed * PAYBACK - price
            if gained > most or (gained == most and not best):  # the first may break even; others have to be better
                most, best = gained, taken.copy()
            requests = ceil(price / (read * freed))
            self._pays_after = min(requests, self._pays_after or requests)
        if best:
            self._event(best, Cause.EXPIRED if self._pause else Cause.EARLY)

    def _rewritten(self, behind: int, freed: int) -> int:
        """The tokens that an event writes again which leaves so many behind its first change, and frees so many.

        The first event adds our tools, which come before the messages, so the leading ones are written again as well.
        Where upstream's cache has expired, that is done in any case.
        """
        tools = 0 if self._moves or self._boundaries else self._tool_definition_tokens
        if self._pause:
            return tools
        if tools:
            return self.messages.total - freed + tools + _rounded_up(self.messages.leading_tokens)
        return behind

    def _fit(self) -> None:
        """The request exceeds the window: move every seen result, then summarise everything before the unseen ones."""
        messages, unseen = self.messages, self.messages.window(0)
        self._end = max(self._end, unseen)
        moved = sorted({*messages.oldest(self._end), *filter(messages.movable, range(self._fitted, unseen))})
        freed = sum(map(messages.shrinkable, moved))
        self._fitted = unseen
        boundary = not self._holds(messages.total - freed) and self._summary_helps(freed)
        if moved or boundary:
            self._event(moved, Cause.WINDOW, boundary=boundary)

    def _summary_helps(self, freed: int) -> bool:
        """Whether a summary makes the request fit, or at least frees half of the ceiling.

        A request that cannot be made to fit must not pay for a summary at every turn.
        """
        if not self._may_summarise:
            return False
        compressible = self._compressible()
        fits = self._holds(self.messages.total - compressible)
        return compressible - freed >= (1 if fits else least_freed(self._ceiling, full=True))

    # -- what an event does --------------------------------------------------------------------------------------------

    def _event(self, moved: Collection[int], cause: Cause, *, boundary: bool = False) -> None:
        """Rewrite the context here: `moved` become references and, with `boundary`, old history becomes a snapshot."""
        messages, total, ordinal = self.messages, self.messages.total, len(self._events) + 1
        messages.shrink(moved)
        for index in moved:
            at_first_sight = index in self._moves and self._moves[index].first_preview
            self._moves[index] = Move(first_preview=at_first_sight, event=ordinal)
        if boundary:
            self._summarise(ordinal)
        rewritten = messages.total if boundary else sum(messages.live[min(moved) :])
        self._events.append(
            OffloadEvent(len(messages.items), messages.unanswered, cause, total, rewritten, self._pause)
        )
        self._waited, self._pays_after = 0, None

    def _summarise(self, ordinal: int) -> None:
        """Replace all old history, an earlier snapshot included, by one snapshot; leading messages and pins stay."""
        messages, before = self.messages, self._boundaries[-1] if self._boundaries else None
        pinned = sorted(messages.pins(self._end))
        pins = frozenset((*pinned, *messages.replies_between(pinned, self._end)))
        replaced = (*before.pins, *range(before.end, self._end)) if before else range(self._end)
        messages.summarise(replaced, pins, self._offload.compress.snapshot_tokens)
        self._boundaries.append(SummaryBoundary(end=self._end, pins=pins, event=ordinal))


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
