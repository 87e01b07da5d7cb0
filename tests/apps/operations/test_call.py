"""A caller's files in a store: what they are called, what is written, under which number, and what
is seen of it."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.apps.operations.call import (
    KEY_BYTES,
    BadName,
    CallerFiles,
    File,
    canonical,
    joined,
    key_part,
    name_of,
)
from proxy.errors import StoreFault
from proxy.policy import Policy
from proxy.requests.records import Records
from proxy.stores import is_part, open_store
from proxy.stores.guarded import Guarded, Visit
from proxy.threads import WorkPool
from tests.clock import until
from tests.stores.engines import S3_KEYS, redis_server, s3_server, s3_url

MOVED = f"s/log.{hashlib.sha256(b'moved text').hexdigest()[:16]}.txt"


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
    return CallerFiles(guarded.visit(30), namespace, Policy(), WorkPool("test"))


async def test_written_files_are_listed_by_name_and_read(shelf: CallerFiles) -> None:
    await shelf.put_all({"s/b": b"22", "s/a/c": b"1", "s2/d": b"", "e": b"333"})
    assert await shelf.below("s") == [File("s/a/c", 1), File("s/b", 2)]
    assert [file.name for file in await shelf.below("")] == ["e", "s/a/c", "s/b", "s2/d"]
    assert list(await shelf.read_many(["s/b", "none", "e"])) == [b"22", None, b"333"]
    assert list(await shelf.read_many([])) == []


async def test_numbers_continue_after_the_highest(shelf: CallerFiles) -> None:
    await shelf.put_all(
        {"g_0.json": b"", "g_7.json": b"", "g_x.json": b"", "g_9": b"", "g_1_8.json": b""}
    )
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


async def test_an_original_opens_only_by_its_exact_path(
    guarded: Guarded, shelf: CallerFiles
) -> None:
    """The messages behind a summary come without the line that seals them."""
    moved, group = MOVED.removeprefix("s/"), "compressed_group_0123456789abcdef.txt"

    async def run(work: Callable[[], bytes]) -> bytes:
        return work()

    await Records(guarded.visit(), "acme").keep_originals(
        "all", {moved: lambda: "moved text", group: lambda: "a\n"}, run
    )
    assert await shelf.read(f"context_store/{moved}") == b"moved text"
    assert await shelf.read(f"context_store/{group}") == b"a\n"
    assert await shelf.read(f"elsewhere/{moved}") is None
    assert await shelf.read(f"context_store/sub/{moved}") is None
    assert list(await shelf.read_many([f"context_store/{moved}"])) == [None]
    assert await shelf.below("") == []


@pytest.mark.parametrize("engine", ["redis", "s3"])
async def test_other_store_engines_number_files_alike(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Part of a name is where engines' lists differ most, and characters that mean something to one
    of them."""
    for name, value in S3_KEYS.items():
        monkeypatch.setenv(name, value)
    with (redis_server if engine == "redis" else s3_server)(tmp_path) as process:
        store = open_store(
            s3_url(process.port) if engine == "s3" else f"redis://127.0.0.1:{process.port}/0"
        )
        shelf = of(Guarded(store, warn=lambda kind, message: None), "acme")
        await shelf.put_all({"s/a/c": b"1", "s/b": b"22", "s2/d": b"", "~/é [*]?": b"333"})
        assert await shelf.below("s") == [File("s/a/c", 1), File("s/b", 2)]
        assert await shelf.below("~") == [File("~/é [*]?", 3)]
        assert [await shelf.put_next("s/g_", ".json", b"x") for _ in range(2)] == [
            "s/g_0.json",
            "s/g_1.json",
        ]
        assert list(await shelf.read_many(["s/a/c", "none"])) == [b"1", None]
        await store.close()


async def test_a_failed_store_raises_store_faults(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file where the folder should be")
    shelf = of(
        Guarded(open_store(str(tmp_path / "store")), warn=lambda kind, message: None), "acme"
    )
    for work in (
        shelf.put_all({"f": b"1"}),
        shelf.put_next("g_", ".json", b""),
        shelf.read("f"),
        shelf.below("s"),
    ):
        with pytest.raises(StoreFault, match="The store did not"):
            await work
    assert shelf._visit.errors


# Damage.

GROUP = "s/compressed_group_chat_0.json"


def halved(content: bytes) -> bytes:
    return content[: len(content) // 2]


def flipped(content: bytes) -> bytes:
    return bytes([content[0] ^ 1]) + content[1:]


@dataclass
class Found:
    """A store with one file whose name tells its digest and one whose name does not, and what was
    counted there."""

    folder: Path
    counted: list[str]
    guarded: Guarded

    def shelf(self) -> CallerFiles:
        return of(self.guarded, "acme")

    def file(self, name: str, kind: str = "files") -> Path:
        return self.folder / "acme" / kind / key_part(name)

    def damage(self, name: str, damaged: Callable[[bytes], bytes], kind: str = "files") -> None:
        self.file(name, kind).write_bytes(damaged(self.file(name, kind).read_bytes()))


@pytest.fixture
async def found(root: Path) -> Found:
    counted: list[str] = []
    store = open_store(str(root))
    found = Found(
        root, counted, Guarded(store, warn=lambda kind, message: None, count_damaged=counted.append)
    )
    await found.shelf().put_all({MOVED: b"moved text"})
    assert await found.shelf().put_next("s/compressed_group_chat_", ".json", b"[\n{}\n]\n") == GROUP
    return found


@pytest.mark.parametrize(
    "damaged", [halved, flipped, lambda content: b"", lambda content: content + b"\n"]
)
async def test_a_damaged_text_counts_as_absent(
    found: Found, damaged: Callable[[bytes], bytes]
) -> None:
    found.damage(MOVED, damaged)
    left = found.file(MOVED).read_bytes()
    shelf = found.shelf()
    assert await shelf.read(MOVED) is None
    assert list(await shelf.read_many([MOVED, GROUP, "none"])) == [None, b"[\n{}\n]\n", None]
    assert found.counted == ["files", "files"] and list(shelf.damaged) == [MOVED]
    assert "is damaged in the store" in shelf.missing(MOVED, MOVED).message
    assert shelf.missing("none", "./none").message == "There is no file './none' among your files"
    assert found.file(MOVED).read_bytes() == left  # something of it may be worth keeping


async def test_a_damaged_file_gives_way_to_the_same_text(found: Found) -> None:
    found.damage(MOVED, flipped)
    await asyncio.gather(*(found.shelf().put_all({MOVED: b"moved text"}) for _ in range(4)))
    assert await found.shelf().read(MOVED) == b"moved text"


async def test_a_good_copy_that_another_request_wrote_stays(
    found: Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request reads the damaged file, another one repairs it, and then the first goes on."""
    found.damage(MOVED, flipped)
    read, other_is_done = Visit.read, asyncio.Event()
    first = True

    async def held(visit: Visit, keys: Sequence[str]) -> Sequence[bytes | None] | None:
        nonlocal first
        mine, first = first, False
        values = await read(visit, keys)
        if mine:
            await other_is_done.wait()
        return values

    monkeypatch.setattr(Visit, "read", held)
    one = asyncio.create_task(found.shelf().put_all({MOVED: b"moved text"}))
    await until(lambda: not first)
    await found.shelf().put_all({MOVED: b"moved text"})
    with found.file(MOVED).open("rb") as repaired:  # held, so that no other file gets its number
        other_is_done.set()
        await one
        assert found.file(MOVED).stat().st_ino == os.fstat(repaired.fileno()).st_ino, (
            "it is the same file"
        )
    assert await found.shelf().read(MOVED) == b"moved text"


# Names.


@pytest.mark.parametrize(
    ("spelled", "name"),
    [
        ("/workspace/context_store", "workspace/context_store"),
        ("./cache_file/", "cache_file"),
        ("~/x", "~/x"),
        ("a//b/./c", "a/b/c"),
        ("a/../b", "b"),
        ("a/..", ""),
        (".", ""),
        ("/", ""),
        ("", ""),
        ("...", "..."),
        (" a ", " a "),
        ("é/中", "é/中"),
        ("%2e%2e/x", "%2e%2e/x"),
        ("..\\x", "..\\x"),
    ],
)
def test_canonical_form_of_a_path(spelled: str, name: str) -> None:
    assert canonical(spelled) == name


@pytest.mark.parametrize(
    ("spelled", "reason"),
    [
        ("..", "'..' leads out of your files"),
        ("/../etc/passwd", "'/../etc/passwd' leads out of your files"),
        ("a/../../b", "'a/../../b' leads out of your files"),
        ("a\0b", "'a\\x00b' has a control character in it"),
        ("a\nb", "'a\\nb' has a control character in it"),
        ("\ud800", "'\\ud800' is not valid Unicode"),
        ("../" + "x" * 200, "'../" + "x" * 97 + "\\u2026' leads out of your files"),
    ],
)
def test_bad_paths_are_refused(spelled: str, reason: str) -> None:
    with pytest.raises(BadName) as refused:
        canonical(spelled)
    assert str(refused.value) == reason


@pytest.mark.parametrize(
    ("directory", "path"),
    [
        ("/workspace/x", "/workspace/x/f"),
        ("./c/", "./c/f"),
        ("/", "/f"),
        (".", "./f"),
        ("~/x//", "~/x/f"),
    ],
)
def test_a_path_comes_back_as_its_directory_was_spelled(directory: str, path: str) -> None:
    assert joined(directory, "f") == path


@given(st.text(st.characters(codec="utf-8") | st.sampled_from("./%~_2E"), min_size=1, max_size=20))
def test_every_name_goes_into_a_key_and_comes_back(name: str) -> None:
    part = key_part(name)
    assert is_part(part)
    assert name_of(part) == name


def test_names_too_long_for_a_key_are_refused() -> None:
    assert len(key_part("x" * 254)) == KEY_BYTES
    with pytest.raises(BadName, match="is too long: 256 bytes when stored, of 255"):
        key_part("x" * 255)


@pytest.mark.parametrize("part", ["x", "", "_.FF"])
def test_foreign_keys_have_no_name(part: str) -> None:
    assert name_of(part) is None
