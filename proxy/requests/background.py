"""Runs bounded background work, and waits for it when the process ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from proxy.threads import nobody_waits

log = logging.getLogger(__name__)


class Background:
    """Runs at most `limit` tasks at once, one of each name, which together hold at most `bytes` bytes of memory."""

    def __init__(self, limit: int, bytes: int = 256 << 20) -> None:
        self._limit = limit
        self._free = bytes
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, name: str, work: Callable[[], Coroutine[Any, Any, None]], holds: int = 0) -> bool:
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

    def _ended(self, task: asyncio.Task[None], holds: int) -> None:
        self._free += holds
        del self._tasks[task.get_name()]
        if not task.cancelled() and (error := task.exception()):
            log.error("background work failed", exc_info=error)
