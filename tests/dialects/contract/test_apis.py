"""Shapes that only one API has: fallbacks, pauses, refusals, names defined within, ends before the
end."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.dialects.messages import MESSAGES
from proxy.dialects.responses import RESPONSES
from proxy.plan.turn import State
from tests.dialects.chat import turns as chat
from tests.dialects.contract import sdks
from tests.dialects.messages import turns as messages
from tests.dialects.messages.api import call, events_of, say, thinking
from tests.dialects.responses import api as responses_api
from tests.dialects.responses import turns as responses
from tests.dialects.scripted import encoded
from tests.dialects.turning import events, feed, run

Json = dict[str, Any]

FALLBACK = {
    "type": "fallback",
    "from": {"model": "a"},
    "to": {"model": "b"},
    "trigger": {"type": "refusal"},
}
GREP = call("grep", {"pattern": "x"})
FETCH = call("fetch", {"q": "x"})


def converse(*replies: Json, stream: bool, **members: Any) -> tuple[Json, list[Json], Any]:
    """The reply that the client of the Messages API gets, the requests, and the turn."""
    turn = messages.turn(stream=stream, **members)
    raws = [messages.stream(reply) if stream else json.dumps(reply).encode() for reply in replies]
    out, asked = run(turn, *raws)
    assert b"grep" not in out or members
    return messages.accumulated(out) if stream else json.loads(out), asked, turn


def kinds(reply: Json) -> list[str]:
    return [block["type"] for block in reply["content"]]


# -- fallbacks: another model goes on where one declined -------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("blocks", "stop", "shown"),
    [
        ([say("Let me."), GREP, FALLBACK, say("So.")], "end_turn", ["text", "fallback", "text"]),
        ([GREP, FALLBACK, FETCH], "tool_use", ["fallback", "tool_use"]),
    ],
)
def test_a_call_before_a_fallback_is_none(
    blocks: list[Json], stop: str, shown: list[str], stream: bool
) -> None:
    got, asked, turn = converse(messages.message(*blocks, stop_reason=stop), stream=stream)
    assert (len(asked), kinds(got), got["stop_reason"], turn.hidden) == (1, shown, stop, None)


@pytest.mark.parametrize("stream", [True, False])
def test_a_fallback_that_calls_our_tool(stream: bool) -> None:
    """No result is sent for a call that was left out, and the calls before the last fallback are
    left out."""
    first = messages.message(FETCH, GREP, FALLBACK, say("Let me."), GREP)
    got, asked, turn = converse(first, messages.message(say("So."), number=2), stream=stream)
    assert kinds(got) == ["tool_use", "fallback", "text", "text"]
    assert got["stop_reason"] == "end_turn"
    written, results = asked[1]["messages"][1:]
    assert [block["type"] for block in written["content"]] == ["fallback", "text", "tool_use"]
    assert [block["tool_use_id"] for block in results["content"]] == ["toolu_1_4"]
    assert not turn.mixed


# -- ends ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "reason", ["refusal", "pause_turn", "model_context_window_exceeded", "compaction"]
)
def test_an_end_that_is_none_stays_with_its_details(reason: str, stream: bool) -> None:
    last = messages.message(
        say("Hm."),
        number=2,
        stop_reason=reason,
        stop_details={"type": "refusal", "category": "cyber"},
    )
    got, _, _ = converse(messages.message(thinking("a"), GREP), last, stream=stream)
    assert (got["stop_reason"], kinds(got)) == (reason, ["thinking", "text"])
    if not stream:
        assert got["stop_details"] == last["stop_details"]


def test_a_whole_reply_within_a_stream_keeps_every_member_of_its_end() -> None:
    last = messages.message(
        say("No."), number=2, stop_reason="refusal", stop_details={"type": "refusal"}
    )
    out, _ = run(
        messages.turn(), messages.stream(messages.message(GREP)), json.dumps(last).encode()
    )
    ends = [event for event in events(out) if event["type"] == "message_delta"]
    assert [end["delta"].get("stop_details") for end in ends] == [last["stop_details"]]


@pytest.mark.parametrize("finish", ["stop", "tool_calls"])
def test_a_chat_call_of_ours_behind_the_finish_reason(finish: str) -> None:
    first = chat.stream(
        chat.ROLE,
        chat.chunk({"content": "Let me."}),
        chat.chunk({}, finish),
        chat.chunk(chat.calls(chat.called("grep"))),
        chat.DONE,
    )
    out, _ = run(chat.turn(), first, chat.ANSWER)
    finishes = [
        choice["finish_reason"] for one in chat.events(out)[:-1] for choice in one["choices"]
    ]
    assert list(filter(None, finishes)) == ["stop"]
    assert sdks.chat(out)["choices"][0]["message"]["content"] == "Let me.\n\nIt is 42."


@pytest.mark.parametrize("stream", [True, False])
def test_what_a_round_shows_that_is_asked_again_goes_back_once(stream: bool) -> None:
    """Of its JSON the client sees nothing, and of its thinking all."""
    rounds = [
        messages.message(GREP),
        messages.message(say("{}"), thinking("hm"), GREP, number=2),
        messages.message(say("{}"), number=3),
    ]
    form = {"format": {"type": "json_schema", "schema": {}}}
    got, _, turn = converse(*rounds, stream=stream, max_rounds=1, output_config=form)
    assert kinds(got) == ["thinking", "text"]
    [reply] = json.loads(turn.hidden.instead)
    assert [block["type"] for block in reply["content"]] == ["text"]


# -- names that are defined within -----------------------------------------------------------------

INLINE = {
    "type": "tool_definition",
    "definition": {"name": "grep", "input_schema": {"type": "object"}},
}
TOOLSET = {
    "type": "mcp_toolset",
    "mcp_server_name": "files",
    "tools": [{"name": "grep", "input_schema": {}}],
}
CONFIGURED = {
    "type": "mcp_toolset",
    "mcp_server_name": "files",
    "configs": {"grep": {"enabled": True}},
}
ADDED = {"type": "tool_addition", "tool": INLINE}
ADDED_SET = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": TOOLSET}}
COMPACTED = {"type": "compaction", "content": "x", "tool_changes": [ADDED]}
DEFINING = {
    "tool_addition": {"messages": [messages.HI, {"role": "system", "content": [ADDED]}]},
    "tool_addition with a toolset": {
        "messages": [messages.HI, {"role": "system", "content": [ADDED_SET]}]
    },
    "mcp_toolset": {"tools": [TOOLSET]},
    "configs of an mcp_toolset": {"tools": [CONFIGURED]},
    "compaction": {"messages": [{"role": "assistant", "content": [COMPACTED]}, messages.HI]},
}


@pytest.mark.parametrize("members", DEFINING.values(), ids=DEFINING.keys())
def test_a_tool_that_the_client_defines_within_is_the_clients(members: Json) -> None:
    body = {"model": "m", "max_tokens": 9, "messages": [messages.HI], **members}
    for written in (json.dumps(body), json.dumps(body).replace("grep", "\\u0067rep")):
        assert MESSAGES.parse(written.encode()).names == ("offload_grep", "offload_read_file")
    turn = messages.turn(**members)
    turn.request()
    out = feed(turn, messages.stream(messages.message(GREP)))
    assert turn.state is State.DONE
    assert messages.accumulated(out + turn.close())["content"][0]["name"] == "grep"


# -- what a call brings with it --------------------------------------------------------------------


@pytest.mark.parametrize(
    "more", [{"caller": {"type": "program", "caller_id": "p"}}, {"agent": {"agent_name": "scout"}}]
)
def test_our_output_says_who_called(more: Json) -> None:
    """A result belongs to the program or the agent that made the call."""
    first = responses.response(responses_api.call("grep", {"pattern": "x"}, **more))
    turn = responses.turn()
    _, asked = run(
        turn,
        responses.stream(first),
        responses.stream(responses.response(responses_api.say("x"), number=2)),
    )
    [result] = [item for item in asked[1]["input"] if item.get("type") == "function_call_output"]
    assert {key: result[key] for key in more if key in result} == more


@pytest.mark.parametrize(
    ("store", "kept"), [({}, True), ({"store": True}, True), ({"store": False}, False)]
)
def test_a_summary_call_on_the_prefix_is_kept_as_the_clients_requests_are(
    store: Json, kept: bool
) -> None:
    """Only then upstream finds what entries name by an id."""
    item = {"type": "item_reference", "id": "rs_1"}
    request = RESPONSES.parse(json.dumps({"model": "m", "input": [item], **store}).encode())
    made = json.loads(RESPONSES.summary_on_prefix("the task", request, request.entries, [], 700, 2))
    assert made["store"] is kept


@pytest.mark.parametrize("stream", [True, False])
def test_citations_stay_with_their_text(stream: bool) -> None:
    cited = [{"type": "char_location", "cited_text": "x", "document_index": 0}]
    reply = messages.message({**say("It."), "citations": cited}, GREP)
    if stream:
        events = list(events_of(reply))
        place = next(
            number for number, event in enumerate(events) if event["type"] == "content_block_stop"
        )
        delta = {"type": "citations_delta", "citation": cited[0]}
        events.insert(place, {"type": "content_block_delta", "index": 0, "delta": delta})
        events[1]["content_block"]["citations"] = []
        raw = b"".join(map(encoded, events))
    else:
        raw = json.dumps(reply).encode()
    answers = messages.message(say("So."), number=2)
    turn = messages.turn(stream=stream)
    out, asked = run(
        turn, raw, messages.stream(answers) if stream else json.dumps(answers).encode()
    )
    assert asked[1]["messages"][1]["content"][0]["citations"] == cited
    got = sdks.messages(out) if stream else json.loads(out)
    assert got["content"][0]["citations"] == cited
