"""What all engines share: threads in fair turns, faults without our data, an end that waits."""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections.abc import Iterator, Sequence

import pytest

from proxy import stores
from proxy.errors import StoreBusy, StoreFault, StoreFull
from proxy.stores import Entry, Store
from proxy.stores.guarded import Guarded
from proxy.threads import nobody_waits
from tests.clock import PATIENCE, Clock, turns, until


class Engine:
    """Keeps nothing. Its calls wait until they may `go_on`, and are noted when they begin."""

    name, threads, batch = "the engine", 4, 2
    errors = OSError

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.go_on = threading.Event()
        self.trouble: Exception | None = None

    def _call(self, what: str) -> None:
        self.begun.append(what)
        assert self.go_on.wait(PATIENCE)
        if self.trouble:
            raise self.trouble

    def put(self, key: str, value: bytes, *, sync: bool) -> bool:
        self._call(f"put {key} {sync}")
        return True

    def get_many(self, keys: Sequence[str]) -> Sequence[bytes | None]:
        self._call(" ".join(keys))
        return [key.encode() for key in keys]

    def pages(self, prefix: str) -> Iterator[Sequence[Entry]]:
        self._call(prefix)
        yield []
        yield [Entry(prefix, 0, 0)]

    def delete(self, keys: Sequence[str], until: float | None = None) -> None:
        self._call(" ".join(keys))

    def discard(self, key: str, value: bytes) -> None:
        self._call(key)

    def reason(self, error: Exception) -> str:
        return type(error).__name__

    def is_full(self, error: Exception) -> bool:
        return isinstance(error, BlockingIOError)


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def store(engine: Engine) -> Store:
    return Store(engine)


async def test_more_keys_than_may_wait_are_deleted_all_the_same(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "WAITING", 1_000)
    monkeypatch.setattr(stores, "AT_ONCE", 110)
    store = Store(engine)
    engine.go_on.set()
    keys = [f"a-1/rounds/{number}" for number in range(2 * stores.WAITING + 100)]
    await store.delete(*keys)
    assert sorted(" ".join(engine.begun).split()) == sorted(keys)


async def test_a_tenant_leaves_a_place_to_others_and_what_waits_in_vain_never_begins(
    engine: Engine, store: Store
) -> None:
    flood = [
        asyncio.create_task(store.get(f"flood-{number:016x}/rounds/k")) for number in range(20)
    ]
    await until(lambda: len(engine.begun) == 3)
    other = asyncio.create_task(store.get("other-1/rounds/k"))
    await until(lambda: len(engine.begun) == 4)
    for task in flood[1:]:
        task.cancel()
    await turns()
    engine.go_on.set()
    assert await flood[0] == b"flood-0000000000000000/rounds/k"
    assert await other == b"other-1/rounds/k"
    await store.close()
    assert len(engine.begun) == 4


async def test_slow_writes_keep_no_read_waiting(engine: Engine, store: Store) -> None:
    writes = [asyncio.create_task(store.put(f"a-1/rounds/{number}", b"")) for number in range(20)]
    await until(lambda: len(engine.begun) == 3)
    engine.get_many = lambda keys: [b"1" for _ in keys]  # type: ignore[method-assign]
    assert await asyncio.wait_for(store.get("a-1/rounds/k"), 10) == b"1"
    engine.go_on.set()
    await asyncio.gather(*writes)


async def test_of_one_caller_only_so_much_waits(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "WAITING", 5)
    store = Store(engine)
    waiting = [asyncio.create_task(store.get("a-1/rounds/k")) for _ in range(8)]
    await turns()
    with pytest.raises(StoreBusy):
        await store.get("a-1/rounds/k")
    engine.go_on.set()
    await asyncio.gather(*waiting)


async def test_many_keys_go_in_batches_and_come_in_order(engine: Engine, store: Store) -> None:
    engine.go_on.set()
    keys = [f"a-1/rounds/{number}" for number in (3, 1, 2, 1, 4)]
    assert await store.get_many(keys) == [key.encode() for key in keys]
    await store.delete(*keys)
    assert len(engine.begun) == 6
    assert [entry.key async for entry in store.list("a-1/")] == ["a-1/"]


async def test_a_record_is_durable_unless_it_need_not_be(engine: Engine, store: Store) -> None:
    """Whoever writes it: a record that is owed to a request is put again when nobody waits."""
    engine.go_on.set()
    with nobody_waits():
        await store.put("a-1/rounds/k", b"1")
    await store.put("a-1/rounds/k", b"1", sync=False)
    assert engine.begun == ["put a-1/rounds/k True", "put a-1/rounds/k False"]


async def test_a_fault_says_nothing_of_what_we_sent(engine: Engine, store: Store) -> None:
    engine.go_on.set()
    engine.trouble = OSError("my secret")
    for work in (
        store.put("a-1/rounds/k", b"1"),
        store.get_many(["a-1/rounds/k"]),
        store.delete("a-1/rounds/k"),
    ):
        with pytest.raises(StoreFault, match="the engine failed: OSError") as caught:
            await work
        assert "secret" not in "".join(traceback.format_exception(caught.value))
    engine.trouble = KeyError("a bug")
    with pytest.raises(KeyError):
        await store.get("a-1/rounds/k")


@pytest.mark.parametrize(
    ("trouble", "kind"), [(BlockingIOError(), StoreFull), (OSError(), StoreFault)]
)
async def test_an_engine_without_room_is_told_from_one_that_fails(
    engine: Engine, store: Store, trouble: Exception, kind: type[StoreFault]
) -> None:
    engine.go_on.set()
    engine.trouble = trouble
    with pytest.raises(StoreFault) as caught:
        await store.put("a-1/rounds/k", b"1")
    assert type(caught.value) is kind


async def test_what_is_no_key_is_refused(store: Store) -> None:
    for key in ("", "a/b", "../b/c", "a/b/é"):
        for work in (
            store.put(key, b"1"),
            store.get(key),
            store.get_many([key]),
            store.delete(key),
        ):
            with pytest.raises(ValueError):
                await work


async def test_calls_that_hang_are_faults_in_time_and_the_end_names_them(
    engine: Engine, clock: Clock
) -> None:
    warned: list[str] = []
    guarded = Guarded(
        Store(engine), warn=lambda _, text: warned.append(text), budget_seconds=10, clock=clock
    )
    for number in range(40):
        asked = asyncio.create_task(guarded.visit().get_many([f"a-1/rounds/{number}"]))
        await turns()
        clock.move(10)
        assert await asked == [None]
    assert guarded.state == "open" and len(engine.begun) == 3, "the breaker leaves it alone"
    closing = asyncio.create_task(guarded.close())
    await turns()
    clock.move(stores.CLOSE_SECONDS)
    assert not await closing
    assert "the engine hangs: 3 operations have not ended" in warned[-1]
    engine.go_on.set()
