"""A store for the chat path that never raises, limits how long a request waits for it, and caches what it reads."""

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
from proxy.stores import turns
from proxy.stores.base import Entry, Retention, Store, lifetime
from proxy.stores.breaker import Breaker
from proxy.stores.memory import Absent, Memory, Missing
from proxy.telemetry.outcome import StoreError, StoreMiss, StoreOperation

log = logging.getLogger(__name__)

__all__ = ["Allowance", "Guarded", "Missing", "Put", "Visit"]

T = TypeVar("T")

CLOSING = 1.75
"""Seconds that the store gets to close when the process ends."""

WRITES = (StoreOperation.PUT, StoreOperation.DELETE)

PROBE = "health/probe/none"
"""A key that no record ever has, for checking whether the engine answers."""

LARGE = 256 << 10
"""Bytes of a record above which a failed write says little about others: it may be too slow or too large alone."""


class Put(Enum):
    """The result of a put. EXISTED means that another writer was first, perhaps with different bytes."""

    WRITTEN = "written"
    EXISTED = "existed"
    FAILED = "failed"


class Guarded:
    """Guards one store in one process, with a memory and a breaker that all requests share.

    `warn(kind, text)` is called for every fault and need not log each one. `budget_seconds` is how long one request may
    wait for the store in total. A repeated put would renew a record's age, but is skipped within `refresh_seconds` of
    the last one, or within less if the namespace's `retention` is short. `count_damaged(kind)` is called for every
    damaged record.

    Writes have one more breaker, because a store that is full, read-only or slow to write can still be read. Records
    larger than `LARGE` never open it, or one tenant's results could keep all others' records from being written.
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
        breaker: Breaker | None = None,
        count_damaged: Callable[[str], None] = lambda kind: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store = store
        self.memory = Memory(cache_bytes, refresh_seconds, clock)
        self.breaker = breaker or Breaker(clock=clock)
        self.writing = self.breaker.another()
        self.retention = retention
        self._warn = warn
        self._count_damaged = count_damaged
        self._budget = budget_seconds
        self._clock = clock

    @property
    def state(self) -> str:
        """The breakers' worse state: closed (the engine works), open or half-open."""
        state = self.breaker.state
        return self.writing.state if state == "closed" else state

    def visit(self, budget_seconds: float | None = None) -> Visit:
        """Return a visit for one request or background task, with its own time budget."""
        seconds = self._budget if budget_seconds is None else budget_seconds
        return Visit(self, Allowance(seconds, self._clock))

    async def check(self, seconds: float) -> str | None:
        """Read, and write and delete a record, even if a breaker is open. Returns None if all of this is done within
        `seconds`, else the reason."""
        record = f"health/probe/{uuid4().hex}"
        operation = StoreOperation.GET
        try:
            async with asyncio.timeout(seconds):
                await self.store.get(PROBE)
                self.succeeded(operation)
                operation = StoreOperation.PUT
                await self.store.put(record, b"")
                await self.store.delete(record)
                self.succeeded(operation)
        except TimeoutError:
            return self.failed(operation, f"no answer to a check within {seconds:g} s")
        except StoreFault as fault:
            return self.failed(operation, fault.message)
        return None

    def admit(self, operation: StoreOperation) -> bool:
        """Return whether the operation may be sent to the engine now."""
        asked = (self.breaker, self.writing) if operation in WRITES else (self.breaker,)
        # Each is asked only if the other agrees, or a probe would be lost.
        return all(breaker.ready for breaker in asked) and all(breaker.admit() for breaker in asked)

    def succeeded(self, operation: StoreOperation) -> None:
        """Note that the engine did the operation."""
        self.breaker.succeeded()
        if operation in WRITES:
            self.writing.succeeded()

    def failed(self, operation: str, reason: str) -> str:
        """Record a fault of the engine, and return `reason`."""
        (self.writing if operation in WRITES else self.breaker).failed()
        return self.told(operation, reason)

    def told(self, operation: str, reason: str) -> str:
        """Log a fault, and return `reason`."""
        self._warn(f"store {operation}", f"store: {operation}: {reason}")
        return reason

    def damaged(self, key: str) -> None:
        """Count and log a damaged record, which is treated as absent. May be called in any thread."""
        self._count_damaged(key.split("/")[1])
        self._warn("store damaged", f"store: a damaged record counts as absent: {key}")

    async def close(self) -> bool:
        """Close the store, within `CLOSING`. Returns False if an operation hangs, which the log then names."""
        try:
            async with asyncio.timeout(CLOSING):
                await self.store.close()
        except StoreFault as fault:
            self._warn("store close", f"store: close: {fault.message}")
            return False
        except TimeoutError:
            self._warn("store close", f"store: close: not within {CLOSING:g} s")
            return False
        return True


class Visit:
    """One request's use of the store, from any number of tasks at once. No method raises StoreFault."""

    def __init__(self, guarded: Guarded, allowance: Allowance) -> None:
        self._guarded = guarded
        self._store = guarded.store
        self._memory = guarded.memory
        self._allowance = allowance
        self._settled = set[str]()
        """Of which kinds an operation was answered, or counted as late: later ones say nothing more of the engine."""
        self._errors: dict[StoreError, int] = {}

    @property
    def errors(self) -> Mapping[StoreError, int]:
        """How many operations failed so far, by operation and reason, for `Outcome.store_errors`."""
        return dict(self._errors)

    def anew(self) -> Visit:
        """Return a new visit with a full budget."""
        return Visit(self._guarded, self._allowance.anew())

    async def get(self, key: str, *, final: bool = False) -> bytes | Missing:
        """Return the record. `final` means that a record absent now stays absent, so its absence is remembered."""
        [value] = await self.get_many([key], final=final)
        return value

    async def get_many(
        self, keys: Sequence[str], *, final: bool = False, intact: Callable[[bytes], bool] = lambda value: True
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
        return self._guarded.memory.was_put(key)

    def note_put(self, key: str) -> None:
        """Remember, until a refresh is due, that this record or everything that the key represents was put."""
        self._memory.note_put(key, lifetime(key, self._guarded.retention))

    def keep(self, key: str, value: bytes) -> None:
        """Remember, in this process alone, a record that could not be put. No other writer may have another value."""
        self._memory.keep(key, value)

    async def put(self, key: str, value: bytes, *, keep: bool = True, sure: bool = False) -> Put:
        """Write the record unless it exists.

        `keep` remembers the value, because it will be read again; pass False for originals. `sure` asks the engine even
        after a recent put, because the record may have been deleted since.
        """
        if not sure and self._memory.was_put(key):
            return Put.EXISTED
        written = await self._ask(StoreOperation.PUT, lambda: self._store.put(key, value), telling=len(value) <= LARGE)
        if written is Missing.FAILED:
            return Put.FAILED
        self.note_put(key)
        if written and keep:
            self._memory.keep(key, value)
        return Put.WRITTEN if written else Put.EXISTED

    async def read(self, keys: Sequence[str]) -> Sequence[bytes | None] | Literal[Missing.FAILED]:
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

    async def list(self, prefix: str) -> Sequence[Entry] | Literal[Missing.FAILED]:
        """Return every record whose key begins with `prefix`, in the engine's order."""

        async def collected() -> Sequence[Entry]:
            async with aclosing(self._store.list(prefix)) as entries:
                return [entry async for entry in entries]

        return await self._ask(StoreOperation.LIST, collected)

    async def _fetch(
        self, keys: Sequence[str], final: bool, intact: Callable[[bytes], bool]
    ) -> Mapping[str, bytes | Missing]:
        values = await self._ask(StoreOperation.GET, lambda: self._store.get_many(keys))
        if isinstance(values, Missing):
            return dict.fromkeys(keys, Missing.FAILED)
        damaged = {
            key: value for key, value in zip(keys, values, strict=True) if value is not None and not intact(value)
        }
        found: dict[str, bytes | Absent] = {}
        for key, value in zip(keys, values, strict=True):
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
    ) -> T | Literal[Missing.FAILED]:
        """Ask the engine within the rest of the budget, if the breaker admits it. Every call of a visit uses this.

        Only a failure that is `telling` counts against the engine.
        """
        if self._allowance.left <= 0:
            return self._missed(operation, StoreMiss.BUDGET)
        if not self._guarded.admit(operation):
            return self._missed(operation, StoreMiss.OPEN)
        left = self._allowance.left
        failed = self._guarded.failed if telling else self._guarded.told
        try:
            with self._allowance.spending(), turns.waiting() as wait:
                async with asyncio.timeout(left):
                    answer = await ask()
        except TimeoutError:
            return self._late(operation, left - wait.seconds, failed)
        except NamespaceFault as fault:  # which must not keep the others from the engine
            self._guarded.told(operation, fault.message)
            return self._missed(operation, StoreMiss.FAILED)
        except StoreFault as fault:
            failed(operation, fault.message)
            return self._missed(operation, StoreMiss.FAILED)
        except Exception:
            log.exception("a bug in the store, at %s", operation.value)
            failed(operation, "a bug, see the log")
            return self._missed(operation, StoreMiss.FAILED)
        self._settled.add(_kind(operation))
        self._guarded.succeeded(operation)
        return answer

    def _late(
        self, operation: StoreOperation, seconds: float, failed: Callable[[str, str], str]
    ) -> Literal[Missing.FAILED]:
        """Count a timeout of an operation that the engine had for so many seconds. If most of the time went by before,
        in waiting for a turn, or after a first answer to such an operation, it is not a fault of the engine: its caller
        asks too much. However many are late at once, they count as one."""
        reason = "no answer in time"
        if _kind(operation) in self._settled or seconds < self._allowance.whole / 2:
            self._guarded.told(operation, f"{reason}: much is asked for at once")
        else:
            self._settled.add(_kind(operation))
            failed(operation, reason)
        return self._missed(operation, StoreMiss.TIMEOUT)

    def _missed(self, operation: StoreOperation, fault: StoreMiss) -> Literal[Missing.FAILED]:
        error = StoreError.of(operation, fault)
        self._errors[error] = self._errors.get(error, 0) + 1
        return Missing.FAILED


def _kind(operation: StoreOperation) -> str:
    return "writes" if operation in WRITES else "reads"


class Allowance:
    """Seconds that may be spent waiting. Concurrent waits count once, because the client waits only once."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.whole = self._seconds = seconds
        self._clock = clock
        self._waiting = 0
        self._since = 0.0

    def anew(self) -> Allowance:
        """Return a full allowance of the same size."""
        return Allowance(self.whole, self._clock)

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
