"""Thread pools: bounded, fair between callers, and no work for callers who left."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import pytest

from proxy.errors import Overloaded
from proxy.threads import SLICE, Threads, WorkPool, breathe


class Gate:
    """Work that waits until it is let go, and notes when it ran."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.ran: list[str] = []

    def work(self, name: str) -> Callable[[], str]:
        def run() -> str:
            self.open.wait(10)
            self.ran.append(name)
            return name

        return run


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_run_returns_and_raises_as_the_work_does() -> None:
    pool = WorkPool("test", 1)
    assert await pool.run("a", lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        await pool.run("a", lambda: 1 // 0)
    assert await pool.run("a", lambda: 8) == 8


async def test_callers_take_turns() -> None:
    pool, gate = WorkPool("test", 1), Gate()
    tasks = [asyncio.create_task(pool.run("busy", gate.work(f"busy{number}"))) for number in range(5)]
    await settle()
    tasks.append(asyncio.create_task(pool.run("other", gate.work("other"))))
    await settle()
    gate.open.set()
    await asyncio.gather(*tasks)
    assert gate.ran == ["busy0", "busy1", "other", "busy2", "busy3", "busy4"]


async def test_work_of_a_caller_who_left_is_never_run() -> None:
    pool, gate = WorkPool("test", 1), Gate()
    first = asyncio.create_task(pool.run("a", gate.work("first")))
    await settle()
    left = asyncio.create_task(pool.run("a", gate.work("left")))
    await settle()
    left.cancel()
    gate.open.set()
    await first
    assert await pool.run("a", gate.work("last")) == "last"
    assert gate.ran == ["first", "last"]


async def test_a_thread_is_busy_until_its_work_ends_even_if_its_caller_left() -> None:
    pool, gate = WorkPool("test", 1), Gate()
    left = asyncio.create_task(pool.run("a", gate.work("left")))
    await settle()
    left.cancel()
    waiting = asyncio.create_task(pool.run("b", gate.work("b")))
    await settle()
    assert pool.waiting == 1
    gate.open.set()
    await waiting
    assert gate.ran == ["left", "b"]


async def test_one_caller_has_bounded_work_waiting() -> None:
    pool, gate = WorkPool("test", 1, waiting=2), Gate()
    tasks = [asyncio.create_task(pool.run("a", gate.work("a"))) for _ in range(3)]
    await settle()
    with pytest.raises(Overloaded):
        await pool.run("a", gate.work("refused"))
    other = asyncio.create_task(pool.run("b", gate.work("b")))
    await settle()
    assert pool.waiting == 3
    gate.open.set()
    await asyncio.gather(*tasks, other)
    assert "refused" not in gate.ran


async def test_work_for_a_reply_that_has_begun_is_never_refused() -> None:
    pool, gate = WorkPool("test", 1, waiting=0), Gate()
    tasks = [asyncio.create_task(pool.run("a", gate.work("a"), begun=True)) for _ in range(3)]
    await settle()
    with pytest.raises(Overloaded):
        await pool.run("a", gate.work("refused"))
    gate.open.set()
    assert await asyncio.gather(*tasks) == ["a", "a", "a"]


async def test_work_of_callers_who_left_does_not_count_as_waiting() -> None:
    pool, gate = WorkPool("test", 1, waiting=1), Gate()
    first = asyncio.create_task(pool.run("a", gate.work("first")))
    await settle()
    for _ in range(3):
        left = asyncio.create_task(pool.run("a", gate.work("left")))
        await settle()
        left.cancel()
        await settle()
    last = asyncio.create_task(pool.run("a", gate.work("last")))
    await settle()
    assert pool.waiting == 1
    gate.open.set()
    assert await asyncio.gather(first, last) == ["first", "last"]


async def test_no_caller_has_all_threads() -> None:
    pool, gate = WorkPool("test", 3), Gate()
    busy = [asyncio.create_task(pool.run("busy", gate.work("busy"))) for _ in range(5)]
    await settle()
    assert pool.waiting == 3
    assert await pool.run("other", lambda: 7) == 7
    gate.open.set()
    await asyncio.gather(*busy)


def spin() -> None:
    """More than a slice of work."""
    until = time.thread_time() + 2 * SLICE
    while time.thread_time() < until:
        pass


def long_work(ended: threading.Event) -> str:
    while not ended.is_set():
        spin()
        breathe()
    return "long"


async def test_long_work_lets_others_have_their_turn_and_goes_on() -> None:
    pool, ended = WorkPool("test", 1), threading.Event()
    long = [asyncio.create_task(pool.run(name, lambda: long_work(ended))) for name in "ab"]
    await settle()
    for _ in range(3):
        assert await pool.run("other", lambda: 7) == 7
    ended.set()
    assert await asyncio.gather(*long) == ["long", "long"]
    assert pool.waiting == 0
    assert await pool.run("other", lambda: 8) == 8


async def test_long_work_does_not_pause_for_more_work_of_its_caller() -> None:
    pool, order = WorkPool("test", 1), list[str]()

    def work(name: str) -> None:
        for _ in range(3):
            spin()
            breathe()
        order.append(name)

    await asyncio.gather(*(pool.run("a", lambda name=name: work(name)) for name in ("first", "second")))  # type: ignore[misc]
    assert order == ["first", "second"]


async def test_long_work_ends_when_its_caller_leaves() -> None:
    pool, never = WorkPool("test", 1), threading.Event()
    left = asyncio.create_task(pool.run("a", lambda: long_work(never)))
    await settle()
    left.cancel()
    assert await pool.run("a", lambda: 7) == 7


async def test_paused_work_ends_with_its_pool() -> None:
    pool, gate, never, begun = WorkPool("test", 1), Gate(), threading.Event(), threading.Event()
    long = asyncio.create_task(pool.run("a", lambda: long_work(never)))
    await settle()
    other = asyncio.create_task(pool.run("b", lambda: (begun.set(), gate.open.wait(10))))
    await asyncio.to_thread(begun.wait, 10)
    pool.close()
    gate.open.set()
    await other
    assert (await asyncio.gather(long, return_exceptions=True))[0] != "long"


def test_to_breathe_outside_of_a_pool_does_nothing() -> None:
    breathe()


async def test_turns_are_not_lost_when_many_callers_leave() -> None:
    pool, gate = WorkPool("test", 2), Gate()
    tasks = [asyncio.create_task(pool.run(str(number % 3), gate.work(str(number)))) for number in range(30)]
    await settle()
    for task in tasks[::2]:
        task.cancel()
    gate.open.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert pool.waiting == 0
    assert await asyncio.gather(*(pool.run("x", lambda: 1) for _ in range(4))) == [1, 1, 1, 1]


async def test_closed_pools_take_no_work() -> None:
    threads = Threads()
    assert await threads.reading.run("", lambda: 1) == 1
    threads.close()
    with pytest.raises(RuntimeError):
        await threads.reading.run("", lambda: 1)


async def test_a_tenant_with_many_keys_has_one_turn_among_tenants() -> None:
    pool, order = WorkPool("test", 1), list[str]()
    done = threading.Event()
    callers = [f"default-{number:016x}" for number in range(5)] + ["victim-" + "0" * 16]
    first = asyncio.create_task(pool.run("default-anonymous", lambda: done.wait(30)))
    waiting = [asyncio.create_task(pool.run(caller, lambda caller=caller: order.append(caller))) for caller in callers]
    await asyncio.sleep(0)  # all of them wait for their turn
    assert pool.waiting == len(callers)
    done.set()
    await asyncio.gather(first, *waiting)
    assert order == [callers[0], callers[-1], *callers[1:-1]]
