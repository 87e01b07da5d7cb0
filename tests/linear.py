"""Whether work grows no faster than what it is done on, by the processor's time: the machine may be busy."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

TRIES = 6
MOST = 2.3


def assert_linear(work: Callable[[T], object], once: T, twice: T) -> None:
    """`twice` is double the input of `once`, and may cost 2.3 times as much. The best of a few tries counts."""
    ratios = []
    for _ in range(TRIES):
        ratios.append(_seconds(work, twice) / _seconds(work, once))
        if ratios[-1] <= MOST:
            return
    raise AssertionError(f"double the input took {min(ratios):.2f} times as long")


def _seconds(work: Callable[[T], object], given: T) -> float:
    began = time.thread_time()
    work(given)
    return time.thread_time() - began
