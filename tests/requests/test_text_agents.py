"""Agents whose requests bring no tools, because they describe them in the prompt and call them in text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace

from proxy.plan.texts import ResultPreset
from proxy.policy import Inject, Offload, Policy
from proxy.policy import Tools as ToolsPolicy
from proxy.requests.planned import Rendered
from tests.dialects.chat.turns import DONE, ROLE, called, calls, chunk, folded, read, stream, text, whole
from tests.requests.planning import Json, planned
from tests.requests.scripted import ScriptedReply
from tests.requests.test_handler import World
from tests.requests.test_handler import world as world

AGENTS = Policy(offload=Offload(results=(ResultPreset.SMOLAGENTS,)))
"""The default policy, but for the name of such a client."""
OURS = ["offload_grep", "offload_read_file"]
TASK: list[Json] = [
    {"role": "system", "content": "You have these tools: def read_file(path: str) -> str"},
    {"role": "user", "content": "New task:\nWhich ports are open?"},
]


def observed(number: int, size: int = 500) -> list[Json]:
    said = {"role": "assistant", "content": f"<code>\nprint(read_file('{number}.log'))\n</code>"}
    return [said, {"role": "user", "content": "Observation:\n" + f"port {number} is open\n" * size}]


LONG = [*TASK, *observed(1, 1_000), *(one for number in range(2, 12) for one in observed(number, 5))]
"""Its first result is large, and little follows it."""


def body(messages: list[Json], **members: Any) -> bytes:
    return json.dumps({"model": "m", "messages": messages, "stop": ["Observation:"], **members}).encode()


def names_of(request: Json) -> list[str]:
    return [tool["function"]["name"] for tool in request.get("tools", ())]


# -- the request ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("messages", [TASK, [*TASK, *observed(1)]], ids=["first", "second"])
@pytest.mark.parametrize("tools", [{}, {"tools": []}], ids=["none", "empty"])
async def test_each_request_has_our_tools_and_no_choice_of_one(messages: list[Json], tools: Json, world: World) -> None:
    world.policy = AGENTS
    await world.ask(body(messages, **tools), ScriptedReply(whole({"content": "It is 42."})))
    sent = json.loads(world.sent[0])
    assert names_of(sent) == OURS
    del sent["tools"]
    assert sent == {key: value for key, value in json.loads(body(messages)).items() if key != "tools"}


@pytest.mark.parametrize(
    "policy",
    [
        Policy(),
        replace(AGENTS, tools=ToolsPolicy(inject=Inject.WHEN_OFFLOADING)),
        replace(AGENTS, tools=ToolsPolicy(inject=Inject.NEVER)),
    ],
    ids=["no results", "when offloading", "never"],
)
async def test_other_policies_leave_such_requests_as_they_come(policy: Policy, world: World) -> None:
    world.policy = policy
    await world.ask(asked := body([*TASK, *observed(1)]), ScriptedReply(whole({"content": "It is 42."})))
    assert world.sent == [asked]


async def test_a_client_that_defines_its_tools_gets_names_beside_these() -> None:
    tools = [{"type": "function", "function": {"name": "search"}}]
    made, reader = await planned(TASK, AGENTS, tools=tools)
    assert names_of(json.loads(Rendered.of(made, None, {}, reader).turn().request())) == [
        "search",
        "grep",
        "read_file",
    ]


async def test_results_move_early_with_our_tools_from_the_start() -> None:
    """With our tools added at the first event, that event would have to pay for the whole prompt."""
    messages = [{"role": "system", "content": "tool " * 3_000}, *LONG[1:]]
    made, _ = await planned(messages, AGENTS)
    assert made.history.tokens < 35_000 and made.plan.moves.keys() == {3}
    later = replace(AGENTS, tools=ToolsPolicy(inject=Inject.WHEN_OFFLOADING))
    made, _ = await planned(messages, later)
    assert made.plan.empty


# -- the reply --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_call_of_ours_is_answered_inside_and_comes_back_later(streamed: bool, world: World) -> None:
    world.policy = AGENTS
    call = calls(called("offload_grep", '{"pattern": "port 1 is"}'))
    if streamed:
        replies = [stream(ROLE, chunk(call), chunk({}, "tool_calls"), DONE)]
        replies += [stream(ROLE, chunk({"content": "Port 1."}), chunk({}, "stop"), DONE)]
    else:
        replies = [whole(call, "tool_calls"), whole({"content": "Port 1."})]
    client, outcome = await world.ask(body(LONG, stream=streamed), *map(ScriptedReply, replies))
    reply = folded(client.body) if streamed else read(client.body)
    assert text(reply) == "Port 1." and b"offload_grep" not in client.body and outcome.rounds == 1
    sent = [json.loads(one) for one in world.sent]
    assert [names_of(one) for one in sent] == [OURS, OURS] and not any("tool_choice" in one for one in sent)
    assert "port 1 is open" in sent[1]["messages"][-1]["content"]
    again = [*LONG, {"role": "assistant", "content": "Port 1."}, {"role": "user", "content": "Observation:\nok"}]
    _, outcome = await world.ask(body(again), ScriptedReply(whole({"content": "Done."})))
    assert outcome.reinserted == 1 and "offload_grep" in world.sent[2].decode()
