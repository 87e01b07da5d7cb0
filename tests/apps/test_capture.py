"""Captures: what is written, for whom, how much, and that requests and other records never wait for
it."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from proxy.apps import capture
from proxy.apps.capture import Captures, captured
from proxy.apps.replay.recordings import Record, RecordedRequest, Recordings
from proxy.dialects.chat import CHAT
from proxy.errors import StoreFault
from proxy.plan.turn import Request
from proxy.policy import Policy
from proxy.server.process import Process
from proxy.settings import Settings
from proxy.stores import Store, open_store, sweep
from proxy.stores.guarded import Put
from proxy.stores.local import Folder
from proxy.telemetry.outcome import Basis, Kind, Outcome
from tests.clock import PATIENCE, until
from tests.sdks import redis as redis_client
from tests.stores.engines import redis_server

POLICY = Policy(tenant="acme", capture=True)
BODY = (
    b'{\r\n "model": "m",\n "messages": [{"role": "user", "content": "a \\n \\ud83d \xc3\xa9"}]\n}'
)
NAMESPACE = "acme-0123456789abcdef"
OUTCOME = Outcome(
    request_id="req_1",
    tenant="acme",
    namespace=NAMESPACE,
    kind=Kind.OBSERVED,
    method="POST",
    path="/v1/chat/completions",
    status=200,
    usage=Basis.BILLED,
    prompt_tokens=100,
    completion_tokens=7,
    cached_tokens=40,
)
CHAT_REQUEST = CHAT.parse(BODY)


class World:
    """Captures that run, over a store, with a clock that goes on by a second with each request."""

    def __init__(self, url: str, limit: int = 1 << 20) -> None:
        built_in = {"default": '{"capture": true}'}
        self.process = Process(Settings(store=url, capture=limit, built_in=built_in))
        seconds = count(1_000_000_000)
        self.captures = Captures(self.process, lambda: float(next(seconds)))

    @property
    def store(self) -> Store:
        return self.process.services.store.store

    def take(self, namespace: str = NAMESPACE, size: int = 0, **fields: Any) -> None:
        chat = CHAT.parse(BODY + b" " * size)
        self.captures.take(replace(OUTCOME, namespace=namespace, **fields), POLICY, chat)

    async def written(self) -> None:
        """Wait until nothing waits."""
        await self.captures._queue.join()

    async def sizes(self) -> dict[str, int]:
        """Return the bytes of each namespace's captures."""
        found: dict[str, int] = {}
        async for entry in self.store.list(""):
            namespace, kind, _ = entry.key.split("/")
            if kind == "captures":
                found[namespace] = found.get(namespace, 0) + entry.size
        return found


@asynccontextmanager
async def capturing(url: object, limit: int = 1 << 20) -> AsyncIterator[World]:
    world = World(str(url), limit)
    async with world.captures.running():
        yield world
    await world.store.close()


async def lines(url: object) -> list[bytes]:
    """Return the captures of a store, the oldest first."""
    store = open_store(str(url))
    values = await store.get_many(await captured(store, None))
    await store.close()
    return [value for value in values if value is not None]


def replayed(found: Sequence[bytes]) -> list[RecordedRequest]:
    records = iter([Record(str(number), value) for number, value in enumerate(found)])
    return list(Recordings().captured(Path("store"), records))


async def test_a_capture_is_what_replay_reads(tmp_path: Path) -> None:
    async with capturing(tmp_path) as world:
        world.take()
        world.take(kind=Kind.OFFLOADED)
    found = await lines(tmp_path)
    billed, changed = replayed(found)
    assert billed.chat is not None and json.loads(billed.chat.body) == json.loads(BODY)
    assert billed.reported is not None and (billed.reported.prompt, billed.reported.cached) == (
        100,
        40,
    )
    assert changed.chat is not None and changed.reported is None, (
        "what was billed is not the client's request"
    )
    assert billed.caller == changed.caller == NAMESPACE
    about = json.loads(found[0])
    assert (about["custom_id"], about["tenant"], about["url"]) == (
        "req_1",
        "acme",
        "/v1/chat/completions",
    )
    assert all(value.index(b"\n") == len(value) - 1 for value in found), (
        "one line, so that files can be joined"
    )


@pytest.mark.parametrize(
    ("outcome", "policy", "chat", "limit"),
    [
        (OUTCOME, replace(POLICY, capture=False), CHAT_REQUEST, 1 << 20),
        (OUTCOME, POLICY, CHAT_REQUEST, 0),
        (replace(OUTCOME, status=429), POLICY, CHAT_REQUEST, 1 << 20),
        (replace(OUTCOME, kind=Kind.RELAY), POLICY, CHAT_REQUEST, 1 << 20),
        (OUTCOME, POLICY, None, 1 << 20),
    ],
    ids=["the policy does not agree", "no room", "refused", "only counted", "not understood"],
)
async def test_what_is_not_captured(
    tmp_path: Path, outcome: Outcome, policy: Policy, chat: Request | None, limit: int
) -> None:
    async with capturing(tmp_path, limit) as world:
        world.captures.take(outcome, policy, chat)
    assert not await lines(tmp_path)


async def test_the_log_warns_at_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with capturing(tmp_path):
        pass
    [record] = caplog.records
    assert record.levelname == "WARNING" and "requests are captured" in record.message
    fields: Any = record
    assert fields.fields == {"bytes": 1 << 20, "tenants": ["default"]}


async def test_a_store_that_hangs_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(capture, "WAITING", 6 * len(BODY))
    monkeypatch.setattr(capture, "CLOSING", 0.01)
    free = threading.Event()
    monkeypatch.setattr(Folder, "put", lambda *_, **__: free.wait(PATIENCE))
    world = World(str(tmp_path))
    async with world.captures.running():
        for _ in range(9):
            world.take()
        assert world.captures._bytes == 6 * len(BODY)
        assert "the store does not keep up" in caplog.text
    free.set()
    await world.store.close()


async def test_a_store_that_fails_is_named_and_loses_only_that_capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with capturing(tmp_path) as world:
        for fails in (False, True, False):
            with monkeypatch.context() as patched:
                if fails:
                    patched.setattr(Folder, "put", failing(errno.EIO))
                world.take()
                await world.written()
    assert "requests are not captured: the store's folder failed: Input/output error" in caplog.text
    assert len(await lines(tmp_path)) == 2


def failing(number: int) -> Callable[..., bool]:
    def put(*_: object, **__: object) -> bool:
        raise OSError(number, os.strerror(number))

    return put


# -- bounds ----------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A limit of 16 KB, where captures count with the bytes that they have."""
    monkeypatch.setattr(capture, "LEAST", 1)
    yield 16_000


async def test_captures_stay_within_their_room_at_the_cost_of_whichever_tenant_has_most(
    tmp_path: Path, small: int
) -> None:
    async with capturing(tmp_path, small) as world:
        for _ in range(3):
            world.take("small-anonymous", 500)
        for number in range(60):
            world.take(f"large-{number % 7:016x}", 500)
            await world.written()
            sizes = await world.sizes()
            assert sum(sizes.values()) <= small
        few = await captured(world.store, "small-anonymous")
    assert len(few) == 3, "a busy tenant does not push out another's, however many keys it has"
    assert sum(sizes.values()) > 3 * small // 4
    times = [json.loads(value)["time"] for value in await lines(tmp_path)]
    assert times == sorted(times) and times[-1].startswith("2001-09-09T01:47:42"), "the oldest go"


async def test_small_captures_count_as_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or there would be more of them than a listing can hold."""
    monkeypatch.setattr(capture, "LEAST", 1_000)
    async with capturing(tmp_path, 16_000) as world:
        for _ in range(40):
            world.take()
        await world.written()
    assert 10 <= len(await lines(tmp_path)) <= 16


async def test_what_is_too_large_for_all_room_costs_no_other_capture(
    tmp_path: Path, small: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with capturing(tmp_path, small) as world:
        world.take()
        world.take(size=small)
        world.take()
    assert "too large for --capture" in caplog.text
    assert len(await lines(tmp_path)) == 2


async def test_only_captures_go(tmp_path: Path, small: int) -> None:
    async with capturing(tmp_path, small) as world:
        await world.store.put(f"{NAMESPACE}/originals/large", bytes(2 * small))
        for _ in range(40):
            world.take(size=500)
        await world.written()
        assert await world.store.get(f"{NAMESPACE}/originals/large")


async def test_captures_end_with_their_tenants_retention(tmp_path: Path) -> None:
    async with capturing(tmp_path) as world:
        world.take()
        await world.written()
        assert await sweep(world.store, lambda namespace: 1e6) == 0
        assert await sweep(world.store, lambda namespace: -1.0) == 1


# -- captures go first when room is short ----------------------------------------------------------


async def room_is_short(world: World, work: Callable[[], Awaitable[Put]]) -> None:
    """Assert that `work` succeeds once captures are gone."""
    before = sum((await world.sizes()).values())
    assert await work() is Put.FAILED

    async def works() -> bool:
        return await work() is Put.WRITTEN

    await until(works)
    assert sum((await world.sizes()).values()) < before


async def test_a_folder_without_room_gives_up_captures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Folder.put

    def put(folder: Folder, key: str, value: bytes, *, sync: bool = True) -> bool:
        if len(list(tmp_path.rglob("*.jsonl"))) > 6:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(folder, key, value, sync=sync)

    async with capturing(tmp_path) as world:
        monkeypatch.setattr(world.process, "parts", [world.captures])
        for _ in range(20):
            world.take()
        await world.written()
        monkeypatch.setattr(Folder, "put", put)
        visit = world.process.services.store.visit
        await room_is_short(world, lambda: visit().put(f"{NAMESPACE}/rounds/1", b"{}", keep=False))
        await world.written()
        assert 1 < len(await captured(world.store, None)) <= 6
        await world.process.services.store.check(PATIENCE)
        assert len(await captured(world.store, None)) > 1, "nobody asks for room that is there"


async def test_a_capture_for_which_there_is_no_room_takes_the_place_of_older_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with capturing(tmp_path) as world:
        for _ in range(8):
            world.take()
        await world.written()
        with monkeypatch.context() as patched:
            patched.setattr(Folder, "put", failing(errno.EDQUOT))
            world.take()
            await world.written()
        assert "not captured: the store's folder failed: Disk quota exceeded" in caplog.text
        assert len(await captured(world.store, None)) == 4
        world.take()
        await world.written()
        assert len(await captured(world.store, None)) == 5


async def test_a_redis_without_memory_gives_up_captures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with redis_server(tmp_path, "--maxmemory-policy", "noeviction") as server:
        async with capturing(f"redis://127.0.0.1:{server.port}/0", 64 << 20) as world:
            monkeypatch.setattr(world.process, "parts", [world.captures])
            for _ in range(40):
                world.take(size=200_000)
            await world.written()
            with redis_client.Redis(port=server.port) as client:
                used = client.info("memory")["used_memory"]
                client.config_set("maxmemory", used // 2)  # connections come and go, with theirs
            visit = world.process.services.store.visit
            await room_is_short(
                world, lambda: visit().put(f"{NAMESPACE}/rounds/1", bytes(100), keep=False)
            )


async def test_a_store_that_cannot_delete_is_not_asked_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[Sequence[str]] = []

    async def delete(*keys: str) -> None:
        asked.append(keys)
        raise StoreFault("read-only")

    async with capturing(tmp_path) as world:
        world.take()
        world.take()
        await world.written()
        monkeypatch.setattr(world.store, "delete", delete)
        world.captures.room_is_short()
        world.captures.room_is_short()
        await world.written()
    assert len(asked) == 1 and "requests are not captured: read-only" in caplog.text
