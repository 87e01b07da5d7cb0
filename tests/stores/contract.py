"""Tests what every store must do. A store's test module subclasses `StoreContract` and defines
`open`.

Every test has its own namespace, because the engines are shared.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest
from msgspec.structs import replace

from proxy import stores
from proxy.stores import Entry, Store, sweep
from tests.clock import PATIENCE


async def listed(store: Store, prefix: str) -> dict[str, Entry]:
    async with aclosing(store.list(prefix)) as entries:
        found = [entry async for entry in entries]
    assert len({entry.key for entry in found}) == len(found), "listed twice"
    return {entry.key: entry for entry in found}


async def swept(store: Store, space: str, later: float = 0) -> int:
    """Return how many records of `space`, kept for a minute, a sweep `later` seconds from now
    deletes."""
    kept = {space: 60.0}
    return await sweep(store, kept.get, clock=lambda: time.time() + later)


class StoreContract:
    racers = 30

    async def open(self) -> Store:
        """Return a store on the engine under test. Called in the test's event loop."""
        raise NotImplementedError

    @pytest.fixture
    async def store(self, request: pytest.FixtureRequest) -> AsyncIterator[Store]:
        store = await self.open()
        yield store
        await store.close()

    @pytest.fixture
    def space(self) -> str:
        return f"acme-{uuid.uuid4().hex[:16]}"

    async def test_a_record_is_read_as_it_was_put(self, store: Store, space: str) -> None:
        assert await store.put(f"{space}/original/a.txt", b"whole\x00\xff\r\n") is True
        assert await store.put(f"{space}/original/a.txt", b"the first put wins") is False
        assert await store.get(f"{space}/original/a.txt") == b"whole\x00\xff\r\n"

    @pytest.mark.parametrize("size", [0, 1, 100_000, 7_000_000])
    async def test_any_size(self, store: Store, space: str, size: int) -> None:
        value = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
        assert await store.put(f"{space}/original/a", value)
        assert await store.get(f"{space}/original/a") == value
        assert [entry.size for entry in (await listed(store, space)).values()] == [size]

    async def test_exactly_one_of_many_puts_wins(self, store: Store, space: str) -> None:
        values = [b"%d " % number * 5000 for number in range(self.racers)]
        won = await asyncio.gather(*(store.put(f"{space}/summary/k", value) for value in values))
        assert won.count(True) == 1
        assert await store.get(f"{space}/summary/k") == values[won.index(True)]

    async def test_an_empty_record_exists(self, store: Store, space: str) -> None:
        assert await store.put(f"{space}/round/k", b"")
        assert await store.put(f"{space}/round/k", b"late") is False
        assert await store.get(f"{space}/round/k") == b""

    async def test_get_many_keeps_the_order(self, store: Store, space: str) -> None:
        for name in "abc":
            await store.put(f"{space}/round/{name}", name.encode())
        keys = [f"{space}/round/{name}" for name in ("c", "x", "a", "c", "b")]
        assert list(await store.get_many(keys)) == [b"c", None, b"a", b"c", b"b"]
        assert list(await store.get_many([])) == []

    async def test_delete(self, store: Store, space: str) -> None:
        keys = [f"{space}/round/a", f"{space}/files/b", f"{space}x/round/a"]
        for key in keys:
            await store.put(key, b"1")
        await store.delete(*keys[1:], f"{space}/round/none")
        assert list(await store.get_many(keys)) == [b"1", None, None]
        assert await store.put(keys[1], b"2") is True
        await store.delete()

    async def test_a_damaged_record_is_discarded_only_as_it_was_read(
        self, store: Store, space: str
    ) -> None:
        key = f"{space}/round/a"
        await store.discard(key, b"damaged")
        await store.put(key, b"damaged\x00")
        await store.discard(key, b"damaged")
        assert await store.get(key) == b"damaged\x00", "it is another one"
        await store.discard(key, b"damaged\x00")
        assert await store.get(key) is None
        assert await store.put(key, b"good") is True
        await store.discard(key, b"damaged\x00")
        assert await store.get(key) == b"good"
        assert list(await listed(store, space)) == [key], "nothing is left beside it"

    async def test_repairs_at_once_leave_a_good_record(self, store: Store, space: str) -> None:
        """Each reads, discards and puts; whatever their order, the last of them leaves a good
        one."""
        key = f"{space}/round/a"
        await store.put(key, b"damaged")

        async def repair() -> None:
            while (there := await store.get(key)) != b"good":
                if there is not None:
                    await store.discard(key, there)
                await store.put(key, b"good")

        await asyncio.gather(*(repair() for _ in range(self.racers)))
        assert await store.get(key) == b"good"

    async def test_list_by_prefix(self, store: Store, space: str) -> None:
        names = ["original/a", "original/ab", "original/b.txt", "round/a", "rounds/a"]
        for name in names:
            await store.put(f"{space}/{name}", name.encode())
        await store.put(f"{space}x/original/a", b"a neighbour whose name begins alike")

        async def below(prefix: str) -> set[str]:
            return {
                key.removeprefix(f"{space}/") for key in await listed(store, f"{space}{prefix}")
            }

        assert await below("/") == set(names)
        assert await below("/original/") == {"original/a", "original/ab", "original/b.txt"}
        assert await below("/original/a") == {"original/a", "original/ab"}
        assert await below("/original/b.txt") == {"original/b.txt"}
        assert await below("/round") == {"round/a", "rounds/a"}
        assert await below("/original/a/") == set()
        assert await below("/none/") == set()
        assert await below("/*") == set()
        assert len(await listed(store, space)) == len(names) + 1
        assert set(await listed(store, "")) >= {f"{space}/{name}" for name in names}

    async def test_a_listing_tells_size_and_age(self, store: Store, space: str) -> None:
        began = time.time()
        await store.put(f"{space}/original/a", b"12345")
        [entry] = (await listed(store, f"{space}/")).values()
        assert entry.size == 5
        assert began - 5 < entry.modified < time.time() + 5  # engines tell whole seconds

    async def test_a_long_listing_can_be_left(self, store: Store, space: str) -> None:
        keys = [f"{space}/original/{number}" for number in range(1200)]
        await asyncio.gather(*(store.put(key, b"1") for key in keys))
        assert set(await listed(store, f"{space}/")) == set(keys)
        async with aclosing(store.list(f"{space}/")) as entries:
            assert (await anext(entries)).key in keys
        assert await store.get(keys[0]) == b"1"

    async def test_sweep_by_age(
        self, store: Store, space: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in "abc":
            await store.put(f"{space}/original/{name}", b"1")
        await store.put(f"{space}x/original/a", b"1")
        monkeypatch.setattr(stores, "BATCH", 2)
        assert [await swept(store, space), await swept(store, space, later=120)] == [0, 3]
        assert set(await listed(store, space)) == {f"{space}x/original/a"}

    async def test_what_was_used_since_it_was_listed_does_not_expire(
        self, store: Store, space: str
    ) -> None:
        await store.put(f"{space}/original/a", b"1")
        [entry] = (await listed(store, f"{space}/")).values()
        await store.expire([replace(entry, modified=entry.modified - 60)])
        assert set(await listed(store, f"{space}/")) == {entry.key}
        await store.expire([entry])
        await store.expire([entry])
        await store.expire([])
        assert await store.get(entry.key) is None

    async def test_what_is_older_is_renewed_as_it_is(self, store: Store, space: str) -> None:
        keys = [f"{space}/original/{name}" for name in "abc"]
        for key in keys[:2]:
            await store.put(key, key.encode())
        before = {key: entry.modified for key, entry in (await listed(store, space)).items()}
        await store.renew(keys, 3_600)
        assert {
            key: entry.modified for key, entry in (await listed(store, space)).items()
        } == pytest.approx(before)
        renewed = False
        async with asyncio.timeout(PATIENCE):  # engines tell whole seconds
            while not renewed:
                await store.renew(keys, 0)
                found = await listed(store, space)
                assert found.keys() == before.keys(), "what is not there stays away"
                renewed = all(entry.modified > before[key] for key, entry in found.items())
        assert list(await store.get_many(keys)) == [keys[0].encode(), keys[1].encode(), None]
        await store.renew([], 0)

    async def test_the_longest_key(self, store: Store, space: str) -> None:
        key = f"{space}/{'k' * 255}/{'n' * 255}"
        assert await store.put(key, b"1")
        assert await store.get(key) == b"1"
        assert set(await listed(store, f"{space}/")) == {key}

    async def test_two_processes_worth_of_stores_share_records(
        self, store: Store, space: str
    ) -> None:
        other = await self.open()
        try:
            assert await store.put(f"{space}/summary/k", b"mine")
            assert await other.get(f"{space}/summary/k") == b"mine"
            assert await other.put(f"{space}/summary/k", b"theirs") is False
        finally:
            await other.close()
