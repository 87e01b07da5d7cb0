"""Writes rows in a thread of its own, in one transaction a second. A request only appends to a
queue.

The queue is bounded: what comes beyond it is dropped and counted, and nobody waits. While the disk
is full or another process has locked the file, rows wait, and the thread tries again every `AGAIN`
seconds. The file is opened for each transaction, so that it may be removed or replaced at any time.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import msgspec

from proxy.apps.dashboard.describe import NOTHING, describe
from proxy.apps.dashboard.rows import DAY, HOUR, Recorded, Rows
from proxy.errors import DashboardFault
from proxy.requests.prepared import Prepared
from proxy.telemetry import logs
from proxy.telemetry.outcome import Outcome

logger = logging.getLogger(__name__)

WAITING = 20_000
"""Most rows that wait to be written. More are dropped, and counted."""

HELD = 64 << 20
"""Bytes of requests that may wait with their rows, to be described. More get no description."""

BATCH = 500
LARGE = 1 << 20
"""Rows, and bytes of what became of their messages, that are written at once: they fit into the
smallest file. So many rows are written without waiting for more."""

LATEST = 1.0
"""Seconds for which rows are gathered."""

AGAIN = 5.0
"""Seconds before the next try after a failure."""

LONGEST_AGE = 30.0 * DAY
"""Seconds that a row is kept at most, whatever its tenant's retention."""

CLOSING = 0.75
"""Seconds that the last rows may take when the process ends."""


class Writing(msgspec.Struct):
    """How the writing goes."""

    written: int = 0
    dropped: int = 0
    fault: str = ""
    """Why rows are not written now."""
    off: bool = False
    """Whether it has been given up until the process is started again."""


class Writer:
    """Queues rows and writes them, with the texts of requests if `content`. `record` never blocks
    and never raises."""

    def __init__(
        self,
        path: Path,
        size: int,
        retention: Callable[[str], float | None] = lambda namespace: None,
        clock: Callable[[], float] = time.time,
        *,
        content: bool = False,
    ) -> None:
        self._path = path
        self._size = size
        self._content = content
        self._retention = retention
        self._clock = clock
        self._queue: deque[tuple[float, Outcome, Prepared | None]] = deque()
        """Requests that ended: when, how, and what is to be described."""
        self._batch: list[Recorded] = []
        """Described rows that are being written. They stay here if that fails."""
        self._received = self._left = 0
        """Bytes that ever came with requests, and those no longer held: each is changed by one
        thread."""
        self._wake = threading.Event()
        self._ended = threading.Event()
        self._next_expiry = 0.0
        self._warn = logs.Limited(logger)
        self._thread = threading.Thread(target=self._run, name="dashboard", daemon=True)
        self.state = Writing()
        self.secret = b""
        """Random bytes that all processes with this file share; empty while it is not open."""

    def start(self) -> None:
        """Open the file and begin to write. If it cannot be used, warn, and drop all rows."""
        try:
            with closing(Rows(self._path, self._size)) as rows:
                self.secret = rows.secret()
        except sqlite3.OperationalError as error:
            self._failed(error)
        except (DashboardFault, sqlite3.Error) as error:
            self._give_up(f"the dashboard is off: {error}")
            return
        self._thread.start()

    def record(self, outcome: Outcome, attempt: Prepared | None = None) -> None:
        """Queue a row, or drop it if too many wait. The thread that writes describes the
        attempt."""
        if self.state.off or self._waiting() >= WAITING:
            self.state.dropped += 1
            return
        if attempt and self._received - self._left + len(attempt.body) > HELD:
            attempt = None
        self._received += len(attempt.body) if attempt else 0
        self._queue.append((self._clock(), outcome, attempt))
        if len(self._queue) >= BATCH or self._received - self._left > HELD // 4:
            self._wake.set()

    def close(self) -> None:
        """Write what waits, for `CLOSING` seconds at most."""
        self._ended.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(CLOSING)
        if lost := self._waiting():
            logger.warning(
                "%d rows of the dashboard were not written before the end: only the log has them",
                lost,
            )

    def _waiting(self) -> int:
        return len(self._queue) + len(self._batch)

    # -- in the thread --

    def _run(self) -> None:
        try:
            while not self._ended.is_set() or (self._waiting() and not self.state.fault):
                self._wake.wait(LATEST)
                self._wake.clear()
                try:
                    self._write()
                except (DashboardFault, sqlite3.Error) as error:
                    self._failed(error)
                    self._ended.wait(AGAIN)
        except Exception as error:
            logger.exception("a bug, in writing the dashboard's rows")
            self._give_up(f"the dashboard is off until the proxy is started again: {error}")

    def _write(self) -> None:
        """Write what waits, to the file that is there now. Raises DashboardFault and
        `sqlite3.Error`."""
        now = self._clock()
        expires = not 0 <= self._next_expiry - now <= HOUR  # it is time, or the clock was set back
        if not (self._waiting() or expires):
            return
        with closing(Rows(self._path, self._size)) as rows:
            self.secret = rows.secret()
            while self._waiting():
                self._write_some(rows)
            if expires:
                rows.expire(self._seconds, now)
                self._next_expiry = now + HOUR
        self.state.fault = ""

    def _seconds(self, namespace: str) -> float:
        kept = self._retention(namespace)
        return LONGEST_AGE if kept is None else min(kept, LONGEST_AGE)

    def _write_some(self, rows: Rows) -> None:
        """Write the oldest of the rows that wait. Raises `sqlite3.Error`."""
        size = sum(len(one.detail or b"") for one in self._batch)
        while self._queue and len(self._batch) < BATCH and size < LARGE:
            time, outcome, attempt = self._queue.popleft()
            try:
                described = describe(attempt, content=self._content)
            except Exception:  # costs no row
                logger.exception("a bug, in describing a request for the dashboard")
                described = NOTHING
            self._batch.append(Recorded(time, outcome, *described))
            size += len(self._batch[-1].detail or b"")
            self._left += len(attempt.body) if attempt else 0
        self.state.written += rows.write(self._batch)
        self._batch.clear()

    def _failed(self, error: Exception) -> None:
        cure = ": it is damaged, delete it" if type(error) is sqlite3.DatabaseError else ""
        self.state.fault = f"{error}{cure}"
        self._warn("rows", f"the dashboard cannot write its rows: {self._path}: {self.state.fault}")

    def _give_up(self, reason: str) -> None:
        self.state.off = True
        self.state.fault = reason
        logger.warning("%s", reason)
        self.state.dropped += self._waiting()
        self._queue.clear()
        self._batch.clear()
