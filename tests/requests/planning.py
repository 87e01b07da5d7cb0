"""A long conversation, planned as the proxy would plan it: a token is a character, and no server is
needed."""

from __future__ import annotations

import json
from typing import Any

from proxy.dialects.chat import CHAT
from proxy.policy import Inject, Policy, Tools
from proxy.requests.cache import Counter, MessageCache
from proxy.requests.planned import Planned, plan
from tests import written

Json = dict[str, Any]

OFFLOAD = written.SMALL
POLICY = Policy(offload=OFFLOAD)
ALWAYS = Policy(offload=OFFLOAD, tools=Tools(inject=Inject.ALWAYS))

SYSTEM: Json = {"role": "system", "content": "be good"}
USER: Json = {"role": "user", "content": "rules"}
LAST: Json = {"role": "user", "content": "go on"}


class Counting:
    """A token for each character."""

    def count(self, text: str, model: str = "") -> int:
        return len(text)


def step(number: int, said: int, *results: int) -> list[Json]:
    """An assistant message of `said` characters and its tools' results."""
    ids = [f"call_{number}_{place}" for place in range(len(results))]
    calls = [
        {"id": one, "type": "function", "function": {"name": "look", "arguments": "{}"}}
        for one in ids
    ]
    more = {"tool_calls": calls} if calls else {}
    answers = [
        {"role": "tool", "tool_call_id": one, "content": f"{one} " * (size // 9)}
        for one, size in zip(ids, results, strict=True)
    ]
    return [{"role": "assistant", "content": f"s{number} " + "x" * said, **more}, *answers]


SHORT = [SYSTEM, USER]
MOVING = [SYSTEM, USER, *step(1, 10, 5000, 100), *step(2, 10, 4000), *step(3, 10), LAST]
"""Its results move, and there is nothing to summarise."""
CUT = [SYSTEM, USER, *step(1, 680), *step(4, 300), *step(2, 680, 200), *step(3, 100), LAST]
"""It has a summary boundary before message 6."""


async def planned(
    messages: list[Json],
    policy: Policy = POLICY,
    window: int | None = None,
    counter: Counter | None = None,
    **members: Any,
) -> tuple[Planned, MessageCache]:
    """The plan for a request of these messages, and the cache that read them."""
    reader = MessageCache(counter or Counting())
    body = json.dumps({"model": "m", "messages": messages, **members}).encode()
    made = await plan(CHAT, CHAT.parse(body), policy, window, reader)
    assert made is not None
    return made, reader
