"""Thread pools: bounded, fair between callers, and no work for callers who left."""

from __future__ import annotations

import _thread
import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence

import pytest

from proxy.errors import Overloaded
from proxy.threads import SLICE, SMALL, Places, Slot, WorkPool, breathe, nobody_waits
from tests.clock import PATIENCE, soon
from tests.clock import turns as settle


class Gate:
    """Work that waits until it is let go, and notes when it ran."""

    def __init__(self) -> None:
        self.open, self.begun = threading.Event(), threading.Event()
        self.ran: list[str] = []

    def work(self, name: str) -> Callable[[], str]:
        def run() -> str:
            self.begun.set()
            self.open.wait(PATIENCE)
            self.ran.append(name)
            return name

        return run


async def test_run_returns_and_raises_as_the_work_does() -> None:
    pool = WorkPool("test", 1)
    assert await pool.run("a", lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        await pool.run("a", lambda: 1 // 0)
    assert await pool.run("a", lambda: 8) == 8


async def test_callers_take_turns() -> None:
    pool, gate = WorkPool("test", 1), Gate()
    tasks = [
        asyncio.create_task(pool.run("busy", gate.work(f"busy{number}"))) for number in range(5)
    ]
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
    await asyncio.to_thread(gate.begun.wait, PATIENCE)
    left.cancel()
    waiting = asyncio.create_task(pool.run("b", gate.work("b")))
    await settle()
    assert gate.ran == []
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
    gate.open.set()
    await asyncio.gather(*tasks, other)
    assert gate.ran == ["a", "a", "b", "a"]


async def test_work_for_a_reply_that_has_begun_is_never_refused() -> None:
    pool, gate = WorkPool("test", 1, waiting=0), Gate()
    tasks = [asyncio.create_task(pool.run("a", gate.work("a"), begun=True)) for _ in range(3)]
    await settle()
    with pytest.raises(Overloaded):
        await pool.run("a", gate.work("refused"))
    gate.open.set()
    assert await asyncio.gather(*tasks) == ["a", "a", "a"]


async def test_no_caller_has_all_threads() -> None:
    pool, gate = WorkPool("test", 3), Gate()
    busy = [asyncio.create_task(pool.run("busy", gate.work("busy"))) for _ in range(5)]
    await settle()
    assert await pool.run("other", lambda: 7) == 7
    gate.open.set()
    await asyncio.gather(*busy)


async def test_work_that_nobody_waits_for_comes_last_and_gets_half_of_the_threads() -> None:
    pool, gate = WorkPool("test", 2), Gate()
    with nobody_waits():
        tasks = [asyncio.create_task(pool.run("a", gate.work(f"later{n}"))) for n in range(3)]
    await settle()
    assert await pool.run("b", lambda: 7) == 7  # a thread is kept for what somebody waits for
    blocked = [asyncio.create_task(pool.run(name, gate.work(name))) for name in "cde"]
    await settle()
    gate.open.set()
    await asyncio.gather(*tasks, *blocked)
    # only what somebody waits for, and what ran already
    assert not {*gate.ran[:3]} & {"later1", "later2"}


def long_work(ended: threading.Event) -> str:
    while not ended.is_set():
        until = time.thread_time() + 2 * SLICE
        while time.thread_time() < until:
            pass
        breathe()
    return "long"


async def test_long_work_lets_others_have_their_turn_and_ends_when_its_caller_leaves() -> None:
    pool, ended = WorkPool("test", 1), threading.Event()
    with nobody_waits():
        later = asyncio.create_task(pool.run("c", lambda: long_work(ended)))
    long = [asyncio.create_task(pool.run(name, lambda: long_work(ended))) for name in "aab"]
    await settle()
    for caller in ("other", "a", "other"):
        assert await pool.run(caller, lambda: 7) == 7
    long.pop().cancel()
    await settle()
    ended.set()
    assert await asyncio.gather(*long, later) == ["long"] * 3
    assert await pool.run("other", lambda: 8) == 8


async def test_little_work_needs_no_thread() -> None:
    pool = WorkPool("test", 1)
    assert await pool.run("a", threading.get_ident, SMALL) == threading.get_ident()
    assert await pool.run("a", threading.get_ident, SMALL + 1) != threading.get_ident()


async def test_turns_are_not_lost_when_many_callers_leave() -> None:
    pool, gate = WorkPool("test", 2), Gate()
    tasks = [
        asyncio.create_task(pool.run(str(number % 3), gate.work(str(number))))
        for number in range(30)
    ]
    await settle()
    for task in tasks[::2]:
        task.cancel()
    gate.open.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert await asyncio.gather(*(pool.run("x", lambda: 1) for _ in range(4))) == [1, 1, 1, 1]


async def test_a_closed_pool_takes_no_work() -> None:
    pool = WorkPool("test")
    assert await pool.run("", lambda: 1) == 1
    pool.close()
    with pytest.raises(Overloaded, match="shutting down"):
        await pool.run("", lambda: 1)


def test_a_thread_that_hangs_does_not_keep_the_process_from_ending() -> None:
    code = (
        "import asyncio, threading, time\nfrom proxy.threads import WorkPool\nbegun = threading.Event()\n"
        "async def main():\n"
        "    asyncio.ensure_future(WorkPool('test').run('', lambda: (begun.set(), time.sleep(600))))\n"
        "    await asyncio.to_thread(begun.wait)\nasyncio.run(main())"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=PATIENCE).returncode == 0


async def test_a_tenant_with_many_keys_has_one_turn_among_tenants() -> None:
    pool, order = WorkPool("test", 1), list[str]()
    done = threading.Event()
    callers = [f"default-{number:016x}" for number in range(5)] + ["victim-" + "0" * 16]
    first = asyncio.create_task(pool.run("default-anonymous", lambda: done.wait(PATIENCE)))
    waiting = [
        asyncio.create_task(pool.run(caller, lambda caller=caller: order.append(caller)))
        for caller in callers
    ]
    await settle()  # all of them wait for their turn
    done.set()
    await asyncio.gather(first, *waiting)
    assert order == [callers[0], callers[-1], *callers[1:-1]]


async def test_where_the_system_starts_no_more_threads_work_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    pool = WorkPool("test", 2)
    with monkeypatch.context() as patched:
        patched.setattr(_thread, "start_new_thread", refuse)
        for _ in range(5):
            with pytest.raises(Overloaded, match="no more threads"):
                await pool.run("one", lambda: 1)
    assert await pool.run("one", lambda: 1) == 1


async def test_closing_waits_for_hanging_work_and_leaves_nothing_behind_of_who_gave_up() -> None:
    pool, gate = WorkPool("test", 2), Gate()
    hanging = [asyncio.create_task(pool.run(caller, gate.work(caller))) for caller in "ab"]
    await settle()
    late = [asyncio.create_task(pool.run("late", gate.work("late"))) for _ in range(50)]
    await settle()
    for task in [*hanging, *late]:
        task.cancel()
    await asyncio.gather(*hanging, *late, return_exceptions=True)
    assert await pool.ended(0) == 2, "they hang, whoever waits for them"
    gate.open.set()
    assert await pool.ended(PATIENCE) == 0
    assert sorted(gate.ran) == ["a", "b"]


def ask(places: Places, callers: Sequence[str], got: list[str]) -> list[asyncio.Task[Slot]]:
    """Return tasks that each wait for a place."""

    async def take(caller: str) -> Slot:
        turn = await places.take(caller)
        got.append(caller)
        return turn

    return [asyncio.create_task(take(caller)) for caller in callers]


async def test_a_place_is_lost_to_nobody_who_has_gone() -> None:
    places, got = Places(1), list[str]()
    turn = await places.take("a")
    *gone, last = ask(places, ("a", "b", "b", "c"), got)
    await settle()
    for task in gone:
        task.cancel()
    await asyncio.sleep(0)
    places.give_back(turn)
    places.give_back(await last)
    assert got == ["c"]
    await soon(places.take("d"))


@pytest.mark.parametrize("first", ["given", "cancelled"])
async def test_a_place_that_comes_as_its_waiter_goes_is_passed_on(first: str) -> None:
    places, got = Places(1), list[str]()
    turn = await places.take("x")
    task, other = ask(places, "ab", got)
    await settle()
    steps = [lambda: places.give_back(turn), task.cancel]
    for step in steps if first == "given" else reversed(steps):
        step()
    places.give_back(await other)
    assert task.cancelled() and got == ["b"]
    await soon(places.take("d"))


async def test_a_flood_of_one_caller_holds_up_no_other_by_more_than_one_turn() -> None:
    places, got = Places(1), list[str]()
    turn = await places.take("flood")
    ask(places, [*["flood"] * 1_000, "b", "b", "c"], got)
    await settle()
    for _ in range(6):
        places.give_back(turn)
        await settle()
        turn = Slot(got[-1], False)
    assert got == ["flood", "b", "c", "flood", "b", "flood"]
