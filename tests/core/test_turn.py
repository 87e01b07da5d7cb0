"""Turns as transcripts: what upstream sends, what the client gets, what is asked next. Every stream at every cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from proxy.core import rawjson, sse
from proxy.core.turn import Asked, Broken, State, Turn, WrongState

GREP = {"type": "function", "function": {"name": "grep", "parameters": {}}}
READ = {"type": "function", "function": {"name": "read_file", "parameters": {}}}
MINE = {"type": "function", "function": {"name": "search", "parameters": {}}}
BASE: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": [MINE]}
DONE = "[DONE]"


def asked(stream: bool = True, max_rounds: int = 8, **members: Any) -> Asked:
    body = {**BASE, "stream": stream, **members}
    raws = {key: Raw(json.dumps(value).encode()) for key, value in body.items() if value is not None}
    tools = [rawjson.encode(tool) for tool in (GREP, READ)]
    return Asked(raws, rawjson.elements(raws["messages"]), tools, ("grep", "read_file"), max_rounds)


def chunk(
    delta: dict[str, Any] | None = None, finish: str | None = None, id: str = "c1", **more: Any
) -> dict[str, Any]:
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish}]
    return {"id": id, "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": choices, **more}


def called(name: str, arguments: str = "{}", id: str = "call_1", index: int = 0, **more: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"index": index, "id": id, "type": "function", "function": function, **more}


def calls(*deltas: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"tool_calls": list(deltas), **more}


def usage(prompt: int, completion: int) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def stream(*events: dict[str, Any] | str) -> bytes:
    return b"".join(sse.encode(one.encode() if isinstance(one, str) else json.dumps(one).encode()) for one in events)


def feed(turn: Turn, raw: bytes, size: int = 1 << 20) -> bytes:
    """One round's reply, in pieces of `size` bytes."""
    out, decoder = b"", sse.Decoder()
    for start in range(0, len(raw), size):
        out += b"".join(turn.receive(event) for event in decoder.feed(raw[start : start + size]))
    out += b"".join(turn.receive(event) for event in decoder.flush())
    return out + turn.end()


def run(turn: Turn, *rounds: bytes, size: int = 1 << 20, answer: str = "found") -> tuple[bytes, list[dict[str, Any]]]:
    """What the client gets, and what upstream was asked."""
    out, requests = b"", []
    for raw in rounds:
        requests.append(json.loads(turn.request()))
        out += feed(turn, raw, size)
        if turn.state is State.CALLING:
            turn.answer([answer] * len(turn.calls))
    return out + turn.close(), requests


def events(out: bytes) -> list[Any]:
    decoder = sse.Decoder()
    found = [event.data for event in decoder.feed(out) + decoder.flush() if event.data is not None]
    return [DONE if data == b"[DONE]" else json.loads(data) for data in found]


def folded(out: bytes) -> dict[str, Any]:
    """What a client makes of a stream: text, calls, finish reason, usage."""
    text, finish, spent = "", None, None
    tool_calls: dict[int, dict[str, str]] = {}
    for one in events(out):
        if one == DONE:
            continue
        spent = one.get("usage") or spent
        for choice in one["choices"]:
            text += choice["delta"].get("content") or ""
            finish = choice["finish_reason"] or finish
            for delta in choice["delta"].get("tool_calls") or []:
                call = tool_calls.setdefault(delta["index"], {"id": "", "name": "", "arguments": ""})
                call["id"] = delta.get("id") or call["id"]
                call["name"] += delta["function"].get("name") or ""
                call["arguments"] += delta["function"].get("arguments") or ""
    return {
        "text": text,
        "calls": [tool_calls[index] for index in sorted(tool_calls)],
        "finish": finish,
        "usage": spent,
    }


# -- nothing of ours --------------------------------------------------------------------------------------------------

ROLE = chunk({"role": "assistant", "content": ""})
PLAIN = stream(ROLE, chunk({"content": "Hel"}), chunk({"content": "lo"}), chunk({}, "stop"), DONE)
THEIRS = stream(
    ROLE,
    chunk(calls(called("search", ""))),
    chunk(calls({"index": 0, "function": {"arguments": '{"q":1e400}'}})),
    chunk({}, "tool_calls"),
    DONE,
)
ODD = (
    b': hi\n\nevent: x\ndata: {"no":"choices"}\n\ndata: {"choices":7}\n\n'
    b'data: {"choices":[{"delta":null}]}\n\ndata: nonsense\n\n'
)
ODDER = (
    b'data: {"choices":[{"delta":{"tool_calls":null}}]}\n\ndata: {"choices":[3]}\n\n'
    b'data: {"choices":[{"delta":{"tool_calls":[4]}}]}\n\n'
)


@pytest.mark.parametrize("raw", [PLAIN, THEIRS, ODD + PLAIN, ODDER + PLAIN, PLAIN.replace(b"\n", b"\r\n"), b""])
@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_what_needs_no_change_arrives_as_the_very_bytes(raw: bytes, size: int) -> None:
    turn = Turn(asked())
    out, _ = run(turn, raw, size=size)
    assert out == raw
    assert turn.hidden is None


def test_usage_is_asked_for_always_and_shown_only_to_who_asked() -> None:
    raw = stream(ROLE, chunk({"content": "x"}), chunk({}, "stop"), chunk(usage=usage(10, 2)), DONE)
    turn = Turn(asked())
    out, [request] = run(turn, raw)
    assert request["stream_options"] == {"include_usage": True}
    assert out == stream(ROLE, chunk({"content": "x"}), chunk({}, "stop"), DONE)
    assert (turn.spent.prompt, turn.spent.completion) == (10, 2)
    shown, [request] = run(Turn(asked(stream_options={"include_usage": True, "x": 1})), raw)
    assert shown == raw
    assert request["stream_options"] == {"include_usage": True, "x": 1}


# -- our calls --------------------------------------------------------------------------------------------------------

OURS = stream(
    ROLE,
    chunk({"content": "Let me look."}),
    chunk(calls(called("grep", '{"pat'))),
    chunk(calls({"index": 0, "function": {"arguments": 'tern":"x"}'}})),
    chunk({}, "tool_calls"),
    chunk(usage=usage(100, 10)),
    DONE,
)
ANSWER = stream(
    chunk({"role": "assistant", "content": ""}, id="c2"),
    chunk({"content": "It is "}, id="c2"),
    chunk({"content": "42."}, id="c2"),
    chunk({}, "stop", id="c2"),
    chunk(usage=usage(150, 5), id="c2"),
    DONE,
)


def test_a_hidden_round() -> None:
    turn = Turn(asked(stream_options={"include_usage": True}))
    out, requests = run(turn, OURS, ANSWER)
    got = events(out)
    assert {one["id"] for one in got if one != DONE} == {"c1"}
    assert sum("role" in choice["delta"] for one in got if one != DONE for choice in one["choices"]) == 1
    assert folded(out) == {
        "text": "Let me look.\n\nIt is 42.",
        "calls": [],
        "finish": "stop",
        "usage": usage(150, 15),
    }
    assert got[-1] == DONE and got.count(DONE) == 1
    first, second = requests
    assert [tool["function"]["name"] for tool in first["tools"]] == ["search", "grep", "read_file"]
    assert second["messages"][1:] == [
        {
            "role": "assistant",
            "content": "Let me look.",
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "grep", "arguments": '{"pattern":"x"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "found"},
    ]
    hidden = turn.hidden
    assert hidden is not None
    assert [json.loads(raw) for raw in hidden.before] == second["messages"][1:]
    assert json.loads(hidden.instead or b"") == {"role": "assistant", "content": "It is 42."}
    assert turn.visible == ("Let me look.\n\nIt is 42.", [])


def test_without_any_text_before_the_reply_needs_no_other_wording() -> None:
    turn = Turn(asked())
    out, _ = run(turn, OURS.replace(b"Let me look.", b""), ANSWER)
    assert folded(out)["text"] == "It is 42."
    assert turn.hidden is not None and turn.hidden.instead is None


MIXED = stream(
    ROLE,
    chunk(calls(called("search", '{"q":', "a", 0))),
    chunk(calls(called("read_file", '{"path":"p"}', "b", 1))),
    chunk(calls({"index": 0, "function": {"arguments": "1}"}})),
    chunk(calls(called("search", "{}", "c", 2))),
    chunk({}, "tool_calls"),
    DONE,
)


def test_a_mixed_turn() -> None:
    turn = Turn(asked())
    out, _ = run(turn, MIXED)
    assert folded(out) == {
        "text": "",
        "calls": [
            {"id": "a", "name": "search", "arguments": '{"q":1}'},
            {"id": "c", "name": "search", "arguments": "{}"},
        ],
        "finish": "tool_calls",
        "usage": None,
    }
    hidden = turn.hidden
    assert hidden is not None and hidden.before == []
    assert [call["id"] for call in json.loads(hidden.instead or b"")["tool_calls"]] == ["a", "b", "c"]
    assert [json.loads(raw)["tool_call_id"] for raw in hidden.after] == ["b"]
    assert [call.id for call in turn.visible[1]] == ["a", "c"]


PIECES: dict[str, list[dict[str, Any]]] = {
    "the name in pieces": [
        chunk(calls({"index": 0, "id": "b", "type": "function", "function": {"name": "read"}})),
        chunk(calls({"index": 0, "function": {"name": "_file"}})),
        chunk(calls({"index": 0, "function": {"arguments": "{}"}})),
        chunk({}, "tool_calls"),
    ],
    "the name repeated": [
        chunk(calls(called("read_file", "", "b"))),
        chunk(calls(called("read_file", "{}", "b"))),
        chunk({}, "tool_calls"),
    ],
    "no index": [
        chunk(calls({"id": "b", "function": {"name": "read_file", "arguments": ""}})),
        chunk(calls({"function": {"arguments": "{}"}})),
        chunk({}, "tool_calls"),
    ],
    "the finish reason in the call's event": [chunk(calls(called("read_file", "{}", "b")), "tool_calls")],
    "no arguments at all": [
        chunk(calls({"index": 0, "id": "b", "function": {"name": "read_file"}})),
        chunk({}, "tool_calls"),
    ],
}


@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES.keys())
def test_how_servers_stream_a_call(pieces: list[dict[str, Any]]) -> None:
    turn = Turn(asked())
    turn.request()
    out = feed(turn, stream(ROLE, *pieces, DONE))
    assert turn.state is State.CALLING
    assert [(call.id, call.name) for call in turn.calls] == [("b", "read_file")]
    assert out == stream(ROLE)


def test_a_name_that_begins_like_ours_is_the_clients() -> None:
    raw = stream(
        chunk(calls({"index": 0, "id": "a", "type": "function", "function": {"name": "grep"}}, role="assistant")),
        chunk(calls({"index": 0, "function": {"name": "_files"}})),
        chunk(calls({"index": 0, "function": {"arguments": "{}"}})),
        chunk({}, "tool_calls"),
        DONE,
    )
    out, _ = run(Turn(asked()), raw)
    assert folded(out)["calls"] == [{"id": "a", "name": "grep_files", "arguments": "{}"}]


def test_index_always_0_with_a_new_id() -> None:
    raw = stream(
        ROLE,
        *(chunk(calls(called(name, "{}", id))) for name, id in (("grep", "a"), ("search", "b"))),
        chunk({}, "tool_calls"),
    )
    turn = Turn(asked())
    out, _ = run(turn, raw)
    assert [call["id"] for call in folded(out)["calls"]] == ["b"]
    assert turn.hidden is not None and len(turn.hidden.after) == 1


def test_calls_without_ids_get_some() -> None:
    raw = stream(
        ROLE, chunk(calls({"index": 0, "function": {"name": "grep", "arguments": "{}"}})), chunk({}, "tool_calls"), DONE
    )
    _, requests = run(Turn(asked()), raw, ANSWER)
    assert (
        requests[1]["messages"][1]["tool_calls"][0]["id"] == requests[1]["messages"][2]["tool_call_id"] == "offload_0_0"
    )


# -- ends -------------------------------------------------------------------------------------------------------------


def test_in_the_last_round_our_calls_are_dropped() -> None:
    turn = Turn(asked(max_rounds=1, tools=None))
    out, requests = run(turn, OURS, OURS)
    assert "tool_choice" not in requests[0] and requests[1]["tool_choice"] == "none"
    assert folded(out)["finish"] == "stop" and folded(out)["calls"] == []
    turn = Turn(asked(max_rounds=1))
    out, requests = run(turn, OURS, MIXED)
    assert "tool_choice" not in requests[1]
    assert folded(out)["finish"] == "tool_calls"
    assert [call["id"] for call in folded(out)["calls"]] == ["a", "c"]


def test_length_within_a_hidden_call_is_length() -> None:
    turn = Turn(asked())
    out, _ = run(turn, stream(ROLE, chunk(calls(called("grep", '{"pat'))), chunk({}, "length"), DONE))
    assert folded(out) == {"text": "", "calls": [], "finish": "length", "usage": None}
    assert turn.hidden is None


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_what_earlier_rounds_used_is_gone(field: str) -> None:
    _, requests = run(Turn(asked(**{field: 50})), OURS, ANSWER)
    assert [request[field] for request in requests] == [50, 40]
    out, requests = run(Turn(asked(**{field: 10})), OURS)
    assert folded(out)["finish"] == "length"
    assert events(out)[-1] == DONE


@pytest.mark.parametrize(
    ("choice", "followed_by"),
    [
        ("auto", "auto"),
        ("required", "required"),
        ({"type": "function", "function": {"name": "grep"}}, None),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}, ...),
    ],
)
def test_tool_choice_of_later_rounds(choice: Any, followed_by: Any) -> None:
    _, requests = run(Turn(asked(tool_choice=choice)), OURS, ANSWER)
    assert requests[0]["tool_choice"] == choice
    assert requests[1].get("tool_choice") == (choice if followed_by is ... else followed_by)


def test_an_error_within_the_stream_ends_it() -> None:
    turn = Turn(asked())
    out, _ = run(turn, OURS, stream({"error": {"message": "overloaded"}}))
    assert events(out)[-1] == {"error": {"message": "overloaded"}}
    assert turn.hidden is None


def test_a_reply_that_stops_within_our_call_is_broken() -> None:
    turn = Turn(asked())
    turn.request()
    with pytest.raises(Broken):
        feed(turn, stream(ROLE, chunk(calls(called("grep", '{"pat')))))


def test_endless_arguments_are_broken() -> None:
    turn = Turn(asked())
    turn.request()
    feed_one = sse.Decoder()
    with pytest.raises(Broken):
        for _ in range(20):
            for event in feed_one.feed(stream(chunk(calls(called("grep", "x" * 100_000))))):
                turn.receive(event)


def test_calls_in_the_wrong_state_raise() -> None:
    turn = Turn(asked())
    for wrong in (
        lambda: turn.calls,
        lambda: turn.answer([]),
        turn.close,
        lambda: turn.hidden,
        lambda: turn.receive(sse.Event(b"", b"")),
    ):
        with pytest.raises(WrongState):
            wrong()
    turn.request()
    with pytest.raises(WrongState):
        turn.request()


# -- fields -----------------------------------------------------------------------------------------------------------


def test_structured_output_is_shown_only_of_the_visible_round() -> None:
    turn = Turn(asked(response_format={"type": "json_schema", "json_schema": {}}))
    out, _ = run(turn, OURS, ANSWER)
    assert folded(out)["text"] == "It is 42."
    assert turn.visible == ("It is 42.", [])


def test_reasoning_is_kept_in_hidden_rounds_and_signatures_are_not_shown_of_them() -> None:
    details = [
        {"type": "reasoning.text", "index": 0, "text": "th"},
        {"type": "reasoning.text", "index": 0, "text": "ink", "signature": "S"},
    ]
    thinking = [chunk({"reasoning_content": "th"}), *(chunk({"reasoning_details": [detail]}) for detail in details)]
    raw = stream(ROLE, *thinking, chunk(calls(called("grep"))), chunk({}, "tool_calls"), DONE)
    out, requests = run(Turn(asked()), raw, ANSWER)
    kept = requests[1]["messages"][1]
    assert kept["reasoning_content"] == "th"
    assert kept["reasoning_details"] == [{"type": "reasoning.text", "index": 0, "text": "think", "signature": "S"}]
    assert b'"S"' not in out and b'"reasoning_content": "th"' in out
    shown, _ = run(Turn(asked()), stream(ROLE, *thinking, chunk({"content": "x"}), chunk({}, "stop"), DONE))
    assert b'"S"' in shown


def test_geminis_signature_goes_to_the_clients_first_call() -> None:
    extra = {"google": {"thought_signature": "sig"}}
    raw = stream(
        ROLE,
        chunk(
            calls(
                called("grep", "{}", "a", 0, extra_content=extra),
                called("search", "{}", "b", 1),
                called("search", "{}", "c", 2),
            )
        ),
        chunk({}, "tool_calls"),
        DONE,
    )
    turn = Turn(asked())
    out, _ = run(turn, raw)
    shown = [delta for one in events(out)[:-1] for delta in one["choices"][0]["delta"].get("tool_calls", [])]
    assert [delta.get("extra_content") for delta in shown] == [extra, None]
    assert turn.hidden is not None
    assert [call.get("extra_content") for call in json.loads(turn.hidden.instead or b"")["tool_calls"]] == [
        extra,
        None,
        None,
    ]


# -- every cut, and whole replies -------------------------------------------------------------------------------------

SCRIPTS = {
    "plain": [PLAIN],
    "theirs": [THEIRS],
    "hidden": [OURS, ANSWER],
    "mixed": [MIXED],
    "hidden, then mixed": [OURS, MIXED],
    "twice hidden": [OURS, OURS, ANSWER],
    "in pieces": [stream(ROLE, *PIECES["the name in pieces"], DONE), ANSWER],
}


@pytest.mark.parametrize("rounds", SCRIPTS.values(), ids=SCRIPTS.keys())
def test_cuts_do_not_matter(rounds: list[bytes]) -> None:
    whole, asked_whole = run(Turn(asked()), *rounds)
    for size in range(1, max(map(len, rounds)), 3):
        out, requests = run(Turn(asked()), *rounds, size=size)
        assert out == whole
        assert requests == asked_whole


def as_whole(raw: bytes) -> bytes:
    """The reply that a server would have given without a stream."""
    fold = folded(raw)
    message: dict[str, Any] = {"role": "assistant", "content": fold["text"] or None}
    if fold["calls"]:
        message["tool_calls"] = [
            {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
            for call in fold["calls"]
        ]
    choice = {"index": 0, "message": message, "finish_reason": fold["finish"]}
    return json.dumps({"id": events(raw)[0]["id"], "choices": [choice], "usage": fold["usage"] or usage(1, 1)}).encode()


@pytest.mark.parametrize("rounds", SCRIPTS.values(), ids=SCRIPTS.keys())
def test_a_whole_reply_is_the_fold_of_the_stream(rounds: list[bytes]) -> None:
    streamed, asked_streamed = run(Turn(asked(stream_options={"include_usage": True})), *rounds)
    turn = Turn(asked(stream=False))
    out, requests = b"", []
    for raw in rounds:
        requests.append(json.loads(turn.request()))
        out += turn.receive_whole(as_whole(raw))
        if turn.state is State.CALLING:
            turn.answer(["found"] * len(turn.calls))
    out += turn.close()
    reply, fold = json.loads(out), folded(streamed)
    message = reply["choices"][0]["message"]
    assert (message["content"] or "") == fold["text"]
    assert [call["id"] for call in message.get("tool_calls", [])] == [call["id"] for call in fold["calls"]]
    assert reply["choices"][0]["finish_reason"] == fold["finish"]
    assert reply["id"] == "c1"
    assert [request["messages"] for request in requests] == [request["messages"] for request in asked_streamed]
    if len(rounds) == 1 and turn.hidden is None:
        assert out == as_whole(rounds[0])


@pytest.mark.parametrize(
    "body", [b"", b"[]", b'{"choices":[]}', b'{"choices":[{"message":7}]}', b'{"error":{}}', b"<html>"]
)
def test_a_whole_reply_of_another_shape_goes_through(body: bytes) -> None:
    turn = Turn(asked(stream=False))
    turn.request()
    assert turn.receive_whole(body) == body
    assert turn.hidden is None and turn.close() == b""


@given(st.data())
def test_any_mix_of_calls(data: st.DataObject) -> None:
    """Nothing of ours is shown, nothing of the client's is lost, and the history put back has every pair."""
    names = data.draw(
        st.lists(st.sampled_from(["grep", "read_file", "search", "grep_files", "re"]), min_size=1, max_size=5)
    )
    deltas = [calls(called(name, "", f"id{index}", index)) for index, name in enumerate(names)]
    deltas += [
        calls({"index": index, "function": {"arguments": "{}"}})
        for index in data.draw(st.permutations(range(len(names))))
    ]
    raw = stream(ROLE, *map(chunk, deltas), chunk({}, "tool_calls"), DONE)
    turn = Turn(asked())
    out, _ = run(
        turn, raw, *([ANSWER] if set(names) <= {"grep", "read_file"} else []), size=data.draw(st.integers(1, 300))
    )
    theirs = [f"id{index}" for index, name in enumerate(names) if name not in ("grep", "read_file")]
    assert sorted(call["id"] for call in folded(out)["calls"]) == theirs
    assert folded(out)["finish"] == ("tool_calls" if theirs else "stop")
    if turn.hidden is not None and theirs:
        whole = json.loads(turn.hidden.instead or b"")
        assert [call["id"] for call in whole["tool_calls"]] == [f"id{index}" for index in range(len(names))]
        assert len(turn.hidden.after) == len(names) - len(theirs)
