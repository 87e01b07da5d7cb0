"""Responses over WebSocket: the real `openai` client and raw frames, through the real proxy, to a strict upstream."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from proxy.server.websocket import IDLE_SECONDS, WAITING
from tests.acceptance.shared import BIG, own_ids, proxy, up
from tests.clock import Clock, wait_until
from tests.dialects.responses.api import ResponsesApi, call, reasoning, say
from tests.fake_upstream import Pieces, StrictUpstream, endless, error, pieces, whole
from tests.sdks import openai
from tests.serving import Proxy, served, spawned, tight

__all__ = ["proxy", "up"]

Json = dict[str, Any]

TOOL: Any = {"type": "function", "name": "fetch", "parameters": {"type": "object"}, "strict": False}
ENCRYPTED: Any = ["reasoning.encrypted_content"]


@pytest.fixture
def api(up: StrictUpstream, request: pytest.FixtureRequest) -> ResponsesApi:
    up.begin_anew()
    up.respond(made := ResponsesApi(made=own_ids(request)))
    return made


@contextmanager
def raw(proxy: Proxy, key: str = "sk-test", path: str = "/v1/responses") -> Iterator[ClientConnection]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with connect(f"ws://127.0.0.1:{proxy.port}{path}", additional_headers=headers, proxy=None) as link:
        yield link


def create(input: Any, **more: Any) -> str:
    return json.dumps({"type": "response.create", "model": "m", "input": input, "store": False, **more})


def until_done(link: ClientConnection) -> list[Json]:
    """The events up to the end of one response."""
    events: list[Json] = []
    while not events or events[-1]["type"] not in ("response.completed", "response.incomplete", "error"):
        events.append(json.loads(link.recv(timeout=60)))
    return events


def test_the_sdk_holds_a_session_of_which_only_news_is_sent(
    proxy: Proxy, up: StrictUpstream, api: ResponsesApi
) -> None:
    """The agent's results move, and the model reads them back in a round that the client does not see."""
    client = openai.OpenAI(base_url=proxy.url, api_key="sk-test", max_retries=0)
    if not hasattr(client.responses, "connect"):
        pytest.skip("this SDK holds no sessions")
    with client, client.responses.connect() as link:
        previous, new, seen = None, [{"role": "user", "content": "Read the log."}], list[str]()

        def step() -> Any:
            more = {"previous_response_id": previous} if previous else {}
            link.response.create(model="m", input=new, tools=[TOOL], store=False, include=ENCRYPTED, **more)
            for event in link:
                seen.append(event.type)
                assert event.type != "error", event
                if event.type == "response.completed":
                    return event.response

        for text in (BIG, "small", "small"):
            api.script([reasoning("I need it."), call("fetch", {"url": text[:5]})])
            response = step()
            previous = response.id
            [called] = [item for item in response.output if item.type == "function_call"]
            new = [{"type": "function_call_output", "call_id": called.call_id, "output": text}]
        api.script([reasoning("Hm."), call("grep", {"pattern": "code is"})], [say("It is heliotrope-7291.")])
        response = step()
    assert response.output_text == "It is heliotrope-7291."
    assert not any("grep" in json.dumps(item.model_dump()) for item in response.output)
    last = up.requests[-1].json
    assert "previous_response_id" not in last
    assert "heliotrope-7291" in json.dumps(last["input"]), "the model's own search found it"
    assert BIG not in json.dumps(last["input"])
    assert "detailed result is stored in" in json.dumps(last["input"])


def test_the_events_are_those_of_the_stream(proxy: Proxy, api: ResponsesApi) -> None:
    api.script([reasoning("hm"), say("Hello.")])
    with raw(proxy) as link:
        link.send(create("hi"))
        events = until_done(link)
    assert events[0]["type"] == "response.created"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["response"]["output"][-1]["content"][0]["text"] == "Hello."


def test_lanes_keep_their_names_and_requests_their_order(proxy: Proxy, api: ResponsesApi) -> None:
    api.script([say("one")], [say("two")])
    with raw(proxy) as link:
        link.send(create("1", stream_id="a"))
        link.send(create("2", stream_id='b"'))
        first, second = until_done(link), until_done(link)
    assert {event["stream_id"] for event in first} == {"a"}
    assert {event["stream_id"] for event in second} == {'b"'}
    assert second[-1]["response"]["output"][0]["content"][0]["text"] == "two"


def test_each_lane_has_a_history_that_others_can_begin_with(
    proxy: Proxy, up: StrictUpstream, api: ResponsesApi
) -> None:
    """As in OpenAI's guide: one conversation goes on in two ways."""
    api.script([say("one")], [say("two")], [say("three")])
    with raw(proxy) as link:
        link.send(create("1", stream_id="main"))
        begun = until_done(link)[-1]["response"]["id"]
        for lane in ("fork", "main"):
            link.send(create(lane, stream_id=lane, previous_response_id=begun))
            assert until_done(link)[-1]["type"] == "response.completed"
    assert [item["content"] for item in up.requests[-1].json["input"] if "role" in item][::2] == ["1", "main"]


def test_a_request_that_generates_nothing_begins_a_history(proxy: Proxy, up: StrictUpstream, api: ResponsesApi) -> None:
    api.script([say("Hello.")])
    with raw(proxy) as link:
        link.send(create([{"role": "developer", "content": "Be short."}], generate=False))
        warm = until_done(link)
        assert [event["type"] for event in warm] == ["response.created", "response.completed"]
        assert not [request for request in up.requests if request.method == "POST"]
        link.send(create("hi", previous_response_id=warm[-1]["response"]["id"]))
        until_done(link)
    roles = [item["role"] for item in up.requests[-1].json["input"]]
    assert roles == ["developer", "user"]


def test_an_id_that_is_not_held_is_upstreams(proxy: Proxy, up: StrictUpstream, api: ResponsesApi) -> None:
    with raw(proxy) as link:
        link.send(create("hi", previous_response_id="resp_unknown"))
        [event] = until_done(link)
        assert (event["type"], event["status"]) == ("error", 400)
        assert "resp_unknown" in event["error"]["message"], "in upstream's words"
        api.script([say("Hello.")])
        link.send(create("hi"))
        assert until_done(link)[-1]["type"] == "response.completed", "the connection goes on"


def test_what_upstream_keeps_is_left_to_it(proxy: Proxy, up: StrictUpstream, api: ResponsesApi) -> None:
    """As after a reconnection: the connection has only the end of such a history."""
    api.script([say("one")], [say("two")], [say("three")])
    ids = [proxy.post("/v1/responses", {"model": "m", "input": "1"}, "sk-test").json()["id"]]
    with raw(proxy) as link:
        for text in ("2", "3"):
            link.send(create(text, store=True, previous_response_id=ids[-1]))
            ids.append(until_done(link)[-1]["response"]["id"])
    last = up.requests[-1].json
    assert (last["input"], last["previous_response_id"]) == ("3", ids[1])


def test_reasoning_that_nobody_keeps_is_left_out(proxy: Proxy, up: StrictUpstream, api: ResponsesApi) -> None:
    """As in OpenAI's guide, whose requests include no encrypted reasoning."""
    api.script([reasoning("I need it."), call("fetch", {"url": "a"})], [say("Done.")])
    with raw(proxy) as link:
        link.send(create("hi", tools=[TOOL]))
        response = until_done(link)[-1]["response"]
        called = response["output"][-1]["call_id"]
        result = {"type": "function_call_output", "call_id": called, "output": "text"}
        link.send(create([result], tools=[TOOL], previous_response_id=response["id"]))
        assert until_done(link)[-1]["type"] == "response.completed"
    assert [item.get("type") for item in up.requests[-1].json["input"]] == [None, "function_call", result["type"]]


def test_items_are_held_where_the_end_lists_none(proxy: Proxy, up: StrictUpstream) -> None:
    """As behind ChatGPT's backend, with which Codex can speak."""
    ends = {"id": "resp_bare", "object": "response", "status": "completed", "output": []}
    events = (
        {"type": "response.output_item.done", "output_index": 0, "item": {"id": "msg_1", **say("Hello.")}},
        {"type": "response.completed", "response": ends},
    )
    up.begin_anew()
    up.respond(lambda request: pieces(*(b"data: %b\n\n" % json.dumps(event).encode() for event in events)))
    with raw(proxy) as link:
        link.send(create("hi"))
        until_done(link)
        link.send(create("more", previous_response_id="resp_bare"))
        until_done(link)
    assert up.requests[-1].json["input"][1:-1] == [{"id": "msg_1", **say("Hello.")}], "as clients send it themselves"


@pytest.mark.parametrize(
    "message, words",
    [
        ("{", "not a JSON object"),
        ("[]", "not a JSON object"),
        ('{"type": 1}', "response.create"),
        ('{"type": "response.steer", "input": "x", "previous_response_id": "y"}', "response.steer"),
        ('{"type": "response.create", "model": "m", "input": 5}', "neither a string nor an array"),
    ],
)
def test_bad_messages_get_errors_and_the_connection_goes_on(
    proxy: Proxy, api: ResponsesApi, message: str, words: str
) -> None:
    with raw(proxy) as link:
        link.send(message)
        [event] = until_done(link)
        assert (event["type"], event["status"]) == ("error", 400)
        assert words in event["error"]["message"]
        api.script([say("Hello.")])
        link.send(create("hi"))
        assert until_done(link)[-1]["type"] == "response.completed"


def test_upstreams_faults_are_errors_with_their_status(proxy: Proxy, up: StrictUpstream, api: ResponsesApi) -> None:
    up.respond(lambda request: error(429, {"error": {"type": "rate_limit", "message": "slow down"}}))
    with raw(proxy) as link:
        link.send(create("hi", stream_id="a"))
        [event] = until_done(link)
    assert event["error"]["message"] == "slow down"
    assert (event["type"], event["status"], event["stream_id"]) == ("error", 429, "a")


@pytest.mark.parametrize(
    "reply",
    [
        pieces(b'data: {"type":"response.in_progress"}\n\n'),
        pieces(b"data: [DONE]\n\n"),
        pieces(b"data: hello\n\ndata: [1]\n\n"),
        pieces(b'data: {"type":"response.completed"}\n\n'[:-30]),
        whole({"id": "resp_1", "object": "response", "output": []}),
    ],
    ids=["cut off", "nothing", "no events", "half an event", "not streamed"],
)
def test_a_reply_without_an_end_is_an_error(proxy: Proxy, up: StrictUpstream, api: ResponsesApi, reply: Pieces) -> None:
    up.respond(lambda request: reply)
    with raw(proxy) as link:
        link.send(create("hi"))
        told = [link.recv(timeout=60)]
        while '"error"' not in str(told[-1]):
            told.append(link.recv(timeout=60))
        assert json.loads(told[-1])["status"] == 502
        up.respond(api)
        api.script([say("Hello.")])
        link.send(create("hi"))
        assert until_done(link)[-1]["type"] == "response.completed", "the connection goes on"


def test_a_client_that_sends_too_much_at_once_is_closed(proxy: Proxy, up: StrictUpstream, api: ResponsesApi) -> None:
    up.respond(lambda request: endless(b'data: {"type":"response.in_progress"}\n\n'))
    with raw(proxy) as link:
        link.send(create("hi"))
        link.recv(timeout=60)
        for _ in range(WAITING + 1):
            link.send(create("hi"))
        with pytest.raises(ConnectionClosed) as closed:
            while link.recv(timeout=60):
                pass
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1008
    wait_until(lambda: up.requests[-1].left.is_set())


def test_held_histories_are_charged_to_their_tenant(up: StrictUpstream) -> None:
    """What they and new messages take is the tenant's share of all bodies."""
    with served({"default": tight(up.url)}, body_limit=100_000, buffered_limit=200_000) as proxy, raw(proxy) as link:
        link.send(create("x" * 80_000, generate=False))
        first = until_done(link)[-1]["response"]["id"]
        link.send(create("y" * 60_000, generate=False, previous_response_id=first))
        with pytest.raises(ConnectionClosed) as closed:
            link.recv(timeout=60)
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1013


def test_a_response_under_way_is_finished_when_the_process_ends(up: StrictUpstream, api: ResponsesApi) -> None:
    api.script([say("Hello, " * 50)])
    with spawned({"default": tight(up.url)}) as proxy, raw(proxy) as link:
        assert proxy.process
        up.respond(lambda request: (proxy.process.terminate(), api(request))[1])  # type: ignore[union-attr]
        link.send(create("hi"))
        assert until_done(link)[-1]["type"] == "response.completed"
        with pytest.raises(ConnectionClosed) as closed:
            link.recv(timeout=60)
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1012


def test_a_client_that_leaves_ends_its_request(
    proxy: Proxy, up: StrictUpstream, api: ResponsesApi, caplog: pytest.LogCaptureFixture
) -> None:
    up.respond(lambda request: endless(b'data: {"type":"response.in_progress"}\n\n'))
    for _ in range(30):
        with raw(proxy) as link:
            link.send(create("hi"))
            link.recv(timeout=60)
        wait_until(lambda: up.requests[-1].left.is_set())
    assert not caplog.records, "it is no bug that the client no longer takes anything"


def test_a_client_that_is_busy_may_leave_pings_unanswered(up: StrictUpstream, api: ResponsesApi) -> None:
    """websocket-client, which OpenAI's first guide used, answers them only while it reads."""
    head = b"GET /v1/responses HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    head += b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: MTIzNDU2Nzg5MDEyMzQ1Ng==\r\n\r\n"
    said = create("hi").encode()
    api.script([say("Hello.")], [say("Hello again.")])
    clock, heard = Clock(goes=True), b""
    with (
        served({"default": tight(up.url)}, clock=clock) as proxy,
        socket.create_connection(("127.0.0.1", proxy.port)) as client,
    ):
        client.sendall(head)
        client.settimeout(0.01)
        while b"\r\n\r\n\x89" not in heard:  # a ping
            clock.move(1)
            with suppress(TimeoutError):
                heard += client.recv(65536)
        client.settimeout(60)
        for seconds in (0, IDLE_SECONDS / 2):
            clock.move(seconds)
            client.sendall(b"\x81" + bytes([128 + len(said)]) + bytes(4) + said)
            heard = b""
            while b"response.completed" not in heard:
                more = client.recv(65536)
                assert more, heard
                heard += more


@pytest.mark.parametrize("path, status", [("/v1/chat/completions", 426), ("/v1/messages", 426), ("/v1/realtime", 501)])
def test_other_paths_are_refused_in_the_handshake(proxy: Proxy, path: str, status: int) -> None:
    with pytest.raises(InvalidStatus) as refused, raw(proxy, path=path):
        pass
    assert refused.value.response.status_code == status
    assert "SSE" in json.loads(refused.value.response.body)["error"]["message"]


@pytest.mark.parametrize(
    "head",
    [
        b"GET /v1/responses HTTP/1.1",
        b"GET /v1/responses HTTP/1.1\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: eA==",
        b"GET /v1/responses HTTP/1.1\r\nSec-WebSocket-Version: 13\r\n" + b"a: b\r\n" * 150 + b"c: d",
        b"GET /v1/responses HTTP/1.1\r\nContent-Length: 3\r\nSec-WebSocket-Version: 13",
        b"GET /v1/responses HTTP/1.1\r\nA: " + b"x" * 9_000,
    ],
    ids=["no key", "bad key", "many fields", "a body", "a long field"],
)
def test_a_bad_handshake_is_refused_and_closed(proxy: Proxy, head: bytes) -> None:
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=60) as client:
        client.sendall(head + b"\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\nabc")
        said = b"".join(iter(lambda: client.recv(65536), b""))
    assert said.startswith((b"HTTP/1.1 400", b"HTTP/1.1 426")), said


def test_an_offer_with_a_post_is_ignored(proxy: Proxy, api: ResponsesApi) -> None:
    """As a server may (RFC 9110, 7.8): WebSocket begins with a GET."""
    api.script([say("Hello.")])
    body = {"model": "m", "input": "hi", "store": False}
    reply = proxy.post("/v1/responses", body, "sk-test", connection="Upgrade", upgrade="websocket")
    assert reply.json()["output"][0]["content"][0]["text"] == "Hello."


def test_unknown_keys_are_refused_in_the_handshake(up: StrictUpstream) -> None:
    policy = {
        "upstream": {"base_url": up.url, "api_key": "sk-real"},
        "api_keys": [{"sha256": sha256(b"known").hexdigest()}],
    }
    with served({"tenant": policy}) as proxy:
        with pytest.raises(InvalidStatus) as refused, raw(proxy, key="unknown"):
            pass
        assert refused.value.response.status_code == 401


def test_a_message_above_the_limit_closes_its_connection(up: StrictUpstream) -> None:
    with served({"default": tight(up.url)}, body_limit=2048) as proxy, raw(proxy) as link:
        link.send(create("x" * 3000))
        with pytest.raises(ConnectionClosed) as closed:
            link.recv(timeout=60)
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1009


def test_a_tenant_has_as_many_connections_as_requests(up: StrictUpstream) -> None:
    with served({"default": tight(up.url, limits={"concurrent_requests": 1})}) as proxy:
        with raw(proxy):
            with pytest.raises(InvalidStatus) as refused, raw(proxy):
                pass
            assert refused.value.response.status_code == 503

        def free() -> bool:
            try:
                with raw(proxy):
                    return True
            except InvalidStatus:
                return False

        wait_until(free)
