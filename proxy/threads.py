"""Bounded thread pools, one for each kind of work that would hold up the event loop.

A pool takes work from the tenants in turn, and of each tenant from its callers, one piece from each: a tenant with a
hundred pieces waiting, or a hundred keys, delays another tenant by one piece and not by a hundred. No tenant has all of
the threads. Work is never started for a caller who has stopped waiting. Long work pauses where it calls `breathe`:
others have their turn, or it ends.

A thread helps only where the work gives up the interpreter's lock now and then: Python code does so every few
milliseconds, one long call into a C parser does not. Bound such calls before they are made.
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from proxy.errors import Overloaded

T = TypeVar("T")

READING, LARGE, SEARCHING, DECODING = 3, 2, 3, 3
"""Threads in each pool of a process. One tenant has all but one of them at most."""

WAITING = 1_000
"""Pieces of work that one caller may have waiting in one pool."""

PAUSED = 13
"""Pieces of work of a pool that may be paused at once: each keeps its memory, and a thread that does nothing."""

SLICE = 0.05
"""Seconds of processor time that work takes before others get their turn."""

_LOOK = 0.5
"""Seconds between two looks of paused work at whether its pool still lives."""

_turns = threading.local()


_CALLER = re.compile(r"-(?:[0-9a-f]{16}|anonymous)$")
"""What a namespace has behind the tenant's name; see `policies.tenants`."""


class _Turn:
    """A caller's right to a thread, from when it asks until its work ends."""

    def __init__(self, pool: WorkPool, caller: str, loop: asyncio.AbstractEventLoop) -> None:
        self.pool = pool
        self.caller = caller
        self.tenant = _CALLER.sub("", caller)
        self.loop = loop
        self.left = False
        """Nobody waits for its result any more."""
        self.given: asyncio.Future[None] = loop.create_future()
        self.going_on = threading.Event()
        """Set when paused work has a thread again."""
        self.until = 0.0
        """Processor time of its thread at which it should pause."""

    def give(self) -> None:
        """It has a thread."""
        self.going_on.set()
        if not self.given.done():
            self.given.set_result(None)

    def running(self, work: Callable[[], T]) -> T:
        """What `work` comes to, in this thread."""
        self.until = time.thread_time() + SLICE
        _turns.now = self
        try:
            return work()
        finally:
            _turns.now = None


class _Abandoned(BaseException):
    """Ends work whose result nobody waits for. No handler of errors is meant to catch it."""


def breathe() -> None:
    """To be called now and then by long work, from wherever it runs; costs less than a microsecond.

    In a pool's thread it lets other callers have their turn where they wait, and does not return where nobody waits
    for this work any more. Elsewhere it does nothing.
    """
    turn: _Turn | None = getattr(_turns, "now", None)
    if turn is None:
        return
    if turn.left or turn.pool.closed:
        raise _Abandoned
    if time.thread_time() >= turn.until:
        turn.pool._pause(turn)
        turn.until = time.thread_time() + SLICE


class WorkPool:
    """Threads for one kind of work, shared fairly between callers. Belongs to one event loop."""

    def __init__(self, name: str, threads: int, waiting: int = WAITING) -> None:
        self._name = name
        self._executor = ThreadPoolExecutor(threads + PAUSED, thread_name_prefix=name)
        self._free = threads
        self._most = max(1, threads - 1)
        """Threads of one tenant."""
        self._most_waiting = waiting
        self._queues: OrderedDict[str, OrderedDict[str, dict[_Turn, None]]] = OrderedDict()
        """Work that waits, by tenant and by caller."""
        self._busy: Counter[str] = Counter()
        """Threads by tenant."""
        self._pauses = threading.Semaphore(PAUSED)
        self.closed = False

    @property
    def waiting(self) -> int:
        """Pieces of work that have no thread yet, or none at the moment."""
        return sum(len(queue) for callers in self._queues.values() for queue in callers.values())

    async def run(self, caller: str, work: Callable[[], T], *, begun: bool = False) -> T:
        """The result of `work`, run in a thread when it is this caller's turn; what it raises is raised here.

        `caller` is a namespace, or the empty string for the proxy's own work. Raises Overloaded where the caller has
        too much waiting already, unless the work is for a reply that has `begun` and would be cut off. Cancelled while
        it waits, the work is never run; cancelled while it runs, it ends where it calls `breathe`, or else the thread
        finishes it, and the result is thrown away.
        """
        loop = asyncio.get_running_loop()
        turn = _Turn(self, caller, loop)
        waits = not self._free or self._busy[turn.tenant] >= self._most
        if waits and not begun and len(self._queue(turn)) >= self._most_waiting:
            raise Overloaded(f"More than {self._most_waiting} pieces of work wait for {self._name}", retry_after=1)
        self._line_up(turn)
        try:
            await turn.given
        except asyncio.CancelledError:
            self._give_up(turn)
            raise
        try:
            running = self._executor.submit(turn.running, work)
        except BaseException:
            self._release(turn.tenant)
            raise
        # Not when the caller stops waiting: only when the thread is free again.
        running.add_done_callback(lambda _: _call_soon(loop, lambda: self._release(turn.tenant)))
        try:
            return await asyncio.wrap_future(running)
        except asyncio.CancelledError:
            turn.left = True
            raise
        finally:
            del running  # it holds the work's error, whose traceback holds this frame

    def close(self) -> None:
        """Take no more work. Does not wait for threads that are still busy; long work ends."""
        self.closed = True
        self._executor.shutdown(wait=False, cancel_futures=True)

    # -- on the event loop --

    def _queue(self, turn: _Turn) -> dict[_Turn, None]:
        """The work of this turn's caller that waits."""
        return self._queues.get(turn.tenant, OrderedDict()).get(turn.caller, {})

    def _line_up(self, turn: _Turn) -> None:
        self._queues.setdefault(turn.tenant, OrderedDict()).setdefault(turn.caller, {})[turn] = None
        self._hand_out()

    def _give_up(self, turn: _Turn) -> None:
        """Whoever waited for a turn has left."""
        queue = self._queue(turn)
        if turn not in queue:  # its turn came at the same moment
            self._release(turn.tenant)
            return
        del queue[turn]
        callers = self._queues[turn.tenant]
        if not queue:
            del callers[turn.caller]
        if not callers:
            del self._queues[turn.tenant]

    def _release(self, tenant: str) -> None:
        """A thread is free again."""
        self._busy[tenant] -= 1
        if not self._busy[tenant]:
            del self._busy[tenant]
        self._free += 1
        self._hand_out()

    def _hand_out(self) -> None:
        """Give each free thread to the tenant whose last turn is longest ago, of those who may have one more, and there
        to the caller of whom the same holds."""
        while self._free:
            tenant = next((one for one in self._queues if self._busy[one] < self._most), None)
            if tenant is None:
                return
            callers = self._queues.pop(tenant)
            caller, queue = callers.popitem(last=False)
            turn = next(iter(queue))
            del queue[turn]
            if queue:
                callers[caller] = queue
            if callers:
                self._queues[tenant] = callers
            self._free -= 1
            self._busy[tenant] += 1
            turn.give()

    def _step_back(self, turn: _Turn) -> None:
        """Paused work goes behind all others, and its thread to one of them."""
        self._line_up(turn)
        self._release(turn.tenant)

    # -- in a thread --

    def _pause(self, turn: _Turn) -> None:
        """Return when it is this work's turn again: at once where no other caller waits."""
        waiting = sum(map(len, list(self._queues.values())))
        others = waiting > (turn.caller in self._queues.get(turn.tenant, ()))
        if not others or not self._pauses.acquire(blocking=False):
            return
        turn.going_on.clear()
        try:
            _call_soon(turn.loop, lambda: self._step_back(turn))
            while not turn.going_on.wait(_LOOK):
                if self.closed or turn.loop.is_closed():
                    raise _Abandoned
        finally:
            self._pauses.release()
        if turn.left:
            raise _Abandoned


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
