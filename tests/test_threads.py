"""Thread pools: bounded, fair between callers, and no work for callers who left."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from proxy.errors import Overloaded
from proxy.threads import Threads, WorkPool


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
