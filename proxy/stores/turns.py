"""Slots for operations that run at once, given in turn to the namespaces that wait for one.

One caller can have thousands of operations waiting. In a plain queue, every other caller's next one would wait behind
them for longer than a request may wait for the store.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar


class TurnWait:
    """How long an operation waited for its turn; if it needed several at once, for the last of them."""

    def __init__(self) -> None:
        self.seconds = 0.0


_wait: ContextVar[TurnWait] = ContextVar("wait")


@contextmanager
def waiting() -> Iterator[TurnWait]:
    """Measure how long what is done in this block waits for turns, in this task and those that it creates."""
    wait = TurnWait()
    token = _wait.set(wait)
    try:
        yield wait
    finally:
        _wait.reset(token)


class Turns:
    """Lets at most `slots` operations run at once. All methods run on one event loop."""

    def __init__(self, slots: int) -> None:
        self._free = slots
        self._waiting: OrderedDict[str, OrderedDict[asyncio.Future[None], None]] = OrderedDict()
        """Who waits, by owner. The owner that comes next is first."""

    def count(self, owner: str) -> int:
        """Return how many operations of this owner wait for a slot."""
        return len(self._waiting.get(owner, ()))

    @asynccontextmanager
    async def slot(self, owner: str) -> AsyncIterator[None]:
        """TurnWait for a slot, and give it back at the end."""
        await self.take(owner)
        try:
            yield
        finally:
            self.give_back()

    async def take(self, owner: str) -> None:
        """TurnWait for a slot. The caller has to give it back."""
        if self._free:
            self._free -= 1
            return
        loop, wait = asyncio.get_running_loop(), _wait.get(TurnWait())
        turn, began = loop.create_future(), loop.time()
        self._waiting.setdefault(owner, OrderedDict())[turn] = None
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._leave(owner, turn)
            else:  # it has the slot: both came at the same moment
                self.give_back()
            raise
        finally:
            wait.seconds = max(wait.seconds, loop.time() - began)

    def give_back(self) -> None:
        """Pass the slot on to the next owner that waits, or keep it free."""
        while self._waiting:
            owner, turns = next(iter(self._waiting.items()))
            turn, _ = turns.popitem(last=False)
            if not turns:
                del self._waiting[owner]
            if turn.done():  # it was cancelled just now, which costs its owner no turn
                continue
            if turns:
                self._waiting.move_to_end(owner)
            turn.set_result(None)
            return
        self._free += 1

    def _leave(self, owner: str, turn: asyncio.Future[None]) -> None:
        turns = self._waiting.get(owner, OrderedDict())
        turns.pop(turn, None)
        if not turns:
            self._waiting.pop(owner, None)
