"""An object store as a store: one object for each record, in S3, Google Cloud Storage or Azure.

This is the only module that uses obstore. The URL is `s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX` or
`az://CONTAINER/PREFIX`. The credentials need access to the prefix only. Credentials and endpoints come from each
ecosystem's usual variables (`AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT_URL`, `GOOGLE_APPLICATION_CREDENTIALS`,
`AZURE_STORAGE_ACCOUNT_NAME`, …). Settings that are not secret can be in the URL's query under obstore's names
(`?region=eu-central-1&endpoint=http://127.0.0.1:9000`).

The store creates records with `If-None-Match: *` or its equivalent. Do not use a server that ignores this or accepts
two puts at once, because the last writer would win there. Some imitations of S3 do, such as SeaweedFS before its pull
request 8801. Objects have no time of last use, so a record's age counts from its first put. Prefer a lifecycle rule on
the prefix to the sweep.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qsl, urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import from_url

from proxy.errors import StoreFault, UserMistake
from proxy.stores import Entry, checked, checked_prefix, is_key, namespace_of
from proxy.threads import Turns

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig
    from obstore.store import ObjectStore as Engine

T = TypeVar("T")

CONCURRENCY = 32
"""Most operations at once in one process."""

HAND_OVER = 0.1
"""Seconds that obstore's threads have at the end to let go of results they handed over."""

UNDECIDED = frozenset(("ConditionalRequestConflict", "OperationAborted"))
"""S3's codes for a put that met another operation and is to be sent again. obstore takes them for "exists already"."""

NO_STORE = frozenset(("NoSuchBucket", "ContainerNotFound"))
"""The codes of a missing bucket, which says nothing about its records. obstore takes it for a missing object."""

CLIENT: ClientConfig = {
    "allow_http": True,  # endpoints use https unless the operator configured another
    "connect_timeout": timedelta(seconds=2),
    "timeout": timedelta(seconds=10),
}
RETRY: RetryConfig = {"max_retries": 1, "retry_timeout": timedelta(seconds=5)}
"""obstore retries ten times within three minutes by default, but no request waits that long for a store."""


class ObjectStore:
    """Records as objects.

    Every operation that has begun is a task of its own, which continues if its caller is cancelled. obstore answers
    through the event loop, and if that has been closed, the interpreter can abort. `close` waits for these tasks, at
    most as long as `CLIENT` and `RETRY` let an operation take.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._under_way: set[asyncio.Task[Any]] = set()
        self._turns = Turns(CONCURRENCY)

    async def put(self, key: str, value: bytes) -> bool:
        """Create the object in one request, whatever its size: a multipart upload would not be conditional."""
        return await self._run(self._put(checked(key), value), key)

    async def get(self, key: str) -> bytes | None:
        return await self._run(self._get(checked(key)), key)

    async def get_many(self, keys: Sequence[str]) -> Sequence[bytes | None]:
        wanted = [checked(key) for key in keys]
        return await asyncio.gather(*(self.get(key) for key in wanted))

    async def list(self, prefix: str) -> AsyncGenerator[Entry, None]:
        """The engine lists only whole folders, so this method compares the rest of the prefix itself."""
        folder = checked_prefix(prefix).rpartition("/")[0]
        pages = obstore.list(self._engine, folder or None, chunk_size=1000)
        while page := await self._run(_next(pages), prefix):
            for found in page:
                if found["path"].startswith(prefix) and is_key(found["path"]):
                    yield Entry(found["path"], found["size"], found["last_modified"].timestamp())

    async def delete(self, *keys: str) -> None:
        wanted = [checked(key) for key in keys]
        await asyncio.gather(*(self._run(self._delete(key), key) for key in wanted))

    async def close(self) -> None:
        """Wait for running operations, and for obstore's threads to be done with them."""
        await asyncio.gather(*self._under_way, return_exceptions=True)
        # A thread that has handed over its result still drops objects of Python. If the interpreter ends meanwhile, the
        # process aborts, and there is nothing to wait for but time.
        await asyncio.sleep(HAND_OVER)

    async def _put(self, key: str, value: bytes, *, again: bool = True) -> bool:
        try:
            await obstore.put_async(self._engine, key, value, mode="create", use_multipart=False)
        except AlreadyExistsError as error:
            if UNDECIDED.isdisjoint(_codes(error)):
                return False
            if not again:
                raise
            return await self._put(key, value, again=False)
        return True

    async def _get(self, key: str) -> bytes | None:
        try:
            found = await obstore.get_async(self._engine, key)
            return bytes(await found.bytes_async())
        except FileNotFoundError as error:
            if NO_STORE.isdisjoint(_codes(error)):
                return None
            raise

    async def _delete(self, key: str) -> None:
        with suppress(FileNotFoundError):  # S3 reports no error for a missing object, the others do
            await obstore.delete_async(self._engine, key)

    async def _run(self, work: Coroutine[Any, Any, T], key: str) -> T:
        """Do this work in turn. It is never begun if the caller is cancelled before."""
        try:
            turn = await self._turns.take(namespace_of(key))
        except asyncio.CancelledError:
            work.close()
            raise

        async def begun() -> T:
            try:
                return await work
            except Exception as error:  # noqa: BLE001  (obstore raises others for a reply that it cannot read)
                # Not `from error`: a traceback would show its text, which can contain signed addresses and our data.
                reason = ", ".join(dict.fromkeys((type(error).__name__, *_codes(error))))
                raise StoreFault(f"the object store failed: {reason}") from None
            finally:
                self._turns.give_back(turn)

        task = asyncio.create_task(begun())
        self._under_way.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._under_way.discard(task)
        if not task.cancelled():
            task.exception()  # or asyncio logs it as a bug, if the caller has gone


async def _next(pages: Any) -> Sequence[Any]:
    """Return the next page of a listing, empty at the end: obstore's iterators know no `anext` with a default."""
    try:
        page: Sequence[Any] = await anext(pages)
    except StopAsyncIteration:
        return ()
    return page


_TELLING = re.compile(
    r"status code: (\d{3} ?[A-Za-z ]{0,40})|<Code>(\w{1,60})</Code>|(connection refused|timed out|dns error)", re.I
)
"""The parts of an error's text that come from the server or the network and never contain our data."""


def _codes(error: Exception) -> list[str]:
    """Return the safe parts of an error's text, such as `403 Forbidden` and `SignatureDoesNotMatch`."""
    return [next(filter(None, match)).strip() for match in _TELLING.findall(str(error))]


def open_objects(url: str) -> ObjectStore:
    """Return the store at a URL without connecting. Raises UserMistake if obstore does not understand the URL."""
    parts = urlsplit(url)
    config: Any = dict(parse_qsl(parts.query))
    try:
        engine = from_url(parts._replace(query="").geturl(), config=config, client_options=CLIENT, retry_config=RETRY)
    except (BaseError, ValueError) as error:
        # One line of bounded length, without obstore's internal dump after its first blank line.
        said = " ".join(str(error).partition("\n\n")[0].split())[:500]
        raise UserMistake(f"the store's URL: {said}") from error
    return ObjectStore(engine)
