"""Redis as a store: one string for each record. The only module that uses redis-py.

- `redis://[USER:PASSWORD@]HOST[:PORT][/DB]`, `rediss://…` for TLS
- `redis+sentinel://[USER:PASSWORD@]HOST[:PORT],HOST[:PORT],…/SERVICE[/DB]`, `rediss+sentinel://…`: the master that the
  sentinels name. `sentinel_username` and `sentinel_password` in the query are for the sentinels themselves.
- `redis+cluster://[USER:PASSWORD@]HOST[:PORT],HOST[:PORT],…`, `rediss+cluster://…`: a Redis Cluster, found through any
  of these nodes. A namespace is a hash tag, so its records share a slot.

The query takes redis-py's own options (`socket_timeout=5`, `ssl_ca_certs=…`) and `prefix`, which begins every key
(default `offload:`). So a user whose ACL allows `~offload:*` is enough. A listing needs EVAL.

Records expire by Redis' own clock, after their tenant's retention. Redis' settings decide how durable a put is
(`appendonly yes`) and what happens when Redis is full: with `noeviction` puts fail, and with `volatile-ttl` it deletes
the records that are closest to expiring.
"""

from __future__ import annotations

import os
import re
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from urllib.parse import SplitResult, parse_qsl, urlencode, urlsplit

from msgspec import convert
from redis.asyncio import Redis
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.connection import ConnectionPool, parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import ReadOnlyError, RedisError

from proxy.errors import StoreFault, UserMistake
from proxy.stores import Damaged, Entry, Retention, checked, checked_prefix, is_key, namespace_of
from proxy.threads import Turns

PREFIX = "offload:"
"""Begins every key, unless the URL sets another prefix."""

CONNECTIONS = 32
"""Most operations at once in one process, so that a burst of puts does not open a connection for each."""

BATCH = 1_000
"""Roughly how many keys a listing covers in one round trip."""

PORT, SENTINEL_PORT = 6379, 26379

SIZES = """
local found = {}
for i, key in ipairs(KEYS) do
  local size = redis.pcall('STRLEN', key)
  found[i] = type(size) == 'number' and size .. ' ' .. redis.call('PTTL', key) or '-1 0'
end
return table.concat(found, ' ')
"""
"""Returns each key's bytes (-1: it is no string) and milliseconds to live (-2: it is gone), in one text: redis-py takes
ten times as long for a reply with each number."""

GONE = -2

_CODE = re.compile(r"[A-Z]{2,20}")


class RedisStore:
    """Records as Redis strings. `close` also closes the clients in `others`."""

    def __init__(
        self,
        client: Redis | RedisCluster,
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
        self._turns = Turns(CONNECTIONS)

    async def put(self, key: str, value: bytes) -> bool:
        """Store the value if the key is absent, and renew the record's time to live, in one round trip."""
        name = self._name(key)
        async with self._turns.place(namespace_of(key)), self._writing():
            created, _, size = await self._put(name, key, value)
            if _code(size) == "WRONGTYPE":
                self._damaged(key)
                await self._client.unlink(name)
                created, _, size = await self._put(name, key, value)
            _answered([size])
        return bool(created)

    async def get(self, key: str) -> bytes | None:
        """Return the value, or None."""
        [value] = await self.get_many([key])
        return value

    async def get_many(self, keys: Sequence[str]) -> Sequence[bytes | None]:
        """Return the values in the order of `keys`, with one round trip for each namespace."""
        found: dict[str, bytes | None] = {}
        for namespace, group in _by_namespace(keys).items():
            names = [self._name(key) for key in group]
            async with self._turns.place(namespace):
                with _faults():
                    pipe = self._client.pipeline(transaction=False)
                    pipe.execute_command("MGET", *names)  # its own method is not for clusters
                    pipe.execute_command("EXISTS", *names)
                    values, there = convert(
                        _answered(await pipe.execute(raise_on_error=False)), tuple[list[bytes | None], int]
                    )
                    found |= zip(group, values, strict=True)
                    if there > len(values) - values.count(None):  # MGET is silent about lists and the like
                        await self._look_for_damage([key for key in group if found[key] is None])
        return [found[key] for key in keys]

    async def list(self, prefix: str) -> AsyncGenerator[Entry, None]:
        """Yield every record whose key begins with `prefix`, using SCAN, which does not block other clients."""
        seen: set[bytes] = set()  # SCAN may return a name twice while Redis resizes its table
        namespace, slash, rest = checked_prefix(prefix).partition("/")
        pattern = f"{self._prefix}{{{namespace}}}/{rest}" if slash else f"{self._prefix}{{{namespace}"
        pattern = re.sub(r"([*?\[\]\\])", r"\\\1", pattern) + "*"
        for node in await self._nodes():
            async for page in _scanned(node, pattern):
                new = set(page) - seen
                for entry in await self._entries(new):
                    yield entry
                seen |= new

    async def delete(self, *keys: str) -> None:
        """Delete the records."""
        for namespace, group in _by_namespace(keys).items():
            names = [self._name(key) for key in group]
            async with self._turns.place(namespace), self._writing():
                await self._client.unlink(*names)

    async def close(self) -> None:
        """Close every connection."""
        with _faults():
            for client in (self._client, *self._others):
                await client.aclose()

    @asynccontextmanager
    async def _writing(self) -> AsyncGenerator[None, None]:
        """Translate errors, and have the next operation connect anew if Redis only reads: after a failover its address
        leads to another master, while connections still lead to the old one."""
        with _faults():
            try:
                yield
            except ReadOnlyError:
                if isinstance(self._client, Redis):
                    await self._client.connection_pool.disconnect(inuse_connections=False)
                raise

    async def _put(self, name: str, key: str, value: bytes) -> Sequence[Any]:
        """Return what SET, its time to live, and STRLEN say."""
        kept = _milliseconds(self._retention(namespace_of(key)))
        pipe = self._client.pipeline(transaction=False)
        pipe.set(name, value, nx=True, px=kept)
        pipe.persist(name) if kept is None else pipe.pexpire(name, kept)
        pipe.strlen(name)
        # If redis-py raised the errors itself, their texts would contain the command with all its content.
        created, renewed, size = await pipe.execute(raise_on_error=False)
        return [*_answered([created, renewed]), size]

    async def _look_for_damage(self, keys: Sequence[str]) -> None:
        pipe = self._client.pipeline(transaction=False)
        for key in keys:
            pipe.type(self._name(key))
        for key, kind in zip(keys, _answered(await pipe.execute(raise_on_error=False)), strict=True):
            if kind not in (b"none", b"string"):
                self._damaged(key)

    async def _nodes(self) -> Sequence[Any]:
        """Return what has to be asked for a listing of all keys: the cluster's primaries, or the only server."""
        if not isinstance(self._client, RedisCluster):
            return [self._client]
        with _faults():
            await self._client.initialize()
        return self._client.get_primaries()

    def _name(self, key: str) -> str:
        namespace, _, rest = checked(key).partition("/")
        return f"{self._prefix}{{{namespace}}}/{rest}"

    def _key(self, name: bytes) -> str:
        """Return the key of a name in Redis, or something that is no key."""
        namespace, _, rest = name.decode(errors="replace").removeprefix(self._prefix + "{").partition("}/")
        return f"{namespace}/{rest}"

    async def _entries(self, names: set[bytes]) -> Sequence[Entry]:
        keys = {key: name for name in names if is_key(key := self._key(name))}
        entries: list[Entry] = []
        one_slot = _by_namespace(list(keys)).values() if isinstance(self._client, RedisCluster) else [list(keys)]
        for group in filter(None, one_slot):
            with _faults():
                answer = convert(await self._client.eval(SIZES, len(group), *(keys[key] for key in group)), bytes)
                numbers = [int(number) for number in answer.split()]
            for key, size, left in zip(group, numbers[::2], numbers[1::2], strict=True):
                if size < 0:
                    self._damaged(key)
                elif left != GONE:
                    entries.append(self._entry(key, size, left))
        return entries

    def _entry(self, key: str, size: int, left: int) -> Entry:
        """Return the entry of a record with `left` milliseconds to live.

        Redis keeps no time of change, so this is computed from the retention and `left`. If either is unknown, the
        record counts as put now, so that it is not deleted for its age.
        """
        kept = self._retention(namespace_of(key))
        known = left >= 0 and kept is not None
        age = max(0.0, (kept or 0.0) - left / 1000) if known else 0.0
        return Entry(key, size, self._clock() - age)


def _by_namespace(keys: Sequence[str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = defaultdict(list)
    for key in dict.fromkeys(keys):
        groups[namespace_of(checked(key))].append(key)
    return groups


async def _scanned(node: Redis | ClusterNode, pattern: str) -> AsyncGenerator[list[bytes], None]:
    """Yield the names on one server that match, page by page."""
    cursor = None
    while cursor != 0:
        with _faults():
            page = await node.execute_command("SCAN", cursor or 0, "MATCH", pattern, "COUNT", BATCH)
            cursor, names = convert(page, tuple[int, list[bytes]])
        yield names


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
    code = _code(error)
    hint = ": this is a Redis Cluster, which needs redis+cluster://" if code == "MOVED" else ""
    return " ".join(filter(None, (type(error).__name__, code, said))) + hint


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
    if "{" in prefix:
        raise UserMistake("the store's URL: prefix must not contain {, which marks the namespace")
    kind = parts.scheme.partition("+")[2]
    try:
        if kind == "cluster":
            return RedisStore(_cluster(plain), retention, damaged=damaged, prefix=prefix)
        client, *others = _sentinel(plain) if kind else _single(plain)
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


def _cluster(parts: SplitResult) -> RedisCluster:
    user, _, hosts = parts.netloc.rpartition("@")
    options = dict(parse_url(f"redis://{user}@cluster/?{parts.query}"))
    del options["host"]
    nodes = [ClusterNode(*_address(host, PORT)) for host in hosts.split(",")]
    return RedisCluster(startup_nodes=nodes, ssl=parts.scheme.startswith("rediss"), **_defaults() | options)


def _address(host: str, port: int = SENTINEL_PORT) -> tuple[str, int]:
    parts = urlsplit(f"//{host}")
    return parts.hostname or "localhost", parts.port or port
