"""Who is closed when there are too many connections."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from proxy.errors import Overloaded, ProxyError
from proxy.policies.tenants import Tenant
from proxy.policy import Limits, Policy
from proxy.requests.exchange import Account
from proxy.server import access
from proxy.server.access import SLOW_SECONDS, Bounds, Inflow, Presence, Shares
from proxy.settings import Settings
from tests.clock import Clock, turns


class Connection:
    """One that is idle or not, and knows whether it was closed."""

    def __init__(self, *, busy: bool = False, began: float | None = None) -> None:
        self.busy = busy
        self.body: Any = None if began is None else SimpleNamespace(began=began)
        self.expired = self.evicted = self.refused = self.asked = 0

    def expire(self) -> None:
        self.expired += 1

    def evict(self, error: ProxyError) -> None:
        assert "ulimit -n" in error.message
        self.evicted += 1

    def refuse(self, error: ProxyError) -> None:
        self.refused += 1

    def unfinished(self) -> Any:
        self.asked += 1
        return self.body

    def idle(self) -> bool:
        return not self.busy


def test_the_connection_that_was_idle_for_longest_makes_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if access.resource is None:
        pytest.skip("there is no limit here")
    monkeypatch.setattr(access.resource, "getrlimit", lambda _: (4, 4))
    account = Bounds(Settings(), lambda *_: None)
    opened = [Connection(busy=True), Connection(), Connection(), Connection()]
    for number, connection in enumerate(opened):
        account.opened(connection)
        account.deadlines[connection] = number
    assert [connection.expired for connection in opened] == [0, 1, 0, 0]
    assert opened[1] not in account.deadlines
    account.closed()
    account.closed()
    account.opened(Connection())
    assert [connection.expired for connection in opened] == [0, 1, 0, 0]


def test_the_longest_body_makes_room_and_else_the_newcomer_gives_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if access.resource is None:
        pytest.skip("there is no limit here")
    monkeypatch.setattr(access.resource, "getrlimit", lambda _: (4, 4))
    account = Bounds(Settings(), lambda *_: None)
    opened = [Connection(busy=True), Connection(busy=True, began=2), Connection(busy=True, began=1)]
    for number, connection in enumerate(opened):
        account.opened(connection)
        account.deadlines[connection] = number
    account.opened(newcomer := Connection())
    assert [connection.evicted for connection in (*opened, newcomer)] == [0, 0, 1, 0]
    for connection in opened:
        connection.body = None
    account.opened(newcomer)
    assert [connection.evicted for connection in (*opened, newcomer)] == [0, 0, 1, 1]


async def test_refusals_do_not_look_at_all_connections_each_time(clock: Clock) -> None:
    """A flood of requests above a share must not cost more the more connections there are."""
    bounds = Bounds(Settings(), lambda *_: None)
    bounds.run(asyncio.get_running_loop())
    account = Account("one", "one caller's requests", 1)
    connection = Connection(busy=True, began=clock())
    connection.body.names, connection.body.forwarded = ["one"], False
    bounds.deadlines[connection] = clock() + 60
    bounds.enter(account)
    for _ in range(10):
        with pytest.raises(Overloaded):
            bounds.enter(account)
    assert (connection.asked, connection.refused) == (1, 0)
    clock.move(SLOW_SECONDS + 0.1)
    bounds.enter(account)
    assert connection.refused == 1, "it is slow by now"


async def test_a_request_gives_its_bytes_and_its_place_back_once() -> None:
    """Or others could hold more than there is room for."""
    bounds = Bounds(Settings(buffered_limit=100), lambda *_: None)
    bounds.run(asyncio.get_running_loop())
    account = Account("one", "one tenant's requests", 1, 1)
    other, mine = Inflow(bounds), Inflow(bounds)
    other.hold(40)
    mine.admit([account])
    mine.hold(60)
    for size in (50, 50):
        mine.release(size)
    mine.let_go()
    mine.let_go()
    assert bounds.held == 40
    for last in (Inflow(bounds), Inflow(bounds)):
        last.admit([account])
        last.hold(60)
        with pytest.raises(Overloaded, match="100 bytes"):
            last.hold(1)
        last.let_go()
    assert not bounds._of and not bounds._places, "nothing is left of callers that are gone"


async def test_whoever_waits_learns_that_the_client_has_hung_up() -> None:
    """Soon, if it begins to wait later."""
    presence = Presence()
    inflow = Inflow(Bounds(Settings(), lambda *_: None), presence)
    heard: list[str] = []
    inflow.watch(lambda: heard.append("early"))
    inflow.watch(lambda: heard.append("given up"))()
    presence.leave()
    assert heard == ["early"]
    heard.clear()
    inflow.watch(lambda: heard.append("late"))
    await turns()
    assert "late" in heard


def test_a_caller_that_upstream_knows_has_more_room() -> None:
    tenant = Tenant(Policy(tenant="default"), "default-1")
    shares = Shares()
    assert [one.places for one in shares.accounts(tenant)] == [256, 64, 128]
    shares.accept(tenant)
    assert [one.places for one in shares.accounts(tenant)] == [256, 128]
    assert [
        one.places for one in shares.accounts(Tenant(Policy(tenant="acme"), "acme", listed=True))
    ] == [256]
    few = Tenant(Policy(tenant="default", limits=Limits(concurrent_requests=3)), "default-2")
    assert [one.places for one in shares.accounts(few)] == [3, 3, 3]
