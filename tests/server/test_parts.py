"""What a part can do, and that a request outlives its faults: parts of these tests, in a real
proxy."""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from proxy.apps import parts
from proxy.dialects.chat import CHAT
from proxy.errors import Unauthorized
from proxy.policies.tenants import Tenant
from proxy.requests.exchange import Exchange
from proxy.requests.prepared import Prepared
from proxy.server.parts import Door, Part
from proxy.server.process import Process
from proxy.stores.local import Folder
from proxy.telemetry.outcome import Kind, Outcome
from tests.apps.dashboard.traffic import session
from tests.clock import wait_until
from tests.fake_upstream import StrictUpstream, text, whole
from tests.serving import PLAIN, Proxy, served, tight

SEEN: list[tuple[Outcome, Prepared | None, Exchange | None]] = []
LIFE: list[str] = []


async def show(request: Request) -> Response:
    return Response("a page")


def check(tenant: Tenant) -> None:
    if tenant.anonymous:
        raise Unauthorized("Send a key")


class Counter(Part):
    """Has a page and a door, and counts."""

    def __init__(self, process: Process) -> None:
        self.pages = [Route("/_offload/page", show), Route("/fixed", show)]
        self._sink = process.services.sink

    def door(self, path: bytes) -> Door | None:
        return Door(self.answer, CHAT.name, check=check) if path == b"/count" else None

    async def answer(self, client: Exchange, tenant: Tenant) -> None:
        await client.reply(200, b"%d" % len(SEEN))
        self._sink(client.completed(client.outcome(Kind.OPERATION, tenant.name, tenant.namespace)))

    def watch(self, outcome: Outcome, prepared: Prepared | None, client: Exchange | None) -> None:
        SEEN.append((outcome, prepared, client))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        LIFE.append("begins")
        yield
        LIFE.append("ends")

    def room_is_short(self) -> None:
        LIFE.append("gives up")


class Faulty(Part):
    def __init__(self, process: Process) -> None: ...

    def room_is_short(self) -> None:
        raise KeyError("a bug of this part")

    def watch(self, outcome: Outcome, prepared: Prepared | None, client: Exchange | None) -> None:
        raise KeyError("a bug of this part")


DOCUMENT = Path(__file__).parents[2] / "docs" / "architecture.md"


@pytest.fixture(autouse=True)
def forget() -> None:
    SEEN.clear()
    LIFE.clear()


def chat(proxy: Proxy) -> None:
    body = {"model": "gpt-4.1", "messages": [{"role": "user", "content": "Hi"}]}
    assert proxy.post("/v1/chat/completions", body).status_code == 200


def get(proxy: Proxy, path: str) -> httpx.Response:
    return httpx.get(proxy.root + path, trust_env=False, verify=PLAIN)


def test_a_part_has_pages_doors_and_a_life(
    up: StrictUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "PARTS", {"counter": Counter})
    with served({"default": tight(up.url)}) as proxy:
        assert [get(proxy, path).text for path in ("/_offload/page", "/fixed")] == ["a page"] * 2
        assert LIFE == ["begins"] and not SEEN, "pages are no requests"
        up.script(text("Hello."))
        chat(proxy)
        wait_until(lambda: SEEN)
        [(outcome, prepared, client)] = SEEN
        assert outcome.kind is Kind.UNTOUCHED and prepared is not None and client is not None
        assert prepared.request is not None and prepared.request.model == "gpt-4.1"
        assert proxy.post("/count", {}).text == "1"
        wait_until(lambda: len(SEEN) == 2)
        assert proxy.post("/count", {}, key="").status_code == 401
        wait_until(lambda: len(SEEN) == 3)
        assert [(seen.kind, whose) for seen, whose, _ in SEEN[1:]] == [
            (Kind.OPERATION, None),
            (Kind.REFUSED, None),
        ]
    assert LIFE == ["begins", "ends"]


def test_the_documented_part_counts_our_tools(
    up: StrictUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    example: dict[str, Any] = {}
    exec(DOCUMENT.read_text().partition("```python\n")[2].partition("```")[0], example)
    monkeypatch.setattr(parts, "PARTS", {"tools": example["ToolCounts"]})
    with served({"default": tight(up.url)}) as proxy:
        session(proxy, up, 6, read=True)
        wait_until(lambda: get(proxy, "/_offload/tools").json() == {"grep": 1})


def test_a_part_that_fails_costs_no_request(
    up: StrictUpstream, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(parts, "PARTS", {"faulty": Faulty, "counter": Counter})
    with served({"default": tight(up.url)}) as proxy:
        up.script(text("Hello."))
        chat(proxy)
        wait_until(lambda: SEEN)
        assert proxy.metric("requests_total", 'kind="untouched"') == 1
    assert "a bug, in showing request req_" in caplog.text and "to Faulty" in caplog.text


def test_parts_are_asked_for_room_where_the_store_has_none(
    up: StrictUpstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> bool:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(parts, "PARTS", {"faulty": Faulty, "counter": Counter})
    with served({"default": tight(up.url)}) as proxy:
        monkeypatch.setattr(Folder, "put", full)
        httpx.get(f"{proxy.root}/health?deep=1", trust_env=False, verify=PLAIN)
        assert LIFE[:2] == ["begins", "gives up"]


def test_without_parts_their_paths_are_upstreams_or_nobodys(
    up: StrictUpstream, serve: Callable[..., Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "PARTS", {})
    up.respond(lambda request: whole({"path": request.path}))
    proxy = serve({"default": tight(up.url)})
    assert get(proxy, "/_offload/").status_code == 404
    assert get(proxy, "/v1/retrieve/0123").json() == {"path": "/v1/retrieve/0123"}
    browser = httpx.get(proxy.root, headers={"accept": "text/html"}, trust_env=False, verify=PLAIN)
    assert browser.json()["path"].startswith("/")
    assert get(proxy, "/health").json() == {"status": "healthy"}
