"""What a request finds of what others wrote, in a real store."""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import pytest

from proxy.core.render import Round
from proxy.records import Records
from proxy.stores import open_store
from proxy.stores.guarded import Guarded
from proxy.summarizer import Snapshot

LINKS = {index: bytes([index]) * 16 for index in (2, 5, 8, 11)}
SNAPSHOT = Snapshot("the record", 3, "m")


@pytest.fixture
def store(tmp_path: Path) -> Guarded:
    return Guarded(open_store(str(tmp_path), lambda _: None), warn=lambda *_: None)


@pytest.fixture
def records(store: Guarded) -> Records:
    return Records(store.visit(), "tenant-caller")


def hidden(number: int, instead: bytes | None = None) -> Round:
    return Round((b'{"n" : %d}' % number,), instead, (b'{"after":1}',), number)


async def remember(records: Records, *indexes: int) -> None:
    for place, index in enumerate(indexes):
        earlier = [LINKS[one] for one in indexes[:place]]
        await records.remember(LINKS[index], "m", hidden(index), earlier)


async def test_the_newest_round_names_its_predecessors(records: Records) -> None:
    await remember(records, 2, 8)
    assert await records.rounds(LINKS, "m") == {2: hidden(2), 8: hidden(8)}
    assert await records.rounds(LINKS, "other") == {}
    assert await records.rounds({}, "m") == {}


async def test_bytes_come_back_as_they_were(records: Records) -> None:
    mixed = hidden(5, b'{"role" : "assistant","x":1.50}')
    await records.remember(LINKS[5], "m", mixed, [])
    assert await records.rounds(LINKS, "m") == {5: mixed}


async def test_what_stands_behind_a_lost_round_is_left_out(records: Records) -> None:
    await records.remember(LINKS[2], "m", hidden(2), [])
    await records.remember(LINKS[8], "m", hidden(8), [LINKS[2], LINKS[5]])
    assert await records.rounds(LINKS, "m") == {2: hidden(2)}


async def test_another_caller_finds_nothing(records: Records, store: Guarded) -> None:
    await remember(records, 2)
    await records.keep_snapshot(records.key("snapshots", "a"), msgspec.json.encode(SNAPSHOT))
    other = Records(store.visit(), "tenant-other")
    assert await other.rounds(LINKS, "m") == {}
    assert await other.snapshots(["a"]) == [None]


async def test_the_first_snapshot_wins(records: Records) -> None:
    key = records.key("snapshots", "a")
    assert await records.snapshot(key) is None
    first, second = (msgspec.json.encode(Snapshot(text, 1, "m")) for text in ("first", "second"))
    assert await records.keep_snapshot(key, first) == first
    assert await records.keep_snapshot(key, second) == first
    assert await records.snapshot(key) == first
    assert [one and one.text for one in await records.snapshots(["a", "b"])] == ["first", None]


async def test_a_damaged_record_is_as_good_as_none(records: Records) -> None:
    await records.keep_snapshot(records.key("snapshots", "a"), b"\xff{")
    assert await records.snapshots(["a"]) == [None]


async def test_originals_are_kept_with_half_surrogate_pairs(records: Records, tmp_path: Path) -> None:
    await records.keep_originals("these", {"x.txt": lambda: "a\ud83d"})
    assert _bytes_of(tmp_path, "x.txt") == "a\ud83d".encode("utf-8", "surrogatepass")


async def test_originals_are_looked_at_again_until_all_are_kept(store: Guarded) -> None:
    broken, records = Records(store.visit(0), "tenant-caller"), Records(store.visit(), "tenant-caller")
    await broken.keep_originals("these", {"x.txt": lambda: "a"})
    assert not records.has_originals("these")
    await records.keep_originals("these", {"x.txt": lambda: "a"})
    assert records.has_originals("these") and not records.has_originals("others")


async def test_many_originals_may_take_longer_than_a_request_may_wait(tmp_path: Path) -> None:
    ticks = itertools.count()
    slow = Guarded(open_store(str(tmp_path)), warn=lambda *_: None, clock=lambda: next(ticks) / 10, budget_seconds=1)
    records = Records(slow.visit(), "tenant-caller")
    await records.keep_originals("these", {f"{number}.txt": lambda: "a" for number in range(50)})
    assert records.has_originals("these")


async def test_a_store_that_is_broken_is_empty_and_counted(store: Guarded) -> None:
    records = Records(store.visit(0), "tenant-caller")
    assert await records.snapshots(["a"]) == [None]
    assert await records.rounds(LINKS, "m") == {}
    assert await records.keep_snapshot("tenant-caller/snapshots/a", b"x") is None
    assert set(records.errors) == {"get:budget", "put:budget"}


def _bytes_of(folder: Path, name: str) -> bytes:
    [found] = [path for path in folder.rglob(name) if path.is_file()]
    return found.read_bytes()
