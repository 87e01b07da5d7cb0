"""Writes rows in a thread of its own. A request only appends to a queue that is bounded, and waits for nothing.

A transaction costs as much as some dozens of rows. So rows are gathered for `LATEST` seconds, until somebody looks, or
for `SOON` while somebody looks in another process. They are packed before, about a hundred at a time, in the requests'
thread and while the processor has them at hand. Only what takes long is left to the writing thread, as each change of
threads costs more than a row.

What goes wrong here ends in a warning and, if it lasts, in lost rows: a disk that is full, a file that another process
has locked, removed or replaced, or a bug.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress
from itertools import islice, repeat
from pathlib import Path

import msgspec

from proxy.dashboard import versions
from proxy.dashboard.batch import Batch
from proxy.dashboard.database import LEAVING, Database, opened
from proxy.dashboard.holding import Held, Unseen, shown
from proxy.dashboard.packs import APART, SPAN
from proxy.dashboard.rows import NOTHING_SEEN
from proxy.errors import DashboardFault
from proxy.telemetry import logs
from proxy.telemetry.outcome import Outcome

logger = logging.getLogger(__name__)

WAITING = 20_000
"""Most rows that wait to be written. More are dropped, and counted."""

HELD = 64 << 20
"""Bytes that may wait with the rows of long requests: of these, and of their descriptions. More get no description."""

TOGETHER = 128
"""Rows that are packed together, which takes about a millisecond. In packs of 32 a row takes half as much again, and
packs of 256 save nothing more."""

AHEAD = 32
"""Long requests that are described together."""

BATCH = 5_000
"""So many rows are written at once, as are a quarter of `HELD`."""

LATEST, SOON = 10.0, 1.0
"""Seconds for which the rows of a batch are gathered while nobody looks, and while somebody does in another process."""

LOOKING = 10.0
"""Seconds for which somebody looks who has asked another process for a page."""

EVERY = 2.5
"""Seconds between two looks for somebody who looks in another process."""

AGAIN = 5.0
"""Seconds before the next try after a failure, such as a full disk."""

EXPIRE = 3600.0
"""Seconds between two looks for rows that are too old."""

IDLE = 60.0
"""Seconds without rows after which the thread asks whether it is time for that."""

REST = 0.005
"""Seconds between two steps of packing rows of an earlier version, or requests would wait for the interpreter."""

LONGEST_AGE = 30 * 86_400.0
"""Seconds that a row is kept at most, whatever its tenant's retention."""

FRESH = 0.5
"""Seconds that a page waits for the rows so far."""

CLOSING = 0.75
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
    """Queues rows and writes them. `record` never blocks and never raises.

    With `others`, other processes write to the same file, and each learns from a file beside it that somebody looks.
    """

    def __init__(
        self,
        path: Path,
        size: int,
        retention: Callable[[str], float | None] = lambda namespace: None,
        clock: Callable[[], float] = time.time,
        *,
        others: bool = False,
    ) -> None:
        self._path = path
        self._size = size
        self._retention = retention
        self._clock = clock
        self._times, self._outcomes = list[float](), list[Outcome]()
        self._held: list[Held] = []
        """The newest rows. What is held is added last: there may be more times and outcomes for a moment."""
        self._open = Batch()
        """Where they are packed."""
        self._packing = threading.Lock()
        """Held while rows are packed, and while another batch takes the place of the open one."""
        self._closed: deque[Batch] = deque()
        """Batches to be written, the oldest first."""
        self._behind = 0
        """Rows of those."""
        self._long: deque[tuple[Batch, int, Unseen]] = deque()
        """Rows to be described, and their places."""
        self._asleep = False
        """Whether the thread waits for a first row."""
        self._due = False
        """Whether rows have waited long enough."""
        self._some = threading.Event()
        """Set to wake the thread."""
        self._none = threading.Event()
        """Set once no row waits."""
        self._ended = threading.Event()
        self._mark = path.with_name(f"{path.name}.watched") if others else None
        self._looked = -LOOKING
        self._next_expiry = 0.0
        self._older = False
        """Whether rows of an earlier version were still to be packed at the last look for rows that are too old."""
        self._came = self._left = 0
        """Bytes that were ever held, and those that are no longer: changed while packing, and in the thread."""
        self._most = WAITING
        """Rows that a transaction may add: fewer after a failure."""
        self._warn = logs.Limited(logger)
        self._database: Database | None = None
        self._leaving = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="dashboard", daemon=True)
        self.state = Writing()
        self.secret = b""
        """Random bytes that all processes with this file share; empty while it is not open."""

    def start(self) -> None:
        """Open the file and begin to write. If it cannot be used, warn, and drop all rows."""
        try:
            with closing(opened(self._path, self._size)) as database:
                self.secret = database.secret()
        except sqlite3.OperationalError as error:
            self._failed(error)
        except (DashboardFault, sqlite3.Error) as error:
            self._give_up(f"the dashboard is off: {error}")
            return
        self._thread.start()

    def record(self, outcomes: Sequence[Outcome], seen: Iterable[Held] = repeat(NOTHING_SEEN)) -> None:
        """Queue rows, or drop them if too many wait. Long requests are described in the thread that writes."""
        state = self.state
        room = 0 if state.off else max(WAITING - self._waiting(), 0)
        if room < len(outcomes):
            state.dropped += len(outcomes) - room
            outcomes = outcomes[:room]
        held, now = [*islice(seen, len(outcomes))], self._clock()
        if abs(now - next(iter(self._times), now)) > APART:  # the other thread may just have packed them
            self._pack()
        self._times += repeat(now, len(outcomes))
        self._outcomes += outcomes
        self._held += held
        if len(self._held) >= TOGETHER or Unseen in map(type, held):
            self._pack()
        if self._asleep and outcomes:  # after the rows were queued: the thread looks for rows after it said so
            self._asleep = False
            self._some.set()

    def _pack(self) -> None:
        """Add the rows of the queue to the open batch."""
        with self._packing:
            while count := min(len(self._held), SPAN):  # there may be more by the end
                rows = self._times[:count], self._outcomes[:count], self._held[:count]
                del self._times[:count], self._outcomes[:count], self._held[:count]
                self._add(*rows)
        if len(self._open) >= BATCH or len(self._long) >= AHEAD:
            self._some.set()

    def _add(self, times: Sequence[float], outcomes: Sequence[Outcome], held: Sequence[Held]) -> None:
        """Add rows to the open batch. A bug with one of them costs no other one."""
        batch, first = self._open, len(self._open)
        try:
            batch.add(times, outcomes, shown(held, outcomes))
        except Exception:
            if len(held) > 1:
                for at in range(len(held)):
                    self._add(times[at : at + 1], outcomes[at : at + 1], held[at : at + 1])
            else:
                self.state.dropped += 1
                logger.exception("a bug, in adding a row of the dashboard")
            return
        if Unseen in map(type, held):
            for place, one in enumerate(held, first):
                if isinstance(one, Unseen):
                    self._hold(batch, place, one)

    def _hold(self, batch: Batch, place: int, unseen: Unseen) -> None:
        """Hold a long request until it is described, if there is room."""
        held = self._came - self._left + unseen.weight
        if held > HELD // 4:
            self._some.set()
        if held <= HELD:
            self._came += unseen.weight
            self._long.append((batch, place, unseen))

    def look(self) -> None:
        """Somebody looks: have written what waits here, and soon what waits in other processes."""
        now = time.monotonic()
        if self._mark is not None and now - self._looked > EVERY / 2:
            self._looked = now
            with suppress(OSError):
                os.close(os.open(self._mark, os.O_WRONLY | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600))
                os.utime(self._mark)
        if self._waiting() and not self.state.off:
            self._none.clear()
            self._write_soon()
            if not self.state.fault:
                self._none.wait(FRESH)

    def leave(self) -> None:
        """Make sure that who opens the file next finds it as it is, even if it has just been replaced."""
        with self._leaving:
            if self._database is not None:
                self._database.leave()

    def close(self) -> None:
        """Write what waits, for `CLOSING` seconds at most."""
        self._ended.set()
        self._write_soon()
        if self._thread.is_alive():
            self._thread.join(CLOSING)
        if lost := self._waiting():
            logger.warning("%d rows of the dashboard were not written before the end: only the log has them", lost)

    def _waiting(self) -> int:
        return len(self._held) + len(self._open) + self._behind

    def _write_soon(self) -> None:
        self._due = True
        self._some.set()

    # -- in the thread --

    def _run(self) -> None:
        try:
            while not self._ended.is_set():
                try:
                    self.leave()
                    with closing(opened(self._path, self._size)) as database:
                        self.secret, self._database = database.secret(), database
                        self._serve(database)
                    if not self._ended.is_set():
                        said = "was removed or replaced: the dashboard goes on in what is there"
                        self._warn("file", f"{self._path} {said}")
                except (DashboardFault, sqlite3.OperationalError) as error:
                    self._failed(error)
                    self._ended.wait(AGAIN)
        except sqlite3.DatabaseError as error:
            self._give_up(f"the dashboard is off: {self._path} is damaged ({error}): delete it, or name another")
        except Exception as error:
            logger.exception("a bug, in writing the dashboard's rows")
            self._give_up(f"the dashboard is off until the proxy is started again: {error}")

    def _serve(self, database: Database) -> None:
        """Write what comes, until the process ends or the file is no longer there. Raises `sqlite3.Error`."""
        while not database.gone():
            if database.older and not self._ended.is_set():
                database.upgrade()
                self._ended.wait(REST)
                self._close()
            else:
                self._gather()
            while self._closed and not database.gone():
                self._write_some(database)
                if self._due:
                    self._close()
            self._expire(database)
            self._none.set()
            if self._ended.is_set() and not self._waiting():
                return

    def _gather(self) -> None:
        """Wait for rows, and for more of them. Returns without any when it may be time to look for old ones."""
        self._asleep = True
        if not self._waiting() and not self._some.wait(IDLE if self._next_expiry else SOON):
            return
        self._asleep = False
        begun = time.monotonic()
        while not self._hurried() and self._waiting() < BATCH and self._came - self._left < HELD // 4:
            left = begun + (SOON if self._watched() else LATEST) - time.monotonic()
            if left <= 0:
                break
            self._some.wait(min(left, EVERY) if self._mark else left)
            self._some.clear()
            self._describe()
        self._close()

    def _hurried(self) -> bool:
        return self._due or self._ended.is_set()

    def _close(self) -> None:
        """Close the open batch, so that it is written."""
        self._due = False
        self._pack()
        with self._packing:
            batch, self._open = self._open, Batch()
            self._behind += len(batch)
        self._describe()
        if len(batch):
            self._closed.append(batch)

    def _describe(self) -> None:
        """Describe long requests, and hold nothing else of them."""
        while self._long:
            batch, place, unseen = self._long.popleft()
            try:
                seen = unseen.seen()
                batch.describe(place, seen)
                self._left += unseen.weight - seen.weight
            except Exception:
                self._left += unseen.weight
                logger.exception("a bug, in describing a request for the dashboard")

    def _watched(self) -> bool:
        """Whether somebody looks, in whichever process."""
        try:
            return self._mark is not None and abs(time.time() - self._mark.stat().st_mtime) < LOOKING
        except OSError:
            return False

    def _write_some(self, database: Database) -> None:
        """Write the oldest of the rows that wait. Raises `sqlite3.Error`."""
        batch = self._closed.popleft()
        if len(batch) > self._most:
            batch, others = batch.split(self._most)
            self._closed.appendleft(others)
        try:
            self.state.written += database.write(batch)
        except Exception as error:
            if isinstance(error, sqlite3.OperationalError) or type(error) is sqlite3.DatabaseError:
                self._try_fewer(batch, error)
                raise  # something is wrong with the file
            self._halve(batch)
            return
        self._done(batch)
        self._most, self.state.fault = WAITING, ""

    def _try_fewer(self, batch: Batch, error: sqlite3.Error) -> None:
        """Have a batch wait on, and fewer rows tried next. One that fails alone is lost."""
        if getattr(error, "sqlite_errorcode", None) != sqlite3.SQLITE_BUSY:
            self._most = max(len(batch) // 4, 1)
        if len(batch) > 1:
            self._closed.appendleft(batch)
        else:
            self._drop(batch)

    def _halve(self, batch: Batch) -> None:
        """Have the halves of a batch written next: a bug with one of its rows costs no other row."""
        if len(batch) > 1:
            self._closed.extendleft(reversed(batch.split(len(batch) // 2)))
        else:
            self._drop(batch)
            logger.exception("a bug, in writing a row of the dashboard")

    def _drop(self, batch: Batch) -> None:
        self._done(batch)
        self.state.dropped += len(batch)

    def _done(self, batch: Batch) -> None:
        self._behind -= len(batch)
        self._left += sum(batch.weights.values())

    def _expire(self, database: Database) -> None:
        now, packed = self._clock(), self._older and not database.older
        self._older = database.older
        if packed or not 0 <= self._next_expiry - now <= EXPIRE:  # it is time, or the clock was set back
            more = database.expire(self._seconds, now) >= LEAVING
            self._next_expiry, self.state.fault = 0.0 if more else now + EXPIRE, ""
            versions.expire(self._path, now - LONGEST_AGE)

    def _seconds(self, namespace: str) -> float:
        kept = self._retention(namespace)
        return LONGEST_AGE if kept is None else min(kept, LONGEST_AGE)

    def _failed(self, error: Exception) -> None:
        self.state.fault = str(error)
        self._warn("rows", f"the dashboard cannot write its rows: {self._path}: {error}")

    def _give_up(self, reason: str) -> None:
        self.state.off, self.state.fault = True, reason
        logger.warning("%s", reason)
        self._close()
        self.state.dropped, self._behind = self.state.dropped + self._behind, 0
        self._closed.clear()
