"""What a turn needs from outside: answers to calls of our tools, within their bounds, and records
of what it hid."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from msgspec.structs import replace

from proxy.policy import Tools
from proxy.requests.conversation import TOO_LONG
from proxy.requests.relay import ANOTHER, rewritten
from proxy.telemetry.outcome import Outcome
from proxy.tools.answer import REPEATED
from proxy.upstream.client import UpstreamRequest
from proxy.upstream.headers import Headers
from tests.dialects.chat.turns import called, calls, read, whole
from tests.requests.scripted import ScriptedReply
from tests.requests.test_conversation import OVERFLOW
from tests.requests.test_handler import HELLO, POLICY, World, chat
from tests.requests.test_handler import world as world

LONG = chat("begin " + "word " * 5_000)
MESSAGE = 4
"""Tokens of a message's frame."""
Call = tuple[str, dict[str, Any]]


def test_a_rewritten_request_has_the_headers_of_its_new_body() -> None:
    kept, dropped = (b"authorization", b"Bearer k"), (b"idempotency-key", b"i")
    headers = Headers([kept, (b"content-length", b"9"), (b"accept-encoding", b"gzip"), dropped])
    times = dict.fromkeys(("connect_timeout", "first_byte_timeout", "idle_timeout"), 1.0)
    request = UpstreamRequest(
        method="POST", url="http://up/v1/x", headers=headers, content=b"old", **times
    )
    made = rewritten(request, b"new body", ANOTHER)
    assert made.headers == [kept, (b"accept-encoding", b"identity"), (b"content-length", b"8")]
    assert request.content == b"old"


async def answered(world: World, *rounds: list[Call]) -> tuple[list[list[str]], Outcome]:
    """What our tools answer in each round to these calls, by name and arguments."""
    said = [
        [called(name, json.dumps(asked), f"id{place}") for place, (name, asked) in enumerate(one)]
        for one in rounds
    ]
    replies = [whole(calls(*one), "tool_calls") for one in said]
    sent = len(world.sent)
    _, outcome = await world.ask(LONG, *map(ScriptedReply, (*replies, HELLO)))
    bodies = [json.loads(body)["messages"] for body in world.sent[sent + 1 :]]
    ends = [body[len(body) - len(one) :] for body, one in zip(bodies, rounds, strict=True)]
    return [[str(message["content"]) for message in end] for end in ends], outcome


async def moved(world: World) -> str:
    """The path of the result that is moved."""
    await world.ask(LONG, ScriptedReply(HELLO))
    [path] = re.findall(
        r"/context_store/[\w.-]+\w", json.loads(world.sent[-1])["messages"][2]["content"]
    )[:1]
    return str(path)


def reading(path: str) -> Call:
    return "read_file", {"path": path}


async def test_calls_are_answered_from_the_files_of_the_request(world: World) -> None:
    path = await moved(world)
    [[text, found, missing]], outcome = await answered(
        world, [reading(path), ("grep", {"pattern": "begin"}), reading("/etc/passwd")]
    )
    assert text.startswith("begin word") and path.rpartition("/")[2] in found
    assert "word word" not in missing
    assert [(use.tool, use.result) for use in outcome.tool_uses][:2] == [
        ("read_file", "ok"),
        ("grep", "ok"),
    ]


async def test_the_same_call_again_gets_a_pointer_to_the_first_answer(world: World) -> None:
    path = await moved(world)
    other, refused = ("grep", {"pattern": "begin", "path": path}), ("grep", {})
    rounds = [
        [reading(path), reading(path)],
        [reading(path)],
        [reading(path.rpartition("/")[2]), reading("c")],
    ]
    [[text, again], third, named, others], _ = await answered(
        world, *rounds, [other, refused, refused]
    )  # type: ignore[list-item]
    assert text.startswith("begin word")
    assert all(one.startswith(REPEATED) for one in (again, *third, *named))
    assert not any(REPEATED in one for one in others) and others[1] == others[2]


async def test_a_text_of_an_earlier_conversation_is_not_taken_for_one_that_is_called_alike(
    world: World,
) -> None:
    path = await moved(world)
    stem, *_ = path.rsplit(".", 2)
    earlier = f"{stem}.{16 * '7'}.txt"
    quoting = LONG.replace(b"What is it?", b"What is it, and in %b?" % earlier.encode())
    both = [
        whole(calls(called("read_file", json.dumps({"path": one}), f"id{number}")), "tool_calls")
        for number, one in enumerate((path, earlier))
    ]
    await world.ask(quoting, *map(ScriptedReply, (*both, HELLO)))
    answer = json.loads(world.sent[-1])["messages"][-1]["content"]
    assert "not among the texts that are kept" in answer


async def test_a_call_whose_answer_did_not_fit_is_answered_again(world: World) -> None:
    path = await moved(world)
    one, two = (
        called("read_file", json.dumps({"path": path, "limit": lines}), f"id{lines}")
        for lines in (1, 2)
    )
    asking = [whole(calls(*said), "tool_calls") for said in ([one], [one, two], [two], [one])]
    first, both, second, again = map(ScriptedReply, asking)
    too_long = ScriptedReply(OVERFLOW, status=400)
    await world.ask(LONG, first, both, too_long, second, again, ScriptedReply(HELLO))
    *_, refused, reworded, anew, old = [
        json.loads(body)["messages"][-1]["content"] for body in world.sent
    ]
    assert refused.startswith("begin word") and reworded == TOO_LONG
    assert anew.startswith("begin word")
    assert old.startswith(REPEATED), "the answer of the first round is still there"


async def test_a_turn_reads_no_more_than_its_policy_allows(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tools, "max_calls", 1)
    world.policy = replace(POLICY, tools=Tools(max_retrieved_tokens=1_000))
    path = await moved(world)
    [[first, second], _], outcome = await answered(
        world, [reading(path), reading(path)], [reading(path)]
    )
    assert len(first) <= 1_000 and "begin" not in second
    assert sum(use.tokens for use in outcome.tool_uses if use.result == "ok") <= 1_000


async def test_calls_beyond_those_of_a_round_are_counted_together(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tools, "max_calls", 2)
    [answers], outcome = await answered(
        world, [(("grep", "read_file")[number % 2], {}) for number in range(501)]
    )
    assert len(answers) == 501 and len(set(answers[2:])) == 1
    first, second, *rest = outcome.tool_uses
    assert (first.calls, second.calls) == (1, 1)
    assert [(use.tool, use.result, use.calls) for use in rest] == [
        ("grep", "refused", 250),
        ("read_file", "refused", 249),
    ]
    assert [use.tokens for use in rest] == [use.calls * len(answers[-1]) for use in rest]


async def test_hidden_rounds_are_stored_with_their_size_and_come_back_behind_the_same_history(
    world: World,
) -> None:
    grep = whole(calls(called("grep", '{"pattern": "begin"}', "h")), "tool_calls")
    client, _ = await world.ask(LONG, ScriptedReply(grep), ScriptedReply(HELLO))
    [sizes] = {*re.findall(rb'"sizes":\[(\d+),(\d+)\]', b"".join(world.store.records.values()))}
    history = json.loads(LONG)
    history["messages"] += [
        {"role": "assistant", **read(client.body)["message"]},
        {"role": "user", "content": "Sure?"},
    ]
    _, outcome = await world.ask(json.dumps(history).encode(), ScriptedReply(HELLO))
    assert outcome.reinserted == 1
    hidden = json.loads(world.sent[-1])["messages"][3:5]
    assert [one["role"] for one in hidden] == ["assistant", "tool"]
    assert int(sizes[1]) == len(hidden[1]["content"]) + MESSAGE
