from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.errors import StoreFault, StoreFull
from proxy.stores import Store, open_store
from proxy.stores.local import LEFTOVER_SECONDS, Folder
from tests.clock import PATIENCE, wait_until
from tests.stores.contract import StoreContract, listed

KEY = "acme-1/original/a.txt"


class TestContract(StoreContract):
    @pytest.fixture(autouse=True)
    def engine(self, tmp_path: Path) -> None:
        self.root = tmp_path / "made" / "when needed"

    async def open(self) -> Store:
        return open_store(str(self.root))


def files(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


# Other processes. Each program is run with the folder as its argument.

RACER = """
import sys, os
from pathlib import Path
from proxy.stores.local import Folder
folder = Folder(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
mine = (str(os.getpid()) + " ").encode() * 4000
print(sum(folder.put(f"acme-1/summary/{n}", mine) for n in range(150)))
"""

WRITER = """
import hashlib, sys, os
from pathlib import Path
from proxy.stores.local import Folder
folder = Folder(Path(sys.argv[1]))
print("ready", flush=True)
for number in range(10**6):
    content = os.urandom(300_000)
    folder.put(f"acme-1/original/{os.getpid()}-{number}", hashlib.sha256(content).digest() + content)
"""

SMALL_FILES = """
import asyncio, resource, sys
from proxy.errors import Overloaded, StoreBusy, StoreFault
from proxy.stores import open_store
async def main():
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
    store = open_store(sys.argv[1])
    try:
        await store.put("acme-1/original/big", b"x" * 200_000)
    except StoreFault as fault:
        print(fault.message)
    print(await store.get("acme-1/original/big"), await store.put("acme-1/original/small", b"1"))
    await store.close()
asyncio.run(main())
"""


def start(program: str, root: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, str(root)],
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


def test_of_racing_processes_exactly_one_wins_each_key(tmp_path: Path) -> None:
    racers = [start(RACER, tmp_path) for _ in range(3)]
    for racer in racers:
        assert racer.stdout and racer.stdin and racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin
        racer.stdin.write("go\n")
        racer.stdin.flush()
    wins = [int(racer.communicate(timeout=PATIENCE)[0]) for racer in racers]
    assert sum(wins) == 150
    folder = Folder(tmp_path)
    won = dict.fromkeys((racer.pid for racer in racers), 0)
    for number in range(150):
        value = folder.get(f"acme-1/summary/{number}")
        assert value is not None
        pid = value.split()[0]
        assert value == (pid + b" ") * 4000
        won[int(pid)] += 1
    assert list(won.values()) == wins
    assert files(tmp_path / ".tmp") == set()


def test_a_killed_process_leaves_no_partial_record(tmp_path: Path) -> None:
    def records() -> list[Path]:
        return [path for path in tmp_path.rglob("acme-1/original/*") if path.is_file()]

    for _ in range(4):
        writer = start(WRITER, tmp_path)
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        enough = len(records()) + random.randint(2, 6)
        wait_until(lambda enough=enough: len(records()) >= enough)  # type: ignore[misc]
        writer.kill()
        writer.communicate()
    for path in records():
        data = path.read_bytes()
        assert len(data) == 300_032
        assert hashlib.sha256(data[32:]).digest() == data[:32]


async def test_what_a_dead_process_left_is_swept(tmp_path: Path) -> None:
    (tmp_path / ".tmp").mkdir()
    old, young = tmp_path / ".tmp" / "old", tmp_path / ".tmp" / "young"
    for path in (old, young):
        path.write_bytes(b"half a rec")
    os.utime(old, (0, time.time() - LEFTOVER_SECONDS - 1))
    store = open_store(str(tmp_path))
    assert await listed(store, "") == {}
    assert files(tmp_path / ".tmp") == {"young"}
    await store.close()


@pytest.mark.parametrize("umask", [0o000, 0o022])
def test_private_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        Folder(tmp_path / "store").put(KEY, b"1")
    finally:
        os.umask(before)
    modes = {
        path.relative_to(tmp_path): path.stat().st_mode & 0o777
        for path in (tmp_path / "store").rglob("*")
    }
    assert {oct(mode) for path, mode in modes.items() if (tmp_path / path).is_dir()} == {"0o700"}
    assert {oct(mode) for path, mode in modes.items() if (tmp_path / path).is_file()} == {"0o600"}
    assert (tmp_path / "store").stat().st_mode & 0o077 == 0


def test_a_folder_that_was_there_keeps_its_mode(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    Folder(tmp_path).put(KEY, b"1")
    assert tmp_path.stat().st_mode & 0o777 == 0o755


async def test_a_record_in_use_stays_young(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    await store.put(KEY, b"1")
    os.utime(tmp_path / KEY, (0, 0))
    began = time.time()
    assert await store.put(KEY, b"2") is False
    [entry] = (await listed(store, "")).values()
    assert entry.modified > began - 5
    assert await store.get(KEY) == b"1"
    await store.close()


def test_a_good_record_that_was_taken_away_for_a_damaged_one_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process replaces the damaged record after our look at it and before our deletion."""
    folder = Folder(tmp_path)
    folder.put(KEY, b"good", sync=False)
    monkeypatch.setattr(Folder, "get", lambda folder, key: b"damaged")
    folder.discard(KEY, b"damaged")
    assert (tmp_path / KEY).read_bytes() == b"good"
    assert list((tmp_path / ".tmp").iterdir()) == []
    (tmp_path / KEY).unlink()
    folder.discard(KEY, b"damaged")
    assert not (tmp_path / KEY).exists()


async def test_delete_leaves_no_empty_folders(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    await store.put(KEY, b"1")
    await store.put("acme-1/original/b.txt", b"1")
    await store.delete(KEY)
    assert (tmp_path / "acme-1" / "original").is_dir()
    await store.delete("acme-1/original/b.txt")
    assert os.listdir(tmp_path) == [".tmp"]
    await store.close()


def test_puts_and_deletes_of_one_namespace_do_not_trip_each_other(tmp_path: Path) -> None:
    folder = Folder(tmp_path)

    def work(number: int) -> None:
        for turn in range(60):
            folder.put(f"acme-1/kind-{turn % 3}/{number}", b"1")
            folder.delete([f"acme-1/kind-{turn % 3}/{number}"])
            list(folder.pages(""))

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(work, range(6)))
    assert files(tmp_path) == set()


async def test_what_else_lies_in_the_folder_is_passed_over(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    await store.put(KEY, b"1")
    for path in (
        "README",
        "lost+found/x/y",
        "acme-1/note",
        "acme-1/original/.hidden",
        "acme-1/original/deeper/file",
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("not ours")
    assert set(await listed(store, "")) == {KEY}
    await store.close()


# What is no file.


def bind(path: Path) -> None:
    os.chdir(path.parent)  # a socket's address is at most 108 bytes
    with closing(socket.socket(socket.AF_UNIX)) as made:
        made.bind(path.name)


ODD = {
    "pipe": os.mkfifo,
    "folder": os.mkdir,
    "link": lambda path: os.symlink("/etc/hostname", path),
    "link to nothing": lambda path: os.symlink("nowhere", path),
    "link to itself": lambda path: os.symlink(path, path),
    "socket": bind,
}


@pytest.mark.parametrize("odd", ODD)
async def test_what_is_no_file_is_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, odd: str
) -> None:
    monkeypatch.chdir(tmp_path)
    damaged: list[str] = []
    store = open_store(str(tmp_path), damaged=damaged.append)
    await store.put("acme-1/original/b", b"1")
    before = os.stat("/etc/hostname").st_mtime
    ODD[odd](tmp_path / KEY)
    async with asyncio.timeout(PATIENCE):
        assert await store.get(KEY) is None
        assert list(await store.get_many([KEY, "acme-1/original/b"])) == [None, b"1"]
        assert await store.put(KEY, b"2") is False
        assert set(await listed(store, "")) == {"acme-1/original/b"}
        await store.close()
    assert damaged == [KEY, KEY]
    assert os.stat("/etc/hostname").st_mtime == before


async def test_a_file_that_we_may_not_read_is_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The superuser may read all, so the system's answer is made up."""
    damaged: list[str] = []
    store = open_store(str(tmp_path), damaged=damaged.append)
    await store.put(KEY, b"0")
    await store.put("acme-1/original/b", b"1")
    read, lstat = Path.read_bytes, Path.lstat

    def denied(path: Path) -> bytes:
        if path.name == "a.txt":
            raise PermissionError(errno.EACCES, "Permission denied")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", denied)
    assert list(await store.get_many([KEY, "acme-1/original/b"])) == [None, b"1"]
    assert damaged == [KEY]

    def closed(path: Path) -> os.stat_result:
        if path.name == "a.txt":
            raise PermissionError(errno.EACCES, "Permission denied")
        return lstat(path)

    monkeypatch.setattr(Path, "lstat", closed)
    # the folder may not be entered, so nothing is known of its records
    with pytest.raises(StoreFault):
        await store.get_many([KEY])
    await store.close()


# Faults.


async def faults(store: Store, says: str) -> None:
    """Check that every operation raises StoreFault with this text, readable and without a path."""
    for operation in (
        store.put(KEY, b"1"),
        store.get(KEY),
        store.get_many([KEY]),
        listed(store, ""),
    ):
        with pytest.raises(StoreFault, match=says) as caught:
            await operation
        assert "/" not in caught.value.message
    await store.close()


@pytest.mark.parametrize("path", ["file", "file/store"])
async def test_a_file_in_place_of_the_folder_or_of_one_above_it(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").write_text("a file")
    await faults(open_store(str(tmp_path / path)), "Not a directory")


async def test_a_folder_that_vanishes_is_a_fault_once_and_then_made_again(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"))
    await store.put(KEY, b"1")
    shutil.rmtree(tmp_path / "store")
    with pytest.raises(StoreFault, match="No such file"):
        await store.get(KEY)
    assert await store.get(KEY) is None
    assert await store.put(KEY, b"2")
    shutil.rmtree(tmp_path / "store")
    assert await store.put(KEY, b"3")
    assert await store.get(KEY) == b"3"
    shutil.rmtree(tmp_path / "store")
    assert await listed(store, "") == {}
    assert (tmp_path / "store").stat().st_mode & 0o777 == 0o700
    await store.close()


def test_a_file_size_limit(tmp_path: Path) -> None:
    out, _ = start(SMALL_FILES, tmp_path).communicate(timeout=PATIENCE)
    assert out.splitlines() == ["the store's folder failed: File too large", "None True"]
    assert files(tmp_path) == {"acme-1/original/small"}


@contextmanager
def disk(folder: Path, size: str) -> Iterator[None]:
    """Mount a disk of this size, if mounting is allowed."""
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)], capture_output=True
    )
    if made.returncode:
        pytest.skip("no permission to mount a small disk")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def make_read_only(folder: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)


async def test_a_full_disk(tmp_path: Path) -> None:
    with disk(tmp_path / "disk", "256k"):
        store = open_store(str(tmp_path / "disk"))
        assert await store.put(KEY, b"x" * 100_000)
        with pytest.raises(StoreFull, match="No space left"):
            await store.put("acme-1/original/b", b"x" * 300_000)
        assert await store.get(KEY) == b"x" * 100_000
        assert await store.get("acme-1/original/b") is None
        assert files(tmp_path / "disk") == {KEY}
        assert await store.put("acme-1/original/c", b"x" * 50_000)
        await store.close()


async def test_a_read_only_disk_can_be_read(tmp_path: Path) -> None:
    with disk(tmp_path / "disk", "256k"):
        store = open_store(str(tmp_path / "disk"))
        await store.put(KEY, b"1")
        await store.close()
        make_read_only(tmp_path / "disk")
        store = open_store(str(tmp_path / "disk"))
        assert await store.get(KEY) == b"1"
        assert await store.get("acme-1/original/none") is None
        assert set(await listed(store, "")) == {KEY}
        with pytest.raises(StoreFault, match="Read-only"):
            await store.put("acme-1/original/b", b"1")
        await store.close()


# Any keys.

PART = st.from_regex(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,30}", fullmatch=True)
KEYS = st.dictionaries(
    st.tuples(PART, PART, PART).map("/".join), st.binary(max_size=50), max_size=12
)


def sizes(folder: Folder, prefix: str) -> dict[str, int]:
    return {entry.key: entry.size for page in folder.pages(prefix) for entry in page}


@given(records=KEYS, prefix=st.data())
def test_any_keys_are_kept_apart_and_found(
    tmp_path_factory: pytest.TempPathFactory, records: dict[str, bytes], prefix: st.DataObject
) -> None:
    folder = Folder(tmp_path_factory.mktemp("any"))
    for key, value in records.items():
        assert folder.put(key, value, sync=False)
    assert {key: folder.get(key) for key in records} == records
    assert sizes(folder, "") == {key: len(value) for key, value in records.items()}
    for key in records:
        begins = key[: prefix.draw(st.integers(0, len(key)))]
        assert sizes(folder, begins).keys() == {each for each in records if each.startswith(begins)}


async def test_a_link_to_itself_hides_no_namespace(tmp_path: Path) -> None:
    for namespace in ("a-1", "c-1"):
        Folder(tmp_path).put(f"{namespace}/rounds/k", b"1")
    (tmp_path / "b-1").symlink_to(tmp_path / "b-1")
    store = open_store(str(tmp_path))
    assert set(await listed(store, "")) == {"a-1/rounds/k", "c-1/rounds/k"}
    await store.close()


# What a power failure leaves.


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is synced, as the name of the file or folder, and in between where a file gets its
    name."""
    steps: list[str] = []
    sync, link = os.fsync, os.link

    def synced(file: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{file}"))
        steps.append("sync a new file" if path.parent.name == ".tmp" else f"sync {path.name}")
        sync(file)

    def linked(source: str, target: Path) -> None:
        link(source, target)
        steps.append(f"link {target.name}")

    monkeypatch.setattr("proxy.stores.local.os.fsync", synced)
    monkeypatch.setattr("proxy.stores.local.os.link", linked)
    return steps


def test_a_file_is_durable_before_it_has_its_name_and_then_the_name_is(
    tmp_path: Path, steps: list[str]
) -> None:
    """A name without its bytes would be a damaged record, and a reply may depend on either."""
    folder = Folder(tmp_path / "store")
    folder.put("acme-1/rounds/a", b"1")
    assert steps == [
        f"sync {tmp_path.name}",  # has the new folder `store`
        "sync store",  # has `.tmp`
        "sync a new file",
        "sync store",  # has `acme-1`
        "sync acme-1",
        "link a",
        "sync rounds",
    ]
    steps.clear()
    folder.put("acme-1/rounds/b", b"1")
    assert steps == ["sync a new file", "link b", "sync rounds"]


def test_what_nobody_waits_for_is_durable_once_somebody_does(
    tmp_path: Path, steps: list[str]
) -> None:
    """Thousands of originals of one tenant must not take the disk from what another one waits for.
    A compaction that needs one of them waits for it, whoever wrote it."""
    folder = Folder(tmp_path)
    folder.put(KEY, b"1")
    steps.clear()
    other = "acme-1/original/b.txt"
    assert folder.put(other, b"1", sync=False) and steps == ["link b.txt"]
    assert not folder.put(other, b"1", sync=False) and steps == ["link b.txt"]
    assert not folder.put(other, b"1") and steps == ["link b.txt", "sync b.txt", "sync original"]
