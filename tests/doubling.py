"""A check that work is linear in the size of its input, by CPU time of this thread: other processes do not count."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

ALLOWED = 2.3
"""Times the CPU time that twice the input may take."""
NOISE = 0.002
"""Seconds; differences below this say nothing."""
TRIES = 10


def assert_linear(work: Callable[[T], object], once: T, twice: T) -> None:
    """Fail if `work(twice)`, on double the input, takes more than 2.3 times the CPU time of `work(once)`.

    The fastest of up to 10 tries counts for each, because other load and cold caches only ever slow work down.
    """
    single = double = float("inf")
    for _ in range(TRIES):
        single, double = min(single, cpu(work, once)), min(double, cpu(work, twice))
        if double <= ALLOWED * single + NOISE:
            return
    raise AssertionError(f"twice the input took {double / single:.2f} times as long: {single:.4f} s, {double:.4f} s")


def cpu(work: Callable[[T], object], given: T) -> float:
    """CPU seconds that `work(given)` takes in this thread, without the garbage of other tests."""
    gc.disable()
    try:
        began = time.thread_time()
        work(given)
        return time.thread_time() - began
    finally:
        gc.enable()
