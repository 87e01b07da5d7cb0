"""The thread that reads the file for all pages and streams, one after the other.

While somebody watches, it is asked every few seconds, mostly by a process that has nothing else at hand: to pass a call
and its result through an executor would then cost more than the call.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

from proxy.errors import DashboardFault

T = TypeVar("T")

CLOSING = 0.75
"""Seconds that the last calls may take when the process ends."""

Call = tuple[Callable[[], Any], "asyncio.Future[Any] | None"]


class ReadingThread:
    """Runs calls, once the first of them comes."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self._thread = threading.Thread(target=_run, args=(self._calls,), name="dashboard-reader", daemon=True)
        self._closed = False

    async def run(self, work: Callable[[], T]) -> T:
        """Return or raise what `work` returns or raises. Raises DashboardFault after `close`."""
        if self._closed:
            raise DashboardFault("The process ends")
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._calls.put((work, future))
        if not self._thread.ident:
            self._thread.start()
        return await future

    def close(self, last: Callable[[], object]) -> None:
        """Take no more calls, and make a last one, if there was any."""
        self._closed = True
        self._calls.put((last, None))
        self._calls.put(None)
        if self._thread.ident:
            self._thread.join(CLOSING)


def _run(calls: SimpleQueue[Call | None]) -> None:
    while call := calls.get():
        work, future = call
        if future is None or not future.cancelled():
            result, error = None, None
            try:
                result = work()
            except BaseException as raised:  # noqa: BLE001  (the caller of `run` gets it)
                error = raised
            if future is not None:
                with suppress(RuntimeError):  # the loop has ended, and so has whoever waited
                    future.get_loop().call_soon_threadsafe(_settle, future, result, error)
            del result, error
        del call, work, future  # or an idle thread would keep them alive


def _settle(future: asyncio.Future[Any], result: object, error: BaseException | None) -> None:
    if future.cancelled():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
