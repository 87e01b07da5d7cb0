"""A store as the chat path uses it: it never raises, never makes a request wait for long, and asks nothing twice."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from enum import Enum
from typing import Literal, TypeVar

from proxy.errors import StoreFault
from proxy.stores.base import Entry, Retention, Store
from proxy.stores.breaker import Breaker
from proxy.stores.keys import namespace_of
from proxy.stores.memory import Absent, Memory, Missing
from proxy.telemetry.outcome import StoreError, StoreMiss, StoreOperation

__all__ = ["Allowance", "Guarded", "Missing", "Put", "Visit"]

T = TypeVar("T")

PROBE = "health/probe/none"
"""A key that no record has."""


class Put(Enum):
    """What became of a put. EXISTED: somebody was first, with bytes that may be others than these."""

    WRITTEN = "written"
    EXISTED = "existed"
    FAILED = "failed"


class Guarded:
    """One process's guard over one store: memory and breaker, which all requests share.

    `warn(kind, text)` is called for every fault; that it logs one a minute is its business. `budget_seconds`: how long
    a request waits for the store in all. `refresh_seconds`: how long at most a put that was made is not made again,
    though that would keep the record young; less where `retention` of its namespace is short. `count_damaged(kind)` is
    called for every damaged record that is found.
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
        self.retention = retention
        self._warn = warn
        self._count_damaged = count_damaged
        self._budget = budget_seconds
        self._clock = clock

    @property
    def state(self) -> str:
        """closed (all is well), open or half-open."""
        return self.breaker.state

    def visit(self, budget_seconds: float | None = None) -> Visit:
        """What one request, or one task beside a request, asks of the store, within a budget of time."""
        seconds = self._budget if budget_seconds is None else budget_seconds
        return Visit(self, Allowance(seconds, self._clock))

    async def check(self, seconds: float) -> str | None:
        """Ask the engine itself, whatever the breaker says: None if it answers within `seconds`, else the reason."""
        try:
            async with asyncio.timeout(seconds):
                await self.store.get(PROBE)
        except TimeoutError:
            return self.failed("check", f"no answer within {seconds:g} s")
        except StoreFault as fault:
            return self.failed("check", fault.message)
        self.breaker.succeeded()
        return None

    def failed(self, operation: str, reason: str) -> str:
        """Take note of a fault of the engine's; `reason` comes back."""
        self.breaker.failed()
        self._warn(f"store {operation}", f"store: {operation}: {reason}")
        return reason

    def damaged(self, key: str) -> None:
        """Take note of a record that cannot be used, and so counts as absent. May be called in any thread."""
        self._count_damaged(key.split("/")[1])
        self._warn("store damaged", f"store: a damaged record counts as absent: {key}")

    async def close(self) -> bool:
        """Close the store. False: something in it hangs; the log says what."""
        try:
            await self.store.close()
        except StoreFault as fault:
            self._warn("store close", f"store: close: {fault.message}")
            return False
        return True


class Visit:
    """The dealings of one request with the store, in any number of tasks at once. Nothing here raises StoreFault."""

    def __init__(self, guarded: Guarded, allowance: Allowance) -> None:
        self._guarded = guarded
        self._store = guarded.store
        self._memory = guarded.memory
        self._breaker = guarded.breaker
        self._allowance = allowance
        self._answered = False
        self._errors: Counter[StoreError] = Counter()

    @property
    def errors(self) -> Mapping[StoreError, int]:
        """Operations that failed so far; for `Outcome.store_errors`."""
        return dict(self._errors)

    def anew(self) -> Visit:
        """Another one, with all of its time before it."""
        return Visit(self._guarded, self._allowance.anew())

    async def get(self, key: str, *, final: bool = False) -> bytes | Missing:
        """The record. `final`: if it is absent now it will never be there, so do not ask again."""
        [value] = await self.get_many([key], final=final)
        return value

    async def get_many(
        self, keys: Sequence[str], *, final: bool = False, intact: Callable[[bytes], bool] = lambda value: True
    ) -> Sequence[bytes | Missing]:
        """The records in the order of `keys`; only those that are not remembered are asked for, all at once.

        One that the store has and that is not `intact` counts as absent, and is deleted so that it can be put again.
        """
        known = self._memory.recall(keys)
        unknown = [key for key in dict.fromkeys(keys) if key not in known]
        found = {**known, **await self._fetch(unknown, final, intact)} if unknown else known
        return [found[key] for key in keys]

    def was_put(self, key: str) -> bool:
        """Whether a put of this record was made lately, so that another need not even be prepared."""
        return self._guarded.memory.was_put(key)

    def note_put(self, key: str) -> None:
        """Remember for a while that this record, or all that this key stands for, was put."""
        self._memory.note_put(key, self._guarded.retention(namespace_of(key)))

    async def put(self, key: str, value: bytes, *, keep: bool = True, sure: bool = False) -> Put:
        """Write the record if nobody has. `keep`: it will be read again, so remember it; False for originals.

        `sure`: ask the engine even if a put was made lately, as the record may have been deleted since.
        """
        if not sure and self._memory.was_put(key):
            return Put.EXISTED
        written = await self._ask(StoreOperation.PUT, lambda: self._store.put(key, value))
        if written is Missing.FAILED:
            return Put.FAILED
        self.note_put(key)
        if written and keep:
            self._memory.keep(key, value)
        return Put.WRITTEN if written else Put.EXISTED

    async def read(self, keys: Sequence[str]) -> Sequence[bytes | None] | Literal[Missing.FAILED]:
        """The records as the engine has them now, None where absent. They push nothing out of what is remembered."""
        return await self._ask(StoreOperation.GET, lambda: self._store.get_many(keys))

    async def list(self, prefix: str) -> Sequence[Entry] | Literal[Missing.FAILED]:
        """Every record whose key begins with `prefix`, in the engine's order."""

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
        await asyncio.gather(*(self._discard(key, value, final) for key, value in damaged.items()))
        return found

    async def _discard(self, key: str, value: bytes, final: bool) -> None:
        """Delete a damaged record, if the store gives the same bytes once more.

        Other bytes mean that the damage was on the way here, or that somebody has put a good one meanwhile.
        """
        self._guarded.damaged(key)
        self._memory.forget(key)
        if await self._ask(StoreOperation.GET, lambda: self._store.get(key)) == value:
            await self._ask(StoreOperation.DELETE, lambda: self._store.delete(key))
            if final:
                self._memory.keep(key, Missing.ABSENT)

    async def _ask(self, operation: StoreOperation, ask: Callable[[], Awaitable[T]]) -> T | Literal[Missing.FAILED]:
        """The one place where the engine is asked: within what is left of the budget, if the breaker lets it."""
        if self._allowance.left <= 0:
            return self._missed(operation, StoreMiss.BUDGET)
        if not self._breaker.admit():
            return self._missed(operation, StoreMiss.OPEN)
        try:
            with self._allowance.spending():
                async with asyncio.timeout(self._allowance.left):
                    answer = await ask()
        except TimeoutError:
            return self._late(operation)
        except StoreFault as fault:
            self._guarded.failed(operation, fault.message)
            return self._missed(operation, StoreMiss.FAILED)
        self._answered = True
        self._breaker.succeeded()
        return answer

    def _late(self, operation: StoreOperation) -> Literal[Missing.FAILED]:
        """A request that asks for very much is no proof against an engine that has just answered it."""
        if not self._answered:
            self._guarded.failed(operation, "no answer in time")
        return self._missed(operation, StoreMiss.TIMEOUT)

    def _missed(self, operation: StoreOperation, fault: StoreMiss) -> Literal[Missing.FAILED]:
        self._errors[StoreError.of(operation, fault)] += 1
        return Missing.FAILED


class Allowance:
    """Seconds that may be spent waiting. What is waited for side by side counts once, as it does for the client."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._whole = self._seconds = seconds
        self._clock = clock
        self._waiting = 0
        self._since = 0.0

    def anew(self) -> Allowance:
        """As much again."""
        return Allowance(self._whole, self._clock)

    @property
    def left(self) -> float:
        """Seconds; zero or less where it is spent."""
        return self._seconds - (self._clock() - self._since if self._waiting else 0.0)

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Around what is waited for."""
        if not self._waiting:
            self._since = self._clock()
        self._waiting += 1
        try:
            yield
        finally:
            if self._waiting == 1:
                self._seconds = self.left
            self._waiting -= 1
