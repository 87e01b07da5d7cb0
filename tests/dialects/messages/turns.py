"""Turns written down: what upstream says in each round, what the client gets, what is asked
next."""

from __future__ import annotations

import json
from typing import Any

from proxy.dialects.messages import MESSAGES
from proxy.dialects.messages.reply import MessagesTurn
from tests.dialects.messages.api import events_of, usage
from tests.dialects.scripted import OURS, encoded
from tests.dialects.turning import events

Json = dict[str, Any]

FETCH = {"name": "fetch", "input_schema": {"type": "object"}}
HI = {"role": "user", "content": "hi"}


def turn(
    *, stream: bool = True, max_rounds: int = 8, injected: bool = True, **members: Any
) -> MessagesTurn:
    """A turn of a request with one tool of the client's; a member that is None is left out."""
    body = {
        "model": "m",
        "max_tokens": 90_000,
        "messages": [HI],
        "tools": [FETCH],
        "stream": stream,
        **members,
    }
    request = MESSAGES.parse(
        json.dumps({key: value for key, value in body.items() if value is not None}).encode()
    )
    return MESSAGES.turn(request, request.entries, OURS if injected else [], max_rounds)


def message(*blocks: Json, number: int = 1, **members: Any) -> Json:
    """A whole reply. Its calls and signatures get ids that are unique among rounds with different
    numbers."""
    made = [_identified(block, f"{number}_{place}") for place, block in enumerate(blocks)]
    return {
        "id": f"msg_{number}",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": made,
        "stop_reason": "tool_use"
        if any(block["type"] == "tool_use" for block in made)
        else "end_turn",
        "stop_sequence": None,
        "usage": usage(100 * number, 10, cached=10),
        **members,
    }


def _identified(block: Json, id: str) -> Json:
    if block["type"] == "tool_use":
        return {"id": f"toolu_{id}", **block}
    return {**block, "signature": f"sig+/{id}=="} if block["type"] == "thinking" else block


def stream(whole: Json, split: int = 4) -> bytes:
    return b"".join(encoded(event) for event in events_of(whole, split))


# -- what a client makes of it ---------------------------------------------------------------------


def accumulated(out: bytes) -> Json:
    """The message that a client makes of a stream, after everything that a strict client could
    complain about."""
    found = [event for event in events(out) if event["type"] != "ping"]
    assert [event["type"] for event in found].count("message_start") == 1
    assert [event["type"] for event in (found[0], *found[-2:])] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]
    made: Json = found[0]["message"]
    open_block: Json | None = None
    partial = ""
    for event in found[1:-2]:
        if event["type"] == "message_delta":  # a heartbeat
            assert event["delta"]["stop_reason"] is None
            continue
        if event["type"] == "content_block_start":
            assert open_block is None, "a block begins before the one before it has ended"
            assert event["index"] == len(made["content"])
            open_block, partial = dict(event["content_block"]), ""
            made["content"].append(open_block)
            continue
        assert open_block is not None, "Content block not found"
        assert event["index"] == len(made["content"]) - 1
        if event["type"] == "content_block_stop":
            if partial:
                open_block["input"] = json.loads(partial)
            open_block = None
            continue
        assert event["type"] == "content_block_delta"
        delta = dict(event["delta"])
        kind = delta.pop("type")
        if kind == "input_json_delta":
            partial += delta["partial_json"]
        else:
            [(key, text)] = delta.items()
            open_block[key] += text
    assert open_block is None
    made |= found[-2]["delta"]
    made["usage"] |= found[-2]["usage"]
    return made
