"""What a handler of ours gets from the relay: a body it read already, headers of its own, one outcome."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from proxy.policies.tenants import Tenant
from proxy.policy import Policy
from proxy.policy import Upstream as Where
from proxy.requests.relay import GATHERED, Relay
from proxy.settings import Settings
from proxy.telemetry.outcome import Outcome
from proxy.upstream.client import UpstreamClient
from tests.asgi import ScriptedClient
from tests.wire import EVENTS, OK, Handler, Peer, Wire, chunk, replying, upstream


class Bench:
    """A relay, and what it told its sink."""

    def __init__(self, pool: UpstreamClient) -> None:
        self.outcomes: list[Outcome] = []
        self.relay = Relay(Settings(first_byte_timeout=2), pool, self.outcomes.append)

    async def respond(self, handler: Handler, exchange: ScriptedClient, api_key: str | None = None) -> Wire:
        async with upstream(handler) as wire:
            client = exchange.client()
            where = Where(base_url=wire.url + "/v1", idle_timeout=0.2, api_key=api_key)
            tenant = Tenant(Policy(tenant="acme", upstream=where), "acme-1")
            await self.relay(client, tenant)
        return wire


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with UpstreamClient(Settings()) as pool:
        yield Bench(pool)


async def test_tenants_key_replaces_the_clients_in_the_same_header(bench: Bench) -> None:
    exchange = ScriptedClient(b"{}", headers=[(b"authorization", b"Bearer client"), (b"content-length", b"2")])
    wire = await bench.respond(replying(OK), exchange, api_key="tenants")
    assert wire.requests[0].get(b"authorization") == [b"Bearer tenants"]


async def test_relayed_request_has_one_outcome_with_its_times(bench: Bench) -> None:
    await bench.respond(replying(OK), ScriptedClient(b"{}"))
    [outcome] = bench.outcomes
    assert (outcome.kind, outcome.tenant, outcome.status, outcome.fault) == ("relay", "acme", 200, "")
    assert outcome.first_byte_seconds is not None
    assert 0 < outcome.added_seconds < outcome.first_byte_seconds < outcome.seconds


async def close(peer: Peer) -> None:
    await peer.request()


async def silence(peer: Peer) -> None:
    await peer.request()
    await peer.send(EVENTS, chunk(b"x"))
    await peer.gone()


@pytest.mark.parametrize(
    ("handler", "status", "complete", "fault"), [(close, 502, True, "broken"), (silence, 200, False, "timeout")]
)
async def test_upstream_fault_of_a_relayed_request(
    bench: Bench, handler: Handler, status: int, complete: bool, fault: str
) -> None:
    exchange = ScriptedClient(b"{}")
    await bench.respond(handler, exchange)
    assert (exchange.status, exchange.complete) == (status, complete)
    assert [(outcome.status, outcome.fault) for outcome in bench.outcomes] == [(status, fault)]


async def test_header_that_http_forbids_is_the_clients_fault(bench: Bench) -> None:
    exchange = ScriptedClient(b"{}", headers=[(b"x", b"\xff"), (b"content-length", b"2")])
    await bench.respond(replying(OK), exchange)
    assert [(outcome.status, outcome.fault) for outcome in bench.outcomes] == [(400, "client")]


@pytest.mark.parametrize("whole", [True, False], ids=["while upstream is silent", "in the middle of an upload"])
async def test_client_that_leaves_a_relayed_request(bench: Bench, whole: bool) -> None:
    async def hang(peer: Peer) -> None:
        await peer.reader.readuntil(b"\r\n\r\n")
        exchange.hang_up()
        await peer.gone()

    exchange = ScriptedClient(b"{}" if whole else bytes(GATHERED + 1), b"")
    if not whole:
        exchange._incoming._queue.pop()  # type: ignore[attr-defined]
    await bench.respond(hang, exchange)
    assert exchange.messages == []
    assert [(outcome.status, outcome.fault) for outcome in bench.outcomes] == [(0, "client_gone")]
