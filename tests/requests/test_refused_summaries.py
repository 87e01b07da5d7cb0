"""If upstream refuses a summary call that continues the conversation, the originals are used, and that is learned."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace

from proxy.plan.summary import SummaryAnswer
from proxy.policy import Wait
from proxy.requests.prepare import rendered
from proxy.requests.snapshots import Snapshots
from proxy.requests.turn_io import ask as asked_upstream
from proxy.requests.windows import FORGOTTEN_AFTER
from proxy.upstream.client import UpstreamRequest
from proxy.upstream.headers import Headers
from tests.requests.planning import CUT, knowing, planned
from tests.requests.scripted import JSON, ScriptedReply, ScriptedUpstream
from tests.requests.test_snapshots import RECORD, Scripted, ask, idle, policy
from tests.requests.test_summarizer import World

ORDER = {"object": "error", "message": "Unexpected role 'user' after role 'tool'", "code": "3230"}
REFUSED = SummaryAnswer(400, refused=True)


@pytest.mark.parametrize(
    ("status", "body", "refused"),
    [
        (400, ORDER, True),
        (404, {"error": {"message": "No endpoints found that support tool use", "code": 404}}, True),
        (200, {"error": {"message": "no tools here", "code": 400}}, True),
        (429, {"error": {"message": "slow down"}}, False),
        (400, {"error": {"message": "filtered", "code": "content_filter"}}, False),
        (400, {"error": {"message": "prompt is too long"}}, False),
        (200, {"choices": [{"message": {"content": "hi"}}]}, False),
        (200, {"choices": []}, False),
    ],
)
async def test_which_answers_are_refusals_of_the_form(status: int, body: object, refused: bool) -> None:
    history, _ = await planned(CUT)
    upstream = ScriptedUpstream(ScriptedReply(json.dumps(body).encode(), status=status, headers=[JSON]))
    times = dict.fromkeys(("connect_timeout", "first_byte_timeout", "idle_timeout"), 1.0)
    request = UpstreamRequest(method="POST", url="http://up", headers=Headers(), content=b"", **times)
    answer = await asked_upstream(upstream, request, history.dialect)  # type: ignore[arg-type]
    assert answer.refused is refused


async def test_refused_ride_is_made_from_originals_at_once() -> None:
    world, rode = World(REFUSED), list[bool]()
    assert await world.made(rode=rode.append)
    assert [next(iter(body)) for body in world.asked] == ["ride", "alone"] and rode == [False]
    assert [fault for _, _, fault in world.reported] == [""]
    assert await world.made(key="b", said="d", rode=rode.append) and rode == [False, True]


async def test_refused_originals_fail_and_teach_nothing() -> None:
    world, rode = World(REFUSED, REFUSED), list[bool]()
    assert await world.made(rode=rode.append) is None
    assert rode == [] and world.reported[0][2] == "upstream answered 400"


async def test_refused_rides_are_believed_for_a_while() -> None:
    now = [1_000.0]
    memory = knowing(clock=lambda: now[0])
    history, reader = await planned(CUT, policy(wait=Wait.ALWAYS))
    world = Scripted(RECORD)
    snapshots = Snapshots(world, reader, memory)  # type: ignore[arg-type]

    async def rides() -> bool:
        await snapshots.complete(rendered(history, None, {}, reader), world, "tenant", ask, idle)  # type: ignore[arg-type]
        return world.waited[-1].riding is not None

    for _ in range(2):
        assert await rides()
        world.waited[-1].rode(False)
    assert not await rides()
    other = await planned(CUT, replace(history.policy), model="another")
    ready = rendered(other[0], None, {}, other[1])
    await snapshots.complete(ready, world, "tenant", ask, idle)  # type: ignore[arg-type]
    assert world.waited[-1].riding is not None
    now[0] += FORGOTTEN_AFTER
    assert await rides()
    world.waited[-1].rode(True)
    assert await rides()
