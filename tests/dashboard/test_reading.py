"""The thread that reads the dashboard's file."""

from __future__ import annotations

import asyncio
import threading

import pytest

from proxy.dashboard.reading import ReadingThread
from proxy.errors import DashboardFault


async def test_a_call_returns_or_raises_to_whoever_waits() -> None:
    thread = ReadingThread()
    begun, go_on, ran = threading.Event(), threading.Event(), list[str]()

    def fails() -> None:
        raise ValueError("not found")

    def waits() -> str:
        begun.set()
        go_on.wait(30)
        return threading.current_thread().name

    waiting = asyncio.create_task(thread.run(waits))
    left = asyncio.create_task(thread.run(lambda: ran.append("for nobody")))
    under_way = asyncio.create_task(thread.run(fails))
    await asyncio.to_thread(begun.wait, 30)
    left.cancel()
    await asyncio.wait([left])
    go_on.set()
    assert await waiting == "dashboard-reader"
    with pytest.raises(ValueError, match="not found"):
        await under_way
    thread.close(lambda: ran.append("the last"))
    assert ran == ["the last"]
    with pytest.raises(DashboardFault):
        await thread.run(lambda: ran.append("too late"))


async def test_a_call_whose_caller_left_meanwhile_harms_no_other() -> None:
    thread = ReadingThread()
    begun, go_on = threading.Event(), threading.Event()
    left = asyncio.create_task(thread.run(lambda: begun.set() or go_on.wait(30)))
    await asyncio.to_thread(begun.wait, 30)
    left.cancel()
    await asyncio.wait([left])
    go_on.set()
    assert await thread.run(lambda: 7) == 7
    thread.close(lambda: None)


def test_a_thread_that_nobody_asked_closes_at_once() -> None:
    ran: list[int] = []
    ReadingThread().close(lambda: ran.append(1))
    assert not ran


def test_a_loop_that_ended_meanwhile_harms_no_later_one() -> None:
    thread = ReadingThread()
    go_on = threading.Event()

    async def leave() -> None:
        asyncio.create_task(thread.run(lambda: go_on.wait(30)))  # noqa: RUF006  (it is to be abandoned)
        await asyncio.sleep(0)

    asyncio.run(leave())
    go_on.set()

    async def ask() -> int:
        return await thread.run(lambda: 7)

    assert asyncio.run(ask()) == 7
    thread.close(lambda: None)
