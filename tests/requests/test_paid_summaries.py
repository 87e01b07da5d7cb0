"""How many summaries conversations pay for over many turns, with every kind of store, and all in this process."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from proxy.errors import StoreFault
from proxy.plan.summary import SummaryAnswer
from proxy.policies.tenants import Tenant
from proxy.policy import Policy, Wait
from proxy.requests.cache import MessageCache
from proxy.requests.records import Records
from proxy.requests.rendered import Rendered
from proxy.requests.summaries import Summaries
from proxy.stores import Store, open_store
from proxy.stores.guarded import Guarded
from proxy.threads import WorkPool
from tests.clock import turns
from tests.requests.planning import OFFLOAD, SYSTEM, Counting, Json, planned
from tests.requests.test_handler import MemoryStore

TURNS = 100
TENANT = Tenant(Policy(tenant="acme"), "ns")


def policy(wait: Wait = Wait.NEVER) -> Policy:
    offload = replace(OFFLOAD, max_total_tokens=3_000, compress=replace(OFFLOAD.compress, wait=wait))
    return Policy(offload=offload)


class Process:
    """The part of a proxy's process that makes snapshots, with a model that answers at once."""

    def __init__(self, store: Store) -> None:
        self.guarded = Guarded(store, warn=lambda kind, text: None)
        self.paid = 0
        self.most = 0
        self._asking = 0
        self._pool = WorkPool("reading", 2)
        self.summaries = Summaries(self.guarded, MessageCache(Counting(), self._pool), self._pool, lambda outcome: None)

    def records(self, namespace: str = "") -> Records:
        return Records(self.guarded.visit(), namespace)

    async def ask(self, body: bytes) -> SummaryAnswer:
        self.paid += 1
        self._asking += 1
        self.most = max(self.most, self._asking)
        await turns(3)
        self._asking -= 1
        return SummaryAnswer(200, "<state_snapshot>" + f"record {self.paid} " * 5 + "</state_snapshot>")

    async def turn(self, messages: list[Json], wait: Wait = Wait.NEVER) -> bool:
        """Make one request of a conversation. Returns whether it shows a snapshot."""
        history, reader = await planned(messages, policy(wait))
        records = self.records("ns")
        ready = Rendered.of(history, await self.summaries.existing(history, records), {}, reader)
        ready = await self.summaries.complete(ready, records, TENANT, self.ask)
        return ready.shown is not None


def beginning(said: str = "") -> list[Json]:
    first: list[Json] = [SYSTEM, {"role": "user", "content": "continue"}]
    return [*first, {"role": "assistant", "content": said}, {"role": "user", "content": "go on"}] if said else first


def grown(messages: list[Json], turn: int) -> None:
    messages.append({"role": "assistant", "content": f"answer {turn} " * 40})
    messages.append({"role": "user", "content": f"and {turn}?"})


async def talked(process: Process, between: Callable[[int], None] = lambda turn: None) -> int:
    """Return the summaries that a conversation of many turns pays for."""
    messages = beginning()
    for turn in range(TURNS):
        await process.turn(messages)
        if flights := list(process.summaries._flights.values()):
            await asyncio.wait(flights)
        between(turn)
        grown(messages, turn)
    return process.paid


@pytest.mark.sweep
async def test_a_dead_store_costs_at_most_one_more_summary() -> None:
    living = await talked(Process(MemoryStore()))
    assert 4 < living < 20
    for dies in (0, 30, 55):
        store = MemoryStore()

        def die(turn: int, store: Any = store, dies: int = dies) -> None:
            if turn == dies:
                store._fault = StoreFault("dead")

        assert await talked(Process(store), die) <= living + 1


async def test_a_removed_directory_is_made_again(tmp_path: Path) -> None:
    root = tmp_path / "store"
    living = await talked(Process(MemoryStore()))
    process = Process(open_store(str(root)))

    def remove(turn: int) -> None:
        if turn == 40:
            shutil.rmtree(root)

    assert await talked(process, remove) <= living + 1
    again = Process(open_store(str(root)))
    messages = beginning()
    for turn in range(TURNS - 1):
        grown(messages, turn)
    assert await again.turn(messages), "what was made later is stored"
    assert again.paid == 0


async def test_conversations_with_the_same_first_message_do_not_hold_each_other_up() -> None:
    """Twelve rollouts of one prompt, one turn of each after the other, and all at once."""
    for at_once in (False, True):
        process = Process(MemoryStore())
        rollouts = [beginning(f"I am number {number}") for number in range(12)]
        shown = [0] * len(rollouts)
        for turn in range(20):
            requests = [process.turn(messages, Wait.ALWAYS) for messages in rollouts]
            got = await asyncio.gather(*requests) if at_once else [await request for request in requests]
            shown = [count + one for count, one in zip(shown, got, strict=True)]
            for messages in rollouts:
                grown(messages, turn)
        assert len(set(shown)) == 1 and shown[0] > 5
        assert process.paid % len(rollouts) == 0
        assert process.most > 1 or not at_once
