"""Counts that are true: what the headers say of recorded requests is what tiktoken counts in the
body that is sent."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from proxy.dialects.chat import CHAT
from proxy.policy import Policy
from proxy.requests.cache import MessageCache
from proxy.requests.planned import Rendered, plan
from proxy.tokens import Tokens
from tests import written
from tests.sampling import sample
from tests.transcripts import names, needed, one, requests_of

Json = dict[str, Any]

TOKENS = Tokens()
MODEL = "gpt-4o"
WITHIN = 0.03
"""The share by which a count may differ."""
MESSAGE = 4
"""Tokens of a message's frame."""
SAMPLE = 2
"""Runs beside the sweep, which takes every other one."""
LONG = 30_000


@cache
def count(text: str) -> int:
    return TOKENS.count(text, MODEL)


def counted(messages: list[Json]) -> int:
    """The tokens of contents, names and arguments, and of each message's frame."""
    return sum(MESSAGE + sum(map(count, texts(message))) for message in messages)


def texts(message: Json) -> list[str]:
    content = message.get("content") or ""
    parts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
    for call in message.get("tool_calls") or ():
        parts += [call["function"]["name"], call["function"]["arguments"]]
    return parts


@needed
@pytest.mark.parametrize("name", sample(names(LONG)[::2], SAMPLE))
async def test_tokens_before_and_after_are_those_of_the_bodies(name: str) -> None:
    policy = Policy(offload=written.offload())
    reader = MessageCache(TOKENS)
    run, checked = one(name), 0
    for messages, _ in requests_of(run):
        request = CHAT.parse(
            json.dumps({"model": MODEL, "messages": messages, "tools": run.tools}).encode()
        )
        made = await plan(CHAT, request, policy, None, reader)
        assert made is not None
        assert made.history.tokens == pytest.approx(counted(messages), rel=WITHIN)
        if made.plan.empty:
            continue
        ready = Rendered.of(made, None, {}, reader)
        sent = json.loads(ready.turn().request())["messages"]
        assert ready.tokens == pytest.approx(counted(sent), rel=WITHIN)
        checked += 1
    if not checked:
        pytest.skip("nothing was moved, so only the counts before were compared")
