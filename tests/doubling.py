"""Whether work is linear in the size of its input, told by processor time: no clock on the wall, no other process."""

from __future__ import annotations

import time
from collections.abc import Callable

ALLOWED = 2.3
"""Times the CPU that twice the input may take."""
NOISE = 0.002
"""Seconds; below these a ratio says nothing."""
TRIES = 5


def linear(work: Callable[[int], object], size: int) -> bool:
    """Whether `work(2 * size)` takes at most `ALLOWED` times what `work(size)` takes in this thread, at best."""
    return any(cpu(work, 2 * size) <= ALLOWED * cpu(work, size) + NOISE for _ in range(TRIES))


def cpu(work: Callable[[int], object], size: int) -> float:
    """Seconds of this thread."""
    began = time.thread_time()
    work(size)
    return time.thread_time() - began
