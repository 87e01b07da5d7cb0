"""Turns as transcripts: what upstream sends, what the client gets, what is asked next."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy import sse
from proxy.dialects import reply
from proxy.dialects.chat.reply import ChatTurn
from proxy.dialects.turn import NO_MORE
from proxy.plan.turn import Broken, State, WrongState
from tests.dialects.chat.turns import (
    ANSWER,
    DONE,
    GREP,
    MIXED,
    OURS,
    ROLE,
    SEARCH,
    SILENT,
    Json,
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
from tests.dialects.turning import feed, receive, run

SHOW_USAGE = {"include_usage": True}

# -- nothing of ours -------------------------------------------------------------------------------

PLAIN = stream(ROLE, chunk({"content": "Hel"}), chunk({"content": "lo"}), chunk({}, "stop"), DONE)
THEIRS = stream(
    ROLE,
    chunk(calls(called("search", ""))),
    chunk(calls(more('{"q":1e400}'))),
    chunk({}, "tool_calls"),
    DONE,
)
DEEP = b'{"a":' * 100_000
UNTOUCHED = {
    "text": PLAIN,
    "CRLF": PLAIN.replace(b"\n", b"\r\n"),
    "calls": THEIRS,
    "empty": b"",
    "nothing said": stream(ROLE, chunk({"content": " "}), chunk({}, "stop"), DONE),
    "no [DONE]": stream(ROLE, chunk({"content": "x"}), chunk({}, "stop")),
    "stops in the middle": stream(ROLE, chunk({"content": "x"})),
    "stops within an event": stream(ROLE) + b'data: {"choices":[{"delta":{"content":"x',
    "comments and names": b": PROCESSING\n\nevent: x\nid: 7\n" + PLAIN,
    "unknown members": stream(
        chunk({"role": "assistant", "content": "x", "annotations": [1e30]}, x={"y": None}), DONE
    ),
    "reasoning": stream(
        ROLE,
        chunk({"reasoning_content": "a"}),
        chunk({"reasoning": "b"}),
        chunk({"refusal": "c"}),
        DONE,
    ),
    "half a surrogate pair": stream(
        ROLE, b'data: {"choices":[{"delta":{"content":"\\ud83d"}}]}\n\n', PLAIN
    ),
    "not UTF-8": stream(ROLE, b'data: {"choices":[{"delta":{"content":"\xff"}}]}\n\n', PLAIN),
    "large numbers": stream(
        ROLE,
        '{"choices":[{"delta":{"content":"x","n":123456789012345678901234}}],"e":1e400}',
        PLAIN,
    ),
    "content filters first": stream(chunk(id="", prompt_filter_results=[]), PLAIN),
    "parts": stream(
        ROLE, chunk({"content": [{"type": "text", "text": "x"}]}), chunk({"content": "y"}), DONE
    ),
    "behind the finish reason": stream(
        ROLE,
        chunk({"content": "x"}),
        chunk({}, "stop"),
        chunk({"content": "y"}),
        chunk(usage=usage(1, 2)),
        DONE,
    ),
    "an error": stream(ROLE, {"error": {"message": "overloaded"}}),
}
SHAPES = (
    "7", "[]", "nonsense", "{}", "", DEEP.decode(),
    '{"choices":7}', '{"choices":null}', '{"choices":[]}', '{"choices":[3]}', '{"choices":[{}]}',
    '{"choices":[{"delta":null}]}', '{"choices":[{"delta":[]}]}',
    '{"choices":[{"delta":{"tool_calls":null}}]}', '{"choices":[{"delta":{"tool_calls":[]}}]}',
    '{"choices":[{"delta":{"tool_calls":7}}]}', '{"choices":[{"delta":{"tool_calls":[4]}}]}',
    '{"choices":[{"delta":{"tool_calls":[{"function":7}]}}]}',
    '{"choices":[{"delta":{"role":7,"content":{"x":1}},"finish_reason":7,"logprobs":8}],"usage":9}',
    '{"choices":[{"delta":{"content":[NaN],"x":"\\ud800"}}]}',
)  # fmt: skip


@pytest.mark.parametrize("raw", UNTOUCHED.values(), ids=UNTOUCHED.keys())
def test_what_needs_no_change_arrives_as_the_very_bytes(raw: bytes) -> None:
    turn = ChatTurn(asked(stream_options=SHOW_USAGE))
    assert turn.streams
    out, _ = run(turn, raw)
    assert out == raw
    assert turn.hidden is None and not turn.mixed


@pytest.mark.parametrize("shape", SHAPES, ids=range(len(SHAPES)))
def test_no_shape_is_an_error_or_changes_what_follows(shape: str) -> None:
    odd = b"data: " + shape.encode() + b"\n\n"
    out, _ = run(ChatTurn(asked(stream_options=SHOW_USAGE)), odd + PLAIN)
    assert out == odd + PLAIN
    out, _ = run(ChatTurn(asked()), OURS, odd + ANSWER)
    known = [
        event.raw for event in sse.EventDecoder().feed(out) if event.data and b'"c1"' in event.data
    ]
    assert text(folded(b"".join(known))) == "Let me look.\n\nIt is 42."


# -- our calls -------------------------------------------------------------------------------------


def test_the_clients_calls_do_not_wait() -> None:
    """Each piece goes on as it comes; only the end waits, for there is something to remember
    first."""
    turn = ChatTurn(asked())
    turn.request()
    shown = [turn.receive(event) for event in sse.EventDecoder().feed(MIXED)]
    role, a, ours, more_of_a, c, end, spent, done = map(bool, shown)
    assert role and a and more_of_a and c
    assert not (ours or end or spent or done)


def test_our_tools_may_have_other_names() -> None:
    renamed = asked(tools=[SEARCH, GREP])
    turn = ChatTurn(renamed)
    turn.request()
    feed(turn, SILENT.replace(b"grep", b"offload_grep"))
    assert [call.name for call in turn.calls] == ["offload_grep"]
    out, _ = run(ChatTurn(renamed), SILENT)
    assert [call[1] for call in made(folded(out))] == ["grep"]


def test_calls_without_ids_get_some() -> None:
    """The same ones each time, and others in another turn: both stand in one history in the end."""
    raw = stream(
        ROLE,
        chunk(calls({"index": 0, "function": {"name": "grep", "arguments": "{}"}})),
        chunk({}, "stop"),
        DONE,
    )
    _, requests = run(ChatTurn(asked()), raw, raw, ANSWER)
    messages = requests[2]["messages"]
    ids = [message["tool_calls"][0]["id"] for message in messages[1::2]]
    assert ids == [message["tool_call_id"] for message in messages[2::2]]
    assert len(set(ids)) == 2 and all(ids)
    assert run(ChatTurn(asked()), raw, raw, ANSWER)[1] == requests
    other = run(ChatTurn(asked(messages=[{"role": "user", "content": "ho"}])), raw, ANSWER)[1]
    assert other[1]["messages"][1]["tool_calls"][0]["id"] not in ids


def test_calls_with_the_same_id_are_told_apart() -> None:
    same = [called(name, "{}", "x", index) for index, name in enumerate(("search", "grep", "grep"))]
    turn = ChatTurn(asked(messages=[]))
    run(turn, stream(ROLE, chunk(calls(*same)), chunk({}, "stop"), DONE))
    assert turn.hidden is not None
    ids = [call["id"] for call in json.loads(turn.hidden.instead or b"")[0]["tool_calls"]]
    assert ids[0] == "x" and len(set(ids)) == 3
    assert [json.loads(raw)["tool_call_id"] for raw in turn.hidden.after] == ids[1:]


# -- ends ------------------------------------------------------------------------------------------


def told(request: Json) -> str:
    """The newest answer of our tools in a request."""
    return next(one["content"] for one in reversed(request["messages"]) if one["role"] == "tool")


def test_the_answer_before_the_last_round_says_that_it_is_the_last() -> None:
    note = NO_MORE.format("grep", "read_file")
    _, requests = run(ChatTurn(asked(max_rounds=2)), OURS, OURS, ANSWER)
    assert [told(request) for request in requests[1:]] == ["found", f"found\n\n{note}"]
    turn = ChatTurn(asked(max_rounds=1))
    run(turn, MIXED)
    assert turn.hidden is not None and json.loads(turn.hidden.after[0])["content"] == "found"


EMPTY = stream(ROLE, chunk({"content": " "}), chunk({}, "stop"), DONE)


def test_a_model_that_says_nothing_is_asked_once_more() -> None:
    """If it says nothing then, either, the client gets that."""
    turn = ChatTurn(asked())
    out, requests = run(turn, SILENT, EMPTY, EMPTY)
    reply = folded(out)
    assert (text(reply).strip(), reply["finish"], made(reply), len(requests)) == ("", "stop", [], 3)


def test_a_mixed_round_that_was_stopped() -> None:
    """What is complete of ours is answered; what broke off is not put back."""
    broken = chunk(
        calls(
            called("grep", "{}", "b", 0),
            called("search", "{}", "a", 1),
            called("grep", '{"p', "c", 2),
        )
    )
    turn = ChatTurn(asked())
    out, _ = run(turn, stream(ROLE, broken, chunk({}, "length"), DONE))
    assert made(folded(out)) == [("a", "search", "{}")]
    assert folded(out)["finish"] == "length"
    assert turn.hidden is not None and len(turn.hidden.after) == 1
    assert [call["id"] for call in json.loads(turn.hidden.instead or b"")[0]["tool_calls"]] == [
        "b",
        "a",
    ]


def test_a_round_that_nobody_said_was_over() -> None:
    """[DONE] is enough of an end, and so is a finish reason."""
    call = chunk(calls(called("grep")))
    for raw in (
        stream(ROLE, call, DONE),
        stream(ROLE, call, chunk({}, "stop")),
        stream(chunk(call["choices"][0]["delta"], "stop")),
    ):
        turn = ChatTurn(asked())
        turn.request()
        feed(turn, raw)
        assert turn.state is State.CALLING


@pytest.mark.parametrize("reason", ["model_length", "SAFETY", "length"])
def test_a_reason_that_is_no_ordinary_one_stops_an_incomplete_call(reason: str) -> None:
    """`model_length` is Mistral's. The client sees upstream's word:
    https://github.com/laravel/ai/issues/955"""
    said = stream(
        ROLE,
        chunk({"content": "I look."}),
        chunk(calls(called("grep", '{"pat'))),
        chunk({}, reason),
        DONE,
    )
    turn = ChatTurn(asked())
    out, requests = run(turn, said)
    assert len(requests) == 1
    assert (text(folded(out)), made(folded(out)), folded(out)["finish"]) == ("I look.", [], reason)


@pytest.mark.parametrize("reason", ["eos", "end_turn", "new_word"])
def test_a_complete_call_is_answered_whatever_the_reason_is_called(reason: str) -> None:
    said = stream(ROLE, chunk(calls(called("grep"))), chunk({}, reason), DONE)
    out, requests = run(ChatTurn(asked()), said, ANSWER)
    assert len(requests) == 2
    assert text(folded(out)) == "It is 42."


@pytest.mark.parametrize(
    "delta", [called("grep", '{"pat'), {"index": 0, "function": {"name": "grep"}}]
)
def test_a_reply_that_stops_within_our_call_is_broken(delta: Json) -> None:
    turn = ChatTurn(asked())
    turn.request()
    with pytest.raises(Broken):
        feed(turn, stream(ROLE, chunk(calls(delta))))


def test_nothing_counts_behind_the_end() -> None:
    turn = ChatTurn(asked())
    turn.request()
    assert not turn.over
    shown = b"".join(map(turn.receive, sse.EventDecoder().feed(PLAIN + b": bye\n\n" + PLAIN)))
    end = stream(chunk({}, "stop"), DONE)
    assert shown == PLAIN.removesuffix(end)
    assert turn.over
    assert turn.end() + turn.close() == end


@pytest.mark.parametrize(
    "delta",
    [
        calls({"index": 0, "function": {"arguments": "x" * 1_000}}),
        calls(called("search", "x" * 50_000)),
        calls(
            *(
                {"index": number, "id": f"0-{number}", "function": {"name": "search"}}
                for number in range(500)
            )
        ),
        {"content": "x" * 50_000},
        {"content": ["x" * 50_000]},
    ],
    ids=["arguments without a name", "the client's arguments", "calls", "text", "parts"],
)
def test_a_reply_without_end_is_broken(delta: Json, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reply, "MAX_REPLY", reply.MAX_REPLY // 100)
    monkeypatch.setattr(reply, "MAX_ARGUMENTS", reply.MAX_ARGUMENTS // 100)
    turn = ChatTurn(asked())
    turn.request()
    turn.receive(sse.ServerSentEvent(b"", json.dumps(ROLE).encode()))
    data = json.dumps(chunk(delta)).encode()
    with pytest.raises(Broken):
        for number in range(20):
            turn.receive(sse.ServerSentEvent(b"", data.replace(b'"0-', b'"%d-' % number)))


def test_calls_in_the_wrong_state_raise() -> None:
    turn = ChatTurn(asked())
    for wrong in (
        lambda: turn.calls,
        lambda: turn.answer([]),
        lambda: turn.reword(""),
        turn.end,
        turn.close,
        lambda: turn.hidden,
        lambda: turn.receive(sse.ServerSentEvent(b"", b"")),
        lambda: turn.receive_whole(b""),
    ):
        with pytest.raises(WrongState):
            wrong()
    turn.request()
    with pytest.raises(WrongState):
        turn.request()


# -- fields ----------------------------------------------------------------------------------------


def test_usage_is_asked_for_always_and_shown_only_to_who_asked() -> None:
    raw = stream(ROLE, chunk({"content": "x"}), chunk({}, "stop"), chunk(usage=usage(10, 2)), DONE)
    turn = ChatTurn(asked())
    out, _ = run(turn, raw)
    assert out == stream(ROLE, chunk({"content": "x"}), chunk({}, "stop"), DONE)
    assert (turn.spent.prompt, turn.spent.completion) == (10, 2)
    assert run(ChatTurn(asked(stream_options=SHOW_USAGE)), raw)[0] == raw


def moonshot(finish: str, used: Json) -> list[Json]:
    choice = {"index": 0, "delta": {}, "finish_reason": finish, "usage": used}
    return [chunk() | {"choices": [choice]}]


ENDS = {
    "DeepSeek": lambda finish, used: [chunk({}, finish, usage=used)],
    "OpenRouter": lambda finish, used: [
        chunk({}, finish),
        chunk({"role": "assistant", "content": ""}, usage=used),
    ],
    "Moonshot": moonshot,
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS.keys())
def test_usage_that_comes_beside_a_choice_covers_all_rounds_and_is_shown_once(end: Any) -> None:
    first = stream(ROLE, chunk(calls(called("grep"))), *end("tool_calls", usage(100, 10)), DONE)
    turn = ChatTurn(asked(stream_options=SHOW_USAGE))
    out, _ = run(
        turn, first, stream(ROLE, chunk({"content": "42"}), *end("stop", usage(150, 5)), DONE)
    )
    assert [one["usage"] for one in events(out)[:-1] if one.get("usage")] == [usage(150, 15)]
    assert (turn.spent.prompt, turn.spent.completion) == (250, 15)


def test_one_frame_and_one_role() -> None:
    first = stream(
        chunk(id="", created=0, prompt_filter_results=[]),
        chunk({"role": "assistant"}, system_fingerprint=None),
        SILENT,
    )
    second = stream(
        chunk(
            {"role": "assistant", "content": "a"},
            id="c2",
            created=9,
            model="other",
            system_fingerprint="fp",
        ),
        chunk({"role": "assistant", "content": "b"}, id="c2"),
        chunk({}, "stop", id="c2"),
        DONE,
    )
    out, _ = run(ChatTurn(asked()), first, second)
    got = events(out)[1:-1]
    assert {(one["id"], one["created"], one["model"]) for one in got} == {("c1", 1, "m")}
    assert {one.get("system_fingerprint") for one in got} == {None}
    assert sum("role" in choice["delta"] for one in got[1:] for choice in one["choices"]) == 1
    assert text(folded(out)) == "ab"


def test_a_stream_that_starts_over_has_one_frame_and_one_role() -> None:
    turn = ChatTurn(asked(injected=False))
    turn.request()
    out, _ = map(
        turn.receive, sse.EventDecoder().feed(stream(ROLE, {"error": {"message": "overloaded"}}))
    )
    assert turn.refusal and turn.start_over()
    turn.request()
    got = [one for one in events(out + feed(turn, ANSWER) + turn.close()) if one != DONE]
    assert [(one["id"], "role" in one["choices"][0]["delta"]) for one in got] == [
        ("c1", True),
        *[("c1", False)] * 3,
    ]


def test_names_of_events_stay() -> None:
    """In events that had to be written anew: of a call with another index, or of a later round."""
    renumbered = stream(chunk(calls(called("search", "{}", "a", 1), role="assistant"))).replace(
        b"data", b"event: x\ndata"
    )
    assert run(ChatTurn(asked()), renumbered)[0].count(b"event: x\ndata: {") == 1
    named = stream(ROLE, chunk({}, "stop")).replace(b"data", b"event: x\ndata")
    assert run(ChatTurn(asked()), OURS, named)[0].count(b"event: x\ndata: {") == 1


GEMINI = {"extra_content": {"google": {"thought_signature": "S"}}}
TEXT, ENCRYPTED = (
    {"type": "reasoning.text", "index": 0},
    {"type": "reasoning.encrypted", "index": 0, "data": "S", "id": "r"},
)
SIGNED: dict[str, tuple[list[Json], Json]] = {
    "OpenRouter": (
        [
            {"reasoning": "th", "reasoning_details": [{**TEXT, "text": "th", "signature": None}]},
            {"reasoning_details": [{**TEXT, "text": "ink", "signature": "S"}]},
            {"reasoning_details": [ENCRYPTED]},
        ],
        {
            "reasoning": "th",
            "reasoning_details": [{**TEXT, "text": "think", "signature": "S"}, ENCRYPTED],
        },
    ),
    "LiteLLM": (
        [
            {"thinking_blocks": [{"type": "thinking", "thinking": "th"}]},
            {"thinking_blocks": [{"type": "thinking", "thinking": "ink", "signature": "S"}]},
            {"thinking_blocks": [{"type": "thinking", "thinking": "more", "signature": "S2"}]},
        ],
        {
            "thinking_blocks": [
                {"type": "thinking", "thinking": "think", "signature": "S"},
                {"type": "thinking", "thinking": "more", "signature": "S2"},
            ]
        },
    ),
    "Gemini": ([GEMINI], GEMINI),
    "blocks of no known shape": (
        [{"reasoning_details": ["S"]}, {"reasoning_details": ["T"]}],
        {"reasoning_details": ["S", "T"]},
    ),
}


@pytest.mark.parametrize(("deltas", "kept"), SIGNED.values(), ids=SIGNED.keys())
def test_signed_reasoning_is_shown_in_blocks_and_goes_back_with_its_round(
    deltas: list[Json], kept: Json
) -> None:
    """What is one value is not shown of a hidden round, and no blocks are shown behind a call of
    ours."""
    thinking = [chunk(delta) for delta in deltas]
    more = stream(ROLE, *thinking, chunk({"content": "It is 42."}), chunk({}, "stop"), DONE)
    turn = ChatTurn(asked())
    out, requests = run(turn, stream(ROLE, *thinking, SILENT), more)
    message = requests[1]["messages"][1]
    assert {key: message[key] for key in kept} == kept
    assert out.count(b'"S"') == more.count(b'"S"')
    assert turn.hidden
    instead = turn.hidden.instead
    last = folded(out)["message"] if instead is None else json.loads(instead)[0]
    assert {key: last[key] for key in kept} == kept
    assert turn.hidden.before[0].count(b'"S"') == json.dumps(kept).count('"S"')
    out, _ = run(ChatTurn(asked()), stream(ROLE, *thinking, SILENT), ANSWER)
    assert folded(out)["message"].get("reasoning") == kept.get("reasoning")
    for visible in (
        stream(ROLE, *thinking, chunk({"content": "x"}), chunk({}, "stop"), DONE),
        stream(ROLE, *thinking, MIXED),
    ):
        out, _ = run(ChatTurn(asked()), visible)
        [signed] = [key for key in kept if key != "reasoning"]
        parts = [delta[signed] for delta in deltas]
        flat = [part for one in parts for part in one] if isinstance(parts[0], list) else parts[-1]
        assert folded(out)["message"][signed] == flat
    out, _ = run(ChatTurn(asked(injected=False)), stream(ROLE, *thinking, DONE))
    assert out == stream(ROLE, *thinking, DONE)


@pytest.mark.parametrize(("deltas", "kept"), SIGNED.values(), ids=SIGNED.keys())
def test_blocks_of_reasoning_are_shown_as_they_come(deltas: list[Json], kept: Json) -> None:
    """Until one of our tools is called. A value that signs all of it waits for the round's end."""
    turn = ChatTurn(asked())
    turn.request()
    shown = [receive(turn, stream(one)) for one in (ROLE, *map(chunk, deltas))][1:]
    assert all(shown) is (deltas != [GEMINI])
    turn = ChatTurn(asked())
    turn.request()
    receive(turn, SILENT)
    shown = [receive(turn, stream(chunk(delta))) for delta in deltas]
    assert not any(b'"S"' in one for one in shown)


def test_thinking_that_is_part_of_the_content_is_kept() -> None:
    """Mistral's."""
    thoughts = [[{"type": "text", "text": text}] for text in ("Hm", ", ")]
    deltas = [*({"content": [{"type": "thinking", "thinking": thought}]} for thought in thoughts)]
    deltas += [{"content": text} for text in ("", "Let ", "me.")]
    _, requests = run(ChatTurn(asked()), stream(ROLE, *map(chunk, deltas), SILENT), ANSWER)
    thinking = {"type": "thinking", "thinking": [part for thought in thoughts for part in thought]}
    assert requests[1]["messages"][1]["content"] == [thinking, {"type": "text", "text": "Let me."}]


@pytest.mark.parametrize("signed", [GEMINI, {"thought_signature": "S"}])
def test_geminis_signature_goes_to_the_clients_first_call(signed: Json) -> None:
    made = [
        called("grep", "{}", "a", 0, **signed),
        called("search", "{}", "b", 1),
        called("search", "{}", "c", 2),
    ]
    turn = ChatTurn(asked())
    out, _ = run(turn, stream(ROLE, chunk(calls(*made)), chunk({}, "tool_calls"), DONE))
    shown = folded(out)["message"]["tool_calls"]
    assert [{key: call[key] for key in signed if key in call} for call in shown] == [signed, {}]
    assert turn.hidden is not None
    instead = json.loads(turn.hidden.instead or b"")[0]["tool_calls"]
    assert [{key: call[key] for key in signed if key in call} for call in instead] == [
        signed,
        {},
        {},
    ]
    reply, _ = run(ChatTurn(asked(stream=False)), whole(calls(*made), "tool_calls"))
    assert [
        {key: call[key] for key in signed if key in call}
        for call in read(reply)["message"]["tool_calls"]
    ] == [
        signed,
        {},
    ]


# -- whole replies ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"", b"[]", b'{"choices":[]}', b'{"choices":[{"message":7}]}', b'{"choices":[{"delta":{}}]}', b'{"error":{}}',
        b"<html>", b'{"choices":[{"message":null}]}',
        b'{"id": "c",\n "choices": [{"message": {"content": "\\ud83d", "x": 1e400}}], "y": 123456789012345678901}',
    ],
)  # fmt: skip
def test_a_whole_reply_with_nothing_of_ours_goes_through(body: bytes) -> None:
    turn = ChatTurn(asked(stream=False))
    turn.request()
    assert turn.receive_whole(body) + turn.end() == b""
    assert turn.close() == body
    assert turn.hidden is None


# -- every mix -------------------------------------------------------------------------------------


def check_pairs(turn: ChatTurn) -> None:
    """The history that the next request makes of this turn is one that an API takes."""
    if turn.hidden is None:
        return
    seen = {"role": "assistant", "tool_calls": [{"id": call.id} for call in turn.visible[1]]}
    instead = json.loads(turn.hidden.instead) if turn.hidden.instead else [seen]
    history = [*map(json.loads, turn.hidden.before), *instead, *map(json.loads, turn.hidden.after)]
    history += [{"role": "tool", "tool_call_id": call.id} for call in turn.visible[1]]
    waiting: list[str] = []
    for message in history:
        if message["role"] == "tool":
            waiting.remove(message["tool_call_id"])
        else:
            assert not waiting
            waiting = [call.get("id", "") for call in message.get("tool_calls", [])]
    assert not waiting


ODD = st.sampled_from(
    [
        *(None, True, -1, 7, 10**30, 1.5, "", "x", "grep", "length", "\ud83d"),
        *([], [None], [[]], {}, {"x": None}, {"function": {}}),
    ]
)


def spoiled(value: Any, data: st.DataObject) -> Any:
    """The value with something else at some place in it, or without that."""
    if not isinstance(value, dict | list) or not value or data.draw(st.integers(0, 5)) == 0:
        return data.draw(ODD)
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = data.draw(st.sampled_from(keys))
    if data.draw(st.integers(0, 9)) == 0:
        return (
            {k: v for k, v in value.items() if k != key}
            if isinstance(value, dict)
            else value[:key] + value[key + 1 :]
        )
    changed = spoiled(value[key], data)
    return (
        {**value, key: changed}
        if isinstance(value, dict)
        else [*value[:key], changed, *value[key + 1 :]]
    )


RICH = stream(
    ROLE,
    chunk(
        {
            "reasoning": "a",
            "reasoning_details": [{"type": "t", "index": 0, "text": "a", "signature": "S"}],
        }
    ),
    chunk(
        {"content": [{"type": "text", "text": "x"}], "extra_content": {"signature": "S"}},
        logprobs={"content": [{}]},
    ),
    chunk(
        calls(called("grep", "{", "a", 0, thought_signature="S"), called("search", "{}", "b", 1))
    ),
    chunk(
        calls(
            more("}"),
            {"index": 2, "id": "c", "type": "custom", "custom": {"name": "grep", "input": "x"}},
        )
    ),
    chunk({}, "tool_calls", usage=usage(1, 2) | {"completion_tokens_details": {"x": 1}}),
    chunk(usage=usage(1, 2)),
    DONE,
)


@given(
    st.lists(st.sampled_from([OURS, SILENT, MIXED, RICH, ANSWER]), min_size=1, max_size=3),
    st.data(),
)
def test_nothing_that_upstream_says_is_an_error_of_ours(
    rounds: list[bytes], data: st.DataObject
) -> None:
    """Whatever JSON it is, in any round: it is read, or it is Broken, and no call is left without
    its answer."""
    turn = ChatTurn(
        asked(
            stream_options=SHOW_USAGE,
            response_format=data.draw(st.sampled_from([None, {"type": "json_object"}])),
        )
    )
    out = b""
    for raw in rounds:
        said = events(raw)
        for _ in range(data.draw(st.integers(0, 4))):
            place = data.draw(st.integers(0, len(said) - 1))
            said[place] = spoiled(said[place], data)
        turn.request()
        try:
            out += feed(turn, stream(*(one if one == DONE else json.dumps(one) for one in said)))
        except Broken:
            return
        if turn.state is State.CALLING:
            turn.answer(["found"] * len(turn.calls))
        if turn.state is State.DONE:
            try:
                end = turn.close()
            except Broken:
                return
            assert events(out + end)
            check_pairs(turn)
            return
