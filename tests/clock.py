"""Time in tests: what has to happen is waited for, however busy the machine is, and timeouts are passed by hand.

    async def test_a_silent_upstream(clock: Clock) -> None:
        asking = asyncio.create_task(pool.send(…, idle_timeout=60))
        await until(lambda: wire.requests)
        clock.move(61)
        with pytest.raises(UpstreamSilent):
            await asking

Everything that polls or bounds a wait is here, so that no test has to sleep.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

T = TypeVar("T")

PATIENCE = 150.0
"""Seconds within which what has to happen does, on a machine that has much else to do."""

TURNS = 100
"""Turns of an event loop in which whatever is ready has happened, with everything that follows from it."""

_PAUSE = 0.01


class Clock:
    """A clock of event loops, and of whatever takes one as an argument: it stands still, or `goes` as usual, and is put
    forward by hand."""

    def __init__(self, *, goes: bool = False) -> None:
        self._goes, self._ahead = goes, 0.0
        self._loops: list[asyncio.AbstractEventLoop] = []

    def __call__(self) -> float:
        return self._ahead + (time.monotonic() if self._goes else 0.0)

    def govern(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let a loop's timers go by this clock. It must be one of asyncio's own."""
        self._loops.append(loop)
        loop.time = self  # type: ignore[method-assign]

    def move(self, seconds: float) -> None:
        """Put the clock forward, and wake up the loops. Any thread may call this."""
        self._ahead += seconds
        for loop in self._loops:
            loop.call_soon_threadsafe(lambda: None)

    async def let_pass(self, seconds: float, steps: int = 20) -> None:
        """Put the clock forward step by step, with time after each one for all that is ready."""
        await turns()
        for _ in range(steps):
            self.move(seconds / steps)
            await turns()


async def soon(what: Awaitable[T]) -> T:
    """Return what is waited for. Raises AssertionError if it does not come within `PATIENCE`."""
    task = asyncio.ensure_future(what)
    await until(task.done)
    return await task


async def until(met: Callable[[], Any]) -> None:
    """Wait until `met()` is true, or what it awaits. Raises AssertionError if it is not within `PATIENCE`."""
    deadline = time.monotonic() + PATIENCE
    await turns()
    while not (await got if isinstance(got := met(), Awaitable) else got):
        assert time.monotonic() < deadline, f"not within {PATIENCE:g} s"
        await asyncio.to_thread(time.sleep, _PAUSE)  # not by the loop's clock, which may stand still


def wait_until(met: Callable[[], Any]) -> None:
    """Wait in this thread as `until` does."""
    deadline = time.monotonic() + PATIENCE
    while not met():
        assert time.monotonic() < deadline, f"not within {PATIENCE:g} s"
        time.sleep(_PAUSE)


async def turns(number: int = TURNS) -> None:
    """Let everything happen in this loop that waits for no clock, thread or other process."""
    for _ in range(number):
        await asyncio.sleep(0)


async def still(measured: Callable[[], object]) -> None:
    """Wait until what is measured stays the same, as somebody waits for us."""
    before = object()
    while before != (before := measured()):
        await turns()
