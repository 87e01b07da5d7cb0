"""Redis as a store: one string for each record. The only module that uses redis-py.

- `redis://[USER:PASSWORD@]HOST[:PORT][/DB]`, `rediss://…` for TLS
- `redis+sentinel://[USER:PASSWORD@]HOST[:PORT],HOST[:PORT],…/SERVICE[/DB]`, `rediss+sentinel://…`: the master that the
  sentinels name. `sentinel_username` and `sentinel_password` in the query are for the sentinels themselves.

The query takes redis-py's own options (`socket_timeout=5`, `ssl_ca_certs=…`) and `prefix`, which begins every key
(default `offload:`). So a user whose ACL allows `~offload:*` is enough. Redis Cluster is not supported.

Records expire by Redis' own clock, after their tenant's retention. Redis' settings decide how durable a put is
(`appendonly yes`) and what happens when Redis is full: with `noeviction` puts fail, and with `volatile-ttl` it deletes
the records that are closest to expiring.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from urllib.parse import SplitResult, parse_qsl, urlencode, urlsplit

from msgspec import convert
from redis.asyncio import Redis
from redis.asyncio.connection import ConnectionPool, parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import ReadOnlyError, RedisError

from proxy.errors import StoreFault, UserMistake
from proxy.stores.base import Damaged, Entry, Retention, lifetime
from proxy.stores.keys import checked, checked_prefix, is_key, namespace_of
from proxy.stores.turns import Turns

PREFIX = "offload:"
"""Begins every key, unless the URL sets another prefix."""

CONNECTIONS = 32
"""Most operations at once in one process, so that a burst of puts does not open a connection for each."""

BATCH = 500
"""Roughly how many keys a listing covers in one round trip."""

SENTINEL_PORT = 26379

_CODE = re.compile(r"[A-Z]{2,20}")

WRONG_TYPE = "WRONGTYPE"
"""Redis' error code for a key whose value is not a string, such as a list."""

GONE = -2
"""The reply of PTTL for a key that does not exist."""


class RedisStore:
    """Records as Redis strings. `close` also closes the clients in `others`."""

    def __init__(
        self,
        client: Redis,
        retention: Retention,
        *,
        damaged: Damaged = lambda key: None,
        prefix: str = PREFIX,
        others: Sequence[Redis] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._client: Any = client  # its types include decoded replies, which this class never requests
        self._retention = retention
        self._damaged = damaged
        self._prefix = prefix
        self._others = others
        self._clock = clock
        self._slots = Turns(CONNECTIONS)

    async def put(self, key: str, value: bytes) -> bool:
        """Store the value if the key is absent, and renew the record's time to live, in one round trip."""
        name = self._name(key)
        kept = _milliseconds(lifetime(key, self._retention))
        async with self._slots.slot(namespace_of(key)), self._writing():
            pipe = self._client.pipeline(transaction=False)
            pipe.set(name, value, nx=True, px=kept)
            pipe.persist(name) if kept is None else pipe.pexpire(name, kept)
            # If redis-py raised the errors itself, their texts would contain the command with all its content.
            created, _ = _answered(await pipe.execute(raise_on_error=False))
        return bool(created)

    async def get(self, key: str) -> bytes | None:
        """Return the value, or None."""
        [value] = await self.get_many([key])
        return value

    async def get_many(self, keys: Sequence[str]) -> Sequence[bytes | None]:
        """Return the values in the order of `keys`, with one MGET."""
        if not keys:
            return []
        names = [self._name(key) for key in keys]
        async with self._slots.slot(namespace_of(keys[0])):
            with _faults():
                values = convert(await self._client.mget(names), list[bytes | None])
                return [value for _, value in zip(names, values, strict=True)]

    async def list(self, prefix: str) -> AsyncGenerator[Entry, None]:
        """Yield every record whose key begins with `prefix`, using SCAN, which does not block other clients.

        Ends with a StoreFault if a cursor comes back, as nothing new would come.
        """
        seen: set[bytes] = set()  # SCAN may return a name twice while Redis resizes its table
        cursors: set[int] = set()
        stopped = _cancellations()
        pattern = re.sub(r"([*?\[\]\\])", r"\\\1", self._prefix + checked_prefix(prefix)) + "*"
        cursor = None
        while cursor != 0:
            with _faults():
                page = await self._client.scan(cursor or 0, match=pattern, count=BATCH)
                cursor, names = convert(page, tuple[int, list[bytes]])
            if _cancellations() > stopped:  # `asyncio.wait_for` within redis-py loses one if a reply comes at once
                raise asyncio.CancelledError
            if cursor in cursors:
                raise StoreFault("Redis failed: its SCAN goes round in circles")
            cursors.add(cursor)
            for entry in await self._entries(set(names) - seen):
                yield entry
            seen.update(names)

    async def delete(self, key: str) -> None:
        """Delete the record."""
        name = self._name(key)
        async with self._writing():
            await self._client.unlink(name)

    async def close(self) -> None:
        """Close every connection."""
        with _faults():
            for client in (self._client, *self._others):
                await client.aclose()

    @asynccontextmanager
    async def _writing(self) -> AsyncIterator[None]:
        """Translate errors, and have the next operation connect anew if Redis only reads: after a failover its address
        leads to another master, while connections still lead to the old one."""
        with _faults():
            try:
                yield
            except ReadOnlyError:
                await self._client.connection_pool.disconnect(inuse_connections=False)
                raise

    def _name(self, key: str) -> str:
        return self._prefix + checked(key)

    def _key(self, name: bytes) -> str:
        return name.decode(errors="replace").removeprefix(self._prefix)

    async def _entries(self, names: Iterable[bytes]) -> Sequence[Entry]:
        names = [name for name in names if is_key(self._key(name))]
        with _faults():
            pipe = self._client.pipeline(transaction=False)
            for name in names:
                pipe.strlen(name)
                pipe.pttl(name)
            answers = await pipe.execute(raise_on_error=False)
            wrong = {name for name, size in zip(names, answers[::2], strict=True) if _code(size) == WRONG_TYPE}
            for name in wrong:
                self._damaged(self._key(name))
            rows = [row for row in zip(names, answers[::2], answers[1::2], strict=True) if row[0] not in wrong]
            return [
                self._entry(name, *convert(_answered(row), tuple[int, int])) for name, *row in rows if row[1] != GONE
            ]

    def _entry(self, name: bytes, size: int, left: int) -> Entry:
        """Return the entry of a record with `left` milliseconds to live.

        Redis keeps no time of change, so this is computed from the retention and `left`. If either is unknown, the
        record counts as put now, so that it is not deleted for its age.
        """
        key = self._key(name)
        kept = lifetime(key, self._retention)
        known = left >= 0 and kept is not None
        age = max(0.0, (kept or 0.0) - left / 1000) if known else 0.0
        return Entry(key, size, self._clock() - age)


def _cancellations() -> int:
    """Return how often the current task was asked to stop."""
    task = asyncio.current_task()
    return task.cancelling() if task else 0


def _answered(answers: Sequence[Any]) -> Sequence[Any]:
    """Return the answers of a pipeline, or raise the first one that is an error."""
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers


def _milliseconds(seconds: float | None) -> int | None:
    return None if seconds is None else max(1, int(seconds * 1000))


@contextmanager
def _faults() -> Iterator[None]:
    try:
        yield
    except StoreFault:
        raise
    except Exception as error:  # noqa: BLE001  (redis-py's parser can raise any class for a damaged reply)
        # Without the error's text, which can contain the data we sent. `from error` would show it in a traceback.
        raise StoreFault(f"Redis failed: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    """Return the error's class and Redis' code or the system's text for it, such as `ResponseError WRONGTYPE`."""
    cause: BaseException | None = error
    while cause and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    said = os.strerror(cause.errno) if isinstance(cause, OSError) and cause.errno else ""
    return " ".join(filter(None, (type(error).__name__, _code(error), said)))


def _code(error: object) -> str:
    """Return the word in capitals that begins a Redis error, or an empty string for anything else."""
    if not isinstance(error, RedisError):
        return ""
    code = str(getattr(error, "status_code", None) or str(error).partition(" ")[0])
    return code if _CODE.fullmatch(code) else ""


def open_redis(url: str, retention: Retention, damaged: Damaged = lambda key: None) -> RedisStore:
    """Return the store at a URL without connecting. Raises UserMistake if redis-py does not understand the URL."""
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query))
    prefix = options.pop("prefix", PREFIX)
    plain = parts._replace(query=urlencode(options))
    clients = _sentinel if parts.scheme.endswith("+sentinel") else _single
    try:
        client, *others = clients(plain)
        # This does not connect, but it rejects unknown options now and not at the first request.
        client.connection_pool.make_connection()  # type: ignore[no-untyped-call]
    except (ValueError, TypeError, RedisError) as error:
        raise UserMistake(f"the store's URL: {error}") from error
    return RedisStore(client, retention, damaged=damaged, prefix=prefix, others=others)


def _defaults() -> dict[str, Any]:
    """Return the default options: timeouts in seconds, and one immediate retry in case a connection died."""
    return {"socket_timeout": 2.0, "socket_connect_timeout": 2.0, "retry": Retry(NoBackoff(), 1)}


def _single(parts: SplitResult) -> list[Redis]:
    return [Redis.from_pool(ConnectionPool.from_url(parts.geturl(), **_defaults()))]


def _sentinel(parts: SplitResult) -> list[Redis]:
    """Return the master's client, followed by those of the sentinels. Raises ValueError if the URL has no service."""
    user, _, hosts = parts.netloc.rpartition("@")
    service, _, database = parts.path.strip("/").partition("/")
    if not service:
        raise ValueError("redis+sentinel:// needs the service's name after the hosts, as in //HOST,HOST/mymaster")
    # redis-py can parse options and passwords, but not URLs of this kind, so give it one that it knows.
    options = dict(parse_url(f"redis://{user}@sentinel/{database}?{parts.query}"))
    own = {name: options.pop(f"sentinel_{name}", None) for name in ("username", "password")}
    del options["host"]
    tls = parts.scheme == "rediss+sentinel"
    sentinels = Sentinel(  # type: ignore[no-untyped-call]
        [_address(host) for host in hosts.split(",")],
        sentinel_kwargs=_defaults() | own | {"ssl": tls},
        **_defaults() | options | {"ssl": tls},
    )
    return [sentinels.master_for(service), *sentinels.sentinels]


def _address(host: str) -> tuple[str, int]:
    parts = urlsplit(f"//{host}")
    return parts.hostname or "localhost", parts.port or SENTINEL_PORT
