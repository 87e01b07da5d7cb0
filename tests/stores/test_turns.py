"""Turns: how the slots of a store are shared."""

from __future__ import annotations

import asyncio

import pytest

from proxy.stores.turns import Turns


async def waiting(turns: Turns, owner: str, got: list[str]) -> asyncio.Task[None]:
    """Return a task that waits for a slot, and that has asked for it."""

    async def take() -> None:
        await turns.take(owner)
        got.append(owner)

    task = asyncio.create_task(take())
    await asyncio.sleep(0)
    return task


async def test_no_more_than_the_slots_are_taken() -> None:
    turns, got = Turns(2), list[str]()
    for _ in range(3):
        await waiting(turns, "a", got)
    assert got == ["a", "a"]
    turns.give_back()
    await asyncio.sleep(0)
    assert got == ["a", "a", "a"]


async def test_one_owner_of_many_holds_up_no_other() -> None:
    turns, got = Turns(1), list[str]()
    await turns.take("flood")
    for owner in [*["flood"] * 1_000, "b", "b", "c"]:
        await waiting(turns, owner, got)
    for _ in range(6):
        turns.give_back()
        await asyncio.sleep(0)
    assert got == ["flood", "b", "c", "flood", "b", "flood"]


async def test_a_slot_is_lost_to_nobody_who_has_gone() -> None:
    turns, got = Turns(1), list[str]()
    await turns.take("a")
    gone = [await waiting(turns, owner, got) for owner in ("a", "b", "b", "c")]
    for task in gone[:3]:
        task.cancel()
    await asyncio.sleep(0)
    turns.give_back()
    await asyncio.sleep(0)
    assert got == ["c"]
    turns.give_back()
    await asyncio.wait_for(turns.take("d"), 10)
    assert not turns._waiting


async def test_an_owner_whose_first_waiter_goes_keeps_its_turn() -> None:
    turns, got = Turns(1), list[str]()
    await turns.take("x")
    gone, *_ = [await waiting(turns, owner, got) for owner in ("a", "a", "b", "b")]
    gone.cancel()
    for _ in range(3):
        turns.give_back()
        await asyncio.sleep(0)
    assert got == ["a", "b", "b"]


@pytest.mark.parametrize("first", ["given", "cancelled"])
async def test_a_slot_that_comes_as_its_waiter_goes_is_passed_on(first: str) -> None:
    turns, got = Turns(1), list[str]()
    await turns.take("a")
    task, other = await waiting(turns, "a", got), await waiting(turns, "b", got)
    for step in (turns.give_back, task.cancel) if first == "given" else (task.cancel, turns.give_back):
        step()
    await asyncio.wait([task, other])
    assert task.cancelled() and got == ["b"]
    turns.give_back()
    await asyncio.wait_for(turns.take("d"), 10)
