"""What upstream finds in a cache with written breakpoints if the client leaves no room for ours."""

from __future__ import annotations

from collections import deque
from typing import Self

import msgspec

from proxy.plan.plan import Item, Role

LOOKBACK = 20
"""The blocks before a breakpoint at which Anthropic looks for an entry, its own included."""
BLOCKS = {Role.TOOL: 2}
"""By role, where not 1. A result brings its call as well; what else a reply consists of is not known here."""


class _Entry(msgspec.Struct, frozen=True, gc=False):
    """The end of a request, where the client set its last breakpoint."""

    messages: int
    tokens: int
    """Live tokens up to there, without leading system messages."""
    blocks: int


class CacheEntries:
    """The entries that upstream finds from the end of a request, oldest first. All of them begin like the context."""

    def __init__(self) -> None:
        self._blocks = 0
        self._found: deque[_Entry] = deque()

    def add(self, item: Item) -> None:
        """Add a message that no system prompt contains."""
        self._blocks += BLOCKS.get(item.role, 1)
        while self._found and self._found[0].blocks <= self._blocks - LOOKBACK:
            self._found.popleft()

    def enter(self, messages: int, tokens: int) -> None:
        """A request of so many messages and live tokens has been sent."""
        self._found.append(_Entry(messages, tokens, self._blocks))

    def cut(self, index: int) -> None:
        """The context has changed from message `index` on."""
        while self._found and self._found[-1].messages > index:
            self._found.pop()

    def before(self, index: int) -> int:
        """Return the live tokens that upstream reads if the context changes from message `index` on."""
        return next((entry.tokens for entry in reversed(self._found) if entry.messages <= index), 0)

    def copy(self) -> Self:
        other = type(self)()
        other._blocks, other._found = self._blocks, self._found.copy()
        return other
