"""The turn of the Responses API: hidden rounds, mixed turns, what is held, and one reply for all
rounds."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy import sse
from proxy.dialects.refusals import is_error
from proxy.dialects.responses import RESPONSES
from proxy.dialects.responses.reply import ResponsesTurn
from proxy.errors import UpstreamBroken
from proxy.plan.turn import Addition, State
from tests.dialects.responses.api import call, events_of, reasoning, say
from tests.dialects.responses.turns import FETCH, accumulated, response, stream, turn
from tests.dialects.scripted import encoded
from tests.dialects.turning import events, feed, receive, run

Json = dict[str, Any]

LOOKS = response(reasoning("I look."), say("Let me look."), call("grep", {"pattern": "x"}))
ANSWERS = response(reasoning("There."), say("It is 42."), number=2)


def types(items: list[Json]) -> list[str]:
    return [item["type"] for item in items]


# -- untouched -------------------------------------------------------------------------------------


@pytest.mark.parametrize("injected", [False, True])
@pytest.mark.parametrize("status", ["completed", "incomplete", "failed"])
def test_a_reply_is_over_with_its_last_event_whatever_upstream_does_then(
    injected: bool, status: str
) -> None:
    """Else one that breaks off behind it would get an error event after its end."""
    one = turn(injected=injected)
    one.request()
    *before, last = sse.EventDecoder().feed(stream(response(say("x"), status=status)))
    for event in before:
        one.receive(event)
    assert not one.over
    one.receive(last)
    assert one.over


def test_our_tools_are_left_out_where_upstream_repeats_the_request() -> None:
    out = events(run(turn(), stream(response(say("x"))))[0])
    assert [
        [tool["name"] for tool in event["response"]["tools"]]
        for event in out
        if "response" in event
    ] == [
        ["fetch"],
        ["fetch"],
        ["fetch"],
    ]
    whole = json.loads(run(turn(stream=False), json.dumps(response(say("x"))).encode())[0])
    assert [tool["name"] for tool in whole["tools"]] == ["fetch"]


# -- hidden rounds ---------------------------------------------------------------------------------


def test_reasoning_waits_for_the_item_after_it_and_text_does_not() -> None:
    raw = stream(response(reasoning("Hm."), say("Hello."), tools=[]))
    thought, text = raw.split(b"event: response.output_item.added\ndata: ", 2)[1:]
    one = turn()
    one.request()
    assert not receive(one, raw[: raw.index(thought) + len(thought)]).count(b"reasoning_summary")
    assert b"reasoning_summary" in shown_until(raw, raw.index(text) + text.index(b"\n\n") + 2)
    assert shown_until(raw, raw.index(b"output_text.done")).count(b"output_text.delta") >= 1


@pytest.mark.parametrize(
    ("members", "live"),
    [
        ({"store": False}, True),
        ({}, False),
        ({"input": [reasoning("Hm."), say("Hello."), {"role": "user", "content": "hi"}]}, True),
        (
            {
                "input": [
                    {"type": "item_reference", "id": "rs_1"},
                    {"role": "user", "content": '"reasoning"'},
                ]
            },
            False,
        ),
    ],
    ids=[
        "it is not stored",
        "its client is not known",
        "its client sends it back",
        "its client sends references",
    ],
)
def test_reasoning_is_shown_as_it_comes_where_its_client_sends_it_back(
    members: Json, live: bool
) -> None:
    """With `encrypted_content`, too. Behind a call of ours it waits for the item after it."""
    thought = {**reasoning("I look around."), "encrypted_content": "gAAA"}
    raw = stream(response(thought, call("grep", {"pattern": "x"}), thought, say("So."), tools=[]))
    one = turn(**members)
    one.request()
    sent = raw.split(b"\n\n")
    shown = [receive(one, event + b"\n\n") for event in sent]
    first, second = (
        at for at, event in enumerate(sent) if b"item.done" in event and b"gAAA" in event
    )
    assert any(b"reasoning_summary_text.delta" in event for event in shown[:first]) is live
    assert (b"gAAA" in shown[first]) is live
    assert not any(b"gAAA" in event for event in shown[first + 1 : second + 1])


THINKS = [
    {**reasoning("a"), "encrypted_content": "A"},
    {**reasoning("b"), "encrypted_content": "B"},
]


def test_reasoning_leaves_with_the_hidden_call_behind_it() -> None:
    """Where there is no room to put the round back, and the client has seen the reasoning."""
    one = turn(store=False)
    grep = call("grep", {"pattern": "x"})
    out, _ = run(
        one, stream(response(THINKS[0], grep)), stream(response(THINKS[1], say("So."), number=2))
    )
    seen = accumulated(out)["output"]
    assert [item.get("encrypted_content") for item in seen] == ["A", "B", None]
    assert one.hidden is not None
    sent = b",".join(json.dumps(item).encode() for item in seen)
    assert json.loads(RESPONSES.alone([one.hidden], sent) or b"") == seen[1:]
    assert (
        RESPONSES.alone([one.hidden], b",".join(json.dumps(item).encode() for item in seen[1:]))
        is None
    )


def test_reasoning_that_has_lost_the_call_behind_it_is_left_out_after_a_refusal() -> None:
    said = "Item 'rs_1' of type 'reasoning' was provided without its required following item."
    refused = json.dumps(
        {"error": {"message": said, "type": "invalid_request_error", "param": "input"}}
    ).encode()
    assert RESPONSES.complaint(400, refused) is Addition.THINKING
    user, reference = {"role": "user", "content": "hi"}, {"type": "item_reference", "id": "msg_2"}
    body = {
        "model": "m",
        "input": [user, {**THINKS[0], "id": "rs_1"}, {**say("So."), "id": "msg_1"}, reference],
    }
    made = json.loads(RESPONSES.forgiving(json.dumps(body).encode(), [])[0])
    assert made == {**body, "input": [user, say("So."), reference]}


@pytest.mark.parametrize("shared", ["index and id", "id", "done twice"])
def test_items_are_told_apart_whatever_they_share(shared: str) -> None:
    """The call is ours, and it stands open beside a message."""
    items = [
        {**call("grep", {"pattern": "x"}, call_id="c1"), "id": "i"},
        {**say("Hello."), "id": "i"},
    ]
    added = [
        {"type": "response.output_item.added", "output_index": at, "item": one}
        for at, one in enumerate(items)
    ]
    ended = [{**one, "type": "response.output_item.done"} for one in added]
    sent = [*added, *ended] if shared == "id" else [added[0], ended[0], added[1], ended[1]]
    if shared == "index and id":
        sent = [{**one, "output_index": 0} for one in sent]
    elif shared == "done twice":
        sent.insert(2, ended[0])
    last = {"type": "response.completed", "response": response(*items)}
    one = turn()
    one.request()
    out = feed(one, b"".join(map(encoded, [*sent, last])))
    assert [each.id for each in one.calls] == ["c1"] and b"Hello." in out and b"grep" not in out


def shown_until(raw: bytes, end: int) -> bytes:
    one = turn()
    one.request()
    return receive(one, raw[:end])


# -- mixed turns -----------------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [True, False])
def test_a_call_of_a_tool_in_a_group_is_the_clients(streamed: bool) -> None:
    """Codex defines each MCP server as a group: `read_file` of a server for files is not ours."""
    reads = response(call("read_file", {"path": "a"}, call_id="c1", namespace="mcp__files__"))
    one = turn(stream=streamed)
    one.request()
    out = (
        feed(one, stream(reads))
        if streamed
        else one.receive_whole(json.dumps(reads).encode()) + one.end()
    )
    assert one.state is State.DONE
    final = accumulated(out + one.close()) if streamed else json.loads(out + one.close())
    assert [item["name"] for item in final["output"]] == ["read_file"]
    assert one.hidden is None


SEARCH = {
    "type": "tool_search_call",
    "call_id": "s1",
    "status": "completed",
    "arguments": {"query": "x"},
}
ASKS = {"type": "mcp_approval_request", "name": "drop", "server_label": "db", "arguments": "{}"}


@pytest.mark.parametrize("item", [{**SEARCH, "execution": "client"}, ASKS])
def test_what_the_client_answers_beside_our_calls_ends_the_turn(item: Json) -> None:
    """Upstream refuses a request that goes on without the client's answer."""
    one = turn(store=False)
    out, _ = run(one, stream(response(reasoning("Hm."), item, call("grep", {"pattern": "x"}))))
    assert one.mixed
    assert item["type"] in [shown["type"] for shown in accumulated(out)["output"]]
    assert one.hidden is not None
    kept = {item["type"]: item for item in json.loads(one.hidden.instead or b"")}
    assert ("id" in kept[item["type"]]) == (item is ASKS)  # nothing else names the question


@pytest.mark.parametrize("kind", ["tool_search", "shell_call"])
def test_what_upstream_executes_itself_does_not_end_the_turn(kind: str) -> None:
    if kind == "tool_search":
        items = [
            {**SEARCH, "call_id": None, "execution": "server"},
            {"type": "tool_search_output", "tools": []},
        ]
    else:
        items = [
            {"type": kind, "call_id": "s1"},
            {"type": f"{kind}_output", "call_id": "s1", "output": []},
        ]
    one = turn()
    out, _ = run(one, stream(response(*items, call("grep", {"pattern": "x"}))), stream(ANSWERS))
    assert not one.mixed
    assert accumulated(out)["output"][-1]["type"] == "message"


# -- ends ------------------------------------------------------------------------------------------


def test_a_tool_of_the_clients_whose_name_ends_like_ours_is_its_own() -> None:
    name = "functions.grep"
    out, _ = run(turn(tools=[FETCH | {"name": name}]), stream(response(call(name), tools=[])))
    assert b'"function_call"' in out


def test_our_tools_are_among_those_that_the_client_allows_and_it_does_not_see_them() -> None:
    names = [{"type": "function", "name": name} for name in ("fetch", "grep", "read_file")]
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": names[:1]}
    sent = {**allowed, "tools": names}
    replies = [{**reply, "tool_choice": sent} for reply in (LOOKS, ANSWERS)]
    out, asked = run(turn(tool_choice=allowed), *map(stream, replies))
    assert [request["tool_choice"] for request in asked] == [sent, sent]
    assert accumulated(out)["tool_choice"] == allowed
    assert b"read_file" not in out


def test_a_failed_reply_is_passed_on() -> None:
    failed = response(status="failed", error={"code": "server_error", "message": "no"}, tools=[])
    raw = stream(failed)
    one = turn()
    assert run(one, raw)[0] == raw
    assert one.hidden is None


@pytest.mark.parametrize("told", ["response.output_item.done", "nothing"])
def test_upstreams_of_few_words_are_understood(told: str) -> None:
    """Codex's own test server sends only the last event of each item, and some gateways only that
    of the reply."""
    few = [
        b"".join(
            encoded(one) for one in events_of(reply) if one["type"] in ("response.created", told)
        )
        + encoded(list(events_of(reply))[-1])
        for reply in (LOOKS, ANSWERS)
    ]
    out, asked = run(turn(), *few)
    assert asked[1]["input"][1:4] == LOOKS["output"]
    assert b'"grep"' not in out
    assert types(events(out)[-1]["response"]["output"])[-1] == "message"
    said = response(say("x"), tools=[])
    alone = encoded(list(events_of(said))[-1])
    assert run(turn(), alone)[0] == alone


@pytest.mark.parametrize("end", ["response.done", "response.cancelled"])
def test_events_of_gateways_end_a_reply_if_its_status_says_so(end: str) -> None:
    """https://github.com/decolua/9router/issues/2142"""
    status = "completed" if end == "response.done" else "cancelled"
    first, second = (
        stream(reply).replace(b"response.completed", end.encode()) for reply in (LOOKS, ANSWERS)
    )
    second = second.replace(
        b'"status":"completed","model"', b'"status":"%b","model"' % status.encode()
    )
    out, asked = run(turn(), first, second)
    assert len(asked) == 2
    assert events(out)[-1]["type"] == end
    assert types(events(out)[-1]["response"]["output"])[-1] == "message"


def test_arguments_that_are_an_object_are_read() -> None:
    found = {"pattern": "x"}
    raw = stream(response(call("grep", "{}"))).replace(
        b'"arguments":"{}"', b'"arguments":{"pattern":"x"}'
    )
    one = turn()
    one.request()
    feed(one, raw)
    assert json.loads(one.calls[0].arguments) == found
    one.answer(["found"])
    assert json.loads(json.loads(one.request())["input"][1]["arguments"]) == found


def test_an_error_event_counts_on() -> None:
    one = turn()
    one.request()
    sent = receive(one, stream(response(say("x"), tools=[]))[:-1])
    [said] = events(one.error_event(UpstreamBroken("broke")))
    assert said["type"] == "error"
    assert said["sequence_number"] == len(events(sent))
    assert said["error"]["message"] == said["message"] == "broke"
    streamed = b'{"type":"error","code":"server_error","message":"upstream fell","param":null,"sequence_number":7}'
    [said] = events(one.error_event(UpstreamBroken("broke"), streamed))
    assert (said["error"]["message"], said["code"]) == ("upstream fell", "server_error")


def going_on(one: ResponsesTurn) -> tuple[str, list[str], list[str]] | None:
    found = one.continuation
    return found and (
        found.shown,
        list(found.rounds),
        [json.loads(raw)["call_id"] for raw in found.after],
    )


def test_what_follows_goes_on_from_the_own_request_that_was_sent_instead() -> None:
    """The client has seen the beginning of the first round, whose call of ours has no result."""
    one = turn()
    one.request()
    feed(one, stream(response(call("grep", {"pattern": "x"}))))
    one.answer(["found"])
    one.request()  # is refused
    assert one.start_over()
    one.request()
    feed(one, stream(response(say("It is 42."), number=2, tools=[])))
    assert one.hidden is None
    assert going_on(one) == ("resp_1", ["resp_1", "resp_2"], [])


def test_calls_that_were_dropped_get_results_from_what_follows() -> None:
    looks = [
        response(call("grep", {"pattern": "y"}), call("fetch", {}), number=number)
        for number in (1, 2)
    ]
    cut = response(
        say("Let me"),
        {**call("grep", {"pattern": "y"}), "status": "incomplete"},
        status="incomplete",
    )
    for rounds, expected in (
        ([LOOKS, looks[1]], ("resp_1", ["resp_1", "resp_2"], ["call_2_0"])),
        ([looks[0]], ("resp_1", ["resp_1"], ["call_1_0"])),
        ([cut], ("resp_1", ["resp_1"], ["call_1_1"])),
        ([response(say("It is 42."))], None),
    ):
        one = turn(max_rounds=1)
        run(one, *map(stream, rounds))
        assert going_on(one) == expected


def test_nothing_is_continued_where_nothing_is_stored() -> None:
    one = turn(store=False)
    _, asked = run(one, stream(LOOKS), stream(ANSWERS))
    assert one.continuation is None
    assert types(asked[1]["input"][1:]) == ["message", "function_call", "function_call_output"]
    assert not any("id" in item for item in asked[1]["input"])


def test_reasoning_that_says_itself_goes_back() -> None:
    """As open models' does, with the id that their servers want."""
    thought = {
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "I look."}],
    }
    rounds = stream(response(thought, call("grep", {"pattern": "x"}))), stream(ANSWERS)
    _, asked = run(turn(store=False), *rounds)
    assert asked[1]["input"][1] == {"id": "it_1_0", **thought}


# -- refusals in the place of a reply --------------------------------------------------------------

SILENT = response(reasoning("I look."), call("grep", {"pattern": "x"}))
ERROR = {"code": "invalid_request_error", "message": "This model does not support tools"}
FAILED = {
    "type": "response.failed",
    "sequence_number": 2,
    "response": {**SILENT, "output": [], "error": ERROR},
}
EVENT = {"type": "error", "sequence_number": 0, **ERROR, "param": None}


def begun(whole: Json) -> bytes:
    """The first events of a stream: that the response is there, and under way."""
    return b"".join(encoded(event) for event in list(events_of(whole))[:2])


@pytest.mark.parametrize(
    "raw",
    [encoded(EVENT), encoded({**FAILED, "sequence_number": 0}), begun(SILENT) + encoded(FAILED)],
)
def test_error_in_the_place_of_a_stream(raw: bytes) -> None:
    one = turn()
    one.request()
    receive(one, raw)
    assert one.refusal is not None
    assert RESPONSES.complaint(200, one.refusal) is Addition.ANY
    assert is_error(one.refusal)


@pytest.mark.parametrize("early", [b"", begun(SILENT)])
@pytest.mark.parametrize(
    "raw",
    [
        sse.encode(json.dumps({"error": ERROR}).encode()),
        sse.encode(json.dumps([{"error": ERROR}]).encode()),
        sse.encode(json.dumps({"object": "error", **ERROR}).encode()),
        sse.encode(
            json.dumps({"detail": [{"loc": ["body", "tools"], "msg": "Extra inputs"}]}).encode()
        ),
        sse.encode(b"no tools", b"error"),
    ],
)
def test_error_of_another_api_in_the_place_of_a_stream(raw: bytes, early: bytes) -> None:
    one = turn()
    one.request()
    receive(one, early + raw)
    assert one.refusal is not None and RESPONSES.complaint(200, one.refusal) is Addition.ANY
