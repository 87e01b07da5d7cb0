"""Half a surrogate pair, as JavaScript's `slice` leaves it, in every text that goes into a
record."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from msgspec.structs import replace

from proxy.plan.plan import Role
from proxy.plan.summary import Section, mentions
from proxy.policy import Inject
from proxy.policy import Tools as ToolsPolicy
from proxy.requests.summary_writer import Snapshot
from tests.dialects.chat.turns import called, calls, read, whole
from tests.requests.planning import CUT, planned
from tests.requests.scripted import ScriptedReply
from tests.requests.test_handler import POLICY, World
from tests.requests.test_summaries import World as Summaries
from tests.requests.test_summary_writer import World as Writer

HALF = "id \ud83d-7341"


async def test_a_reply_with_half_a_character_is_remembered() -> None:
    world = World()
    world.policy = replace(POLICY, tools=ToolsPolicy(inject=Inject.ALWAYS))
    history: list[dict[str, Any]] = [{"role": "user", "content": "Find it."}]
    grep = whole(calls(called("grep", '{"pattern": "x"}', id="h")), "tool_calls")
    made = called("look", json.dumps({"q": HALF}), id="call_0")
    last = whole({"content": HALF, "tool_calls": [made]}, "tool_calls")
    body = {"model": "m", "messages": history}
    client, outcome = await world.ask(
        json.dumps(body).encode(), ScriptedReply(grep), ScriptedReply(last)
    )
    assert outcome.status == 200
    assert read(client.body)["message"]["content"] == HALF
    # as clients rewrite it
    reply = {"role": "assistant", **read(client.body)["message"], "content": None}
    history += [reply, {"role": "tool", "tool_call_id": "call_0", "content": "yes"}]
    await world.ask(json.dumps(body).encode(), ScriptedReply(whole({"content": "It is 42."})))
    assert b'"grep"' in json.dumps(json.loads(world.sent[-1])["messages"]).encode()


async def test_a_hidden_round_with_half_a_character_is_put_back() -> None:
    world = World()
    world.policy = replace(POLICY, tools=ToolsPolicy(inject=Inject.ALWAYS))
    history: list[dict[str, Any]] = [{"role": "user", "content": "Find it."}]
    grep = {"content": HALF, **calls(called("grep", '{"pattern": "x"}', id="h"))}
    body = {"model": "m", "messages": history}
    last = whole({"content": "It is 42."})
    client, _ = await world.ask(
        json.dumps(body).encode(), ScriptedReply(whole(grep, "tool_calls")), ScriptedReply(last)
    )
    sent = json.loads(world.sent[-1])["messages"]
    history += [
        {"role": "assistant", **read(client.body)["message"]},
        {"role": "user", "content": "Sure?"},
    ]
    await world.ask(json.dumps(body).encode(), ScriptedReply(last))
    assert json.loads(world.sent[-1])["messages"][: len(sent)] == sent
    assert sent[1]["content"] == HALF


async def test_a_rewritten_reply_with_backslashes_gets_its_round_with_half_a_character() -> None:
    world = World()
    world.policy = replace(POLICY, tools=ToolsPolicy(inject=Inject.ALWAYS))
    history: list[dict[str, Any]] = [{"role": "user", "content": "Find it."}]
    grep = {"content": HALF, **calls(called("grep", '{"pattern": "x"}', id="h"))}
    made = called("look", json.dumps({"path": "C:\\temp"}), id="call_0")
    last = {"content": "I look into C:\\temp.", "tool_calls": [made]}
    body = {"model": "m", "messages": history}
    client, _ = await world.ask(
        json.dumps(body).encode(),
        ScriptedReply(whole(grep, "tool_calls")),
        ScriptedReply(whole(last, "tool_calls")),
    )
    # as clients rewrite it
    reply = {"role": "assistant", **read(client.body)["message"], "content": None}
    history += [reply, {"role": "tool", "tool_call_id": "call_0", "content": "yes"}]
    await world.ask(json.dumps(body).encode(), ScriptedReply(whole({"content": "It is 42."})))
    assert json.loads(world.sent[-1])["messages"][1]["content"] == HALF


async def test_a_snapshot_with_half_a_character_is_stored() -> None:
    world = Writer()
    said = [Section("1 tool", f"{HALF} of 12 items, see /var/{HALF}.log", Role.TOOL)]
    made = await world.made(
        replaced=lambda: list(map(mentions, said)),
        references=lambda: {"/s/a": f"result of look {HALF}"},
    )
    assert made is not None
    assert "?-7341" in made.text and "\ud83d" not in made.text
    assert msgspec.json.decode(msgspec.json.encode(made), type=Snapshot) == made


async def test_a_model_whose_name_has_half_a_character() -> None:
    world = World()
    body = {"model": "m\ud83d", "messages": [{"role": "user", "content": "Hello."}]}
    _, outcome = await world.ask(
        json.dumps(body).encode(), ScriptedReply(whole({"content": "It is 42."}))
    )
    assert outcome.status == 200
    made, _ = await planned(CUT, model="m\ud83d")
    name = made.snapshot_name(made.plan.boundaries[-1])
    summaries = Summaries()
    assert await summaries.shows(model="m\ud83d")
    assert list(summaries.store.records) == [f"acme-1/snapshots/{name}"]
    summaries.pool.close()
