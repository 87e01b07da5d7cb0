"""A store for the chat path: it never raises, limits how long a request waits, and remembers what it read or wrote.

Two breakers, one for reads and one for writes, leave a failing engine alone. A store that is full, read-only or slow to
write can still be read, and then only writes stop.

    closed ──── `FAILURES` in a row ────▶ open ◀──────────────┐
      ▲                                    │                  │ it fails, or a pause
      │                                    ▼ after a pause    │ goes by in silence
      └──────── it succeeds ────────── one call is let through┘

The first pause takes `PAUSE` seconds, and each further one twice as long, up to `LONGEST`. What a request wrote
meanwhile is not lost: this process keeps it, reads it, and puts it again once the engine works.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from enum import Enum
from typing import Literal, TypeVar
from uuid import uuid4

from proxy.errors import NamespaceFault, StoreFault
from proxy.stores import Entry, Retention, Store, namespace_of
from proxy.stores.memory import Absent, Failed, Memory, Missing
from proxy.telemetry.outcome import StoreMiss, StoreOperation
from proxy.threads import nobody_waits

log = logging.getLogger(__name__)

__all__ = ["Allowance", "Breaker", "Guarded", "Missing", "Put", "Visit"]

T = TypeVar("T")

CLOSING = 1.75
"""Seconds that the store gets to close when the process ends."""

FAILURES = 5
"""Failures in a row that open a breaker."""

PAUSE, LONGEST = 0.5, 30.0
"""Seconds of a breaker's first and of its longest pause."""

WRITES = (StoreOperation.PUT, StoreOperation.DELETE)

PROBE = "health/probe/none"
"""A key that no record ever has, for checking whether the engine answers."""

LARGE = 256 << 10
"""Bytes of a record above which a failed write says little about others: it may be too slow or too large alone."""


class Put(Enum):
    """The result of a put. EXISTED means that another writer was first, perhaps with different bytes; KEPT that this
    process has the record and will put it again."""

    WRITTEN = "written"
    EXISTED = "existed"
    KEPT = "kept"
    FAILED = "failed"


class Breaker:
    """Call `admit` before every call to the engine, then report the result with `succeeded` or `failed`.

    A probing call without a result counts as failed, because it may have been cancelled.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self._pause = PAUSE
        self._next_probe: float | None = None
        self._probing = False
        self.answered = -1.0
        """When the engine last did what it was asked."""

    @property
    def state(self) -> Literal["closed", "open"]:
        """Whether calls are made as they come."""
        return "closed" if self._next_probe is None else "open"

    @property
    def ready(self) -> bool:
        """Whether `admit` would return true."""
        return self._next_probe is None or self._clock() >= self._next_probe

    def admit(self) -> bool:
        """Return whether a call may be made now. True while the breaker is open makes it this pause's only probe."""
        if not self.ready:
            return False
        if self._next_probe is not None:
            self._probing, self._next_probe = True, self._clock() + self._pause
        return True

    def succeeded(self) -> None:
        """Note that a call was answered, and close the breaker."""
        self._failures, self._pause, self._next_probe, self._probing = 0, PAUSE, None, False
        self.answered = self._clock()

    def failed(self) -> None:
        """Note that a call failed."""
        self._failures += 1
        if self._probing:
            self._pause = min(2 * self._pause, LONGEST)
        if self._probing or (self._next_probe is None and self._failures >= FAILURES):
            self._next_probe = self._clock() + self._pause
        self._probing = False


class Guarded:
    """Guards one store in one process, with a memory and breakers that all requests share.

    `warn(kind, text)` is called for every fault and need not log each one. `budget_seconds` is how long one request may
    wait for the store in total. A repeated put would renew a record's age, but is skipped within `refresh_seconds` of
    the last one, or within less if the namespace's `retention` is short. `count_damaged(kind)` is called for every
    damaged record.
    """

    def __init__(
        self,
        store: Store,
        *,
        warn: Callable[[str, str], None],
        retention: Retention = lambda namespace: None,
        budget_seconds: float = 1.0,
        refresh_seconds: float = 6 * 3600.0,
        cache_bytes: int = 64 << 20,
        count_damaged: Callable[[str], None] = lambda kind: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store = store
        self.memory = Memory(cache_bytes, refresh_seconds, clock)
        self.reading, self.writing = Breaker(clock), Breaker(clock)
        self.retention = retention
        self._warn = warn
        self._count_damaged = count_damaged
        self._budget = budget_seconds
        self._clock = clock
        self._putting: asyncio.Task[None] | None = None

    @property
    def state(self) -> str:
        """closed: the engine works; open: reading or writing fails."""
        return self.writing.state if self.reading.state == "closed" else "open"

    def breaker(self, operation: str) -> Breaker:
        """Return the breaker that an operation asks."""
        return self.writing if operation in WRITES else self.reading

    def admits(self, operation: str) -> bool:
        """Return whether the operation may be sent to the engine now. What cannot be read is not written either."""
        return (operation not in WRITES or self.reading.ready) and self.breaker(operation).admit()

    def visit(self, budget_seconds: float | None = None) -> Visit:
        """Return a visit for one request or background task, with its own time budget."""
        return Visit(self, self._budget if budget_seconds is None else budget_seconds, self._clock)

    async def check(self, seconds: float) -> str | None:
        """Read, and write and delete a record, even if a breaker is open. Returns None if all of this is done within
        `seconds`, else the reason."""
        record = f"health/probe/{uuid4().hex}"
        operation = StoreOperation.GET
        try:
            async with asyncio.timeout(seconds):
                await self.store.get(PROBE)
                self.reading.succeeded()
                operation = StoreOperation.PUT
                await self.store.put(record, b"")
                await self.store.delete(record)
                self.writing.succeeded()
        except TimeoutError:
            return self.failed(operation, f"no answer to a check within {seconds:g} s")
        except StoreFault as fault:
            return self.failed(operation, fault.message)
        return None

    def failed(self, operation: str, reason: str) -> str:
        """Record a fault of the engine, and return `reason`."""
        self.breaker(operation).failed()
        return self.told(operation, reason)

    def told(self, operation: str, reason: str) -> str:
        """Log a fault, and return `reason`."""
        self._warn(f"store {operation}", f"store: {operation}: {reason}")
        return reason

    def damaged(self, key: str) -> None:
        """Count and log a damaged record, which is treated as absent. May be called in any thread."""
        self._count_damaged(key.split("/")[1])
        self._warn("store damaged", f"store: a damaged record counts as absent: {key}")

    def put_later(self, key: str, value: bytes) -> None:
        """Keep a record that could not be put, and put it as soon as the engine works."""
        if given_up := self.memory.owe(key, value):
            self._warn("store unwritten", f"store: {given_up} records are given up: too many could not be written")
        if self._putting is None or self._putting.done():
            with nobody_waits():
                self._putting = asyncio.create_task(self._put_again())

    async def close(self) -> bool:
        """Put what could not be put so far, and close the store, within `CLOSING`. Returns False if an operation hangs,
        which the log then names."""
        try:
            async with asyncio.timeout(CLOSING):
                if self._putting is not None:
                    self._putting.cancel()
                    await self._put_unwritten()
                await self.store.close()
        except StoreFault as fault:
            self._warn("store close", f"store: close: {fault.message}")
            return False
        except TimeoutError:
            self._warn("store close", f"store: close: not within {CLOSING:g} s")
            return False
        finally:
            if left := len(self.memory.unwritten):
                self._warn("store unwritten", f"store: {left} records were never written")
        return True

    async def _put_again(self) -> None:
        pause = PAUSE
        while self.memory.unwritten:
            await asyncio.sleep(pause)
            pause = PAUSE if await self._put_unwritten() else min(2 * pause, LONGEST)

    async def _put_unwritten(self) -> int:
        """Put what could not be put so far, until the breaker opens. Returns how many records were."""
        done = 0
        for key, value in list(self.memory.unwritten.items()):
            if await self.visit(CLOSING)._put(key, value) is not Missing.FAILED:
                self.memory.keep(key, value)
                self.memory.settle(key)
                done += 1
            elif self.writing.state == "open":
                break
        return done


class Visit:
    """One request's use of the store, from any number of tasks at once. No method raises StoreFault."""

    def __init__(self, guarded: Guarded, budget_seconds: float, clock: Callable[[], float]) -> None:
        self._guarded = guarded
        self._store = guarded.store
        self._memory = guarded.memory
        self._allowance = Allowance(budget_seconds, clock)
        self._clock = clock
        self._errors: dict[str, int] = {}

    @property
    def errors(self) -> Mapping[str, int]:
        """How many operations failed so far, by operation and reason, for `Outcome.store_errors`."""
        return dict(self._errors)

    def anew(self) -> Visit:
        """Return a new visit with a full budget."""
        return Visit(self._guarded, self._allowance.whole, self._clock)

    async def get(self, key: str, *, final: bool = False) -> bytes | Missing:
        """Return the record. `final` means that a record absent now stays absent, so its absence is remembered."""
        [value] = await self.get_many([key], final=final)
        return value

    async def get_many(
        self,
        keys: Sequence[str],
        *,
        final: bool = False,
        intact: Callable[[str, bytes], bool] = lambda key, value: True,
    ) -> Sequence[bytes | Missing]:
        """Return the records in the order of `keys`, fetching those not in memory together.

        A stored record that is not `intact` counts as absent and is deleted, so that it can be put again.
        """
        known = self._memory.recall(keys)
        unknown = [key for key in dict.fromkeys(keys) if key not in known]
        found = {**known, **await self._fetch(unknown, final, intact)} if unknown else known
        return [found[key] for key in keys]

    def was_put(self, key: str) -> bool:
        """Return whether this record was put recently, so that the caller need not prepare another put."""
        return key in self._memory.unwritten or self._memory.was_put(key)

    def note_put(self, key: str) -> None:
        """Remember, until a refresh is due, that this record or everything that the key represents was put."""
        self._memory.note_put(key, self._guarded.retention(namespace_of(key)))

    async def put(self, key: str, value: bytes, *, keep: bool = True, sure: bool = False) -> Put:
        """Write the record unless it exists.

        `keep` remembers the value, because it will be read again, and puts it later if the engine fails; pass False for
        originals. `sure` asks the engine even after a recent put, because the record may have been deleted since.
        """
        if not sure and self.was_put(key):
            return Put.EXISTED
        written = await self._put(key, value)
        if written is Missing.FAILED:
            if not keep:
                return Put.FAILED
            self._guarded.put_later(key, value)
            return Put.KEPT
        if written and keep:
            self._memory.keep(key, value)
        return Put.WRITTEN if written else Put.EXISTED

    async def read(self, keys: Sequence[str]) -> Sequence[bytes | None] | Failed:
        """Return the engine's current records, None where absent, without putting them in memory."""
        return await self._ask(StoreOperation.GET, lambda: self._store.get_many(keys))

    def damaged(self, key: str) -> None:
        """Count and log a damaged record, which the caller treats as absent."""
        self._guarded.damaged(key)

    async def discard(self, key: str, value: bytes) -> bool:
        """Delete a record with wrong content, unless a second read returns other bytes than `value`. Returns whether
        it was the same.

        Different bytes mean that the damage happened in transit, or that a good record has been put since.
        """
        self._memory.forget(key)
        same = await self._ask(StoreOperation.GET, lambda: self._store.get(key)) == value
        if same:
            await self._ask(StoreOperation.DELETE, lambda: self._store.delete(key))
        return same

    async def list(self, prefix: str) -> Sequence[Entry] | Failed:
        """Return every record whose key begins with `prefix`, in the engine's order."""

        async def collected() -> Sequence[Entry]:
            async with aclosing(self._store.list(prefix)) as entries:
                return [entry async for entry in entries]

        return await self._ask(StoreOperation.LIST, collected)

    async def _put(self, key: str, value: bytes) -> bool | Failed:
        """Put the record. Returns whether it was new."""
        telling = len(value) <= LARGE
        written = await self._ask(StoreOperation.PUT, lambda: self._store.put(key, value), telling=telling)
        if written is not Missing.FAILED:
            self.note_put(key)
        return written

    async def _fetch(
        self, keys: Sequence[str], final: bool, intact: Callable[[str, bytes], bool]
    ) -> Mapping[str, bytes | Missing]:
        values = await self._ask(StoreOperation.GET, lambda: self._store.get_many(keys))
        if values is Missing.FAILED:
            return dict.fromkeys(keys, Missing.FAILED)
        stored = dict(zip(keys, values, strict=True))
        damaged = {key: value for key, value in stored.items() if value is not None and not intact(key, value)}
        found: dict[str, bytes | Absent] = {}
        for key, value in stored.items():
            found[key] = Missing.ABSENT if value is None or key in damaged else value
            if found[key] is not Missing.ABSENT or final:
                self._memory.keep(key, found[key])
        await asyncio.gather(*(self._drop(key, value, final) for key, value in damaged.items()))
        return found

    async def _drop(self, key: str, value: bytes, final: bool) -> None:
        self.damaged(key)
        if await self.discard(key, value) and final:
            self._memory.keep(key, Missing.ABSENT)

    async def _ask(
        self, operation: StoreOperation, ask: Callable[[], Awaitable[T]], *, telling: bool = True
    ) -> T | Failed:
        """Ask the engine within the rest of the budget, if the breaker admits it. Every call of a visit uses this.

        Only a failure that is `telling` counts against the engine.
        """
        if self._allowance.left <= 0:
            return self._missed(operation, StoreMiss.BUDGET)
        breaker = self._guarded.breaker(operation)
        if not self._guarded.admits(operation):
            return self._missed(operation, StoreMiss.OPEN)
        failed, began = self._guarded.failed if telling else self._guarded.told, self._clock()
        try:
            with self._allowance.spending():
                async with asyncio.timeout(self._allowance.left):
                    answer = await ask()
        except TimeoutError:
            if breaker.answered > began:  # the engine works, and this waited for others
                self._guarded.told(operation, "no answer in time: much is asked for at once")
            else:
                failed(operation, "no answer in time")
            return self._missed(operation, StoreMiss.TIMEOUT)
        except NamespaceFault as fault:  # which must not keep the others from the engine
            self._guarded.told(operation, fault.message)
            return self._missed(operation, StoreMiss.FAILED)
        except StoreFault as fault:
            failed(operation, fault.message)
            return self._missed(operation, StoreMiss.FAILED)
        except Exception:
            log.exception("a bug in the store, at %s", operation.value)
            self._guarded.told(operation, "a bug, see the log")  # of one request, which must not keep the others out
            return self._missed(operation, StoreMiss.FAILED)
        breaker.succeeded()
        return answer

    def _missed(self, operation: StoreOperation, fault: StoreMiss) -> Failed:
        error = f"{operation}:{fault}"
        self._errors[error] = self._errors.get(error, 0) + 1
        return Missing.FAILED


class Allowance:
    """Seconds that may be spent waiting. Concurrent waits count once, because the client waits only once."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.whole = self._seconds = seconds
        self._clock = clock
        self._waiting = 0
        self._since = 0.0

    @property
    def left(self) -> float:
        """Seconds left; zero or less if the allowance is spent."""
        return self._seconds - (self._clock() - self._since if self._waiting else 0.0)

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Count the time inside this block as spent."""
        if not self._waiting:
            self._since = self._clock()
        self._waiting += 1
        try:
            yield
        finally:
            if self._waiting == 1:
                self._seconds = self.left
            self._waiting -= 1
