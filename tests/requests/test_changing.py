"""Conversations that change their API, their model or both: nothing is refused or lost, and
prefixes stay."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace

from proxy.policy import Inject
from proxy.policy import Tools as ToolsPolicy
from tests import steps
from tests.requests.changing import Call, Changing, Said, play, received
from tests.requests.test_handler import POLICY
from tests.sampling import sample

AT_ONCE = 10


@pytest.mark.parametrize("first", sample(range(0, 500, AT_ONCE), 2))
async def test_generated_conversations(first: int) -> None:
    world = Changing()
    played = [await play(world, seed) for seed in range(first, first + AT_ONCE)]
    assert sum(one.changes for one in played) >= AT_ONCE
    assert sum(one.put_back for one in played) >= AT_ONCE
    await world.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_forbids_calls_has_each_thought_in_its_round(stream: bool) -> None:
    """The client saw the thinking of all rounds in one reply, and nothing moves out of this
    request."""
    world, large = Changing(), "all is well " * 5_000
    policy = replace(POLICY, tools=ToolsPolicy(inject=Inject.WHEN_OFFLOADING))
    history = [{"role": "user", "content": "Read."}, *steps.messages("toolu_1", large, "read_log")]
    body = {"model": "one", "max_tokens": 4_000, "stream": stream}
    body["tools"] = [steps.tool("messages", "read_log")]
    calls = [Call("toolu_2", "grep", {"pattern": "well"}), Call("toolu_3", "read_log", {})]
    world.model.script = [Said("", [call], f"thought {call.id}") for call in calls]
    client, _ = await world.post("messages", {**body, "messages": history}, policy, "acme-1")
    reply = received("messages", "one", client.body, stream, False)
    assert [block["type"] for block in reply.native[0]["content"]] == [
        "thinking",
        "thinking",
        "tool_use",
    ]
    result = steps.messages("toolu_3", "done")[1]
    forbidding = {
        **body,
        "messages": [*history, *reply.native, result],
        "tool_choice": {"type": "none"},
    }
    world.model.script = [Said("So.", ())]
    client, outcome = await world.post("messages", forbidding, policy, "acme-1")
    assert (client.status, world.model.refused, outcome.compacted) == (200, [], 0)
    assert "tool_choice" in outcome.words
    sent = json.loads(world.model.requests[-1].content)["messages"]
    kinds = [
        [block["type"] for block in one["content"]] for one in sent if one["role"] == "assistant"
    ]
    assert kinds == [["tool_use"], ["thinking", "tool_use"], ["thinking", "tool_use"]]
    assert large in json.dumps(sent)
    await world.close()
