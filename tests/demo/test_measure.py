from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.demo.measure import SentRequest, message_tokens, moved, prefix_kept, read_back, sent, shared_tokens

Json = dict[str, Any]

USER = {"role": "user", "content": "12345"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "ab", "arguments": "{}"}}],
}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "123"}
MOVED = {
    **RESULT,
    "content": "1... (detailed result is stored in /store/a.py-01234567.txt; complete, 9 tokens; result of f)",
}


def body(*messages: Json, **members: Any) -> SentRequest:
    return sent(json.dumps({"messages": messages, **members}).encode(), len)


@pytest.mark.parametrize(
    ("message", "tokens"),
    [
        (USER, 9),
        (CALL, 8),
        (RESULT, 7),
        ({"role": "user", "content": [{"type": "text", "text": "12"}, {"type": "image_url", "image_url": {}}]}, 6),
        ({"role": "assistant", "content": "1", "reasoning_content": "23"}, 7),
    ],
)
def test_message_tokens(message: Json, tokens: int) -> None:
    assert message_tokens(message, len) == tokens


def test_a_request_s_tokens_are_its_tools_and_messages() -> None:
    assert body(USER, RESULT, tools=[1]).tokens == len("[1]") + 9 + 7


@pytest.mark.parametrize(
    ("one", "two", "tokens"),
    [
        (body(USER), body(USER, CALL), 9),
        (body(USER, CALL, RESULT), body(USER, CALL, MOVED), 17),
        (body(RESULT), body(USER), 0),
        (body(USER, tools=[1]), body(USER, tools=[2]), 0),
        (body(USER, tools=[1]), body(USER, tools=[1]), 12),
        (body(USER), body(USER, tools=[1]), 0),
    ],
)
def test_shared_tokens(one: SentRequest, two: SentRequest, tokens: int) -> None:
    assert shared_tokens(one, two) == tokens


def test_prefix_kept_is_a_share_of_all_that_was_sent() -> None:
    assert prefix_kept([]) == 0
    assert prefix_kept([body(USER)]) == 0
    assert prefix_kept([body(USER), body(USER, CALL, RESULT)]) == pytest.approx(9 / (9 + 24))


def test_moved_names_the_files_and_their_calls() -> None:
    assert moved([USER, CALL, MOVED]) == {"a.py-01234567.txt": "c1"}
    assert moved([USER, CALL, RESULT, {**USER, "content": MOVED["content"]}]) == {}


def test_read_back_counts_results_of_foreign_tools_only() -> None:
    turn = [USER, CALL, RESULT]
    assert read_back(body(*turn), ["other"], len) == 3
    assert read_back(body(*turn), ["ab"], len) == 0
    assert read_back(body(*turn, USER), ["other"], len) == 0
