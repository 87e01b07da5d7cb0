"""A line of history is known by its own digests: forks inherit how it fared, and strangers do not."""

from __future__ import annotations

import asyncio

import pytest

from proxy.requests.lines import FIRST_BACKOFF, LAST, UNUSED_LIMIT, UNUSED_PAUSE, WALK, Line, Lines
from tests.requests.histories import line

BASE = "s be good|u continue|a one|u more|a two|u more"


class World:
    """Lines and their clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.lines = Lines(lambda: self.now)

    def fly(self, line: Line) -> asyncio.Task[None]:
        flight = asyncio.create_task(asyncio.sleep(60))
        self.lines.started(line, flight)
        return flight

    def made(self, line: Line, fault: str = "") -> bool:
        self.fly(line).cancel()
        return self.lines.landed(line, fault)


@pytest.mark.parametrize(
    ("other", "inherits"),
    [
        pytest.param(line(BASE, 4), True, id="the same"),
        pytest.param(line(BASE + "|a three|u more", 6), True, id="it went on"),
        pytest.param(line("s now it is noon|u continue|a one|u more|a other|u more", 6), True, id="a fork"),
        pytest.param(line("s be good|u continue|a another|u more|a two|u more", 4), False, id="a stranger"),
        pytest.param(line("s be good|u continue", 2), False, id="before the boundary"),
        pytest.param(line(BASE, 4, scope="ns/another"), False, id="another model or caller"),
    ],
)
async def test_who_inherits_flights_and_failures(other: Line, inherits: bool) -> None:
    world = World()
    flight = world.fly(line(BASE, 4))
    assert (world.lines.flight(other) is flight) == inherits
    assert not world.lines.paused(other)
    flight.cancel()
    world.lines.landed(line(BASE, 4), "failed")
    assert world.lines.flight(other) is None
    assert world.lines.paused(other) == inherits
    world.now += FIRST_BACKOFF
    assert not world.lines.paused(other)


async def test_forks_do_not_hold_each_other_up() -> None:
    world = World()
    world.made(line("u go|a one"))
    forks = [line(f"u go|a one|u {number}|a two") for number in range(3)]
    flights = [world.fly(fork) for fork in forks]
    assert [world.lines.flight(fork) for fork in forks] == flights
    world.lines.landed(forks[0], "failed")
    assert [world.lines.paused(fork) for fork in forks] == [True, False, False]
    for flight in flights:
        flight.cancel()


async def test_a_fork_goes_on_counting_failures() -> None:
    world = World()
    world.made(line("u go|a one"), "failed")
    world.now += FIRST_BACKOFF
    fork = line("u go|a one|u else|a two")
    world.made(fork, "failed")
    world.now += FIRST_BACKOFF
    assert world.lines.paused(fork), "the second failure in a row"
    world.now += FIRST_BACKOFF
    assert not world.lines.paused(fork)
    world.made(fork)
    world.made(fork, "failed")
    world.now += FIRST_BACKOFF
    assert not world.lines.paused(fork), "the first failure after a success"


def rewritten(number: int, answers: int) -> Line:
    """A client that puts a new message near the beginning at every turn."""
    past = "|".join(f"a answer {n}|u more" for n in range(answers))
    return line(f"u continue|a it is {number} o'clock|{past}")


async def test_a_client_that_rewrites_its_past_and_never_uses_a_snapshot_pauses() -> None:
    world = World()
    paused = [world.made(rewritten(number, 10 + number)) for number in range(UNUSED_LIMIT)]
    assert paused == [False] * (UNUSED_LIMIT - 1) + [True]
    assert world.lines.paused(rewritten(9, 30))
    assert not world.lines.paused(line("u continue|a another|u one"))
    world.now += UNUSED_PAUSE
    assert not world.lines.paused(rewritten(9, 30))


async def test_a_history_that_goes_on_where_a_request_ended_was_not_rewritten() -> None:
    """Rollouts in which everything but an early message is the same."""
    world = World()
    for number in range(3 * UNUSED_LIMIT):
        rollout = rewritten(number, 10)
        world.lines.seen(rollout.scope, rollout.links[-3])
        world.lines.seen(rollout.scope, rollout.links[-1])
        assert not world.lines.paused(rollout)
        assert not world.made(rollout)


async def test_a_request_that_is_sent_again_goes_on_nowhere() -> None:
    world = World()
    for number in range(UNUSED_LIMIT):
        one = rewritten(number, 10)
        world.lines.seen(one.scope, one.links[2])
        world.lines.seen(one.scope, one.links[-1])
        paused = world.made(one)
    assert paused


async def test_snapshots_that_are_used_never_pause() -> None:
    world = World()
    for number in range(3 * UNUSED_LIMIT):
        assert not world.made(rewritten(0, LAST + number))
        world.lines.used(rewritten(0, LAST + number))


async def test_many_conversations_that_begin_alike_get_snapshots() -> None:
    world = World()
    for number in range(3 * UNUSED_LIMIT):
        stranger = line(f"u continue|a ok|u more|a answer of {number}|u more|a ok")
        assert not world.lines.paused(stranger)
        assert not world.made(stranger)


async def test_the_walk_back_is_bounded() -> None:
    world = World()
    world.made(line("u go|a one"), "failed")
    longer = "u go|a one" + "|u more" * (WALK - 1)
    assert world.lines.paused(line(longer))
    assert not world.lines.paused(line(longer + "|u more"))
