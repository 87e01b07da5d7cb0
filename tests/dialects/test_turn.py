"""The machine of turns: what must be the same whatever the API."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from proxy.dialects.reply import MAX_ARGUMENTS
from proxy.dialects.turn import Turn
from proxy.plan.turn import Broken, State
from proxy.tools.answer import REPEATED
from tests.dialects.chat import turns as chat
from tests.dialects.messages import api as messages_api
from tests.dialects.messages import turns as messages
from tests.dialects.responses import api as responses_api
from tests.dialects.responses import turns as responses
from tests.dialects.turning import receive, run
from tests.doubling import assert_linear

Json = dict[str, Any]

GATEWAY = b'event: error\ndata: {"message": "Bad gateway", "code": 502}\n\n'
ERROR = b'event: error\ndata: {"type": "error", "error": {"message": "overloaded"}}\n\n'
REFUSED = json.dumps({"error": {"message": "tools are not supported", "code": 400}}).encode()


class Api:
    """How one API writes a reply with a text, or with a call."""

    def __init__(
        self, turn: Callable[..., Turn], says: Callable[..., Json], stream: Callable[[Json, int], bytes]
    ) -> None:
        self.turn = turn
        self._says = says
        self._stream = stream

    def whole(self, text: str = "", call: str = "", arguments: str = "{}", number: int = 1) -> bytes:
        return json.dumps(self._says(text, call, arguments, number)).encode()

    def stream(self, text: str = "", call: str = "", arguments: str = "{}", number: int = 1, split: int = 8) -> bytes:
        """`split`: the most characters of an event."""
        return self._stream(self._says(text, call, arguments, number), split)

    def encoded(self, reply: Json) -> bytes:
        return self._stream(reply, 8)


def _chat(text: str, call: str, arguments: str, number: int) -> Json:
    said = {"content": text} if text else {}
    called = chat.calls(chat.called(call, arguments, f"call_{number}")) if call else {}
    reply: Json = json.loads(chat.whole(said | called, "tool_calls" if call else "stop", f"c{number}"))
    return reply


def _chat_stream(reply: Json, split: int) -> bytes:
    [choice] = reply["choices"]
    begin, end = chat.chunk({"role": "assistant"}, id=reply["id"]), chat.chunk({}, choice["finish_reason"])
    return chat.stream(begin, chat.chunk(choice["message"], id=reply["id"]), end, chat.DONE)


def _responses(text: str, call: str, arguments: str, number: int) -> Json:
    said = [responses_api.say(text)] if text else []
    called = [responses_api.call(call) | {"arguments": arguments}] if call else []
    return responses.response(*said, *called, number=number)


def _messages(text: str, call: str, arguments: str, number: int) -> Json:
    said = [messages_api.say(text)] if text else []
    called = [messages_api.call(call, json.loads(arguments))] if call else []
    return messages.message(*said, *called, number=number)


APIS = {
    "chat": Api(chat.turn, _chat, _chat_stream),
    "responses": Api(responses.turn, _responses, responses.stream),
    "messages": Api(messages.turn, _messages, messages.stream),
}


@pytest.fixture(params=APIS)
def api(request: pytest.FixtureRequest) -> Api:
    return APIS[request.param]


def test_a_model_that_only_repeats_its_calls_is_told_to_answer(api: Api) -> None:
    reads = [api.whole(call="grep", arguments='{"pattern": "x"}', number=number) for number in range(1, 5)]
    turn, said = api.turn(max_rounds=8), []
    for reply, answer in zip(reads, ["found", REPEATED, "found more", REPEATED], strict=True):
        said.append(turn.request())
        receive(turn, reply)
        turn.end()
        turn.answer([answer])
    said.append(turn.request())
    assert not any(b"answer now" in body for body in said), "one repeated call, and others between, are no circle"
    receive(turn, reads[0])
    turn.end()
    turn.answer([REPEATED])
    assert b"answer now" in turn.request()
    receive(turn, api.whole("It is x."))
    turn.end()
    assert (turn.state, turn.rounds) == (State.DONE, 5) and b"It is x." in turn.close()


def after_a_round(api: Api, text: str = "", *, stream: bool = True) -> Turn:
    """A turn whose first round called one of our tools, and whose second round has been asked for."""
    turn = api.turn(stream=stream)
    turn.request()
    first = api.stream(text, "grep") if stream else api.whole(text, "grep")
    receive(turn, first)
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
    turn = after_a_round(api, "Let me look.", stream=stream)
    out = receive(turn, ERROR)
    assert (turn.refusal is None) == stream  # a stream has shown something, so there the error ends the reply
    assert (out == b"") != stream


def test_an_error_in_the_place_of_a_whole_reply_is_a_refusal(api: Api) -> None:
    turn = api.turn(stream=False)
    turn.request()
    assert turn.receive_whole(REFUSED) == b""
    assert turn.refusal == REFUSED


@pytest.mark.parametrize("text", ["", "Let me look."])
def test_a_whole_error_in_the_place_of_a_later_stream_is_a_refusal(api: Api, text: str) -> None:
    turn = after_a_round(api, text)
    assert turn.receive_whole(REFUSED) == b""
    assert turn.refusal == REFUSED
    assert turn.start_over() is not bool(text)


@pytest.mark.parametrize("events", [0, 1])
def test_a_later_round_without_an_end_is_broken(api: Api, events: int) -> None:
    turn = after_a_round(api, "Let me look.")
    second = api.stream("It is 42.", number=2)
    receive(turn, b"".join(event + b"\n\n" for event in second.split(b"\n\n")[:events]))
    with pytest.raises(Broken):
        turn.end()


def test_answers_that_do_not_fit_are_reworded(api: Api) -> None:
    turn = after_a_round(api)
    turn.reword("too long")
    again = turn.request()
    assert b'"too long"' in again
    assert b'"found"' not in again


def test_an_error_within_a_call_of_ours_ends_the_reply(api: Api) -> None:
    turn = api.turn()
    turn.request()
    raw = api.stream("Hm.", "grep", '{"pattern": "x"}')
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
    out = receive(turn, api.stream() if stream else api.whole()) + turn.end()
    assert turn.state is State.DONE
    assert turn.hidden is None
    assert b"offload-proxy" not in out + turn.close()


def test_a_stream_stays_one_if_the_own_request_is_answered_whole(api: Api) -> None:
    turn = api.turn()
    turn.request()
    receive(turn, GATEWAY)
    assert turn.start_over()
    turn.request()
    out = receive(turn, api.whole("It is 42.")) + turn.end() + turn.close()
    assert all(block.startswith((b"data: ", b"event: ")) for block in out.strip().split(b"\n\n"))
    assert b"It is 42." in out


def test_endless_arguments_are_broken(api: Api) -> None:
    endless = json.dumps({"pattern": "x" * MAX_ARGUMENTS})
    with pytest.raises(Broken, match="arguments"):
        run(api.turn(), api.whole("", "grep", endless))
    turn = api.turn()
    turn.request()
    with pytest.raises(Broken, match="arguments"):  # before the call has ended
        receive(turn, api.stream("", "grep", endless, split=MAX_ARGUMENTS // 4))


def many(api: Api, tool: str, number: int, *, stream: bool) -> bytes:
    """A reply with as many calls of a tool, all the same."""
    reply = json.loads(api.whole(call=tool, arguments='{"pattern": "x"}'))
    if "choices" in reply:
        message = reply["choices"][0]["message"]
        [called] = message["tool_calls"]
        message["tool_calls"] = [
            called | {"index": index} | ({"id": f"c{index}"} if stream else {}) for index in range(number)
        ]
    else:
        reply["output" if "output" in reply else "content"] *= number
    return api.encoded(reply) if stream else json.dumps(reply).encode()


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

    replies = {number: many(api, tool, number, stream=stream) for number in (700, 1_400)}
    assert_linear(work, *replies)


def test_calls_with_the_same_id_get_different_ones() -> None:
    turn = APIS["chat"].turn()
    turn.request()
    receive(turn, many(APIS["chat"], "grep", 300, stream=False))
    turn.end()
    turn.answer(["none"] * 300)
    asked = json.loads(turn.request())["messages"][-301]
    assert len({call["id"] for call in asked["tool_calls"]}) == 300
