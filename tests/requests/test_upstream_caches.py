"""What happens when upstream's cache has expired, and why it lacks what it could have had. No
server, no clock."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from proxy.dialects.chat import CHAT
from proxy.plan.prices import cache_lifetime
from proxy.policy import Mode, Policy, Upstream
from proxy.requests.handler import Chat
from proxy.requests.records import Records
from proxy.requests.upstream_caches import LastRequests
from proxy.telemetry.outcome import CacheMiss, Outcome
from tests import written
from tests.dialects.chat.turns import called, whole
from tests.requests.scripted import ScriptedReply
from tests.requests.test_handler import MemoryStore, World

Json = dict[str, Any]
MODEL = "claude-sonnet-5"
POLICY = Policy(
    tenant="acme",
    upstream=Upstream(base_url="http://gateway/v1"),
    offload=written.offload(
        mode=Mode.COMPACT, keep_views=1, max_total_tokens=10**6, cached_read=0.1, cache_write=1.25,
        max_tool_message_tokens=50, unseen_limit=10**6,
    ),
)  # fmt: skip
SAID = "it is not there. " * 600


class Time:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


class Replica(World):
    """One process of several that share a store and a clock."""

    def __init__(self, store: MemoryStore, clock: Time) -> None:
        super().__init__()
        self.policy, self.store = POLICY, store
        made = self._services(self.services.settings)
        self.services = replace(
            made, last_requests=LastRequests(clock), reader=self.services.reader
        )
        self.chat = Chat(self.services, CHAT)

    async def turn(
        self, messages: list[Json], cached: int | None = None, **members: Any
    ) -> Outcome:
        """Have a request answered of which upstream had so many tokens in its cache."""
        body = json.dumps(
            {"model": MODEL, "messages": messages, "tools": [called_tool()], **members}
        ).encode()
        usage: Json = {"prompt_tokens": size(messages), "completion_tokens": 9}
        if cached is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        _, outcome = await self.ask(body, ScriptedReply(whole({"content": "Yes."}, usage=usage)))
        return outcome

    @property
    def moved(self) -> bool:
        """Whether the newest request has a reference."""
        return b"stored in" in self.sent[-1]


def called_tool() -> Json:
    return {"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}


def size(messages: list[Json]) -> int:
    return sum(len(json.dumps(message)) for message in messages)


def asked(steps: int = 1, task: str = "Where is it?") -> list[Json]:
    """A history with one large result, behind which so much comes that moving it does not pay,
    after so many turns."""
    messages: list[Json] = [
        {"role": "user", "content": task},
        {"role": "assistant", "content": None, "tool_calls": [called("search", id="c")]},
        {"role": "tool", "tool_call_id": "c", "content": "a line that says nothing\n" * 40},
        {"role": "assistant", "content": SAID},
    ]
    for step in range(steps):
        messages += [
            {"role": "user", "content": f"And {step}?"},
            {"role": "assistant", "content": "Yes."},
        ]
    return messages[:-1]


@pytest.fixture
def clock() -> Time:
    return Time()


@pytest.fixture
async def replicas(clock: Time) -> AsyncIterator[list[Replica]]:
    store = MemoryStore()
    made = [Replica(store, clock) for _ in range(3)]
    yield made
    for one in made:
        await one.services.background.close(1)
        one.services.threads.close()


async def test_results_move_when_the_cache_has_expired_and_stay_moved_on_every_replica(
    replicas: list[Replica], clock: Time
) -> None:
    one, two, three = replicas
    await one.turn(asked(1))
    clock.now += 299
    assert not (await one.turn(asked(2))).new_event, "the cache is still warm"
    clock.now += 720
    outcome = await one.turn(asked(3))
    assert (outcome.cause, outcome.new_event, one.moved) == ("expired", True, True)
    assert outcome.words.endswith("because the cache at upstream had expired after 12 minutes.")
    again = await two.turn(asked(3))
    assert two.moved, "a replica that gets it again finds the record"
    assert again.words == outcome.words
    for replica in (two, three, one, three):
        later = await replica.turn(asked(4))
        assert replica.moved
        assert not later.new_event
    assert one.sent[-1] == two.sent[-1] == three.sent[-1]


@pytest.mark.parametrize(
    "change", ["another model", "another history", "another replica before", "no pause known"]
)
async def test_a_pause_that_is_not_certain_counts_for_none(
    replicas: list[Replica], clock: Time, change: str
) -> None:
    one, two, _ = replicas
    if change != "no pause known":
        await one.turn(asked(1), **({"model": "gpt-5.6"} if change == "another model" else {}))
    clock.now += 720
    if change == "another replica before":
        await two.turn(asked(2))
    history = asked(3 if change in ("another replica before", "another history") else 2)
    if change == "another history":
        history[-3]["content"] = "I changed my mind."
    assert not (await one.turn(history)).new_event
    assert not one.moved
    assert not one.store.records


async def test_without_a_store_nothing_changes(replicas: list[Replica], clock: Time) -> None:
    one = replicas[0]
    await one.turn(asked(1))
    clock.now += 720
    one.fail_store()
    assert not (await one.turn(asked(2))).new_event
    one.store._fault = None
    assert not (await one.turn(asked(3))).new_event, "it was sent without, and that stands"


async def test_replicas_that_get_the_same_request_agree_from_the_next_one_on(
    replicas: list[Replica], clock: Time
) -> None:
    """Only one of them knows of the pause, and its record comes when the other has sent the request
    without it."""
    one, two, three = replicas
    await one.turn(asked(1))
    clock.now += 720
    await two.turn(asked(2))
    assert not two.moved
    await one.turn(asked(2))
    assert one.moved
    for steps in (3, 4):
        for replica in replicas:
            await replica.turn(asked(steps))
            assert replica.moved
        assert one.sent[-1] == two.sent[-1] == three.sent[-1]


async def test_earlier_pauses_are_looked_up_once(
    replicas: list[Replica], clock: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, cold, _ = replicas
    looked_up = list[int]()
    pauses = Records.pauses

    async def counted(self: Records, points: list[bytes], model: str) -> dict[bytes, int]:
        looked_up.append(len(points))
        return await pauses(self, points, model)

    monkeypatch.setattr(Records, "pauses", counted)
    await one.turn(asked(1))
    clock.now += 720
    for steps in range(2, 12):
        await one.turn(asked(steps))
        assert one.moved
    assert looked_up[-3:] == [2, 2, 2], "the last request that is known, and this one"
    await cold.turn(asked(11))
    assert looked_up[-1] > 10
    assert cold.sent[-1] == one.sent[-1]
    rewritten = asked(11)
    rewritten[-3]["content"] = "I changed my mind."
    await one.turn(rewritten)
    await cold.turn(rewritten)
    assert cold.sent[-1] == one.sent[-1]


async def test_a_pause_counts_for_every_later_request_after_a_client_has_gone_back(
    replicas: list[Replica], clock: Time
) -> None:
    one, cold, _ = replicas
    for steps in (1, 2, 3, 4, 1):
        await one.turn(asked(steps))
    clock.now += 720
    await one.turn(asked(2))
    assert one.moved
    for steps in (4, 5):
        await one.turn(asked(steps))
        await cold.turn(asked(steps))
        assert cold.moved
        assert one.sent[-1] == cold.sent[-1]


@pytest.mark.parametrize("why", [{"mode": Mode.OBSERVE}, {"holdout": 1.0}], ids=str)
async def test_a_request_that_is_only_observed_leaves_no_record(
    replicas: list[Replica], clock: Time, why: dict[str, Any]
) -> None:
    one = replicas[0]
    await one.turn(asked(1))
    clock.now += 720
    one.policy = POLICY.__class__(
        tenant="acme", upstream=POLICY.upstream, offload=written.offload(**why)
    )
    await one.turn(asked(2))
    assert not one.store.records


# -- misses ----------------------------------------------------------------------------------------


async def misses(
    one: Replica, *requests: tuple[list[Json], int | None]
) -> list[tuple[CacheMiss, int]]:
    found = [await one.turn(messages, cached) for messages, cached in requests]
    return [(outcome.miss, outcome.missed_tokens) for outcome in found]


async def test_what_was_missing_in_the_cache_has_a_cause(
    replicas: list[Replica], clock: Time
) -> None:
    one = replicas[0]
    sizes = [size(asked(step)) for step in range(9)]
    assert await misses(one, (asked(1), 0)) == [(CacheMiss.FIRST, sizes[1])]
    assert await misses(one, (asked(2), sizes[1])) == [(CacheMiss.NONE, 0)]
    assert await misses(one, (asked(3), 0)) == [(CacheMiss.OTHER, sizes[2])]
    changed = [{**asked(4)[0], "content": "Where is it?"}, *asked(4)[1:]]
    changed[4] = {"role": "user", "content": "And nothing?"}
    assert (await misses(one, (changed, 0)))[0][0] is CacheMiss.CLIENT
    clock.now += 720
    [(cause, tokens)] = await misses(one, (changed + asked(5)[-2:], 0))
    assert (cause, tokens) == (CacheMiss.EXPIRED, size(changed))


async def test_what_we_moved_is_our_own_miss(replicas: list[Replica]) -> None:
    one = replicas[0]
    await one.turn(asked(1), 0)
    one.policy = Policy(
        tenant="acme",
        upstream=POLICY.upstream,
        offload=written.offload(
            mode=Mode.COMPACT, max_total_tokens=2_000, max_tool_message_tokens=50
        ),
    )
    assert (await one.turn(asked(2), 0)).miss is CacheMiss.EVENT
    assert one.moved


@pytest.mark.parametrize("cached", [None, 10**6])
async def test_an_upstream_that_does_not_say_or_has_all_has_no_misses(
    replicas: list[Replica], cached: int | None
) -> None:
    assert {*await misses(replicas[0], (asked(1), cached), (asked(2), cached))} == {
        (CacheMiss.NONE, 0)
    }


LIFETIMES = [
    ("https://api.anthropic.com", "claude-sonnet-5", b"{}", 300),
    (
        "https://api.anthropic.com",
        "claude-opus-5.5",
        b'{"cache_control":{"type":"ephemeral","ttl": "1h"}}',
        3600,
    ),
    ("https://api.anthropic.com", "claude-opus-5.5", rb'{"text":"\"ttl\":\"1h\""}', 300),
    ("http://127.0.0.1:4000/v1", "anthropic/claude-sonnet-5", b"{}", 300),
    ("https://api.openai.com/v1", "gpt-5.6", b'{"ttl":"1h"}', None),
    ("http://127.0.0.1:8080/v1", "qwen", b"{}", None),
]


@pytest.mark.parametrize(("url", "model", "body", "seconds"), LIFETIMES)
def test_the_lifetime_of_a_cache(url: str, model: str, body: bytes, seconds: int | None) -> None:
    assert cache_lifetime(url, model, body) == seconds
