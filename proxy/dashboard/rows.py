"""What the dashboard keeps of a request: its outcome as it is logged, and what it adds to the sums of its hour.

Of an outcome the values of its fields are stored, in the order of `STORED`, at whose end new fields come.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, TypeVar

import msgspec

from proxy.telemetry.outcome import Outcome

ADDED = ("cause", "words")
"""Fields that rows of the first version lack, in the order in which they came."""

STORED = (*(name for name in Outcome.__struct_fields__ if name not in ADDED), *ADDED)
"""The fields of an outcome, in the order of a row's values. A row may have fewer of them, or more than we know. It is
also the order of `Outcome`, which saves sorting them."""

T = TypeVar("T")

KEYS = ("tenant", "model", "dialect", "kind", "usage", "holdout")
"""Fields by which sums are kept apart, beside the day and the namespace."""

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

HOURLY = ("requests", "tokens_before", "tokens_after", "cost_before", "cost_after")
"""The columns of the sums of an hour, which have no keys but the namespace."""

SUMS = ("requests", "faults", "losses", "retrieved_tokens", *SUMMED)
"""The columns of the sums: requests, those that went wrong, those that cost more than as they came, tokens that our
tools read back, and the sums of fields."""

TEXTS = ("method", "path", "model", "obstacle", "detail")
"""Fields of an outcome that the client or upstream worded."""

HOUR, DAY = 3600, 86_400

LONGEST_NAME = 200
"""Most characters of a text in an outcome, such as a model's name, which the client chooses."""

OK = 200
"""The status of a reply that was given."""

MOST = 10**12
"""The most that one request adds to a sum, as in the metrics: upstream may report any number."""

NO_ROW = 1 << 62
"""Above the ids of all rows that we write. Who else wrote to the file may have used the last that SQLite has."""

SCHEMA = f"""
CREATE TABLE secret (value BLOB NOT NULL);
CREATE TABLE namespaces (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE packs (
    last INTEGER PRIMARY KEY, first INTEGER NOT NULL, namespace INTEGER NOT NULL, worker INTEGER NOT NULL,
    count INTEGER NOT NULL, newest REAL NOT NULL, sessions BLOB NOT NULL, rows BLOB NOT NULL, sent BLOB NOT NULL
);
CREATE INDEX packs_by_namespace ON packs (namespace, last, sessions);
CREATE TABLE forgotten (digest BLOB PRIMARY KEY, time REAL NOT NULL);
CREATE TABLE details (id INTEGER PRIMARY KEY, namespace INTEGER NOT NULL, detail BLOB NOT NULL);
CREATE INDEX details_by_namespace ON details (namespace);
CREATE TABLE sessions (
    session INTEGER PRIMARY KEY, namespace INTEGER NOT NULL, tenant TEXT NOT NULL, model TEXT NOT NULL,
    dialect TEXT NOT NULL, holdout TEXT NOT NULL, began REAL NOT NULL, last REAL NOT NULL,
    first_id INTEGER NOT NULL, last_id INTEGER NOT NULL, requests INTEGER NOT NULL,
    events INTEGER NOT NULL, tokens_before INTEGER NOT NULL, tokens_after INTEGER NOT NULL,
    cost_before INTEGER NOT NULL, cost_after INTEGER NOT NULL, kind TEXT NOT NULL
);
CREATE INDEX sessions_by_time ON sessions (last);
CREATE INDEX sessions_by_namespace ON sessions (namespace, last);
CREATE INDEX sessions_of_holdouts ON sessions (began) WHERE holdout != '';
CREATE TABLE hours (
    hour INTEGER NOT NULL, namespace TEXT NOT NULL, {", ".join(f"{name} INTEGER NOT NULL" for name in HOURLY)},
    PRIMARY KEY (hour, namespace)
) WITHOUT ROWID;
CREATE TABLE days (
    day INTEGER NOT NULL, namespace TEXT NOT NULL, {", ".join(f"{name} TEXT NOT NULL" for name in KEYS)},
    {", ".join(f"{name} INTEGER NOT NULL" for name in SUMS)},
    PRIMARY KEY (day, namespace, {", ".join(KEYS)})
) WITHOUT ROWID;
"""


Sent = bytes | tuple[Any, ...] | None
"""The tokens that were sent of each kind, as `sessions.SentTokens`: encoded, or of a short request the values of its
fields."""


class Seen(msgspec.Struct, frozen=True, gc=False):
    """What a chat request shows beside its outcome."""

    session: int | None = None
    """Identifies the session within its namespace, in 63 bits; None if the request was not planned."""
    sent: Any = None
    """See `Sent`."""
    detail: bytes | None = None
    """What became of each message, if anything did."""

    @property
    def weight(self) -> int:
        """Its bytes, once it is described."""
        return len(self.sent or b"") + len(self.detail or b"")


NOTHING_SEEN = Seen()


class Shown(NamedTuple):
    """What many requests show, in their order."""

    sessions: Sequence[int | None]
    sent: Sequence[Sent]
    details: Mapping[int, bytes]
    """By their places, of those that have any."""


def together(seen: Sequence[Seen]) -> Shown:
    """Return what these show, as one."""
    details = {place: one.detail for place, one in enumerate(seen) if one.detail}
    return Shown([one.session for one in seen], [one.sent for one in seen], details)


Values = tuple[Any, ...]
values_of: Callable[[Outcome], Values]
values_of = msgspec.structs.astuple if Outcome.__struct_fields__ == STORED else attrgetter(*STORED)  # it is faster
"""Returns an outcome's values, in the order of `STORED`."""
_DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(Outcome)}
_texts = itemgetter(*map(STORED.index, TEXTS))
_TEXTS = frozenset(map(STORED.index, TEXTS))
_first = itemgetter(0)


class Table(NamedTuple):
    """The values of outcomes, by the fields' places in `STORED`. Most requests of a moment agree in most fields."""

    rows: Sequence[Values]
    first: Values
    """The values of the first outcome."""
    others: dict[int, Values]
    """All values of the fields in which the outcomes differ."""

    def column(self, field: int) -> Values:
        """Return all values of a field."""
        return self.others[field] if field in self.others else (self.first[field],) * len(self.rows)

    def part(self, places: Sequence[int]) -> Table:
        """Return the outcomes in these places, of which there are some."""
        count = len(places)
        if count == len(self.rows):
            return self
        rows = [self.rows[place] for place in places]
        columns = [] if count == 1 else [(at, tuple([row[at] for row in rows])) for at in self.others]
        return Table(rows, rows[0], {at: column for at, column in columns if column.count(column[0]) < count})


def table(rows: Sequence[Values]) -> Table:
    """Return these outcomes, of which there are some."""
    fields, count = [*zip(*rows, strict=True)], len(rows)
    same = map(tuple.count, fields, rows[0])
    return Table(rows, rows[0], {at: fields[at] for at, number in enumerate(same) if number < count})


def storable(outcomes: Sequence[Outcome]) -> tuple[Sequence[Outcome], Table]:
    """Return outcomes whose texts the file can hold, which are short and without lone surrogates, and their values."""
    found = table([*map(values_of, outcomes)])
    texts = [*_texts(found.first), *chain.from_iterable(found.others[at] for at in _TEXTS & found.others.keys())]
    if max(map(len, texts)) <= LONGEST_NAME and "".join(texts).isascii():
        return outcomes, found
    outcomes = [*map(_shortened, outcomes, map(_texts, found.rows))]
    return outcomes, table([*map(values_of, outcomes)])


def _shortened(outcome: Outcome, texts: Sequence[str]) -> Outcome:
    short = [text[:LONGEST_NAME].encode("utf-8", "replace").decode() for text in texts]
    return msgspec.structs.replace(outcome, **dict(zip(TEXTS, short, strict=True)))


def named(values: Sequence[Any]) -> dict[str, Any]:
    """Return an outcome's fields as they are logged. Those that the row lacks have their defaults. Raises Damaged."""
    return dict(zip(STORED, completed(values), strict=False))


def completed(values: Sequence[Any]) -> Sequence[Any]:
    """Return a row's values with the defaults of those that it lacks. Raises Damaged."""
    missing = ADDED[len(values) - len(STORED) :] if len(values) < len(STORED) else ()
    if len(values) + len(missing) < len(STORED):
        raise Damaged("too few values")
    return [*values, *(_DEFAULTS[name] for name in missing)] if missing else values


class Damaged(ValueError):
    """A row's bytes are not what we write, because the file is damaged or somebody else wrote to it."""


def unpacked(packed: bytes, kind: type[T], *, strict: bool = True) -> T:
    """Return what a row keeps as bytes. Raises Damaged."""
    try:
        return msgspec.msgpack.decode(packed, type=kind, strict=strict)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, TypeError) as error:
        raise Damaged(str(error)) from error


def converted(values: object, kind: type[T]) -> T:
    """Return what a pack keeps among other things. Raises Damaged."""
    try:
        return msgspec.convert(values, kind, builtin_types=(bytes,))
    except (msgspec.MsgspecError, RecursionError, TypeError) as error:
        raise Damaged(str(error)) from error
