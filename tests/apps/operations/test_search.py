"""Searching many files: in order, and never more than an answer may hold."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from proxy import regex
from proxy.apps.operations import search
from proxy.apps.operations.call import CallerFiles, File, Looking
from proxy.apps.operations.search import BATCH_BYTES, Found
from proxy.apps.recall import StoreCall
from proxy.errors import ClientFault
from proxy.policies.tenants import Tenant
from proxy.policy import Policy
from proxy.regex import Budget
from proxy.stores import open_store
from proxy.stores.guarded import Guarded
from proxy.threads import WorkPool
from proxy.tools.search import Find

FIND = regex.compile("needle")


@pytest.fixture
async def call(tmp_path: Path) -> AsyncIterator[Looking]:
    guarded, threads = (
        Guarded(open_store(str(tmp_path)), warn=lambda kind, message: None),
        WorkPool("test"),
    )
    tenant = Tenant(Policy(), "acme")
    yield StoreCall(
        tenant, CallerFiles(guarded.visit(30), tenant.namespace, tenant.policy, threads)
    )
    threads.close()


async def stored(call: Looking, contents: dict[str, bytes], sizes: int | None = None) -> list[File]:
    """The files; `sizes`: what each is said to have, so that few bytes make many batches."""
    await call.shelf.put_all(contents)
    return [File(file.name, sizes or file.size) for file in await call.shelf.below("")]


async def found_in(call: Looking, files: list[File], find: Find, limit: int | None) -> Found:
    return await search.searched(call, call.shelf.read_many, files, find, limit)


async def test_batches_keep_the_files_order(call: Looking) -> None:
    files = await stored(
        call, {f"{number:02}": b"a\nNeedle %d" % number for number in range(20)}, BATCH_BYTES // 2
    )
    found = await found_in(call, files, FIND, None)
    assert [match.text for match in found.matches] == [f"Needle {number}" for number in range(20)]
    assert {match.line for match in found.matches} == {2} and not found.more


@pytest.mark.parametrize(
    ("limit", "more"), [(1, True), (29, True), (30, False), (31, False), (10**30, False)]
)
async def test_a_limit_over_all_files(call: Looking, limit: int, more: bool) -> None:
    files = await stored(
        call, {f"{number:02}": b"needle\n" * 3 for number in range(10)}, BATCH_BYTES
    )
    found = await found_in(call, files, FIND, limit)
    assert (len(found.matches), found.more) == (min(limit, 30), more)


async def test_nothing_is_read_beyond_the_limit(
    call: Looking, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = await stored(call, {f"{number:02}": b"needle" for number in range(5)}, BATCH_BYTES + 1)
    read: list[str] = []
    read_many = call.shelf.read_many

    async def noted(wanted: list[str]) -> object:
        read.extend(wanted)
        return await read_many(wanted)

    monkeypatch.setattr(call.shelf, "read_many", noted)
    await found_in(call, files, FIND, 1)
    assert sorted(read) == [file.name for file in files[:2]], "one more shows that there are more"


async def test_an_answer_is_bounded_even_without_a_limit(
    call: Looking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "CHARACTERS", 100)
    files = await stored(
        call, {f"{number:02}": b"needle 123\n" * 6 for number in range(9)}, BATCH_BYTES
    )
    found = await found_in(call, files, FIND, None)
    assert (len(found.matches), found.more) == (10, True)


async def test_a_file_that_takes_too_long_ends_the_search(call: Looking) -> None:
    files = await stored(call, {"a": b"needle", "b": b"hay"})
    budget = Budget(1)
    find = regex.compile("needle", budget)
    budget.spent = 1
    with pytest.raises(ClientFault, match="cannot be used"):
        await found_in(call, files, find, None)
