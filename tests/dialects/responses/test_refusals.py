"""Refusals in the place of a reply, and the client's own request in the place of a refused round."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy import sse
from proxy.dialects.refusals import is_error
from proxy.dialects.responses import RESPONSES
from proxy.dialects.responses.reply import ResponsesTurn
from proxy.plan.turn import Addition, State, Verdict
from tests.dialects.responses.api import call, encoded, events_of, reasoning, say
from tests.dialects.responses.turns import (
    FETCH,
    accumulated,
    response,
    stream,
    turn,
)
from tests.dialects.turning import feed

Json = dict[str, Any]

SILENT = response(reasoning("I look."), call("grep", {"pattern": "x"}))
LOOKS = response(say("Let me look."), call("grep", {"pattern": "x"}))
ANSWER = response(reasoning("There."), say("It is 42."), number=2)
ERROR = {"code": "invalid_request_error", "message": "This model does not support tools"}
FAILED = {"type": "response.failed", "sequence_number": 2, "response": {**SILENT, "output": [], "error": ERROR}}
EVENT = {"type": "error", "sequence_number": 0, **ERROR, "param": None}


def receive(one: ResponsesTurn, raw: bytes) -> bytes:
    return b"".join(map(one.receive, sse.EventDecoder().feed(raw)))


def begun(whole: Json) -> bytes:
    """The first events of a stream: that the response is there, and under way."""
    return b"".join(encoded(event) for event in list(events_of(whole))[:2])


@pytest.mark.parametrize(
    "raw", [encoded(EVENT), encoded({**FAILED, "sequence_number": 0}), begun(SILENT) + encoded(FAILED)]
)
def test_error_in_the_place_of_a_stream(raw: bytes) -> None:
    one = turn()
    one.request()
    receive(one, raw)
    assert one.refusal is not None
    assert RESPONSES.complaint(200, one.refusal) is Addition.TOOLS
    assert is_error(one.refusal)


@pytest.mark.parametrize("early", [b"", begun(SILENT)])
@pytest.mark.parametrize(
    "raw",
    [
        sse.encode(json.dumps({"error": ERROR}).encode()),
        sse.encode(json.dumps([{"error": ERROR}]).encode()),
        sse.encode(json.dumps({"object": "error", **ERROR}).encode()),
        sse.encode(json.dumps({"detail": [{"loc": ["body", "tools"], "msg": "Extra inputs"}]}).encode()),
        sse.encode(b"no tools", b"error"),
    ],
)
def test_error_of_another_api_in_the_place_of_a_stream(raw: bytes, early: bytes) -> None:
    one = turn()
    one.request()
    receive(one, early + raw)
    assert one.refusal is not None and RESPONSES.complaint(200, one.refusal) in (Addition.TOOLS, Addition.ANY)


def test_error_in_the_place_of_a_whole_reply() -> None:
    one = turn(stream=False)
    one.request()
    one.receive_whole(json.dumps({"error": ERROR}).encode())
    assert one.refusal is not None and RESPONSES.complaint(200, one.refusal) is Addition.TOOLS


def test_a_reply_is_no_refusal() -> None:
    one = turn()
    one.request()
    feed(one, stream(ANSWER))
    assert one.refusal is None and not is_error(json.dumps(ANSWER).encode())
    assert RESPONSES.complaint(429, b'{"error": {"message": "slow down"}}') is Verdict.FINAL


def test_error_after_an_item_is_part_of_the_reply() -> None:
    one = turn()
    one.request()
    receive(one, stream(LOOKS)[: stream(LOOKS).index(b"event: response.completed")] + encoded(EVENT))
    assert one.refusal is None and not one.start_over()


def test_a_refused_later_round_ends_with_the_clients_own_request() -> None:
    one = turn()
    one.request()
    shown = feed(one, stream(SILENT))
    one.answer(["found"])
    one.request()  # is refused
    assert one.start_over()
    own = json.loads(one.request())
    assert own == {"model": "m", "input": "hi", "tools": [FETCH], "stream": True}
    final = accumulated(shown + feed(one, stream(ANSWER)) + one.close())
    assert [item["type"] for item in final["output"]] == ["reasoning", "message"]
    assert one.state is State.DONE and one.hidden is None
    assert not one.start_over()


def test_a_refused_later_round_of_a_whole_reply() -> None:
    one = turn(stream=False)
    one.request()
    one.receive_whole(json.dumps(LOOKS).encode())
    one.end()
    one.answer(["found"])
    one.request()
    assert one.start_over()
    one.request()
    plain = json.dumps({**ANSWER, "tools": [FETCH]}).encode()
    one.receive_whole(plain)
    one.end()
    assert one.close() == plain and one.hidden is None
