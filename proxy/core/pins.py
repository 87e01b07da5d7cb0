"""The messages that a summary leaves word for word in the context."""

from __future__ import annotations

import copy
from collections import deque
from typing import Self


class Pins:
    """The user messages that a summary leaves alone: the first one, and as many of the newest as the budget allows.

    The first does not count against the budget: it usually states the task, and a long one must not displace the
    newest. Neither do the messages that are kept because they stay in their places. Messages are added as they leave
    the recent window, each in constant time (amortised).
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._first: tuple[int, int] | None = None
        self._others: deque[tuple[int, int]] = deque()
        self._kept: set[int] = set()
        self.tokens = 0

    def add(self, index: int, tokens: int) -> None:
        """Pin message `index`, the newest, and release the oldest ones that no longer fit."""
        self.tokens += tokens
        if self._first is None:
            self._first = (index, tokens)
            self._budget += tokens
            return
        self._others.append((index, tokens))
        while self.tokens > self._budget:
            self.tokens -= self._others.popleft()[1]

    def keep(self, index: int, tokens: int) -> None:
        """Pin message `index` for good, whatever its role."""
        self._kept.add(index)
        self._budget += tokens
        self.tokens += tokens

    def shrunk(self, index: int, freed: int) -> None:
        """A reference has replaced this message, which may be one that is kept."""
        if index in self._kept:
            self._budget -= freed
            self.tokens -= freed

    def copy(self) -> Self:
        other = copy.copy(self)
        other._others, other._kept = self._others.copy(), self._kept.copy()
        return other

    def settle(self) -> frozenset[int]:
        """The indexes of the pinned messages. Released ones become part of the summary and are never pinned again."""
        first = [] if self._first is None else [self._first]
        return frozenset(self._kept).union(index for index, _ in (*first, *self._others))
