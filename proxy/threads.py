"""Bounded thread pools, one for each kind of work that would hold up the event loop.

A pool takes work from the tenants in turn, and of each tenant from its callers, one piece from each: a tenant with a
hundred pieces waiting, or a hundred keys, delays another tenant by one piece and not by a hundred. Work is never
started for a caller who has stopped waiting.

A thread helps only where the work gives up the interpreter's lock now and then: Python code does so every few
milliseconds, one long call into a C parser does not. Bound such calls before they are made.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from proxy.errors import Overloaded

T = TypeVar("T")

READING, LARGE, SEARCHING, DECODING = 2, 2, 2, 2
"""Threads in each pool of a process."""

WAITING = 1_000
"""Pieces of work that one caller may have waiting in one pool."""


_CALLER = re.compile(r"-(?:[0-9a-f]{16}|anonymous)$")
"""What a namespace has behind the tenant's name; see `policies.tenants`."""


class WorkPool:
    """Threads for one kind of work, shared fairly between callers. Belongs to one event loop."""

    def __init__(self, name: str, threads: int, waiting: int = WAITING) -> None:
        self._name = name
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._free = threads
        self._most_waiting = waiting
        self._queues: OrderedDict[str, OrderedDict[str, deque[asyncio.Future[None]]]] = OrderedDict()

    @property
    def waiting(self) -> int:
        """Pieces of work that have no thread yet."""
        return sum(len(queue) for callers in self._queues.values() for queue in callers.values())

    async def run(self, caller: str, work: Callable[[], T]) -> T:
        """The result of `work`, run in a thread when it is this caller's turn; what it raises is raised here.

        `caller` is a namespace, or the empty string for the proxy's own work. Raises Overloaded where the caller has
        too much waiting already. Cancelled while it waits, the work is never run; cancelled while it runs, the thread
        finishes it and the result is thrown away, so long work should look now and then at whether anybody waits.
        """
        await self._turn(caller)
        loop = asyncio.get_running_loop()
        try:
            running = self._executor.submit(work)
        except BaseException:
            self._release()
            raise
        # Not when the caller stops waiting: only when the thread is free again.
        running.add_done_callback(lambda _: _call_soon(loop, self._release))
        return await asyncio.wrap_future(running)

    def close(self) -> None:
        """Take no more work. Does not wait for threads that are still busy."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _turn(self, caller: str) -> None:
        if self._free:
            self._free -= 1
            return
        queue = self._queues.setdefault(_CALLER.sub("", caller), OrderedDict()).setdefault(caller, deque())
        if len(queue) >= self._most_waiting:
            raise Overloaded(f"More than {self._most_waiting} pieces of work wait for {self._name}", retry_after=1)
        turn = asyncio.get_running_loop().create_future()
        queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # its turn came at the same moment
                self._release()
            raise

    def _release(self) -> None:
        """A thread is free: it goes to the tenant whose last turn is longest ago, and there to such a caller."""
        while self._queues:
            tenant, callers = self._queues.popitem(last=False)
            caller, queue = callers.popitem(last=False)
            turn = queue.popleft()
            if queue:
                callers[caller] = queue
            if callers:
                self._queues[tenant] = callers
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1


@dataclass(frozen=True)
class Threads:
    """One process's pools."""

    reading: WorkPool = field(default_factory=lambda: WorkPool("reading", READING))
    """Parsing, counting and planning."""
    large: WorkPool = field(default_factory=lambda: WorkPool("large", LARGE))
    """Counting of single texts that take seconds, for which nobody with a small request is to wait."""
    searching: WorkPool = field(default_factory=lambda: WorkPool("searching", SEARCHING))
    """Regular expressions over moved texts."""
    decoding: WorkPool = field(default_factory=lambda: WorkPool("decoding", DECODING))
    """Compressed bodies."""

    def close(self) -> None:
        """Take no more work in any pool."""
        for pool in (self.reading, self.large, self.searching, self.decoding):
            pool.close()


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(callback)
