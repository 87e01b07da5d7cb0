"""Threads for work that would hold up the event loop, and fair turns for everything that is scarce.

Who gets the next free place: first what a client waits for, then what nobody waits for; among these the tenant whose
last turn is longest ago; of this tenant the caller whose last turn is longest ago. So a tenant with a thousand pieces
of work or a hundred keys delays another tenant by one piece. A tenant gets all places but one, and work that nobody
waits for gets half.

A pool never starts work for a caller that has stopped waiting. Long work calls `breathe`, which pauses it while others
have their turn, or ends it. A thread helps only if the work releases the interpreter's lock now and then: Python code
does so every few milliseconds, but one long call into a C parser does not. Bound such calls before you make them.

The threads are daemons, so a disk that hangs cannot keep the process from ending.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from proxy.errors import Overloaded

log = logging.getLogger(__name__)

T = TypeVar("T")

THREADS = 2
"""Threads for computing. More compete with the event loop for the interpreter's lock: with four, another tenant's
median under a flood was 219 ms and not 76."""

SWITCH_SECONDS = 0.001
"""How long a thread may keep the interpreter's lock while others want it; Python's own 5 ms add up where each step of
a request needs it again."""

SMALL = 512 << 10
"""Bytes that the event loop may look through at once, which takes a few milliseconds."""

NEW = 32
"""How many times as much it costs to read a text for the first time."""

WAITING = 1_000
"""Pieces of work that one caller may have waiting."""

PAUSED = 13
"""Pieces of work that may be paused at once in one pool. Each keeps its memory and an idle thread."""

SLICE = 0.05
"""Seconds of processor time that work may use before others get their turn."""

_LOOK = 0.5
"""Seconds between two checks by paused work whether its pool is still open."""

_CALLER = re.compile(r"-(?:[0-9a-f]{16}|anonymous)$")
"""The part of a namespace that follows the tenant's name; see `policies.tenants`."""

Lane = OrderedDict[str, OrderedDict[str, OrderedDict["Slot", None]]]
"""Who waits, by tenant and caller. Those whose turn comes next are first."""


def tenant_of(caller: str) -> str:
    """Return the tenant that a namespace belongs to."""
    return _CALLER.sub("", caller)


_nobody_waits = ContextVar("_nobody_waits", default=False)


@contextmanager
def nobody_waits() -> Iterator[None]:
    """Let what is done in this block, and in tasks that it creates, come after what a client waits for."""
    token = _nobody_waits.set(True)
    try:
        yield
    finally:
        _nobody_waits.reset(token)


def comes_later() -> bool:
    """Whether nobody waits for what is done here."""
    return _nobody_waits.get()


class Slot:
    """A caller's place, from the moment it is asked for. `later` says that nobody waits for it."""

    def __init__(self, caller: str, later: bool) -> None:
        self.caller, self.tenant, self.later = caller, tenant_of(caller), later
        self.given: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Turns:
    """Lets at most `places` things run at once. All methods run on one event loop.

    A caller is a namespace, or the empty string for the proxy's own work.
    """

    def __init__(self, places: int) -> None:
        self._places = self._free = places
        self._lanes: tuple[Lane, Lane] = (OrderedDict(), OrderedDict())
        self._busy: Counter[str] = Counter()
        """Places in use, by tenant."""
        self._later = 0
        """Places in use by what nobody waits for."""

    @property
    def waiting(self) -> int:
        """How many wait for a place."""
        return sum(len(queue) for lane in self._lanes for callers in lane.values() for queue in callers.values())

    def waiting_of(self, caller: str) -> int:
        """Return how many of this caller wait."""
        tenant = tenant_of(caller)
        return sum(len(lane[tenant].get(caller, ())) for lane in self._lanes if tenant in lane)

    def contended(self, later: bool) -> bool:
        """Whether anything waits that has a turn before more of this lane. May be called in a thread."""
        return bool(self._lanes[0] or (later and self._lanes[1]))

    @asynccontextmanager
    async def place(self, caller: str) -> AsyncIterator[None]:
        """Wait for a place, and give it back at the end."""
        turn = await self.take(caller)
        try:
            yield
        finally:
            self.give_back(turn)

    async def take(self, caller: str) -> Slot:
        """Wait for a place, which has to be given back."""
        turn = self.ask(caller, _nobody_waits.get())
        try:
            await turn.given
        except asyncio.CancelledError:
            if turn.given.cancelled():
                self._leave(turn)
            else:  # it has the place: both came at the same moment
                self.give_back(turn)
            raise
        return turn

    def ask(self, caller: str, later: bool) -> Slot:
        """Return a turn that waits for a place, or has one."""
        turn = Slot(caller, later)
        self._lanes[later].setdefault(turn.tenant, OrderedDict()).setdefault(caller, OrderedDict())[turn] = None
        self._hand_out()
        return turn

    def give_back(self, turn: Slot) -> None:
        """Pass the place on to whoever is next."""
        self._busy[turn.tenant] -= 1
        if not self._busy[turn.tenant]:
            del self._busy[turn.tenant]
        self._later -= turn.later
        self._free += 1
        self._hand_out()

    def _hand_out(self) -> None:
        most = max(1, self._places - 1)
        for later, lane in enumerate(self._lanes):
            while self._free and not (later and self._later >= max(1, self._places // 2)):
                tenant = next((one for one in lane if self._busy[one] < most), None)
                if tenant is None:
                    break
                self._give(lane, tenant)

    def _give(self, lane: Lane, tenant: str) -> None:
        """Give a free place to the tenant's next caller, and put both at the end of their queues."""
        callers = lane[tenant]
        caller, queue = next(iter(callers.items()))
        turn = next(iter(queue))
        if not turn.given.done():  # else it was cancelled just now, which costs its caller no turn
            callers.move_to_end(caller)
            lane.move_to_end(tenant)
            self._free -= 1
            self._busy[tenant] += 1
            self._later += turn.later
            turn.given.set_result(None)
        self._leave(turn)

    def _leave(self, turn: Slot) -> None:
        lane = self._lanes[turn.later]
        callers = lane.get(turn.tenant, OrderedDict())
        queue = callers.get(turn.caller, OrderedDict())
        queue.pop(turn, None)
        if not queue:
            callers.pop(turn.caller, None)
        if not callers:
            lane.pop(turn.tenant, None)


class _Abandoned(BaseException):
    """Ends work whose result is no longer wanted. A BaseException, so that no error handler catches it."""


class _Piece:
    """A piece of work with its thread, until it ends."""

    def __init__(self, pool: WorkPool, turn: Slot, work: Callable[[], Any]) -> None:
        self.pool, self.turn, self.work = pool, turn, work
        self.loop = asyncio.get_running_loop()
        self.ended: Future[None] = Future()
        """Says only that. A future keeps its callbacks, which keep it: an error in it would keep its frames as well."""
        self.value: Any = None
        self.error: BaseException | None = None
        self.left = False
        """Whether the caller has stopped waiting for the result."""
        self.going_on = threading.Event()
        """Set when paused work has a place again."""
        self.until = 0.0
        """Processor time of its thread, in seconds, at which it should pause."""

    def run(self) -> None:
        """Do the work in this thread."""
        if not self.ended.set_running_or_notify_cancel():
            return
        self.until = time.thread_time() + SLICE
        _running.piece = self
        try:
            self.value = self.work()
        except BaseException as error:  # noqa: BLE001  (the caller of `run` gets it)
            self.error = error
        finally:
            _running.piece = None
            del self.work  # whoever holds the piece need not hold the request
            self.ended.set_result(None)


_running = threading.local()


def breathe() -> None:
    """Let others have their turn. Long work calls this often, from any thread; it costs less than a microsecond.

    In a pool's thread, it pauses work whose time slice is over if other work waits, and ends work whose own caller has
    stopped waiting. In any other thread it does nothing.
    """
    piece: _Piece | None = getattr(_running, "piece", None)
    if piece is None:
        return
    if piece.left or piece.pool.closed:
        raise _Abandoned
    if time.thread_time() >= piece.until:
        piece.pool._pause(piece)
        piece.until = time.thread_time() + SLICE


class WorkPool:
    """At most `threads` pieces of work at once, in threads that start when they are needed. One event loop uses it."""

    def __init__(self, name: str, threads: int = THREADS, waiting: int = WAITING) -> None:
        self._name = name
        self._turns = Turns(threads)
        self._most_waiting = waiting
        self._pauses = threading.Semaphore(PAUSED)
        self._pieces: SimpleQueue[_Piece | None] = SimpleQueue()
        self._under_way: dict[Slot, Future[None]] = {}
        self._threads = self._paused = 0
        self.closed = False

    @property
    def waiting(self) -> int:
        """Pieces of work without a thread, whether not yet started or paused."""
        return self._turns.waiting

    async def run(self, caller: str, work: Callable[[], T], size: float = math.inf, *, begun: bool = False) -> T:
        """Return what `work` returns, or raise what it raises.

        `size` says how many bytes the work looks through; up to `SMALL` of them are no work for a thread.

        Raises Overloaded if too much of the caller's work waits already, unless the work is for a reply that has
        `begun` and would be cut off; and if the pool is closed. If the call is cancelled before the work starts, the
        work never runs. If it is cancelled later, the work ends at its next call of `breathe`; without one, it runs to
        its end and the result is thrown away.
        """
        if size <= SMALL:
            return work()
        if self.closed:
            raise Overloaded("The proxy is shutting down", retry_after=1)
        if not begun and self._turns.waiting_of(caller) >= self._most_waiting:
            raise Overloaded(f"More than {self._most_waiting} pieces of work wait for {self._name}", retry_after=1)
        piece = _Piece(self, await self._turns.take(caller), work)
        if not self._has_thread():
            self._turns.give_back(piece.turn)
            raise Overloaded("The system starts no more threads", retry_after=1)
        self._under_way[piece.turn] = piece.ended
        # The place is free when the work ends, not when the caller stops waiting.
        piece.ended.add_done_callback(partial(_call_soon, piece.loop, self._release, piece.turn))
        self._pieces.put(piece)
        try:
            await asyncio.wrap_future(piece.ended)
        except asyncio.CancelledError:
            piece.left = True
            raise
        error, piece.error = piece.error, None
        try:
            if error is not None:
                raise error
            value: T = piece.value
            return value
        finally:
            del piece, error  # its traceback holds this frame

    def close(self) -> None:
        """Take no more work. Does not wait for busy threads; long work ends at its next call of `breathe`."""
        self.closed = True
        for _ in range(self._threads):
            self._pieces.put(None)

    async def ended(self, seconds: float) -> int:
        """Close, and wait up to `seconds` for work under way. Returns how many pieces still hang."""
        self.close()
        if self._under_way:
            await asyncio.wait(map(asyncio.wrap_future, self._under_way.values()), timeout=seconds)
        return sum(not ended.done() for ended in self._under_way.values())

    def _has_thread(self) -> bool:
        """Start one more thread if all are busy. Returns whether there is any."""
        if self._threads <= len(self._under_way):
            name = f"{self._name}-{self._threads}"
            try:
                threading.Thread(target=_work, args=(self._pieces,), name=name, daemon=True).start()
                self._threads += 1
            except RuntimeError:  # one of the threads that there are does it later
                return self._threads > self._paused
        return True

    def _release(self, turn: Slot, _: object) -> None:
        self._under_way.pop(turn, None)
        self._turns.give_back(turn)

    def _pause(self, piece: _Piece) -> None:
        """Wait in the piece's thread until it is its turn again. Returns at once if nothing else waits."""
        if not self._turns.contended(piece.turn.later) or not self._pauses.acquire(blocking=False):
            return
        piece.going_on.clear()
        try:
            _call_soon(piece.loop, self._step_back, piece)
            while not piece.going_on.wait(_LOOK):
                if self.closed or piece.loop.is_closed():
                    raise _Abandoned
        finally:
            self._pauses.release()
        if piece.left:
            raise _Abandoned

    def _step_back(self, piece: _Piece) -> None:
        """Put paused work at the end of the queue, and give its place to other work."""
        self._paused += 1
        earlier, piece.turn = piece.turn, self._turns.ask(piece.turn.caller, piece.turn.later)
        piece.turn.given.add_done_callback(lambda _: self._go_on(piece))
        self._turns.give_back(earlier)

    def _go_on(self, piece: _Piece) -> None:
        self._paused -= 1
        piece.going_on.set()


def _work(pieces: SimpleQueue[_Piece | None]) -> None:
    while piece := pieces.get():
        piece.run()
        del piece  # or an idle thread would keep its result alive


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[..., None], *args: Any) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(callback, *args)


class Background:
    """Runs at most `limit` tasks at once, one of each name, which together hold at most `bytes` bytes of memory."""

    def __init__(self, limit: int, bytes: int = 256 << 20) -> None:
        self._limit = limit
        self._free = bytes
        self._tasks: dict[str, asyncio.Task[object]] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, name: str, work: Callable[[], Coroutine[Any, Any, object]], holds: int = 0) -> bool:
        """Start `work` unless a task of this name, or too much other work, is running. Returns whether it started.

        `holds` is the number of bytes of memory that the work keeps until it ends.
        """
        if name in self._tasks or len(self._tasks) >= self._limit or holds > self._free:
            return False
        self._free -= holds
        with nobody_waits():
            task = self._tasks[name] = asyncio.create_task(work(), name=name)
        task.add_done_callback(lambda task: self._ended(task, holds))
        return True

    async def ended(self, prefix: str, seconds: float) -> bool:
        """Wait at most `seconds` for the tasks whose names begin like this. Returns whether there were any."""
        tasks = [task for name, task in self._tasks.items() if name.startswith(prefix)]
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)
        return bool(tasks)

    async def close(self, grace: float) -> None:
        """Wait at most `grace` seconds for all tasks, then cancel the rest."""
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=grace)
        for task in list(self._tasks.values()):
            task.cancel()

    def _ended(self, task: asyncio.Task[object], holds: int) -> None:
        self._free += holds
        del self._tasks[task.get_name()]
        if not task.cancelled() and (error := task.exception()):
            log.error("background work failed", exc_info=error)
