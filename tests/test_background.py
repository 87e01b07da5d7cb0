"""Work beside the requests: bounded, each once at a time, finished before the process ends."""

from __future__ import annotations

import asyncio

import pytest

from proxy.threads import Background
from tests.clock import PATIENCE, soon, turns


async def test_background_runs_one_task_of_each_name_up_to_its_limit() -> None:
    background, gate, done = Background(2), asyncio.Event(), list[str]()

    async def work(name: str) -> None:
        await gate.wait()
        done.append(name)

    begun = [background.start(name, lambda name=name: work(name)) for name in ("a", "a", "b", "c")]
    assert begun == [True, False, True, False] and len(background) == 2
    gate.set()
    await background.close(1)
    assert sorted(done) == ["a", "b"] and len(background) == 0
    assert background.start("a", lambda: work("again"))
    await background.close(1)
    assert done[2:] == ["again"]


async def test_background_task_is_cancelled_after_the_grace_period() -> None:
    background = Background(1)
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    background.start("long", work)
    await turns()
    await background.close(0)
    await soon(ended.wait())


async def test_the_end_does_not_wait_for_what_is_not_awaited() -> None:
    background, done = Background(2), list[str]()

    async def forever() -> None:
        await asyncio.Event().wait()

    async def work() -> None:
        await turns()
        done.append("mine")

    background.start("spare", forever, 50, awaited=False)
    background.start("mine", work)
    await turns(1)
    await soon(background.close(10 * PATIENCE))
    assert done == ["mine"] and len(background) == 0


async def test_who_needs_what_is_being_done_can_wait_for_it() -> None:
    background, gate, done = Background(2), asyncio.Event(), list[str]()

    async def work() -> None:
        await gate.wait()
        done.append("mine")

    background.start("me-1/files", work)
    assert not await background.ended("me-12/", 60)
    assert await background.ended("me-1/", 0) and not done
    asyncio.get_running_loop().call_soon(gate.set)
    assert await background.ended("me-1/", 60) and done == ["mine"]
    assert not await background.ended("me-1/", 60)


async def test_background_task_that_fails_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        raise ValueError("why")

    background = Background(1)
    background.start("bad", work)
    await background.close(1)
    await turns()
    assert "background work failed" in caplog.text and "why" in caplog.text


async def test_what_holds_too_much_is_not_begun() -> None:
    background, gate = Background(9, 100), asyncio.Event()

    async def work() -> None:
        await gate.wait()

    assert [background.start(name, work, 50) for name in "abc"] == [True, True, False]
    gate.set()
    await background.close(1)
    assert background.start("c", work, 100)
    await background.close(1)
