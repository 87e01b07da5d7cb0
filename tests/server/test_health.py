"""`/health?deep=1` in front of a real Redis and upstream, each of which goes away and comes
back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from proxy.policy import Policy, Upstream
from proxy.server import process
from proxy.server.access import deep_health
from proxy.settings import Settings
from proxy.stores import open_store
from proxy.stores.guarded import Guarded
from proxy.threads import running
from proxy.upstream.client import UpstreamClient
from tests.clock import until
from tests.fake_upstream import StrictUpstream, whole
from tests.ports import free_port
from tests.serving import PLAIN, Proxy
from tests.stores.engines import redis_server
from tests.wire import Peer, upstream

FORWARDED = {"x-forwarded-for": "203.0.113.7"}


def deep(proxy: Proxy, **headers: str) -> tuple[int, Any]:
    reply = httpx.get(f"{proxy.root}/health?deep=1", headers=headers, verify=PLAIN)
    return reply.status_code, reply.json()


def test_deep_health_checks_store_and_breaker(
    up: StrictUpstream, serve: Callable[..., Proxy], tmp_path: Path
) -> None:
    up.respond(lambda _: whole({"object": "list", "data": []}))
    with redis_server(tmp_path) as redis:
        proxy = serve(
            {"default": {"upstream": {"base_url": up.url}}},
            store=f"redis://127.0.0.1:{redis.port}/0",
        )
        page = {
            "status": "healthy",
            "store": {"fault": None, "breaker": "closed"},
            "upstreams": {up.url: None},
        }
        assert deep(proxy) == (200, page)
        assert [
            (request.method, request.path, request.header("authorization"))
            for request in up.requests
        ] == [("GET", "/v1/models", None)]
        redis.stop()
        for _ in range(5):
            status, page = deep(proxy)
        assert (status, page["status"], page["store"]["breaker"]) == (503, "degraded", "open")
        assert page["store"]["fault"].startswith("Redis failed: ")
        assert proxy.metric("store_breakers", 'state="open"') == 1
        redis.start()
        assert deep(proxy)[1]["store"] == {"fault": None, "breaker": "closed"}


async def test_the_store_is_watched_without_any_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "STORE_SECONDS", 0.02)
    with redis_server(tmp_path) as redis:
        one = process.Process(Settings(store=f"redis://127.0.0.1:{redis.port}/0"))
        shown = partial(one.metrics._registry.get_sample_value, "offload_store_up")
        async with running(one._watch_store()):
            await until(lambda: shown() == 1)
            redis.stop()
            await until(lambda: shown() == 0)
            redis.start()
            await until(lambda: shown() == 1)
        await one._store.close()


def test_deep_health_is_refused_to_strangers(
    up: StrictUpstream, serve: Callable[..., Proxy]
) -> None:
    up.respond(lambda _: whole({}))
    proxy = serve({"default": {"upstream": {"base_url": up.url}}}, admin_token="secret")
    assert deep(proxy, **FORWARDED)[0] == 403
    for scheme in ("Bearer", "bearer", "BEARER"):
        assert deep(proxy, **FORWARDED, authorization=f"{scheme} secret")[0] == 200
    assert deep(proxy, **FORWARDED, authorization="Basic secret")[0] == 403
    assert not up.refusals
    for asked in ("", "?deep", "?deep=0", "?deep=false"):
        shallow = httpx.get(f"{proxy.root}/health{asked}", headers=FORWARDED, verify=PLAIN)
        assert shallow.json() == {"status": "healthy"}


async def test_every_upstream_is_asked_without_a_key_and_any_status_below_500_will_do(
    tmp_path: Path,
) -> None:
    """Those of rules, too."""

    async def answers(peer: Peer) -> None:
        asked = await peer.request()
        await peer.send(
            b"HTTP/1.1 %b No\r\nContent-Length: 0\r\n\r\n" % asked.target.split(b"/")[1]
        )

    port = free_port()
    store = Guarded(open_store(str(tmp_path)), warn=lambda kind, text: None)
    async with upstream(answers) as wire, UpstreamClient(Settings()) as client:
        urls = [
            *(f"{wire.url}/{status}/v1" for status in (401, 404, 503)),
            f"http://127.0.0.1:{port}/v1",
        ]
        policies = [Policy(upstream=Upstream(base_url=url, api_key="sk-secret")) for url in urls]
        healthy, page = await deep_health(
            store, client, [*policies[:2], replace(policies[2], rules=(policies[3],))]
        )
    assert not healthy and page["store"]["fault"] is None
    *answered, gone = (page["upstreams"][url] for url in urls)
    assert answered == [None, None, "answered 503"] and "connect" in gone
    assert len(wire.requests) == 3 and not any(
        "sk-secret" in str(asked.headers) for asked in wire.requests
    )
    await store.close()
