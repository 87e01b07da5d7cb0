"""One reply in several choices, and calls in the older API's form.

https://github.com/karthink/gptel/issues/1284,
https://github.com/langchain-ai/langchain/issues/31198
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.dialects.chat.reply import ChatTurn
from proxy.plan.turn import Broken
from tests.dialects.chat.turns import (
    ANSWER,
    DONE,
    ROLE,
    asked,
    called,
    calls,
    chunk,
    events,
    folded,
    made,
    more,
    read,
    stream,
    text,
    usage,
    whole,
)
from tests.dialects.contract import sdks
from tests.dialects.turning import receive, run

Json = dict[str, Any]

ANSWERED = whole({"content": "It is 42."}, id="c2")
OURS = called("grep", '{"pattern":"x"}', "a")
THEIRS = called("search", '{"q":"y"}', "b")


def choice(number: int, delta: Json, finish: str | None = None) -> Json:
    return {"index": number, "delta": delta, "finish_reason": finish}


def split(*choices: Json) -> Json:
    return {**chunk({}), "choices": list(choices)}


def together(*messages: Json, finish: str = "tool_calls") -> bytes:
    """A whole reply in several choices."""
    choices = [
        {
            "index": number,
            "message": {"role": "assistant", "content": None, **message},
            "finish_reason": finish,
        }
        for number, message in enumerate(messages)
    ]
    return json.dumps({**json.loads(whole({})), "choices": choices}).encode()


ONE_EVENT = [
    split(choice(0, {"content": "Let me "}), choice(1, calls(OURS))),
    split(choice(0, {"content": "look."}, "stop"), choice(1, {}, "tool_calls")),
]
ONE_EACH = [
    split(choice(0, {"content": "Let me look."})),
    split(choice(0, {}, "stop")),
    split(choice(1, calls(called("grep", '{"pat', "a")))),
    split(choice(1, calls(more('tern":"x"}')))),
    split(choice(1, {}, "tool_calls")),
]


@pytest.mark.parametrize("said", [ONE_EVENT, ONE_EACH])
def test_our_call_in_another_choice_is_answered(said: list[Json]) -> None:
    out, requests = run(ChatTurn(asked()), stream(ROLE, *said, DONE), ANSWER)
    assert text(folded(out)) == "Let me look.\n\nIt is 42."
    assert folded(out)["finish"] == "stop"
    assert {one["index"] for event in events(out) if event != DONE for one in event["choices"]} == {
        0
    }
    message = requests[1]["messages"][1]
    assert message["content"] == "Let me look."
    assert [call["id"] for call in message["tool_calls"]] == ["a"]


def test_calls_of_all_choices_are_numbered_on() -> None:
    said = split(
        choice(0, calls(THEIRS)),
        choice(1, calls({**OURS, "index": 0})),
        choice(2, calls({**THEIRS, "id": "c"})),
    )
    ends = split(*(choice(number, {}, "tool_calls") for number in range(3)))
    turn = ChatTurn(asked())
    out, _ = run(turn, stream(ROLE, said, ends, DONE))
    assert [id for id, *_ in made(folded(out))] == ["b", "c"]
    assert [event["choices"][0]["finish_reason"] for event in events(out)[:-1]].count(
        "tool_calls"
    ) == 1
    assert [call["id"] for call in sdks.chat(out)["choices"][0]["message"]["tool_calls"]] == [
        "b",
        "c",
    ]
    assert turn.hidden is not None
    assert len(turn.hidden.after) == 1


def test_a_whole_reply_is_one_message() -> None:
    first = together({"content": "Let me look."}, {"tool_calls": [OURS]})
    out, requests = run(ChatTurn(asked(stream=False)), first, ANSWERED)
    assert text(read(out)) == "Let me look.\n\nIt is 42."
    assert requests[1]["messages"][1]["content"] == "Let me look."
    mixed, _ = run(
        ChatTurn(asked(stream=False)), together({"tool_calls": [OURS]}, {"tool_calls": [THEIRS]})
    )
    assert made(read(mixed)) == [("b", "search", '{"q":"y"}')]
    theirs, _ = run(
        ChatTurn(asked(stream=False)), together({"content": "Look."}, {"tool_calls": [THEIRS]})
    )
    assert text(read(theirs)) == "Look."
    assert read(theirs)["finish"] == "tool_calls"


def test_the_reason_that_says_most_is_shown() -> None:
    said = split(choice(0, {"content": "Hm."}, "length"), choice(1, {"content": " So."}, "stop"))
    out, _ = run(ChatTurn(asked()), stream(ROLE, said, DONE))
    assert (text(folded(out)), folded(out)["finish"]) == ("Hm. So.", "length")


@pytest.mark.parametrize("stream_", [True, False])
def test_without_our_tools_all_choices_pass_as_they_came(stream_: bool) -> None:
    raw = (
        stream(ROLE, *ONE_EVENT, chunk(usage=usage(9, 1)), DONE)
        if stream_
        else together({"content": "a"}, {"content": "b"})
    )
    options = {"stream_options": {"include_usage": True}} if stream_ else {}
    assert run(ChatTurn(asked(stream=stream_, injected=False, **options)), raw)[0] == raw


# -- the older form --------------------------------------------------------------------------------

OLDER = {"name": "grep", "arguments": '{"pattern":"x"}'}
PIECES = [
    {"name": "gr", "arguments": ""},
    {"name": "ep"},
    {"arguments": '{"pattern"'},
    {"arguments": ':"x"}'},
]


@pytest.mark.parametrize("beside", [True, False])
def test_a_call_in_the_older_form_is_ours(beside: bool) -> None:
    both = {"tool_calls": [OURS]} if beside else {}
    streamed = stream(
        ROLE, chunk({"function_call": OLDER, **both}), chunk({}, "function_call"), DONE
    )
    pieces = stream(
        ROLE,
        *(chunk({"function_call": one}) for one in PIECES),
        chunk(both),
        chunk({}, "stop"),
        DONE,
    )
    for raw in (streamed, pieces):
        out, requests = run(ChatTurn(asked()), raw, ANSWER)
        assert text(folded(out)) == "It is 42."
        assert b"grep" not in out
        [call] = requests[1]["messages"][1]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"pattern": "x"}
        assert "function_call" not in requests[1]["messages"][1]
        assert requests[1]["messages"][2]["tool_call_id"] == call["id"]
    out, requests = run(
        ChatTurn(asked(stream=False)), whole({"function_call": OLDER, **both}), ANSWERED
    )
    assert b"grep" not in out
    assert len(requests) == 2


def test_the_clients_call_in_the_older_form_stays_as_it_came() -> None:
    theirs = {"name": "search", "arguments": "{}"}
    raw = stream(
        ROLE,
        chunk({"function_call": theirs}),
        chunk({}, "function_call"),
        chunk(usage=usage(9, 1)),
        DONE,
    )
    turn = ChatTurn(asked(stream_options={"include_usage": True}))
    assert run(turn, raw)[0] == raw
    mixed = stream(
        ROLE, chunk({"function_call": theirs}), chunk(calls(OURS)), chunk({}, "function_call"), DONE
    )
    turn = ChatTurn(asked())
    out, requests = run(turn, mixed)
    assert len(requests) == 1
    assert b"grep" not in out
    assert folded(out)["message"]["function_call"] == theirs
    assert folded(out)["finish"] == "function_call"


@pytest.mark.parametrize("beside", [{}, {"content": "Let me look."}])
def test_an_older_call_that_cannot_be_read_is_broken_if_it_names_our_tool(beside: Json) -> None:
    for turn, raw in (
        (ChatTurn(asked()), stream(ROLE, chunk({**beside, "function_call": [OLDER]}))),
        (ChatTurn(asked(stream=False)), whole({**beside, "function_call": [OLDER]})),
    ):
        turn.request()
        with pytest.raises(Broken, match="names a tool"):
            receive(turn, raw)


FLAT = {"index": 0, "type": "function", "id": "a", **OLDER}


def test_a_call_in_the_form_of_the_responses_api_is_ours() -> None:
    pieces = [{**FLAT, "arguments": '{"pat'}, {"index": 0, "arguments": 'tern":"x"}'}]
    for said in ([chunk(calls(FLAT))], [chunk(calls(one)) for one in pieces]):
        out, requests = run(
            ChatTurn(asked()), stream(ROLE, *said, chunk({}, "tool_calls"), DONE), ANSWER
        )
        assert text(folded(out)) == "It is 42."
        assert b"grep" not in out
        assert requests[1]["messages"][1]["tool_calls"] == [
            {"id": "a", "type": "function", "function": OLDER}
        ]
