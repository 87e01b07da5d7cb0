"""Turns written down: what upstream says in each round, what the client gets, what is asked
next."""

from __future__ import annotations

import json
from typing import Any

from proxy.dialects.responses import RESPONSES
from proxy.dialects.responses.reply import ResponsesTurn
from tests.dialects.responses.api import events_of
from tests.dialects.scripted import OURS, encoded
from tests.dialects.turning import events

Json = dict[str, Any]

FETCH = {"type": "function", "name": "fetch", "parameters": {"type": "object"}}


def turn(
    *, stream: bool = True, max_rounds: int = 8, injected: bool = True, **members: Any
) -> ResponsesTurn:
    """A turn of a request with one tool of the client's; a member that is None is left out."""
    body = {"model": "m", "input": "hi", "tools": [FETCH], "stream": stream, **members}
    request = RESPONSES.parse(
        json.dumps({key: value for key, value in body.items() if value is not None}).encode()
    )
    return RESPONSES.turn(request, request.entries, OURS if injected else [], max_rounds)


def response(*items: Json, number: int = 1, status: str = "completed", **members: Any) -> Json:
    """A whole response. Its items get ids that are unique among rounds with different numbers."""
    made = [
        {"id": f"it_{number}_{place}", **_called(item, f"{number}_{place}")}
        for place, item in enumerate(items)
    ]
    return {
        "id": f"resp_{number}",
        "object": "response",
        "created_at": 1_700_000_000 + number,
        "status": status,
        "model": "m",
        "output": made,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [FETCH, *({"type": "function", **json.loads(raw)} for raw in OURS)],
        "usage": {
            "input_tokens": 100 * number,
            "input_tokens_details": {"cached_tokens": 10},
            "output_tokens": 10,
            "output_tokens_details": {"reasoning_tokens": 2},
            "total_tokens": 100 * number + 10,
        },
        **members,
    }


def _called(item: Json, id: str) -> Json:
    return {"call_id": f"call_{id}", **item} if item["type"].endswith("_call") else item


def stream(whole: Json, split: int = 4) -> bytes:
    return b"".join(encoded(event) for event in events_of(whole, split))


# -- what a client makes of it ---------------------------------------------------------------------


def accumulated(out: bytes) -> Json:
    """The final response of a stream, after everything that a strict client could complain
    about."""
    found = events(out)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert [event["type"] for event in found if event["type"] == "response.created"] == [
        "response.created"
    ]
    ends = [
        event for event in found if event["type"] in ("response.completed", "response.incomplete")
    ]
    assert found[-1] is ends[0]
    assert len(ends) == 1
    done = {
        event["output_index"]: event["item"]
        for event in found
        if event["type"] == "response.output_item.done"
    }
    assert list(done) == sorted(done) == list(range(len(done)))
    assert list(done.values()) == ends[0]["response"]["output"]
    final: Json = ends[0]["response"]
    return final
