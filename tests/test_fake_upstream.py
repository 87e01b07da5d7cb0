"""The strict upstream: what it refuses, what it takes, and how it answers."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests import transcripts
from tests.fake_upstream import (
    PrefixCache,
    Recorded,
    Reply,
    Segment,
    StrictUpstream,
    text,
)
from tests.sdks import openai
from tests.strict import Refused, Rules, check, parse

Json = dict[str, Any]

USER = {"role": "user", "content": "hi"}


def call(name: str = "f", call_id: str = "c1", arguments: Any = "{}") -> Json:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def assistant(*made: Json, **members: Any) -> Json:
    return {
        "role": "assistant",
        "content": None,
        **({"tool_calls": list(made)} if made else {}),
        **members,
    }


def result(call_id: str = "c1", content: Any = "ok") -> Json:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def tool(name: Any = "f", **members: Any) -> Json:
    return {"type": "function", "function": {"name": name, **members}}


def request(*messages: Any, **members: Any) -> Json:
    return {"model": "m", "messages": list(messages) or [USER], **members}


REFUSED = {
    "stream_options without stream": (
        request(stream_options={"include_usage": True}),
        "when 'stream' is enabled",
    ),
    "neither content nor calls": (
        request(USER, {"role": "assistant", "content": None}),
        "'content' or 'tool_calls'",
    ),
    "a call without type": (request(USER, assistant({"id": "c", "function": {}})), "`type`"),
    "an index left in a call": (
        request(USER, assistant({**call(), "index": 0}), result()),
        ".index",
    ),
    "ids twice in a message": (
        request(USER, assistant(call(), call()), result(), result()),
        "Duplicate",
    ),
    "a result of nothing": (request(USER, result()), "must be a response"),
    "a result first of all": (request(result()), "must be a response"),
    "a result of another id": (
        request(USER, assistant(call()), result("c2")),
        "must be a response",
    ),
    "a result twice": (request(USER, assistant(call()), result(), result()), "must be a response"),
    "an unanswered call": (
        request(USER, assistant(call()), USER),
        "did not have response messages: c1",
    ),
    "an unanswered call at the end": (
        request(USER, assistant(call())),
        "did not have response messages: c1",
    ),
    "one of two unanswered": (
        request(USER, assistant(call("f", "a"), call("f", "b")), result("a"), USER),
        "did not have response messages: b",
    ),
    "a result behind something else": (
        request(USER, assistant(call()), USER, result()),
        "did not have response",
    ),
    "a result two messages late": (
        request(USER, assistant(call()), assistant(call("f", "c2")), result("c2"), result("c1")),
        "did not have response",
    ),
    "a result that a later message repeats": (
        request(USER, assistant(call()), result(), {"role": "assistant", "content": "x"}, result()),
        "must be a response",
    ),
    "tool names twice": (request(tools=[tool(), tool()]), "unique"),
    "an unknown field of a function": (
        request(tools=[tool(input_schema={})]),
        "tools[0].function.input_schema",
    ),
    "tool_choice without tools": (request(tool_choice="auto"), "'tool_choice' is only allowed"),
    "tool_choice of an absent tool": (
        request(tools=[tool()], tool_choice={"type": "function", "function": {"name": "g"}}),
        "'g' not found",
    ),
    "allowed tools that are absent": (
        request(
            tools=[tool()],
            tool_choice={
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [tool("g")]},
            },
        ),
        "'g' not found",
    ),
    "parallel_tool_calls without tools": (
        request(parallel_tool_calls=False),
        "'parallel_tool_calls'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_requests_are_refused(name: str) -> None:
    body, why = REFUSED[name]
    with pytest.raises(Refused) as refused:
        check(body)
    assert why in refused.value.message + str(refused.value.param)
    assert refused.value.status == 400


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b"\xff"])
def test_bodies_other_than_an_object_are_refused(body: bytes) -> None:
    with pytest.raises(Refused, match="JSON body"):
        parse(body)


@pytest.mark.parametrize(
    "body",
    [
        request(top_k=1),
        request({**USER, "top_k": 1}),
        request(tools=[{**tool(), "top_k": 1}]),
        request(USER, assistant({**call(), "top_k": 1}), result()),
        request({"role": "user", "content": [{"type": "text", "text": "t", "top_k": 1}]}),
    ],
)
def test_extra_fields_are_accepted_if_a_test_names_them(body: Json) -> None:
    check(body, Rules(extra_fields={"top_k"}))
    with pytest.raises(Refused):
        check(body, Rules(extra_fields={"other"}))


@pytest.mark.parametrize(
    ("window", "reply", "refused"),
    [(14, None, False), (13, None, True), (24, 10, False), (23, 10, True)],
)
def test_requests_above_the_context_window_are_refused(
    window: int, reply: int | None, refused: bool
) -> None:
    """10 tokens of content and 4 of frame, and the reply's `max_tokens` beside them."""
    body = request(
        {"role": "user", "content": "x" * 10}, **({"max_tokens": reply} if reply else {})
    )
    rules = Rules(context_window=window, count=len)
    if not refused:
        return check(body, rules)
    with pytest.raises(Refused, match=f"maximum context length is {window} tokens") as refusal:
        check(body, rules)
    assert refusal.value.code == "context_length_exceeded"


@transcripts.needed
def test_recorded_runs_are_accepted() -> None:
    """What real agents sent to real models is not refused here."""
    for run in transcripts.load():
        check(
            {"model": "m", "messages": run.messages, **({"tools": run.tools} if run.tools else {})}
        )


def test_prefix_cache_counts_the_longest_common_prefix() -> None:
    cache = PrefixCache()
    one, two, three = Segment("one-", 4), Segment("two-", 4), Segment("three-", 6)
    assert cache.visit("m", [one, two]) == 0
    assert cache.visit("m", [one, two, three]) == 8
    assert cache.visit("m", [one, Segment("twig", 4), three]) == 6
    assert cache.visit("m", [three, one, two]) == 0
    assert cache.visit("other", [one, two]) == 0


# Over HTTP


def test_a_refusal_reaches_the_client_and_fails_the_block() -> None:
    with pytest.raises(AssertionError, match="upstream refused 1"), StrictUpstream() as up:
        up.script(text("for somebody else"))
        client = openai.OpenAI(base_url=up.url, api_key="k", max_retries=0)
        with client, pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model="m", messages=[])
        assert refused.value.code == "invalid_value"
        assert up.unused == 1
        assert (len(up.requests), up.chats, len(up.refusals)) == (1, [], 1)


def test_an_expected_refusal_does_not_fail_the_block() -> None:
    with StrictUpstream(expect_refusals=True) as up:
        assert httpx.post(f"{up.url}/chat/completions", content=b"nonsense").status_code == 400


def test_a_script_that_is_used_up_fails_the_block() -> None:
    with pytest.raises(AssertionError, match="used up"), StrictUpstream() as up:
        assert httpx.post(f"{up.url}/chat/completions", json=request()).status_code == 500


def test_a_responder_that_raises_fails_the_block() -> None:
    def responder(_: Recorded) -> Reply:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), StrictUpstream() as up:
        up.respond(responder)
        httpx.post(f"{up.url}/chat/completions", json=request())
