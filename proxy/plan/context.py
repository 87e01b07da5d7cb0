"""The context as the planner's decisions have left it so far: all messages, the old ones among them, and the pins.

All sizes are tokens. Leading system messages count in no sum here; see `Messages.leading_tokens`.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from heapq import merge
from itertools import pairwise
from typing import Self

import msgspec

from proxy.plan.plan import Item, Role
from proxy.policy import Mode, Offload

MOST_PREVIEWS = 100
"""The most previews of large user messages that a summary leaves. Each takes some 70 tokens."""
MOST_KEPT = 1_000
"""A history in which more messages stay in their places is not summarised any further. Every boundary names them, so
that without a bound, memory and time would grow with their number times that of the boundaries."""


class Messages:
    """The messages so far: the tokens of each after the decisions so far, and where steps and turns begin."""

    def __init__(self) -> None:
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
        self.task = 0
        """Tokens of the user's first message, which always stays."""
        self.recent_user = 0
        """Where the last two user messages begin. They are never touched."""
        self.unanswered = 0
        """Where the messages begin that the model has not answered yet."""
        self.reply = 0
        """Where the model's newest reply begins."""
        self.reply_before = 0
        """Where the reply before that one begins."""
        self.staying: set[int] = set()
        """The messages that a cut leaves in their places, because calls and results near them do not pair."""
        self._steps: list[int] = []  # for each message, where its step begins

    def append(self, item: Item, live: int) -> None:
        """Add the next message, with its live tokens."""
        index = len(self.items)
        if item.role is Role.ASSISTANT:
            if self.unanswered < index or not index:
                self.reply_before, self.reply = self.reply, index
            self.unanswered = index + 1
        elif item.role is Role.USER:
            self.recent_user, self.turn = self.turn, index
            self.task = self.task or item.tokens
        self.staying.update(range(index - item.stays_before, index + item.stays))
        in_step = item.role is Role.TOOL and index > 0
        self._steps.append(self._steps[-1] if in_step else index)
        self.items.append(item)
        self.live.append(live)
        if item.role is Role.SYSTEM and self.leading == index:
            self.leading += 1
            self.leading_tokens += live
        else:
            self.total += live

    @property
    def answered(self) -> bool:
        """Whether no message waits for an answer: the last one is the assistant's, or there is none."""
        return not self.items or self.items[-1].role is Role.ASSISTANT

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

    def shrinkable(self, index: int) -> int:
        """Tokens that moving this message would free."""
        return self.live[index] - self.items[index].preview

    def movable(self, index: int) -> bool:
        """Whether this message would get smaller and may be moved by now."""
        return self.shrinkable(index) > 0 and (self.items[index].role is not Role.USER or index < self.recent_user)

    def shrink(self, index: int) -> int:
        """Replace this message by a reference; returns the freed tokens."""
        freed = self.shrinkable(index)
        self.live[index] -= freed
        self.total -= freed
        return freed

    def take(self, indexes: Iterable[int], pins: frozenset[int], freed: int) -> None:
        """Replace these messages, except leading and pinned ones, by a snapshot, which frees so many tokens."""
        for index in indexes:
            if index >= self.leading and index not in pins:
                self.live[index] = 0
        self.total -= freed

    def restore(self, index: int) -> int:
        """Bring back a reply that an earlier snapshot has replaced; returns its tokens, or 0 if none has."""
        tokens = 0 if self.live[index] else self.items[index].tokens
        self.live[index] += tokens
        self.total += tokens
        return tokens

    def copy(self) -> Self:
        other = copy.copy(self)
        other.items, other.live, other._steps = self.items.copy(), self.live.copy(), self._steps.copy()
        other.staying = self.staying.copy()
        return other


class Gain(msgspec.Struct, frozen=True, gc=False):
    """A result that may move early."""

    index: int
    before: int
    """Live tokens before it, plus all that oldest results before it have freed by then; see `OldHistory.before`."""


class OldHistory:
    """The messages before the recent window, the only ones that can be moved, and sums over them.

    A *gain* is a message that an event would move: a result above `max_tool_message_tokens`, or a large user message
    that is no longer one of the last two. Gains are *seen* once the model has answered `keep_views` times with them in
    view. Each message enters and leaves each list once.
    """

    def __init__(self, offload: Offload) -> None:
        self.end = 0
        """Where the recent window begins."""
        self.seen_end = 0
        """Where what the model has answered fewer than `keep_views` times begins; never behind `end`."""
        self.movable = 0
        """Live tokens before `end`, without the snapshot."""
        self.gain = 0
        """The tokens that moving all gains would free."""
        self.seen: deque[Gain] = deque()
        """The results that may move early."""
        self._fresh: deque[int] = deque()  # those that may not yet
        self._large_users: deque[int] = deque()
        self._seen_tokens = 0  # live tokens before `seen_end`, with the snapshot
        self._shift = 0  # what oldest gains have freed so far
        self._users = Pins(offload.pin_user_tokens, keeps_first=True)
        self._systems = Pins(offload.pin_user_tokens)
        self._compacts = offload.mode is not Mode.COMPRESS
        self._least = offload.max_tool_message_tokens

    @property
    def pinned(self) -> int:
        """The tokens that a summary would leave alone."""
        return self._users.tokens + self._systems.tokens

    @property
    def crowded(self) -> bool:
        """Whether too many messages stay in their places for another summary."""
        return self._users.crowded

    @property
    def results(self) -> int:
        """The number of results among the gains."""
        return len(self.seen) + len(self._fresh)

    def large(self, item: Item, live: int) -> bool:
        """Whether this is a result that moves once it is old."""
        return self._compacts and item.role is Role.TOOL and item.tokens > self._least and live > item.preview

    def before(self, gain: Gain) -> int:
        """Live tokens before a result that may move early."""
        return gain.before - self._shift

    def advance(self, messages: Messages, end: int, seen_end: int = 0) -> None:
        """Let the recent window begin at `end`, and what was seen too rarely at `seen_end`. Neither moves back."""
        for index in range(max(self.end, messages.leading), end):
            self._add(messages, index)
        self.end = max(self.end, end)
        self._systems.release(self.end)
        for index in self._users.release(messages.recent_user):
            self._large_users.append(index)
            self.gain += messages.shrinkable(index)
        for index in range(max(self.seen_end, messages.leading), seen_end):
            if self._fresh and self._fresh[0] == index:
                self.seen.append(Gain(self._fresh.popleft(), self._seen_tokens + self._shift))
            self._seen_tokens += messages.live[index]
        self.seen_end = max(self.seen_end, seen_end)

    def _add(self, messages: Messages, index: int) -> None:
        item, live, freed = messages.items[index], messages.live[index], messages.shrinkable(index)
        if self.large(item, live):
            self._fresh.append(index)
            self.gain += freed
        if index in messages.staying:
            self._users.keep(index, live)
        elif item.role is Role.USER:
            self._users.add(index, live, live - freed)
        elif item.role is Role.SYSTEM:
            self._systems.add(index, live, live)
        self.movable += live

    def oldest(self, messages: Messages, enough: int) -> list[int]:
        """Take the oldest gains that free so many tokens together, or all."""
        taken, freed = list[int](), 0
        for index in merge(self._large_users, (gain.index for gain in self.seen), self._fresh):
            if freed >= enough:
                break
            taken.append(index)
            freed += messages.shrinkable(index)
        last = taken[-1] if taken else -1
        while self.seen and self.seen[0].index <= last:
            self.seen.popleft()
        for indexes in (self._large_users, self._fresh):
            while indexes and indexes[0] <= last:
                indexes.popleft()
        self._shift += freed
        self.gain -= freed
        return taken

    def newest(self, messages: Messages, first: int) -> list[int]:
        """Take the seen gains from message `first` on."""
        taken = list[int]()
        while self.seen and self.seen[-1].index >= first:
            taken.append(self.seen.pop().index)
        self.gain -= sum(map(messages.shrinkable, taken))
        return taken

    def shrunk(self, index: int, freed: int) -> None:
        """A reference has replaced this message, which freed so many tokens."""
        self.movable -= freed
        self._seen_tokens -= freed if index < self.seen_end else 0
        self._users.shrunk(index, freed)

    def settle(self) -> frozenset[int]:
        """The pins for a summary here. Messages that were released become part of it and are never pinned again."""
        return self._users.settle() | self._systems.settle()

    def taken(self, snapshot: int, replies: int) -> None:
        """A snapshot of so many tokens has replaced all old messages but leading ones and pins. So many tokens of
        replies are among the pins until the next summary."""
        self.movable = self.pinned + replies
        self.seen_end, self._seen_tokens = self.end, self.movable + snapshot

    def copy(self) -> Self:
        other = copy.copy(self)
        other.seen, other._fresh = self.seen.copy(), self._fresh.copy()
        other._large_users = self._large_users.copy()
        other._users, other._systems = self._users.copy(), self._systems.copy()
        return other


class Pins:
    """Messages that a summary leaves alone: the recent ones, and as many of the newest others as the budget allows.

    With `keeps_first`, the first message is always kept and does not count against the budget: the user's first
    message usually states the task, and a long one must not displace the newest. Large messages do not count either,
    because only their previews stay, and nor do messages that are kept because they stay in their places. Messages are
    added as they leave the recent window, each in constant time (amortised).
    """

    def __init__(self, budget: int, *, keeps_first: bool = False) -> None:
        self._budget = budget
        self._keeps_first = keeps_first
        self._first: int | None = None
        self._others: deque[tuple[int, int]] = deque()  # small ones: index, tokens
        self._counted = 0  # their tokens
        self._large: deque[tuple[int, int]] = deque()  # large ones: index, tokens of the preview
        self._whole: deque[tuple[int, int]] = deque()  # those among them that are recent: index, tokens beyond that
        self._kept: set[int] = set()
        self.tokens = 0
        """What the pinned messages take once all large ones are moved that may be."""

    def add(self, index: int, tokens: int, preview: int) -> None:
        """Pin message `index`, the newest. Of a large one, only its preview stays once it is released."""
        self.tokens += tokens
        if self._keeps_first and self._first is None:
            self._first = index
        elif preview < tokens:
            self._large.append((index, preview))
            self._whole.append((index, tokens - preview))
        else:
            self._others.append((index, tokens))
            self._counted += tokens

    def keep(self, index: int, tokens: int) -> None:
        """Pin message `index` for good, whatever its role."""
        self._kept.add(index)
        self.tokens += tokens

    @property
    def crowded(self) -> bool:
        """Whether too many messages are kept for another summary."""
        return len(self._kept) > MOST_KEPT

    def shrunk(self, index: int, freed: int) -> None:
        """A reference has replaced this message, which may be one that is kept."""
        if index in self._kept:
            self.tokens -= freed

    def release(self, recent: int) -> list[int]:
        """Release what no longer fits, but nothing from `recent` on. Returns the large messages that may move now."""
        moving = list[int]()
        while self._whole and self._whole[0][0] < recent:
            index, freed = self._whole.popleft()
            self.tokens -= freed
            moving.append(index)
        while self._counted > self._budget and self._others[0][0] < recent:
            _, tokens = self._others.popleft()
            self.tokens -= tokens
            self._counted -= tokens
        while len(self._large) > MOST_PREVIEWS:
            self.tokens -= self._large.popleft()[1]
        return moving

    def settle(self) -> frozenset[int]:
        """The indexes of the pinned messages."""
        first = [] if self._first is None else [self._first]
        return frozenset(self._kept).union(first, (index for index, _ in (*self._others, *self._large)))

    def copy(self) -> Self:
        other = copy.copy(self)
        other._others, other._kept = self._others.copy(), self._kept.copy()
        other._large, other._whole = self._large.copy(), self._whole.copy()
        return other
