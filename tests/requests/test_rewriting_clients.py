"""Clients that change what precedes a reply: the hidden round of the reply is put back all the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from proxy.policy import Inject
from proxy.policy import Tools as ToolsPolicy
from tests.dialects.chat.turns import called, calls, whole
from tests.requests.scripted import ScriptedReply
from tests.requests.test_handler import POLICY, World

Json = dict[str, Any]

ID, LATER = "call_Zk3v9QmT1xYw8RbN2cLh5PdA", "call_b7GfKq2Wn9sXe4TvUy1JzRm6"


def call(id: str, name: str = "look") -> Json:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": '{"q":1}'}}


def steps(text: str | None = "I look.", *, last: bool = True) -> list[Json]:
    """A turn with a hidden round before its call, as its client saw it."""
    made: list[Json] = [
        {"role": "assistant", "content": text, "tool_calls": [call(ID)]},
        {"role": "tool", "tool_call_id": ID, "content": "yes"},
    ]
    return (
        [*made, {"role": "assistant", "content": "So it is."}, {"role": "user", "content": "Sure?"}] if last else made
    )


def merged() -> list[Json]:
    """Mastra and VoltAgent send a turn's steps as one reply."""
    results = [{"role": "tool", "tool_call_id": id, "content": "yes"} for id in (LATER, ID)]
    return [{"role": "assistant", "content": "", "tool_calls": [call(LATER), call(ID)]}, *results]


def stripped(messages: list[Json]) -> list[Json]:
    made: list[Json] = json.loads(json.dumps(messages).replace("call_", "call"))
    return made


TASK: Json = {"role": "user", "content": "Find it."}
CHANGED: dict[str, Callable[[], list[Json]]] = {
    "Qwen Code --continue, another first message": lambda: [{"role": "user", "content": "Again. Find it."}, *steps()],
    "CAMEL, prompts between older calls": lambda: [TASK, {"role": "user", "content": "Step 2."}, *steps()],
    "without the text": lambda: [{"role": "user", "content": "x"}, *steps(None, last=False)],
    "OpenClaw, ids without their underscore": lambda: stripped([{"role": "user", "content": "x"}, *steps()]),
    "Mastra, steps as one reply": lambda: [{"role": "user", "content": "x"}, *merged()],
}


async def asked(world: World, messages: list[Json], *replies: bytes) -> list[Json]:
    """Send the messages; returns those that upstream got last."""
    body = json.dumps({"model": "m", "messages": messages}).encode()
    client, outcome = await world.ask(body, *map(ScriptedReply, replies))
    assert client.status == outcome.status == 200
    sent: list[Json] = json.loads(world.sent[-1])["messages"]
    return sent


def world_with_tools() -> World:
    world = World()
    world.policy = replace(POLICY, tools=ToolsPolicy(inject=Inject.ALWAYS))
    return world


async def with_hidden_round(world: World, messages: list[Json]) -> None:
    grep = whole(calls(called("grep", '{"pattern": "x"}', id="h")), "tool_calls")
    theirs = {"content": "I look.", "tool_calls": [call(ID)]}
    await asked(world, messages, grep, whole(theirs, "tool_calls"))


@pytest.mark.parametrize("how", CHANGED)
async def test_a_reply_is_found_by_its_call_alone(how: str) -> None:
    world = world_with_tools()
    await with_hidden_round(world, [TASK])
    sent = await asked(world, CHANGED[how](), whole({"content": "It is 42."}))
    hidden = [one for one in sent if '"grep"' in json.dumps(one) or one.get("tool_call_id") == "h"]
    assert [one["role"] for one in hidden] == ["assistant", "tool"]
    place = sent.index(hidden[0])
    assert sent[place + 2]["tool_calls"][-1]["id"].replace("_", "") == ID.replace("_", ""), "directly before the reply"


async def test_a_message_at_the_end_that_is_gone_next_time() -> None:
    """OpenClaw sends one with every request."""
    world = world_with_tools()
    await with_hidden_round(world, [TASK, {"role": "user", "content": "It is 12:01."}])
    sent = await asked(world, [TASK, *steps()], whole({"content": "It is 42."}))
    assert '"grep"' in json.dumps(sent)


async def test_a_reply_without_its_text_is_found_by_the_history_before_it() -> None:
    """Its call's id is one that every server gives."""
    world = world_with_tools()
    grep = whole(calls(called("grep", '{"pattern": "x"}', id="h")), "tool_calls")
    one = {"content": "Hm.", "tool_calls": [called("look", id="call_0")]}
    await asked(world, [TASK], grep, whole(one, "tool_calls"))
    history = [
        TASK,
        {"role": "assistant", **one, "content": None},
        {"role": "tool", "tool_call_id": "call_0", "content": "yes"},
    ]
    assert '"grep"' in json.dumps(await asked(world, history, whole({"content": "It is 42."})))


async def test_a_text_behind_a_call_is_found_without_what_came_before() -> None:
    world = world_with_tools()
    history = [TASK, *steps(last=False)]
    grep = whole(calls(called("grep", '{"pattern": "x"}', id="h")), "tool_calls")
    await asked(world, [*history, {"role": "user", "content": "It is 12:01."}], grep, whole({"content": "It is 42."}))
    later = [{"role": "user", "content": "other"}, *steps(last=False), {"role": "assistant", "content": "It is 42."}]
    sent = await asked(world, [*later, {"role": "user", "content": "Sure?"}], whole({"content": "Yes."}))
    assert '"grep"' in json.dumps(sent)
    sent = await asked(world, [*stripped(later), {"role": "user", "content": "Sure?"}], whole({"content": "Yes."}))
    assert '"grep"' in json.dumps(sent)
    other = [*later[:-1], {"role": "assistant", "content": "It is 43."}, {"role": "user", "content": "Sure?"}]
    assert '"grep"' not in json.dumps(await asked(world, other, whole({"content": "Yes."})))
