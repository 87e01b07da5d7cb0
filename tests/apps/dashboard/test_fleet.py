"""Several replicas, each with a file of its own: their pages show the sums of all of them."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import httpx
import msgspec
import pytest

from proxy.apps.dashboard import fleet
from proxy.apps.dashboard.fleet import EVERY, KEPT, Fleet
from proxy.apps.dashboard.queries import Reader
from proxy.apps.dashboard.rows import DAY, FLEET_SUMS, HOUR, Recorded, Rows
from proxy.cli import main
from proxy.stores import open_store
from proxy.telemetry.outcome import Outcome
from tests.apps.dashboard.traffic import dashboard, ended, key, outcome, recorded, session, sums
from tests.clock import wait_until
from tests.fake_upstream import StrictUpstream
from tests.serving import PLAIN, Proxy, served, tight
from tests.stores.engines import redis_server

SIZE = 16 << 20
NOW = 20_000 * DAY + 10 * HOUR + 30.0
CALLER, OTHER = "acme-1111111111111111", "acme-2222222222222222"


class Replica:
    """One replica: its file, and a clock of its own."""

    def __init__(self, folder: Path, name: str, store: str, upstream: str = "") -> None:
        self.path = folder / f"{name}.db"
        self.store = open_store(store)
        self.now = NOW
        self.warned: list[str] = []
        self.fleet = Fleet(
            self.rows,
            self.store,
            name,
            f"http://{name}:1",
            lambda _, text: self.warned.append(text),
            lambda: self.now,
            [upstream],
        )

    def rows(self) -> Rows:
        return Rows(self.path, SIZE)

    def write(self, count: int, start: int = 0, at: float = NOW, namespace: str = CALLER) -> None:
        with closing(self.rows()) as rows:
            rows.write(ended(count, start, at - count - start, namespace))

    async def exchange(self, later: float = EVERY) -> None:
        self.now += later
        await self.fleet.exchange()

    def shown(
        self, since: float = NOW - DAY, span: int = HOUR, namespace: str | None = None
    ) -> int:
        """Return how many requests the pages sum up."""
        with closing(Reader(self.path, namespace)) as reader:
            return sum(row["requests"] for row in sums(reader, since, span))

    async def keys(self) -> list[str]:
        return [entry.key async for entry in self.store.list("dashboard/")]


@pytest.fixture
def pair(tmp_path: Path) -> list[Replica]:
    return [Replica(tmp_path, name, str(tmp_path / "store")) for name in ("one", "two")]


async def test_each_shows_what_all_have_seen_and_a_change_replaces_what_was_there(
    pair: list[Replica],
) -> None:
    one, two = pair
    one.write(25)
    two.write(10, namespace=OTHER)
    for replica in (one, two, one):
        await replica.exchange()
    assert (one.shown(), two.shown()) == (35, 35)
    assert (
        one.shown(namespace=OTHER),
        one.shown(span=DAY),
        one.shown(span=60, since=NOW - HOUR),
    ) == (10, 35, 35)
    one.write(5, start=100)
    for replica in (one, two):
        await replica.exchange()
    assert (one.shown(), two.shown()) == (40, 40)
    assert len(await one.keys()) == 2, "the version before is gone"
    with closing(Reader(two.path)) as reader:
        assert [one["sessions"] for one in reader.fared(NOW - DAY)] == [0]
    for namespace, there in ((CALLER, True), ("acme-3333333333333333", False)):
        with closing(Reader(two.path, namespace)) as reader:
            assert reader.any() is there


async def test_sessions_and_their_losses_are_summed(pair: list[Replica]) -> None:
    one, two = pair
    lost = {"cost_before": 10, "cost_after": 12, "compacted": 4, "holdout": "planned"}

    def sized(number: int, namespace: str) -> Outcome:
        return outcome(
            number, namespace, tokens_before=100 + number, tokens_after=50 + number, **lost
        )

    for place, replica in enumerate(pair):
        with closing(replica.rows()) as rows:
            numbers = range(3 * place, 3 * place + 3)
            rows.write(
                [Recorded(NOW - 500, sized(number, f"acme-{place}"), number) for number in numbers]
            )
    for replica in (one, two, one):
        await replica.exchange()
    for replica in pair:
        with closing(Reader(replica.path)) as reader:
            [found] = reader.fared(NOW - DAY)
            assert (found["sessions"], found["losses"], found["moved"]) == (6, 6, 24)
            assert (found["largest_before"], found["largest_after"]) == (105, 55)
            [group] = reader.groups(NOW - DAY)
            assert (group["sessions"], group["requests"], group["holdout"]) == (6, 6, "planned")


async def test_a_replica_that_is_gone_stays_in_the_sums_until_their_time(
    pair: list[Replica],
) -> None:
    one, two = pair
    one.write(7)
    await one.exchange()
    await two.exchange()
    one.path.unlink()
    await two.exchange()
    assert two.shown() == 7
    await two.exchange(KEPT)
    assert await two.keys() == [] and two.shown() == 0


async def test_proxies_in_front_of_different_upstreams_do_not_mix_their_sums(
    tmp_path: Path,
) -> None:
    store = str(tmp_path / "store")
    one, two = (Replica(tmp_path, name, store, f"http://{name}/v1") for name in ("one", "two"))
    one.write(7)
    two.write(5)
    for replica in (one, two, one):
        await replica.exchange()
    assert (one.shown(), two.shown()) == (7, 5)
    assert len(await one.keys()) == 2, "neither deletes what the other put"


async def test_what_is_no_share_is_passed_over(pair: list[Replica]) -> None:
    one, two = pair
    odd = fleet.Share("odd", "http://odd", [[[]] * len(FLEET_SUMS)], [])  # type: ignore[list-item]
    values = {
        "a": b"no share",
        "b": zlib.compress(b"no share"),
        "c": zlib.compress(msgspec.msgpack.encode(odd)),
    }
    for name, value in values.items():
        await two.store.put(f"{two.fleet._sums}020000.{name * 16}.{7:012}.{'f' * 16}", value)
    await two.store.put(f"{two.fleet._sums}else", b"")
    await two.store.put("dashboard/rounds/x", b"a record of a tenant of this name")
    one.write(2)
    await one.exchange()
    await two.exchange()
    assert two.shown() == 2 and not two.warned
    await two.exchange(KEPT)
    assert await two.keys() == ["dashboard/rounds/x"]


async def test_others_take_no_more_than_their_part_of_the_file(
    pair: list[Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = pair
    for day in range(3):
        for number in range(4):
            one.write(1, start=100 * number, at=NOW - day * DAY, namespace=f"acme-{number:016x}")
    await one.exchange()
    monkeypatch.setattr("proxy.apps.dashboard.rows.MOST_SUMS", 30)
    await two.exchange()
    assert two.shown(NOW - 5 * DAY, DAY) == 8, "the newest days"
    await two.exchange()
    assert two.shown(NOW - 5 * DAY, DAY) == 8


def test_who_is_forgotten_on_one_replica_is_forgotten_on_all(
    pair: list[Replica], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = pair
    for replica in pair:
        replica.write(3)
        replica.write(4, start=50, namespace=OTHER)
        asyncio.run(replica.exchange())
    arguments = [
        "store",
        "forget",
        CALLER,
        "--store",
        str(tmp_path / "store"),
        "--dashboard",
        str(one.path),
        "--yes",
    ]
    assert main(arguments) == 0
    for replica in (one, two, one):
        replica.now = max(replica.now, time.time())
        asyncio.run(replica.exchange())
    for replica in pair:
        with closing(replica.rows()) as rows:
            assert (rows.count(CALLER), rows.count(OTHER)) == (None, 4)
            assert CALLER not in rows.namespaces()
    assert "3 rows of the dashboard" in capsys.readouterr().out


def _shows(proxy: Proxy, period: str, count: int) -> bool:
    return (
        sum(row["requests"] for row in dashboard(proxy, f"savings?period={period}")["models"])
        == count
    )


@pytest.fixture(params=["folder", "redis"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "redis":
        with redis_server(tmp_path) as redis:
            yield f"redis://127.0.0.1:{redis.port}/0"
    else:
        yield str(tmp_path / "store")


def test_two_proxies_show_their_fleet(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "EVERY", 0.05)
    monkeypatch.setattr(fleet, "REST", 0)
    with StrictUpstream() as upstream:
        policy = {"default": tight(upstream.url)}
        first, second = (tmp_path / name for name in ("one.db", "two.db"))
        with (
            served(policy, store, dashboard=first) as one,
            served(policy, store, dashboard=second, replica_url="http://127.0.0.1:1") as two,
        ):
            session(one, upstream, 3, key="somebody")
            session(two, upstream, 2)
            recorded(one, 3)
            for proxy in (one, two):
                for period in ("hour", "day", "week", "month"):
                    wait_until(partial(_shows, proxy, period, 5))
            assert len(dashboard(two, "requests")) == 2, "the rows are each one's own"
            me = dashboard(two, "me")
            [other] = me["replicas"]
            assert other["name"] == dashboard(one, "me")["replica"] != me["replica"]
            assert other["url"] == one.root
            assert [row["url"] for row in dashboard(one, "me")["replicas"]] == [
                "http://127.0.0.1:1"
            ]
            reply = httpx.post(f"{two.root}/_offload/login", data={"key": "somebody"}, verify=PLAIN)
            assert reply.status_code == 303, "a key that was used on the other replica logs in"
            mine = dashboard(two, "savings?period=day", headers=key("somebody"))
            assert [row["requests"] for row in mine["models"]] == [3]
