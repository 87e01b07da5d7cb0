"""Tests the guard on a store in memory that fails, hangs or counts calls, as the test says."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Sequence
from typing import TypeVar

import pytest

from proxy.errors import StoreBusy, StoreFault, StoreFull
from proxy.stores import CHECKS, Entry, namespace_of
from proxy.stores import guarded as guarded_module
from proxy.stores.guarded import (
    ENTRY_WEIGHT,
    FAILURES,
    LATER_SECONDS,
    LONGEST,
    PAUSE,
    PUTS_BYTES,
    Breaker,
    Guarded,
    Memory,
    Put,
    Visit,
)
from proxy.threads import Places
from tests.clock import Clock, turns

T = TypeVar("T")

KEY, OTHER = "acme-1/round/k", "acme-1/round/other"

BUDGET = 10.0
"""Seconds that a request has for the store, on a clock that the tests put forward."""


class Scripted:
    """A store that hangs or raises `trouble`, if they are set, and records its calls."""

    def __init__(self) -> None:
        self.records: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.trouble: str | None = None
        self.fault: type[StoreFault] = StoreFault
        self.hangs = False
        self.seconds = 0.0  # that each call takes
        self.closed = False

    async def put(self, key: str, value: bytes, *, sync: bool = True) -> bool:
        await self._asked(f"put {key}{'' if sync else ' some day'}")
        free = key not in self.records
        self.records.setdefault(key, value)
        return free

    async def renew(self, keys: Sequence[str], seconds: float) -> None:
        await self._asked(f"renew {' '.join(keys)} {seconds:g}")

    async def get(self, key: str) -> bytes | None:
        return (await self.get_many([key]))[0]

    async def get_many(self, keys: Sequence[str]) -> Sequence[bytes | None]:
        await self._asked(f"get {' '.join(keys)}")
        return [self.records.get(key) for key in keys]

    async def list(self, prefix: str) -> AsyncGenerator[Entry, None]:
        await self._asked("list")
        yield Entry(prefix, 0, 0)

    async def delete(self, *keys: str) -> None:
        await self._asked(f"delete {' '.join(keys)}")

    async def discard(self, key: str, value: bytes) -> None:
        await self._asked(f"discard {key}")
        if self.records.get(key) == value:
            del self.records[key]

    async def close(self) -> None:
        self.closed = True

    async def _asked(self, what: str) -> None:
        self.asked.append(what)
        if self.hangs:
            await asyncio.Event().wait()
        if self.seconds:
            await asyncio.sleep(self.seconds)
        if self.trouble:
            raise self.fault(self.trouble)


async def in_time(asked: Awaitable[T], clock: Clock) -> T:
    """Return what is asked for, after everybody's patience is over."""
    task = asyncio.ensure_future(asked)
    await turns()
    clock.move(BUDGET)
    return await task


async def got(visit: Visit, key: str, *, final: bool = False) -> bytes | None:
    [value] = await visit.get_many([key], final=final)
    return value


@pytest.fixture
def store() -> Scripted:
    return Scripted()


async def test_a_namespace_that_asks_for_too_much_keeps_out_no_other(store: Scripted) -> None:
    guarded = Guarded(store, warn=lambda *what: None)
    store.trouble, store.fault = "too much waits", StoreBusy
    for number in range(2 * FAILURES):
        assert await got(guarded.visit(), f"flood-1/rounds/{number}") is None
    assert guarded.state == "closed"
    store.fault = StoreFault
    for number in range(FAILURES):
        await got(guarded.visit(), f"flood-1/rounds/{number}")
    assert guarded.state == "open", "this concerns all"
    await guarded.close()


@pytest.fixture
def warned() -> list[tuple[str, str]]:
    return []


@pytest.fixture
def guarded(store: Scripted, clock: Clock, warned: list[tuple[str, str]]) -> Guarded:
    return Guarded(
        store,
        warn=lambda *what: warned.append(what),
        budget_seconds=BUDGET,
        refresh_seconds=60,
        clock=clock,
    )


@pytest.fixture
def visit(guarded: Guarded) -> Visit:
    return guarded.visit()


# What is asked.


async def test_only_what_is_not_known_is_asked_for(
    guarded: Guarded, visit: Visit, store: Scripted
) -> None:
    store.records |= {KEY: b"1", OTHER: b"2"}
    assert await got(guarded.visit(), KEY) == b"1"
    assert list(await visit.get_many([OTHER, KEY, "a/b/none", OTHER])) == [b"2", b"1", None, b"2"]
    assert store.asked == [f"get {KEY}", f"get {OTHER} a/b/none"]
    assert list(await visit.get_many([])) == []
    assert len(store.asked) == 2


@pytest.mark.parametrize(
    ("trouble", "final", "asked"),
    [(None, False, 2), (None, True, 1), ("away", True, 2)],
    ids=["", "final", "failure"],
)
async def test_only_absence_that_is_final_is_remembered(
    guarded: Guarded, store: Scripted, trouble: str | None, final: bool, asked: int
) -> None:
    store.trouble = trouble
    assert await got(guarded.visit(), KEY, final=final) is None
    store.trouble = None
    assert await got(guarded.visit(), KEY, final=final) is None
    assert store.asked == [f"get {KEY}"] * asked
    assert await guarded.visit().put(KEY, b"1") is Put.WRITTEN
    assert await got(guarded.visit(), KEY) == b"1"


async def test_who_must_be_sure_asks_again(guarded: Guarded, store: Scripted) -> None:
    assert await guarded.visit().put(KEY, b"1", keep=False) is Put.WRITTEN
    assert await guarded.visit().put(KEY, b"1", keep=False, sure=True) is Put.EXISTED
    del store.records[KEY]
    assert await guarded.visit().put(KEY, b"1", keep=False, sure=True) is Put.WRITTEN
    assert guarded.memory.size[0] == 0, "originals do not fill the memory"


async def test_what_is_read_is_as_the_engine_has_it_and_pushes_nothing_out(
    guarded: Guarded, store: Scripted
) -> None:
    await got(guarded.visit(), KEY, final=True)
    store.records[KEY] = b"1"
    assert await guarded.visit().read([KEY, OTHER]) == [b"1", None]
    assert guarded.memory.recall([KEY, OTHER]) == {KEY: None}
    store.trouble = "away"
    assert await guarded.visit().read([KEY]) is await guarded.visit().list("a/") is None


async def test_the_winners_bytes_are_the_record(guarded: Guarded, store: Scripted) -> None:
    store.records[KEY] = b"theirs"
    assert await guarded.visit().put(KEY, b"mine") is Put.EXISTED
    assert await got(guarded.visit(), KEY) == b"theirs"


async def test_it_is_known_which_records_were_put_since_unless_they_were_many(
    store: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By any request of this process, and only those that are looked for again."""
    monkeypatch.setattr(guarded_module, "CHANGES", 3)
    guarded = Guarded(store, warn=lambda *what: None)
    visit = guarded.visit()
    await visit.put("a-1/rounds/0", b"0")
    at = visit.changes
    assert visit.changed_since(at) == []
    await visit.put("a-1/rounds/1", b"1")
    await guarded.visit().put("a-1/files/1", b"1", keep=False)
    await guarded.visit().put("a-1/rounds/2", b"2")
    assert set(visit.changed_since(at) or ()) == {"a-1/rounds/1", "a-1/rounds/2"}
    await visit.put("a-1/rounds/3", b"3")
    assert len(visit.changed_since(at) or ()) == 3
    await visit.put("a-1/rounds/4", b"4")
    assert visit.changed_since(at) is None
    assert visit.changed_since(visit.changes) == []
    await guarded.close()


async def test_a_put_is_made_once_until_the_record_needs_refreshing(
    guarded: Guarded, store: Scripted, clock: Clock
) -> None:
    for seconds in (0, 1, 58):
        clock.move(seconds)
        await guarded.visit().put(KEY, b"1")
        assert await got(guarded.visit(), KEY) == b"1"
    assert store.asked == [f"put {KEY}"], "and it need not be read"
    clock.move(1)
    assert await guarded.visit().put(KEY, b"1") is Put.EXISTED
    assert store.asked == [f"put {KEY}"] * 2


async def test_a_record_is_refreshed_before_its_retention_is_over(
    store: Scripted, clock: Clock
) -> None:
    guarded = Guarded(store, warn=lambda *_: None, retention={"acme-1": 9.0}.get, clock=clock)
    for seconds in (0, 2.9, 0.1):
        clock.move(seconds)
        await guarded.visit().put(KEY, b"1")
    assert store.asked == [f"put {KEY}"] * 2


async def test_what_is_in_use_is_renewed_once_while_this_process_remembers_it(
    store: Scripted, clock: Clock
) -> None:
    kept = {"acme-1": 9.0}
    guarded = Guarded(store, warn=lambda *_: None, retention=kept.get, clock=clock)
    for seconds in (0, 2.9, 0.1):
        clock.move(seconds)
        await guarded.visit().renew("acme-1", [KEY])
    assert store.asked == [f"renew {KEY} 1.5"] * 2
    store.trouble = "why"
    clock.move(9)
    await guarded.visit().renew("acme-1", [KEY])
    store.trouble = None
    await guarded.visit().renew("acme-1", [KEY])
    assert len(store.asked) == 4, "what failed is tried again"
    kept.clear()
    clock.move(9)
    await guarded.visit().renew("acme-1", [KEY])
    assert len(store.asked) == 4, "what is kept for ever has no age"


MANY = [f"acme-1/originals/{number}" for number in range(5)]


@pytest.fixture
def renewing(
    store: Scripted, clock: Clock, monkeypatch: pytest.MonkeyPatch, warned: list[tuple[str, str]]
) -> Guarded:
    """Renews two records at a time."""
    monkeypatch.setattr(guarded_module, "RENEWED", 2)
    kept = {"acme-1": 9.0}
    return Guarded(store, warn=lambda *what: warned.append(what), retention=kept.get, clock=clock)


async def test_many_records_are_renewed_however_long_all_of_them_take(
    renewing: Guarded, store: Scripted, clock: Clock, warned: list[tuple[str, str]]
) -> None:
    store.seconds = 0.8 * LATER_SECONDS
    task = asyncio.create_task(renewing.visit().renew("acme-1", MANY))
    await clock.let_pass(4 * LATER_SECONDS, steps=40)
    await task
    assert store.asked == [
        f"renew {' '.join(some)} 1.5" for some in (MANY[:2], MANY[2:4], MANY[4:])
    ]
    assert not warned


async def test_only_what_could_not_be_renewed_is_tried_again(
    renewing: Guarded, store: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first ones may fail each time."""
    renew = store.renew

    async def failing(keys: Sequence[str], seconds: float) -> None:
        await renew(keys, seconds)
        if MANY[0] in keys:
            raise StoreFault("why")

    monkeypatch.setattr(store, "renew", failing)
    await renewing.visit().renew("acme-1", MANY)
    assert len(store.asked) == 3
    await renewing.visit().renew("acme-1", MANY)
    assert store.asked[3:] == [f"renew {' '.join(MANY[:2])} 1.5"]


# Faults.


async def test_a_fault_reads_as_absence_and_is_counted_and_reported(
    visit: Visit, store: Scripted, warned: list[tuple[str, str]]
) -> None:
    store.trouble = "disk full"
    assert await got(visit, KEY) is None
    assert list(await visit.get_many([KEY, OTHER])) == [None] * 2
    assert await visit.put(KEY, b"1", keep=False) is Put.FAILED
    assert visit.errors == {"get:failed": 2, "put:failed": 1}
    assert warned[0] == ("store get", "store: get: disk full")
    assert warned[2] == ("store put", "store: put: disk full")


async def test_a_slow_store_is_waited_for_no_longer_than_the_budget(
    guarded: Guarded, store: Scripted, clock: Clock
) -> None:
    store.hangs = True
    visit, patient = (
        guarded.visit(),
        asyncio.create_task(got(guarded.visit(2 * BUDGET), "a-1/rounds/own")),
    )
    asked = asyncio.gather(got(visit, KEY), visit.put(OTHER, b"1", keep=False))
    await turns()
    clock.move(BUDGET)
    assert await asked == [None, Put.FAILED]
    assert await got(visit, KEY) is None
    assert visit.errors == {"get:timeout": 1, "put:timeout": 1, "get:budget": 1}
    assert len(store.asked) == 3, "with the budget spent, nobody is asked"
    assert not patient.done()
    assert await in_time(patient, clock) is None


async def test_the_breaker_leaves_a_failing_store_alone(
    guarded: Guarded, store: Scripted, clock: Clock
) -> None:
    store.records[OTHER] = b"known"
    await got(guarded.visit(), OTHER)
    store.trouble = "away"
    for _ in range(FAILURES):
        await got(guarded.visit(), KEY)
    assert guarded.state == "open"
    asked = len(store.asked)
    visit = guarded.visit()
    assert await got(visit, KEY) is None
    assert visit.errors == {"get:open": 1}
    assert await got(visit, OTHER) == b"known"
    assert len(store.asked) == asked
    store.trouble = None
    clock.move(PAUSE)
    assert await got(guarded.visit(), KEY) is None
    assert guarded.state == "closed"


async def test_a_store_that_is_slow_to_write_is_still_read(
    guarded: Guarded, store: Scripted, clock: Clock
) -> None:
    """Each request reads before it writes. What was read in time says nothing about writing."""
    for number in range(FAILURES):
        visit = guarded.visit()
        store.hangs = False
        await got(visit, f"acme-1/round/{number}")
        store.hangs = True
        assert (
            await in_time(visit.put(f"acme-1/round/{number}", b"1", keep=False), clock)
            is Put.FAILED
        )
    assert guarded.writing.state == "open"
    visit = guarded.visit()
    assert await visit.put(KEY, b"1", keep=False) is Put.FAILED
    assert visit.errors == {"put:open": 1}, "nobody waits"
    store.hangs = False
    assert await got(visit, OTHER) is None


@pytest.mark.parametrize(("hangs", "state"), [(False, "closed"), (True, "open")])
async def test_a_store_that_is_busy_with_one_caller_is_not_kept_from_the_others(
    hangs: bool, state: str, clock: Clock
) -> None:
    class Busy(Scripted):
        """Does one operation at a time, and hangs, or takes a twentieth of the seconds that a
        request has."""

        turns = Places(1)

        async def put(self, key: str, value: bytes, *, sync: bool = True) -> bool:
            slot = await self.turns.take(namespace_of(key))
            try:
                await asyncio.sleep(10 * BUDGET if hangs else BUDGET / 20)
            finally:
                self.turns.give_back(slot)
            return True

    warned = list[str]()
    guarded = Guarded(
        Busy(), warn=lambda _, text: warned.append(text), budget_seconds=BUDGET, clock=clock
    )
    many = [
        asyncio.create_task(guarded.visit().put(f"a-1/originals/{number}", b"1", keep=False))
        for number in range(100)
    ]
    await turns()
    asked = asyncio.create_task(guarded.visit().put("b-1/originals/k", b"1", keep=False))
    await clock.let_pass(BUDGET + 1, steps=40)
    other = await asked
    assert guarded.state == state
    assert other is (Put.FAILED if hangs else Put.WRITTEN)
    assert Counter(await asyncio.gather(*many))[Put.FAILED] > 60
    assert bool([text for text in warned if "much is asked for at once" not in text]) is hangs


async def test_a_cancelled_request_is_no_fault(
    guarded: Guarded, store: Scripted, warned: list[tuple[str, str]]
) -> None:
    store.hangs = True
    task = asyncio.create_task(got(guarded.visit(), KEY))
    await turns()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert warned == []


async def test_the_health_check_asks_the_store_itself(
    guarded: Guarded, store: Scripted, clock: Clock
) -> None:
    assert await guarded.check(1) is None
    store.trouble = "away"
    for _ in range(FAILURES):
        assert await guarded.check(1) == "away"
    assert guarded.state == "open"
    store.trouble, store.hangs = None, True
    assert await in_time(guarded.check(10), clock) == "no answer to a check within 10 s"
    store.hangs = False
    assert await guarded.check(1) is None
    assert guarded.state == "closed"


async def test_the_health_check_writes_and_leaves_nothing(
    guarded: Guarded, store: Scripted
) -> None:
    assert await guarded.check(1) is None
    _, put, delete = store.asked
    assert put.split()[1] == delete.split()[1] and put.startswith(f"put {CHECKS}/probe/")

    async def full(key: str, value: bytes) -> bool:
        if value:  # a full disk takes empty files
            raise StoreFault("full")
        return True

    store.put = full  # type: ignore[method-assign]
    for _ in range(FAILURES):
        assert await guarded.check(1) == "full"
    assert (guarded.reading.state, guarded.writing.state) == ("closed", "open")


async def test_room_is_asked_for_where_there_is_none(
    store: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    guarded = Guarded(store, warn=lambda *what: None, full=lambda: asked.append("room"))
    fault = StoreFault("slow")

    async def put(key: str, value: bytes, *, sync: bool = True) -> bool:
        raise fault

    monkeypatch.setattr(store, "put", put)
    assert await guarded.visit().put("a-1/rounds/k", b"1", keep=False) is Put.FAILED
    assert await guarded.check(1) == "slow"
    assert not asked
    fault = StoreFull("no space")
    assert await guarded.visit().put("a-1/rounds/k", b"1", keep=False) is Put.FAILED
    assert await guarded.check(1) == "no space"
    assert asked == ["room"] * 2


async def test_a_store_that_does_not_close_is_left(
    guarded: Guarded, store: Scripted, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "close", asyncio.Event().wait)
    assert not await in_time(guarded.close(), clock)


# Damage.


def is_good(key: str, value: bytes) -> bool:
    return value == b"good"


async def test_a_damaged_record_is_absent_counted_deleted_and_can_be_put_again(
    store: Scripted, warned: list[tuple[str, str]]
) -> None:
    counted: list[str] = []
    guarded = Guarded(store, warn=lambda *what: warned.append(what), count_damaged=counted.append)
    visit = guarded.visit()
    store.records |= {KEY: b"SECRET", OTHER: b"good"}
    assert await visit.put(KEY, b"good") is Put.EXISTED
    assert list(await visit.get_many([KEY, OTHER], intact=is_good)) == [None, b"good"]
    assert (counted, warned) == (
        ["round"],
        [("store damaged", f"store: a damaged record counts as absent: {KEY}")],
    )
    assert store.asked[-1] == f"discard {KEY}" and KEY not in store.records
    assert await visit.put(KEY, b"good") is Put.WRITTEN
    assert list(await visit.get_many([KEY], intact=is_good)) == [b"good"]


async def test_a_damaged_record_is_absent_even_where_it_cannot_be_deleted(
    store: Scripted, guarded: Guarded
) -> None:
    store.records[KEY] = b"damaged"

    def intact(key: str, value: bytes) -> bool:
        store.trouble = "read-only"
        return False

    visit = guarded.visit()
    assert list(await visit.get_many([KEY], intact=intact)) == [None]
    assert visit.errors == {"delete:failed": 1}


async def test_a_good_record_that_took_a_damaged_ones_place_stays(
    store: Scripted, guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between our look at the damaged one and our deletion, another process deletes it and puts a
    good one."""
    store.records[KEY] = b"damaged"
    discard = store.discard

    async def late(key: str, value: bytes) -> None:
        store.records[KEY] = b"good"
        await discard(key, value)

    monkeypatch.setattr(store, "discard", late)
    visit = guarded.visit()
    assert list(await visit.get_many([KEY], final=True, intact=is_good)) == [None], "as it was read"
    assert store.records == {KEY: b"good"}
    assert list(await visit.get_many([KEY], final=True, intact=is_good)) == [b"good"], (
        "its absence is not remembered"
    )
    store.records[KEY] = b"damaged"
    assert await visit.put_intact(KEY, b"good", is_good)
    assert store.records == {KEY: b"good"}
    assert await visit.put_intact(OTHER, b"good", is_good)


async def test_a_record_that_is_owed_outlives_a_damaged_one(
    store: Scripted, guarded: Guarded
) -> None:
    store.records[KEY] = b"damaged"
    store.trouble = "full"
    owing = guarded.visit()
    assert await owing.put(KEY, b"good", sure=True) is Put.WRITTEN
    store.trouble = ""
    await owing.discard(KEY, b"damaged")
    assert list(await owing.get_many([KEY], intact=is_good)) == [b"good"]
    await owing.delete(KEY)
    assert list(await owing.get_many([KEY], intact=is_good)) == [None], "it was deleted on purpose"


async def test_a_record_that_is_damaged_again_and_again_is_given_up(
    store: Scripted, guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(key: str, value: bytes) -> None:
        return

    monkeypatch.setattr(store, "discard", never)
    store.records[KEY] = b"damaged"
    assert not await guarded.visit().put_intact(KEY, b"good", is_good)


# The breaker.


def opened(clock: Clock) -> Breaker:
    breaker = Breaker(clock)
    for _ in range(FAILURES):
        assert breaker.state == "closed" and breaker.admit()
        breaker.failed()
    assert breaker.state == "open" and not breaker.admit()
    return breaker


def test_it_opens_after_so_many_failures_in_a_row() -> None:
    breaker = Breaker(Clock())
    for outcome in [
        *[breaker.failed] * (FAILURES - 1),
        breaker.succeeded,
        *[breaker.failed] * (FAILURES - 1),
    ]:
        assert breaker.admit()
        outcome()
        assert breaker.state == "closed"
    breaker.failed()
    assert breaker.state == "open"


def test_after_a_pause_one_call_is_let_through_and_each_pause_is_twice_as_long() -> None:
    clock = Clock()
    breaker, pause = opened(clock), PAUSE
    for _ in range(10):
        clock.move(pause * 0.99)
        assert not breaker.admit()
        clock.move(pause * 0.02)
        assert breaker.admit() and not breaker.admit()
        breaker.failed()
        breaker.failed()  # a call of before says nothing more
        pause = min(2 * pause, LONGEST)
    clock.move(LONGEST)
    assert breaker.admit()
    breaker.succeeded()
    assert breaker.state == "closed"
    breaker.failed()
    assert breaker.admit(), "earlier failures are forgotten"


def test_a_probe_that_is_never_heard_of_again_is_followed_by_another() -> None:
    clock = Clock()
    breaker = opened(clock)
    for _ in range(3):
        clock.move(PAUSE)
        assert breaker.admit() and not breaker.admit()


# What could not be written.


async def test_what_could_not_be_written_is_read_and_put_again(
    guarded: Guarded, store: Scripted, clock: Clock
) -> None:
    store.trouble = "away"
    for number in range(FAILURES + 2):
        assert await guarded.visit().put(f"a-1/rounds/{number}", b"%d" % number) is Put.WRITTEN
    assert guarded.state == "open"
    assert await guarded.visit().put("a-1/rounds/0", b"other") is Put.EXISTED, (
        "it has one of this name"
    )
    assert await guarded.visit().put("a-1/originals/o", b"o", keep=False) is Put.FAILED
    assert await got(guarded.visit(), "a-1/rounds/0") == b"0"
    store.trouble = None
    await clock.let_pass(10 * PAUSE)
    assert store.records == {
        f"a-1/rounds/{number}": b"%d" % number for number in range(FAILURES + 2)
    }
    assert guarded.state == "closed"
    assert await got(guarded.visit(), "a-1/rounds/0") == b"0"


async def test_a_record_that_another_process_stored_meanwhile_is_the_record(
    guarded: Guarded, store: Scripted, clock: Clock
) -> None:
    """Or what this process sends upstream would differ from what all others do."""
    store.trouble = "away"
    assert await guarded.visit().put(KEY, b"ours") is Put.WRITTEN
    store.records[KEY] = b"theirs"
    visit = guarded.visit()
    at = visit.changes
    assert await got(visit, KEY) == b"ours", "nobody else can be asked"
    store.trouble = None
    await clock.let_pass(10 * PAUSE)
    assert not guarded.memory.unwritten and visit.was_put(KEY)
    assert await got(guarded.visit(), KEY) == b"theirs"
    assert visit.changed_since(at) == [KEY], "whoever remembers what was there looks again"


async def test_what_could_not_be_written_is_put_at_the_end(
    store: Scripted, warned: list[tuple[str, str]]
) -> None:
    guarded = Guarded(store, warn=lambda *what: warned.append(what))
    store.trouble = "away"
    assert await guarded.visit().put(KEY, b"1") is Put.WRITTEN
    store.trouble = None
    assert await guarded.close() and store.closed
    assert store.records == {KEY: b"1"} and len(warned) == 1
    store.trouble = "away"
    assert await guarded.visit().put(OTHER, b"1") is Put.WRITTEN
    await guarded.close()
    assert warned[-1][1] == "store: 1 records were never written"


@pytest.mark.parametrize("grace", [0.0, 10.0])
async def test_a_slow_store_gets_the_rest_of_the_drain_timeout_at_the_end(
    grace: float, store: Scripted, monkeypatch: pytest.MonkeyPatch, warned: list[tuple[str, str]]
) -> None:
    """The breaker is open by then. The log says how many records are lost."""
    monkeypatch.setattr(guarded_module, "CLOSING", 0.1)
    guarded = Guarded(store, warn=lambda *what: warned.append(what))
    store.trouble = "away"
    for number in range(40):
        await guarded.visit().put(f"a-1/rounds/{number}", b"1")
    store.trouble, store.seconds = None, 0.06
    assert await guarded.close(grace) == (len(store.records) == 40) == (grace > 0)
    assert (warned[-1][1] == f"store: {40 - len(store.records)} records were never written") == (
        not grace
    )


async def test_what_no_request_waits_for_gets_more_time(store: Scripted) -> None:
    guarded = Guarded(store, warn=lambda *_: None, budget_seconds=0.01)
    store.seconds = 0.1
    assert await guarded.visit().put(KEY, b"1", keep=False) is Put.FAILED
    assert await guarded.visit().anew().put(KEY, b"1", keep=False) is Put.WRITTEN
    await guarded.close()


async def test_of_what_could_not_be_written_the_oldest_is_given_up(
    store: Scripted, monkeypatch: pytest.MonkeyPatch, warned: list[tuple[str, str]]
) -> None:
    monkeypatch.setattr(guarded_module, "UNWRITTEN_BYTES", 20_000)
    guarded = Guarded(store, warn=lambda *what: warned.append(what))
    store.trouble = "away"
    for number in range(10):
        assert await guarded.visit().put(f"a-1/rounds/{number}", bytes(2_000)) is Put.WRITTEN
    left = [f"a-1/rounds/{number}" for number in range(2, 10)]
    assert [key for key, _ in guarded.memory.unwritten.items()] == left
    assert "1 records are given up" in warned[-1][1]
    for _ in range(5):  # asked for again, as a client does that gets no reply
        assert await guarded.visit().put("a-1/rounds/9", bytes(2_000), sure=True) is Put.WRITTEN
    assert [key for key, _ in guarded.memory.unwritten.items()] == left, "it counts once"
    await guarded.close()


async def test_a_record_that_takes_half_of_the_room_is_owed_as_well(store: Scripted) -> None:
    guarded = Guarded(store, warn=lambda *_: None)
    store.trouble = "away"
    assert (
        await guarded.visit().put("a-1/rounds/0", bytes(guarded_module.UNWRITTEN_BYTES // 2))
        is Put.WRITTEN
    )
    assert guarded.visit().was_put("a-1/rounds/0")
    await guarded.close()


async def test_what_no_request_waits_for_is_counted_too(store: Scripted) -> None:
    counted: list[tuple[str, str]] = []
    guarded = Guarded(
        store, warn=lambda *_: None, count_unanswered=lambda *what: counted.append(what)
    )
    store.trouble = "away"
    visit = guarded.visit()
    for number in range(guarded_module.FAILURES + 1):
        await visit.anew().put(f"a-1/originals/{number}", b"", keep=False)
    assert counted == [("put", "failed")] * guarded_module.FAILURES + [("put", "open")]
    assert visit.errors == {}, "the request was over"
    await guarded.close()


# The memory.


def test_memory_is_bounded_in_bytes() -> None:
    memory = Memory(100_000, 60)
    for number in range(1000):
        memory.keep(f"a/b/{number:03}", b"x" * 1000)
    each = len("a/b/000") + 1000 + ENTRY_WEIGHT
    assert memory.size == (100_000 // each, 100_000 // each * each)
    assert memory.recall(["a/b/999", "a/b/000"]) == {"a/b/999": b"x" * 1000}


def test_the_keys_of_recent_puts_are_bounded_and_count() -> None:
    memory = Memory(100_000, 60)
    for number in range(100):
        memory.note_put(f"a/b/{number:03}")
    assert memory.size == (0, 100 * (len("a/b/000") + ENTRY_WEIGHT))
    assert memory.was_put("a/b/099")
    memory.note_put("a/b/" + "x" * PUTS_BYTES)
    assert memory.size == (0, 100 * (len("a/b/000") + ENTRY_WEIGHT))


def test_a_put_ends_an_absence_but_no_record() -> None:
    memory = Memory(100_000, 60)
    memory.keep("a/b/absent", None)
    memory.keep("a/b/record", b"1")
    for key in ("a/b/absent", "a/b/record"):
        memory.note_put(key)
    assert memory.recall(["a/b/absent", "a/b/record"]) == {"a/b/record": b"1"}
