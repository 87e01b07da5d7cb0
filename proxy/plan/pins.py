"""The messages that a summary leaves word for word in the context."""

from __future__ import annotations

import copy
from collections import deque
from typing import Self

MOST_PREVIEWS = 100
"""The most previews of large messages that stay. Each takes some 70 tokens."""
MOST_KEPT = 1_000
"""A history in which more messages stay in their places is not summarised any further. Every boundary names them, so
that without a bound, memory and time would grow with their number times that of the boundaries."""


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
        self._others: deque[tuple[int, int, int]] = deque()  # small ones: index, tokens, those of images
        self._counted = 0  # their tokens
        self._large: deque[tuple[int, int, int]] = deque()  # large ones: index, tokens of the preview, those of images
        self._whole: deque[tuple[int, int]] = deque()  # those among them that are recent: index, tokens beyond that
        self._kept: set[int] = set()
        self.tokens = 0
        """What the pinned messages take once all large ones are moved that may be."""
        self.fixed = 0
        """How many of these tokens are images, audio or files."""

    def add(self, index: int, tokens: int, preview: int, fixed: int = 0) -> bool:
        """Pin message `index`, the newest. Whether it is large, so that only its preview stays once it is released."""
        self.tokens += tokens
        self.fixed += fixed
        if self._keeps_first and self._first is None:
            self._first = index
            return False
        if preview < tokens:
            self._large.append((index, preview, fixed))
            self._whole.append((index, tokens - preview))
            return True
        self._others.append((index, tokens, fixed))
        self._counted += tokens
        return False

    def keep(self, index: int, tokens: int, fixed: int = 0) -> None:
        """Pin message `index` for good, whatever its role."""
        self._kept.add(index)
        self.tokens += tokens
        self.fixed += fixed

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
            _, tokens, fixed = self._others.popleft()
            self.tokens -= tokens
            self._counted -= tokens
            self.fixed -= fixed
        while len(self._large) > MOST_PREVIEWS:
            _, tokens, fixed = self._large.popleft()
            self.tokens -= tokens
            self.fixed -= fixed
        return moving

    def settle(self) -> frozenset[int]:
        """The indexes of the pinned messages."""
        first = [] if self._first is None else [self._first]
        return frozenset(self._kept).union(first, (index for index, *_ in (*self._others, *self._large)))

    def copy(self) -> Self:
        other = copy.copy(self)
        other._others, other._kept = self._others.copy(), self._kept.copy()
        other._large, other._whole = self._large.copy(), self._whole.copy()
        return other
