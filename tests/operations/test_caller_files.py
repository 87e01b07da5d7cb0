"""A caller's files in a store: what is written, under which number, and what is seen of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxy.core.policy import Policy
from proxy.core.retrieval.names import key_part
from proxy.errors import StoreFault
from proxy.operations.caller_files import CallerFiles, File
from proxy.stores import open_store
from proxy.stores.guarded import Guarded
from proxy.threads import Threads
from tests.stores.engines import S3_KEYS, redis_server, s3_server, s3_url


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
async def guarded(root: Path) -> Guarded:
    return Guarded(open_store(str(root)), warn=lambda kind, message: None)


@pytest.fixture
def shelf(guarded: Guarded) -> Iterator[CallerFiles]:
    yield of(guarded, "acme")


def of(guarded: Guarded, namespace: str) -> CallerFiles:
    return CallerFiles(guarded.visit(30), namespace, Policy(), Threads())


async def test_written_files_are_listed_by_name_and_read(shelf: CallerFiles) -> None:
    await shelf.put_all({"s/b": b"22", "s/a/c": b"1", "s2/d": b"", "e": b"333"})
    assert await shelf.below("s") == [File("s/a/c", 1), File("s/b", 2)]
    assert [file.name for file in await shelf.below("")] == ["e", "s/a/c", "s/b", "s2/d"]
    assert list(await shelf.read_many(["s/b", "none", "e"])) == [b"22", None, b"333"]
    assert list(await shelf.read_many([])) == []


async def test_a_file_can_be_written_again_only_with_the_same_content(shelf: CallerFiles) -> None:
    await shelf.put_all({"f": b"1"})
    await shelf.put_all({"f": b"1"})
    with pytest.raises(StoreFault, match="The store already has other content as f"):
        await shelf.put_all({"f": b"2"})
    assert await shelf.read("f") == b"1"


async def test_a_deleted_file_can_be_written_again(shelf: CallerFiles, root: Path) -> None:
    await shelf.put_all({"f": b"1"})
    (root / "acme" / "files" / key_part("f")).unlink()
    await shelf.put_all({"f": b"1"})
    assert await shelf.read("f") == b"1"


async def test_numbers_continue_after_the_highest(shelf: CallerFiles) -> None:
    await shelf.put_all({"g_0.json": b"", "g_7.json": b"", "g_x.json": b"", "g_9": b"", "g_1_8.json": b""})
    assert await shelf.put_next("g_", ".json", b"a") == "g_10.json"
    assert await shelf.put_next("h_", ".json", b"a") == "h_0.json"


async def test_concurrent_writers_get_different_numbers(guarded: Guarded) -> None:
    calls = [of(guarded, "acme").put_next("g_", ".json", b"%d" % number) for number in range(8)]
    made = await asyncio.gather(*calls)
    assert sorted(made) == [f"g_{number}.json" for number in range(8)]
    contents = await of(guarded, "acme").read_many(made)
    assert list(contents) == [b"%d" % number for number in range(8)]


async def test_namespaces_never_meet(guarded: Guarded) -> None:
    await of(guarded, "acme-1").put_all({"f": b"1"})
    other = of(guarded, "acme-2")
    assert await other.read("f") is None and await other.below("") == []


async def test_an_original_opens_only_by_its_exact_path(shelf: CallerFiles, root: Path) -> None:
    folder = root / "acme" / "originals"
    folder.mkdir(parents=True)
    (folder / "tool_call_1.txt").write_bytes(b"moved")
    assert await shelf.read("context_store/tool_call_1.txt") == b"moved"
    assert await shelf.read("elsewhere/tool_call_1.txt") is None
    assert await shelf.read("context_store/sub/tool_call_1.txt") is None
    assert list(await shelf.read_many(["context_store/tool_call_1.txt"])) == [None]
    assert await shelf.below("") == []


@pytest.mark.parametrize("engine", ["redis", "s3"])
async def test_other_store_engines_number_files_alike(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Part of a name is where engines' lists differ most, and characters that mean something to one of them."""
    for name, value in S3_KEYS.items():
        monkeypatch.setenv(name, value)
    with (redis_server if engine == "redis" else s3_server)(tmp_path) as process:
        store = open_store(s3_url(process.port) if engine == "s3" else f"redis://127.0.0.1:{process.port}/0")
        shelf = of(Guarded(store, warn=lambda kind, message: None), "acme")
        await shelf.put_all({"s/a/c": b"1", "s/b": b"22", "s2/d": b"", "~/é [*]?": b"333"})
        assert await shelf.below("s") == [File("s/a/c", 1), File("s/b", 2)]
        assert await shelf.below("~") == [File("~/é [*]?", 3)]
        assert [await shelf.put_next("s/g_", ".json", b"x") for _ in range(2)] == ["s/g_0.json", "s/g_1.json"]
        assert list(await shelf.read_many(["s/a/c", "none"])) == [b"1", None]
        await store.close()


async def test_a_failed_store_raises_store_faults(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file where the folder should be")
    shelf = of(Guarded(open_store(str(tmp_path / "store")), warn=lambda kind, message: None), "acme")
    for work in (shelf.put_all({"f": b"1"}), shelf.put_next("g_", ".json", b""), shelf.read("f"), shelf.below("s")):
        with pytest.raises(StoreFault, match="The store did not"):
            await work
    assert shelf.errors
