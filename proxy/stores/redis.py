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
from collections.abc import AsyncGenerator, Iterator, Sequence
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


class RedisStore:
    """Records as Redis strings, with the first of the `clients`. `close` closes all of them."""

    def __init__(
        self, clients: Sequence[Redis | RedisCluster], retention: Retention, damaged: Damaged, prefix: str
    ) -> None:
        self._clients = clients
        self._client: Any = clients[0]  # its types include decoded replies, which this class never requests
        self._retention = retention
        self._damaged = damaged
        self._prefix = prefix
        self._turns = Turns(CONNECTIONS)

    async def put(self, key: str, value: bytes) -> bool:
        """Also renews the record's time to live, in the same round trip."""
        name = self._name(key)
        async with self._turns.place(namespace_of(key)), self._writing():
            created, size = await self._put(name, key, value)
            if _code(size) == "WRONGTYPE":
                self._damaged(key)
                await self._client.unlink(name)
                created, size = await self._put(name, key, value)
            _answered([size])
        return created

    async def get(self, key: str) -> bytes | None:
        [value] = await self.get_many([key])
        return value

    async def get_many(self, keys: Sequence[str]) -> Sequence[bytes | None]:
        """One round trip for each namespace."""
        found: dict[str, bytes | None] = {}
        for namespace, group in _by_namespace(keys).items():
            names = [self._name(key) for key in group]
            async with self._turns.place(namespace):
                with _faults():
                    pipe = self._client.pipeline(transaction=False)
                    pipe.execute_command("MGET", *names)  # its own method is not for clusters
                    pipe.execute_command("EXISTS", *names)
                    answers = _answered(await pipe.execute(raise_on_error=False))
                    values, there = convert(answers, tuple[list[bytes | None], int])
                    found |= zip(group, values, strict=True)
                    if there > len(values) - values.count(None):  # MGET is silent about lists and the like
                        await self._look_for_damage([key for key in group if found[key] is None])
        return [found[key] for key in keys]

    async def list(self, prefix: str) -> AsyncGenerator[Entry, None]:
        """Uses SCAN, which does not block other clients."""
        namespace, slash, rest = checked_prefix(prefix).partition("/")
        pattern = f"{self._prefix}{{{namespace}}}/{rest}" if slash else f"{self._prefix}{{{namespace}"
        pattern = re.sub(r"([*?\[\]\\])", r"\\\1", pattern) + "*"
        nodes = [self._client]
        if isinstance(self._client, RedisCluster):
            with _faults():
                await self._client.initialize()
            nodes = self._client.get_primaries()
        seen: set[bytes] = set()  # SCAN may return a name twice while Redis resizes its table
        for node in nodes:
            cursor = None
            while cursor != 0:
                with _faults():
                    page = await node.execute_command("SCAN", cursor or 0, "MATCH", pattern, "COUNT", BATCH)
                    cursor, names = convert(page, tuple[int, list[bytes]])
                    entries = await self._entries(set(names) - seen)
                for entry in entries:
                    yield entry
                seen.update(names)

    async def delete(self, *keys: str) -> None:
        for namespace, group in _by_namespace(keys).items():
            async with self._turns.place(namespace), self._writing():
                await self._client.unlink(*map(self._name, group))

    async def close(self) -> None:
        with _faults():
            for client in self._clients:
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

    async def _put(self, name: str, key: str, value: bytes) -> tuple[bool, Any]:
        """Return whether SET made the record, and what STRLEN says of it."""
        seconds = self._retention(namespace_of(key))
        kept = None if seconds is None else max(1, int(seconds * 1000))
        pipe = self._client.pipeline(transaction=False)
        pipe.set(name, value, nx=True, px=kept)
        pipe.persist(name) if kept is None else pipe.pexpire(name, kept)
        pipe.strlen(name)
        # If redis-py raised the errors itself, their texts would contain the command with all its content.
        created, renewed, size = await pipe.execute(raise_on_error=False)
        _answered([created, renewed])
        return bool(created), size

    async def _look_for_damage(self, keys: Sequence[str]) -> None:
        pipe = self._client.pipeline(transaction=False)
        for key in keys:
            pipe.type(self._name(key))
        for key, kind in zip(keys, _answered(await pipe.execute(raise_on_error=False)), strict=True):
            if kind not in (b"none", b"string"):
                self._damaged(key)

    async def _entries(self, names: set[bytes]) -> Sequence[Entry]:
        """Return the entries of those of these names that have records.

        Redis keeps no time of change, so it is computed from the retention and the time that a record has left to live.
        If either is unknown, the record counts as put now, so that it is not deleted for its age.
        """
        keys: dict[str, bytes] = {}
        for name in names:
            namespace, _, rest = name.decode(errors="replace").removeprefix(self._prefix + "{").partition("}/")
            if is_key(key := f"{namespace}/{rest}"):
                keys[key] = name
        entries: list[Entry] = []
        one_slot = _by_namespace([*keys]).values() if isinstance(self._client, RedisCluster) else [[*keys]]
        for group in filter(None, one_slot):
            answer = convert(await self._client.eval(SIZES, len(group), *(keys[key] for key in group)), bytes)
            numbers = [int(number) for number in answer.split()]
            for key, size, left in zip(group, numbers[::2], numbers[1::2], strict=True):
                if size < 0:
                    self._damaged(key)
                elif left != GONE:
                    kept = self._retention(namespace_of(key))
                    age = 0.0 if kept is None or left < 0 else max(0.0, kept - left / 1000)
                    entries.append(Entry(key, size, time.time() - age))
        return entries

    def _name(self, key: str) -> str:
        namespace, _, rest = checked(key).partition("/")
        return f"{self._prefix}{{{namespace}}}/{rest}"


def _by_namespace(keys: Sequence[str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = defaultdict(list)
    for key in dict.fromkeys(keys):
        groups[namespace_of(checked(key))].append(key)
    return groups


def _answered(answers: Sequence[Any]) -> Sequence[Any]:
    """Return the answers of a pipeline, or raise the first one that is an error."""
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers


@contextmanager
def _faults() -> Iterator[None]:
    try:
        yield
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
    return code if re.fullmatch(r"[A-Z]{2,20}", code) else ""


def open_redis(url: str, retention: Retention, damaged: Damaged) -> RedisStore:
    """Return the store at a URL without connecting. Raises UserMistake if redis-py does not understand the URL."""
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query))
    prefix = options.pop("prefix", PREFIX)
    if "{" in prefix:
        raise UserMistake("the store's URL: prefix must not contain {, which marks the namespace")
    try:
        clients = _opened(parts._replace(query=urlencode(options)))
        if isinstance(clients[0], Redis):
            # This does not connect, but it rejects unknown options now and not at the first request.
            clients[0].connection_pool.make_connection()  # type: ignore[no-untyped-call]
    except (ValueError, TypeError, RedisError) as error:
        raise UserMistake(f"the store's URL: {error}") from error
    return RedisStore(clients, retention, damaged, prefix)


def _opened(parts: SplitResult) -> Sequence[Redis | RedisCluster]:
    """Return the client for a URL, followed by those of its sentinels. Raises ValueError if the URL has no service."""
    scheme, _, kind = parts.scheme.partition("+")
    if not kind:
        return [Redis.from_pool(ConnectionPool.from_url(parts.geturl(), **_defaults()))]
    user, _, hosts = parts.netloc.rpartition("@")
    service, _, database = parts.path.strip("/").partition("/")
    # redis-py can parse options and passwords, but not URLs of this kind, so give it one that it knows.
    options = dict(parse_url(f"redis://{user}@host/{database if kind == 'sentinel' else ''}?{parts.query}"))
    del options["host"]
    tls, named = scheme == "rediss", [urlsplit(f"//{host}") for host in hosts.split(",")]
    if kind == "cluster":
        nodes = [ClusterNode(one.hostname or "localhost", one.port or PORT) for one in named]
        return [RedisCluster(startup_nodes=nodes, ssl=tls, **_defaults() | options)]
    if not service:
        raise ValueError("redis+sentinel:// needs the service's name after the hosts, as in //HOST,HOST/mymaster")
    own = {name: options.pop(f"sentinel_{name}", None) for name in ("username", "password")}
    sentinels = Sentinel(  # type: ignore[no-untyped-call]
        [(one.hostname or "localhost", one.port or SENTINEL_PORT) for one in named],
        sentinel_kwargs=_defaults() | own | {"ssl": tls},
        **_defaults() | options | {"ssl": tls},
    )
    return [sentinels.master_for(service), *sentinels.sentinels]


def _defaults() -> dict[str, Any]:
    """Return the default options: timeouts in seconds, and one immediate retry in case a connection died."""
    return {"socket_timeout": 2.0, "socket_connect_timeout": 2.0, "retry": Retry(NoBackoff(), 1)}
