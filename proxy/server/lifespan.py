"""Context managers for the application's lifespan: background work and garbage collection."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

logger = logging.getLogger(__name__)


YOUNG = 10_000
"""So many more objects than before must be there until the collector looks for cycles among them. At Python's 700 it
looks at those of a few dozen requests, most of which are freed soon without it."""


@contextmanager
def settled() -> Iterator[None]:
    """Exempt all objects made at start-up from garbage collection, as they live as long as the process, and collect
    less often.

    Without the former, the collector scans them again and again, and 64 requests at once take 1.5 times as long at the
    99th percentile.
    """
    _, *older = usual = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, *older)
    try:
        yield
    finally:
        gc.set_threshold(*usual)
        gc.unfreeze()


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


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()):
        logger.error("background work ended", exc_info=error)
