"""Hidden rounds put back beside replies that the client has rewritten: calls and results still pair."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.dialects.chat import CHAT
from proxy.plan.turn import Hidden
from tests.dialects.chat.turns import Json


def call(id: str, name: str = "look", arguments: str = '{"path":"a"}') -> Json:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def message(content: Any, *calls: Json) -> bytes:
    return json.dumps({"role": "assistant", "content": content} | ({"tool_calls": calls} if calls else {})).encode()


OURS, FIRST, SECOND = call("h1", "grep"), call("c1"), call("c2", arguments='{"path":"b"}')
ANSWER = json.dumps({"role": "tool", "tool_call_id": "h1", "content": "found"}).encode()
WROTE = message("I look.", FIRST, OURS, SECOND)
MIXED = Hidden((), WROTE, (ANSWER,))


@pytest.mark.parametrize("content", ["I look.", None, "edited"])
def test_the_models_own_words_return_byte_for_byte_while_the_calls_are_the_same(content: Any) -> None:
    assert CHAT.reinserted(MIXED, message(content, FIRST, SECOND)) == [WROTE, ANSWER]


REWRITTEN = [
    message(None, FIRST),
    message("I look.", FIRST | {"id": "new1"}, SECOND | {"id": "new2"}),
    message("I look. Calling tools: ['c1', 'c2']"),
    message(None, call("h1")),
    message(None, call("c1", "list")),
]
"""A call less, other ids, calls as text, an id of our call, another tool."""


@pytest.mark.parametrize("visible", REWRITTEN)
def test_calls_that_the_client_rewrote_stay_as_it_sent_them(visible: bytes) -> None:
    assert CHAT.reinserted(MIXED, visible) == [visible]
    before = (message("Let me see.", OURS), ANSWER)
    spoken = Hidden(before, message("I look.", FIRST, SECOND), ())
    assert CHAT.reinserted(spoken, visible) == [*before, visible]


@pytest.mark.parametrize("visible", [message("It is 42."), message(None, FIRST)])
def test_a_reply_that_the_client_saw_whole_stays_as_it_sent_it(visible: bytes) -> None:
    hidden = Hidden((message(None, OURS), ANSWER), None, ())
    assert CHAT.reinserted(hidden, visible) == [*hidden.before, visible]
