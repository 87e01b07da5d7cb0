"""What the dashboard keeps of a request: its outcome as it is logged, and what it adds to the sums of its hour.

An outcome is stored as the list of its fields' values, so a file fits one version of `Outcome`; see `VERSION`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import msgspec

from proxy.telemetry.outcome import Kind, Outcome

FIELDS = Outcome.__struct_fields__

KEYS = ("tenant", "model", "dialect", "kind", "usage", "holdout")
"""Fields by which sums are kept apart, beside the hour and the namespace."""

SUMMED = (
    "tokens_before",
    "tokens_after",
    "cost_before",
    "cost_after",
    "prompt_tokens",
    "completion_tokens",
    "cached_tokens",
    "summary_prompt_tokens",
    "summary_completion_tokens",
    "compacted",
    "compressed",
    "reinserted",
    "rounds",
    "new_event",
)
"""Fields of an outcome that are added up."""

SUMS = ("requests", "faults", "losses", "retrieved_tokens", *SUMMED)
"""The columns of the sums: requests, those that went wrong, those that cost more than as they came, tokens that our
tools read back, and the sums of fields."""

HOUR = 3600

MOST = 10**12
"""The most that one request adds to a sum, as in the metrics: upstream may report any number."""

SCHEMA = f"""
CREATE TABLE secret (value BLOB NOT NULL);
CREATE TABLE namespaces (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE requests (
    id INTEGER PRIMARY KEY, time REAL NOT NULL, namespace INTEGER NOT NULL, session INTEGER, worker INTEGER NOT NULL,
    outcome BLOB NOT NULL, sent BLOB
);
CREATE INDEX requests_by_namespace ON requests (namespace, id);
CREATE INDEX requests_by_session ON requests (session, id) WHERE session IS NOT NULL;
CREATE TABLE details (id INTEGER PRIMARY KEY, detail BLOB NOT NULL);
CREATE TABLE sessions (
    session INTEGER PRIMARY KEY, namespace INTEGER NOT NULL, tenant TEXT NOT NULL, model TEXT NOT NULL,
    dialect TEXT NOT NULL, holdout TEXT NOT NULL, began REAL NOT NULL, last REAL NOT NULL, requests INTEGER NOT NULL,
    events INTEGER NOT NULL, tokens_before INTEGER NOT NULL, tokens_after INTEGER NOT NULL,
    cost_before INTEGER NOT NULL, cost_after INTEGER NOT NULL
);
CREATE INDEX sessions_by_time ON sessions (last);
CREATE INDEX sessions_by_namespace ON sessions (namespace, last);
CREATE INDEX sessions_of_holdouts ON sessions (began) WHERE holdout != '';
CREATE TABLE hours (
    hour INTEGER NOT NULL, namespace INTEGER NOT NULL, {", ".join(f"{name} TEXT NOT NULL" for name in KEYS)},
    {", ".join(f"{name} INTEGER NOT NULL" for name in SUMS)},
    PRIMARY KEY (hour, namespace, {", ".join(KEYS)})
) WITHOUT ROWID;
"""

VERSION = zlib.crc32("\n".join((*FIELDS, SCHEMA)).encode()) & 0x7FFFFFFF or 1
"""Names the schema and the fields of an outcome. A file of another version is left alone."""


class Seen(msgspec.Struct, frozen=True):
    """What a chat request shows beside its outcome."""

    session: int | None = None
    """Identifies the session within its namespace, in 63 bits; None if the request was not planned."""
    described: Callable[[], tuple[bytes, bytes | None]] | None = None
    """Returns the tokens that were sent of each kind, and what became of each message if anything did. It takes time in
    proportion to the history, so it runs in the writer's thread."""
    weight: int = 0
    """Bytes that wait with it."""


NOTHING_SEEN = Seen()


class Recorded(msgspec.Struct, frozen=True):
    """An outcome with the time of its end, in seconds since the epoch."""

    time: float
    outcome: Outcome
    seen: Seen


_values = attrgetter(*FIELDS)
_key = attrgetter(*KEYS)
_summed = attrgetter(*SUMMED)
_encode = msgspec.msgpack.Encoder().encode


def encoded(outcome: Outcome) -> bytes:
    """Return the outcome's values."""
    return _encode(_values(outcome))


def decoded(row: bytes) -> dict[str, Any]:
    """Return the outcome's fields as they are logged."""
    return dict(zip(FIELDS, msgspec.msgpack.decode(row), strict=True))


def key(recorded: Recorded) -> tuple[object, ...]:
    """Return the hour and the fields by which sums are kept apart."""
    outcome = recorded.outcome
    return int(recorded.time) // HOUR, outcome.namespace, *map(str, _key(outcome))


def amounts(outcome: Outcome) -> tuple[int, ...]:
    """Return what one request adds to `SUMS`."""
    fault, loss = bool(outcome.fault), outcome.cost_after > outcome.cost_before and outcome.kind is not Kind.SUMMARY
    retrieved = sum([use.tokens for use in outcome.tool_uses]) if outcome.tool_uses else 0
    return 1, fault, loss, retrieved, *[min(amount, MOST) for amount in _summed(outcome)]
