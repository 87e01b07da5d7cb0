"""Hidden rounds put back beside replies that the client has rewritten: calls and results still pair."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.dialects.chat import CHAT
from proxy.plan.turn import HiddenRound
from tests.dialects.chat.turns import Json


def call(id: str, name: str = "look", arguments: str = '{"path":"a"}') -> Json:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def message(content: Any, *calls: Json) -> bytes:
    return json.dumps({"role": "assistant", "content": content} | ({"tool_calls": calls} if calls else {})).encode()


OURS, FIRST, SECOND = call("h1", "grep"), call("c1"), call("c2", arguments='{"path":"b"}')
ANSWER = json.dumps({"role": "tool", "tool_call_id": "h1", "content": "found"}).encode()
WROTE = message("I look.", FIRST, OURS, SECOND)
MIXED = HiddenRound((), WROTE, (ANSWER,))


def put_back(visible: bytes, hidden: HiddenRound = MIXED) -> list[Json]:
    return [json.loads(raw) for raw in CHAT.reinserted(hidden, visible)]


@pytest.mark.parametrize("content", ["I look.", None, "edited"])
def test_the_models_own_words_return_byte_for_byte_while_the_calls_are_the_same(content: Any) -> None:
    assert CHAT.reinserted(MIXED, message(content, FIRST, SECOND)) == [WROTE, ANSWER]


def test_only_the_calls_that_the_client_sent_back_return() -> None:
    reply, answer = put_back(message(None, FIRST))
    assert reply == json.loads(message("I look.", FIRST, OURS)) and answer == json.loads(ANSWER)


def test_calls_return_under_the_clients_ids() -> None:
    first, second = FIRST | {"id": "new1"}, SECOND | {"id": "new2"}
    reply, _ = put_back(message("I look.", first, second))
    assert reply["tool_calls"] == [first, OURS, second]


def test_calls_that_the_client_renders_as_text_stay_text() -> None:
    reply, answer = put_back(message("I look. Calling tools: ['c1', 'c2']"))
    assert reply == json.loads(message("I look. Calling tools: ['c1', 'c2']", OURS)) and answer == json.loads(ANSWER)


@pytest.mark.parametrize("sent", [call("h1"), call("c1", "list"), call("x", arguments="{}")])
def test_what_does_not_fit_stays_as_the_client_sent_it(sent: Json) -> None:
    """An id of our call, another tool, other arguments."""
    assert put_back(message(None, sent)) == [json.loads(message(None, sent))]


def test_after_hidden_rounds_the_last_reply_returns_without_the_calls_that_were_dropped() -> None:
    before = (message("Let me see.", OURS), ANSWER)
    spoken = HiddenRound(before, message("I look.", FIRST, SECOND), ())
    reply = put_back(message(None, SECOND), spoken)
    assert reply == [*map(json.loads, before), json.loads(message("I look.", SECOND))]
    dropped = message("Let me see.\n\nI look.")
    assert put_back(dropped, spoken) == [*map(json.loads, before), json.loads(dropped)]


@pytest.mark.parametrize("visible", [message("It is 42."), message(None, FIRST)])
def test_a_reply_that_the_client_saw_whole_stays_as_it_sent_it(visible: bytes) -> None:
    hidden = HiddenRound((message(None, OURS), ANSWER), None, ())
    assert CHAT.reinserted(hidden, visible) == [*hidden.before, visible]
