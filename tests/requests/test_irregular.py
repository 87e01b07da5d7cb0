"""Conversations in which calls and results do not pair, as clients send them and tolerant upstreams
take them.

They are offloaded as far as they are regular. What fits into no pair arrives as it was sent, in its
place.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from proxy.policy import Compress, Mode, Policy, Wait
from proxy.policy import Upstream as Where
from tests import written
from tests.dialects.chat.turns import called, whole
from tests.dialects.chat.turns import calls as tool_calls
from tests.requests.scripted import ScriptedReply
from tests.requests.test_handler import HELLO, World, world

__all__ = ["world"]

Message = dict[str, Any]

POLICY = Policy(
    tenant="acme",
    upstream=Where(base_url="http://upstream/v1"),
    offload=written.offload(
        mode=Mode.COMPACT,
        keep_views=1,
        max_total_tokens=3_000,
        max_tool_message_tokens=300,
        pin_user_tokens=100,
        compress=Compress(snapshot_tokens=100, wait=Wait.ALWAYS),
    ),
)
SNAPSHOT = whole(
    {"content": "<state_snapshot><overall_goal>find it</overall_goal></state_snapshot>"}
)


def calls(*ids: str | None, arguments: Any = "{}") -> Message:
    made = [
        {"id": id, "type": "function", "function": {"name": "look", "arguments": arguments}}
        for id in ids
    ]
    return {"role": "assistant", "content": None, "tool_calls": made}


def result(id: str | None, text: str = "found", **more: Any) -> Message:
    return {"role": "tool", "tool_call_id": id, "content": text, **more}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


DONE: Message = {"role": "assistant", "content": "Done."}
LARGE = "a large result " * 60
NO_CALL, NO_RESULT, SEALED = "no_call", "no_result", "sealed"
OLD_CALL: Message = {
    "role": "assistant",
    "content": None,
    "function_call": {"name": "look", "arguments": "{}"},
}

KINDS: dict[str, tuple[list[Message], dict[str, int], set[int]]] = {
    "aborted call": ([calls("a"), user("Never mind.")], {NO_RESULT: 1}, {0}),
    "one of two aborted": ([calls("a", "b"), result("a")], {NO_RESULT: 1}, {0}),
    "aborted, then the next call": ([calls("a"), calls("b"), result("b")], {NO_RESULT: 1}, {0}),
    "orphan result": ([calls("a"), result("a"), result("zz", LARGE)], {NO_CALL: 1}, {2}),
    "orphan after a user": ([DONE, user("And?"), result("zz", LARGE)], {NO_CALL: 1}, {2}),
    "late result": (
        [calls("a"), DONE, user("And?"), result("a", LARGE)],
        {NO_RESULT: 1, NO_CALL: 1},
        {0, 3},
    ),
    "user in between": (
        [calls("a"), user("Hurry!"), result("a", LARGE)],
        {NO_RESULT: 1, NO_CALL: 1},
        {0, 1, 2},
    ),
    "result first": (
        [result("a", LARGE), calls("a"), user("Well?")],
        {NO_CALL: 1, NO_RESULT: 1},
        {0, 1},
    ),
    "two with calls": (
        [calls("a"), calls("b"), result("a"), result("b")],
        {NO_RESULT: 1, NO_CALL: 1},
        {0, 1, 2},
    ),
    "too many results": ([calls("a"), result("a"), result("a", LARGE)], {NO_CALL: 1}, {2}),
    "null ids, results with ids": (
        [calls(None), result("a", LARGE)],
        {NO_RESULT: 1, NO_CALL: 1},
        {0, 1},
    ),
    "function role": (
        [OLD_CALL, {"role": "function", "name": "look", "content": LARGE}],
        {SEALED: 2},
        {0, 1},
    ),
    "unknown role": ([DONE, {"role": "narrator", "content": LARGE}], {SEALED: 1}, {1}),
    "unknown content": ([DONE, {"role": "user", "content": {"text": LARGE}}], {SEALED: 1}, {1}),
    "no role": ([DONE, {"content": LARGE}], {SEALED: 1}, {1}),
    "equal ids": ([calls("a", "a"), result("a", LARGE), result("a", LARGE + "2")], {}, set()),
    "empty ids": ([calls("", ""), result("", LARGE), result("", LARGE + "2")], {}, set()),
    "null ids": ([calls(None, None), result(None, LARGE), result(None, LARGE + "2")], {}, set()),
    "arguments as an object": ([calls("a", arguments={"q": [1]}), result("a", LARGE)], {}, set()),
}
"""Kind → its messages, how many are left alone and why, and which of them must arrive byte for byte
after any cut."""


def steps(count: int, first: int = 0) -> list[Message]:
    return [
        message
        for number in range(first, first + count)
        for message in (calls(f"c{number}"), result(f"c{number}", f"{number} {LARGE}"))
    ]


@pytest.mark.parametrize("mode", [Mode.COMPACT, Mode.COMPRESS])
@pytest.mark.parametrize("kind", KINDS)
async def test_the_rest_is_offloaded(
    world: World, monkeypatch: pytest.MonkeyPatch, kind: str, mode: Mode
) -> None:
    async def send(request: Any) -> ScriptedReply:
        summary = "scratchpad" in str(json.loads(request.content)["messages"][-1])
        world.upstream.requests.append(request)
        world.upstream.replies.append(ScriptedReply(SNAPSHOT if summary else HELLO))
        reply = world.upstream.replies[-1]
        assert isinstance(reply, ScriptedReply)
        return reply

    monkeypatch.setattr(world.upstream, "send", send)
    world.policy = msgspec.structs.replace(
        POLICY, offload=msgspec.structs.replace(POLICY.offload, mode=mode)
    )
    odd, left_alone, alone = KINDS[kind]
    messages = [
        {"role": "system", "content": "Be good."},
        user("Find it."),
        *steps(2),
        *odd,
        *steps(7, 2),
        DONE,
    ]
    messages.append(user("So?"))
    points = [
        place for place, one in enumerate(messages) if one.get("role") == "assistant" and place > 5
    ]
    before: list[bytes] = []
    for end in (*points, len(messages)):
        client, outcome = await world.ask(
            json.dumps({"model": "m", "messages": messages[:end]}).encode()
        )
        assert client.status == 200 and outcome.reason == ""
        sent = list(map(bytes, msgspec.json.decode(world.sent[-1], type=Sent).messages))
        assert outcome.new_event or sent[: len(before)] == before
        before = sent
    assert (
        outcome.kind == "offloaded"
        and (outcome.compacted if mode is Mode.COMPACT else outcome.compressed) > 3
    )
    assert outcome.left_alone == left_alone
    rest = iter(before)
    assert all(json.dumps(odd[place]).encode() in rest for place in sorted(alone)), "in their order"
    await world.services.background.close(1)
    moved = [record for key, record in world.store.records.items() if "/originals/" in key]
    assert moved.count(f"0 {LARGE}".encode()) == (mode is Mode.COMPACT)


async def test_hidden_rounds_come_back_after_an_irregular_step(world: World) -> None:
    world.policy = POLICY
    messages = [user("Find it."), calls("a"), user("Never mind."), *steps(8), DONE, user("So?")]
    asked = whole(tool_calls(called("grep", '{"pattern": "large"}')), "tool_calls")
    body = json.dumps({"model": "m", "messages": messages}).encode()
    await world.ask(body, ScriptedReply(asked), ScriptedReply(HELLO))
    messages += [{"role": "assistant", "content": "It is 42."}, user("Sure?")]
    body = json.dumps({"model": "m", "messages": messages}).encode()
    _, outcome = await world.ask(body, ScriptedReply(HELLO))
    assert (outcome.reinserted, outcome.left_alone) == (1, {NO_RESULT: 1})
    first, _, last = (msgspec.json.decode(body, type=Sent).messages for body in world.sent)
    assert first == last[: len(first)] and len(last) == len(first) + 4


class Sent(msgspec.Struct):
    messages: list[msgspec.Raw]
