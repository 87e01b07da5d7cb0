"""Reads rows for the pages. A viewer other than the operator reads the rows of its own namespace,
and the names of replicas."""

from __future__ import annotations

import sqlite3
import time
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec

from proxy.apps.dashboard.describe import detail
from proxy.apps.dashboard.rows import (
    DAY,
    FLEET_SESSIONS,
    HOUR,
    LONGEST_TEXT,
    MINUTE,
    NESTED,
    SUMS,
    SUMS_KEYS,
    Row,
)
from proxy.errors import DashboardFault
from proxy.plan.prices import DEARER
from proxy.telemetry.outcome import Holdout, Kind

SECONDS = 5.0
"""The longest time for one query."""

STEPS = 100_000
"""Instructions of SQLite between two looks at the clock; some milliseconds."""

PAGE = 200
MOST = 500
"""Rows on one page, and in one answer. To encode so many takes some milliseconds, which no request
should notice."""

PERIODS = {
    "hour": (HOUR, MINUTE),
    "day": (DAY, HOUR),
    "week": (7 * DAY, HOUR),
    "month": (30 * DAY, DAY),
}
"""What pages show: so many seconds, of which the sums are kept by this span."""

REQUESTS = 2_000
"""Requests of one session that are shown, the newest."""

WRONG = "(fault != '' OR status >= 400)"

OUTCOMES = {
    "changed": f"kind = '{Kind.OFFLOADED}'",
    "unchanged": f"kind = '{Kind.UNTOUCHED}'",
    "observed": f"kind = '{Kind.OBSERVED}'",
    "errors": WRONG,
    "other": f"kind NOT IN ('{Kind.OFFLOADED}', '{Kind.UNTOUCHED}', '{Kind.OBSERVED}')",
}
"""What became of requests, for filters."""

SORTS = {
    "time": "id",
    "came": "tokens_before",
    "sent": "tokens_after",
    "saved": "tokens_before - tokens_after",
    "seconds": "seconds",
}
"""What requests are sorted by. The largest come first."""

MEASURED = 2_000
"""Requests, the newest, of which the latency is shown."""

SENT = f"kind != '{Kind.OBSERVED}'"
_SUMS = ", ".join((*SUMS_KEYS, *SUMS))
ALL_SUMS = (
    f"(SELECT {_SUMS}, start AS time FROM sums UNION ALL SELECT {_SUMS}, start FROM fleet_sums)"
)
"""The sums of this replica and of all others."""

ALL_SESSIONS = f"""(SELECT namespace, tenant, model, holdout, kind, began, last, 1 AS sessions, requests,
    cost_before > 0 AS known, cost_before > 0 AND cost_after > cost_before * {DEARER} AS losses, moved, reads,
    largest_before, largest_after FROM sessions
    UNION ALL SELECT {", ".join(FLEET_SESSIONS)} FROM fleet_sessions)"""
"""The sessions of this replica, and the sums of others'."""


Priced = tuple[str, str, float]
"""A tenant, a model, and the money for a million of its plain input tokens."""

PRICES = """SELECT json_extract(value, '$[0]') AS tenant, json_extract(value, '$[1]') AS model,
    json_extract(value, '$[2]') AS price FROM json_each(:prices)"""
"""A table of `Priced`, which SQLite gets as JSON."""

Number = Annotated[int, msgspec.Meta(ge=0, lt=10**18)]


class Wanted(msgspec.Struct, frozen=True):
    """Which requests or sessions are asked for, as it stands in an address. Empty: all of them."""

    period: str = ""
    tenant: str = ""
    model: str = ""
    outcome: str = ""
    text: str = ""
    """A part of what the client or upstream worded, of the plan's words, or of the request's id."""
    session: str = ""
    sort: str = "time"
    after: Number = 0
    """The id of a request that is known already."""
    offset: Number = 0
    limit: Number = PAGE

    def conditions(self, words: Sequence[str], at: str) -> tuple[str, Row]:
        """Return conditions on rows and their values. `words` are the columns that are searched,
        and `at` is the one of the time."""
        conditions = (
            ("tenant = :tenant", self.tenant),
            ("model = :model", self.model),
            ("session = :session", self.session),
            (f"{at} >= :since", self.period in PERIODS),
            (f"instr(lower({' || char(10) || '.join(words)}), :text)", self.text),
            (OUTCOMES.get(self.outcome, ""), self.outcome in OUTCOMES),
        )
        values = msgspec.structs.asdict(self) | {
            "session": _number(self.session),
            "since": time.time() - PERIODS.get(self.period, (0, 0))[0],
            "text": self.text[:LONGEST_TEXT].lower(),
            "limit": min(self.limit, MOST),
        }
        return " AND ".join(
            ["true", *(condition for condition, asked in conditions if asked)]
        ), values


ANY = Wanted()
REQUEST_WORDS = (
    "tenant",
    "model",
    "path",
    "reason",
    "obstacle",
    "fault",
    "detail",
    "words",
    "request_id",
    "status",
)
SESSION_WORDS = ("tenant", "model", "dialect")


class Reader:
    """One connection, for one thread, that cannot write. It sees the rows of one namespace, or of
    all if that is None. Raises DashboardFault."""

    def __init__(self, path: Path, namespace: str | None = None) -> None:
        self._namespace = namespace
        self._scope = "true" if namespace is None else "namespace = :namespace"
        address = f"{path.absolute().as_uri()}?mode=rw"
        try:
            self._connection = sqlite3.connect(
                address, timeout=1.0, isolation_level=None, check_same_thread=False, uri=True
            )
            self._connection.execute("PRAGMA query_only = ON")
            self._connection.execute("PRAGMA cache_size = -16384")
        except sqlite3.Error as error:
            raise _unreadable(error) from error
        self._connection.row_factory = sqlite3.Row
        self._until = 0.0
        self._connection.set_progress_handler(lambda: time.monotonic() > self._until, STEPS)
        self.close = self._connection.close

    def _rows(self, query: str, **values: object) -> list[Row]:
        """Run one query. Raises DashboardFault."""
        self._until = time.monotonic() + SECONDS
        try:
            return [
                dict(row)
                for row in self._connection.execute(query, {"namespace": self._namespace} | values)
            ]
        except (sqlite3.Error, OverflowError) as error:
            raise _unreadable(error) from error

    def namespaces(self) -> list[str]:
        """Return the namespaces of up to `PAGE` sessions, the newest."""
        newest = (
            f"SELECT namespace FROM sessions WHERE {self._scope} ORDER BY last DESC LIMIT {PAGE}"
        )
        return [
            row["namespace"] for row in self._rows(f"SELECT DISTINCT namespace FROM ({newest})")
        ]

    def any(self) -> bool:
        """Return whether there was a request, on any replica."""
        found = (
            f"SELECT 1 FROM {table} WHERE {self._scope}" for table in ("requests", "fleet_sums")
        )
        return bool(self._rows(f"{' UNION ALL '.join(found)} LIMIT 1"))

    def replicas(self) -> list[Row]:
        """Return the name, address and newest sums of all other replicas of the last day."""
        query = "SELECT name, url, max(time) AS time FROM fleet WHERE time > :since GROUP BY name"
        return self._rows(f"{query} ORDER BY name", since=time.time() - DAY)

    def names(self) -> list[Row]:
        """Return the tenants and models of the last days, for filters."""
        return self._rows(
            f"""SELECT DISTINCT tenant, model FROM sums WHERE span = {DAY} AND {self._scope}
            ORDER BY tenant, model LIMIT 500"""
        )

    # -- requests and sessions --

    def requests(self, wanted: Wanted = ANY) -> list[Row]:
        """Return rows with larger ids, the newest or largest first."""
        where, values = wanted.conditions(REQUEST_WORDS, "time")
        query = f"""SELECT * FROM requests WHERE id > :after AND {self._scope} AND {where}
            ORDER BY {SORTS.get(wanted.sort, "id")} DESC, id DESC LIMIT :limit OFFSET :offset"""
        return [*map(_shown, self._rows(query, **values))]

    def request(self, id: int) -> Row | None:
        """Return one request with its neighbours in the session, or None if there is none. Its
        `detail` is None if its messages are not listed."""
        query = f"""SELECT *, (SELECT detail FROM details WHERE id = :id) AS kept,
            (SELECT max(id) FROM requests WHERE session = this.session AND id < :id) AS previous,
            (SELECT min(id) FROM requests WHERE session = this.session AND id > :id) AS next
            FROM requests AS this WHERE id = :id AND {self._scope}"""
        found = self._rows(query, id=id)
        if not found:
            return None
        kept = found[0].pop("kept")
        messages = None
        with suppress(zlib.error, msgspec.MsgspecError, ValueError):
            messages = detail(kept) if kept else None
        return _shown(found[0]) | {"detail": messages}

    def latency(self, wanted: Wanted = ANY) -> Row:
        """Return percentiles of the newest requests' seconds, and how many went wrong."""
        where, values = wanted.conditions(REQUEST_WORDS, "time")
        query = f"""SELECT seconds, first_byte_seconds AS first, added_seconds AS added, {WRONG} AS wrong
            FROM requests WHERE {self._scope} AND {where} ORDER BY id DESC LIMIT {MEASURED}"""
        rows = self._rows(query, **values)
        latency: Row = {"requests": len(rows), "errors": sum(row["wrong"] for row in rows)}
        for name in ("seconds", "first", "added"):
            found = sorted(row[name] for row in rows if row[name] is not None)
            parts = (
                {f"p{part}": found[(len(found) - 1) * part // 100] for part in (50, 95, 99)}
                if found
                else None
            )
            latency[name] = parts
        return latency

    def sessions(self, wanted: Wanted = ANY) -> list[Row]:
        """Return the sessions with the newest requests."""
        where, values = wanted.conditions(SESSION_WORDS, "last")
        query = f"""SELECT * FROM sessions WHERE {self._scope} AND {where}
            ORDER BY last DESC LIMIT :limit OFFSET :offset"""
        return [*map(_named, self._rows(query, **values))]

    def session(self, session: str) -> list[Row]:
        """Return the newest requests of a session, the oldest of them first."""
        query = f"SELECT * FROM requests WHERE session = :session AND {self._scope} ORDER BY id DESC LIMIT {REQUESTS}"
        return [*map(_shown, self._rows(query, session=_number(session)))][::-1]

    # -- sums --

    def sums(
        self, by: str, amounts: Mapping[str, str], span: int, since: float, where: str = "true"
    ) -> list[Row]:
        """Return the sums of amounts in SQL by their names, for each combination of columns, in the
        spans that do not end before `since`."""
        sums = ", ".join(f"sum({amount}) AS {name}" for name, amount in amounts.items())
        query = f"""SELECT {by}, {sums} FROM {ALL_SUMS}
            WHERE span = :span AND start >= :since AND {self._scope} AND {where} GROUP BY {by} ORDER BY {by}"""
        return self._rows(query, span=span, since=since // span * span)

    def groups(self, since: float) -> list[Row]:
        """Return the sessions of each group of a holdout that began since then, by tenant and
        model."""
        query = f"""SELECT tenant, model, holdout, sum(sessions) AS sessions, sum(requests) AS requests
            FROM {ALL_SESSIONS} WHERE last >= :since AND began >= :since AND holdout != '' AND {self._scope}
            GROUP BY tenant, model, holdout"""
        return self._rows(query, since=since)

    def fared(self, since: float) -> list[Row]:
        """Return how the sessions with a request since then fared, by tenant and model: of how many
        the costs are known, how many of those were dearer than as they came, how many moved results
        were read back, and the largest prompt as it came and as it was sent. Sessions that were
        only observed do not count."""
        query = f"""SELECT tenant, model, sum(known) AS sessions, sum(losses) AS losses, sum(moved) AS moved,
            sum(reads) AS reads, max(largest_before) AS largest_before, max(largest_after) AS largest_after
            FROM {ALL_SESSIONS} WHERE last >= :since AND holdout != '{Holdout.KEPT}' AND {SENT} AND {self._scope}
            GROUP BY tenant, model"""
        return self._rows(query, since=since)

    def extremes(
        self, since: float, prices: Sequence[Priced], most: int = 5
    ) -> tuple[list[Row], list[Row]]:
        """Return the sessions with a request since then that saved most money, and those that were
        dearer by most. If nothing has a price: those that saved most tokens, and none."""
        saved = "(cost_before - cost_after) * price" if prices else "tokens_before - tokens_after"
        priced = f"JOIN ({PRICES}) USING (tenant, model)" if prices else ""
        query = f"SELECT *, {saved} AS saved FROM sessions {priced} WHERE last >= :since AND {SENT} AND {self._scope}"
        known = "AND cost_before > 0" if prices else ""
        values = {"since": since, "prices": msgspec.json.encode(prices).decode()}
        best = self._rows(
            f"{query} {known} AND saved > 0 ORDER BY saved DESC LIMIT {most}", **values
        )
        dearer = (
            f"{query} {known} AND cost_after > cost_before * {DEARER} ORDER BY saved LIMIT {most}"
        )
        worst = self._rows(dearer, **values) if prices else []
        return [*map(_named, best)], [*map(_named, worst)]


def _unreadable(error: Exception) -> DashboardFault:
    """Return the fault of a page that cannot read the file, with what to do."""
    # it is locked, was just removed, or the query took too long
    passes = isinstance(error, sqlite3.OperationalError)
    cure = "try again" if passes else "delete it, or name another with --dashboard"
    return DashboardFault(f"The dashboard's file cannot be read ({error}): {cure}")


def _number(session: str) -> int:
    """Return the number of a session with this name in addresses: that of no session, if it is no
    name."""
    with suppress(ValueError):
        return int(session[:16], 16) % (1 << 63)
    return -1


def _named(row: Row) -> Row:
    """Return a row with its session's name in addresses."""
    return {**row, "session": None if row["session"] is None else f"{row['session']:016x}"}


def _shown(row: Row) -> Row:
    """Return a request as pages get it."""
    return _named(row) | {
        name: msgspec.json.decode(row[name]) if row.get(name) else None
        for name in (*NESTED, "kinds")
    }
