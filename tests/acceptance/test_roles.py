"""What clients put into roles and limits, through a running proxy: which prefix breaks."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import httpx
import pytest

from tests.acceptance.test_compress import (
    RULE,
    SYSTEM,
    TOOL,
    WORDS,
    Model,
    Talk,
    policy,
    summaries,
    turns,
)
from tests.fake_upstream import StrictUpstream

Json = dict[str, Any]


@pytest.fixture
def up(up: StrictUpstream) -> StrictUpstream:
    up.respond(Model())
    return up


def prefixes(up: StrictUpstream) -> int:
    """How many requests do not continue the messages of the one before, apart from the system
    message."""
    sent = [request.raw_messages[1:] for request in turns(up)]
    return sum(later[: len(earlier)] != earlier for earlier, later in pairwise(sent))


def run(proxy: Any, up: StrictUpstream, systems: list[str], limits: list[int]) -> tuple[int, int]:
    """Return the summaries and the changed prefixes of a run with such system prompts and limits in
    turn."""
    key = f"key {len(systems)} {limits[-1]}"
    history: list[Json] = [{"role": "user", "content": RULE}]
    for number in range(24):
        system = {"role": "system", "content": systems[number % len(systems)]}
        limit = limits[number % len(limits)]
        body = [system, *history]
        assert Talk(proxy, body, tools=[TOOL], max_tokens=limit).post(key=key).status_code == 200
        history = [
            *history,
            {"role": "assistant", "content": f"{number} {WORDS}"},
            {"role": "user", "content": "Go on."},
        ]
    found = (len(summaries(up)), prefixes(up))
    up.requests.clear()
    return found


def test_neither_limits_nor_system_prompts_cost_summaries_or_prefixes(
    up: StrictUpstream, serve: Any
) -> None:
    patient = policy(up, max_total_tokens=1_000, cached_read=0.1, cache_write=1.25)
    patient["upstream"]["context_window"] = 12_000
    proxy = serve({"default": patient})
    steady = run(proxy, up, ["Be brief."], [500])
    assert steady[0] == steady[1] and 1 <= steady[0] <= 5
    assert run(proxy, up, ["Be brief."], [500, 6_000]) == steady
    assert run(proxy, up, ["Be brief."], [11_000 - 200 * number for number in range(24)]) == steady
    assert (
        run(
            proxy,
            up,
            [f"Be brief. {'word ' * (137 * number % 900)}" for number in range(24)],
            [500],
        )
        == steady
    )


def test_a_limit_that_does_not_fit_is_lowered_and_the_reply_says_so(
    up: StrictUpstream, serve: Any
) -> None:
    small = policy(up)
    small["upstream"]["context_window"] = 4_000
    proxy = serve({"default": small})

    def post(messages: list[Json], limit: int) -> tuple[httpx.Response, Json]:
        body = {"model": "m", "messages": messages, "max_tokens": limit}
        reply = proxy.post("/v1/chat/completions", body)
        sent: Json = json.loads(turns(up)[-1].body)
        return reply, sent

    short: list[Json] = [SYSTEM, {"role": "user", "content": RULE}]
    reply, sent = post(short, 3_900)
    assert "x-offload-max-tokens" not in reply.headers and sent["max_tokens"] == 3_900
    reply, sent = post(short, 5_000)
    assert reply.status_code == 200
    assert (
        reply.headers["x-offload-max-tokens"] == str(sent["max_tokens"])
        and 3_000 < sent["max_tokens"] < 3_800
    )
    assert sent["messages"] == short and "tools" not in sent
    long = [*short]
    for number in range(8):
        long += [
            {"role": "assistant", "content": f"{number} {WORDS}"},
            {"role": "user", "content": "Go on."},
        ]
    reply, sent = post(long, 3_900)
    assert (
        reply.headers["x-offload-max-tokens"] == str(sent["max_tokens"])
        and 1_000 <= sent["max_tokens"] < 3_300
    )
    assert "tools" in sent
