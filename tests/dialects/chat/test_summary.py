"""The bodies of summary calls, and what is read from their replies."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.dialects.base import ANSWER_BYTES
from proxy.dialects.chat import CHAT
from proxy.plan.summary import SummaryAnswer

TOOL = b'{"name":"grep","description":"d","parameters":{}}'
MESSAGES = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]


def asked(**members: Any) -> Any:
    return CHAT.parse(json.dumps({"model": "m", "messages": MESSAGES, **members}).encode())


MEMBERS = {
    "user": "u",
    "reasoning_effort": "low",
    "store": True,
    "max_tokens": 9000,
    "temperature": 1,
}


def test_the_same_model_takes_over_who_asks_and_how() -> None:
    body = json.loads(CHAT.summary_request("t", "m", asked(**MEMBERS), 700))
    del body["messages"]
    assert body == {"model": "m", "user": "u", "reasoning_effort": "low", "max_tokens": 700}


def test_another_model_takes_over_only_who_asks() -> None:
    body = json.loads(CHAT.summary_request("t", "other", asked(**MEMBERS), 700))
    del body["messages"]
    assert body == {"model": "other", "user": "u", "max_tokens": 700}


def test_on_the_prefix_entries_keep_their_bytes_and_the_task_comes_last() -> None:
    request = asked(tools=[{"type": "custom"}])
    entries = [b'{ "role" : "assistant","content":"one"}']
    made = CHAT.summary_on_prefix("the task", request, entries, [TOOL], 700, 1)
    assert entries[0] in made
    body = json.loads(made)
    assert body["messages"][1:] == [{"role": "user", "content": "the task"}]
    assert body["tools"] == [{"type": "custom"}, {"type": "function", "function": json.loads(TOOL)}]
    assert body["tool_choice"] == "none"


@pytest.mark.parametrize("marked", [True, False])
def test_the_task_goes_on_with_a_user_message_at_the_end(marked: bool) -> None:
    """Its text stays the beginning of what upstream has cached."""
    later = {
        "role": "user",
        "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}],
    }
    request = asked(messages=[*MESSAGES, later] if marked else MESSAGES)
    entries = [
        json.dumps(one).encode()
        for one in (*MESSAGES, {"role": "user", "content": "go", "name": "ann"})
    ]
    body = json.loads(CHAT.summary_on_prefix("t", request, entries, [], 700, 1))
    *before, last = body["messages"]
    assert before == MESSAGES and (last["role"], last["name"]) == ("user", "ann")
    if not marked:
        assert last["content"] == "go\n\nt"
    else:
        text = {"type": "text", "text": "\n\nt", "cache_control": {"type": "ephemeral"}}
        assert last["content"] == [{"type": "text", "text": "go"}, text]


@pytest.mark.parametrize(("end", "marked"), [(0, True), (1, True), (2, False)])
def test_a_cache_breakpoint_after_the_prefix_goes_to_the_task(end: int, marked: bool) -> None:
    mark = {"type": "ephemeral"}
    later = {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": mark}]}
    request = asked(messages=[MESSAGES[0], later])
    [task] = json.loads(CHAT.summary_on_prefix("t", request, [], [], 700, end))["messages"]
    assert task["content"] == (
        [{"type": "text", "text": "t", "cache_control": mark}] if marked else "t"
    )


USAGE = {
    "prompt_tokens": 100,
    "completion_tokens": 20,
    "prompt_tokens_details": {"cached_tokens": 80},
}


@pytest.mark.parametrize(
    ("status", "body", "answer"),
    [
        (
            200,
            {"choices": [{"message": {"content": "x"}}], "usage": USAGE},
            SummaryAnswer(200, "x", 100, 20, 80),
        ),
        (200, {"choices": [{"message": {"content": None}}]}, SummaryAnswer(200)),
        (200, {"choices": []}, SummaryAnswer(200)),
        (200, {"choices": [1]}, SummaryAnswer(200)),
        (500, {"error": "busy"}, SummaryAnswer(500)),
        (
            400,
            {"error": "maximum context length is 4096 tokens"},
            SummaryAnswer(400, too_long=True, window=4096),
        ),
        (400, {"error": "prompt is too long"}, SummaryAnswer(400, too_long=True)),
    ],
)
def test_what_is_read_from_a_reply(status: int, body: Any, answer: SummaryAnswer) -> None:
    assert CHAT.summary_answer(status, json.dumps(body).encode()) == answer


def test_an_oversized_reply_is_not_parsed() -> None:
    body = json.dumps({"choices": [{"message": {"content": "x" * ANSWER_BYTES}}]}).encode()
    assert CHAT.summary_answer(200, body) == SummaryAnswer(200)


def test_a_model_that_insists_on_the_newer_limit_gets_it() -> None:
    refusal = {
        "error": {
            "message": "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."
        }
    }
    answer = CHAT.summary_answer(400, json.dumps(refusal).encode())
    assert answer.again is not None
    body = json.loads(answer.again(CHAT.summary_request("t", "o9", None, 700)))
    assert (body["max_completion_tokens"], "max_tokens" in body, len(body["messages"])) == (
        700,
        False,
        1,
    )
    assert CHAT.summary_answer(400, b'{"error": "no"}').again is None


@pytest.mark.parametrize(("reason", "finished"), [("stop", True), ("length", False), (None, False)])
def test_whether_the_model_ended_its_answer_itself(reason: str | None, finished: bool) -> None:
    body = {"choices": [{"message": {"content": "x"}, "finish_reason": reason}]}
    assert CHAT.summary_answer(200, json.dumps(body).encode()).finished is finished
