"""The client for lists of models, against httpx's own transport interface."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import httpx
import pytest
import respx

from proxy.errors import UpstreamBroken, UpstreamFault, UpstreamSilent, UpstreamUnreachable, UserMistake
from proxy.upstream import models
from proxy.upstream.models import ModelList, ModelsClient

BASE = "http://upstream.test/v1"


async def asked(reply: Any, *headers: tuple[bytes, bytes]) -> ModelList:
    with respx.mock:
        respx.get(f"{BASE}/models").mock(**reply)
        return await ModelsClient({}).models(f"{BASE}/", headers, 5)


def answered(status: int = 200, **content: Any) -> dict[str, Any]:
    return {"return_value": httpx.Response(status, **content)}


@pytest.mark.parametrize(
    ("model", "window"),
    [
        ({"max_model_len": 32768}, 32768),
        ({"context_length": 200000}, 200000),
        ({"context_window": 131072}, 131072),
        ({"meta": {"n_ctx_train": 131072}}, 131072),
        ({"meta": {"n_ctx_train": 131072, "n_ctx": 8192}}, 8192),
        ({"max_model_len": None, "context_length": 1}, 1),
        ({"max_model_len": "32768"}, None),
        ({"max_model_len": True}, None),
        ({"max_model_len": 0}, None),
        ({"meta": [1]}, None),
        ({}, None),
    ],
)
async def test_context_windows(model: dict[str, Any], window: int | None) -> None:
    found = await asked(answered(json={"object": "list", "data": [{"id": "m"} | model]}))
    assert found == ModelList(200, {"m": window})


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b"{}", b'{"data":{}}', b'{"data":[1,{"id":2}]}', b"[" * 9999])
async def test_what_is_no_list_of_models_has_none(body: bytes) -> None:
    assert await asked(answered(404, content=body)) == ModelList(404, {})


async def test_only_the_given_credential_is_sent() -> None:
    environment = {"OPENAI_API_KEY": "secret"}
    with respx.mock:
        route = respx.get(f"{BASE}/models").respond(401, headers={"set-cookie": "a=1"})
        client = ModelsClient(environment)
        assert await client.status(BASE, 5) == 401
        await client.models(BASE, [(b"api-key", b"k")], 5)
    first, second = (call.request.headers for call in route.calls)
    assert not {"authorization", "api-key", "cookie"} & set(first)
    assert second["api-key"] == "k"
    assert not {"authorization", "cookie"} & set(second)


async def test_redirects_are_not_followed() -> None:
    assert (await asked(answered(301, headers={"location": "http://elsewhere.test/"}))).status == 301


@pytest.mark.parametrize(
    ("error", "fault", "detail"),
    [
        (httpx.ConnectError("no route"), UpstreamUnreachable, "http://upstream.test: ConnectError: no route"),
        (httpx.ProxyError("407"), UpstreamUnreachable, "http://upstream.test: ProxyError: 407"),
        (httpx.RemoteProtocolError("bad"), UpstreamBroken, "http://upstream.test: RemoteProtocolError: bad"),
        (httpx.ReadTimeout("slow"), UpstreamSilent, ""),
        (httpx.ConnectTimeout("slow"), UpstreamSilent, ""),
    ],
)
async def test_faults(error: Exception, fault: type[UpstreamFault], detail: str) -> None:
    with pytest.raises(fault) as caught:
        await asked({"side_effect": error})
    assert caught.value.detail == detail


async def test_all_of_it_has_one_deadline() -> None:
    async def never(request: httpx.Request) -> httpx.Response:
        await asyncio.Event().wait()
        raise AssertionError

    with respx.mock:
        respx.get(f"{BASE}/models").mock(side_effect=never)
        with pytest.raises(UpstreamSilent, match=r"no answer within 0\.01 s"):
            await ModelsClient({}).status(BASE, 0.01)


async def test_a_list_without_end_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "LARGEST", 100)
    with pytest.raises(UpstreamBroken, match="larger than 100 bytes"):
        await asked(answered(content=b" " * 101))


@pytest.mark.parametrize(
    ("environment", "proxied"),
    [
        ({}, None),
        ({"HTTP_PROXY": "http://user:p%40ss@proxy.test:3128"}, "proxy.test"),
        ({"ALL_PROXY": "https://proxy.test"}, "proxy.test"),
        ({"HTTP_PROXY": "http://proxy.test", "NO_PROXY": "upstream.test"}, None),
    ],
)
async def test_the_environments_proxies(
    environment: dict[str, str], proxied: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str | None] = []
    original = httpx.AsyncClient

    def recorded(**options: Any) -> httpx.AsyncClient:
        seen.append(options["proxy"] and options["proxy"].url.host)
        return original(**options)

    monkeypatch.setattr(httpx, "AsyncClient", recorded)
    monkeypatch.setenv("HTTP_PROXY", "http://not-asked.test")
    with respx.mock:
        respx.get(f"{BASE}/models").respond(200)
        await ModelsClient(environment).status(BASE, 5)
    assert seen == [proxied]


def test_certificates_that_cannot_be_read() -> None:
    with pytest.raises(UserMistake, match="SSL_CERT_FILE"):
        ModelsClient({"SSL_CERT_FILE": "/nowhere.pem"})


def test_httpx_is_imported_only_when_it_is_needed() -> None:
    code = "import sys, proxy.server.runner, proxy.cli.check; sys.exit('httpx' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
