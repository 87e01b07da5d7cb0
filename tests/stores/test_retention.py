from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from proxy.policies import Policies
from proxy.policies.tenants import retention
from proxy.stores import Entry, open_store, sweep, sweep_always
from proxy.stores.guarded import Guarded
from proxy.stores.local import Folder
from tests.clock import PATIENCE, soon, until
from tests.stores.contract import listed

DAY = 86_400.0


def put(root: Path, key: str, age: float) -> None:
    path = root / key
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"1")
    os.utime(path, (time.time() - age,) * 2)


async def test_each_namespace_after_its_own_retention(tmp_path: Path) -> None:
    for name in ("days", "weeks", "ever"):
        for age in (1, 5, 20):
            put(tmp_path, f"{name}-1/original/{age}", age * DAY)
    store = open_store(str(tmp_path))
    kept = {"days-1": 3 * DAY, "weeks-1": 14 * DAY}
    assert await sweep(store, kept.get) == 3
    left = {
        "days-1/original/1",
        "weeks-1/original/1",
        "weeks-1/original/5",
        *(f"ever-1/original/{n}" for n in (1, 5, 20)),
    }
    assert set(await listed(store, "")) == left
    assert await sweep(store, kept.get) == 0
    await store.close()


async def test_what_a_check_could_not_delete_is_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was over before its record was written."""
    begun, let_go, put = threading.Event(), threading.Event(), Folder.put

    def slow(folder: Folder, key: str, value: bytes, *, sync: bool = True) -> bool:
        begun.set()
        let_go.wait(PATIENCE)
        return put(folder, key, value, sync=sync)

    monkeypatch.setattr(Folder, "put", slow)
    store = open_store(str(tmp_path))
    checking = asyncio.create_task(Guarded(store, warn=lambda *_: None).check(PATIENCE))
    await asyncio.to_thread(begun.wait, PATIENCE)
    checking.cancel()
    let_go.set()
    await until(lambda: listed(store, ""))
    kept = partial(retention, policies=Policies(default=None, named=(), by_digest={}))
    assert await sweep(store, kept) == 0
    assert await sweep(store, kept, clock=lambda: time.time() + 3_601) == 1
    assert await listed(store, "") == {}
    await store.close()


async def test_what_is_used_while_a_sweep_goes_on_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its listing and its deletion, a reply may promise it, or a request renew it."""
    for name in ("put", "renewed", "old"):
        put(tmp_path, f"a-1/original/{name}", 2 * DAY)
    pages = Folder.pages

    def used(folder: Folder, prefix: str) -> Iterator[Sequence[Entry]]:
        listed = list(pages(folder, prefix))
        assert not folder.put("a-1/original/put", b"1")
        folder.renew(["a-1/original/renewed"], DAY)
        yield from listed

    store = open_store(str(tmp_path))
    with monkeypatch.context() as patched:
        patched.setattr(Folder, "pages", used)
        await sweep(store, lambda namespace: DAY)
    assert set(await listed(store, "")) == {"a-1/original/put", "a-1/original/renewed"}
    await store.close()


async def test_it_goes_on_after_a_fault_and_until_it_is_cancelled(tmp_path: Path) -> None:
    warned: list[tuple[str, str]] = []
    (tmp_path / "store").write_text("a file where the folder should be")
    store = open_store(str(tmp_path / "store"))
    kept, swept = {"a-1": DAY}, lambda *_: None
    sweeping = sweep_always(
        store, kept.get, warn=lambda *what: warned.append(what), swept=swept, seconds=0.02
    )
    task = asyncio.create_task(sweeping)
    await until(lambda: warned)
    assert warned[0] == ("store sweep", "store: sweep: the store's folder failed: Not a directory")
    (tmp_path / "store").unlink()
    put(tmp_path / "store", "a-1/original/old", 2 * DAY)
    put(tmp_path / "store", "a-1/original/new", 0)
    await until(lambda: not (tmp_path / "store" / "a-1/original/old").exists())
    assert set(await listed(store, "")) == {"a-1/original/new"}
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await store.close()


async def test_two_sweepers_do_not_disturb_each_other(tmp_path: Path) -> None:
    for number in range(100):
        put(tmp_path, f"a-{number % 7}/original/{number}", 2 * DAY)
    stores = [open_store(str(tmp_path)) for _ in range(2)]
    deleted = await asyncio.gather(*(sweep(store, lambda namespace: DAY) for store in stores))
    assert sum(deleted) >= 100
    assert await listed(stores[0], "") == {}
    for store in stores:
        await store.close()


async def test_a_sweep_holds_up_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All records are read while those that have expired are being deleted, however long that
    takes."""
    for number in range(250):
        put(tmp_path, f"a-1/original/{number}", 2 * DAY)
    put(tmp_path, "b-1/original/new", 0)
    begun, let_go, delete = threading.Event(), threading.Event(), Folder.delete

    def slow(folder: Folder, keys: Sequence[str], until: float | None = None) -> None:
        begun.set()
        let_go.wait(PATIENCE)
        delete(folder, keys, until)

    monkeypatch.setattr(Folder, "delete", slow)
    swept: list[tuple[int, float]] = []
    store = open_store(str(tmp_path))
    sweeping = asyncio.create_task(
        sweep(store, lambda namespace: DAY, lambda *what: swept.append(what))
    )
    await asyncio.to_thread(begun.wait, PATIENCE)
    for _ in range(20):
        assert await soon(store.get("b-1/original/new")) == b"1"
    assert not sweeping.done()
    let_go.set()
    assert await sweeping == 250
    assert [count for count, _ in swept] == [100, 100, 50, 0]
    assert [overdue == pytest.approx(DAY, rel=0.01) for _, overdue in swept] == [
        True,
        True,
        True,
        False,
    ]
    assert swept[-1] == (0, 0.0), "nothing is left"
    await store.close()
