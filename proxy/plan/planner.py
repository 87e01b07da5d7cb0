"""The planner: decides what to move, and when, as if the client had adopted every earlier decision.

The client sends its whole history every time and never sees the request that went upstream. So the
planner walks the history from the start and, at each *request point* (a place where the client
asked), decides as it would have then. A decision depends only on the history before it, the policy
and the window. So every later request reaches it again, on any replica, and the upstream's prompt
cache stays warm. No clock or random number may influence it, and of all records only a pause: that
upstream's cache had expired at this point of the history.

    items ──> Fold.add ──> at each request point: Fold._request_point ──> events ──> Plan

One rule decides. Old results stay until the model has answered `keep_views` times with them in
view. Then the newest ones move as soon as seven more requests with them would cost more than
writing the rest of the prompt again. Where upstream's cache has expired, all of them move, because
everything is written again there in any case. And whenever the history exceeds its ceiling, the
oldest results move until half of that is left, whatever it costs. In the modes that summarise, a
snapshot replaces the history where moving results leaves too much. A request that does not fit the
window is made to fit.

All sizes are tokens. A ceiling or a window is exceeded only above it. Leading system messages
always stay, and their size changes with every turn, so they count in no sum but
`Messages.leading_tokens`.
"""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from math import ceil
from typing import Self

from proxy.plan.plan import (
    Cause,
    Item,
    Move,
    OffloadEvent,
    Plan,
    Role,
    Room,
    Standing,
    SummaryBoundary,
)
from proxy.policy import Mode, Offload

# an event at the ceiling frees at least one part in so many of it, because it breaks the prompt
# cache
LEAST_SHARE = 10
PAYBACK = 7
"""Results move early if that pays within so many more requests. Tuned on half of the recorded runs:
5 and 10 change the medians by less than 0.02, and 14 makes the worst runs dearer."""
# the last messages among which results move early, which bounds the work. Older ones wait for the
# ceiling.
REACH = 256
# the most previews of large user messages that a summary leaves. Each takes some 70 tokens.
MOST_PREVIEWS = 100
MOST_KEPT = 1_000
"""A history in which more messages stay in their places is not summarised any further. Every
boundary names them, so that without a bound, memory and time would grow with their number times
that of the boundaries."""


def least_freed(ceiling: int, *, full: bool = False) -> int:
    """The least tokens that an event frees; `full`: one after which the request still exceeds the
    window."""
    return max(ceiling // (2 if full else LEAST_SHARE), 1)


class Fold:
    """The planner's state after the items so far. Each item takes constant time, however many came
    before."""

    def __init__(self, offload: Offload, room: Room, tool_definition_tokens: int = 0) -> None:
        """`tool_definition_tokens`: of definitions that the first event adds before everything
        else, so that the whole prefix is lost; 0 if they are present from the start."""
        self._offload = offload
        self._room = room
        self._tool_definition_tokens = tool_definition_tokens
        self._unseen_limit = offload.unseen_limit(room.window)
        self._ceiling = room.ceiling(offload.max_total_tokens)
        self.messages = Messages(offload)  # the messages so far
        # by the latest requests
        self._answered = deque([0] * offload.keep_views, maxlen=offload.keep_views)
        self._end = 0  # where the recent window begins
        self._viewed = 0  # where what the model has answered fewer than `keep_views` times begins
        self._moves: dict[int, Move] = {}
        self._boundaries: list[SummaryBoundary] = []
        self._events: list[OffloadEvent] = []
        self._waited = 0
        self._fitted = 0  # everything before this index was moved when the window was full
        self._pays_after: int | None = None
        self._pause = 0

    def add(self, item: Item, pause: int = 0) -> None:
        """Add the history's next message. An assistant message shows that the client asked just
        before it, `pause` seconds after the request before if upstream's cache had expired by
        then."""
        if item.role is Role.ASSISTANT and not self.messages.answered:
            self._request_point(pause)
        live = item.tokens
        if item.role is Role.TOOL and item.tokens > max(self._unseen_limit, item.first_preview):
            self._moves[len(self.messages.items)] = Move(first_preview=True, event=0)
            live = item.first_preview
        self.messages.append(item, live)

    def plan(self, pause: int = 0) -> Plan:
        """The plan for a request that ends here, after a pause as above. The fold itself can
        continue."""
        if self.messages.answered:
            # the history ends in a prefill, whose request point came before it
            return self._decided()
        ended = self.copy()
        ended._request_point(pause)
        return ended._decided()

    def copy(self) -> Self:
        """An independent fold in the same state."""
        other = copy.copy(self)
        for name in ("messages", "_answered", "_moves", "_boundaries", "_events"):
            setattr(other, name, getattr(self, name).copy())
        return other

    @property
    def pins(self) -> int:
        """The number of pins of all boundaries together, which take most of its memory where there
        are many."""
        return sum([len(boundary.pins) for boundary in self._boundaries])

    def _decided(self) -> Plan:
        """The plan, and how far the next event is, by what `_at_ceiling` or `_fit` would demand of
        it."""
        messages = self.messages
        live = messages.leading_tokens + messages.total
        full = not self._holds(messages.total)
        summarises = self._may_summarise if full else self._wants_summary()
        results = list(messages.results(len(messages.items)))
        standing = Standing(
            total=messages.total,
            ceiling=self._ceiling,
            results=len(results),
            old=sum(index < self._viewed for index in results),
            new=sum(index >= self._end for index in results),
            held=messages.held,
            free=max(self._gain(), self._compressible() if summarises else 0),
            full=full,
            task=0 if messages.first is None else messages.items[messages.first].tokens,
            pays_after=self._pays_after,
        )
        return Plan(
            moves=dict(self._moves),
            boundaries=tuple(self._boundaries),
            events=tuple(self._events),
            live=live,
            fits=self._room.holds(live),
            waited=self._waited if self._events else 0,
            used=messages.reply_before if messages.answered else messages.reply,
            standing=standing,
        )

    # -- the rule ----------------------------------------------------------------------------------

    def _request_point(self, pause: int) -> None:
        """The client asks here: have an event if the window, the ceiling or the prices demand
        one."""
        messages = self.messages
        keep = self._offload.keep_recent()
        self._pause = pause
        self._waited += 1
        self._answered.append(messages.unanswered)
        # Clients that make one reply of a finished turn's steps show fewer answers than there were.
        seen = max(self._answered[0], min(messages.turn, messages.unanswered))
        self._end = max(self._end, messages.window(keep, messages.unanswered))
        self._viewed = max(self._viewed, messages.window(keep, seen))
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
        """The history exceeds its ceiling: summarise it if moving results leaves too much, or move
        the oldest ones."""
        messages = self.messages
        least = least_freed(self._ceiling)
        if self._wants_summary() and self._compressible() >= least:
            self._event(messages.oldest(self._end), Cause.TOTAL, boundary=True)
        elif self._gain() >= least:
            self._event(
                messages.oldest(self._end, messages.total - self._ceiling // 2), Cause.TOTAL
            )

    def _gain(self) -> int:
        """Tokens that moving everything that may move would free."""
        return sum(map(self.messages.shrinkable, self.messages.oldest(self._end)))

    def _compressible(self) -> int:
        """Tokens that a summary here would free. An earlier snapshot makes room for the new one."""
        pinned = sum(self.messages.pins(self._end).values())
        return self.messages.old(self._end) - pinned - self._offload.compress.snapshot_tokens

    @property
    def _may_summarise(self) -> bool:
        return self._offload.mode is not Mode.COMPACT and not self.messages.crowded

    def _wants_summary(self) -> bool:
        """Whether moving results alone leaves too much, as it always does in the mode that moves
        none."""
        if not self._may_summarise:
            return False
        if self._offload.mode is Mode.COMPRESS:
            return True
        left = self.messages.total - self._gain()
        return left > max(
            self._ceiling, self._offload.compact_ratio_threshold * self.messages.total
        )

    def _move_early(self) -> None:
        """Move the newest of the results that were seen often enough if that pays: of several ways
        the best one."""
        messages = self.messages
        read = self._offload.cached_read
        # The first event adds our tools, which come before the messages. So the leading ones are
        # written again as well: a power of two, as a system prompt that is edited on every turn
        # must hardly ever change a price.
        tools = 0 if self._moves or self._boundaries else self._tool_definition_tokens
        head = tools + (1 << max(messages.leading_tokens - 1, 0).bit_length())
        taken = list[int]()
        freed = 0
        behind = 0
        end = len(messages.items)
        most = 0.0
        best = list[int]()
        for index in messages.results(self._viewed):
            if index < len(messages.items) - REACH or not read:
                break
            taken.append(index)
            freed += messages.shrinkable(index)
            behind += sum(messages.live[index:end])
            end = index
            rewritten = head + messages.total - freed if tools else behind - freed
            if self._pause:
                rewritten = tools  # upstream writes everything else again in any case
            price = (self._offload.cache_write - read) * rewritten
            gained = read * freed * PAYBACK - price
            # the first may break even; others have to be better
            if gained > most or (gained == most and not best):
                most = gained
                best = taken.copy()
            requests = ceil(price / (read * freed))
            self._pays_after = min(requests, self._pays_after or requests)
        if best:
            self._event(best, Cause.EXPIRED if self._pause else Cause.EARLY)

    def _fit(self) -> None:
        """The request exceeds the window: move every seen result, then summarise everything before
        the unseen ones. A summary has to make the request fit, or to free half of the ceiling at
        least: a request that cannot be made to fit must not pay for one at every turn."""
        messages = self.messages
        unseen = messages.window(0, messages.unanswered)
        self._end = max(self._end, unseen)
        moved = sorted(
            {*messages.oldest(self._end), *filter(messages.movable, range(self._fitted, unseen))}
        )
        self._fitted = unseen
        freed = sum(map(messages.shrinkable, moved))
        boundary = False
        if self._may_summarise and not self._holds(messages.total - freed):
            compressible = self._compressible()
            fits = self._holds(messages.total - compressible)
            boundary = compressible - freed >= (
                1 if fits else least_freed(self._ceiling, full=True)
            )
        if moved or boundary:
            self._event(moved, Cause.WINDOW, boundary=boundary)

    def _event(self, moved: Collection[int], cause: Cause, *, boundary: bool = False) -> None:
        """Rewrite the context here: `moved` become references and, with `boundary`, old history
        becomes a snapshot."""
        messages = self.messages
        total = messages.total
        ordinal = len(self._events) + 1
        messages.shrink(moved)
        for index in moved:
            at_first_sight = index in self._moves and self._moves[index].first_preview
            self._moves[index] = Move(first_preview=at_first_sight, event=ordinal)
        if boundary:
            before = self._boundaries[-1] if self._boundaries else None
            pins = messages.summarise(self._end, before, self._offload.compress.snapshot_tokens)
            self._boundaries.append(SummaryBoundary(end=self._end, pins=pins, event=ordinal))
        rewritten = messages.total if boundary else sum(messages.live[min(moved) :])
        self._events.append(
            OffloadEvent(
                len(messages.items), messages.unanswered, cause, total, rewritten, self._pause
            )
        )
        self._waited = 0
        self._pays_after = None


class Messages:
    """The context as the decisions have left it so far: all messages, what could move, what a
    summary leaves."""

    def __init__(self, offload: Offload) -> None:
        self.items: list[Item] = []
        self.live: list[int] = []  # tokens of each message; 0 for one that a snapshot has replaced
        self.leading = 0  # the number of system messages at the beginning
        self.leading_tokens = 0
        self.total = 0
        """The sum of `live` without the leading system messages, plus the snapshot: the history as
        it would be sent."""
        self.turn = 0  # where the current user turn begins
        self.unanswered = 0  # where the messages begin that the model has not answered yet
        # where the model's newest reply begins, and the one before it
        self.reply = self.reply_before = 0
        self.gains: list[int] = []
        """What has yet to move once it is old: results above `max_tool_message_tokens`, and large
        user messages."""
        self.held = 0  # results of that size that may not move
        # the user's first message, which usually states the task and always stays
        self.first: int | None = None
        self._users: list[int] = []  # the others, without large ones
        self._large_users: list[int] = []
        self._recent_user = 0  # where the last two user messages begin; they are never touched
        self._systems: list[int] = []  # those that do not lead
        self._steps: list[int] = []  # for each message, where its step begins
        # a cut leaves these in their places, because calls and results do not pair
        self._staying: set[int] = set()
        self._offload = offload
        self._compacts = offload.mode is not Mode.COMPRESS

    def append(self, item: Item, live: int) -> None:
        """Add the next message, with its live tokens."""
        index = len(self.items)
        role = item.role
        self._steps.append(self._steps[-1] if role is Role.TOOL and index else index)
        self.items.append(item)
        self.live.append(live)
        if role is Role.SYSTEM and self.leading == index:
            self.leading += 1
            self.leading_tokens += live
            return
        self.total += live
        self._staying.update(range(index - item.stays_before, index + item.stays))
        shrinks = item.preview < live
        if role is Role.ASSISTANT:
            if self.unanswered < index or not index:
                self.reply_before = self.reply
                self.reply = index
            self.unanswered = index + 1
        elif role is Role.USER:
            self._recent_user = self.turn
            self.turn = index
            if self.first is None:
                self.first = index
            elif shrinks:
                self._large_users.append(index)
                self.gains.append(index)
            else:
                self._users.append(index)
        elif role is Role.SYSTEM:
            self._systems.append(index)
        elif (
            role is Role.TOOL
            and self._compacts
            and item.tokens > self._offload.max_tool_message_tokens
        ):
            if shrinks:
                self.gains.append(index)
            self.held += item.preview >= item.tokens

    def copy(self) -> Self:
        other = copy.copy(self)
        for name in (
            "items",
            "live",
            "gains",
            "_steps",
            "_staying",
            "_users",
            "_large_users",
            "_systems",
        ):
            setattr(other, name, getattr(self, name).copy())
        return other

    @property
    def answered(self) -> bool:
        """Whether no message waits for an answer: the last one is the assistant's, or there is
        none."""
        return not self.items or self.items[-1].role is Role.ASSISTANT

    def window(self, keep: int, answered: int) -> int:
        """Where the recent window begins: the last `keep` messages or all from `answered` on,
        widened to whole steps. System messages at the end do not count: aider moves a reminder to
        the end of each request, and the window would differ when it is gone."""
        size = counted = len(self.items)
        while counted and self.items[counted - 1].role is Role.SYSTEM:
            counted -= 1
        start = min(max(counted - keep, 0), answered)
        return self._steps[start] if start < size else size

    # -- what may move -----------------------------------------------------------------------------

    def shrinkable(self, index: int) -> int:
        """Tokens that moving this message would free."""
        return self.live[index] - self.items[index].preview

    def movable(self, index: int) -> bool:
        """Whether this message would get smaller and may be moved by now."""
        if self.items[index].role is Role.USER and (
            index >= self._recent_user or index in self._staying
        ):
            return False
        return self.shrinkable(index) > 0

    def oldest(self, end: int, enough: int | None = None) -> list[int]:
        """Return the oldest gains before message `end` that free so many tokens together, or
        all."""
        taken = list[int]()
        freed = 0
        for index in self.gains:
            if index >= end or (enough is not None and freed >= enough):
                break
            if self.movable(index):
                taken.append(index)
                freed += self.shrinkable(index)
        return taken

    def results(self, end: int) -> Iterator[int]:
        """Yield the results among the gains before message `end`, the newest one first."""
        return (
            index
            for index in reversed(self.gains)
            if index < end and self.items[index].role is Role.TOOL
        )

    def shrink(self, indexes: Collection[int]) -> None:
        """Replace these messages by references."""
        for index in indexes:
            freed = self.shrinkable(index)
            self.live[index] -= freed
            self.total -= freed
        moved = set(indexes)
        self.gains = [index for index in self.gains if index not in moved]

    # -- what a summary replaces -------------------------------------------------------------------

    @property
    def crowded(self) -> bool:
        """Whether too many messages stay in their places for another summary."""
        return len(self._staying) > MOST_KEPT

    def old(self, end: int) -> int:
        """Tokens of the history before message `end`, an earlier snapshot included."""
        return self.total - sum(self.live[max(end, self.leading) :])

    def pins(self, end: int) -> dict[int, int]:
        """The messages before `end` that a summary leaves alone, with the tokens of each once what
        may has moved. The user's first message stays, and so do the newest others within the
        budget, and as many system messages. Large ones do not count against it, because only their
        previews stay, and nor do those that stay in their places."""
        kept = {index for index in self._staying if self.leading <= index < end}
        if self.first is not None and self.first < end:
            kept.add(self.first)
        for indexes, recent in ((self._users, self._recent_user), (self._systems, end)):
            counted = 0
            for place in range(bisect_left(indexes, end) - 1, -1, -1):
                index = indexes[place]
                if index in self._staying:
                    continue
                counted += self.live[index] or self.items[index].tokens
                if counted > self._offload.pin_user_tokens and index < recent:
                    break
                kept.add(index)
        pinned = {index: self.live[index] for index in kept}
        old = bisect_left(self._large_users, end)
        for index in self._large_users[max(old - MOST_PREVIEWS, 0) : old]:
            pinned[index] = self.live[index] - (
                self.shrinkable(index) if self.movable(index) else 0
            )
        return pinned

    def summarise(self, end: int, before: SummaryBoundary | None, snapshot: int) -> frozenset[int]:
        """Replace everything before `end`, an earlier snapshot included, by a snapshot of so many
        tokens. Returns what stays beside the leading messages."""
        pinned = sorted(self.pins(end))
        pins = frozenset((*pinned, *self._replies_between(pinned, end)))
        for index in (*before.pins, *range(before.end, end)) if before else range(end):
            if index >= self.leading and index not in pins:
                self.live[index] = 0
        for index in pins:
            # a reply that an earlier one had replaced
            self.live[index] = self.live[index] or self.items[index].tokens
        self.total = snapshot + sum(self.live[self.leading :])
        return pins

    def _replies_between(self, kept: Sequence[int], end: int) -> Iterator[int]:
        """The replies that have to be kept too if only `kept` and everything from `end` on is left
        of the history. Without them a user message would directly follow tool results, which chat
        templates refuse. That can only happen to tool results that stay in their places."""
        spoken = (index for index in kept if self.items[index].role is not Role.SYSTEM)
        for before, after in pairwise([*spoken, end]):
            if self.items[before].role is Role.TOOL and self.items[after].role is Role.USER:
                reply = after - 1
                while self.items[reply].role in (Role.USER, Role.SYSTEM):
                    reply -= 1
                if self.items[reply].role is Role.ASSISTANT:
                    yield reply
