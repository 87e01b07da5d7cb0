"""Conversations that change their API, their model or both: nothing is refused or lost, and prefixes stay."""

from __future__ import annotations

import pytest

from tests.requests.changing import Changing, play
from tests.sampling import sample

AT_ONCE = 10


@pytest.mark.parametrize("first", sample(range(0, 500, AT_ONCE), 2))
async def test_generated_conversations(first: int) -> None:
    world = Changing()
    played = [await play(world, seed) for seed in range(first, first + AT_ONCE)]
    assert sum(one.changes for one in played) >= AT_ONCE
    assert sum(one.put_back for one in played) >= AT_ONCE
    await world.close()
