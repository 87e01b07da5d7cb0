"""Conversations that change their API, their model or both: nothing is refused or lost, and
prefixes stay."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace

from proxy.policy import Inject
from proxy.policy import Tools as ToolsPolicy
from proxy.requests.records import Records
from tests import steps
from tests.requests.changing import HISTORY, OF_API, Call, Changing, Said, play, received
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


@pytest.mark.parametrize("api", ["chat", "messages", "responses"])
async def test_of_a_conversation_that_goes_on_only_new_replies_are_looked_up(
    api: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hidden rounds return to their places at every request, and a new process sends the same."""
    world = Changing()
    looked_up: list[int] = []
    rounds = Records.rounds

    async def counted(self: Records, replies: Any, model: str, before: Any) -> Any:
        looked_up.append(len(replies))
        return await rounds(self, replies, model, before)

    monkeypatch.setattr(Records, "rounds", counted)
    policy = replace(POLICY, tools=ToolsPolicy(inject=Inject.ALWAYS))
    history: list[Any] = [{"role": "user", "content": "Read. " + "all is well " * 500}]
    for number in range(6):
        ours = Call(f"call_{number}a", "grep", {"pattern": f"needle-{number}!"})
        theirs = Call(f"call_{number}b", "read_log", {"path": f"/log/{number}"})
        said = [Said("", [ours]), Said("", [theirs])]
        body = {"model": "one", **OF_API[api], "tools": [steps.tool(api, "read_log")]}
        body[HISTORY[api]] = history
        cold = Changing()
        cold.store.records = dict(world.store.records)
        sent = list[list[bytes]]()
        for one in (cold, world):
            one.model.script = list(said)
            client, _ = await one.post(api, body, policy, "acme-1")
            sent.append([request.content for request in one.model.requests[-2:]])
        assert sent[0][0] == sent[1][0]
        assert all(f"needle-{before}!".encode() in sent[1][0] for before in range(number))
        reply = received(api, "one", client.body, False, False)
        history = [*history, *reply.native, *steps.STEP[api](theirs.id, "done")[1:]]
        await cold.close()
    assert looked_up[1::2] == [0, 1, 1, 1, 1, 1]
    assert looked_up[::2] == [0, 1, 2, 3, 4, 5]
    await world.close()
