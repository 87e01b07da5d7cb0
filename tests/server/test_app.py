"""The application's edges, without a server: what no request through one can show."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from proxy.dialects.chat import CHAT
from proxy.errors import BodyTooLarge, PolicyError, UserMistake
from proxy.policies.tenants import Tenant
from proxy.requests.exchange import Exchange
from proxy.server.app import App
from proxy.settings import Settings
from tests.asgi import ScriptedClient
from tests.clock import turns


@pytest.fixture
def app(tmp_path: Path) -> App:
    return App(Settings(store=str(tmp_path / "store"), admin_token="t"))


def handled_by(app: App, handler: Any) -> App:
    app.process.relay = handler
    return app


async def metrics(app: App) -> str:
    app.process.flush()
    return app.process.metrics.render()[1].decode()


async def test_a_bug_is_500_with_an_id_and_no_traceback(
    app: App, caplog: pytest.LogCaptureFixture
) -> None:
    async def buggy(client: Exchange, tenant: Tenant) -> None:
        raise KeyError("secret detail")

    exchange = ScriptedClient()
    with caplog.at_level(logging.ERROR):
        await handled_by(app, buggy)(exchange.scope, exchange.receive, exchange.send)
    error = json.loads(exchange.body)["error"]
    assert exchange.status == 500
    assert "secret" not in error["message"] and "Traceback" not in error["message"]
    identity = dict(exchange.headers)[b"x-request-id"].decode()
    assert (
        identity in error["message"] and identity in caplog.text and "secret detail" in caplog.text
    )


async def test_a_bug_in_the_middle_of_a_reply_leaves_it_unfinished(app: App) -> None:
    async def buggy(client: Exchange, tenant: Tenant) -> None:
        await client.start(200, [])
        await client.write(b"half")
        raise KeyError

    exchange = ScriptedClient()
    await handled_by(app, buggy)(exchange.scope, exchange.receive, exchange.send)
    assert (exchange.status, exchange.body, exchange.complete) == (200, b"half", False)


async def test_a_bug_in_the_middle_of_a_stream_ends_it_with_an_error_event(app: App) -> None:
    async def buggy(client: Exchange, tenant: Tenant) -> None:
        client.error_event = CHAT.error_event
        await client.start(200, [])
        await client.write(b"data: 1\n\n")
        raise KeyError

    exchange = ScriptedClient()
    await handled_by(app, buggy)(exchange.scope, exchange.receive, exchange.send)
    assert exchange.complete
    assert b"The proxy failed at this request (req_" in exchange.body


async def test_refusals_of_handlers_are_replied_and_recorded(app: App) -> None:
    async def strict(client: Exchange, tenant: Tenant) -> None:
        raise BodyTooLarge("too large")

    exchange = ScriptedClient()
    await handled_by(app, strict)(exchange.scope, exchange.receive, exchange.send)
    assert exchange.status == 413
    assert (
        'offload_requests_total{dialect="",kind="refused",status="413",tenant="default"} 1.0'
        in await metrics(app)
    )


async def test_requests_cut_off_by_draining_are_recorded(app: App) -> None:
    async def slow(client: Exchange, tenant: Tenant) -> None:
        await asyncio.Event().wait()

    exchange = ScriptedClient()
    task = asyncio.ensure_future(
        handled_by(app, slow)(exchange.scope, exchange.receive, exchange.send)
    )
    await turns()
    task.cancel()
    await task
    assert exchange.status == 503
    assert dict(exchange.headers)[b"retry-after"] == b"1"


async def test_a_failing_route_of_ours_is_replied_once(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> Any:
        raise RuntimeError("no metrics")

    monkeypatch.setattr(app.process.metrics, "render", fail)
    headers = [(b"authorization", b"Bearer t")]
    exchange = ScriptedClient(method="GET", path="/metrics", raw_path=b"/metrics", headers=headers)
    await app(exchange.scope, exchange.receive, exchange.send)
    assert exchange.status == 500
    assert [message["type"] for message in exchange.messages].count("http.response.start") == 1
    assert json.loads(exchange.body)["error"]["type"] == "server_error"


def test_configuration_mistakes_are_reported_before_opening_anything(tmp_path: Path) -> None:
    with pytest.raises(PolicyError):
        App(Settings(policies=tmp_path / "nowhere"))
    with pytest.raises(UserMistake, match="HTTPS_PROXY"):
        App(Settings(environment={"HTTPS_PROXY": "http://"}))
    with pytest.raises(UserMistake, match="store"):
        App(Settings(store="ftp://x"))


def test_what_a_missing_extra_costs_is_said_with_its_name(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "proxy.telemetry.otel", None)
    App(Settings(environment={"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:1"}))
    assert "nothing is exported without: pip install '.[otel]'" in caplog.text
