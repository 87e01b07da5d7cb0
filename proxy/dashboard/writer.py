"""Writes rows in a thread of its own. A request only appends to a queue that is bounded, and waits for nothing.

What goes wrong here ends in a warning and in lost rows: a disk that is full for a while, a file that cannot be used at
all, or a bug.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from proxy.dashboard import versions
from proxy.dashboard.database import LEAVING, Database, opened
from proxy.dashboard.rows import NOTHING_SEEN, Recorded, Seen
from proxy.errors import DashboardFault
from proxy.telemetry import logs
from proxy.telemetry.outcome import Outcome

logger = logging.getLogger(__name__)

WAITING = 20_000
"""Most rows that wait to be written. More are dropped, and counted."""

HELD = 64 << 20
"""Bytes of requests that may wait with the rows. More rows get no description."""

BATCH = 500
"""Most rows of one transaction."""

LATEST = 1.0
"""Seconds for which the rows of a batch are gathered. A transaction costs as much as some dozens of rows."""

AGAIN = 30.0
"""Seconds before the next try after a failure, such as a full disk."""

EXPIRE = 3600.0
"""Seconds between two looks for rows that are too old."""

LONGEST_AGE = 30 * 86_400.0
"""Seconds that a row is kept at most, whatever its tenant's retention."""

CLOSING = 2.0
"""Seconds that the last rows may take when the process ends."""


class Writing(msgspec.Struct):
    """How the writing goes, for the page about health."""

    written: int = 0
    dropped: int = 0
    fault: str = ""
    """Why rows are not written now."""
    off: bool = False
    """Whether it has been given up until the process is started again."""


class Writer:
    """Queues rows and writes them. `record` never blocks and never raises."""

    def __init__(
        self,
        path: Path,
        size: int,
        retention: Callable[[str], float | None] = lambda namespace: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._path = path
        self._size = size
        self._retention = retention
        self._clock = clock
        self._queue: deque[Recorded] = deque()
        self._told = threading.Event()
        self._ended = threading.Event()
        self._next_expiry = 0.0
        self._held = 0
        self._warn = logs.Limited(logger)
        self._thread = threading.Thread(target=self._run, name="dashboard", daemon=True)
        self.state = Writing()
        self.secret = b""
        """Random bytes that all processes with this file share; empty while it is not open."""

    def start(self) -> None:
        """Open the file and begin to write. If it cannot be used, warn, and drop all rows."""
        try:
            database = opened(self._path, self._size)
            self.secret = database.secret()
            database.close()
        except (DashboardFault, sqlite3.Error) as error:
            self._give_up(f"the dashboard is off: {error}")
        else:
            self._thread.start()

    def record(self, outcome: Outcome, seen: Seen = NOTHING_SEEN) -> None:
        """Queue a row, or drop it if too many wait."""
        if self.state.off or len(self._queue) >= WAITING:
            self.state.dropped += 1
            return
        if self._held + seen.weight > HELD:
            seen = Seen(seen.session)
        self._held += seen.weight
        self._queue.append(Recorded(self._clock(), outcome, seen))
        if not self._told.is_set():
            self._told.set()

    def close(self) -> None:
        """Write what waits, for `CLOSING` seconds at most."""
        self._ended.set()
        self._told.set()
        if self._thread.is_alive():
            self._thread.join(CLOSING)

    def _run(self) -> None:
        try:
            database = Database(self._path, self._size)
            try:
                while not self._ended.is_set():
                    self._told.wait()
                    self._ended.wait(LATEST)
                    self._told.clear()
                    self._drain(database)
                self._drain(database)
            finally:
                database.close()
        except Exception as error:
            logger.exception("a bug, in writing the dashboard's rows")
            self._give_up(f"the dashboard is off until the proxy is started again: {error}")

    def _drain(self, database: Database) -> None:
        """Write all that waits. After a failure, what waits is dropped, and the next try comes later."""
        while self._queue:
            batch = [self._queue.popleft() for _ in range(min(len(self._queue), BATCH))]
            self._held = max(self._held - sum(one.seen.weight for one in batch), 0)
            try:
                self._write(database, batch)
                self.state.fault = ""
                self._expire(database)
            except sqlite3.Error as error:
                self._failed(database, error, len(batch))
                return

    def _write(self, database: Database, batch: list[Recorded]) -> None:
        """Write a batch. A bug with one of its rows costs no other row."""
        try:
            database.write(batch)
            self.state.written += len(batch)
        except sqlite3.Error:
            raise
        except Exception:
            if len(batch) > 1:
                for one in batch:
                    self._write(database, [one])
            else:
                self.state.dropped += 1
                logger.exception("a bug, in writing a row of the dashboard")

    def _expire(self, database: Database) -> None:
        now = self._clock()
        if now >= self._next_expiry:
            more = database.expire(self._seconds, now) >= LEAVING
            self._next_expiry = now if more else now + EXPIRE
            versions.expire(self._path, now - LONGEST_AGE)

    def _seconds(self, namespace: str) -> float:
        kept = self._retention(namespace)
        return LONGEST_AGE if kept is None else min(kept, LONGEST_AGE)

    def _failed(self, database: Database, error: sqlite3.Error, lost: int) -> None:
        self.state.dropped += lost
        self.state.fault = str(error)
        if not isinstance(error, sqlite3.OperationalError):
            self._give_up(f"the dashboard is off: {self._path} is damaged ({error}): delete it, or name another")
            self._ended.set()
            return
        self._warn("rows", f"the dashboard loses rows: {self._path}: {error}")
        try:
            database.trim()
        except sqlite3.Error:  # not only the file is full, but the disk
            self._ended.wait(AGAIN)

    def _give_up(self, reason: str) -> None:
        self.state.off, self.state.fault = True, reason
        logger.warning("%s", reason)
        self._queue.clear()
