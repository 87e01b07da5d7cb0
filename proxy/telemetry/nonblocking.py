"""Writes log lines without ever waiting for whoever reads them.

A pipe whose reader hangs would stop the whole process, which logs in the thread that serves. So lines that cannot be
written at once are held, and a thread writes them as the reader takes them. Beyond `HELD` bytes all lines are dropped
until those are written, and a line in their place says how many.
"""

from __future__ import annotations

import logging
import os
import select
import stat
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress

PIECE = 4096
"""Bytes that are written at once. A pipe that is ready takes so many whole, without waiting (PIPE_BUF, pipe(7))."""

HELD = 8 << 20
"""Bytes that are held, which is some 9,000 lines."""

LAST = 0.5
"""Seconds that what is held may take when the process ends."""

_LOOK = 1.0
"""Seconds after which the thread looks again, should the system not wake it."""

_END = ord("\n")


class NonBlockingHandler(logging.Handler):
    """Writes to a file descriptor. What cannot be written, such as to a full disk, counts as dropped."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = _own(descriptor)
        self._ready = self._poll()
        self._held: deque[bytes] = deque()
        self._bytes = 0
        """Of what is held."""
        self._dropped = 0
        """Lines that are missing behind those that are held."""
        self._within = False
        """Whether what was written ends within a line."""
        self._thread: threading.Thread | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record's lines, or hold or drop them."""
        try:
            lines = self._encoded(record)
        except Exception:  # noqa: BLE001
            self.handleError(record)
            return
        if self._dropped or self._bytes + len(lines) > HELD:
            self._dropped += lines.count(b"\n")
        else:
            self._held.append(lines)
            self._bytes += len(lines)
        if self._thread is None and not self._written():
            thread = threading.Thread(target=self._run, name="log", daemon=True)
            with suppress(RuntimeError):  # the system starts no more threads now: the next line tries again
                thread.start()
                self._thread = thread

    def flush(self) -> None:
        """Write what is held, if that takes no longer than `LAST`. Logging calls this when the process ends."""
        until = time.monotonic() + LAST
        with self._locked():
            while not self._written() and (left := until - time.monotonic()) > 0:
                self._ready.poll(left * 1000)

    def _run(self) -> None:
        ready = self._poll()  # its own, as two threads may not use one
        while True:
            ready.poll(_LOOK * 1000)
            with self._locked():
                if self._written():
                    self._thread = None
                    return

    def _written(self) -> bool:
        """Write what can be written at once. Return False if the reader has to take something before the rest."""
        try:
            while self._held:
                if rest := self._rest(self._held[0]):
                    self._bytes -= len(self._held[0]) - len(rest)
                    self._held[0] = rest
                    return False
                self._bytes -= len(self._held.popleft())
            if self._dropped and not self._rest(self._gap()):
                self._dropped = 0
            return not self._dropped
        except OSError:  # a full disk, or a reader that is gone: nothing would wake the thread, so the next line tries
            self._dropped += sum(lines.count(b"\n") for lines in self._held)
            self._held.clear()
            self._bytes = 0
            return True

    def _rest(self, lines: bytes) -> bytes:
        """Write what can be written at once, and return the rest."""
        while lines and self._ready.poll(0):
            try:
                size = os.write(self._descriptor, lines[:PIECE])
            except BlockingIOError:  # another process was faster
                break
            self._within = lines[size - 1] != _END
            lines = lines[size:]
        return lines

    def _poll(self) -> select.poll:
        """Return what tells whether the descriptor is ready."""
        ready = select.poll()
        ready.register(self._descriptor, select.POLLOUT)
        return ready

    def _gap(self) -> bytes:
        """Return the line that stands for those that were dropped. It is shorter than a `PIECE`."""
        record = logging.LogRecord(__name__, logging.WARNING, "", 0, "lines of the log were dropped", None, None)
        record.__dict__["fields"] = {"lines": self._dropped}
        return b"\n" * self._within + self._encoded(record)

    def _encoded(self, record: logging.LogRecord) -> bytes:
        return f"{self.format(record)}\n".encode(errors="backslashreplace")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.acquire()
        try:
            yield
        finally:
            self.release()


def _own(descriptor: int) -> int:
    """Return a descriptor of the same pipe or terminal that is non-blocking; this one stays as other processes want it.

    Two processes that find a pipe ready at once would otherwise both write, and one of them would wait. A terminal
    that is ready may have room for less than a `PIECE`: the write would wait until somebody reads.
    """
    with suppress(OSError):
        if stat.S_ISFIFO(os.fstat(descriptor).st_mode) or os.isatty(descriptor):
            return os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    return descriptor
