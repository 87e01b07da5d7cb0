"""Redis as a store: one string for each record. The only module that uses redis-py.

The URL is `redis://[USER:PASSWORD@]HOST[:PORT][/DB]`, or `rediss://…` for TLS. The query takes
redis-py's own options (`socket_timeout=5`, `ssl_ca_certs=…`) and `prefix`, which begins every key
(default `offload:`). So a user whose ACL allows `~offload:*` is enough. A namespace is a hash tag,
for a proxy that spreads keys over several servers.

Records expire by Redis' own clock, after their tenant's retention. Redis' settings decide how
durable a put is (`appendonly yes`) and what happens when Redis is full: with `noeviction` puts
fail, and with `volatile-ttl` it deletes the records that are closest to expiring.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from msgspec import convert
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import OutOfMemoryError, ReadOnlyError, RedisError
from redis.retry import Retry

from proxy.errors import UserMistake
from proxy.stores import Entry, Retention, is_key, namespace_of

PREFIX = "offload:"
"""Begins every key, unless the URL sets another prefix."""

PAGE = 1_000
"""Roughly how many keys a listing covers in one round trip."""

OPTIONS: dict[str, Any] = {
    "socket_timeout": 2.0,  # seconds
    "socket_connect_timeout": 2.0,
    "retry": Retry(NoBackoff(), 1),  # at once, in case a connection died
    # After a failover the address leads to another master, while connections still lead to the old
    # one.
    "retry_on_error": [ReadOnlyError],
}

DISCARD = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('unlink', KEYS[1]) end return 0"
"""Deletes a key that has this value, in one step."""

DRIFT = 5.0
"""Seconds by which two looks at a record's time to live may disagree about its age: answers take
time."""

GONE = -2
"""The time to live of a key that is not there. Redis says -1 for one that lives for ever."""


class RedisEngine:
    """Records as Redis strings. A key with a value of another type counts as absent, and stays."""

    name = "Redis"
    errors = Exception  # its parser can raise any class for a damaged reply
    threads = 32
    batch = PAGE

    def __init__(self, client: Redis, retention: Retention, prefix: str) -> None:
        # its types include decoded replies, which this class never requests
        self._client: Any = client
        self._retention = retention
        self._prefix = prefix

    def put(self, key: str, value: bytes, *, sync: bool) -> bool:
        """Also renews the time to live of a record that exists."""
        name = self._name(key)
        seconds = self._retention(namespace_of(key))
        kept = None if seconds is None else max(1, int(seconds * 1000))
        if self._client.set(name, value, nx=True, px=kept):
            return True
        if kept is None:
            self._client.persist(name)
        else:
            self._client.pexpire(name, kept)
        return False

    def get_many(self, keys: Sequence[str]) -> Sequence[bytes | None]:
        found = convert(self._client.mget(map(self._name, keys)), list[bytes | None])
        return [value for _, value in zip(keys, found, strict=True)]

    def renew(self, keys: Sequence[str], seconds: float) -> None:
        """A record that is kept for ever has no age."""
        reading = self._client.pipeline(transaction=False)
        for key in keys:
            reading.pttl(self._name(key))
        left = convert(reading.execute(), list[int])
        writing = self._client.pipeline(transaction=False)
        for key, milliseconds in zip(keys, left, strict=True):
            kept = self._retention(namespace_of(key))
            if milliseconds < 0:
                continue
            if kept is None:
                writing.persist(self._name(key))
            elif kept - milliseconds / 1000 > seconds:
                writing.pexpire(self._name(key), max(1, int(kept * 1000)))
        writing.execute()

    def pages(self, prefix: str) -> Iterator[Sequence[Entry]]:
        """Uses SCAN, which does not block other clients."""
        namespace, slash, rest = prefix.partition("/")
        pattern = (
            f"{self._prefix}{{{namespace}}}/{rest}" if slash else f"{self._prefix}{{{namespace}"
        )
        pattern = re.sub(r"([*?\[\]\\])", r"\\\1", pattern) + "*"
        seen: set[bytes] = set()  # SCAN may return a name twice while Redis resizes its table
        cursor = None
        while cursor != 0:
            page = self._client.scan(cursor or 0, pattern, PAGE, _type="string")
            cursor, names = convert(page, tuple[int, list[bytes]])
            yield self._entries(set(names) - seen)
            seen.update(names)

    def delete(self, keys: Sequence[str], until: float | None = None) -> None:
        names = [self._name(key) for key in keys]
        if until is not None:
            found = self._entries({name.encode() for name in names})
            names = [self._name(one.key) for one in found if one.modified <= until + DRIFT]
        if names:
            self._client.unlink(*names)

    def discard(self, key: str, value: bytes) -> None:
        self._client.eval(DISCARD, 1, self._name(key), value)

    def reason(self, error: Exception) -> str:
        """Return the error's class and Redis' code or the system's text for it, such as
        `ResponseError WRONGTYPE`. Its own text can contain the data we sent."""
        cause: BaseException | None = error
        while cause and not isinstance(cause, OSError):
            cause = cause.__cause__ or cause.__context__
        said = os.strerror(cause.errno) if isinstance(cause, OSError) and cause.errno else ""
        code = str(getattr(error, "status_code", None) or str(error).partition(" ")[0])
        if not isinstance(error, RedisError) or not re.fullmatch(r"[A-Z]{2,20}", code):
            code = ""
        hint = ": this is a Redis Cluster, and a single server is needed" if code == "MOVED" else ""
        return " ".join(filter(None, (type(error).__name__, code, said))) + hint

    def is_full(self, error: Exception) -> bool:
        return isinstance(error, OutOfMemoryError)

    def _entries(self, names: set[bytes]) -> Sequence[Entry]:
        """Return the entries of those of these names that have records.

        Redis keeps no time of change, so it is computed from the retention and the time that a
        record has left to live. If either is unknown, the record counts as put now, so that it is
        not deleted for its age.
        """
        keys = list[str]()
        pipe = self._client.pipeline(transaction=False)
        for name in names:
            namespace, _, rest = (
                name.decode(errors="replace").removeprefix(self._prefix + "{").partition("}/")
            )
            if is_key(key := f"{namespace}/{rest}"):
                keys.append(key)
                pipe.strlen(name).pttl(name)
        answers = iter(convert(pipe.execute(), list[int]))
        entries = list[Entry]()
        for key, size, left in zip(keys, answers, answers, strict=True):
            if left != GONE:
                kept = self._retention(namespace_of(key))
                age = 0.0 if kept is None or left < 0 else max(0.0, kept - left / 1000)
                entries.append(Entry(key, size, time.time() - age))
        return entries

    def _name(self, key: str) -> str:
        namespace, _, rest = key.partition("/")
        return f"{self._prefix}{{{namespace}}}/{rest}"


def open_redis(url: str, retention: Retention) -> RedisEngine:
    """Return the engine at a URL without connecting. Raises UserMistake if redis-py does not
    understand the URL."""
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query))
    prefix = options.pop("prefix", PREFIX)
    try:
        client = Redis.from_url(parts._replace(query=urlencode(options)).geturl(), **OPTIONS)
        # This does not connect, but it rejects unknown options now and not at the first request.
        client.connection_pool.make_connection()
    except (ValueError, TypeError, RedisError) as error:
        raise UserMistake(f"the store's URL: {error}") from error
    return RedisEngine(client, retention, prefix)
