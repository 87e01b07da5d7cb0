"""What the scripted APIs have in common: a script of replies, which are sent whole or streamed as
the request asks."""

from __future__ import annotations

import itertools
import json
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tests.fake_upstream import Pieces, whole

Json = dict[str, Any]
Reply = Sequence[Json]

OURS = [
    json.dumps({"name": name, "description": "", "parameters": {}}).encode()
    for name in ("grep", "read_file")
]


class ScriptedApi(ABC):
    """Checks each request, and replies with the next part of the script."""

    def __init__(self, *, split: int = 8, made: Callable[[int], str] = str) -> None:
        self.asked: list[Json] = []
        """The requests that were accepted."""
        self.refused: list[str] = []
        self._script: deque[Reply] = deque()
        self._responder: Callable[[Json], Reply] | None = None
        self._split = split
        self._made = made
        self._numbers = itertools.count(1)

    def script(self, *replies: Reply) -> None:
        """Answer the next requests with these, in order."""
        self._script.extend(replies)

    def respond(self, responder: Callable[[Json], Reply]) -> None:
        """Call `responder` when the script is used up."""
        self._responder = responder

    @staticmethod
    @abstractmethod
    def events_of(reply: Json, split: int, /) -> Iterator[Json]:
        """The events of a streamed reply."""

    def _next(self, body: Json) -> Reply:
        """What the model says to a request that was accepted."""
        self.asked.append(body)
        if self._script:
            return self._script.popleft()
        assert self._responder is not None, f"the script is used up at request {len(self.asked)}"
        return self._responder(body)

    def _sent(self, body: Json, reply: Json) -> Pieces:
        if not body.get("stream"):
            return whole(reply)
        events = b"".join(map(encoded, self.events_of(reply, self._split)))
        return Pieces([events], headers=(("content-type", "text/event-stream; charset=utf-8"),))


def encoded(event: Json) -> bytes:
    return f"event: {event['type']}\ndata: {json.dumps(event, separators=(',', ':'))}\n\n".encode()


def pieces(text: str, size: int) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]
