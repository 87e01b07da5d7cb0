"""The application's edges, without a server: what no request through one can show."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from proxy.dialects.chat import CHAT
from proxy.errors import BodyTooLarge, Fault, PolicyError, RequestTimeout, UserMistake
from proxy.policies.tenants import Tenant
from proxy.requests.exchange import Exchange
from proxy.requests.relay import GATHERED
from proxy.server.app import App
from proxy.server.parts import Part
from proxy.server.process import Process
from proxy.settings import Settings
from proxy.telemetry.outcome import Kind
from tests.asgi import ScriptedClient
from tests.clock import turns
from tests.serving import write_policies


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


@pytest.mark.parametrize("again", [False, True], ids=["the timeout", "a second signal"])
async def test_requests_that_are_cut_off_at_the_end_say_when_to_come_again(
    app: App, again: bool
) -> None:
    async def slow(client: Exchange, tenant: Tenant) -> None:
        await asyncio.Event().wait()

    exchange = ScriptedClient()
    task = asyncio.ensure_future(
        handled_by(app, slow)(exchange.scope, exchange.receive, exchange.send)
    )
    await turns()
    if again:
        app.cut()
    else:
        task.cancel()
    await turns()
    assert task.done() and exchange.status == 503
    assert b"shutting down" in exchange.body
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


class Handled:
    """A relay that notes whom it serves, and replies."""

    def __init__(self, *, sent: bool = True, status: int = 200) -> None:
        self.served: list[tuple[bytes, Tenant]] = []
        self._sent = sent
        self._status = status

    async def __call__(self, client: Exchange, tenant: Tenant) -> None:
        self.served.append((client.path, tenant))
        client.sent = client.began if self._sent else None
        await client.reply(self._status, b"ok")


async def asked(app: App, path: str, *pieces: bytes, **scope: Any) -> ScriptedClient:
    client = ScriptedClient(*pieces, path=path, raw_path=path.encode(), **scope)
    await app(client.scope, client.receive, client.send)
    return client


async def test_a_proxy_of_one_command_serves_nobody_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    app = handled_by(App(Settings(store=str(tmp_path), below="/secret")), served := Handled())
    assert (await asked(app, "/secret/v1/models", method="GET")).body == b"ok"
    assert [path for path, _ in served.served] == [b"/v1/models"]
    with caplog.at_level(logging.INFO, "proxy.request"):
        for path in ("/v1/models", "/", "/secretly/v1", "/health", "/v1/secret/x"):
            refused = await asked(app, path, method="GET")
            assert refused.status == 403
            assert (
                "only the command that started it" in json.loads(refused.body)["error"]["message"]
            )
        assert (await asked(app, "/_offload/nothing", method="GET")).status == 404, "no caller's"
        app.process.flush()
    shown = [record.__dict__["fields"] for record in caplog.records if record.msg == "request"]
    assert {(outcome.kind, outcome.fault) for outcome in shown[1:]} == {
        (Kind.REFUSED, Fault.CLIENT)
    }
    assert len(served.served) == 1 and not any("secret/" in outcome.path for outcome in shown)


@pytest.mark.parametrize(
    ("path", "headers", "anthropics"),
    [
        ("/v1/chat/completions", [], False),
        ("/v1/models", [], False),
        ("/v1/messages", [], True),
        ("/v1/messages/batches", [], True),
        ("/v1/models", [(b"anthropic-version", b"2023-06-01")], True),
    ],
)
async def test_an_error_has_the_shape_of_the_api_that_was_asked(
    tmp_path: Path, path: str, headers: list[tuple[bytes, bytes]], anthropics: bool
) -> None:
    write_policies(tmp_path / "policies", {"acme": ACME})
    app = App(Settings(store=str(tmp_path / "store"), policies=tmp_path / "policies"))
    given = [(b"authorization", b"Bearer unknown"), *headers]
    body = json.loads((refused := await asked(app, path, headers=given)).body)
    assert refused.status == 401
    assert body["error"]["type"] == "authentication_error"
    assert (body.get("type") == "error") == anthropics


ACME = {
    "api_keys": [{"sha256": hashlib.sha256(b"acme").hexdigest()}],
    "upstream": {"base_url": "http://127.0.0.1:9/v1"},
    "identity": {"header": "x-account"},
}


async def test_callers_of_one_key_are_told_apart_by_their_identity(tmp_path: Path) -> None:
    """And without one, they are the tenant."""
    write_policies(tmp_path / "policies", {"acme": ACME})
    app = App(Settings(store=str(tmp_path / "store"), policies=tmp_path / "policies"))
    handled_by(app, served := Handled())
    key = (b"authorization", b"Bearer acme")
    for account in ([], [(b"x-account", b"one")], [(b"x-account", b"two")], []):
        assert (await asked(app, "/v1/x", headers=[key, *account])).status == 200
    bare, one, two, again = [tenant.namespace for _, tenant in served.served]
    assert bare == again and len({bare, one, two}) == 3
    assert all(name.startswith("acme-") for name in (bare, one, two))


async def test_a_caller_has_more_places_once_upstream_has_served_it(app: App) -> None:
    """What upstream refuses, and what never went there, shows nothing."""

    async def accounts(handler: Handled) -> int:
        headers = [(b"authorization", b"Bearer k")]
        return len(
            (await asked(handled_by(app, handler), "/v1/x", headers=headers)).inflow.admitted
        )

    strangers = [await accounts(Handled(sent=False)), await accounts(Handled(status=401))]
    strangers.append(await accounts(Handled()))
    assert strangers == [3, 3, 3]
    assert await accounts(Handled()) == 2


async def test_uploads_have_places_of_their_own(app: App) -> None:
    """A body that is gathered before it goes upstream is no upload."""
    handled_by(app, Handled())
    upload = await asked(app, "/v1/files", bytes(GATHERED + 1), b"the rest")
    assert "this tenant's uploads" in [account.whose for account in upload.inflow.admitted]
    small = await asked(app, "/v1/files", b"x")
    assert "this tenant's uploads" not in [account.whose for account in small.inflow.admitted]


async def test_paths_that_climb_are_refused_with_advice(app: App) -> None:
    handled_by(app, served := Handled())
    refused = await asked(app, "/v1/../x", method="GET")
    assert refused.status == 403 and b"dot segments" in refused.body and not served.served


@pytest.mark.parametrize(
    ("method", "accept", "page"),
    [
        ("GET", b"text/html,*/*", True),
        ("HEAD", b"text/html", True),
        ("GET", b"*/*", False),
        ("POST", b"text/html", False),
    ],
)
async def test_whoever_types_the_address_gets_a_page(
    tmp_path: Path, method: str, accept: bytes, page: bool
) -> None:
    """Programs ask upstream there."""

    class Front(Part):
        def __init__(self, process: Process) -> None:
            self.pages = [Route("/", lambda _: Response("a page"))]

    app = handled_by(App(Settings(store=str(tmp_path)), [Front]), served := Handled())
    reply = await asked(app, "/", method=method, headers=[(b"accept", accept)])
    assert reply.status == 200 and len(served.served) == (not page)


class Form(Part):
    """Has a page that reads what is sent to it."""

    def __init__(self, process: Process) -> None:
        async def read(request: Request) -> Response:
            return Response(await request.body())

        self.pages = [Route("/_offload/form", read, methods=["POST"])]


@pytest.mark.parametrize("hangs_up", [False, True])
async def test_a_page_waits_for_no_body_that_is_never_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, hangs_up: bool
) -> None:
    """It is too slow, or its client is gone. Neither is a bug."""
    app = App(Settings(store=str(tmp_path)), [Form])
    path = "/_offload/form"
    client = ScriptedClient(path=path, raw_path=path.encode())
    client.say(b"half", more=True)
    task = asyncio.ensure_future(app(client.scope, client.receive, client.send))
    await turns()
    assert not task.done()
    if hangs_up:
        client.hang_up()
    else:
        client.inflow.fault = RequestTimeout("too slow")
        client.say(b"", more=True)
    await turns()
    assert task.done() and "a bug" not in caplog.text
    assert hangs_up or client.status == 408


async def test_a_page_that_is_not_there_is_said_in_json(app: App) -> None:
    handled_by(app, served := Handled())
    for method, path, status in (
        ("GET", "/_offload", 404),
        ("GET", "/_offload/x", 404),
        ("POST", "/health", 405),
    ):
        reply = await asked(app, path, method=method)
        headers = dict(reply.headers)
        assert (reply.status, headers[b"content-type"]) == (status, b"application/json")
        assert json.loads(reply.body)["error"]["message"]
    assert b"GET" in headers[b"allow"] and not served.served


@pytest.mark.parametrize(
    ("address", "headers", "status"),
    [
        ("10.1.2.3", [], 200),
        ("::ffff:10.1.2.3", [], 200),
        ("127.0.0.1", [], 200),
        ("127.0.0.1", [(b"host", b"evil.example")], 403),
        ("10.1.2.3", [(b"via", b"1.1 front")], 403),
        ("10.1.2.3", [(b"x-forwarded-host", b"x")], 403),
        ("192.0.2.1", [], 403),
        ("192.0.2.1", [(b"authorization", b"Bearer t")], 200),
        ("192.0.2.1", [(b"authorization", b"Bearer other")], 403),
        (None, [], 403),
    ],
)
async def test_metrics_are_for_networks_that_the_operator_named(
    tmp_path: Path, address: str | None, headers: list[tuple[bytes, bytes]], status: int
) -> None:
    networks = ("10.0.0.0/8", "127.0.0.1/32")
    app = App(Settings(store=str(tmp_path), admin_token="t", monitor_networks=networks))
    client = address and (address, 1)
    reply = await asked(app, "/metrics", method="GET", client=client, headers=headers)
    assert reply.status == status
    assert status == 200 or b"--monitor-networks" in reply.body or b"--allowed-hosts" in reply.body
