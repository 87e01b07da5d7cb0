"""Tells other processes what this one has learned of upstreams, and hears what they have, through the store.

A belief is a record that is written once, in the next free slot of its namespace and of the present time, its bucket:

    NAMESPACE/beliefs/BUCKET-SLOT

So whoever knows the namespace can read all of them without a listing: from slot 0 until `GAP` slots are absent. Every
few seconds, a task reads the newest slots of the namespaces that have requests here. A request never waits for the
store, and if it fails, each process goes by what it has learned itself.

Processes whose clocks differ write into neighbouring buckets, so these are read, too, once a minute.

When a bucket ends, what is still believed is written into the next one. Records that are older than that are not read
again, and the store deletes them after `base.BELIEFS_KEPT` seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

import msgspec
from msgspec import Raw

from proxy.stores.base import BELIEFS
from proxy.stores.guarded import Guarded, Put, Visit
from proxy.stores.memory import Missing

T = TypeVar("T", bound=msgspec.Struct)

BUCKET = 86_400.0
"""Seconds of a bucket. A belief that nobody repeats is heard by new processes for one to two buckets."""

AROUND = 60.0
"""Seconds between two readings of the buckets before and after the present one. Clocks may differ by a bucket."""

SLOTS = 64
"""The most beliefs of one namespace in one bucket. More would let a caller make everyone read without end."""

GAP = 2
"""Absent slots in a row that end a bucket. What cannot be read, such as a key of another type, takes one of them."""

EVERY = 3.0
"""Seconds between two readings."""

ACTIVE = 60.0
"""Seconds after its last request for which a namespace's beliefs are read."""

NAMESPACES = 500
"""The most namespaces that are read at once, those with the newest requests."""

WAITING = 32
"""The most beliefs of one namespace that wait for a store that does not answer."""

BUDGET = 2.0
"""Seconds that one reading may wait for the store."""


class BeliefMemory(Protocol):
    """Beliefs of one kind, as JSON."""

    def accept(self, namespace: str, belief: bytes) -> None:
        """Take over what another process believes. It may come more than once, and in any order."""

    def beliefs(self, namespace: str) -> Iterable[bytes]:
        """Return what has to be repeated in a new bucket."""


class Record(msgspec.Struct, frozen=True):
    """One belief. Versions that do not know its kind ignore it."""

    kind: str
    belief: Raw


class _Bucket:
    """What this process has seen of one bucket of one namespace."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.next = 0
        """The first slot that has not been read."""
        self.seen: set[bytes] = set()
        self.repeated = False
        """Whether what was believed before has been repeated in it."""

    def keys(self, namespace: str, ahead: int) -> list[str]:
        """Return the keys of the next slots to read."""
        slots = range(self.next, min(self.next + ahead, SLOTS))
        return [f"{namespace}/{BELIEFS}/{self.number}-{slot}" for slot in slots]


class _Namespace:
    def __init__(self) -> None:
        self.active = 0.0
        self.looked_around = -AROUND
        self.buckets: dict[int, _Bucket] = {}
        self.newest = -1
        self.waiting: dict[bytes, None] = {}


class SharedBeliefs:
    """The beliefs of the namespaces that have requests in this process. `clock` returns seconds since the epoch."""

    def __init__(self, store: Guarded, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._clock = clock
        self._memories: dict[str, BeliefMemory] = {}
        self._namespaces: dict[str, _Namespace] = {}
        self._told = asyncio.Event()

    def join(self, kind: str, memory: BeliefMemory) -> None:
        """Share the beliefs of this memory, under a name that no other memory has."""
        self._memories[kind] = memory

    def touch(self, namespace: str) -> None:
        """Note that the namespace has a request here."""
        known = self._namespaces.pop(namespace, None)
        if known is None:
            known = _Namespace()
            self._told.set()
        known.active = self._clock()
        self._namespaces[namespace] = known
        if len(self._namespaces) > NAMESPACES:
            del self._namespaces[next(iter(self._namespaces))]

    def publish(self, namespace: str, kind: str, belief: bytes) -> None:
        """Tell the other processes, in the background. `belief` is JSON."""
        self.touch(namespace)
        waiting = self._namespaces[namespace].waiting
        if len(waiting) < WAITING:
            waiting[msgspec.json.encode(Record(kind, Raw(belief)))] = None
        self._told.set()

    async def run(self) -> None:
        """Read and write until cancelled."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(EVERY):
                    await self._told.wait()
            await self.tick()
            await asyncio.sleep(EVERY / 10)  # so that many lessons at once do not write one by one

    async def tick(self) -> None:
        """Hear what others have written, and write what they do not know."""
        self._told.clear()
        now = self._clock()
        # A clock that was set back must not make a namespace active, or wait, until it has caught up.
        active = {name: known for name, known in self._namespaces.items() if abs(now - known.active) <= ACTIVE}
        visit = self._store.visit(BUDGET)
        wanted = {name: self._buckets(known, now) for name, known in active.items()}
        for name in await self._heard_of(visit, wanted):
            if len(wanted[name]) > 1:
                active[name].looked_around = now
            self._repeat(name, active[name])
            if active[name].waiting:
                await self._write(visit, name, active[name])

    # -- reading --

    def _buckets(self, known: _Namespace, now: float) -> list[_Bucket]:
        """Return the buckets to read: the present one, or it and its neighbours. All others are forgotten."""
        newest = known.newest = int(now // BUCKET)
        numbers = (newest, newest - 1, newest + 1)
        known.buckets = {number: known.buckets.get(number) or _Bucket(number) for number in numbers}
        around = abs(now - known.looked_around) >= AROUND
        return [known.buckets[number] for number in numbers] if around else [known.buckets[newest]]

    async def _heard_of(self, visit: Visit, wanted: Mapping[str, list[_Bucket]]) -> list[str]:
        """Read all namespaces at once, or one by one if that fails: a record that cannot be read must only stop its
        own. Returns those that were read."""
        if await self._read(visit, wanted):
            return list(wanted)
        return [name for name, buckets in wanted.items() if await self._read(visit, {name: buckets})]

    async def _read(self, visit: Visit, wanted: Mapping[str, list[_Bucket]]) -> bool:
        """Read from each bucket until its end. Returns whether the store answered."""
        pending = [(name, bucket) for name, buckets in wanted.items() for bucket in buckets]
        ahead = GAP
        while pending := [(name, bucket) for name, bucket in pending if bucket.next < SLOTS]:
            keys = [bucket.keys(name, ahead) for name, bucket in pending]
            values = await visit.read([key for slots in keys for key in slots])
            if values is Missing.FAILED:
                return False
            each = iter(values)
            ended = set[_Bucket]()
            for (name, bucket), slots in zip(pending, keys, strict=True):
                absent = 0
                for slot, value in enumerate([next(each) for _ in slots], bucket.next):
                    absent = absent + 1 if value is None else 0
                    if value is not None:
                        bucket.next = slot + 1
                        self._heard(name, bucket, value)
                if absent >= GAP or bucket.next + absent >= SLOTS:
                    ended.add(bucket)
            pending = [(name, bucket) for name, bucket in pending if bucket not in ended]
            ahead *= 2
        return True

    def _heard(self, namespace: str, bucket: _Bucket, value: bytes) -> None:
        bucket.seen.add(value)
        with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            record = msgspec.json.decode(value, type=Record)
            if memory := self._memories.get(record.kind):
                memory.accept(namespace, bytes(record.belief))

    # -- writing --

    def _repeat(self, namespace: str, known: _Namespace) -> None:
        """Have what is believed written into a new bucket, unless others have done so."""
        bucket = known.buckets[known.newest]
        if bucket.repeated:
            return
        bucket.repeated = True
        for kind, memory in self._memories.items():
            for belief in memory.beliefs(namespace):
                known.waiting[msgspec.json.encode(Record(kind, Raw(belief)))] = None

    async def _write(self, visit: Visit, namespace: str, known: _Namespace) -> None:
        """Write what waits into free slots. What others have written meanwhile is heard first."""
        bucket = known.buckets[known.newest]
        for value in list(known.waiting):
            while value not in bucket.seen and bucket.next < SLOTS:
                slot = bucket.next
                [key] = bucket.keys(namespace, 1)
                done = await visit.put(key, value, keep=False, sure=True)
                if done is Put.WRITTEN:
                    bucket.next += 1
                    bucket.seen.add(value)
                elif done is Put.FAILED or not await self._read(visit, {namespace: [bucket]}):
                    return  # the next tick tries again
                elif bucket.next == slot:
                    bucket.next += 1  # taken by something that nobody can read
            del known.waiting[value]


class Shared(Generic[T]):
    """A memory whose beliefs are structs, as a `Memory`."""

    def __init__(
        self,
        kind: type[T],
        accept: Callable[[str, T], None],
        beliefs: Callable[[str], Iterable[T]] = lambda namespace: (),
    ) -> None:
        self._decode = msgspec.json.Decoder(kind).decode
        self._accept = accept
        self._beliefs = beliefs

    def accept(self, namespace: str, belief: bytes) -> None:
        """Take over what another process believes. Raises MsgspecError for anything else."""
        self._accept(namespace, self._decode(belief))

    def beliefs(self, namespace: str) -> Iterable[bytes]:
        """Return what has to be repeated in a new bucket."""
        return map(msgspec.json.encode, self._beliefs(namespace))
