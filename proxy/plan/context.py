"""The context as the planner's decisions have left it so far: all messages, what could move, and what a summary leaves.

All sizes are tokens. Leading system messages count in no sum here; see `Messages.leading_tokens`.
"""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Self

from proxy.plan.plan import Item, Role
from proxy.policy import Mode, Offload

MOST_PREVIEWS = 100
"""The most previews of large user messages that a summary leaves. Each takes some 70 tokens."""
MOST_KEPT = 1_000
"""A history in which more messages stay in their places is not summarised any further. Every boundary names them, so
that without a bound, memory and time would grow with their number times that of the boundaries."""


class Messages:
    """The messages so far: the tokens of each after the decisions so far, and where steps and turns begin."""

    def __init__(self, offload: Offload) -> None:
        self.items: list[Item] = []
        self.live: list[int] = []
        """Tokens of each message; 0 for one that a snapshot has replaced."""
        self.leading = 0
        """The number of system messages at the beginning. They always stay, and their size changes with every turn."""
        self.leading_tokens = 0
        self.total = 0
        """The sum of `live` without the leading system messages, plus the snapshot: the history as it would be sent."""
        self.turn = 0
        """Where the current user turn begins."""
        self.recent_user = 0
        """Where the last two user messages begin. They are never touched."""
        self.unanswered = 0
        """Where the messages begin that the model has not answered yet."""
        self.reply = 0
        """Where the model's newest reply begins."""
        self.reply_before = 0
        """Where the reply before that one begins."""
        self.gains: list[int] = []
        """What has yet to move once it is old: results above `max_tool_message_tokens`, and large user messages."""
        self._steps: list[int] = []  # for each message, where its step begins
        self._staying: set[int] = set()  # a cut leaves these in their places, because calls and results do not pair
        self._first: int | None = None  # the user's first message, which usually states the task
        self._users: list[int] = []  # the others, without large ones
        self._large_users: list[int] = []
        self._systems: list[int] = []  # those that do not lead
        self._budget = offload.pin_user_tokens
        self._compacts = offload.mode is not Mode.COMPRESS
        self._least = offload.max_tool_message_tokens

    def append(self, item: Item, live: int) -> None:
        """Add the next message, with its live tokens."""
        index = len(self.items)
        in_step = item.role is Role.TOOL and index > 0
        self._steps.append(self._steps[-1] if in_step else index)
        self.items.append(item)
        self.live.append(live)
        if item.role is Role.SYSTEM and self.leading == index:
            self.leading += 1
            self.leading_tokens += live
            return
        self.total += live
        self._staying.update(range(index - item.stays_before, index + item.stays))
        if item.role is Role.ASSISTANT:
            if self.unanswered < index or not index:
                self.reply_before, self.reply = self.reply, index
            self.unanswered = index + 1
        elif item.role is Role.USER:
            self.recent_user, self.turn = self.turn, index
            self._append_user(index, large=item.preview < live)
        elif item.role is Role.SYSTEM:
            self._systems.append(index)
        elif item.role is Role.TOOL and self._compacts and item.tokens > self._least and item.preview < live:
            self.gains.append(index)

    def _append_user(self, index: int, large: bool) -> None:
        if self._first is None:
            self._first = index
        elif large:
            self._large_users.append(index)
            self.gains.append(index)
        else:
            self._users.append(index)

    def copy(self) -> Self:
        other = copy.copy(self)
        for name in ("items", "live", "gains", "_steps", "_staying", "_users", "_large_users", "_systems"):
            setattr(other, name, getattr(self, name).copy())
        return other

    @property
    def answered(self) -> bool:
        """Whether no message waits for an answer: the last one is the assistant's, or there is none."""
        return not self.items or self.items[-1].role is Role.ASSISTANT

    @property
    def task(self) -> int:
        """Tokens of the user's first message, which always stays."""
        return 0 if self._first is None else self.items[self._first].tokens

    def window(self, keep: int, answered: int | None = None) -> int:
        """Where the recent window begins: the last `keep` messages or all from `answered` on, widened to whole steps.

        `answered`: by default, where the messages begin that the model has not answered yet. System messages at the end
        do not count: aider moves a reminder to the end of each request, and the window would differ when it is gone.
        """
        size = counted = len(self.items)
        while counted and self.items[counted - 1].role is Role.SYSTEM:
            counted -= 1
        start = min(max(counted - keep, 0), self.unanswered if answered is None else answered)
        return self._steps[start] if start < size else size

    # -- what may move -------------------------------------------------------------------------------------------------

    def shrinkable(self, index: int) -> int:
        """Tokens that moving this message would free."""
        return self.live[index] - self.items[index].preview

    def movable(self, index: int) -> bool:
        """Whether this message would get smaller and may be moved by now."""
        if self.items[index].role is Role.USER and (index >= self.recent_user or index in self._staying):
            return False
        return self.shrinkable(index) > 0

    def oldest(self, end: int, enough: int | None = None) -> list[int]:
        """Return the oldest gains before message `end` that free so many tokens together, or all."""
        taken, freed = list[int](), 0
        for index in self.gains:
            if index >= end or (enough is not None and freed >= enough):
                break
            if self.movable(index):
                taken.append(index)
                freed += self.shrinkable(index)
        return taken

    def results(self, end: int) -> Iterator[int]:
        """Yield the results among the gains before message `end`, the newest one first."""
        return (index for index in reversed(self.gains) if index < end and self.items[index].role is Role.TOOL)

    def shrink(self, indexes: Collection[int]) -> None:
        """Replace these messages by references."""
        for index in indexes:
            freed = self.shrinkable(index)
            self.live[index] -= freed
            self.total -= freed
        moved = set(indexes)
        self.gains = [index for index in self.gains if index not in moved]

    # -- what a summary replaces ---------------------------------------------------------------------------------------

    @property
    def crowded(self) -> bool:
        """Whether too many messages stay in their places for another summary."""
        return len(self._staying) > MOST_KEPT

    def old(self, end: int) -> int:
        """Tokens of the history before message `end`, an earlier snapshot included."""
        return self.total - sum(self.live[max(end, self.leading) :])

    def pins(self, end: int) -> dict[int, int]:
        """The messages before `end` that a summary leaves alone, with the tokens of each once what may has moved.

        The user's first message stays, and so do the newest others within the budget, and as many system messages.
        Large ones do not count against it, because only their previews stay, and nor do those that stay in their
        places.
        """
        kept = {index for index in self._staying if self.leading <= index < end}
        if self._first is not None and self._first < end:
            kept.add(self._first)
        kept.update(self._newest(self._users, end, self.recent_user), self._newest(self._systems, end, end))
        pinned = {index: self.live[index] for index in kept}
        old = bisect_left(self._large_users, end)
        for index in self._large_users[max(old - MOST_PREVIEWS, 0) : old]:
            pinned[index] = self.live[index] - (self.shrinkable(index) if self.movable(index) else 0)
        return pinned

    def _newest(self, indexes: Sequence[int], end: int, recent: int) -> Iterator[int]:
        """Yield the newest of these messages before `end` within the budget, and all from `recent` on."""
        counted = 0
        for place in range(bisect_left(indexes, end) - 1, -1, -1):
            index = indexes[place]
            if index in self._staying:
                continue
            counted += self.live[index] or self.items[index].tokens
            if counted > self._budget and index < recent:
                break
            yield index

    def summarise(self, indexes: Iterable[int], pins: Collection[int], snapshot: int) -> None:
        """Replace these messages, except leading and pinned ones, by a snapshot of so many tokens."""
        for index in indexes:
            if index >= self.leading and index not in pins:
                self.live[index] = 0
        for index in pins:
            self.live[index] = self.live[index] or self.items[index].tokens  # a reply that an earlier one had replaced
        self.total = snapshot + sum(self.live[self.leading :])

    def replies_between(self, kept: Sequence[int], end: int) -> Iterator[int]:
        """The replies that have to be kept too if only `kept` and everything from `end` on is left of the history.

        Without them a user message would directly follow tool results, which chat templates refuse. That can only
        happen to tool results that stay in their places.
        """
        spoken = (index for index in kept if self.items[index].role is not Role.SYSTEM)
        for before, after in pairwise([*spoken, end]):
            if self.items[before].role is Role.TOOL and self.items[after].role is Role.USER:
                reply = after - 1
                while self.items[reply].role in (Role.USER, Role.SYSTEM):
                    reply -= 1
                if self.items[reply].role is Role.ASSISTANT:
                    yield reply
