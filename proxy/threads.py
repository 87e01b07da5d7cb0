"""Bounded thread pools, one for each kind of work that would hold up the event loop.

A pool takes work from its callers in turn, one piece from each, so that a tenant with a hundred pieces waiting delays
another tenant by one piece and not by a hundred. No caller has all of the threads. Work is never started for a caller
who has stopped waiting, and long work pauses where it calls `breathe`: others have their turn, or it ends.

A thread helps only where the work gives up the interpreter's lock now and then: Python code does so every few
milliseconds, one long call into a C parser does not. Bound such calls before they are made.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from proxy.errors import Overloaded

T = TypeVar("T")

READING, SEARCHING, DECODING = 3, 3, 3
"""Threads in each pool of a process. One caller has all but one of them at most."""

WAITING = 1_000
"""Pieces of work that one caller may have waiting in one pool."""

PAUSED = 13
"""Pieces of work of a pool that may be paused at once: each keeps its memory, and a thread that does nothing."""

SLICE = 0.05
"""Seconds of processor time that work takes before others get their turn."""

_LOOK = 0.5
"""Seconds between two looks of paused work at whether its pool still lives."""

_turns = threading.local()


class _Turn:
    """A caller's right to a thread, from when it asks until its work ends."""

    def __init__(self, pool: WorkPool, caller: str, loop: asyncio.AbstractEventLoop) -> None:
        self.pool = pool
        self.caller = caller
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
        """Threads of one caller."""
        self._most_waiting = waiting
        self._queues: OrderedDict[str, dict[_Turn, None]] = OrderedDict()
        self._busy: Counter[str] = Counter()
        """Threads by caller."""
        self._pauses = threading.Semaphore(PAUSED)
        self.closed = False

    @property
    def waiting(self) -> int:
        """Pieces of work that have no thread yet, or none at the moment."""
        return sum(map(len, self._queues.values()))

    async def run(self, caller: str, work: Callable[[], T], *, begun: bool = False) -> T:
        """The result of `work`, run in a thread when it is this caller's turn; what it raises is raised here.

        `caller` is a namespace, or the empty string for the proxy's own work. Raises Overloaded where the caller has
        too much waiting already, unless the work is for a reply that has `begun` and would be cut off. Cancelled while
        it waits, the work is never run; cancelled while it runs, it ends where it calls `breathe`, or else the thread
        finishes it, and the result is thrown away.
        """
        waits = not self._free or self._busy[caller] >= self._most
        if waits and not begun and len(self._queues.get(caller, ())) >= self._most_waiting:
            raise Overloaded(f"More than {self._most_waiting} pieces of work wait for {self._name}", retry_after=1)
        loop = asyncio.get_running_loop()
        turn = _Turn(self, caller, loop)
        self._line_up(turn)
        try:
            await turn.given
        except asyncio.CancelledError:
            self._give_up(turn)
            raise
        try:
            running = self._executor.submit(turn.running, work)
        except BaseException:
            self._release(caller)
            raise
        # Not when the caller stops waiting: only when the thread is free again.
        running.add_done_callback(lambda _: _call_soon(loop, lambda: self._release(caller)))
        try:
            return await asyncio.wrap_future(running)
        except asyncio.CancelledError:
            turn.left = True
            raise

    def close(self) -> None:
        """Take no more work. Does not wait for threads that are still busy; long work ends."""
        self.closed = True
        self._executor.shutdown(wait=False, cancel_futures=True)

    # -- on the event loop --

    def _line_up(self, turn: _Turn) -> None:
        self._queues.setdefault(turn.caller, {})[turn] = None
        self._hand_out()

    def _give_up(self, turn: _Turn) -> None:
        """Whoever waited for a turn has left."""
        queue = self._queues.get(turn.caller, {})
        if turn not in queue:  # its turn came at the same moment
            self._release(turn.caller)
            return
        del queue[turn]
        if not queue:
            del self._queues[turn.caller]

    def _release(self, caller: str) -> None:
        """A thread is free again."""
        self._busy[caller] -= 1
        if not self._busy[caller]:
            del self._busy[caller]
        self._free += 1
        self._hand_out()

    def _hand_out(self) -> None:
        """Each free thread goes to the caller whose last turn is longest ago, of those who may have one more."""
        while self._free:
            caller = next((one for one in self._queues if self._busy[one] < self._most), None)
            if caller is None:
                return
            queue = self._queues.pop(caller)
            turn = next(iter(queue))
            del queue[turn]
            if queue:
                self._queues[caller] = queue
            self._free -= 1
            self._busy[caller] += 1
            turn.give()

    def _step_back(self, turn: _Turn) -> None:
        """Paused work goes behind all others, and its thread to one of them."""
        self._line_up(turn)
        self._release(turn.caller)

    # -- in a thread --

    def _pause(self, turn: _Turn) -> None:
        """Return when it is this work's turn again: at once where no other caller waits."""
        others = len(self._queues) > (turn.caller in self._queues)
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
    searching: WorkPool = field(default_factory=lambda: WorkPool("searching", SEARCHING))
    """Regular expressions over moved texts."""
    decoding: WorkPool = field(default_factory=lambda: WorkPool("decoding", DECODING))
    """Compressed bodies."""

    def close(self) -> None:
        """Take no more work in any pool."""
        for pool in (self.reading, self.searching, self.decoding):
            pool.close()


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(callback)
