"""The machine of turns: what must be the same whatever the API."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from proxy import sse
from proxy.dialects.reply import MAX_ARGUMENTS
from proxy.dialects.request import RoundRequest
from proxy.dialects.turn import Turn
from proxy.plan.turn import Broken, State
from proxy.tools.answer import REPEATED
from tests.dialects.contract.apis import APIS, Api, Block, Round, ours, text, theirs, think
from tests.dialects.messages import turns as messages
from tests.dialects.responses import turns as responses
from tests.dialects.turning import receive, run
from tests.doubling import assert_linear

Json = dict[str, Any]

GATEWAY = b'event: error\ndata: {"message": "Bad gateway", "code": 502}\n\n'
ERROR = b'event: error\ndata: {"type": "error", "error": {"message": "overloaded"}}\n\n'
REFUSED = json.dumps({"error": {"message": "tools are not supported", "code": 400}}).encode()


def encoded(api: Api, reply: Json, *, stream: bool) -> bytes:
    return next(iter(api.encodings.values()))(reply) if stream else api.whole(reply)


def says(api: Api, *blocks: Block, number: int = 1, stream: bool = True) -> bytes:
    """A reply with these blocks."""
    return encoded(api, api.reply(Round(blocks), number), stream=stream)


@pytest.fixture(params=APIS)
def api(request: pytest.FixtureRequest) -> Api:
    return APIS[request.param]


SERVED: Json = {
    "type": "server_tool_use",
    "id": "srvtoolu_1",
    "name": "web_search",
    "input": {"q": 1},
}
SEARCH: Json = {"type": "web_search_call", "status": "completed", "action": {}}
HELLO = [think("Hm."), text("Hello."), theirs("1"), theirs("2")]
UNTOUCHED = {
    "messages": [
        *(APIS["messages"].reply(Round(blocks), 1) for blocks in ([text("Hello.")], HELLO)),
        APIS["messages"].reply(Round([text("Hel")], cut=True), 1),
        messages.message({"type": "redacted_thinking", "data": "abc=="}, SERVED),
        messages.message(stop_reason="refusal"),
    ],
    "responses": [
        *(
            APIS["responses"].reply(Round(blocks), 1)
            for blocks in ([text("Hello.")], HELLO, [think(), *HELLO])
        ),
        responses.response(status="incomplete", incomplete_details={"reason": "max_output_tokens"}),
        responses.response(SEARCH),
    ],
}
ODD = b': hi\n\nevent: new\ndata: {"type":"new"}\n\ndata: not json\n\n'


@pytest.mark.parametrize("stream", [False, True])
def test_the_history_is_looked_through_only_for_a_text_that_may_be_a_call(
    api: Api, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = list[RoundRequest]()
    monkeypatch.setattr(RoundRequest, "native", property(looked.append))
    plain = says(api, text("Hello."), theirs("1"), stream=stream)
    written = says(api, text('{"name": "grep", "arguments": {"pattern": "a"}}'), stream=stream)
    run(api.turn(stream=stream), plain)
    assert not looked
    run(api.turn(stream=stream), written, plain)
    assert looked


@pytest.mark.parametrize(
    ("name", "reply"), [(name, reply) for name, replies in UNTOUCHED.items() for reply in replies]
)
def test_a_reply_without_our_calls_arrives_byte_for_byte(name: str, reply: Json) -> None:
    """Unknown events, comments and a last `[DONE]` do, too."""
    api, reply = APIS[name], {key: value for key, value in reply.items() if key != "tools"}
    begin, end = encoded(api, reply, stream=True).split(b"\n\n", 1)
    raw = begin + b"\n\n" + ODD + end + b"data: [DONE]\n\n"
    for injected in (False, True):
        assert run(api.turn(injected=injected), raw)[0] == raw
    whole = json.dumps(reply, indent=1).encode()
    assert run(api.turn(stream=False), whole)[0] == whole


def test_heartbeats_may_come_at_any_place(api: Api) -> None:
    """The newest SDKs make the same of a stream with and without them. Before its beginning and
    behind its end, they are comments."""
    rounds = [
        says(api, think(), text("Let me look."), ours()),
        says(api, text("It is 42."), theirs(), number=2),
    ]
    turn, out = api.turn(), b""
    for raw in rounds:
        turn.request()
        out += turn.heartbeat()
        for event in sse.EventDecoder().feed(raw):
            out += turn.receive(event) + turn.heartbeat()
        out += turn.end() + turn.heartbeat()
        if turn.state is State.CALLING:
            turn.answer(["found"])
    out += turn.close() + turn.heartbeat()
    comment = sse.comment(b"working")
    assert out.startswith(comment) and out.endswith(comment) and out.count(comment) == 2
    assert api.assembled(out) == api.assembled(run(api.turn(), *rounds)[0])
    assert out.count(b"\n\n") > sum(raw.count(b"\n\n") for raw in rounds)


@pytest.mark.parametrize("first", [False, True])
def test_a_server_may_stream_one_round_and_not_the_next(api: Api, first: bool) -> None:
    """The client gets what the first one is."""
    rounds = [
        says(api, text("Let me look."), ours(), stream=not first),
        says(api, text("It is 42."), theirs(), number=2, stream=first),
    ]
    out, _ = run(api.turn(), rounds[0], ODD + rounds[1] if first else rounds[1])
    reply = json.loads(out) if first else api.assembled(out)
    shown = api.blocks(reply)
    said = [word for one in shown if one.kind == "text" for word in one.text.split()]
    assert " ".join(said) == "Let me look. It is 42."
    assert api.usage(reply) == (200, 20)
    assert shown[-1] == theirs()


def test_after_the_last_round_our_tools_are_gone(api: Api) -> None:
    replies = [
        says(api, text("Let me look."), ours(str(number)), number=number) for number in (1, 2)
    ]
    replies.append(says(api, text("So be it."), number=3))
    out, asked = run(api.turn(max_rounds=1), *replies)
    assert [len(body["tools"]) for body in asked] == [3, 3, 1]
    assert [json.dumps(body).count("cannot be called again") for body in asked] == [0, 1, 2]
    assert [one.kind for one in api.blocks(api.assembled(out))] in (["text"], ["text"] * 3)
    _, asked = run(api.turn(max_rounds=1, tools=None), *replies)
    if api is APIS["messages"]:  # a history with calls is refused without tools
        assert [body.get("tool_choice") for body in asked] == [
            None,
            {"type": "none"},
            {"type": "none"},
        ]
        assert all(body["tools"] for body in asked)
    else:
        assert [body.get("tool_choice") for body in asked] == [None, "none", None]
        assert "tools" not in asked[2]


def test_a_last_round_that_calls_only_our_tools_ends_as_one_without_calls(api: Api) -> None:
    replies = [
        says(api, text("Let me look."), ours(str(number)), number=number) for number in range(1, 4)
    ]
    out, _ = run(api.turn(max_rounds=1), *replies)
    assert {one.kind for one in api.blocks(api.assembled(out))} == {"text"}
    assert not re.search(rb'(finish|stop)_reason": ?"tool', out)


def test_a_model_that_only_repeats_its_calls_is_told_to_answer(api: Api) -> None:
    reads = [says(api, ours(), number=number, stream=False) for number in range(1, 5)]
    turn, said = api.turn(max_rounds=8), []
    for reply, answer in zip(reads, ["found", REPEATED, "found more", REPEATED], strict=True):
        said.append(turn.request())
        receive(turn, reply)
        turn.end()
        turn.answer([answer])
    said.append(turn.request())
    assert not any(b"answer now" in body for body in said), (
        "one repeated call, and others between, are no circle"
    )
    receive(turn, reads[0])
    turn.end()
    turn.answer([REPEATED])
    assert b"answer now" in turn.request()
    receive(turn, says(api, text("It is x."), stream=False))
    turn.end()
    assert (turn.state, turn.rounds) == (State.DONE, 5) and b"It is x." in turn.close()


def after_a_round(api: Api, *blocks: Block, stream: bool = True) -> Turn:
    """A turn whose first round called one of our tools, and whose second round has been asked
    for."""
    turn = api.turn(stream=stream)
    turn.request()
    receive(turn, says(api, *blocks, ours(), stream=stream))
    turn.end()
    turn.answer(["found"])
    turn.request()
    return turn


def test_an_error_of_a_gateway_in_the_place_of_a_stream_is_a_refusal(api: Api) -> None:
    turn = api.turn()
    turn.request()
    receive(turn, GATEWAY)
    assert turn.refusal == b'{"message": "Bad gateway", "code": 502}'


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_in_the_place_of_a_later_round(api: Api, stream: bool) -> None:
    turn = after_a_round(api, text("Let me look."), stream=stream)
    out = receive(turn, ERROR)
    # a stream has shown something, so there the error ends the reply
    assert (turn.refusal is None) == stream
    assert (out == b"") != stream


def test_an_error_in_the_place_of_a_whole_reply_is_a_refusal(api: Api) -> None:
    turn = api.turn(stream=False)
    turn.request()
    assert turn.receive_whole(REFUSED) == b""
    assert turn.refusal == REFUSED


@pytest.mark.parametrize("said", [[], [text("Let me look.")]])
def test_a_whole_error_in_the_place_of_a_later_stream_is_a_refusal(
    api: Api, said: list[Block]
) -> None:
    turn = after_a_round(api, *said)
    assert turn.receive_whole(REFUSED) == b""
    assert turn.refusal == REFUSED
    assert turn.start_over() is not bool(said)


def test_a_turn_of_which_the_client_has_only_seen_thinking_may_start_over(api: Api) -> None:
    """The client's own request is sent, and its reply goes back as upstream made it."""
    members = {"store": False} if api is APIS["responses"] else {}
    rounds = [
        says(api, *said, number=number)
        for number, said in enumerate([[think(), ours()], [think(), text()]], 1)
    ]
    turn = api.turn(**members)
    turn.request()
    out = receive(turn, rounds[0]) + turn.end()
    turn.answer(["found"])
    turn.request()
    assert turn.receive_whole(REFUSED) == b""
    assert turn.start_over()
    assert b"grep" not in turn.request()
    out += receive(turn, rounds[1]) + turn.end()
    assert turn.hidden is not None
    assert (turn.hidden.before, turn.hidden.after) == ((), ())
    reply = api.assembled(out + turn.close())
    assert [one.kind for one in api.blocks(reply)].count("text") == 1
    back = api.put_back(turn, reply)
    assert [one for one in back if one.kind != "think"] == [text()]
    assert len(back) <= 2


@pytest.mark.parametrize("events", [0, 1])
def test_a_later_round_without_an_end_is_broken(api: Api, events: int) -> None:
    turn = after_a_round(api, text("Let me look."))
    second = says(api, text("It is 42."), number=2)
    receive(turn, b"".join(event + b"\n\n" for event in second.split(b"\n\n")[:events]))
    with pytest.raises(Broken):
        turn.end()


@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_read_and_names_our_tool_is_no_reply_for_the_client(
    api: Api, stream: bool
) -> None:
    odd = b'{"answer": [{"tool": "grep"}]}' if not stream else b'data: [{"tool": "grep"}]\n\n'
    turn = api.turn(stream=stream)
    turn.request()
    with pytest.raises(Broken, match="names a tool"):
        receive(turn, odd)
    other = api.turn(stream=stream, injected=False)
    other.request()
    assert receive(other, odd) + other.end() + other.close() == odd


ENDS = (
    b"message_delta",
    b"message_stop",
    b'"finish_reason": "',
    b"[DONE]",
    b"response.completed",
    b'"choices": []',
)


def without_end(stream: bytes) -> bytes:
    """A stream in which nothing says that it ends."""
    events = stream.split(b"\n\n")
    return b"\n\n".join(event for event in events if not any(end in event for end in ENDS))


def test_a_reply_without_an_end_counts_if_our_calls_are_complete(api: Api) -> None:
    """Gateways close a stream behind its last item: https://github.com/moeru-ai/airi/issues/2589"""
    turn = api.turn()
    turn.request()
    receive(turn, without_end(says(api, text("Let me look."), ours())))
    turn.end()
    assert [call.name for call in turn.calls] == ["grep"]
    turn.answer(["found"])
    turn.request()
    out = receive(turn, without_end(says(api, text("#"), number=2)))
    turn.end()
    assert turn.state is State.DONE
    assert b"#" in out


def test_arguments_that_are_no_object_go_back_as_an_empty_one(api: Api) -> None:
    """vLLM answers 400 to each later request with them:
    https://github.com/vllm-project/vllm/issues/43995"""
    both = api.encodings["large"](api.reply(Round([ours(), theirs()]), 1)).replace(
        b'\\"}"', b'\\""'
    )
    turn = api.turn()
    out, _ = run(turn, both)
    assert turn.hidden is not None
    assert turn.hidden.instead is not None
    instead = re.sub(rb"\s", b"", turn.hidden.instead)
    assert instead.count(b'"arguments":"{}"') + instead.count(b'"input":{}') == 2
    assert b'q\\"' in out, "the client's call reaches it as it came"


def test_answers_that_do_not_fit_are_reworded(api: Api) -> None:
    turn = after_a_round(api)
    turn.reword("too long")
    again = turn.request()
    assert b'"too long"' in again
    assert b'"found"' not in again


@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_that_is_not_utf8_somewhere_is_relayed_or_broken(api: Api, stream: bool) -> None:
    reply = says(api, text("Look."), ours(), stream=stream)
    for place in range(0, len(reply), 17):
        turn = api.turn(stream=stream)
        turn.request()
        try:
            receive(turn, reply[:place] + b"\x9e" + reply[place + 1 :])
            turn.end()
        except Broken:
            continue
        if turn.state is State.CALLING:  # the byte was in an event that says nothing
            turn.answer(["found"] * len(turn.calls))
            json.loads(turn.request())


def test_an_error_within_a_call_of_ours_ends_the_reply(api: Api) -> None:
    turn = api.turn()
    turn.request()
    raw = says(api, text("Hm."), ours())
    shown = receive(turn, raw[: raw.index(b"\n\n", raw.index(b'"grep"')) + 2])
    assert b"overloaded" in receive(turn, ERROR)
    assert shown
    turn.end()
    assert turn.state is State.DONE
    assert turn.hidden is None


@pytest.mark.parametrize("stream", [False, True])
def test_the_own_request_may_get_an_empty_reply(api: Api, stream: bool) -> None:
    turn = after_a_round(api, stream=stream)
    assert turn.start_over()
    own = turn.request()
    assert b"grep" not in own
    out = receive(turn, says(api, stream=stream)) + turn.end()
    assert turn.state is State.DONE
    assert turn.hidden is None
    assert b"offload-proxy" not in out + turn.close()


def test_a_stream_stays_one_if_the_own_request_is_answered_whole(api: Api) -> None:
    turn = api.turn()
    turn.request()
    receive(turn, GATEWAY)
    assert turn.start_over()
    turn.request()
    out = receive(turn, says(api, text("It is 42."), stream=False)) + turn.end() + turn.close()
    assert all(block.startswith((b"data: ", b"event: ")) for block in out.strip().split(b"\n\n"))
    assert b"It is 42." in out


def test_endless_arguments_are_broken(api: Api) -> None:
    endless = api.reply(Round([ours("x" * MAX_ARGUMENTS)]), 1)
    with pytest.raises(Broken, match="arguments"):
        run(api.turn(), api.whole(endless))
    turn = api.turn()
    turn.request()
    with pytest.raises(Broken, match="arguments"):  # before the call has ended
        receive(turn, api.encodings["large"](endless))


def many(api: Api, tool: str, number: int, *, stream: bool) -> bytes:
    """A reply with as many calls of a tool, all the same."""
    reply = api.reply(Round([ours() if tool == "grep" else theirs()]), 1)
    if "choices" in reply:
        message = reply["choices"][0]["message"]
        [called] = message["tool_calls"]
        message["tool_calls"] = [
            called | {"index": index} | ({"id": f"c{index}"} if stream else {})
            for index in range(number)
        ]
    else:
        reply["output" if "output" in reply else "content"] *= number
    return encoded(api, reply, stream=stream)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tool", ["grep", "theirs"])
def test_many_calls_of_one_reply_take_linear_time(api: Api, tool: str, stream: bool) -> None:
    """A weak model repeats the same call until its reply is full."""

    def work(number: int) -> None:
        turn = api.turn(stream=stream)
        turn.request()
        receive(turn, replies[number])
        turn.end()
        if tool == "grep":
            turn.answer(["none"] * number)
            assert turn.request().count(b'"none"') == number
        else:
            turn.close()
            assert len(turn.visible[1]) == number

    replies = {number: many(api, tool, number, stream=stream) for number in (300, 600)}
    assert_linear(work, *replies)
