"""The strict upstream: what it refuses, what it takes, and how it answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from http.client import HTTPConnection
from typing import Any

import httpx
import openai
import pytest

from tests import transcripts
from tests.clock import PATIENCE, wait_until
from tests.fake_upstream import (
    DROP,
    Cut,
    PrefixCache,
    Recorded,
    Reply,
    Segment,
    StrictUpstream,
    calls,
    drop,
    endless,
    error,
    hang,
    mixed,
    pieces,
    text,
    whole,
)
from tests.strict import Refused, Rules, check, parse

Json = dict[str, Any]

USER = {"role": "user", "content": "hi"}


def call(name: str = "f", call_id: str = "c1", arguments: Any = "{}") -> Json:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def assistant(*made: Json, **members: Any) -> Json:
    return {"role": "assistant", "content": None, **({"tool_calls": list(made)} if made else {}), **members}


def result(call_id: str = "c1", content: Any = "ok") -> Json:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def tool(name: Any = "f", **members: Any) -> Json:
    return {"type": "function", "function": {"name": name, **members}}


def request(*messages: Any, **members: Any) -> Json:
    return {"model": "m", "messages": list(messages) or [USER], **members}


TAKEN = {
    "plain": request(),
    "every role": request(
        {"role": "system", "content": "s"},
        {"role": "developer", "content": [{"type": "text", "text": "d"}]},
        {"role": "user", "content": "u", "name": "joe"},
        assistant(call()),
        result(content=[{"type": "text", "text": "r"}]),
        {"role": "assistant", "content": "done", "refusal": None},
    ),
    "parallel calls answered in another order": request(
        USER, assistant(call("f", "a"), call("g", "b")), result("b"), result("a")
    ),
    "an id used again in a later message": request(USER, assistant(call()), result(), assistant(call()), result()),
    "a picture": request(
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]}
    ),
    "a refusal": request(USER, {"role": "assistant", "refusal": "no"}, USER),
    "empty answers": request(USER, {"role": "assistant", "content": ""}, assistant(call()), result(content="")),
    "a custom tool": request(
        USER,
        assistant({"id": "c1", "type": "custom", "custom": {"name": "g", "input": "x"}}),
        result(),
        tools=[tool(), {"type": "custom", "custom": {"name": "g", "format": {"type": "text"}}}],
    ),
    "128 tools": request(tools=[tool(f"f{n}") for n in range(128)]),
    "a name of 64": request(tools=[tool("x" * 64)]),
    "a full definition": request(tools=[tool(description="d", parameters={"type": "object"}, strict=False)]),
    "a chosen tool": request(tools=[tool()], tool_choice={"type": "function", "function": {"name": "f"}}),
    "allowed tools": request(
        tools=[tool(), tool("g")],
        tool_choice={"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [tool("g")]}},
    ),
    "usage in a stream": request(stream=True, stream_options={"include_usage": True}),
    "null for absent": request(tools=None, tool_choice=None, stream=None, stream_options=None, max_tokens=None),
    "limits": request(max_completion_tokens=1, n=1, temperature=0, seed=-1, stop=["a", "b"]),
}

REFUSED = {
    "no messages": ({"model": "m"}, "`messages`"),
    "empty messages": ({"model": "m", "messages": []}, "length >= 1 - at `$.messages`"),
    "an unknown parameter": (request(x_offload=1), "'$.x_offload'"),
    "max_tokens 0": (request(max_tokens=0), ">= 1 - at `$.max_tokens`"),
    "stream_options without stream": (request(stream_options={"include_usage": True}), "when 'stream' is enabled"),
    "message no object": (request("hi"), "Expected `object`"),
    "unknown role": (request({"role": "robot", "content": "x"}), "'robot'"),
    "unknown field of a message": (request({**USER, "x": 1}), "messages[0].x"),
    "content an empty array": (request({"role": "user", "content": []}), "length >= 1"),
    "content null for a user": (request({"role": "user", "content": None}), "got `null`"),
    "content null for a tool": (request(USER, assistant(call()), result(content=None)), "got `null`"),
    "no content for a system": (request({"role": "system"}), "`content`"),
    "a part of an unknown kind": (request({"role": "user", "content": [{"type": "tool_result"}]}), "'tool_result'"),
    "a picture from a tool": (
        request(USER, assistant(call()), result(content=[{"type": "image_url", "image_url": {}}])),
        "'image_url'",
    ),
    "a text part without text": (request({"role": "user", "content": [{"type": "text"}]}), "`text`"),
    "an unknown field of a part": (
        request({"role": "user", "content": [{"type": "text", "text": "t", "cache_control": {}}]}),
        "cache_control",
    ),
    "neither content nor calls": (request(USER, {"role": "assistant", "content": None}), "'content' or 'tool_calls'"),
    "empty calls": (request(USER, assistant(content="x", tool_calls=[])), "length >= 1"),
    "a call without id": (request(USER, assistant({"type": "function", "function": call()["function"]})), "`id`"),
    "a call without type": (request(USER, assistant({"id": "c", "function": {}})), "`type`"),
    "an index left in a call": (request(USER, assistant({**call(), "index": 0}), result()), ".index"),
    "arguments an object": (request(USER, assistant(call(arguments={})), result()), "arguments"),
    "a call's name with a dot": (request(USER, assistant(call("a.b")), result()), "matching regex"),
    "ids twice in a message": (request(USER, assistant(call(), call()), result(), result()), "Duplicate"),
    "a result of nothing": (request(USER, result()), "must be a response"),
    "a result first of all": (request(result()), "must be a response"),
    "a result of another id": (request(USER, assistant(call()), result("c2")), "must be a response"),
    "a result twice": (request(USER, assistant(call()), result(), result()), "must be a response"),
    "a result without id": (request(USER, assistant(call()), {"role": "tool", "content": "x"}), "tool_call_id"),
    "an unanswered call": (request(USER, assistant(call()), USER), "did not have response messages: c1"),
    "an unanswered call at the end": (request(USER, assistant(call())), "did not have response messages: c1"),
    "one of two unanswered": (
        request(USER, assistant(call("f", "a"), call("f", "b")), result("a"), USER),
        "did not have response messages: b",
    ),
    "a result behind something else": (request(USER, assistant(call()), USER, result()), "did not have response"),
    "a result two messages late": (
        request(USER, assistant(call()), assistant(call("f", "c2")), result("c2"), result("c1")),
        "did not have response",
    ),
    "a result that a later message repeats": (
        request(USER, assistant(call()), result(), {"role": "assistant", "content": "x"}, result()),
        "must be a response",
    ),
    "empty tools": (request(tools=[]), "length >= 1"),
    "129 tools": (request(tools=[tool(f"f{n}") for n in range(129)]), "length <= 128"),
    "tool names twice": (request(tools=[tool(), tool()]), "unique"),
    "a tool's name with a space": (request(tools=[tool("a b")]), "matching regex"),
    "a tool's name of 65": (request(tools=[tool("x" * 65)]), "matching regex"),
    "a tool's name with a newline behind": (request(tools=[tool("x\n")]), "matching regex"),
    "a tool flat as in responses": (request(tools=[{"type": "function", "name": "f"}]), "`function` - at `$.tools[0]`"),
    "a tool without function": (request(tools=[{"type": "function"}]), "`function` - at `$.tools[0]`"),
    "an unknown field of a tool": (request(tools=[{**tool(), "cache_control": {}}]), "tools[0].cache_control"),
    "an unknown field of a function": (request(tools=[tool(input_schema={})]), "tools[0].function.input_schema"),
    "tool_choice without tools": (request(tool_choice="auto"), "'tool_choice' is only allowed"),
    "tool_choice unknown": (request(tools=[tool()], tool_choice="any"), "'any'"),
    "tool_choice of an absent tool": (
        request(tools=[tool()], tool_choice={"type": "function", "function": {"name": "g"}}),
        "'g' not found",
    ),
    "allowed tools that are absent": (
        request(
            tools=[tool()],
            tool_choice={"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [tool("g")]}},
        ),
        "'g' not found",
    ),
    "parallel_tool_calls without tools": (request(parallel_tool_calls=False), "'parallel_tool_calls'"),
}


@pytest.mark.parametrize("name", TAKEN)
def test_valid_requests_are_accepted(name: str) -> None:
    check(TAKEN[name])


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
    ("window", "reply", "refused"), [(14, None, False), (13, None, True), (24, 10, False), (23, 10, True)]
)
def test_requests_above_the_context_window_are_refused(window: int, reply: int | None, refused: bool) -> None:
    """10 tokens of content and 4 of frame, and the reply's `max_tokens` beside them."""
    body = request({"role": "user", "content": "x" * 10}, **({"max_tokens": reply} if reply else {}))
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
        check({"model": "m", "messages": run.messages, **({"tools": run.tools} if run.tools else {})})


def test_prefix_cache_counts_the_longest_common_prefix() -> None:
    cache = PrefixCache()
    one, two, three = Segment("one-", 4), Segment("two-", 4), Segment("three-", 6)
    assert cache.visit("m", [one, two]) == 0
    assert cache.visit("m", [one, two, three]) == 8
    assert cache.visit("m", [one, Segment("twig", 4), three]) == 6
    assert cache.visit("m", [three, one, two]) == 0
    assert cache.visit("other", [one, two]) == 0


# Over HTTP


@pytest.fixture
def client(up: StrictUpstream) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=up.url, api_key="k", max_retries=0, timeout=PATIENCE) as made:
        yield made


def ask(client: openai.OpenAI, content: str = "hi", **options: Any) -> Any:
    return client.chat.completions.create(model="m", messages=[{"role": "user", "content": content}], **options)


def folded(stream: Any) -> tuple[str, dict[int, list[str]], list[str]]:
    """Text, calls (id, name, arguments) by index, and finish reasons of a stream."""
    content, made, finish = "", {}, []
    for choice in (choice for chunk in stream for choice in chunk.choices):
        content += choice.delta.content or ""
        finish += [choice.finish_reason] if choice.finish_reason else []
        for delta in choice.delta.tool_calls or ():
            known = made.setdefault(delta.index, ["", "", ""])
            known[0] += delta.id or ""
            known[1] += delta.function.name or ""
            known[2] += delta.function.arguments or ""
    return content, made, finish


REPLIES: list[tuple[Reply, str, list[tuple[str, str]], str]] = [
    (text("Hello, wide world. ☃"), "Hello, wide world. ☃", [], "stop"),
    (text("cut", finish="length"), "cut", [], "length"),
    (calls(("f", {"a": "long enough to split"})), "", [("f", '{"a": "long enough to split"}')], "tool_calls"),
    (mixed("hm", ("f", {}, "id1"), ("g", "{bad")), "hm", [("f", "{}"), ("g", "{bad")], "tool_calls"),
]


@pytest.mark.parametrize(("reply", "content", "made", "finish"), REPLIES)
def test_whole_and_streamed_say_the_same(
    up: StrictUpstream, client: openai.OpenAI, reply: Reply, content: str, made: list[tuple[str, str]], finish: str
) -> None:
    up.script(reply, reply)
    choice = ask(client).choices[0]
    assert (choice.message.content or "", choice.finish_reason) == (content, finish)
    assert [(c.function.name, c.function.arguments) for c in choice.message.tool_calls or ()] == made
    streamed, in_stream, finishes = folded(ask(client, stream=True))
    assert (streamed, finishes) == (content, [finish])
    assert [(name, arguments) for _, name, arguments in in_stream.values()] == made
    assert len({call_id for call_id, _, _ in in_stream.values()}) == len(made)


def test_usage_comes_last_and_only_when_asked_for(up: StrictUpstream, client: openai.OpenAI) -> None:
    up.script(text("four"), text("four"), text("four"))
    assert all("usage" not in chunk.model_fields_set for chunk in ask(client, stream=True))
    *before, last = ask(client, stream=True, stream_options={"include_usage": True})
    assert all("usage" in chunk.model_fields_set and chunk.usage is None for chunk in before)
    assert last.choices == []
    assert last.usage == ask(client).usage
    assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.total_tokens) == (5, 1, 6)


def test_cached_tokens_follow_the_prefix(up: StrictUpstream, client: openai.OpenAI) -> None:
    up.respond(lambda _: text("ok"))
    history = [{"role": "user", "content": "x" * 4000}]
    client.chat.completions.create(model="m", messages=history)
    history += [{"role": "assistant", "content": "ok"}, {"role": "user", "content": "more"}]
    usage = client.chat.completions.create(model="m", messages=history).usage
    assert usage.prompt_tokens_details.cached_tokens == 1004
    assert usage.prompt_tokens == 1014
    assert up.chats[1].raw_messages[0] == up.chats[0].raw_messages[0]


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


def test_other_paths_go_to_the_responder(up: StrictUpstream) -> None:
    assert httpx.get(f"{up.url}/models").status_code == 404
    up.respond(lambda request: whole({"target": request.target}, 201, {"x-a": "b"}))
    reply = httpx.get(f"{up.url}/a%2Fb?q=%20", headers={"X-Twice": "1"})
    assert (reply.status_code, reply.headers["x-a"]) == (201, "b")
    assert reply.json() == {"target": "/v1/a%2Fb?q=%20"}
    assert up.requests[-1].header("x-twice") == "1"


def test_scripted_errors_reach_the_client(up: StrictUpstream, client: openai.OpenAI) -> None:
    up.script(error(429, headers={"retry-after": "7"}), error(500, b"not json"))
    with pytest.raises(openai.RateLimitError) as limited:
        ask(client)
    assert limited.value.response.headers["retry-after"] == "7"
    with pytest.raises(openai.InternalServerError) as failed:
        ask(client)
    assert failed.value.response.content == b"not json"


def test_raw_pieces_arrive_as_they_are(up: StrictUpstream) -> None:
    up.script(pieces(b": ping\n", 0.05, b"\ndata: {}\n\n"))
    with httpx.stream("POST", f"{up.url}/chat/completions", json=request(stream=True)) as reply:
        assert list(reply.iter_raw()) == [b": ping\n", b"\ndata: {}\n\n"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_connection_dropped_before_the_first_byte(up: StrictUpstream, stream: bool) -> None:
    up.script(drop())
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.post(f"{up.url}/chat/completions", json=request(stream=stream))


@pytest.mark.parametrize("stream", [False, True])
def test_a_connection_dropped_in_the_middle(up: StrictUpstream, stream: bool) -> None:
    up.script(Cut(text("Hello, wide world."), 2, DROP))
    seen = b""
    asking = httpx.stream("POST", f"{up.url}/chat/completions", json=request(stream=stream))
    with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)), asking as reply:
        assert reply.status_code == 200
        for chunk in reply.iter_raw():
            seen += chunk
    assert seen.count(b"\n\n") == 2 if stream else len(seen) == 2


@pytest.mark.parametrize("reply", [hang(), Cut(text("Hello, wide world."), 2), endless()])
def test_a_reader_that_gives_up_is_seen(up: StrictUpstream, reply: Reply) -> None:
    up.script(reply)
    with asked(up):
        pass
    assert up.requests[0].left.wait(PATIENCE)
    assert up.requests[0].done.wait(PATIENCE)


@contextmanager
def asked(up: StrictUpstream) -> Iterator[None]:
    """Ask, and hang up at the end of the block."""
    with closing(HTTPConnection("127.0.0.1", up.port)) as client:
        client.request("POST", "/v1/chat/completions", json.dumps(request(stream=True)))
        wait_until(lambda: up.requests)
        yield


def test_leaving_does_not_wait_for_replies_that_hang() -> None:
    with ExitStack() as held, StrictUpstream() as up:
        up.script(hang())
        held.enter_context(asked(up))
    assert up.requests[0].done.is_set()
