"""Searching many files: in order, side by side, never more than an answer may hold."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from proxy import patterns
from proxy.core.policy import Policy
from proxy.core.search import Find, TooSlow
from proxy.operations import search
from proxy.operations.search import BATCH_BYTES, SIDE_BY_SIDE, Found, searched
from proxy.operations.shelf import File, Shelf
from proxy.patterns import Budget
from proxy.stores import open_store
from proxy.stores.guarded import Guarded

FIND = patterns.compile("needle")


@pytest.fixture
async def shelf(tmp_path: Path) -> Shelf:
    return Shelf(Guarded(open_store(str(tmp_path)), warn=lambda kind, message: None).visit(30), "acme", Policy())


async def stored(shelf: Shelf, contents: dict[str, bytes], sizes: int | None = None) -> list[File]:
    """The files; `sizes`: what each is said to have, so that few bytes make many batches."""
    await shelf.put_all(contents)
    return [File(file.name, sizes or file.size) for file in await shelf.below("")]


async def found_in(shelf: Shelf, files: list[File], find: Find, limit: int | None) -> Found:
    return await searched(shelf, files, find, limit, asyncio.Semaphore(2))


async def test_batches_keep_the_files_order(shelf: Shelf) -> None:
    files = await stored(shelf, {f"{number:02}": b"a\nNeedle %d" % number for number in range(20)}, BATCH_BYTES // 2)
    found = await found_in(shelf, files, FIND, None)
    assert [match.text for match in found.matches] == [f"Needle {number}" for number in range(20)]
    assert {match.line for match in found.matches} == {2} and not found.more


@pytest.mark.parametrize(("limit", "more"), [(1, True), (29, True), (30, False), (31, False), (10**30, False)])
async def test_a_limit_over_all_files(shelf: Shelf, limit: int, more: bool) -> None:
    files = await stored(shelf, {f"{number:02}": b"needle\n" * 3 for number in range(10)}, BATCH_BYTES)
    found = await found_in(shelf, files, FIND, limit)
    assert (len(found.matches), found.more) == (min(limit, 30), more)


async def test_nothing_is_read_behind_the_limit(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    files = await stored(shelf, {f"{number:02}": b"needle" for number in range(SIDE_BY_SIDE + 1)}, BATCH_BYTES + 1)
    read: list[str] = []
    read_many = shelf.read_many

    async def noted(wanted: list[str]) -> object:
        read.extend(wanted)
        return await read_many(wanted)

    monkeypatch.setattr(shelf, "read_many", noted)
    await found_in(shelf, files, FIND, 1)
    assert sorted(read) == [file.name for file in files[:SIDE_BY_SIDE]]


async def test_an_answer_has_an_end_without_a_limit(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "CHARACTERS", 100)
    files = await stored(shelf, {f"{number:02}": b"needle 123\n" * 6 for number in range(9)}, BATCH_BYTES)
    found = await found_in(shelf, files, FIND, None)
    assert (len(found.matches), found.more) == (10, True)


async def test_files_that_are_gone_since_they_were_listed(shelf: Shelf) -> None:
    files = await stored(shelf, {"a": b"needle"})
    found = await found_in(shelf, [File("gone", 6), *files], FIND, None)
    assert [match.path for match in found.matches] == ["a"]


async def test_half_a_surrogate_pair_is_shown_as_what_is_no_character(shelf: Shelf) -> None:
    files = await stored(shelf, {"a": "x\ud83d needle".encode("utf-8", "surrogatepass")})
    [match] = (await found_in(shelf, files, FIND, None)).matches
    assert match.text.startswith("x\ufffd") and match.text.endswith(" needle")


async def test_one_that_takes_too_long_ends_the_search(shelf: Shelf) -> None:
    files = await stored(shelf, {"a": b"needle", "b": b"hay"})
    with pytest.raises(TooSlow):
        await found_in(shelf, files, patterns.compile("needle", Budget(0)), None)
