"""The context as the planner's decisions have left it so far: all messages, the old ones among them, and the pins.

All sizes are tokens. Leading system messages count in no sum here; see `Messages.leading_tokens`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Self

import msgspec

from proxy.plan.pins import Pins
from proxy.plan.plan import Item, Role
from proxy.policy import Mode, Offload


class Gain(msgspec.Struct, frozen=True, gc=False):
    """A message that an event would compact."""

    index: int
    before: int
    """Live tokens of old history before it."""
    freed: int
    """Tokens that moving it frees."""
    since: int
    """The number of requests before the first one that carried it."""


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
        """The sum of `live` without the leading system messages, plus the snapshot."""
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
        self.staying: set[int] = set()
        """The messages that a cut leaves in their places, because calls and results near them do not pair."""
        self.requests = 0
        """The requests that the client has sent, the one under way included."""
        self.since: list[int] = []
        """For each message, the number of requests before the first one that carried it."""
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
        self.staying.update(range(index - item.stays_before, index + item.stays))
        in_step = item.role is Role.TOOL and index > 0
        self._steps.append(self._steps[-1] if in_step else index)
        self.items.append(item)
        self.live.append(live)
        self.since.append(self.requests)
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

        `answered`: by default, where the messages begin that the model has not answered yet.
        """
        size = len(self.items)
        start = min(size - min(keep, size), self.unanswered if answered is None else answered)
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
        other.staying, other.since = self.staying.copy(), self.since.copy()
        return other


class OldHistory:
    """The messages before the recent window, the only ones that can be moved, and sums over them.

    A *gain* is a message that an event would compact: a result, or a large user message that is no longer one of the
    last two. `gain` is the sum of the tokens that this would free.
    """

    def __init__(self, offload: Offload) -> None:
        self.end = 0
        """Where the recent window begins."""
        self.movable = 0
        """Live tokens, without the snapshot."""
        self.results: list[Gain] = []
        """The results that an event would compact now."""
        self.users: list[Gain] = []
        """The user messages that it would compact."""
        self.gain = 0
        self._users = Pins(offload.pin_user_tokens, keeps_first=True)
        self._systems = Pins(offload.pin_user_tokens)
        self._waiting: dict[int, int] = {}  # large ones of the last two user messages: live tokens before each
        self._snapshot = 0
        self._fixed = 0  # tokens of images and audio within `movable`
        self._compacts = offload.mode is not Mode.COMPRESS
        self._least = offload.max_tool_message_tokens
        self._plan = offload.plan

    @property
    def pinned(self) -> int:
        """The tokens that a summary would leave alone."""
        return self._users.tokens + self._systems.tokens

    @property
    def crowded(self) -> bool:
        """Whether too many messages stay in their places for another summary."""
        return self._users.crowded

    @property
    def offloadable(self) -> int:
        """The tokens that count against `max_total_tokens`."""
        return self.movable - self.pinned - (self._fixed - self._pinned_images)

    @property
    def _pinned_images(self) -> int:
        """Tokens of images within the pinned ones. Plan 1 subtracts them twice, and must not change."""
        return self._users.fixed + self._systems.fixed if self._plan > 1 else 0

    def advance(self, messages: Messages, end: int) -> None:
        """Let the recent window begin at `end`; it never moves back."""
        for index in range(max(self.end, messages.leading), end):
            self._add(messages, index)
        self.end = max(self.end, end)
        self._systems.release(self.end)
        for index in self._users.release(messages.recent_user):
            self._gain(self.users, messages, index, self._waiting.pop(index))

    def _add(self, messages: Messages, index: int) -> None:
        item, live, freed = messages.items[index], messages.live[index], messages.shrinkable(index)
        if self._compacts and item.role is Role.TOOL and item.tokens > self._least and freed > 0:
            self._gain(self.results, messages, index, self._tokens)
        if index in messages.staying:
            self._users.keep(index, live, item.fixed)
        elif item.role is Role.USER:
            if self._users.add(index, live, live - freed, item.fixed):
                self._waiting[index] = self._tokens
        elif item.role is Role.SYSTEM:
            self._systems.add(index, live, live, item.fixed)
        self.movable += live
        self._fixed += item.fixed

    @property
    def _tokens(self) -> int:
        return self.movable + self._snapshot

    def _gain(self, gains: list[Gain], messages: Messages, index: int, before: int) -> None:
        gains.append(Gain(index, before, messages.shrinkable(index), messages.since[index]))
        self.gain += gains[-1].freed

    @property
    def gain_from(self) -> int:
        """Live tokens before the first gain."""
        return min([gains[0].before for gains in (self.results, self.users) if gains], default=0)

    def shrunk(self, index: int, freed: int) -> None:
        """A reference has replaced this message, which freed so many tokens."""
        self.movable -= freed
        self._users.shrunk(index, freed)
        for later in self._waiting:
            if later > index:
                self._waiting[later] -= freed

    def take_gains(self, first: int = 0) -> list[int]:
        """Take the gains from message `first` on, which an event compacts, and return their indexes."""
        taken = list[int]()
        for gains in (self.results, self.users):
            while gains and gains[-1].index >= first:
                gain = gains.pop()
                self.gain -= gain.freed
                taken.append(gain.index)
        return taken

    def settle(self) -> frozenset[int]:
        """The pins for a summary here. Messages that were released become part of it and are never pinned again."""
        return self._users.settle() | self._systems.settle()

    def taken(self, messages: Messages, pins: frozenset[int], snapshot: int, replies: int) -> None:
        """A snapshot of so many tokens has replaced all old messages but leading ones and pins. So many tokens of
        replies are among the pins until the next summary."""
        self.movable, self._snapshot = self.pinned + replies, snapshot
        self._fixed = sum(messages.items[index].fixed for index in pins)
        before = self._tokens
        for index in sorted(self._waiting, reverse=True):
            before -= messages.live[index]
            self._waiting[index] = before

    def copy(self) -> Self:
        other = copy.copy(self)
        other.results, other.users, other._waiting = self.results.copy(), self.users.copy(), self._waiting.copy()
        other._users, other._systems = self._users.copy(), self._systems.copy()
        return other
