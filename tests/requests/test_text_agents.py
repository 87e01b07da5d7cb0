"""Agents whose requests bring no tools, because they describe them in the prompt and call them in
text."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from msgspec.structs import replace

from proxy.plan.texts import ResultPreset
from proxy.policy import Inject, Offload, Policy
from proxy.policy import Tools as ToolsPolicy
from proxy.requests.planned import Rendered
from proxy.tokens import Tokens
from tests.dialects.chat.turns import (
    DONE,
    ROLE,
    called,
    calls,
    chunk,
    folded,
    read,
    stream,
    text,
    usage,
    whole,
)
from tests.requests.planning import Json, planned
from tests.requests.scripted import ScriptedReply
from tests.requests.test_handler import World
from tests.requests.test_handler import world as world
from tests.transcripts import Run, load, needed, requests_of

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


LONG = [
    *TASK,
    *observed(1, 1_000),
    *(one for number in range(2, 12) for one in observed(number, 5)),
]
"""Its first result is large, and little follows it."""


def body(messages: list[Json], **members: Any) -> bytes:
    return json.dumps(
        {"model": "m", "messages": messages, "stop": ["Observation:"], **members}
    ).encode()


def names_of(request: Json) -> list[str]:
    return [tool["function"]["name"] for tool in request.get("tools", ())]


# -- the request -----------------------------------------------------------------------------------


@pytest.mark.parametrize("messages", [TASK, [*TASK, *observed(1)]], ids=["first", "second"])
@pytest.mark.parametrize("tools", [{}, {"tools": []}], ids=["none", "empty"])
async def test_each_request_has_our_tools_and_no_choice_of_one(
    messages: list[Json], tools: Json, world: World
) -> None:
    world.policy = AGENTS
    await world.ask(body(messages, **tools), ScriptedReply(whole({"content": "It is 42."})))
    sent = json.loads(world.sent[0])
    assert names_of(sent) == OURS
    del sent["tools"]
    assert sent == {
        key: value for key, value in json.loads(body(messages)).items() if key != "tools"
    }


@pytest.mark.parametrize(
    "policy",
    [
        Policy(),
        replace(AGENTS, tools=ToolsPolicy(inject=Inject.WHEN_OFFLOADING)),
        replace(AGENTS, tools=ToolsPolicy(inject=Inject.NEVER)),
    ],
    ids=["no results", "when offloading", "never"],
)
async def test_other_policies_leave_such_requests_as_they_come(
    policy: Policy, world: World
) -> None:
    world.policy = policy
    await world.ask(
        asked := body([*TASK, *observed(1)]), ScriptedReply(whole({"content": "It is 42."}))
    )
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
    """With our tools added at the first event, that event would have to pay for the whole
    prompt."""
    messages = [{"role": "system", "content": "tool " * 3_000}, *LONG[1:]]
    made, _ = await planned(messages, AGENTS)
    assert made.history.tokens < 35_000 and made.plan.moves.keys() == {3}
    later = replace(AGENTS, tools=ToolsPolicy(inject=Inject.WHEN_OFFLOADING))
    made, _ = await planned(messages, later)
    assert made.plan.empty


# -- the reply -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "said",
    [
        "<code>\nprint(read_file('a.log'))\n</code>",
        '{"thought": "I read it.", "code": "print(read_file(1))"}',
        '{"name": "read_file", "arguments": {"path": "a.log"}}',
        '<tool_call>\n{"name": "grep", "arguments": {"pattern": "x"}}\n</tool_call>',
        "<read_file>\n<path>a.log</path>\n</read_file>",
        "```read_file\na.log\n```",
    ],
)
async def test_what_such_a_model_writes_reaches_its_client(said: str, world: World) -> None:
    """Calls in text, also of tools that are called like ours. Streamed as upstream sent it."""
    world.policy = AGENTS
    pieces = [chunk({"content": said[at : at + 3]}) for at in range(0, len(said), 3)]
    reply = stream(ROLE, *pieces, chunk({}, "stop"), chunk(usage=usage(100, 10)), DONE)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    client, outcome = await world.ask(body(TASK, **options), ScriptedReply(reply))
    assert text(folded(client.body)) == said and outcome.rounds == 0
    client, outcome = await world.ask(body(TASK), ScriptedReply(whole({"content": said})))
    assert text(read(client.body)) == said and outcome.rounds == 0


async def test_prose_is_streamed_byte_for_byte(world: World) -> None:
    world.policy = AGENTS
    reply = stream(
        ROLE, *(chunk({"content": word}) for word in ("I ", "know", ".")), chunk({}, "stop"), DONE
    )
    options = {"stream": True, "stream_options": {"include_usage": True}}
    client, _ = await world.ask(body(TASK, **options), ScriptedReply(reply[:70], reply[70:]))
    assert client.body == reply


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_call_of_ours_is_answered_inside_and_comes_back_later(
    streamed: bool, world: World
) -> None:
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
    assert [names_of(one) for one in sent] == [OURS, OURS] and not any(
        "tool_choice" in one for one in sent
    )
    assert "port 1 is open" in sent[1]["messages"][-1]["content"]
    again = [
        *LONG,
        {"role": "assistant", "content": "Port 1."},
        {"role": "user", "content": "Observation:\nok"},
    ]
    _, outcome = await world.ask(body(again), ScriptedReply(whole({"content": "Done."})))
    assert outcome.reinserted == 1 and "offload_grep" in world.sent[2].decode()


# -- recorded runs ---------------------------------------------------------------------------------


def in_text(run: Run) -> list[tuple[list[Json], Json]]:
    """The run's requests as a client would have made them that describes its tools in its
    prompt."""
    return [
        ([*map(told, messages)], told(reply)) for messages, reply in requests_of(run) if messages
    ]


def told(message: Json) -> Json:
    said = message.get("content") or ""
    for call in message.get("tool_calls") or ():
        said += f"\n<code>\n{call['function']['name']}({call['function']['arguments']})\n</code>"
    if message["role"] == "tool":
        return {"role": "user", "content": f"Observation:\n{said}"}
    return {"role": message["role"], "content": said}


@needed
@pytest.mark.parametrize("source", ["livemcpbench", "super-gpt4o"])
async def test_recorded_runs_in_text_keep_their_tools_and_their_prefix_between_events(
    source: str,
) -> None:
    run = min(load(30_000, source), key=lambda one: one.total_tokens)
    counter, sent, events = Tokens(), list[Json](), list[int]()
    for messages, _ in in_text(run):
        made, reader = await planned(messages, AGENTS, counter=counter)
        sent.append(json.loads(Rendered.of(made, None, {}, reader).turn().request()))
        events.append(len(made.plan.events))
    assert all(names_of(one) == OURS for one in sent) and all(
        one["tools"] == sent[0]["tools"] for one in sent
    )
    for (one, other), (before, after) in zip(pairwise(sent), pairwise(events), strict=True):
        assert before != after or other["messages"][: len(one["messages"])] == one["messages"]
    assert events == sorted(events) and 1 <= events[-1] <= 6
