"""A progress bar for terminals of any width, in plain characters."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TextIO

BAR, STEP = 30, 0.1
"""Most characters of the bar, and the seconds between two updates."""


def columns(stream: TextIO) -> int | None:
    """Return the width of the terminal that `stream` goes to; None if it goes elsewhere."""
    if not stream.isatty():
        return None
    try:
        return os.get_terminal_size(stream.fileno()).columns or None
    except (OSError, ValueError):
        return None


class Progress:
    """A bar on a terminal; nothing elsewhere. It never fills a whole line, which would begin another one."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream, clock
        self._visible, self._next, self._width = stream.isatty(), 0.0, 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._width:
            self._stream.write("\r" + " " * self._width + "\r")
            self._stream.flush()

    def show(self, share: float | None, count: int) -> None:
        """Show how much is done, as a share from 0 to 1 if that is known, and how many requests that were."""
        if not self._visible or self._clock() < self._next:
            return
        self._next = self._clock() + STEP
        line, width = f"{count:,} requests", columns(self._stream)
        if share is not None:
            line = f"{share:4.0%}  {line}"
            bar = BAR if width is None else min(BAR, width - len(line) - len("[] ") - 1)
            line = f"[{'#' * round(share * bar):{bar}}] {line}" if bar > 0 else line
        line = line if width is None else line[: width - 1]
        self._stream.write(f"\r{line:{self._width}}")
        self._stream.flush()
        self._width = len(line)
