"""Upstream's list of models is asked for in the background, once for each credential."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from proxy.errors import UpstreamUnreachable
from proxy.policies.tenants import Tenant
from proxy.policy import Policy, Upstream
from proxy.requests import listed_windows
from proxy.requests.background import Background
from proxy.requests.listed_windows import AGAIN, ListedWindows
from proxy.threads import Threads
from proxy.upstream import models
from proxy.upstream.headers import Headers
from tests.requests.scripted import JSON, ScriptedReply, ScriptedUpstream

KEY = Headers([(b"Authorization", b"Bearer mine"), (b"Cookie", b"a=1"), (b"X-Offload", b"on")])
LIST = json.dumps({"data": [{"id": "m", "max_model_len": 32_768}, {"id": "unknown"}]}).encode()


def tenant(namespace: str = "acme-1", **upstream: Any) -> Tenant:
    return Tenant(Policy(tenant="acme", upstream=Upstream(base_url="http://up/v1/", **upstream)), namespace)


class World:
    def __init__(self) -> None:
        self.upstream = ScriptedUpstream()
        self.background = Background(10)
        self.threads = Threads()
        self.now = 0.0
        self.lists = 0
        upstream: Any = self.upstream
        self.listed = ListedWindows(upstream, self.background, self.threads.reading, self.learned, lambda: self.now)

    def learned(self) -> None:
        self.lists += 1

    async def ask(self, tenant: Tenant, *replies: ScriptedReply | Exception, headers: Headers = KEY) -> int | None:
        """Ask, wait for the answer, and return the window of `m`."""
        self.upstream.replies += replies
        self.listed.ask(tenant, headers)
        await asyncio.gather(*self.background._tasks.values())
        return self.listed.window(tenant.namespace, tenant.policy, "m")


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    yield world
    assert all(reply.closed for reply in world.upstream.read)
    world.threads.close()


def reply(body: bytes = LIST, status: int = 200, *headers: tuple[bytes, bytes]) -> ScriptedReply:
    return ScriptedReply(body, status=status, headers=[JSON, *headers])


async def test_a_callers_own_key_asks_for_that_caller(world: World) -> None:
    assert await world.ask(tenant(), reply()) == 32_768
    [asked] = world.upstream.requests
    assert (asked.method, asked.url, asked.content) == ("GET", "http://up/v1/models", b"")
    assert asked.headers == [(b"Authorization", b"Bearer mine"), (b"accept", b"application/json")]
    assert world.listed.window("acme-2", tenant().policy, "m") is None
    assert world.listed.window("acme-1", tenant().policy, "unknown") is None
    assert world.lists == 1


async def test_a_tenants_key_asks_for_all_its_callers(world: World) -> None:
    keyed = tenant(api_key="sk-acme")
    assert await world.ask(keyed, reply()) == 32_768
    assert world.upstream.requests[0].headers[0] == (b"authorization", b"Bearer sk-acme")
    assert world.listed.window("acme-2", keyed.policy, "m") == 32_768
    assert world.listed.window("acme-1", tenant(api_key="sk-other").policy, "m") is None
    assert world.listed.window("acme-1", tenant().policy, "m") is None


async def test_anthropic_is_asked_as_it_expects(world: World) -> None:
    claude = msgspec.structs.replace(tenant(api_key="sk-acme"), key_header=b"authorization")
    body = json.dumps({"data": [{"id": "m", "max_input_tokens": 200_000, "max_tokens": 64_000}]}).encode()
    headers = Headers([*KEY, (b"anthropic-version", b"2023-06-01")])
    assert await world.ask(claude, reply(body), headers=headers) == 200_000
    [asked] = world.upstream.requests
    assert asked.url == "http://up/v1/models?limit=1000"
    assert asked.headers[:2] == [(b"x-api-key", b"sk-acme"), (b"anthropic-version", b"2023-06-01")]


async def test_it_is_asked_once_for_each_credential_and_never_waited_for(world: World) -> None:
    late = asyncio.Event()
    world.upstream.replies = [ScriptedReply(LIST, late, headers=[JSON])]
    for _ in range(3):
        world.listed.ask(tenant(), KEY)
    assert world.listed.window("acme-1", tenant().policy, "m") is None
    late.set()
    assert await world.ask(tenant()) == 32_768
    world.now += 1e9
    assert await world.ask(tenant()) == 32_768
    assert len(world.upstream.requests) == 1
    await world.ask(tenant("acme-2"), reply())
    assert len(world.upstream.requests) == 2


@pytest.mark.parametrize(
    "upstream", [{"ask_models": False}, {"context_window": 8_192}], ids=["by the policy", "without need"]
)
async def test_it_is_not_asked(world: World, upstream: dict[str, Any]) -> None:
    assert await world.ask(tenant(**upstream)) is None
    assert not world.upstream.requests
    await world.ask(tenant(), reply())
    assert world.listed.window("acme-1", tenant(ask_models=False).policy, "m") is None


@pytest.mark.parametrize(
    "fault",
    [UpstreamUnreachable("gone"), reply(b"", 503), reply(b"", 429)],
    ids=["no connection", "a server's fault", "too many requests"],
)
async def test_an_upstream_that_fails_is_asked_again_later(world: World, fault: Any) -> None:
    assert await world.ask(tenant(), fault) is None
    assert await world.ask(tenant()) is None and len(world.upstream.requests) == 1
    world.now += AGAIN
    assert await world.ask(tenant(), reply()) == 32_768


@pytest.mark.parametrize("answer", [reply(b"{}", 401), reply(b"{}", 404), reply(b"<html>"), reply(b"[" * 9_999)])
async def test_an_answer_without_a_list_is_final(world: World, answer: ScriptedReply) -> None:
    assert await world.ask(tenant(), answer) is None
    world.now += 2 * AGAIN
    assert await world.ask(tenant()) is None
    assert len(world.upstream.requests) == 1 and world.lists == 0


async def test_a_list_without_end_is_not_read(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "LARGEST", 10)
    assert await world.ask(tenant(), reply()) is None


async def test_an_upstream_that_is_silent_is_left(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listed_windows, "SECONDS", 0.01)
    assert await world.ask(tenant(), ScriptedReply(asyncio.Event(), headers=[JSON])) is None


async def test_compressed_and_large_lists(world: World) -> None:
    many = [{"id": f"model-{number}", "context_length": 1_000 + number} for number in range(1_000)]
    body = json.dumps({"data": [*many, {"id": "m", "context_window": 9_000}]}).encode()
    assert len(body) > listed_windows.LARGE
    coded = reply(gzip.compress(body), 200, (b"Content-Encoding", b"gzip"))
    assert await world.ask(tenant(), coded) == 9_000
    assert world.listed.window("acme-1", tenant().policy, "model-7") == 1_007


async def test_a_busy_process_asks_later(world: World) -> None:
    world.background = Background(0)
    world.listed._background = world.background
    assert await world.ask(tenant()) is None
    world.listed._background = world.background = Background(1)
    assert await world.ask(tenant(), reply()) == 32_768
