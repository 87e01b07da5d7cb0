"""Processes tell each other what they learned, through a store that may fail. The clock is the test's own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
import pytest

from proxy.errors import StoreFault
from proxy.plan.refusals import Addition
from proxy.requests import shared_beliefs
from proxy.requests.background import Background
from proxy.requests.calibration import FALLS_AFTER
from proxy.requests.learning import Learning
from proxy.requests.refusals import Belief, Subject
from proxy.requests.shared_beliefs import ACTIVE, AROUND, BUCKET, GAP, SLOTS, WAITING, Record, SharedBeliefs
from proxy.stores.base import BELIEFS_KEPT, lifetime
from proxy.stores.breaker import Breaker
from proxy.stores.guarded import Guarded
from proxy.threads import Threads
from tests.requests.test_handler import POLICY, MemoryStore

ME, OTHER = "acme-1", "globex-2"


class Clock:
    """The time that all processes of a test have."""

    def __init__(self) -> None:
        self.now = 20_000 * BUCKET + 10_000.0

    def __call__(self) -> float:
        return self.now


class Known:
    """A memory of one process: a set of numbers for each namespace."""

    def __init__(self, kind: str = "number") -> None:
        self.kind = kind
        self.heard: dict[str, list[int]] = {}
        self.own: dict[str, list[int]] = {}

    def accept(self, namespace: str, belief: bytes) -> None:
        self.heard.setdefault(namespace, []).append(msgspec.json.decode(belief, type=int))

    def beliefs(self, namespace: str) -> list[bytes]:
        return [b"%d" % number for number in {*self.own.get(namespace, ()), *self.heard.get(namespace, ())}]


class Counted(MemoryStore):
    """Counts the keys that are read."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[str] = []

    async def get_many(self, keys: Sequence[str]) -> Sequence[bytes | None]:
        self.read += keys
        return await super().get_many(keys)

    def fail(self, fault: str | None = "no disk") -> None:
        self._fault = StoreFault(fault) if fault else None


class Process:
    """One process of several over one store."""

    def __init__(self, store: MemoryStore, clock: Clock) -> None:
        guarded = Guarded(store, warn=lambda kind, text: None, breaker=Breaker(limit=10**9))
        self.memory = Known()
        self.shared = SharedBeliefs(guarded, clock)
        self.shared.join("number", self.memory)

    def learn(self, namespace: str, number: int) -> None:
        self.memory.own.setdefault(namespace, []).append(number)
        self.shared.publish(namespace, "number", b"%d" % number)

    async def tick(self, *namespaces: str) -> list[int]:
        """Return what this process has heard of the first namespace, after it had requests in these."""
        for namespace in namespaces:
            self.shared.touch(namespace)
        await self.shared.tick()
        return sorted(self.memory.heard.get(namespaces[0], ())) if namespaces else []


@pytest.fixture
def store() -> Counted:
    return Counted()


@pytest.fixture
def clock() -> Clock:
    return Clock()


async def test_what_one_learns_the_others_hear_at_their_next_tick(store: Counted, clock: Clock) -> None:
    one, two = Process(store, clock), Process(store, clock)
    assert await two.tick(ME) == []
    one.learn(ME, 1)
    one.learn(ME, 2)
    assert await one.tick() == []
    assert await two.tick(ME) == [1, 2]
    two.learn(ME, 3)
    await two.tick()
    assert await one.tick(ME) == [3], "nobody hears its own beliefs"
    assert await Process(store, clock).tick(ME) == [1, 2, 3], "a process that starts later hears all"
    assert sorted(store.records) == [f"{ME}/beliefs/20000-{slot}" for slot in range(3)]


async def test_processes_that_learn_at_once_take_different_slots(store: Counted, clock: Clock) -> None:
    all = [Process(store, clock) for _ in range(4)]
    for number, process in enumerate(all):
        process.learn(ME, number)
        process.learn(ME, 99)
    await asyncio.gather(*(process.tick(ME) for process in all))
    await asyncio.gather(*(process.tick(ME) for process in all))
    for number, process in enumerate(all):
        assert {*process.memory.heard.get(ME, ())} | {number, 99} == {0, 1, 2, 3, 99}
    assert len(store.records) <= 4 + 4, "and each belief is written at most once by each"


async def test_namespaces_are_apart(store: Counted, clock: Clock) -> None:
    one, two = Process(store, clock), Process(store, clock)
    one.learn(ME, 1)
    await one.tick()
    assert await two.tick(OTHER) == []
    assert not any(key.startswith(ME) for key in store.read[2:] if key.endswith("-1") and OTHER in key)
    assert two.memory.heard == {}


async def test_only_namespaces_with_requests_are_read(store: Counted, clock: Clock) -> None:
    one = Process(store, clock)
    await one.tick(ME)
    store.read.clear()
    await one.tick()
    assert store.read == [f"{ME}/beliefs/20000-{slot}" for slot in range(GAP)], "when nothing happens"
    clock.now += ACTIVE + 1
    store.read.clear()
    await one.tick()
    assert store.read == []


async def test_the_newest_namespaces_are_read(monkeypatch: pytest.MonkeyPatch, store: Counted, clock: Clock) -> None:
    monkeypatch.setattr(shared_beliefs, "NAMESPACES", 2)
    one = Process(store, clock)
    await one.tick("a", "b", "a", "c")
    assert {key.partition("/")[0] for key in store.read} == {"a", "c"}


async def test_without_the_store_each_goes_by_its_own(store: Counted, clock: Clock) -> None:
    one, two = Process(store, clock), Process(store, clock)
    store.fail()
    for number in range(2 * WAITING):
        one.learn(ME, number)
    await one.tick(ME)
    assert await two.tick(ME) == []
    store.fail(None)
    await one.tick(ME)
    assert await two.tick(ME) == list(range(2 * WAITING)), "once it answers, all hear what one believes"


async def test_a_store_that_hangs_is_waited_for_in_the_background_only(store: Counted, clock: Clock) -> None:
    one = Process(store, clock)
    hanging = asyncio.Event()

    async def hang(keys: Sequence[str]) -> Sequence[bytes | None]:
        await hanging.wait()
        return []

    store.get_many = hang  # type: ignore[method-assign]
    ticking = asyncio.create_task(one.tick(ME))
    await asyncio.sleep(0)
    one.learn(ME, 1)  # returns at once
    ticking.cancel()


async def test_a_new_bucket_begins_with_what_is_believed(store: Counted, clock: Clock) -> None:
    one, two = Process(store, clock), Process(store, clock)
    one.learn(ME, 1)
    await one.tick()
    await two.tick(ME)
    clock.now += BUCKET
    await one.tick(ME)
    await two.tick(ME)
    assert sorted(store.records) == [f"{ME}/beliefs/20000-0", f"{ME}/beliefs/20001-0"], "and is written once"
    clock.now += BUCKET
    assert await Process(store, clock).tick(ME) == [1], "a process that starts in the bucket after that hears it"
    clock.now += 2 * BUCKET
    assert await Process(store, clock).tick(ME) == [], "what nobody repeats is forgotten"


@pytest.mark.parametrize("apart", [2.0, 5 * 3_600.0, 23 * 3_600.0])
@pytest.mark.parametrize("at", [0.0, 1.0, BUCKET / 2, BUCKET - 1])
async def test_processes_with_different_clocks_hear_each_other_within_a_minute(
    store: Counted, clock: Clock, apart: float, at: float
) -> None:
    behind = Clock()
    one, two = Process(store, behind), Process(store, clock)
    behind.now = 20_001 * BUCKET + at
    clock.now = behind.now + apart
    await one.tick(ME)
    await two.tick(ME)
    one.learn(ME, 1)
    two.learn(ME, 2)
    await one.tick()
    await two.tick()
    for each in (behind, clock):
        each.now += AROUND
    assert ({*await one.tick(ME)} - {1}, {*await two.tick(ME)} - {2}) == ({2}, {1})


async def test_neighbouring_buckets_are_read_once_a_minute(store: Counted, clock: Clock) -> None:
    one = Process(store, clock)
    read = []
    for _ in range(2 * int(AROUND) // 3):
        store.read.clear()
        await one.tick(ME)
        read.append(len(store.read))
        clock.now += 3
    assert sorted(set(read)) == [GAP, 3 * GAP] and read.count(3 * GAP) == 2


@pytest.mark.parametrize("hours", [-1, -30, 1, 30])
async def test_clock_that_is_set_stops_nothing(store: Counted, clock: Clock, hours: int) -> None:
    late = Clock()
    one, two = Process(store, clock), Process(store, late)
    one.learn(ME, 1)
    await one.tick()
    assert await two.tick(ME) == [1]
    clock.now += hours * 3_600
    late.now = clock.now
    store.read.clear()
    await one.tick()
    assert store.read == [], "its last request was at another time, as far as is known"
    one.learn(ME, 2)
    await one.tick()
    late.now += AROUND
    assert 2 in await two.tick(ME)
    assert {1, 2} <= set(await Process(store, late).tick(ME))


async def test_slots_are_bounded(store: Counted, clock: Clock) -> None:
    one = Process(store, clock)
    for number in range(3 * SLOTS):
        one.learn(ME, number)
        await one.tick(ME)
    assert len(store.records) == SLOTS
    store.read.clear()
    assert await Process(store, clock).tick(ME) == list(range(SLOTS))
    assert len(store.read) <= 2 * SLOTS


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\xff",
        b"[]",
        b'{"kind":"number","belief":' + b"[" * 100_000,
        b'{"kind":"other","belief":1}',
        b'{"kind":"number","belief":"x"}',
        b'{"kind":"number"}',
    ],
)
async def test_records_that_mean_nothing_here_are_passed_over(store: Counted, clock: Clock, value: bytes) -> None:
    store.records[f"{ME}/beliefs/20000-0"] = value
    store.records[f"{ME}/beliefs/20000-1"] = msgspec.json.encode(Record("number", msgspec.Raw(b"7")))
    assert await Process(store, clock).tick(ME) == [7]


class Odd(Counted):
    """Has something in a slot of a namespace that is no record: it is not read, and nothing can be put there."""

    def __init__(self, *odd: str) -> None:
        super().__init__()
        self.odd = odd

    async def put(self, key: str, value: bytes) -> bool:
        return not key.endswith(self.odd) and await super().put(key, value)


async def test_a_slot_that_holds_no_record_is_passed_over(clock: Clock) -> None:
    """Such as a key of another type in Redis, or a folder in the place of a file."""
    store = Odd(f"{ME}/beliefs/20000-0", f"{ME}/beliefs/20000-2")
    one, two = Process(store, clock), Process(store, clock)
    await two.tick(ME)
    for number in (1, 2, 3):
        one.learn(ME, number)
        await one.tick()
    assert await two.tick(ME) == await Process(store, clock).tick(ME) == [1, 2, 3]
    assert sorted(store.records) == [f"{ME}/beliefs/20000-{slot}" for slot in (1, 3, 4)]


async def test_a_bucket_without_a_free_slot_ends_the_tick(clock: Clock) -> None:
    one = Process(Odd(""), clock)
    one.learn(ME, 1)
    await asyncio.wait_for(one.tick(ME), 5)


async def test_a_record_that_cannot_be_read_stops_only_its_own_namespace(store: Counted, clock: Clock) -> None:
    one, two, read = Process(store, clock), Process(store, clock), store.get_many

    async def failing(keys: Sequence[str]) -> Sequence[bytes | None]:
        if any(key.startswith(ME) for key in keys):
            raise StoreFault("an input/output error")
        return await read(keys)

    store.get_many = failing  # type: ignore[method-assign]
    for process in (two, one):
        process.shared.touch(ME)
        process.learn(OTHER, 0 if process is two else 1)
        await process.tick()
    assert await two.tick(OTHER) == [1]
    assert await one.tick(OTHER) == [0]


async def test_it_runs_until_it_is_cancelled(store: Counted, clock: Clock) -> None:
    one, two = Process(store, clock), Process(store, clock)
    written, put = asyncio.Event(), store.put

    async def noted(key: str, value: bytes) -> bool:
        written.set()
        return await put(key, value)

    store.put = noted  # type: ignore[method-assign]
    running = asyncio.create_task(one.shared.run())
    one.learn(ME, 1)
    await asyncio.wait_for(written.wait(), 5)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert await two.tick(ME) == [1]


@pytest.mark.parametrize(("retention", "kept"), [(None, BELIEFS_KEPT), (60.0, 60.0), (10 * BELIEFS_KEPT, BELIEFS_KEPT)])
def test_beliefs_are_kept_for_a_few_days_at_most(retention: float | None, kept: float) -> None:
    assert BELIEFS_KEPT >= 2 * BUCKET
    assert lifetime(f"{ME}/beliefs/20000-0", lambda namespace: retention) == kept
    assert lifetime(f"{ME}/rounds/x", lambda namespace: retention) == retention


# -- windows ----------------------------------------------------------------------------------------------------------


class Learner:
    """The learning of one process."""

    def __init__(self, store: MemoryStore, threads: Threads) -> None:
        unused: Any = None
        self.lessons: list[str] = []
        guarded = Guarded(store, warn=lambda kind, text: None)
        self.learning = Learning(guarded, unused, Background(1), threads.reading, self.lessons.append)
        self.limits = self.learning.limits

    def window(self, namespace: str = ME) -> int | None:
        return self.limits.window(namespace, POLICY, "m")

    async def tick(self) -> None:
        self.learning.shared.touch(ME)
        await self.learning.shared.tick()


@pytest.fixture
async def learners(store: Counted) -> AsyncIterator[list[Learner]]:
    threads = Threads()
    yield [Learner(store, threads) for _ in range(2)]
    threads.close()


async def test_processes_come_to_believe_in_the_same_window(store: Counted, learners: list[Learner]) -> None:
    one, two = learners
    one.limits.overflowed(ME, POLICY, "m", 4096, 9000)
    assert (one.window(), two.window()) == (4096, None)
    await one.tick()
    await two.tick()
    assert two.window() == 4096 and two.window(OTHER) is None
    two.limits.accepted(ME, POLICY, "m", 5000, 5000)
    await two.tick()
    await one.tick()
    assert one.window() is None and two.window() is None
    assert one.lessons == ["refused", "heard"] and two.lessons == ["heard", "superseded"]
    assert [json.loads(value)["kind"] for value in store.records.values()] == ["window"] * 2


async def test_windows_survive_a_dead_store(store: Counted, learners: list[Learner]) -> None:
    one, two = learners
    store.fail()
    one.limits.overflowed(ME, POLICY, "m", 4096, 9000)
    await one.tick()
    await two.tick()
    assert (one.window(), two.window()) == (4096, None)


async def test_refused_additions_are_believed_by_all_processes(learners: list[Learner]) -> None:
    subject = Subject(ME, "http://upstream/v1", "m", Addition.TOOLS, "stream")
    one, other = learners[:2]
    for _ in range(2):
        one.learning.refusals.refused(subject)
    await one.tick()
    await other.tick()
    assert other.learning.refusals.holds(subject)
    assert not other.learning.refusals.knows(OTHER)


async def test_belief_about_another_namespace_is_not_taken_over(learners: list[Learner]) -> None:
    subject = Subject(OTHER, "http://upstream/v1", "m", Addition.TOOLS, "stream")
    learners[0].learning.shared.publish(ME, "refusal", msgspec.json.encode(Belief(subject, 1e12, 600)))
    await learners[0].tick()
    await learners[1].tick()
    assert not learners[1].learning.refusals.knows(OTHER)


async def test_processes_come_to_count_with_the_same_factor(learners: list[Learner]) -> None:
    one, two = (learner.learning.calibration for learner in learners)
    key = (ME, POLICY.upstream.base_url, "m")

    async def told() -> tuple[float, float]:
        for learner in [*learners, *learners]:
            await learner.tick()
        return one.factor(*key), two.factor(*key)

    one.observe(*key, 4_000, 5_700, 8_192)
    two.observe(*key, 4_000, 6_400, 8_192)
    assert one.factor(*key) < two.factor(*key)
    assert await told() == (two.factor(*key),) * 2
    for _ in range(FALLS_AFTER):
        one.observe(*key, 4_000, 4_900, 8_192)
    assert await told() == (one.factor(*key),) * 2 and one.factor(*key) == pytest.approx(1.2)
    assert two.factor(OTHER, *key[1:]) == 1
