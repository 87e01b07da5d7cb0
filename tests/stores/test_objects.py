from __future__ import annotations

import asyncio
import re
import traceback
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("obstore", reason="the extra objects is not installed")

from obstore.store import MemoryStore

from proxy.errors import StoreFault, UserMistake
from proxy.stores import Store, open_store
from proxy.stores.objects import Objects
from tests.clock import until
from tests.stores.contract import StoreContract, listed, swept
from tests.stores.engines import BUCKET, S3_KEYS, Process, s3_server, s3_url


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in S3_KEYS.items():
        monkeypatch.setenv(name, value)


class TestContract(StoreContract):
    # SeaweedFS lets those who race for one key try again a second later (its pull request 8801)
    racers = 4

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
        return Store(Objects(self.memory))


async def test_the_usual_variables_are_enough(
    s3_process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{s3_process.port}")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    store = open_store(f"s3://{BUCKET}/by-variable")
    assert await store.put("a-1/round/k", b"1")
    assert await store.get("a-1/round/k") == b"1"
    await store.close()


async def test_another_prefix_is_another_store(s3_process: Process) -> None:
    one, other = (
        open_store(s3_url(s3_process.port, "one")),
        open_store(s3_url(s3_process.port, "other")),
    )
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
        assert not [
            word for word in ("hunter2", "secret-1", "test-key", "127.0.0.1") if word in shown
        ], shown
        assert "\n" not in caught.value.message
    await store.close()


async def test_objects_that_are_no_records_are_passed_over() -> None:
    engine = MemoryStore()
    store = Store(Objects(engine))
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
    """Return a server that gives one reply after the other, and then the last one for ever, and a
    store in it."""
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


async def test_a_put_that_met_another_operation_is_a_fault() -> None:
    """Taken for "exists already", the record would be lost, because nobody would put it again."""
    conflict = ("409 Conflict", refusal("ConditionalRequestConflict"))
    exists = ("412 Precondition Failed", refusal("PreconditionFailed"))
    server, store = await answered(conflict, exists, ("200 OK", ""))
    async with server:
        with pytest.raises(StoreFault, match="ConditionalRequestConflict"):
            await store.put("a-1/round/k", b"1")
        assert await store.put("a-1/round/k", b"1") is False
        assert await store.put("a-1/round/k", b"1") is True
        await store.close()


async def test_a_reply_that_cannot_be_read_is_a_fault() -> None:
    far = "<Contents><Key>proxy/records/a-1/round/k</Key><Size>1</Size><LastModified>+262000-11-22T10:00:00Z"
    page = f"<ListBucketResult>{far}</LastModified><ETag>e</ETag></Contents></ListBucketResult>"
    server, store = await answered(("200 OK", page))
    async with server:
        with pytest.raises(StoreFault, match="object store failed"):
            await listed(store, "a-1/round/")
        await store.close()


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
