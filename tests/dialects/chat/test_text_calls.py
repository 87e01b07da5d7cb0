"""Calls of our tools that came as text, and texts that only look like them."""

from __future__ import annotations

import json

import pytest

from proxy.dialects.chat.reply import ChatTurn
from proxy.dialects.grammars import LONGEST, CallRun, LinesBefore
from proxy.dialects.reply import ToolNames
from proxy.plan.turn import State
from tests.dialects.chat.turns import (
    ANSWER,
    DONE,
    ROLE,
    asked,
    called,
    calls,
    chunk,
    folded,
    made,
    read,
    stream,
    text,
    usage,
    whole,
)
from tests.dialects.turning import events, run
from tests.doubling import assert_linear

NAMES = ToolNames(("grep", "read_file"), {"search"})
CALL = '{"name": "grep", "arguments": {"pattern": "x{1}"}}'
X = [("grep", {"pattern": "x{1}"})]

CALLS = {
    CALL: X,
    f"\n {CALL}\n": X,
    f"```json\n{CALL}\n```": X,
    f"```\n{CALL}\n```": X,
    f"<tool_call>\n{CALL}\n</tool_call>": X,
    f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>": X * 2,
    f"<|python_tag|>{CALL}": X,
    f"<|tool_call|>[{CALL}]": X,
    f"[TOOL_CALLS][{CALL}, {CALL}]": X * 2,
    f"{CALL}; {CALL}": X * 2,
    '{"type": "function", "name": "grep", "parameters": {"pattern": "x{1}"}}': X,
    '{"type":"function","function":{"name":"functions.grep","arguments":"{\\"pattern\\": \\"x{1}\\"}"}}': X,
    '{"arguments": {"pattern": "x{1}"}, "name": "grep"}': X,
    '{"tool": "grep", "args": {"pattern": "x{1}"}}': X,
    '{"tool_calls": [{"id": "call_1", "function": {"name": "grep", "arguments": {"pattern": "x{1}"}}}]}': X,
    '{"name": "read_file"}': [("read_file", {})],
}
TEXTS = [
    "",
    "It is 42.",
    "{",
    "[]",
    "[1]",
    '{"name": "Ada", "arguments": {}}',
    '{"name": "search", "arguments": {}}',
    '{"name": "grep", "arguments": []}',
    '{"name": "grep", "arguments": "x"}',
    f"{CALL} and more",
    f"Call it so: {CALL}",
    CALL[:-1],
    f"[{CALL}, 1]",
    '{"name": 1}',
    "<p>grep</p>",
    "```python\nprint(1)\n```",
    "[" * 100_000,
    '{"name": "grep", "arguments": {"pattern": "' + "x" * LONGEST + '"}}',
]


@pytest.mark.parametrize("written", CALLS)
def test_a_text_that_is_nothing_but_calls_of_ours(written: str) -> None:
    run = CallRun(written, 0, NAMES, first=True)
    assert run.ended
    assert [(NAMES.recognised(call.name), call.arguments) for call in run.ours] == CALLS[written]
    begins = len(written) - len(written.lstrip())
    for end in range(begins, len(written) + 1):
        assert LinesBefore().cut(written[:end], NAMES) == begins, written[:end]


@pytest.mark.parametrize("written", TEXTS, ids=lambda written: written[:40])
def test_any_other_text_stays_a_text(written: str) -> None:
    at = LinesBefore().cut(written, NAMES)
    run = CallRun(written, at, NAMES, first=at == 0)
    assert not (run.ended and run.ours)


ENDLESS = ['{"id": "', '{"name": "', '```json\n{"id": "', "<|"]
"""Each of these may begin a call, but not one of 400 characters without a name of ours."""


@pytest.mark.parametrize(
    "beginning",
    [
        "I",
        '{"name": "Z"',
        "<p>",
        "<p c",
        "`x`",
        "```python\nx",
        "-",
        *(begun + "x" * 400 for begun in ENDLESS),
    ],
    ids=lambda beginning: beginning[:20],
)
def test_a_text_is_shown_as_soon_as_it_cannot_be_a_call(beginning: str) -> None:
    assert LinesBefore().cut(beginning, NAMES) == len(beginning)


@pytest.mark.parametrize("unit", ["[\n", "<|x|>", f"{CALL}\n"])
def test_a_text_that_repeats_itself_takes_linear_time(unit: str) -> None:
    """A weak model repeats what may begin a call, and then says something else."""
    assert_linear(lambda times: LinesBefore().cut(unit * times + "x", NAMES), 50, 100)


@pytest.mark.parametrize(
    ("opens", "closes"), [("[\ngrep(a=\n", ")]"), ("<|tool_call>call:grep{\n", "}")]
)
def test_calls_within_each_other_take_linear_time(opens: str, closes: str) -> None:
    nested = [opens * times + closes * times + "x" for times in (600, 1_200)]
    assert_linear(lambda text: LinesBefore().cut(text, NAMES), *nested)


def spoken(written: str, size: int, finish: str = "stop") -> bytes:
    """A streamed reply with this text in pieces of this size."""
    pieces = [written[at : at + size] for at in range(0, len(written), size)]
    events = [chunk({"content": piece}) for piece in pieces]
    return stream(ROLE, *events, chunk({}, finish), chunk(usage=usage(100, 10)), DONE)


@pytest.mark.parametrize("written", CALLS)
@pytest.mark.parametrize("size", [1, 1_000])
def test_calls_in_a_streamed_text_are_answered_and_never_shown(written: str, size: int) -> None:
    turn = ChatTurn(asked())
    out, requests = run(turn, spoken(written, size), ANSWER)
    assert text(folded(out)).strip() == "It is 42." and made(folded(out)) == []
    message = requests[1]["messages"][1]
    assert message["content"] is None
    made_calls = [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message["tool_calls"]
    ]
    assert made_calls == CALLS[written]
    assert [one["tool_call_id"] for one in requests[1]["messages"][2:]] == [
        one["id"] for one in message["tool_calls"]
    ]


@pytest.mark.parametrize(
    "written", [written for written in TEXTS if written and len(written) < 200]
)
@pytest.mark.parametrize("size", [1, 1_000])
def test_other_texts_reach_the_client_whole(written: str, size: int) -> None:
    turn = ChatTurn(asked())
    out, _ = run(turn, spoken(written, size))
    assert text(folded(out)) == written and turn.hidden is None and turn.visible == (written, [])


def test_a_call_in_a_whole_reply() -> None:
    turn = ChatTurn(asked(stream=False))
    out, requests = run(turn, whole({"content": CALL}), whole({"content": "It is 42."}))
    assert text(read(out)) == "It is 42." and len(requests) == 2


@pytest.mark.parametrize("content", [f"See: {CALL}", "{}", '{"name": "Ada"}', CALL[:-1]])
def test_a_whole_reply_with_another_text_keeps_its_bytes(content: str) -> None:
    body = whole({"content": content})
    assert run(ChatTurn(asked(stream=False)), body)[0] == body


def test_where_the_client_wants_json_a_call_is_still_a_call() -> None:
    wanted = asked(response_format={"type": "json_object"})
    out, requests = run(ChatTurn(wanted), spoken(CALL, 5), spoken('{"name": "Ada"}', 5))
    assert text(folded(out)) == '{"name": "Ada"}' and len(requests) == 2


def test_a_call_in_text_beside_a_call_of_the_clients() -> None:
    turn = ChatTurn(asked())
    both = stream(
        ROLE,
        chunk({"content": CALL}),
        chunk(calls(called("search", "{}", "a"))),
        chunk({}, "stop"),
        DONE,
    )
    out, _ = run(turn, both)
    assert text(folded(out)) == "" and made(folded(out)) == [("a", "search", "{}")]
    assert folded(out)["finish"] == "tool_calls" and turn.state is State.DONE
    assert turn.hidden is not None and len(turn.hidden.after) == 1


def test_nothing_is_held_back_without_our_tools() -> None:
    raw = spoken(CALL, 3)
    shown = asked(injected=False, stream_options={"include_usage": True})
    assert run(ChatTurn(shown), raw)[0] == raw


def test_what_may_be_a_call_is_shown_if_another_text_follows_in_the_same_event() -> None:
    said = chunk({"content": "<tool", "reasoning": "Hm."})
    out, _ = run(ChatTurn(asked()), stream(ROLE, said, chunk({}, "stop")))
    deltas = [one["choices"][0]["delta"] for one in events(out)]
    assert "".join(delta.get("content") or "" for delta in deltas) == "<tool"
    assert "".join(delta.get("reasoning") or "" for delta in deltas) == "Hm."
