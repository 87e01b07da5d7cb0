"""Turns written down: what upstream says in each round, what the client gets, what is asked next.

The client of these tests is the SDK's own accumulator, which is strict about ids, places and missing ends.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from msgspec import Raw
from openai._models import construct_type_unchecked
from openai._types import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import ResponseStreamEvent

from proxy import sse
from proxy.dialects.responses import RESPONSES
from proxy.dialects.responses.reply import ResponsesTurn
from tests.dialects.responses.api import encoded, events_of

Json = dict[str, Any]

OURS = [json.dumps({"name": name, "description": "", "parameters": {}}).encode() for name in ("grep", "read_file")]
FETCH = {"type": "function", "name": "fetch", "parameters": {"type": "object"}}


def turn(*, stream: bool = True, max_rounds: int = 8, injected: bool = True, **members: Any) -> ResponsesTurn:
    """A turn of a request with one tool of the client's; a member that is None is left out."""
    body = {"model": "m", "input": "hi", "tools": [FETCH], "stream": stream, **members}
    request = RESPONSES.parse(json.dumps({key: value for key, value in body.items() if value is not None}).encode())
    return RESPONSES.turn(request, request.entries, OURS if injected else [], max_rounds)


def response(*items: Json, number: int = 1, status: str = "completed", **members: Any) -> Json:
    """A whole response. Its items get ids that are unique among rounds with different numbers."""
    made = [{"id": f"it_{number}_{place}", **_called(item, f"{number}_{place}")} for place, item in enumerate(items)]
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


# -- what a client makes of it ----------------------------------------------------------------------------------------


def events(out: bytes) -> list[Json]:
    decoder = sse.EventDecoder()
    return [json.loads(event.data) for event in decoder.feed(out) + decoder.flush() if event.data]


def accumulated(out: bytes) -> Json:
    """The final response that the SDK makes of a stream, after everything that a strict client could complain about."""
    found = events(out)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert [event["type"] for event in found if event["type"] == "response.created"] == ["response.created"]
    ends = [event for event in found if event["type"] in ("response.completed", "response.incomplete")]
    assert found[-1] is ends[0]
    assert len(ends) == 1
    state: ResponseStreamState[Any] = ResponseStreamState(input_tools=[], text_format=omit)
    for event in found:
        state.handle_event(construct_type_unchecked(value=event, type_=ResponseStreamEvent))  # type: ignore[arg-type]
    done = {event["output_index"]: event["item"] for event in found if event["type"] == "response.output_item.done"}
    assert list(done) == sorted(done) == list(range(len(done)))
    assert list(done.values()) == ends[0]["response"]["output"]
    final: Json = ends[0]["response"]
    return final


def raws(items: Iterable[Json]) -> list[Raw]:
    return [Raw(json.dumps(item).encode()) for item in items]
