"""Threads for calls into the operating system that may never return, as on a network disk whose server is gone.

They are daemon threads, so such a call cannot keep the process from ending. Work waits for a free thread on the event
loop, so a caller that is cancelled before then leaves nothing in a queue, however long all threads hang.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from proxy.errors import NamespaceFault, StoreFault
from proxy.stores.turns import Turns

T = TypeVar("T")

THREADS = 8
"""Most threads. They are our own because a disk that hangs must not block the event loop's executor."""

WAITING = 10_000
"""Most calls of an owner waiting for a thread. If there are more, the disk cannot keep up, and they would only fill
memory."""

Item = tuple[Future[Any], Callable[[], Any]]


class Workers:
    """Runs calls for one event loop in at most `threads` threads, which it starts when needed."""

    def __init__(self, name: str, threads: int = THREADS, waiting: int = WAITING) -> None:
        self._name = name
        self._free = Turns(threads)
        self._most_waiting = waiting
        self._threads: list[threading.Thread] = []
        self._items: SimpleQueue[Item | None] = SimpleQueue()
        self._under_way: dict[Future[Any], tuple[str, float]] = {}
        self._closed = False

    async def run(self, what: str, work: Callable[[], T], owner: str = "") -> T:
        """Run `work` in a thread, and return or raise its result. `what` names it in the log if it hangs.

        If no thread is free, all owners that wait for one come in turn.

        Raises NamespaceFault if too many calls of this owner are waiting, and StoreFault after `close`. If the caller
        is cancelled before a thread is free, the work never runs. If it is cancelled while the work runs, the work
        continues.
        """
        if self._closed:
            raise StoreFault("the store is closed")
        if (waiting := self._free.count(owner)) >= self._most_waiting:
            raise NamespaceFault(f"{waiting} calls wait for the store already")
        await self._free.take(owner)
        future: Future[T] = Future()
        self._under_way[future] = what, time.monotonic()
        loop = asyncio.get_running_loop()
        future.add_done_callback(lambda _: _call_soon(loop, self._ended, future))
        if len(self._threads) < len(self._under_way) and not self._begun() and not self._threads:
            future.cancel()
            raise StoreFault("the system starts no more threads")
        self._items.put((future, work))
        return await asyncio.wrap_future(future)

    async def close(self, seconds: float) -> list[str]:
        """Accept no more work, and wait up to `seconds`. Returns the calls that still hang, and for how long."""
        self._closed = True
        if self._under_way:
            await asyncio.wait([asyncio.wrap_future(future) for future in self._under_way], timeout=seconds)
        for _ in self._threads:
            self._items.put(None)
        now = time.monotonic()
        hanging = [each for future, each in self._under_way.items() if not future.done()]
        return [f"{what} for {now - since:.0f} s" for what, since in hanging]

    def _ended(self, future: Future[Any]) -> None:
        del self._under_way[future]
        self._free.give_back()

    def _begun(self) -> bool:
        """Start one more thread, if the system lets us."""
        name = f"{self._name}-{len(self._threads)}"
        thread = threading.Thread(target=_work, args=(self._items,), name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return False
        self._threads.append(thread)
        return True


def _work(items: SimpleQueue[Item | None]) -> None:
    while item := items.get():
        future, work = item
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001  (the caller of `run` gets it)
                future.set_exception(error)
        del item, future, work  # or an idle thread would keep its last value alive


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[..., None], *args: Any) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(callback, *args)
