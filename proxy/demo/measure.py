"""Figures about the requests that reached the upstream; pure functions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import msgspec
from msgspec import Raw

from proxy.demo.model import text_of

Json = dict[str, Any]
Count = Callable[[str], int]

FRAME = 4
"""Tokens of a message besides its text."""

_reference = re.compile(r"detailed result is stored in [^\s;)]*/(?P<name>[^\s;)/]+)")


class SentRequest(msgspec.Struct, frozen=True):
    """A request as it reached the upstream. `segments`: the pieces of the prompt, tools first, with their tokens."""

    messages: list[Json]
    segments: list[tuple[bytes, int]]
    summary: bool
    """Whether it asks for a record of the conversation and is not a turn of the agent."""

    @property
    def tokens(self) -> int:
        return sum(tokens for _, tokens in self.segments)


def sent(body: bytes, count: Count, *, summary: bool = False) -> SentRequest:
    """A request's body, measured."""
    raw = msgspec.json.decode(body, type=dict[str, Raw])
    raws = msgspec.json.decode(raw["messages"], type=list[Raw])
    messages = [msgspec.json.decode(message) for message in raws]
    segments = [(bytes(one), message_tokens(message, count)) for one, message in zip(raws, messages, strict=True)]
    if "tools" in raw:
        segments.insert(0, (bytes(raw["tools"]), count(bytes(raw["tools"]).decode())))
    return SentRequest(messages, segments, summary)


def message_tokens(message: Json, count: Count) -> int:
    """Text, reasoning, each call's name and arguments, and the frame."""
    calls = [part for call in message.get("tool_calls") or () for part in call["function"].values()]
    return FRAME + sum(map(count, [text_of(message), message.get("reasoning_content") or "", *calls]))


def shared_tokens(one: SentRequest, two: SentRequest) -> int:
    """Tokens of the pieces with which both requests begin."""
    shared = 0
    for (left, tokens), (right, _) in zip(one.segments, two.segments, strict=False):
        if left != right:
            break
        shared += tokens
    return shared


def prefix_kept(requests: Sequence[SentRequest]) -> float:
    """The share of all tokens that repeat the beginning of the request before, as a provider's prompt cache needs."""
    turns = [request for request in requests if not request.summary]
    kept = sum(shared_tokens(one, two) for one, two in pairwise(turns))
    return kept / max(sum(request.tokens for request in turns), 1)


def moved(messages: Iterable[Json]) -> dict[str, str]:
    """Files to which moved tool results refer: file name → id of the call."""
    results = [message for message in messages if message["role"] == "tool"]
    return {
        found["name"]: result["tool_call_id"] for result in results for found in _reference.finditer(text_of(result))
    }


def read_back(request: SentRequest, ours: Iterable[str], count: Count) -> int:
    """Tokens of the results since the last user message that answer no tool of the agent (`ours`)."""
    messages, names = request.messages, set(ours)
    turn = messages[max(index for index, message in enumerate(messages) if message["role"] == "user") :]
    calls = [call for message in turn for call in message.get("tool_calls") or ()]
    hidden = {call["id"] for call in calls if call["function"]["name"] not in names}
    results = (message for message in turn if message["role"] == "tool" and message["tool_call_id"] in hidden)
    return sum(count(text_of(result)) for result in results)
