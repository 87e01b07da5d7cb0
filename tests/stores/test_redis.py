from __future__ import annotations

import asyncio
import signal
import time
import traceback
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("redis", reason="the extra redis is not installed")

from redis.asyncio import Redis

from proxy.errors import StoreFault, StoreFull, UserMistake
from proxy.stores import Store, open_store
from tests.stores.contract import StoreContract, listed
from tests.stores.engines import Process, redis_server


def url(process: Process, options: str = "") -> str:
    return f"redis://127.0.0.1:{process.port}/0?{options}"


class TestContract(StoreContract):
    """With a prefix of its own, which has characters that SCAN would interpret."""

    @pytest.fixture(autouse=True)
    def engine(self, redis_process: Process) -> None:
        self.process = redis_process

    async def open(self) -> Store:
        return open_store(url(self.process, "prefix=of%5Bf%5D*:"), lambda namespace: 3600.0)


async def test_records_expire_after_their_namespaces_retention(redis_process: Process) -> None:
    """What is put again has its whole time to live again, and age is told from what is left of
    it."""
    kept = {"short-1": 60.0, "long-1": 3600.0}
    store = open_store(url(redis_process), kept.get)

    async def age(namespace: str) -> float:
        [entry] = (await listed(store, f"{namespace}/")).values()
        return time.time() - entry.modified

    async with Redis(port=redis_process.port) as client:
        left = {}
        for namespace in ("short-1", "long-1", "ever-1"):
            await store.put(f"{namespace}/round/k", b"1")
            left[namespace] = await client.pttl(f"offload:{{{namespace}}}/round/k")
        assert 0 < left["short-1"] <= 60_000 < left["long-1"] <= 3_600_000
        assert left["ever-1"] == -1, "no time to live"
        assert await client.pexpire("offload:{long-1}/round/k", 600_000)
        assert await age("long-1") == pytest.approx(3000, abs=60)
        assert await store.put("long-1/round/k", b"2") is False
        assert await client.pttl("offload:{long-1}/round/k") > 3_000_000
    kept["long-1"] = 7200.0
    assert await age("long-1") == pytest.approx(3600, abs=60)
    assert await age("ever-1") == pytest.approx(0, abs=60)
    await store.close()


async def test_strangers_in_the_same_database_are_not_seen(redis_process: Process) -> None:
    ours, theirs = open_store(url(redis_process)), open_store(url(redis_process, "prefix=other:"))
    await ours.put("apart-1/round/k", b"ours")
    assert await theirs.get("apart-1/round/k") is None
    assert await listed(theirs, "") == {}
    await ours.close()
    await theirs.close()


async def test_an_acl_user_of_the_prefix_is_enough(tmp_path: Path) -> None:
    rules = "--user records on >secret ~offload:* +@all -@dangerous --user default off"
    with redis_server(tmp_path, *rules.split()) as process:
        allowed = open_store(f"redis://records:secret@127.0.0.1:{process.port}/0")
        assert await allowed.put("a-1/round/k", b"1")
        assert set(await listed(allowed, "")) == {"a-1/round/k"}
        await allowed.close()
        for options in ("redis://records:wrong@", "redis://"):
            refused = open_store(f"{options}127.0.0.1:{process.port}/0")
            with pytest.raises(StoreFault, match=r"WRONGPASS|NOAUTH"):
                await refused.get("a-1/round/k")
            await refused.close()
        elsewhere = open_store(f"redis://records:secret@127.0.0.1:{process.port}/0?prefix=x:")
        with pytest.raises(StoreFault, match="NoPermissionError"):
            await elsewhere.put("a-1/round/k", b"1")
        await elsewhere.close()


SECRET = "my-password-is-hunter2"


async def refused(
    work: Coroutine[Any, Any, object], *words: str, kind: type[StoreFault] = StoreFault
) -> None:
    """Check that a StoreFault of this kind with these words is raised, and shows nothing that we
    sent."""
    with pytest.raises(StoreFault) as caught:
        await work
    shown = "".join(traceback.format_exception(caught.value))
    assert type(caught.value) is kind
    assert SECRET not in shown and "secret-1" not in shown, shown
    assert all(word in caught.value.message for word in words), caught.value.message


async def test_faults_do_not_show_what_we_sent(tmp_path: Path) -> None:
    rules = "--user reader on >pw ~offload:* +get +mget --maxmemory 1 --maxmemory-policy noeviction"
    with redis_server(tmp_path, *rules.split()) as process:
        store = open_store(url(process))
        await refused(
            store.put("secret-1/originals/a", SECRET.encode()), "OutOfMemoryError", kind=StoreFull
        )
        await store.close()
        reader = open_store(f"redis://reader:pw@127.0.0.1:{process.port}/0")
        await refused(reader.put("secret-1/originals/a", SECRET.encode()), "NoPermissionError")
        await refused(reader.delete("secret-1/originals/a"), "NoPermissionError")
        await refused(listed(reader, "secret-1/"), "NoPermissionError")
        await reader.close()
        unknown = open_store(f"redis://{SECRET}:{SECRET}@127.0.0.1:{process.port}/0")
        await refused(unknown.put("secret-1/originals/a", SECRET.encode()), "AuthenticationError")
        await unknown.close()
        process.stop()
        gone = open_store(url(process))
        await refused(
            gone.put("secret-1/originals/a", SECRET.encode()), "ConnectionError", "refused"
        )
        await gone.close()


async def test_keys_of_a_wrong_type_are_absent_and_hide_no_others(redis_process: Process) -> None:
    store = open_store(url(redis_process))
    await store.put("wrong-1/files/a", b"1")
    async with Redis(port=redis_process.port) as client:
        await client.rpush("offload:{wrong-1}/files/b", "one")
    assert set(await listed(store, "wrong-1/")) == {"wrong-1/files/a"}
    assert list(await store.get_many([f"wrong-1/files/{name}" for name in "abc"])) == [
        b"1",
        None,
        None,
    ]
    await store.close()


async def test_an_address_that_moves_to_a_new_master_is_followed(tmp_path: Path) -> None:
    """The old master only reads from then on, and its connections stay open."""
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
    with redis_server(tmp_path / "old") as old, redis_server(tmp_path / "new") as new:
        leads_to = old.port

        async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there, away = await asyncio.open_connection("127.0.0.1", leads_to)
            await asyncio.gather(_copied(reader, away), _copied(there, writer))

        address = await asyncio.start_server(forward, "127.0.0.1", 0)
        store = open_store(f"redis://127.0.0.1:{address.sockets[0].getsockname()[1]}/0")
        await asyncio.gather(*(store.put(f"a-1/round/{number}", b"1") for number in range(9)))
        leads_to = new.port
        master = Redis(port=old.port)
        await master.replicaof("127.0.0.1", new.port)
        await master.aclose()
        assert await store.put("a-1/round/k", b"1")
        await asyncio.gather(*(store.delete(f"a-1/round/{number}") for number in range(9)))
        await store.close()
        address.close()


async def _copied(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
    writer.close()


async def test_a_frozen_server_is_a_fault_in_time(tmp_path: Path) -> None:
    with redis_server(tmp_path) as process:
        patient, store = open_store(url(process)), open_store(url(process, "socket_timeout=0.1"))
        await patient.put("a-1/round/k", b"1")
        process.signal(signal.SIGSTOP)
        with pytest.raises(StoreFault, match=r"[Tt]imeout"):
            await store.get("a-1/round/k")
        process.signal(signal.SIGCONT)
        assert await patient.get("a-1/round/k") == b"1"
        await patient.close()
        await store.close()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("redis://h/0?nonsense=1", "nonsense"),
        ("redis://h/0?socket_timeout=soon", "socket_timeout"),
        ("redis://h:port/0", r"[Pp]ort"),
    ],
)
def test_a_wrong_url_is_refused_when_it_is_opened(wrong: str, says: str) -> None:
    with pytest.raises(UserMistake, match=says):
        open_store(wrong)


ODD = {
    "an integer": b":1\r\n",
    "no integer": b":abc\r\n",
    "a string in place of a list": b"+OK\r\n",
    "too few values": b"*1\r\n$1\r\nx\r\n",
    "too many values": b"*4\r\n$1\r\nx\r\n$1\r\nx\r\n$1\r\nx\r\n$1\r\nx\r\n",
    "errors among the values": b"*2\r\n-ERR x\r\n-ERR y\r\n",
    "lists among the values": b"*2\r\n*0\r\n*0\r\n",
    "a negative length": b"$-5\r\nx\r\n",
    "a redirection to nowhere": b"-MOVED\r\n",
    "an unknown type": b"\x00\r\n",
    "a map that no dict can be": b"%1\r\n*0\r\n+x\r\n",
    "half a value": b"$100\r\nx",
}


async def _odd(reply: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Speak Redis' protocol until the connection is set up, and then answer every command with
    `reply`."""
    while (head := await reader.readline()).startswith(b"*"):
        words = [
            (await reader.readline(), await reader.readline())[1].strip()
            for _ in range(int(head[1:]))
        ]
        greeting = {
            b"HELLO": b"%1\r\n+proto\r\n:3\r\n",
            b"CLIENT": b"+OK\r\n",
            b"SELECT": b"+OK\r\n",
        }
        writer.write(greeting.get(words[0], reply))
        if words[0] not in greeting:
            break
    writer.close()


async def meets(reply: bytes, says: str) -> None:
    async with await asyncio.start_server(
        lambda *streams: _odd(reply, *streams), "127.0.0.1", 0
    ) as server:
        store = open_store(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0")
        for work in (store.get_many(["a-1/rounds/k", "a-1/rounds/l"]), listed(store, "a-1/")):
            with pytest.raises(StoreFault, match=says):
                await work
        await store.close()


@pytest.mark.parametrize("reply", ODD.values(), ids=ODD)
async def test_odd_replies_are_faults_of_the_store(reply: bytes) -> None:
    await meets(reply, "Redis failed")


async def test_a_cluster_is_not_taken_for_a_single_server() -> None:
    await meets(
        b"-MOVED 3999 127.0.0.1:6381\r\n", "this is a Redis Cluster, and a single server is needed"
    )
