"""The planner: decides what to move, and when, as if the client had adopted every earlier decision.

The client sends its whole history every time and never sees the request that went upstream. So the planner walks the
history from the start and, at each *request point* (a place where the client asked), decides as it would have then. A
decision depends only on the history before it and on the policy. So every later request reaches it again, on any
replica, and the upstream's prompt cache stays warm. No clock, record or random number may influence it.

    items ──> Fold.add ──> at each request point: Fold._request_point ──> events ──> Plan

All sizes are tokens. Every comparison with a threshold is strict.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Self

import msgspec

from proxy.plan.breakpoints import CacheEntries
from proxy.plan.context import Gain, Messages, OldHistory
from proxy.plan.plan import Cause, Item, Move, OffloadEvent, Plan, Role, Room, SummaryBoundary
from proxy.plan.rental import Account, SkiRental
from proxy.policy import Mode, Offload


class Fold:
    """The planner's state after the items so far. Each item takes constant time, however many came before.

    Every event pays for itself. The newest results move once their own rents cover it and our sum stays within
    `max_loss` of no proxy's. If moving results leaves more than `max_total_tokens`, history is summarised as soon as
    our sum stays within no proxy's. Only first sight, fitting the window, and history beyond `hard_total_tokens` need
    not pay.
    """

    def __init__(self, offload: Offload, room: Room, tool_definition_tokens: int = 0) -> None:
        self._offload = offload
        self._room = room
        self._tool_definition_tokens = tool_definition_tokens
        compacting = offload.mode is Mode.COMPACT
        self._keep = offload.keep_for_compaction() if compacting else offload.keep_for_compression()
        self._enough = max(offload.min_saved_tokens, 1)
        self._early = offload.early_total()
        self.messages = Messages()
        """The messages so far."""
        self.account = Account(offload)
        self._old = OldHistory(offload)
        self._rental = SkiRental(offload)
        self._entries = None if room.marks else CacheEntries()
        self._answered = deque([0] * offload.min_views, maxlen=offload.min_views)  # by the latest requests
        self._client = 0  # tokens of the messages as the client sent them, without leading system messages
        self._offering = False  # whether earlier requests had our tools
        self._bill: float | None = None  # of the request under way, if it has an event
        self._moves: dict[int, Move] = {}
        self._boundaries: list[SummaryBoundary] = []
        self._events: list[OffloadEvent] = []
        self._waited = 0
        self._fitted = 0  # everything before this index was moved when the window was full

    def add(self, item: Item) -> None:
        """Add the history's next message. An assistant message shows that the client asked just before it."""
        if item.role is Role.ASSISTANT and not self.messages.answered:
            self._request_point()
        first_sight = (
            item.role is Role.TOOL
            and item.tokens > self._offload.max_unseen_tool_tokens
            and item.first_preview < item.tokens
        )
        if first_sight:
            self._moves[len(self.messages.items)] = Move(first_preview=True, event=0)
        self.messages.append(item, item.first_preview if first_sight else item.tokens)
        if len(self.messages.items) > self.messages.leading:
            self._client += item.tokens
            if self._entries is not None:
                self._entries.add(item)

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
        other._rental, other.account = copy.copy(self._rental), copy.copy(self.account)
        other._answered = self._answered.copy()
        other._entries = None if self._entries is None else self._entries.copy()
        other._moves, other._boundaries, other._events = (
            self._moves.copy(),
            self._boundaries.copy(),
            self._events.copy(),
        )
        return other

    @property
    def pins(self) -> int:
        """The number of pins of all boundaries together, which take most of its memory where there are many."""
        return sum([len(boundary.pins) for boundary in self._boundaries])

    def _decided(self) -> Plan:
        live = self.messages.leading_tokens + self.messages.total
        return Plan(
            moves=dict(self._moves),
            boundaries=tuple(self._boundaries),
            events=tuple(self._events),
            live=live,
            fits=self._room.holds(live),
            waited=self._waited if self._events else 0,
            answered=self._used(),
        )

    def _used(self) -> int | None:
        """Where the newest reply begins that the model gave before this request."""
        return self.messages.reply_before if self.messages.answered else self.messages.reply

    def _request_point(self) -> None:
        """The client asks here: have an event if it pays for itself, or if the request exceeds its window."""
        self._begin_request()
        if not self._holds(self.messages.total):
            self._fit()
        else:
            self._consider()
        self._enter_request()

    def _enter_request(self) -> None:
        """Enter what the request cost into the account."""
        total = self.messages.total
        bill = self._cost(total, self.account.live) if self._bill is None else self._bill
        self.account.settle(bill, total, self._client)
        self._offering = self._offering or bool(self._moves or self._boundaries)
        if self._entries is not None:
            self._entries.enter(len(self.messages.items), total)

    def _begin_request(self) -> None:
        self._waited += 1
        self.messages.requests += 1
        self._bill = None
        self._old.advance(self.messages, self._window())

    def _window(self) -> int:
        """Where the recent window begins: what the model has answered fewer than `min_views` times is in it."""
        self._answered.append(self.messages.unanswered)
        return self.messages.window(self._keep, self._answered[0])

    def _holds(self, live: int) -> bool:
        """Whether upstream has room for so many tokens behind the leading system messages."""
        return self._room.holds(self._room.reserved(self.messages.leading_tokens) + live)

    @property
    def _compressible(self) -> int:
        """Tokens that a summary here would free. An earlier snapshot makes room for the new one."""
        return self._old.movable - self._old.pinned - (0 if self._boundaries else self._rental.snapshot)

    def _consider(self) -> None:
        """Have an event if one pays for itself: the newest results first, then all old history if it is too much."""
        results, request = self._old.results, self.messages.requests
        first = None
        if self._old.offloadable > self._early:
            first = self._rental.worth_moving(results, request, self._price_of_moving, self._affords)
        if first is not None:
            paid = self._rental.paid_for(results, first.index, request)
            self._event(self._old.take_gains(first.index), first.before, Cause.RENT, paid=paid)
        elif self._old.offloadable > self._offload.max_total_tokens:
            self._consider_total()

    def _affords(self, freed: int, first: Gain) -> bool:
        """Whether moving the results from `first` on, which frees so many tokens, leaves our sum within `max_loss`."""
        loss = self._offload.max_loss
        return loss is None or self.account.allows(
            self._cost(self.messages.total - freed, self._kept(first.index, first.before), event=True),
            self._client,
            loss,
        )

    def _consider_total(self) -> None:
        """Summarise history if that frees enough and the account allows it. Results wait for their rents.

        Beyond `hard_total_tokens` neither is asked.
        """
        boundary, total = self._wants_summary(), self.messages.total
        if (self._compressible if boundary else self._old.gain) < self._enough:
            return
        if boundary and self.account.allows(
            self._cost(total - self._compressible, 0, summarised=total, event=True), self._client
        ):
            self._event(self._old.take_gains(), 0, Cause.TOTAL, boundary=True)
        elif self._old.offloadable > self._offload.hard_total():
            before = 0 if boundary else self._old.gain_from
            self._event(self._old.take_gains(), before, Cause.HARD, boundary=boundary)

    def _wants_summary(self) -> bool:
        """Whether compaction alone leaves too much."""
        if self._old.crowded:
            return False
        if self._offload.mode is not Mode.AUTO:
            return self._offload.mode is Mode.COMPRESS
        left = self._old.offloadable - self._old.gain
        ratio = (self.messages.total - self._old.gain) / self.messages.total
        return left > self._offload.max_total_tokens and ratio > self._offload.compact_ratio_threshold

    def _kept(self, index: int, before: int) -> int:
        """The live tokens that upstream reads from its cache if message `index`, behind `before` of them, changes."""
        return before if self._entries is None else self._entries.before(index)

    def _rewritten(self, left: int, kept: int) -> int:
        """The tokens that an event writes anew which leaves so many, the first `kept` of them as they were.

        The first event adds our tools, which come before the messages, so the leading ones are written anew as well.
        """
        if self._tool_definition_tokens and not self._moves and not self._boundaries:
            return left + self._tool_definition_tokens + _coarse(self.messages.leading_tokens)
        return max(left - kept, 0)

    def _price_of_moving(self, freed: int, first: Gain) -> float:
        """The price of moving the results from `first` on, which frees so many tokens. These are not written again.

        What is new would have to be written in any case, and counts all the same: caches with breakpoints often lose
        more than what follows the change. Without it, the worst recorded run is at 1.29 there instead of 1.13.
        """
        kept = self._kept(first.index, first.before)
        return self._rental.price(self._rewritten(self.messages.total - freed, kept), summarised=None)

    def _cost(self, live: int, kept: int, summarised: int | None = None, event: bool = False) -> float:
        """The cost of this request with so many live tokens, the first `kept` of them cached; see `Account`.

        Requests that have our tools pay for them, and the first one also for writing the leading messages anew.
        """
        tools = self._tool_definition_tokens
        if not tools or not (event or self._moves or self._boundaries):
            cost = self.account.cost(live, min(kept, live))
        elif self._offering:
            cost = self.account.cost(tools + live, tools + min(kept, live))
        else:
            cost = self.account.cost(tools + live, 0) + self._rental.price(_coarse(self.messages.leading_tokens), None)
        return cost + (0.0 if summarised is None else self._rental.price(0, summarised))

    def _fit(self) -> None:
        """The request exceeds the window: move every seen result, then summarise everything before the unseen ones."""
        unseen = self.messages.window(0)
        self._old.advance(self.messages, unseen)
        gains = self._old.take_gains()
        moved = sorted({*gains, *filter(self.messages.movable, range(self._fitted, unseen))})
        freed = sum(map(self.messages.shrinkable, moved))
        self._fitted = unseen
        boundary = not self._holds(self.messages.total - freed) and self._summary_helps(freed)
        if moved or boundary:
            before = 0 if boundary else self.messages.total - sum(self.messages.live[moved[0] :])
            self._event(moved, before, Cause.WINDOW, boundary=boundary)

    def _summary_helps(self, freed: int) -> bool:
        """Whether a summary makes the request fit, or at least saves as much as an event must.

        A request that cannot be made to fit must not pay for a summary at every turn.
        """
        if self._offload.mode is Mode.COMPACT or self._old.crowded:
            return False
        fits = self._holds(self.messages.total - self._compressible)
        return self._compressible - freed >= (1 if fits else self._enough)

    def _event(
        self, moved: Sequence[int], before: int, cause: Cause, *, boundary: bool = False, paid: float = 0.0
    ) -> None:
        """Rewrite the context here: `moved` become references and, with `boundary`, old history becomes a snapshot.

        The first `before` tokens behind the leading messages stay as they are. `paid` is what carrying has cost so far.
        """
        messages, ahead = self.messages, self._rewritten(0, 0)
        kept = 0 if boundary else self._kept(min(moved), before)
        total, old = messages.total, messages.total if cause is Cause.WINDOW else self._old.offloadable
        event = OffloadEvent(len(messages.items), messages.turn, messages.unanswered, cause, old, round(paid))
        self._events.append(event)
        self._waited = 0
        for index in moved:
            self._old.shrunk(index, messages.shrink(index))
            at_first_sight = index in self._moves and self._moves[index].first_preview
            self._moves[index] = Move(first_preview=at_first_sight, event=len(self._events))
        self._rental.settle()
        if boundary:
            self._summarise()
        rewritten = ahead + max(messages.total - (0 if ahead else kept), 0)
        self._events[-1] = msgspec.structs.replace(event, rewritten=rewritten)
        self._bill = self._cost(messages.total, kept, summarised=total if boundary else None)
        if self._entries is not None:
            self._entries.cut(0 if boundary or ahead else min(moved))

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
        old.taken(messages, pins, self._rental.snapshot, kept)
        self._boundaries.append(SummaryBoundary(end=old.end, pins=pins, event=len(self._events)))


class FirstFold(Fold):
    """The rules of plan 1: one ski rental for all movable history. It stays for one release, for rolling upgrades."""

    def _used(self) -> None:
        """Answers of our tools stay until an event in a later user turn."""

    def _enter_request(self) -> None:
        """There is no account."""

    def _begin_request(self) -> None:
        super()._begin_request()
        self._rental.pay(self._removable())

    def _window(self) -> int:
        return self.messages.window(self._keep)

    def _removable(self) -> int:
        """Tokens that an event would free now. Carrying them is the rent that finally pays for the event."""
        mode = self._offload.mode
        if mode is Mode.COMPACT or (mode is Mode.AUTO and self._old.gain >= self._enough):
            return self._old.gain
        return max(self._compressible, 0)

    def _consider(self) -> None:
        """Have an event if it frees enough and the rent paid so far covers the cost of breaking the prefix."""
        if self._old.offloadable <= self._offload.max_total_tokens:
            return
        boundary = self._wants_summary()
        if (self._compressible if boundary else self._old.gain) < self._enough:
            return
        urgent = self._old.offloadable > 2 * self._offload.max_total_tokens
        before, total = 0 if boundary else self._old.gain_from, self.messages.total
        left = total - (self._compressible if boundary else self._old.gain)
        price = self._rental.price(self._rewritten(left, before), summarised=total if boundary else None)
        if urgent or self._rental.paid >= price:
            cause = Cause.HARD if urgent else Cause.TOTAL
            self._event(self._old.take_gains(), before, cause, boundary=boundary, paid=self._rental.paid)


def fold(items: Iterable[Item], offload: Offload, room: Room, tool_definition_tokens: int = 0) -> Plan:
    """The plan for a history: a pure function of the history, the policy and the upstream's room.

    `tool_definition_tokens`: tokens of the tool definitions that the first event adds before everything else, so that
    the whole prefix is lost; 0 if they are present from the start.
    """
    return folded(items, offload, room, tool_definition_tokens).plan()


def begun(offload: Offload, room: Room, tool_definition_tokens: int = 0) -> Fold:
    """The fold of an empty history, by the rules that the policy names."""
    return (FirstFold if offload.plan == 1 else Fold)(offload, room, tool_definition_tokens)


def least_planned(offload: Offload) -> int:
    """A history of so few tokens has no event as long as it fits the window."""
    least = offload.max_total_tokens
    return least if offload.plan == 1 else min(least, max(offload.early_total(), offload.early_saved()))


def folded(items: Iterable[Item], offload: Offload, room: Room, tool_definition_tokens: int = 0) -> Fold:
    """The fold over these items, for a history that continues."""
    state = begun(offload, room, tool_definition_tokens)
    for item in items:
        state.add(item)
    return state


def _coarse(tokens: int) -> int:
    """Round up to a power of two, so that a system prompt that is edited on every turn hardly ever changes a price."""
    return 1 << max(tokens - 1, 0).bit_length()
