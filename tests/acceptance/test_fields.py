"""The field table row by row, through the real server: which fields go on unchanged, and which are
in each round."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from proxy.policy import Tools
from tests.clock import wait_until
from tests.fake_upstream import StrictUpstream, calls, text
from tests.serving import Proxy, served, tight
from tests.steps import chat

Json = dict[str, Any]

TOOL = {
    "type": "function",
    "function": {"name": "fetch", "parameters": {"type": "object", "properties": {}}},
}
BASE: Json = {"model": "m", "tools": [TOOL]}


def history(content: Any = "needle " + "line of a large result\n" * 300) -> list[Json]:
    """Return a history long enough for the tight policy to move its first results."""
    messages: list[Json] = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "go"},
    ]
    for number in range(4):
        messages += chat(f"call_{number}", content)
    return [*messages, {"role": "user", "content": "well?"}]


@pytest.fixture(scope="module")
def upstream() -> Iterator[StrictUpstream]:
    with StrictUpstream(expect_refusals=True) as upstream:
        upstream.respond(lambda request: text("ok"))
        yield upstream


@pytest.fixture(scope="module")
def proxy(upstream: StrictUpstream) -> Iterator[Proxy]:
    with served({"default": tight(upstream.url)}) as proxy:
        yield proxy


@pytest.fixture
def up(upstream: StrictUpstream) -> Iterator[StrictUpstream]:
    yield upstream
    upstream.begin_anew()


def post(proxy: Proxy, body: bytes | Json, **headers: str) -> httpx.Response:
    return proxy.post("/v1/chat/completions", body, **headers)


def test_the_common_history_of_these_tests_is_moved(up: StrictUpstream, proxy: Proxy) -> None:
    """Otherwise the tests below would prove nothing."""
    reply = post(proxy, {**BASE, "messages": history()})
    assert int(reply.headers["x-offload-compacted"]) > 0
    assert up.requests[-1].tool_names == ["fetch", "grep", "read_file"]


def test_tools_that_leave_no_room_for_ours_cost_two_refused_requests(
    up: StrictUpstream, proxy: Proxy
) -> None:
    """OpenAI takes 128 tools, and other APIs have no such limit. Two refusals are believed of this
    conversation."""
    tools = [
        {**TOOL, "function": {**TOOL["function"], "name": f"t{number}"}} for number in range(127)
    ]
    messages = [*history()[:1], {"role": "user", "content": "with many tools"}, *history()[2:]]
    body = json.dumps({**BASE, "messages": messages, "tools": tools}).encode()
    assert [post(proxy, body).status_code for _ in range(3)] == [200] * 3
    assert [len(request.tool_names) for request in up.requests] == [129, 127, 129, 127, 127]
    assert {request.body for request in up.requests if len(request.tool_names) == 127} == {body}


ODD = (
    b'{ "model" :"m","messages":[{"role":"user","content":"caf\\u00e9 \\ud83d","x":1e400}], "n":1,\t"y": '
    b'12345678901234567890123, "y":2 ,"metadata":{"b":"1","a":"2"}}'
)


@pytest.mark.parametrize("body", [ODD, b"", b"[]", b"not json", b'{"messages":[]}', b"\xff\xfe"])
def test_odd_bodies_are_the_clients_own_bytes(
    up: StrictUpstream, proxy: Proxy, body: bytes
) -> None:
    post(proxy, body)
    assert up.requests[-1].body == body


def test_the_header_x_offload_off_switches_the_proxy_off(up: StrictUpstream, proxy: Proxy) -> None:
    body = json.dumps({**BASE, "messages": history()}).encode()
    reply = post(proxy, body, **{"x-offload": "off"})
    assert up.requests[-1].body == body
    assert up.requests[-1].header("x-offload") is None
    assert reply.headers["x-offload-mode"] == "off"


def test_an_idempotency_key_is_sent_with_one_body_only(up: StrictUpstream, proxy: Proxy) -> None:
    """A follow-up round is a different request, and with the same key it would get the first one's
    reply."""
    up.script(calls(("grep", {"pattern": "needle"})), text("found"))
    post(proxy, {**BASE, "messages": history()}, **{"Idempotency-Key": "one"})
    assert [request.header("idempotency-key") for request in up.chats] == ["one", None]


def test_all_searches_of_a_turn_share_one_budget(
    up: StrictUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RE2 needs microseconds for each byte of a text that is full of m."""
    monkeypatch.setattr(Tools, "max_search_seconds", 0.1)
    nasty = ("grep", {"pattern": "(?:.{0,99}m){9}zq"})
    up.script(calls(*[nasty] * 30), text("ok"))
    with served({"default": tight(up.url)}) as proxy:
        assert (
            post(proxy, {**BASE, "messages": history(("m" * 2_000 + "\n") * 100)}).status_code
            == 200
        )
    answers = [message["content"] for message in up.chats[1].messages[-30:]]
    assert all("searching took more than 0.1 seconds" in answer for answer in answers[:16])
    assert all("at most 16 calls" in answer for answer in answers[16:])


@pytest.mark.parametrize("call_id", ["../../x", "a/b\\c", "\u202e" * 9, "x" * 5000, "nul\x00"])
def test_hostile_call_ids_stay_within_the_store(proxy: Proxy, call_id: str) -> None:
    messages = json.loads(json.dumps(history()).replace('"call_0"', json.dumps(call_id)))
    reply = post(proxy, {**BASE, "messages": messages})
    assert int(reply.headers["x-offload-compacted"]) > 0
    # the reply does not wait for it
    wait_until(lambda: any("originals" in path.parts for path in proxy.stored()))
    names = [path.name for path in proxy.stored() if "originals" in path.parts]
    assert all(".." not in name and len(name) < 120 for name in names)
