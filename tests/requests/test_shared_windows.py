"""Several workers serve one conversation whose window only refusals show: they plan it as one worker does."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from typing import Any

from proxy.dialects.chat import CHAT
from proxy.errors import StoreFault
from proxy.policies.tenants import Tenant
from proxy.requests.handler import Chat
from proxy.requests.learning import Learning
from proxy.stores.guarded import Guarded
from tests.asgi import ScriptedClient
from tests.dialects.chat.turns import called
from tests.requests.scripted import JSON, ScriptedReply
from tests.requests.test_handler import POLICY, MemoryStore, World

ME = "acme-1"
WINDOW = 16_000
"""Tokens of upstream's window, which are characters here. Its refusals do not name it, so that each worker guesses."""
TURNS = 24


class Worker(World):
    """One process. `sent` is shared by all: the messages of each request that upstream took."""

    def __init__(self, store: MemoryStore, sent: list[list[Any]]) -> None:
        super().__init__()
        self.taken = sent
        upstream: Any = self.upstream
        upstream.send = self.answer
        guarded = Guarded(store, warn=lambda kind, text: None)
        self.learning = Learning(guarded, upstream, self.services.background, self.services.threads.reading)
        services = dataclasses.replace(self.services, limits=self.learning.limits, seen=self.seen)
        self.chat = Chat(services, CHAT)

    def seen(self, tenant: Tenant, headers: Any) -> None:
        self.learning.shared.touch(tenant.namespace)

    async def answer(self, request: Any) -> ScriptedReply:
        messages = json.loads(request.content)["messages"]
        size = sum(len(json.dumps(message)) for message in messages)
        if size > WINDOW:
            said = {"error": {"message": "Your input exceeds the context window of this model."}}
            return ScriptedReply(json.dumps(said).encode(), status=400, headers=[JSON])
        self.taken.append(messages)
        whole = {"choices": [{"message": {"role": "assistant", "content": "42"}, "finish_reason": "stop"}]}
        return ScriptedReply(json.dumps(whole | {"usage": {"prompt_tokens": size}}).encode())

    async def send(self, messages: Sequence[Any]) -> int:
        body = json.dumps({"model": "m", "messages": messages}).encode()
        client = ScriptedClient(body, b"", path="/v1/chat/completions")
        client.scope["raw_path"] = b"/v1/chat/completions"
        await self.chat(client.client(), Tenant(POLICY, ME))
        return client.status


def turn(number: int) -> list[Any]:
    result = f"{number} " + "word " * 220
    return [
        {"role": "assistant", "content": None, "tool_calls": [called("search", id=f"c{number}")]},
        {"role": "tool", "tool_call_id": f"c{number}", "content": result},
    ]


async def broken_prefixes(count: int, store: MemoryStore | None = None) -> int:
    """Run the conversation over so many workers in turn. Returns how many requests changed what had been sent."""
    sent: list[list[Any]] = []
    store = store or MemoryStore()
    workers = [Worker(store, sent) for _ in range(count)]
    messages: list[Any] = [{"role": "user", "content": "Search everything."}]
    for number, worker in zip(range(TURNS), itertools.cycle(workers), strict=False):
        assert await worker.send(messages) == 200
        messages += turn(number)
        for each in [*workers, *workers]:  # the first must hear what the last has learned
            each.learning.shared.touch(ME)
            await each.learning.shared.tick()
    for worker in workers:
        await worker.services.background.close(1)
        worker.services.threads.close()
    return sum(after[: len(before)] != before for before, after in itertools.pairwise(sent))


async def test_workers_that_share_break_no_more_prefixes_than_one() -> None:
    alone = await broken_prefixes(1)
    assert 0 < alone < TURNS
    assert await broken_prefixes(2) <= alone
    assert await broken_prefixes(3) <= alone
    dead = MemoryStore(StoreFault("no disk"))
    assert await broken_prefixes(2, dead) > alone, "without the store, each learns by itself"
