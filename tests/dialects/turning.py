"""Drives a turn of any dialect: what upstream says in each round, what the client gets, what is asked next."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from proxy import sse
from proxy.dialects.turn import Turn
from proxy.plan.turn import State


def receive(turn: Turn, raw: bytes, cuts: Iterable[int] = ()) -> bytes:
    """What the client gets of a reply, or of its beginning. A stream is cut at these offsets."""
    if raw.startswith(b"{"):
        return turn.receive_whole(raw)
    out, decoder, ends = b"", sse.EventDecoder(), sorted({*cuts, len(raw)})
    for start, end in zip([0, *ends], ends, strict=False):
        out += b"".join(map(turn.receive, decoder.feed(raw[start:end])))
    return out + b"".join(map(turn.receive, decoder.flush()))


def events(out: bytes) -> list[Any]:
    decoder = sse.EventDecoder()
    return [json.loads(event.data) for event in decoder.feed(out) + decoder.flush() if event.data]


def feed(turn: Turn, raw: bytes, cuts: Iterable[int] = ()) -> bytes:
    """What the client gets of one round's reply."""
    return receive(turn, raw, cuts) + turn.end()


def run(turn: Turn, *rounds: bytes, cuts: Sequence[int] = (), answer: str = "found") -> tuple[bytes, list[Any]]:
    """What the client gets, and what upstream was asked."""
    out, requests = b"", []
    for raw in rounds:
        requests.append(json.loads(turn.request()))
        out += feed(turn, raw, cuts)
        if turn.state is State.CALLING:
            turn.answer([answer] * len(turn.calls))
    seen = turn.visible  # which is stored before the reply ends
    out += turn.close()
    assert turn.visible == seen
    return out, requests
