"""Checks that work is linear in the size of its input, by this thread's CPU time, so other
processes do not count."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

ALLOWED = 3.0
"""How many times the CPU time twice the input may take."""
NOISE = 0.002
"""Differences of fewer seconds than this are ignored as noise."""
TRIES = 60
PAUSE = 0.02
"""Seconds longer that each try after the fifth waits for the one before: a busy neighbour may be
gone by then."""


def assert_linear(work: Callable[[T], object], once: T, twice: T) -> None:
    """Fail if `work(twice)`, on double the input, takes more than three times the CPU time of
    `work(once)`.

    Quadratic work takes four times as long. Linear work takes twice as long, but on a busy machine
    it has taken 2.4 times as long: the larger input no longer fits caches that neighbours share.
    The fastest of many tries counts for each, because other load can only slow work down.
    """
    single = double = float("inf")
    for number in range(TRIES):
        time.sleep(max(0.0, PAUSE * min(number - 5, 20)))
        single, double = min(single, cpu(work, once)), min(double, cpu(work, twice))
        if double <= ALLOWED * single + NOISE:
            return
    raise AssertionError(
        f"twice the input took {double / single:.2f} times as long: {single:.4f} s, {double:.4f} s"
    )


def cpu(work: Callable[[T], object], given: T) -> float:
    """Return the CPU seconds of `work(given)` in this thread, without collecting other tests'
    garbage."""
    gc.disable()
    try:
        began = time.thread_time()
        work(given)
        return time.thread_time() - began
    finally:
        gc.enable()
