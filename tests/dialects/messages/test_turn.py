"""The turn of the Messages API: hidden rounds, mixed turns, what is held, and one reply for all
rounds."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.dialects.messages import MESSAGES
from proxy.dialects.messages.reply import MessagesTurn
from proxy.dialects.messages.request import assembled
from proxy.errors import UpstreamBroken
from proxy.plan.turn import Broken
from tests.dialects.messages import api
from tests.dialects.messages.api import call, say, thinking
from tests.dialects.messages.turns import HI, accumulated, message, stream, turn
from tests.dialects.scripted import encoded
from tests.dialects.turning import events, feed, receive, run

Json = dict[str, Any]

LOOKS = message(thinking("I look."), say("Let me look."), call("grep", {"pattern": "x"}))
AGAIN = message(thinking("More."), call("read_file", {"path": "p"}), number=3)
ANSWERS = message(thinking("There."), say("It is 42."), number=2)
MIXED = message(
    thinking("Both."),
    call("fetch", {"n": 1}),
    call("read_file", {"path": "p"}),
    call("fetch", {"n": 2}),
)
CALL = '{"name": "grep", "arguments": {"pattern": "x"}}'
FOUND = {"type": "tool_result", "tool_use_id": "toolu_1_2", "content": "found"}
ERROR = {
    "type": "error",
    "error": {"type": "invalid_request_error", "message": "tools are not supported"},
}


def put_back(one: MessagesTurn, content: list[Json]) -> list[Json]:
    """The messages that upstream gets for a reply that the client sends back as it saw it."""
    assert one.hidden is not None
    visible = json.dumps({"role": "assistant", "content": content}).encode()
    back = MESSAGES.reinserted(MESSAGES.paired(one.hidden, visible), visible)
    return json.loads(bytes(assembled({}, back)["messages"]))  # type: ignore[no-any-return]


# -- hidden rounds ---------------------------------------------------------------------------------


def searched(reply: Json, searches: int | None) -> Json:
    used = {"web_search_requests": searches, "web_fetch_requests": 1} if searches else None
    return {**reply, "usage": {**reply["usage"], "server_tool_use": used}}


@pytest.mark.parametrize("given", ["x", '{"pattern": "x"}', [1], None, 5])
def test_a_call_that_begins_with_other_arguments_goes_back_with_an_object(given: Any) -> None:
    said = [
        one for one in api.events_of(message(call("grep"))) if one["type"] != "content_block_delta"
    ]
    said[1]["content_block"]["input"] = given
    _, requests = run(turn(), b"".join(map(encoded, said)), stream(ANSWERS))
    [back] = requests[1]["messages"][1]["content"]
    assert back["input"] == ({"pattern": "x"} if given == '{"pattern": "x"}' else {})


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(
    ("rounds", "told"), [((2, 3), (5, 2)), ((2, None), (2, 1)), ((None, 3), (3, 1))]
)
def test_what_upstreams_own_tools_did_is_added_up(
    rounds: tuple[int | None, int | None], told: tuple[int, int], whole: bool
) -> None:
    replies = [
        searched(reply, count) for reply, count in zip((LOOKS, ANSWERS), rounds, strict=True)
    ]
    raw = [json.dumps(reply).encode() if whole else stream(reply) for reply in replies]
    out, _ = run(turn(stream=not whole), *raw)
    final = json.loads(out) if whole else accumulated(out)
    assert final["usage"]["server_tool_use"] == {
        "web_search_requests": told[0],
        "web_fetch_requests": told[1],
    }


SKILLS = [{"type": "anthropic", "skill_id": "pptx"}]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(
    "last", [None, {"id": "container_2", "expires_at": "2026-01-01T00:00:00Z"}]
)
@pytest.mark.parametrize(
    ("asked", "sent"),
    [
        (None, "container_1"),
        ("container_0", "container_1"),
        ({"skills": SKILLS}, {"skills": SKILLS, "id": "container_1"}),
    ],
)
def test_a_later_round_goes_on_in_the_same_container(
    asked: Any, sent: Any, last: Json | None, whole: bool
) -> None:
    begun = {"id": "container_1", "expires_at": "2026-01-01T00:00:00Z"}
    replies = [
        {**LOOKS, "container": begun},
        {**AGAIN, "container": None},
        {**ANSWERS, "container": last},
    ]
    raw = [json.dumps(reply).encode() if whole else stream(reply) for reply in replies]
    out, requests = run(turn(stream=not whole, container=asked), *raw)
    assert [request.get("container") for request in requests] == [asked, sent, sent]
    final = json.loads(out) if whole else accumulated(out)
    assert final["container"] == (last or begun)


def test_thinking_streams_at_once() -> None:
    one = turn()
    one.request()
    raw = stream(LOOKS)
    assert receive(one, raw[: raw.index(b"signature_delta")]).count(b"thinking_delta") > 0


def test_a_text_without_end_is_broken() -> None:
    one = turn()
    one.request()
    begin, delta = stream(message(say("x" * 1_000_000)), 1_000_000).split(
        b"event: content_block_delta"
    )
    assert receive(one, begin)
    with pytest.raises(Broken):
        for _ in range(40):
            receive(one, b"event: content_block_delta" + delta.split(b"\n\n")[0] + b"\n\n")


@pytest.mark.parametrize("left", [b"content_block_stop", b"message_delta"])
def test_a_block_that_a_round_left_open_ends_before_the_next_one(left: bytes) -> None:
    """A stream may stop behind a whole call in a text, which is answered."""
    said = say(f"Let me look.\n<tool_call>{CALL}</tool_call>")
    raw = stream(message(said))
    out, _ = run(turn(), raw[: raw.index(b"event: " + left)], stream(ANSWERS))
    shown = accumulated(out)["content"]
    assert [block["type"] for block in shown] == ["text", "thinking", "text"]
    assert shown[0]["text"].strip() == "Let me look."


# -- mixed turns -----------------------------------------------------------------------------------


def test_all_results_of_a_mixed_turn_are_in_one_message() -> None:
    one = turn()
    final = accumulated(run(one, stream(MIXED))[0])
    results = [
        {"type": "tool_result", "tool_use_id": f"toolu_1_{n}", "content": "x"} for n in (1, 3)
    ]
    said = {"type": "text", "text": "<system-reminder>Be kind.</system-reminder>"}
    body = {"messages": [HI, {"role": "user", "content": [*results, said]}]}
    _, *theirs = MESSAGES.parse(json.dumps(body).encode()).entries
    assert one.hidden is not None
    back = MESSAGES.reinserted(
        one.hidden, json.dumps({"role": "assistant", "content": final["content"]}).encode()
    )
    made = json.loads(bytes(assembled({}, [*back, *theirs])["messages"]))
    assert made == [
        {"role": "assistant", "content": MIXED["content"]},
        {"role": "user", "content": [FOUND, *results, said]},
    ]


def test_results_of_a_mixed_turn_stay_in_one_message_behind_a_cut() -> None:
    """What a cut makes neighbours is joined before the client's own results are known."""
    one = turn()
    final = accumulated(run(one, stream(MIXED))[0])
    assert one.hidden is not None
    visible = json.dumps({"role": "assistant", "content": final["content"]}).encode()
    behind = MESSAGES.joined([json.dumps(HI).encode(), *MESSAGES.reinserted(one.hidden, visible)])
    theirs = json.dumps(
        {"type": "tool_result", "tool_use_id": "toolu_1_1", "content": "x"}
    ).encode()
    made = json.loads(bytes(assembled({}, [*behind, theirs])["messages"]))
    assert [entry["role"] for entry in made] == ["user", "assistant", "user"]
    said = [json.dumps({"role": "user", "content": text}).encode() for text in ("one", "two")]
    assert [json.loads(raw)["role"] for raw in MESSAGES.joined(said)] == ["user"]


# -- ends ------------------------------------------------------------------------------------------


def test_a_call_without_an_id_gets_one() -> None:
    nameless = message(call("grep", {"pattern": "x"}))
    del nameless["content"][0]["id"]
    _, asked = run(turn(), stream(nameless), stream(ANSWERS))
    called, answered = asked[1]["messages"][1:]
    assert called["content"][0]["id"] == answered["content"][0]["tool_use_id"] != ""


def test_the_call_to_answer_has_the_arguments_as_the_model_wrote_them() -> None:
    raw = stream(message(call("grep", {"pattern": "x"}))).replace(b'\\"}', b'\\"')
    one = turn()
    one.request()
    feed(one, raw)
    assert one.calls[0].arguments == '{"pattern": "x"'
    one.answer(["no"])
    assert json.loads(one.request())["messages"][1]["content"][0]["input"] == {}


@pytest.mark.parametrize("whole", [True, False])
def test_arguments_with_half_a_surrogate_pair_stay(whole: bool) -> None:
    """The client would otherwise call its tool without any."""
    mixed = message(call("grep", {"pattern": "x\ud83d"}), call("fetch", {"n": "\ude00y"}), number=3)
    replies = [json.dumps(one).encode() if whole else stream(one, 100) for one in (LOOKS, mixed)]
    one = turn(stream=not whole)
    out, _ = run(one, *replies)
    final = json.loads(out) if whole else accumulated(out)
    assert final["content"][-1] == mixed["content"][1]
    assert put_back(one, final["content"])[2]["content"] == mixed["content"]


# -- errors ----------------------------------------------------------------------------------------


def test_an_error_event_has_the_shape_that_clients_know() -> None:
    [said] = events(turn().error_event(UpstreamBroken("broke")))
    assert said == {
        "type": "error",
        "error": {"type": "api_error", "message": "broke", "code": "upstream_broken"},
    }
    [said] = events(
        turn().error_event(UpstreamBroken("broke"), json.dumps(ERROR, indent=1).encode())
    )
    assert said == ERROR
