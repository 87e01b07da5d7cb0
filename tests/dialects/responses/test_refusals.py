"""Refusals in the place of a reply, and the client's own request in the place of a refused round."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy import sse
from proxy.dialects.refusals import is_error
from proxy.dialects.responses import RESPONSES
from proxy.dialects.responses.reply import ResponsesTurn
from proxy.plan.turn import Addition
from tests.dialects.responses.api import call, encoded, events_of, reasoning, say
from tests.dialects.responses.turns import response, turn

Json = dict[str, Any]

SILENT = response(reasoning("I look."), call("grep", {"pattern": "x"}))
LOOKS = response(say("Let me look."), call("grep", {"pattern": "x"}))
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
    assert RESPONSES.complaint(200, one.refusal) is Addition.ANY
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
    assert one.refusal is not None and RESPONSES.complaint(200, one.refusal) is Addition.ANY
