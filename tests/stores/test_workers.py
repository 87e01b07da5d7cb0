"""Threads that may hang: which calls wait, what is bounded, and what `close` reports."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator

import pytest

from proxy.errors import NamespaceFault, StoreFault
from proxy.stores.workers import Workers


@pytest.fixture
def let_go() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


async def test_what_it_returns_and_what_it_raises() -> None:
    workers = Workers("test")
    assert await workers.run("add", lambda: 1 + 1) == 2
    with pytest.raises(ZeroDivisionError):
        await workers.run("divide", lambda: 1 // 0)
    assert await workers.close(1) == []
    with pytest.raises(StoreFault, match="closed"):
        await workers.run("late", lambda: 1)


async def test_no_more_threads_than_there_is_work() -> None:
    workers = Workers("test", threads=4)
    for _ in range(20):
        await workers.run("one", lambda: None)
    assert len(workers._threads) == 1
    await asyncio.gather(*(workers.run("many", lambda: None) for _ in range(50)))
    assert len(workers._threads) <= 4


async def test_where_the_system_starts_no_more_threads_others_do_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    workers = Workers("test", threads=2)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        for _ in range(5):
            with pytest.raises(StoreFault, match="no more threads"):
                await asyncio.wait_for(workers.run("one", lambda: 1), 5)
    assert await workers.run("one", lambda: 1) == 1
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        numbers = (workers.run("many", lambda number=number: number) for number in range(9))  # type: ignore[misc]
        assert await asyncio.wait_for(asyncio.gather(*numbers), 5) == [*range(9)]
    assert await workers.close(1) == []


async def test_hanging_threads_leave_nothing_behind_of_who_gave_up(let_go: threading.Event) -> None:
    workers = Workers("test", threads=2)
    ran: list[int] = []

    def work(number: int) -> None:
        let_go.wait()
        ran.append(number)

    hanging = [asyncio.create_task(workers.run(f"get {number}", lambda n=number: work(n))) for number in (0, 1)]
    await asyncio.sleep(0)
    while workers._items.qsize():  # noqa: ASYNC110 - until the threads have taken both
        await asyncio.sleep(0.01)
    for turn in range(20):
        late = [asyncio.create_task(workers.run("late", lambda: ran.append(99))) for _ in range(50)]
        await asyncio.sleep(0)
        for task in late:
            task.cancel()
        assert all(
            isinstance(one, asyncio.CancelledError) for one in await asyncio.gather(*late, return_exceptions=True)
        ), turn
    assert (workers._free.count(""), workers._items.qsize()) == (0, 0)
    assert (len(workers._under_way), len(workers._threads)) == (2, 2)
    for task in hanging:
        task.cancel()
    await asyncio.gather(*hanging, return_exceptions=True)
    assert len(workers._under_way) == 2, "they hang, whoever waits for them"
    let_go.set()
    assert await workers.run("after", lambda: 5) == 5
    assert await workers.close(20) == []
    assert sorted(ran) == [0, 1]


async def test_too_much_that_waits_is_refused_at_once(let_go: threading.Event) -> None:
    workers = Workers("test", threads=1, waiting=3)
    tasks = [asyncio.create_task(workers.run("get", let_go.wait, "a-1")) for _ in range(4)]
    await asyncio.sleep(0.01)
    with pytest.raises(NamespaceFault, match="3 calls wait"):
        await workers.run("get", lambda: None, "a-1")
    tasks.append(asyncio.create_task(workers.run("get", let_go.wait, "b-1")))
    await asyncio.sleep(0.01)
    let_go.set()
    await asyncio.gather(*tasks)


async def test_closing_is_bounded_and_says_what_hangs(let_go: threading.Event) -> None:
    workers = Workers("test")
    tasks = [asyncio.create_task(workers.run("get acme/rounds/x", let_go.wait))]
    await asyncio.sleep(0.01)
    [said] = await workers.close(0.05)
    assert said.startswith("get acme/rounds/x for ")
    assert all(thread.daemon for thread in workers._threads)
    let_go.set()
    await asyncio.gather(*tasks)


async def test_an_idle_thread_keeps_no_value() -> None:
    class Large(bytearray):
        pass

    made: list[weakref.ref[Large]] = []

    def make() -> Large:
        value = Large(10)
        made.append(weakref.ref(value))
        return value

    workers = Workers("test")
    assert len(await workers.run("get", make)) == 10
    await asyncio.sleep(0.05)
    gc.collect()
    assert made[0]() is None
