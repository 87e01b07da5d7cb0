"""The room for the reply is a constant: no plan depends on a request's own limit, which is lowered where it must be."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from proxy.plan.plan import WINDOW_MARGIN
from proxy.policy import Mode, Policy, Upstream
from proxy.requests.planned import OUR_TOOLS_TOKENS
from proxy.requests.rendered import Rendered
from tests.requests.planning import LAST, MOVING, OFFLOAD, POLICY, SHORT, USER, Json, planned, step


@pytest.mark.parametrize(
    ("window", "room"), [(None, 0), (4_000, 1_000), (32_000, 4_000), (128_000, 16_000), (10**6, 16_000)]
)
def test_the_room_for_the_reply_is_an_eighth_of_the_window(window: int | None, room: int) -> None:
    assert Upstream().reply_room(window) == room


@given(st.integers(0, 10**6), st.integers(3_000, 60_000), st.sampled_from(list(Mode)[1:]), st.integers(0, 2**32))
@settings(max_examples=25)
async def test_no_plan_depends_on_the_requests_own_limit(limit: int, window: int, mode: Mode, seed: int) -> None:
    chance = random.Random(seed)
    steps = (step(number, chance.randrange(3_000), chance.randrange(6_000)) for number in range(12))
    history = [*SHORT, *(one for made in steps for one in made), LAST]
    policy = Policy(offload=replace(OFFLOAD, mode=mode))
    plans = [(await planned(history, policy, window, max_tokens=own))[0].plan for own in (limit, 500)]
    assert plans[0] == plans[1]


# -- leading system messages ------------------------------------------------------------------------------------------


def growing(turns: int, seed: int) -> list[list[Json]]:
    """The requests of a client that rewrites its system prompt by hundreds of words on every turn."""
    chance = random.Random(seed)
    history: list[Json] = [USER]
    requests = []
    for number in range(turns):
        system: Json = {"role": "system", "content": "w " * chance.randrange(300, 500)}
        requests.append([system, *history])
        history = [*history, *step(number, 300, 500)]
    return requests


@pytest.mark.parametrize("window", [None, 24_000])
@pytest.mark.parametrize("mode", [Mode.COMPACT, Mode.COMPRESS, Mode.AUTO])
async def test_a_system_prompt_that_changes_changes_no_decision(mode: Mode, window: int | None) -> None:
    """Neither a summary more nor a prefix more that changes behind the system message."""
    offload = replace(OFFLOAD, mode=mode, max_total_tokens=10_000, cached_read=0.1, cache_write=1.25)
    requests = growing(60, 3)[9::10]
    plans = [(await planned(one, Policy(offload=offload), window))[0].plan for one in requests]
    steady = [(await planned([requests[0][0], *one[1:]], Policy(offload=offload), window))[0].plan for one in requests]
    assert plans[-1].events
    for plan, same in zip(plans, steady, strict=True):
        assert (plan.moves, plan.boundaries, plan.events) == (same.moves, same.boundaries, same.events)
    for earlier, later in pairwise(plans):
        assert later.events[: len(earlier.events)] == earlier.events
        assert later.boundaries[: len(earlier.boundaries)] == earlier.boundaries


# -- the limit upstream -----------------------------------------------------------------------------------------------


async def limit_sent(messages: list[Json], window: int | None, **limits: int) -> tuple[int | None, dict[str, Any]]:
    history, reader = await planned(messages, POLICY, window, **limits)
    ready = Rendered.of(history, None, {}, reader)
    return history.reply_limit(ready.tokens), json.loads(ready.turn().request())


async def test_a_limit_that_does_not_fit_beside_the_planned_prompt_is_lowered() -> None:
    window = 20_000
    history, reader = await planned(MOVING, POLICY, window, max_tokens=19_000)
    tokens = Rendered.of(history, None, {}, reader).tokens
    left = int(window * (1 - WINDOW_MARGIN)) - tokens - OUR_TOOLS_TOKENS
    assert history.room.reply < left < 19_000
    for field in ("max_tokens", "max_completion_tokens"):
        limit, sent = await limit_sent(MOVING, window, **{field: 19_000})
        assert limit == sent[field] == left
        assert await limit_sent(MOVING, window, **{field: left}) == (None, sent)
    limit, sent = await limit_sent(MOVING, None, max_tokens=19_000)
    assert (limit, sent["max_tokens"]) == (None, 19_000)


async def test_limits_are_in_the_tokens_that_upstream_counts() -> None:
    """The window is given in ours; where upstream counts twice as many, it has twice as many left."""
    history, _ = await planned(SHORT, POLICY, 10_000, max_tokens=15_000)
    double = replace(history, factor=2.0)
    left = history.reply_left(history.tokens)
    assert left is not None and history.exceeds(refused=False)
    assert double.reply_left(history.tokens) == 2 * left
    assert not double.exceeds(refused=False) and double.reply_limit(history.tokens) is None
    assert double.needs(100) == 2 * (100 + OUR_TOOLS_TOKENS) + 15_000


async def test_a_request_that_is_not_changed_is_lowered_only_if_upstream_would_refuse_it() -> None:
    async def exceeds(limit: int, *, refused: bool) -> bool:
        return (await planned(SHORT, POLICY, 10_000, max_tokens=limit))[0].exceeds(refused=refused)

    tokens = (await planned(SHORT))[0].tokens
    assert not await exceeds(10_000 - tokens, refused=False)
    assert await exceeds(10_001 - tokens, refused=False)
    assert await exceeds(9_700, refused=True), "our count may be a little low"
    assert not await exceeds(9_000, refused=True)
    assert not await exceeds(0, refused=True)
