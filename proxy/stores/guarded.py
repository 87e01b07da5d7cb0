"""A store for the chat path: it never raises, limits how long a request waits, and remembers what
it read or wrote.

Two breakers, one for reads and one for writes, leave a failing engine alone. A store that is full,
read-only or slow to write can still be read, and then only writes stop.

    closed ──── `FAILURES` in a row ────▶ open ◀──────────────┐
      ▲                                    │                  │ it fails, or a pause
      │                                    ▼ after a pause    │ goes by in silence
      └──────── it succeeds ────────── one call is let through┘

The first pause takes `PAUSE` seconds, and each further one twice as long, up to `LONGEST`. What a
request wrote meanwhile is not lost: this process keeps it, reads it, and puts it again once the
engine works.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import aclosing
from enum import Enum
from functools import partial
from itertools import islice
from typing import Literal, TypeVar
from uuid import uuid4

from proxy.errors import StoreBusy, StoreFault, StoreFull
from proxy.lru import ENTRY_BYTES, Lru
from proxy.stores import CHECKS, Entry, Retention, Store, namespace_of
from proxy.telemetry.outcome import NoAnswer, StoreOperation
from proxy.threads import nobody_waits

T = TypeVar("T")

CLOSING = 1.75
"""Seconds that the store gets at least to close when the process ends."""

LATER_SECONDS = 5.0
LATER_AT_ONCE = 8
"""Seconds for a put for which no request waits, and how many of them are tried at once."""

ATTEMPTS = 3
"""Attempts to replace a damaged record. Each further one means that others repair it, too."""

FAILURES = 5
"""Failures in a row that open a breaker."""

PAUSE = 0.5
LONGEST = 30.0
"""Seconds of a breaker's first and of its longest pause."""

PROBE = f"{CHECKS}/probe/none"
"""A key that no record ever has, for checking whether the engine answers."""

PROBE_BYTES = 16 << 10
"""Bytes of a record that is written to check this, as large as usual ones: a full disk takes an
empty file."""

ENTRY_WEIGHT = ENTRY_BYTES + 100
"""Bytes that a remembered record takes beside its key and value: their heads, and what alignment
adds."""

PUTS_BYTES = 20 << 20
"""Bytes of keys remembered as recently put: some 50,000 of them."""

RENEWED = 200
"""Records that are renewed together. An object store takes some 30 ms for each, 16 at once."""

RENEW_SECONDS = 86_400.0
"""The age from which a record in use is renewed; a sixth of its retention if that is less."""

CHANGES = 4_096
"""Records of which is remembered that they were put."""
UNWRITTEN_BYTES = 32 << 20
"""Bytes of records that could not be written yet. If there are more, some are given up, longest
unused first."""


class Put(Enum):
    """The result of a put. WRITTEN holds also if this process has the record and will put it later;
    EXISTED means that another writer was first, perhaps with different bytes."""

    WRITTEN = "written"
    EXISTED = "existed"
    FAILED = "failed"


class Memory:
    """Records never change, so only damaged ones must be forgotten."""

    def __init__(
        self, limit_bytes: int, refresh_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._refresh = refresh_seconds
        self._clock = clock
        self._records: Lru[str, tuple[bytes | None]] = Lru(limit_bytes)
        """None: there will never be one."""
        self._puts: Lru[str, float] = Lru(PUTS_BYTES)
        self.unwritten: Lru[str, bytes] = Lru(UNWRITTEN_BYTES, share=1)
        """Records that could not be put."""
        self.changes = 0
        """How many records were put so far that are looked for again."""
        self._changed: deque[str] = deque(maxlen=CHANGES)

    @property
    def size(self) -> tuple[int, int]:
        """The number of remembered records, and the bytes that all of this takes."""
        count = len(self._records) + len(self.unwritten)
        return count, self._records.weight + self._puts.weight + self.unwritten.weight

    def recall(self, keys: Iterable[str]) -> dict[str, bytes | None]:
        """Return the remembered values of these keys, with None for those that will never have
        one."""
        found: dict[str, bytes | None] = {}
        for key in keys:
            if (owed := self.unwritten.get(key)) is not None:
                found[key] = owed
            elif known := self._records.get(key):
                [found[key]] = known
        return found

    def keep(self, key: str, value: bytes | None) -> None:
        """Remember a record, or that there will never be one."""
        self._records.put(key, (value,), _weight(key, value))

    def note_put(self, key: str, retention: float | None = None) -> None:
        """Note that the record exists, whoever wrote it. Its store deletes it after `retention`
        seconds."""
        fresh = self._refresh if retention is None else min(self._refresh, retention / 3)
        self._puts.put(key, self._clock() + fresh, _weight(key))
        if self._records.get(key) == (None,):
            self._records.discard(key)

    def changed(self, key: str) -> None:
        """Note that a record was written, replaced or deleted."""
        self.changes += 1
        self._changed.append(key)

    def changed_since(self, at: int) -> Collection[str] | None:
        """Return the keys of the records that have changed since there were so many `changes`; None
        if they were too many to remember."""
        new = self.changes - at
        if new > len(self._changed):
            return None
        return list(islice(reversed(self._changed), new))

    def was_put(self, key: str) -> bool:
        """Return whether the record was put recently, or is owed."""
        until = self._puts.get(key)
        return self.unwritten.get(key) is not None or (until is not None and self._clock() < until)

    def owe(self, key: str, value: bytes) -> int:
        """Remember a record that has yet to be put. Returns how many records had to be given up."""
        self.unwritten.discard(key)  # it may be owed already
        before = len(self.unwritten)
        self.unwritten.put(key, value, _weight(key, value))
        return before + 1 - len(self.unwritten)

    def forget(self, key: str) -> None:
        """Forget what is stored under this key, so that it is fetched again and can be put
        again."""
        self._records.discard(key)
        self._puts.discard(key)
        self.changed(key)


def _weight(key: str, value: bytes | None = None) -> int:
    return len(key) + len(value or b"") + ENTRY_WEIGHT


class Breaker:
    """Call `admit` before every call to the engine, then report the result with `succeeded` or
    `failed`.

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
        return "closed" if self._next_probe is None else "open"

    def admit(self) -> bool:
        """Return whether a call may be made now. True while the breaker is open makes it this
        pause's only probe."""
        if self._next_probe is None:
            return True
        if self._clock() < self._next_probe:
            return False
        self._probing = True
        self._next_probe = self._clock() + self._pause
        return True

    def succeeded(self) -> None:
        self._failures = 0
        self._pause = PAUSE
        self._next_probe = None
        self._probing = False
        self.answered = self._clock()

    def failed(self) -> None:
        self._failures += 1
        if self._probing:
            self._pause = min(2 * self._pause, LONGEST)
        if self._probing or (self._next_probe is None and self._failures >= FAILURES):
            self._next_probe = self._clock() + self._pause
        self._probing = False


class Guarded:
    """Guards one store in one process, with a memory and breakers that all requests share.

    `warn(kind, text)` is called for every fault and need not log each one. `budget_seconds` is how
    long one request may wait for the store in total. A repeated put would renew a record's age, but
    is skipped within `refresh_seconds` of the last one, or within less if the namespace's
    `retention` is short. `count_damaged(kind)` is called for every damaged record, and `full()` for
    every write for which the store has no room. `count_unanswered(operation, why)` is called for every
    operation of a visit without an answer.
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
        count_unanswered: Callable[[StoreOperation, NoAnswer], None] = lambda operation, why: None,
        full: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store = store
        self.memory = Memory(cache_bytes, refresh_seconds, clock)
        self.reading = Breaker(clock)
        self.writing = Breaker(clock)
        self.retention = retention
        self.clock = clock
        self._warn = warn
        self._count_damaged = count_damaged
        self.count_unanswered = count_unanswered
        self._full = full
        self._budget = budget_seconds
        self._putting: asyncio.Task[None] | None = None

    @property
    def state(self) -> str:
        """closed: the engine works; open: reading or writing fails."""
        return self.writing.state if self.reading.state == "closed" else "open"

    def visit(self, budget_seconds: float | None = None) -> Visit:
        """Return a visit for one request or background task, with its own time budget."""
        return Visit(self, self._budget if budget_seconds is None else budget_seconds)

    async def check(self, seconds: float) -> str | None:
        """Read, and write and delete a record, even if a breaker is open. Returns None if all of
        this is done within `seconds`, else the reason."""
        record = f"{CHECKS}/probe/{uuid4().hex}"
        operation = StoreOperation.GET
        breaker = self.reading
        try:
            async with asyncio.timeout(seconds):
                await self.store.get(PROBE)
                breaker.succeeded()
                operation = StoreOperation.PUT
                breaker = self.writing
                await self.store.put(record, bytes(PROBE_BYTES))
                await self.store.delete(record)
                breaker.succeeded()
        except (TimeoutError, StoreFault) as fault:
            reason = (
                fault.message
                if isinstance(fault, StoreFault)
                else f"no answer to a check within {seconds:g} s"
            )
            breaker.failed()
            self.tell(operation, reason)
            self.notice_full(fault)
            return reason
        return None

    def tell(self, operation: str, reason: str) -> None:
        """Log a fault."""
        self._warn(f"store {operation}", f"store: {operation}: {reason}")

    def notice_full(self, fault: Exception) -> None:
        """Call for room if this fault says that there is none."""
        if isinstance(fault, StoreFull):
            self._full()

    def damaged(self, key: str) -> None:
        """Count and log a damaged record, which is treated as absent. May be called in any
        thread."""
        self._count_damaged(key.split("/")[1])
        self._warn("store damaged", f"store: a damaged record counts as absent: {key}")

    def put_later(self, key: str, value: bytes) -> None:
        """Keep a record that could not be put, and put it as soon as the engine works."""
        if given_up := self.memory.owe(key, value):
            self._warn(
                "store unwritten",
                f"store: {given_up} records are given up: too many could not be written",
            )
        if self._putting is None or self._putting.done():
            with nobody_waits():
                self._putting = asyncio.create_task(self._put_again())

    async def close(self, grace: float = 0.0) -> bool:
        """Put what could not be put so far, and close the store, within `grace` and `CLOSING`
        seconds. Returns False if an operation hangs, which the log then names."""
        seconds = grace + CLOSING
        try:
            async with asyncio.timeout(seconds):
                if self._putting is not None:
                    self._putting.cancel()
                    self.writing = Breaker(self.clock)  # a last chance
                    await self._put_unwritten()
                await self.store.close()
        except (TimeoutError, StoreFault) as fault:
            self.tell(
                "close",
                fault.message if isinstance(fault, StoreFault) else f"not within {seconds:.3g} s",
            )
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

    async def _put_unwritten(self) -> bool:
        """Put what could not be put so far, until the breaker opens. Returns whether any record
        was."""

        async def put(key: str, value: bytes) -> bool:
            visit = self.visit(LATER_SECONDS)
            done = await visit.put(key, value, keep=False, sure=True)
            if done is Put.FAILED:
                return False
            self.memory.unwritten.discard(key)
            if done is Put.WRITTEN:
                self.memory.keep(key, value)
            else:
                # so that this process goes by the stored one, as all others do
                self.memory.forget(key)
                visit.note_put(key)
            return True

        done = False
        owed = list(self.memory.unwritten.items())
        for at in range(0, len(owed), LATER_AT_ONCE):
            done |= any(await asyncio.gather(*(put(*one) for one in owed[at : at + LATER_AT_ONCE])))
            if self.writing.state == "open":
                break
        return done


class Visit:
    """One request's use of the store, from any number of tasks at once. No method raises
    StoreFault."""

    def __init__(self, guarded: Guarded, budget_seconds: float) -> None:
        self._guarded = guarded
        self._store = guarded.store
        self._memory = guarded.memory
        self._left = budget_seconds
        self._errors: Counter[str] = Counter()

    @property
    def errors(self) -> Mapping[str, int]:
        """How many operations failed so far, by operation and reason, for
        `Outcome.store_errors`."""
        return dict(self._errors)

    @property
    def changes(self) -> int:
        """How many records this process has put so far that are looked for again."""
        return self._memory.changes

    def changed_since(self, at: int) -> Collection[str] | None:
        """Return the keys of the records that were put since there were so many `changes`; None if
        they were too many to remember."""
        return self._memory.changed_since(at)

    def anew(self) -> Visit:
        """Return a new visit for which no request waits."""
        return Visit(self._guarded, LATER_SECONDS)

    async def get_many(
        self,
        keys: Sequence[str],
        *,
        final: bool = False,
        intact: Callable[[str, bytes], bool] = lambda key, value: True,
    ) -> Sequence[bytes | None]:
        """Return the records in the order of `keys`, with None for absent ones, or if the store
        fails. Those not in memory are fetched together.

        `final` means that a record absent now stays absent, so its absence is remembered. A stored
        record that is not `intact` counts as absent and is deleted, so that it can be put again.
        """
        found = self._memory.recall(keys)
        unknown = [key for key in dict.fromkeys(keys) if key not in found]
        values = await self.read(unknown) if unknown else []
        if values is None:
            return [found.get(key) for key in keys]
        for key, value in zip(unknown, values, strict=True):
            if value is not None and not intact(key, value):
                await self.discard(key, value)
                found[key] = None  # for now: a good one may be there already
                continue
            found[key] = value
            if value is not None or final:
                self._memory.keep(key, value)
        return [found[key] for key in keys]

    async def read(self, keys: Sequence[str]) -> Sequence[bytes | None] | None:
        """Return the engine's current records, None where absent, without putting them in memory;
        only None if the store fails."""
        return await self._ask(StoreOperation.GET, lambda: self._store.get_many(keys))

    async def list(self, prefix: str) -> Sequence[Entry] | None:
        """Return every record whose key begins with `prefix`, in the engine's order; None if the
        store fails."""

        async def collected() -> Sequence[Entry]:
            async with aclosing(self._store.list(prefix)) as entries:
                return [entry async for entry in entries]

        return await self._ask(StoreOperation.LIST, collected)

    def was_put(self, key: str) -> bool:
        """Return whether this record was put recently, so that the caller need not prepare another
        put."""
        return self._memory.was_put(key)

    def note_put(self, key: str) -> None:
        """Remember, until a refresh is due, that this record or everything that the key represents
        was put."""
        self._memory.note_put(key, self._guarded.retention(namespace_of(key)))

    async def put(
        self, key: str, value: bytes, *, keep: bool = True, sure: bool = False, sync: bool = True
    ) -> Put:
        """Write the record unless it exists; `sync`: durably.

        `keep` remembers the value, because it will be read again, and puts it later if the engine
        fails; pass False for what counts only once the engine has it. `sure` asks the engine even
        after a recent put, because the record may have been deleted since.
        """
        if not sure and self.was_put(key):
            return Put.EXISTED
        written = await self._ask(
            StoreOperation.PUT, lambda: self._store.put(key, value, sync=sync)
        )
        if keep:
            self._memory.changed(key)
        if written is None:
            if not keep:
                return Put.FAILED
            self._guarded.put_later(key, value)
            return Put.WRITTEN
        self.note_put(key)
        if written and keep:
            self._memory.keep(key, value)
        return Put.WRITTEN if written else Put.EXISTED

    async def put_intact(
        self, key: str, value: bytes, intact: Callable[[str, bytes], bool]
    ) -> bool:
        """Have the engine keep the record, and return whether it does. A stored one that is not
        `intact` gives way, to this one or to one that another process puts at the same time."""
        for _ in range(ATTEMPTS):
            done = await self.put(key, value, keep=False, sure=True)
            if done is not Put.EXISTED:
                return done is Put.WRITTEN
            found = await self.read([key])
            if found is None:
                return False
            [there] = found
            if there is not None and intact(key, there):
                return True
            if there is not None:
                await self.discard(key, there)
        return False

    async def renew(self, namespace: str, keys: Sequence[str]) -> None:
        """Let the ages of these records of one namespace begin anew, at most once a day. Each
        `RENEWED` of them have a time budget of their own, and are tried again if they fail."""
        retention = self._guarded.retention(namespace)
        if retention is None:
            return
        seconds = min(RENEW_SECONDS, retention / 6)

        async def renewed(some: Sequence[str]) -> bool:
            await self._store.renew(some, seconds)
            return True

        for at in range(0, len(keys), RENEWED):
            some = keys[at : at + RENEWED]
            together = hashlib.sha256("\n".join(some).encode()).hexdigest()
            key = f"{namespace}/renewed/{together}"
            if self.was_put(key):
                continue
            if await self.anew()._ask(StoreOperation.PUT, partial(renewed, some)):
                self.note_put(key)

    def damaged(self, key: str) -> None:
        """Count and log a damaged record, which the caller treats as absent."""
        self._guarded.damaged(key)

    async def discard(self, key: str, value: bytes) -> None:
        """Delete a damaged record, of which this value was read, so that a good one can be put."""
        self.damaged(key)
        self._memory.forget(key)
        await self._ask(StoreOperation.DELETE, lambda: self._store.discard(key, value))

    async def delete(self, key: str) -> None:
        """Delete a record, and give up one that is not written yet."""
        self._memory.forget(key)
        self._memory.unwritten.discard(key)
        await self._ask(StoreOperation.DELETE, lambda: self._store.delete(key))

    async def _ask(self, operation: StoreOperation, ask: Callable[[], Awaitable[T]]) -> T | None:
        """Ask the engine within the rest of the budget, if the breaker admits it. Returns None if
        it gives no answer. Every call of a visit uses this."""
        guarded = self._guarded
        writes = operation in (StoreOperation.PUT, StoreOperation.DELETE)
        breaker = guarded.writing if writes else guarded.reading
        if self._left <= 0:
            why = NoAnswer.BUDGET
        elif not breaker.admit():
            why = NoAnswer.OPEN
        else:
            began = guarded.clock()
            try:
                async with asyncio.timeout(self._left):
                    answer = await ask()
                breaker.succeeded()
                return answer
            except TimeoutError:
                why = NoAnswer.TIMEOUT
                reason = "no answer in time"
                if breaker.answered > began:  # the engine works, and this waited for others
                    reason += ": much is asked for at once"
                else:
                    breaker.failed()
                guarded.tell(operation, reason)
            except StoreFault as fault:
                why = NoAnswer.FAILED
                if not isinstance(fault, StoreBusy):
                    breaker.failed()
                guarded.tell(operation, fault.message)
                guarded.notice_full(fault)
            finally:
                self._left -= guarded.clock() - began
        self._errors[f"{operation}:{why}"] += 1
        guarded.count_unanswered(operation, why)
        return None
