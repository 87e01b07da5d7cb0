"""Hostile JSON, events and tool calls cost what their size costs, and no object is made of what is
too many."""

from __future__ import annotations

import json
from collections.abc import Callable

import msgspec
import pytest

from proxy import rawjson, sse
from proxy.dialects import refusals
from proxy.dialects.chat import CHAT
from proxy.dialects.chat.chunks import CallDelta, ReplyMessage, ToolCalls
from proxy.dialects.request import MAX_MODEL, MAX_OTHERS
from proxy.plan.turn import Unplannable
from tests.doubling import assert_linear
from tests.sampling import sample

LONE = rb'"\ud83d"'


def many(one: bytes, number: int) -> bytes:
    return b",".join([one] * number)


def chat(messages: bytes, others: bytes = b"") -> bytes:
    return b'{"messages":[' + messages + b"]" + others + b"}"


def keys(number: int) -> bytes:
    return b",".join(b'"k%d":1' % key for key in range(number))


SHAPES: dict[str, Callable[[int], bytes]] = {
    "empty messages": lambda size: chat(many(b"{}", size)),
    "numbers for messages": lambda size: chat(many(b"1", size)),
    "tools": lambda size: chat(b"", b',"tools":[' + many(b'{"function":{"name":"f"}}', size // 20) + b"]"),
    "numbers elsewhere": lambda size: chat(b"", b',"x":[' + many(b"1", size) + b"]"),
    "members": lambda size: chat(b"", b"," + keys(size // 4)),
    "members of a message": lambda size: chat(b'{"role":"user",' + keys(size // 4) + b"}"),
    "half a surrogate pair": lambda size: chat(many(b'{"role":"user","content":"text"}', 50) + b"," + LONE + many(
        b',"' + b"x" * size + b'"', 1)),
    "half pairs": lambda size: chat(b'"' + rb"\ud83d" * size + b'"'),
    "backslashes": lambda size: chat(LONE + b',"' + rb"\\" * size + b'"'),
    "brackets in a text": lambda size: chat(b'"' + b"{,}" * size + b'",' + LONE),
    "nested": lambda size: chat(b"[" * size),
}  # fmt: skip


def looked_at(body: bytes) -> None:
    try:
        for raw in CHAT.parse(body).entries:
            rawjson.members(raw)
    except (Unplannable, rawjson.NotJson):
        pass


@pytest.mark.parametrize("name", SHAPES)
def test_parsing_a_request_is_linear(name: str) -> None:
    assert_linear(looked_at, SHAPES[name](1 << 18), SHAPES[name](1 << 19))


@pytest.mark.parametrize(
    "body",
    [
        chat(many(b'{"role":"user"}', rawjson.MAX_ELEMENTS + 1)),
        chat(b"", b',"x":[' + many(b"1", rawjson.UNCOUNTED) + b"]"),
        chat(b"", b"," + b",".join(b'"%d":1' % number for number in range(MAX_OTHERS + 1))),
    ],
    ids=["messages", "commas", "members"],
)
def test_requests_beyond_the_bounds_are_unplannable(body: bytes) -> None:
    with pytest.raises(Unplannable, match="more than"):
        CHAT.parse(body)


def test_a_model_with_an_endless_name_is_none_of_our_business() -> None:
    named = b'{"model":"%b","messages":[]}'
    assert CHAT.parse(named % (b"m" * (MAX_MODEL - 2))).model
    with pytest.raises(Unplannable, match="more than"):
        CHAT.parse(named % (b"m" * (MAX_MODEL - 1)))


@pytest.mark.parametrize(
    "unit",
    sample(["exceed", "exceeds ", "input is ", "context size ", "context size 1", "> ", ">1"], 3),
)
@pytest.mark.parametrize("last", ["1" * 9_000 + "+", " " * 9_000, "x"])
def test_twice_an_error_reply_takes_twice_as_long(unit: str, last: str) -> None:
    def looked_at(times: int) -> None:
        said = (unit * (times * 500) + last * times)[:20_000].encode()
        refusals.is_overflow(400, said)
        refusals.window(said)

    assert_linear(lambda times: [looked_at(times) for _ in range(20)], 1, 2)


# -- replies ---------------------------------------------------------------------------------------


def fed(data: bytes, step: int) -> int:
    decoder = sse.EventDecoder()
    events = 0
    for start in range(0, len(data), step):
        events += len(decoder.feed(data[start : start + step]))
    return events + len(decoder.flush())


EVENTS: dict[str, tuple[int, Callable[[int], bytes]]] = {
    "byte by byte": (1, lambda size: b'data: {"a":1}\n\n' * (size // 64)),
    "returns": (1000, lambda size: b"\r" * size),
    "returns, byte by byte": (1, lambda size: b"\r" * (size // 4)),
    "one event, byte by byte": (1, lambda size: b"data: " + b"x" * size + b"\n\n"),
    "one event in pieces": (1000, lambda size: b"data: " + b"x" * (size * 8) + b"\n\n"),
    "lines of data": (65_536, lambda size: b"data: \n" * size + b"\n"),
}


@pytest.mark.parametrize("name", EVENTS)
def test_decoding_events_is_linear(name: str) -> None:
    step, made = EVENTS[name]
    assert_linear(lambda data: fed(data, step), made(1 << 15), made(1 << 16))


def test_an_event_of_too_many_lines_is_not_parsed() -> None:
    raw = b"data: \n" * 3 * sse.MAX_LINES + b"\n"
    assert sse.EventDecoder().feed(raw) == [sse.ServerSentEvent(raw, None)]


def deltas(made: Callable[[int], dict[str, object]], number: int) -> list[CallDelta]:
    return [CallDelta(rawjson.members(json.dumps(made(place)).encode())) for place in range(number)]


CALLS: dict[str, Callable[[int], dict[str, object]]] = {
    "the name again and again": lambda place: {
        "function": {"name": "write", "arguments": '{"' if not place else "x"}
    },
    "braces": lambda place: {
        "function": {"name": "write", "arguments": '{"a":{' if not place else '"b":{},'}
    },
    "the name in pieces": lambda place: {"index": 0, "function": {"name": "ab"[place % 2] * 3}},
    "other members": lambda place: {"index": 0, f"x{place}": place, "function": {"arguments": "1"}},
    "calls without end": lambda place: {
        "index": place,
        "id": f"c{place}",
        "function": {"name": "write"},
    },
}


@pytest.mark.parametrize("name", CALLS)
def test_joining_pieces_of_tool_calls_is_linear(name: str) -> None:
    def work(made: list[CallDelta]) -> None:
        calls = ToolCalls()
        for delta in made:
            calls.take(delta)
        for call in calls.all:
            call.raw()

    assert_linear(work, deltas(CALLS[name], 2_000), deltas(CALLS[name], 4_000))


def test_a_text_in_pieces_is_joined_in_linear_time() -> None:
    def work(number: int) -> None:
        message = ReplyMessage()
        for _ in range(number):
            message.extend("content", ["word "])
        message.text()
        msgspec.json.decode(message.history([]) or b"")

    assert_linear(work, 25_000, 50_000)
