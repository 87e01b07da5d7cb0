from __future__ import annotations

import asyncio
import gc
import re
import subprocess
import sys
import traceback
from contextlib import suppress
from pathlib import Path

import pytest
from obstore.store import MemoryStore

from proxy.errors import StoreFault, UserMistake
from proxy.stores import Store, open_store
from proxy.stores import objects as objects_module
from proxy.stores.objects import ObjectStore
from tests.clock import turns, until
from tests.stores.contract import StoreContract, listed, swept
from tests.stores.engines import BUCKET, S3_KEYS, Process, s3_server, s3_url


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in S3_KEYS.items():
        monkeypatch.setenv(name, value)


class TestContract(StoreContract):
    racers = 4  # SeaweedFS lets those who race for one key try again a second later (its pull request 8801)

    @pytest.fixture(autouse=True)
    def engine(self, s3_process: Process) -> None:
        self.process = s3_process

    async def open(self) -> Store:
        return open_store(s3_url(self.process.port))


class TestContractOfAnEngineThatMindsDeletingNothing(StoreContract):
    """Google's and Azure's do. This uses obstore's own store in memory, which needs no server."""

    @pytest.fixture(autouse=True)
    def engine(self) -> None:
        self.memory = MemoryStore()

    async def open(self) -> Store:
        return ObjectStore(self.memory)


async def test_the_usual_variables_are_enough(s3_process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{s3_process.port}")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    store = open_store(f"s3://{BUCKET}/by-variable")
    assert await store.put("a-1/round/k", b"1")
    assert await store.get("a-1/round/k") == b"1"
    await store.close()


async def test_another_prefix_is_another_store(s3_process: Process) -> None:
    one, other = open_store(s3_url(s3_process.port, "one")), open_store(s3_url(s3_process.port, "other"))
    assert await one.put("a-1/round/k", b"1")
    assert await other.get("a-1/round/k") is None
    assert await listed(other, "") == {}
    await one.close()
    await other.close()


async def test_wrong_credentials_are_a_fault_that_does_not_show_what_we_sent(
    s3_process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    store = open_store(s3_url(s3_process.port))
    key = "secret-1/originals/a"
    for work in (store.put(key, b"hunter2"), store.get(key), listed(store, "")):
        with pytest.raises(StoreFault, match=r"403.*SignatureDoesNotMatch") as caught:
            await work
        shown = "".join(traceback.format_exception(caught.value))
        assert not [word for word in ("hunter2", "secret-1", "test-key", "127.0.0.1") if word in shown], shown
        assert "\n" not in caught.value.message
    await store.close()


async def test_objects_that_are_no_records_are_passed_over() -> None:
    engine = MemoryStore()
    store = ObjectStore(engine)
    await store.put("a-1/round/k", b"1")
    for name in ("loose", "a-1/loose", "a-1/round/deeper/k", "a-1/round/k~é"):
        engine.put(name, b"not ours")
    assert set(await listed(store, "")) == {"a-1/round/k"}
    assert await swept(store, "a-1", later=120) == 1
    await store.close()


async def test_no_such_bucket_is_a_fault_and_not_an_absence(s3_process: Process) -> None:
    store = open_store(s3_url(s3_process.port).replace(BUCKET, "nobodys-bucket"))
    with pytest.raises(StoreFault):
        await store.put("a-1/round/k", b"1")
    with pytest.raises(StoreFault, match="NoSuchBucket"):
        await store.get("a-1/round/k")
    await store.close()


async def answered(*replies: tuple[str, str]) -> tuple[asyncio.Server, Store]:
    """Return a server that gives one reply after the other, and then the last one for ever, and a store in it."""
    left = list(replies)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
            await reader.readexactly(int(length[1]) if length else 0)
            status, body = left.pop(0) if len(left) > 1 else left[0]
            headers = f'ETag: "e"\r\nConnection: close\r\nContent-Length: {len(body)}'
            writer.write(f"HTTP/1.1 {status}\r\n{headers}\r\n\r\n{body}".encode())
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    return server, open_store(s3_url(server.sockets[0].getsockname()[1]))


def refusal(code: str) -> str:
    return f"<Error><Code>{code}</Code></Error>"


async def test_a_put_that_met_another_operation_is_sent_again() -> None:
    """Taken for "exists already", the record would be lost, because nobody would put it again."""
    conflict = ("409 Conflict", refusal("ConditionalRequestConflict"))
    exists = ("412 Precondition Failed", refusal("PreconditionFailed"))
    for after, created in ((("200 OK", ""), True), (exists, False), (conflict, None)):
        server, store = await answered(conflict, after)
        async with server:
            if created is None:
                with pytest.raises(StoreFault, match="ConditionalRequestConflict"):
                    await store.put("a-1/round/k", b"1")
            else:
                assert await store.put("a-1/round/k", b"1") is created
            await store.close()


async def test_a_reply_that_cannot_be_read_is_a_fault() -> None:
    far = "<Contents><Key>proxy/records/a-1/round/k</Key><Size>1</Size><LastModified>+262000-11-22T10:00:00Z"
    page = f"<ListBucketResult>{far}</LastModified><ETag>e</ETag></Contents></ListBucketResult>"
    server, store = await answered(("200 OK", page))
    async with server:
        with pytest.raises(StoreFault, match="object store failed"):
            await listed(store, "a-1/round/")
        await store.close()


async def test_a_fault_after_its_caller_has_gone_is_no_bug() -> None:
    class Failing(ObjectStore):
        async def _get(self, key: str) -> bytes | None:
            await go_on.wait()
            raise OSError("no")

    go_on, logged = asyncio.Event(), list[object]()
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: logged.append(context["message"]))
    store = Failing(MemoryStore())
    asking = asyncio.create_task(store.get("a-1/round/k"))
    await turns()
    asking.cancel()
    await asyncio.wait([asking])
    go_on.set()
    await turns()
    gc.collect()
    assert logged == []


async def test_it_comes_back_after_a_restart(tmp_path: Path) -> None:
    with s3_server(tmp_path) as process:
        store = open_store(s3_url(process.port))
        await store.put("a-1/round/k", b"1")
        process.stop()
        with pytest.raises(StoreFault, match="object store failed"):
            await store.get("a-1/round/k")
        process.start()

        async def back() -> bool:  # it listens again before all its parts work
            with suppress(StoreFault):
                return await store.get("a-1/round/k") == b"1"
            return False

        await until(back)
        await store.close()


async def test_close_waits_for_what_callers_gave_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise obstore's late answers would find the loop closed. Writes that have begun are stored, too; no others
    wait on without their callers, or a slow store would have ever more of them."""
    monkeypatch.setattr(objects_module, "CONCURRENCY", 8)
    begun = answered = 0
    go_on = asyncio.Event()

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal begun, answered
        await reader.readuntil(b"\r\n\r\n")
        begun += 1
        await go_on.wait()
        writer.write(b'HTTP/1.1 200 OK\r\nETag: "e"\r\nContent-Length: 0\r\n\r\n')
        await writer.drain()
        answered += 1

    async with await asyncio.start_server(slow, "127.0.0.1", 0) as server:
        store = open_store(s3_url(server.sockets[0].getsockname()[1]))
        tasks = [asyncio.create_task(store.put(f"a-1/original/{number}", b"1")) for number in range(20)]
        await until(lambda: begun == 7)
        for task in tasks:
            task.cancel()
        assert all(
            isinstance(each, asyncio.CancelledError) for each in await asyncio.gather(*tasks, return_exceptions=True)
        )
        assert answered == 0
        closing = asyncio.create_task(store.close())
        await turns()
        assert not closing.done()
        go_on.set()
        await closing
        assert answered == 7, "a tenant gets all places but one"


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("s3://bucket/x?nonsense=1", "nonsense"),
        ("s3:///x", "s3:/"),
        ("az://container/x", "Account"),
    ],
)
def test_a_wrong_url_is_refused_when_it_is_opened(wrong: str, says: str) -> None:
    with pytest.raises(UserMistake, match=says) as caught:
        open_store(wrong)
    assert "\n" not in str(caught.value)


def test_gcs_and_azure_open_by_their_usual_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    for good in ("gs://bucket/prefix", "az://container/prefix"):
        open_store(good)


LEAVING = """
import asyncio, sys, threading, time
from obstore.store import MemoryStore
from proxy.stores.objects import ObjectStore

wake = asyncio.SelectorEventLoop._write_to_self

def woken(loop):
    wake(loop)
    if threading.current_thread() is not threading.main_thread():
        time.sleep(0.02)  # as if the system ran the main thread first

async def work():
    store = ObjectStore(MemoryStore())
    assert await store.get("a/originals/b") is None
    await store.close()

asyncio.SelectorEventLoop._write_to_self = woken
asyncio.run(work())
"""


def test_a_process_ends_well_after_its_last_operation() -> None:
    for _ in range(3):  # each of them aborted, nine times of ten
        subprocess.run([sys.executable, "-c", LEAVING], check=True)
