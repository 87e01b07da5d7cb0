"""Bounded thread pools, one for each kind of work that would hold up the event loop.

A pool takes turns: first among the tenants, then among a tenant's callers, one piece of work each time. So a tenant
with a hundred pieces waiting, or a hundred keys, delays another tenant by one piece and not by a hundred. No tenant
gets all of the threads. A pool never starts work for a caller that has stopped waiting. Long work calls `breathe`,
which pauses it while others have their turn, or ends it.

A thread helps only if the work releases the interpreter's lock now and then: Python code does so every few
milliseconds, but one long call into a C parser does not. Bound such calls before you make them.
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
"""Threads in each pool of a process. One tenant gets at most all but one of them."""

WAITING = 1_000
"""Pieces of work that one caller may have waiting in one pool."""

PAUSED = 13
"""Pieces of work that may be paused at once in one pool. Each keeps its memory and an idle thread."""

SLICE = 0.05
"""Seconds of processor time that work may use before others get their turn."""

_LOOK = 0.5
"""Seconds between two checks by paused work whether its pool is still open."""

_turns = threading.local()


_CALLER = re.compile(r"-(?:[0-9a-f]{16}|anonymous)$")
"""The part of a namespace that follows the tenant's name; see `policies.tenants`."""


class _Turn:
    """A caller's place in the queue and then its thread, from the call of `run` until the work ends."""

    def __init__(self, pool: WorkPool, caller: str, loop: asyncio.AbstractEventLoop) -> None:
        self.pool = pool
        self.caller = caller
        self.tenant = _CALLER.sub("", caller)
        self.loop = loop
        self.left = False
        """Whether the caller has stopped waiting for the result."""
        self.given: asyncio.Future[None] = loop.create_future()
        self.going_on = threading.Event()
        """Set when paused work gets a thread again."""
        self.until = 0.0
        """Processor time of its thread, in seconds, at which it should pause."""

    def give(self) -> None:
        """Grant the turn a thread."""
        self.going_on.set()
        if not self.given.done():
            self.given.set_result(None)

    def running(self, work: Callable[[], T]) -> T:
        """Run `work` in this thread and return its result."""
        self.until = time.thread_time() + SLICE
        _turns.now = self
        try:
            return work()
        finally:
            _turns.now = None


class _Abandoned(BaseException):
    """Ends work whose result is no longer wanted. A BaseException, so that no error handler catches it."""


def breathe() -> None:
    """Let others have their turn. Long work calls this often, from any thread; it costs less than a microsecond.

    In a pool's thread, it pauses work whose time slice is over if other callers wait, and ends work whose own caller
    has stopped waiting. In any other thread it does nothing.
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
    """Threads for one kind of work, shared fairly between callers. A pool belongs to one event loop."""

    def __init__(self, name: str, threads: int, waiting: int = WAITING) -> None:
        self._name = name
        self._executor = ThreadPoolExecutor(threads + PAUSED, thread_name_prefix=name)
        self._free = threads
        self._most = max(1, threads - 1)
        """The most threads that one tenant may use at once."""
        self._most_waiting = waiting
        self._queues: OrderedDict[str, OrderedDict[str, dict[_Turn, None]]] = OrderedDict()
        """Waiting work, by tenant and by caller."""
        self._busy: Counter[str] = Counter()
        """Threads in use, by tenant."""
        self._pauses = threading.Semaphore(PAUSED)
        self.closed = False

    @property
    def waiting(self) -> int:
        """Pieces of work without a thread, whether not yet started or paused."""
        return sum(len(queue) for callers in self._queues.values() for queue in callers.values())

    async def run(self, caller: str, work: Callable[[], T], *, begun: bool = False) -> T:
        """Run `work` in a thread when it is this caller's turn, and return its result or raise its error.

        `caller` is a namespace, or the empty string for the proxy's own work. Raises Overloaded if too much of the
        caller's work waits already, unless the work is for a reply that has `begun` and would be cut off. If the call
        is cancelled before the work starts, the work never runs. If it is cancelled later, the work ends at its next
        call of `breathe`; without one, it runs to its end and the result is thrown away.
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
        # The thread is free when the work ends, not when the caller stops waiting.
        running.add_done_callback(lambda _: _call_soon(loop, lambda: self._release(turn.tenant)))
        try:
            return await asyncio.wrap_future(running)
        except asyncio.CancelledError:
            turn.left = True
            raise
        finally:
            del running  # it holds the work's error, whose traceback holds this frame

    def close(self) -> None:
        """Take no more work. Does not wait for busy threads; long work ends at its next call of `breathe`."""
        self.closed = True
        self._executor.shutdown(wait=False, cancel_futures=True)

    # -- on the event loop --

    def _queue(self, turn: _Turn) -> dict[_Turn, None]:
        """Return the waiting work of this turn's caller."""
        return self._queues.get(turn.tenant, OrderedDict()).get(turn.caller, {})

    def _line_up(self, turn: _Turn) -> None:
        self._queues.setdefault(turn.tenant, OrderedDict()).setdefault(turn.caller, {})[turn] = None
        self._hand_out()

    def _give_up(self, turn: _Turn) -> None:
        """Withdraw a turn whose caller has stopped waiting."""
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
        """Free a thread of this tenant."""
        self._busy[tenant] -= 1
        if not self._busy[tenant]:
            del self._busy[tenant]
        self._free += 1
        self._hand_out()

    def _hand_out(self) -> None:
        """Give each free thread to the tenant that has waited longest since its last turn and may have one more thread;
        within the tenant, to the caller that has waited longest."""
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
        """Put paused work at the end of the queue and give its thread to other work."""
        self._line_up(turn)
        self._release(turn.tenant)

    # -- in a thread --

    def _pause(self, turn: _Turn) -> None:
        """Wait until it is this work's turn again. Returns at once if no other caller waits or if `PAUSED` pieces are
        paused."""
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
    """The pools of one process."""

    reading: WorkPool = field(default_factory=lambda: WorkPool("reading", READING))
    """Parsing, counting and planning."""
    large: WorkPool = field(default_factory=lambda: WorkPool("large", LARGE))
    """Counting single texts that take seconds, apart from `reading` so that small requests do not wait for them."""
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
