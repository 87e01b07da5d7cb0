"""Threads for work that would hold up the event loop, and fair turns for everything that is scarce.

Who gets the next free place: first what a client waits for, then what nobody waits for; among these
the tenant whose last turn is longest ago; of this tenant the caller whose last turn is longest ago.
So a tenant with a thousand pieces of work or a hundred keys delays another tenant by one piece. A
tenant gets all places but one, and work that nobody waits for gets half.

Long work calls `breathe`, which lets others have their turn, and ends the work if its caller has
left. A thread helps only if the work releases the interpreter's lock now and then: Python code does
so every few milliseconds, but one long call into a C parser does not.
"""

from __future__ import annotations

import _thread
import asyncio
import logging
import math
import re
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from typing import Any, TypeVar

from proxy.errors import Overloaded

log = logging.getLogger(__name__)

T = TypeVar("T")

THREADS = 2
"""Threads for computing. More compete with the event loop for the interpreter's lock: with four,
another tenant's median under a flood was 219 ms and not 76."""

SWITCH_SECONDS = 0.001
"""How long a thread may keep the interpreter's lock while others want it; Python's own 5 ms add up
where each step of a request needs it again."""

SMALL = 1 << 20
"""Bytes that the event loop may look through at once, which takes a few milliseconds."""

NEW = 64
"""How many times as much it costs to read a text for the first time."""

SLICE = 0.05
"""Seconds of processor time that work may use before others get their turn."""

PAUSED = 13
"""Pieces of work that may wait for their next turn in one pool. Each keeps its memory and its
thread."""

WAITING = 1_000
"""Pieces of work that one caller may have waiting."""

_CALLER = re.compile(r"-(?:[0-9a-f]{16}|anonymous)$")
"""The part of a namespace that follows the tenant's name; see `policies.tenants`."""


def tenant_of(caller: str) -> str:
    """Return the name of the tenant to which this namespace belongs."""
    return _CALLER.sub("", caller)


_nobody_waits = ContextVar("_nobody_waits", default=False)


@contextmanager
def nobody_waits() -> Iterator[None]:
    """Let what is done in this block, and in tasks that it creates, come after what a client waits
    for."""
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
        self.caller = caller
        self.tenant = tenant_of(caller)
        self.later = later
        self.given: asyncio.Future[None] = asyncio.get_running_loop().create_future()


Lane = OrderedDict[str, OrderedDict[str, OrderedDict[Slot, None]]]
"""Who waits, by tenant and caller. Those whose turn comes next are first."""


class Places:
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

    def waiting_of(self, caller: str) -> int:
        """Return how many of this caller wait."""
        tenant = tenant_of(caller)
        return sum(len(lane[tenant].get(caller, ())) for lane in self._lanes if tenant in lane)

    async def take(self, caller: str, later: bool | None = None) -> Slot:
        """Wait for a place, which has to be given back."""
        slot = Slot(caller, comes_later() if later is None else later)
        lane = self._lanes[slot.later]
        lane.setdefault(slot.tenant, OrderedDict()).setdefault(caller, OrderedDict())[slot] = None
        self._hand_out()
        try:
            await asyncio.shield(slot.given)
        except asyncio.CancelledError:
            if slot.given.done():  # it has the place: both came at the same moment
                self.give_back(slot)
            else:
                self._leave(slot)
            raise
        return slot

    def give_back(self, slot: Slot) -> None:
        """Pass the place on to whoever is next."""
        self._busy[slot.tenant] -= 1
        self._busy += Counter()  # drops the tenants that have none
        self._later -= slot.later
        self._free += 1
        self._hand_out()

    def _hand_out(self) -> None:
        while self._free and (slot := self._next()):
            self._leave(slot, had_its_turn=True)
            self._free -= 1
            self._busy[slot.tenant] += 1
            self._later += slot.later
            slot.given.set_result(None)

    def _next(self) -> Slot | None:
        """Return who gets the next place."""
        most_of_tenant = max(1, self._places - 1)
        most_later = max(1, self._places // 2)
        for lane in self._lanes if self._later < most_later else self._lanes[:1]:
            for tenant, callers in lane.items():
                if self._busy[tenant] < most_of_tenant:
                    queue = next(iter(callers.values()))
                    return next(iter(queue))
        return None

    def _leave(self, slot: Slot, *, had_its_turn: bool = False) -> None:
        """Take it out of its queue. After a turn, its caller and its tenant go to the end of
        theirs."""
        lane = self._lanes[slot.later]
        callers = lane[slot.tenant]
        del callers[slot.caller][slot]
        if had_its_turn:
            callers.move_to_end(slot.caller)
            lane.move_to_end(slot.tenant)
        if not callers[slot.caller]:
            del callers[slot.caller]
        if not callers:
            del lane[slot.tenant]


class _Abandoned(BaseException):
    """Ends work whose result is no longer wanted. A BaseException, so that no error handler catches
    it."""


class _Piece:
    """A piece of work under way in a thread."""

    def __init__(self, pool: WorkPool, slot: Slot, ended: asyncio.Future[Any]) -> None:
        self.pool = pool
        self.slot = slot
        self.ended = ended
        self.until = SLICE
        """Processor time of its thread, in seconds, at which others get their turn."""

    async def next_turn(self) -> None:
        """Pass the place on, and wait for another one."""
        places = self.pool.places
        places.give_back(self.slot)
        self.slot = await places.take(self.slot.caller, self.slot.later)


_running = threading.local()


def breathe() -> None:
    """Let others have their turn, if this is a thread of a pool and its time slice is over. Long
    work calls this often; it costs less than a microsecond."""
    piece: _Piece | None = getattr(_running, "piece", None)
    if piece is None or time.thread_time() < piece.until:
        return
    if piece.ended.done():
        raise _Abandoned
    if piece.pool.pauses.acquire(blocking=False):
        try:
            asyncio.run_coroutine_threadsafe(piece.next_turn(), piece.ended.get_loop()).result()
        finally:
            piece.pool.pauses.release()
    piece.until = time.thread_time() + SLICE


class WorkPool:
    """At most `threads` pieces of work at once, each in a thread of its own. One event loop uses
    it.

    The threads are daemons, so a disk that hangs cannot keep the process from ending.
    """

    def __init__(self, name: str, threads: int = THREADS, waiting: int = WAITING) -> None:
        self._name = name
        self.places = Places(threads)
        self.pauses = threading.Semaphore(PAUSED)
        self._most_waiting = waiting
        self._under_way = 0
        self._idle = asyncio.Event()
        self._closed = False

    async def run(
        self, caller: str, work: Callable[[], T], size: float = math.inf, *, begun: bool = False
    ) -> T:
        """Return what `work` returns, or raise what it raises.

        `size` says how many bytes the work looks through; up to `SMALL` of them are no work for a
        thread.

        Raises Overloaded if too much of the caller's work waits already, unless the work is for a
        reply that has `begun` and would be cut off; and if the pool is closed. If the call is
        cancelled before the work starts, the work never runs. If it is cancelled later, the work
        runs to its end or to a call of `breathe`, and its result is thrown away.
        """
        if size <= SMALL:
            return work()
        if self._closed:
            raise Overloaded("The proxy is shutting down", retry_after=1)
        if not begun and self.places.waiting_of(caller) >= self._most_waiting:
            raise Overloaded(
                f"More than {self._most_waiting} pieces of work wait for {self._name}",
                retry_after=1,
            )
        slot = await self.places.take(caller)
        ended: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        piece = _Piece(self, slot, ended)
        self._under_way += 1
        try:
            # Not `Thread.start`, which holds up the event loop until the new thread gets the
            # interpreter's lock.
            _thread.start_new_thread(_work, (work, piece, self._settle))
        except RuntimeError as error:
            self._release(slot)
            raise Overloaded("The system starts no more threads", retry_after=1) from error
        try:
            return await ended
        finally:
            del ended, piece  # an error's traceback holds this frame

    def close(self) -> None:
        """Take no more work. Does not wait for work under way."""
        self._closed = True

    async def ended(self, seconds: float) -> int:
        """Close, and wait up to `seconds` for work under way. Returns how many pieces still
        hang."""
        self.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._under_way:
                    self._idle.clear()
                    await self._idle.wait()
        return self._under_way

    def _settle(self, piece: _Piece, value: Any, error: BaseException | None) -> None:
        """Give the place back, as the work has ended, and pass on its result if the caller still
        waits."""
        self._release(piece.slot)
        if piece.ended.done():
            return
        if error is None:
            piece.ended.set_result(value)
        else:
            piece.ended.set_exception(error)

    def _release(self, slot: Slot) -> None:
        self._under_way -= 1
        self._idle.set()
        self.places.give_back(slot)


def _work(work: Callable[[], object], piece: _Piece, settle: Callable[..., None]) -> None:
    """Do the work in this thread, and tell the event loop, unless it has been closed."""
    value = None
    failure = None
    _running.piece = piece
    try:
        value = work()
    except BaseException as error:  # noqa: BLE001  (the caller of `run` gets it)
        failure = error
    with suppress(RuntimeError):
        piece.ended.get_loop().call_soon_threadsafe(settle, piece, value, failure)
    del failure, piece, _running.piece  # an error's traceback holds this frame


class Background:
    """Runs at most `limit` tasks at once, one of each name, which together hold at most `bytes`
    bytes of memory."""

    def __init__(self, limit: int, bytes: int = 256 << 20) -> None:
        self._limit = limit
        self._free = bytes
        self._tasks: dict[str, asyncio.Task[object]] = {}
        self._unawaited = set[str]()

    def __len__(self) -> int:
        return len(self._tasks)

    def start(
        self,
        name: str,
        work: Callable[[], Coroutine[Any, Any, object]],
        holds: int = 0,
        *,
        awaited: bool = True,
    ) -> bool:
        """Start `work` unless a task of this name, or too much other work, is running. Returns
        whether it started.

        `holds` is the number of bytes of memory that the work keeps until it ends. `awaited` is
        whether the end of the process waits for it.
        """
        if name in self._tasks or len(self._tasks) >= self._limit or holds > self._free:
            return False
        self._free -= holds
        if not awaited:
            self._unawaited.add(name)
        with nobody_waits():
            task = self._tasks[name] = asyncio.create_task(work(), name=name)
        task.add_done_callback(lambda task: self._ended(task, holds))
        return True

    async def ended(self, prefix: str, seconds: float) -> bool:
        """Wait at most `seconds` for the tasks whose names begin like this. Returns whether there
        were any."""
        tasks = [task for name, task in self._tasks.items() if name.startswith(prefix)]
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)
        return bool(tasks)

    async def close(self, grace: float) -> None:
        """Wait at most `grace` seconds for all tasks that are awaited, then cancel the rest."""
        for name in self._unawaited:
            self._tasks[name].cancel()
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=grace)
        for task in list(self._tasks.values()):
            task.cancel()

    def _ended(self, task: asyncio.Task[object], holds: int) -> None:
        self._free += holds
        self._unawaited.discard(task.get_name())
        del self._tasks[task.get_name()]
        _report(task)


@asynccontextmanager
async def running(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run `work` in the background and cancel it at the end. A failure is a bug and is logged."""
    task = asyncio.create_task(work)
    task.add_done_callback(_report)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


def _report(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()):
        log.error("background work failed", exc_info=error)
