"""Work that goes on beside the requests: bounded, and not dropped when the process is asked to end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

log = logging.getLogger(__name__)


class Background:
    """At most `limit` tasks at a time; what comes above that is not begun."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, None]) -> bool:
        """Begin, unless there is too much under way; whether it did."""
        if len(self._tasks) >= self._limit:
            work.close()
            return False
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return True

    async def close(self, grace: float) -> None:
        """Wait for at most `grace` seconds, then cancel."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=grace)
        for task in list(self._tasks):
            task.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.error("background work failed", exc_info=error)
