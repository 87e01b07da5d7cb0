"""Clients that change what precedes a reply: the hidden round of the reply is put back all the
same."""

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
        [*made, {"role": "assistant", "content": "So it is."}, {"role": "user", "content": "Sure?"}]
        if last
        else made
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
    "Qwen Code --continue, another first message": lambda: [
        {"role": "user", "content": "Again. Find it."},
        *steps(),
    ],
    "CAMEL, prompts between older calls": lambda: [
        TASK,
        {"role": "user", "content": "Step 2."},
        *steps(),
    ],
    "without the text": lambda: [{"role": "user", "content": "x"}, *steps(None, last=False)],
    "OpenClaw, ids without their underscore": lambda: stripped(
        [{"role": "user", "content": "x"}, *steps()]
    ),
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
    assert sent[place + 2]["tool_calls"][-1]["id"].replace("_", "") == ID.replace("_", ""), (
        "directly before the reply"
    )


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
    await asked(
        world,
        [*history, {"role": "user", "content": "It is 12:01."}],
        grep,
        whole({"content": "It is 42."}),
    )
    later = [
        {"role": "user", "content": "other"},
        *steps(last=False),
        {"role": "assistant", "content": "It is 42."},
    ]
    sent = await asked(
        world, [*later, {"role": "user", "content": "Sure?"}], whole({"content": "Yes."})
    )
    assert '"grep"' in json.dumps(sent)
    sent = await asked(
        world, [*stripped(later), {"role": "user", "content": "Sure?"}], whole({"content": "Yes."})
    )
    assert '"grep"' in json.dumps(sent)
    other = [
        *later[:-1],
        {"role": "assistant", "content": "It is 43."},
        {"role": "user", "content": "Sure?"},
    ]
    assert '"grep"' not in json.dumps(await asked(world, other, whole({"content": "Yes."})))


# -- ids that others have, too ---------------------------------------------------------------------

SHORT: dict[str, Callable[[int], str]] = {
    "a counter": lambda number: f"call_{number}",
    "Kimi K2": lambda number: f"functions.look:{number}",
    "Mistral": lambda number: f"D681PevK{number}",
}


def step(id: str, result: str = "yes") -> list[Json]:
    return [
        {"role": "assistant", "content": None, "tool_calls": [call(id)]},
        {"role": "tool", "tool_call_id": id, "content": result},
    ]


def as_one(messages: list[Json]) -> list[Json]:
    """All steps as one reply with all calls."""
    made = [one for message in messages for one in message.get("tool_calls", ())]
    results = [message for message in messages if message["role"] == "tool"]
    return [{"role": "assistant", "content": None, "tool_calls": made}, *results]


OTHERWISE: dict[str, Callable[[list[Json]], list[Json]]] = {
    "another first message": lambda messages: [
        {"role": "user", "content": "Again. Find it."},
        *messages[1:],
    ],
    "a message fewer": lambda messages: [*messages[:1], *messages[2:]],
    "steps as one reply": lambda messages: [messages[0], *as_one(messages[2:])],
}


def found(sent: list[Json]) -> bool:
    """Whether our search and its answer are there, the one directly before the other."""
    places = [at for at, one in enumerate(sent) if '"grep"' in json.dumps(one)]
    assert len(places) <= 1, "never twice"
    return bool(places) and sent[places[0] + 1]["role"] == "tool"


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("how", OTHERWISE)
@pytest.mark.parametrize("style", SHORT)
async def test_a_call_with_a_short_id_is_found_with_the_call_before_it(
    style: str, how: str, beside: bool
) -> None:
    world, id = world_with_tools(), SHORT[style]
    first = [TASK, {"role": "user", "content": "It is 12:01."}, *step(id(1)), *step(id(2))]
    ours, theirs = called("grep", '{"pattern": "x"}', id=id(3)), call(id(4))
    rounds = [[ours, theirs]] if beside else [[ours], [theirs]]
    await asked(world, first, *(whole(calls(*made), "tool_calls") for made in rounds))
    later = [*OTHERWISE[how]([*first, *step(id(4))]), {"role": "user", "content": "Sure?"}]
    for question in ("Sure?", "Really?"):
        later = [*later[:-1], {"role": "user", "content": question}]
        assert found(await asked(world, later, whole({"content": "Yes."})))


async def test_of_two_rounds_behind_the_same_short_ids_none_is_put_back() -> None:
    world = world_with_tools()
    for day, pattern in (("Monday", "x"), ("Tuesday", "y")):
        history = [{"role": "user", "content": f"It is {day}."}, *step("call_1")]
        ours = called("grep", json.dumps({"pattern": pattern}), id="call_2")
        await asked(
            world, history, *(whole(calls(made), "tool_calls") for made in (ours, call("call_3")))
        )
        assert found(await asked(world, [*history, *step("call_3")], whole({"content": "Yes."}))), (
            "as it was"
        )
    other = [TASK, *step("call_1"), *step("call_3")]
    assert not found(await asked(world, other, whole({"content": "Yes."})))


@pytest.mark.parametrize("first", ["the reply that hid something", "the one that hid nothing"])
async def test_a_reply_that_hid_nothing_keeps_others_with_its_short_ids_from_being_taken_for_it(
    first: str,
) -> None:
    world = world_with_tools()
    ours, theirs = (
        called("grep", '{"pattern": "x"}', id="call_2"),
        whole(calls(call("call_3")), "tool_calls"),
    )
    hides = [TASK, *step("call_1", "this")]
    bare = [{"role": "user", "content": "Another task."}, *step("call_1", "that")]
    for history in (hides, bare) if first.endswith("something") else (bare, hides):
        await asked(
            world,
            history,
            *([whole(calls(ours), "tool_calls")] if history is hides else []),
            theirs,
        )
    for task in ("Another task.", "Another task, later."):
        later = [{"role": "user", "content": task}, *bare[1:], *step("call_3")]
        assert not found(await asked(world, later, whole({"content": "Yes."})))
    assert found(await asked(world, [*hides, *step("call_3")], whole({"content": "Yes."}))), (
        "as it was"
    )


async def test_steps_as_one_reply_keep_the_rounds_of_a_client_that_gets_our_tools_only_at_an_event() -> (
    None
):
    world = World()
    world.policy = replace(POLICY, tools=ToolsPolicy(inject=Inject.WHEN_OFFLOADING))
    history = [TASK, *step("call_1", "word " * 5_000)]
    ours = called("grep", '{"pattern": "x"}', id="call_2")
    await asked(world, history, whole(calls(ours, call("call_3")), "tool_calls"))
    later = [TASK, *as_one([*history[1:], *step("call_3")])]
    assert found(await asked(world, later, whole({"content": "Yes."})))


# -- another model ---------------------------------------------------------------------------------


@pytest.mark.parametrize("beside", [False, True])
async def test_another_model_gets_the_calls_and_answers_of_a_round_and_not_its_thinking(
    beside: bool,
) -> None:
    world = world_with_tools()
    ours, theirs = called("grep", '{"pattern": "x"}', id="h"), call(ID)
    rounds = [[ours, theirs]] if beside else [[ours], [theirs]]
    thought = {"reasoning_details": [{"type": "reasoning.encrypted", "data": "signed"}]}
    await asked(
        world, [TASK], *(whole({**calls(*made), **thought}, "tool_calls") for made in rounds)
    )
    sent = {}
    for model in ("m", "other"):
        history = [TASK, *step(ID), {"role": "user", "content": "Sure?"}]
        body = json.dumps({"model": model, "messages": history}).encode()
        await world.ask(body, ScriptedReply(whole({"content": "Yes."})))
        sent[model] = json.loads(world.sent[-1])["messages"]
        assert found(sent[model])
    assert "signed" in json.dumps(sent["m"]) and "signed" not in json.dumps(sent["other"])
    assert sent["other"][3]["tool_calls"] == [call(ID)], "the client's reply is behind it"
