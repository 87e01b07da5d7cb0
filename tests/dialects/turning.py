"""Drives a turn of any dialect: what upstream says in each round, what the client gets, what is
asked next."""

from __future__ import annotations

import json
from typing import Any

from proxy import sse
from proxy.dialects.turn import Turn
from proxy.plan.turn import State


def receive(turn: Turn, raw: bytes) -> bytes:
    """What the client gets of a reply, or of its beginning."""
    if raw.startswith(b"{"):
        return turn.receive_whole(raw)
    decoder = sse.EventDecoder()
    return b"".join(map(turn.receive, decoder.feed(raw) + decoder.flush()))


def events(out: bytes) -> list[Any]:
    decoder = sse.EventDecoder()
    return [json.loads(event.data) for event in decoder.feed(out) + decoder.flush() if event.data]


def feed(turn: Turn, raw: bytes) -> bytes:
    """What the client gets of one round's reply."""
    return receive(turn, raw) + turn.end()


def run(turn: Turn, *rounds: bytes, answer: str = "found") -> tuple[bytes, list[Any]]:
    """What the client gets, and what upstream was asked."""
    out, requests = b"", []
    for raw in rounds:
        requests.append(json.loads(turn.request()))
        out += feed(turn, raw)
        if turn.state is State.CALLING:
            turn.answer([answer] * len(turn.calls))
    seen = turn.visible  # which is stored before the reply ends
    out += turn.close()
    assert turn.visible == seen
    return out, requests
