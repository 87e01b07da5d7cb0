"""What the caches count for an entry is about what it takes."""

from __future__ import annotations

import gc
import json
import sys
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import msgspec
import pytest

from bench.bodies import Talk
from bench.memory import ANTHROPIC, CHAT, RESPONSES, conversation, request
from proxy.dialects import DIALECTS, Dialect
from proxy.plan.history import History, Terms
from proxy.plan.plan import Reading, Room
from proxy.policy import Offload
from proxy.requests.cache import MessageCache
from proxy.tokens import Tokens

SHARED = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, Enum, bool, type(None))
NAMED = {dialect.name: dialect for dialect in DIALECTS}
HISTORIES = {
    "chat": (NAMED["chat"], request(CHAT, conversation(7))["messages"]),
    "responses": (NAMED["responses"], request(RESPONSES, conversation(7))["input"]),
    "messages": (NAMED["messages"], request(ANTHROPIC, conversation(7))["messages"]),
    "long": (NAMED["chat"], json.loads(Talk(7, result=8_000).body(50))["messages"]),
}


def taken(root: Any, seen: dict[int, Any]) -> int:
    """The bytes of all objects that are reachable from `root` and not `seen`, as the allocator
    rounds them.

    `seen` holds the objects by their ids, as the id of one that is gone is soon that of another.
    """
    found, left = 0, [root]
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(one, SHARED) or (isinstance(one, int) and -6 < one < 257):
            continue
        seen[id(one)] = one
        found += (sys.getsizeof(one) + 15) // 16 * 16
        if isinstance(one, msgspec.Struct):  # some do not tell the collector what they refer to
            left += [getattr(one, name) for name in one.__struct_fields__]
            left += [getattr(one, "__dict__", {})]
        elif not isinstance(one, (str, bytes, int, float)):
            left += gc.get_referents(one)
    return found


async def read(dialect: Dialect, messages: list[Any]) -> tuple[History, dict[int, Any]]:
    """A history as it is kept, and the objects that it shares with others."""
    terms, shared = Terms("gpt-4.1", Offload(), Room(), 100), dict[int, Any]()
    for known in (
        terms,
        await history_of(dialect, [], terms),
    ):
        taken(known, shared)
    history = await history_of(dialect, messages, terms)
    return history.stem or history, shared


async def history_of(dialect: Dialect, messages: list[Any], terms: Terms) -> History:
    """The history of a request, with the replacement of each message that becomes smaller."""
    request = dialect.parse(json.dumps({"model": "m", dialect.listing: messages}).encode())
    reader = MessageCache(Tokens())
    history, _ = await reader.history(dialect, request, terms, then=lambda history: history)
    shape = Reading.of(terms.offload).shape
    made = reader.previews(dialect, history.transcript(request.entries), shape)
    for index, message in enumerate(history.messages):
        if message.preview < message.tokens:
            made(index, False)
    return history


@pytest.mark.parametrize("name", HISTORIES)
async def test_the_sizes_of_messages_and_histories_are_about_right(name: str) -> None:
    """A cache must not take more than it counts. Some releases of Python need less for an object
    than others."""
    history, shared = await read(*HISTORIES[name])
    messages = taken(list(history.messages), shared)
    assert sum(message.size() for message in history.messages) == pytest.approx(messages, rel=0.15)
    whole = messages + taken(history, shared)
    assert whole / 1.15 < history.size() < whole * 1.3


async def test_a_history_without_a_plan_takes_no_more_than_is_counted() -> None:
    history, shared = await read(
        NAMED["chat"], [{"role": "user", "content": f"hello {i}"} for i in range(4)]
    )
    assert taken(history, shared) < history.size() < 12_000
