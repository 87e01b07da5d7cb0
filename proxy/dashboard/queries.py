"""Reads rows for the pages. A viewer other than the operator gets the rows of its own namespace only."""

from __future__ import annotations

import sqlite3
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec

from proxy.dashboard.describe import detail
from proxy.dashboard.rows import DAY, FLEET_SESSIONS, HOUR, KEYS, LONGEST_TEXT, MINUTE, NESTED, SUMS, SUMS_KEYS, Row
from proxy.errors import DashboardFault
from proxy.telemetry.outcome import Holdout, Kind

SECONDS = 5.0
"""The longest time for one query."""

STEPS = 100_000
"""Instructions of SQLite between two looks at the clock; some milliseconds."""

PAGE, MOST = 200, 500
"""Rows on one page, and in one answer. To encode so many takes some milliseconds, which no request should notice."""

PERIODS = {"hour": (HOUR, MINUTE), "day": (DAY, HOUR), "week": (7 * DAY, HOUR), "month": (30 * DAY, DAY)}
"""What pages show: so many seconds, of which the sums are kept by this span."""

REQUESTS = 2_000
"""Requests of one session that are shown, the newest."""

OUTCOMES = {
    "changed": f"kind = '{Kind.OFFLOADED}'",
    "unchanged": f"kind = '{Kind.UNTOUCHED}'",
    "observed": f"kind = '{Kind.OBSERVED}'",
    "errors": "(fault != '' OR status >= 400)",
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

SAVED = "CASE WHEN cost_before > 0 THEN cost_before - cost_after ELSE 0 END"
"""What a session saved, in plain input tokens; 0 if upstream did not say what it counted."""

_SUMS = ", ".join((*SUMS_KEYS, *SUMS))
ALL_SUMS = f"(SELECT {_SUMS} FROM sums UNION ALL SELECT {_SUMS} FROM fleet_sums)"
"""The sums of this replica and of all others."""

ALL_SESSIONS = f"""(SELECT namespace, tenant, model, holdout, kind, began, last, 1 AS sessions, requests,
    cost_before > 0 AS known, cost_before > 0 AND cost_after > cost_before AS losses, moved, reads FROM sessions
    UNION ALL SELECT {", ".join(FLEET_SESSIONS)} FROM fleet_sessions)"""
"""The sessions of this replica, and the sums of others'."""


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

    def conditions(self, namespace: str | None, words: Sequence[str], at: str) -> tuple[str, Sequence[object]]:
        """Return conditions on the rows of a namespace and their values. `words` are the columns that are searched, and
        `at` is the one of the time."""
        found: list[tuple[str, object]] = []
        if namespace is not None:
            found.append(("namespace = ?", namespace))
        found += [(f"{name} = ?", value) for name, value in (("tenant", self.tenant), ("model", self.model)) if value]
        if self.session:
            found.append(("session = ?", _number(self.session)))
        if self.period in PERIODS:
            found.append((f"{at} >= ?", time.time() - PERIODS[self.period][0]))
        if self.text:
            text = self.text[:LONGEST_TEXT].lower()
            found.append((f"instr(lower({' || char(10) || '.join(words)}), ?)", text))
        conditions = [condition for condition, _ in found]
        conditions += [OUTCOMES[self.outcome]] if self.outcome in OUTCOMES else []
        return "".join(f" AND {one}" for one in conditions), [value for _, value in found]


ANY = Wanted()
REQUEST_WORDS = ("tenant", "model", "path", "reason", "obstacle", "fault", "detail", "words", "request_id", "status")
SESSION_WORDS = ("tenant", "model", "dialect")


class Reader:
    """One connection, for one thread, that cannot write. `namespace` None stands for all. Raises DashboardFault."""

    def __init__(self, path: Path) -> None:
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

    def _rows(self, query: str, *values: object) -> list[Row]:
        """Run one query. Raises DashboardFault."""
        self._until = time.monotonic() + SECONDS
        try:
            return [dict(row) for row in self._connection.execute(query, values)]
        except (sqlite3.Error, OverflowError) as error:
            raise _unreadable(error) from error

    def namespaces(self) -> list[str]:
        """Return the namespaces of up to `PAGE` sessions, the newest."""
        newest = f"SELECT namespace FROM sessions ORDER BY last DESC LIMIT {PAGE}"
        return [row["namespace"] for row in self._rows(f"SELECT DISTINCT namespace FROM ({newest})")]

    def knows(self, namespace: str) -> bool:
        """Return whether there was a request of this namespace, on any replica."""
        found = "SELECT 1 FROM requests WHERE namespace = ?1 UNION ALL SELECT 1 FROM fleet_sums WHERE namespace = ?1"
        return bool(self._rows(f"{found} LIMIT 1", namespace))

    def replicas(self) -> list[Row]:
        """Return the name, address and newest sums of all other replicas of the last day."""
        query = "SELECT name, url, max(time) AS time FROM fleet WHERE time > ? AND marker = '' GROUP BY name ORDER BY 1"
        return self._rows(query, time.time() - DAY)

    def names(self, namespace: str | None = None) -> list[Row]:
        """Return the tenants and models of the last days, for filters."""
        own, values = _own(namespace)
        query = f"SELECT DISTINCT tenant, model FROM sums WHERE span = ? {own} ORDER BY tenant, model LIMIT 500"
        return self._rows(query, DAY, *values)

    # -- requests and sessions --

    def requests(self, namespace: str | None = None, wanted: Wanted = ANY) -> list[Row]:
        """Return rows with larger ids, the newest or largest first."""
        conditions, values = wanted.conditions(namespace, REQUEST_WORDS, "time")
        query = f"""SELECT * FROM requests WHERE id > ? {conditions}
            ORDER BY {SORTS.get(wanted.sort, "id")} DESC, id DESC LIMIT ? OFFSET ?"""
        return [*map(_shown, self._rows(query, wanted.after, *values, min(wanted.limit, MOST), wanted.offset))]

    def request(self, id: int, namespace: str | None = None) -> Row | None:
        """Return one request with its neighbours in the session, or None if there is none. Its `detail` is None if its
        messages are not listed."""
        own, values = _own(namespace)
        found = self._rows(f"SELECT * FROM requests WHERE id = ? {own}", id, *values)
        if not found:
            return None
        kept, messages = self._rows("SELECT detail FROM details WHERE id = ?", id), None
        with suppress(zlib.error, msgspec.MsgspecError, ValueError):
            messages = detail(kept[0]["detail"]) if kept else None
        near = """SELECT (SELECT max(id) FROM requests WHERE session = ?1 AND id < ?2) AS previous,
            (SELECT min(id) FROM requests WHERE session = ?1 AND id > ?2) AS next"""
        return {**_shown(found[0]), **self._rows(near, found[0]["session"], id)[0], "detail": messages}

    def latency(self, namespace: str | None = None, wanted: Wanted = ANY) -> Row:
        """Return percentiles of the newest requests' seconds, and how many went wrong."""
        conditions, values = wanted.conditions(namespace, REQUEST_WORDS, "time")
        query = f"""SELECT seconds, first_byte_seconds AS first, added_seconds AS added,
            (fault != '' OR status >= 400) AS wrong
            FROM requests WHERE true {conditions} ORDER BY id DESC LIMIT {MEASURED}"""
        rows = self._rows(query, *values)
        latency: Row = {"requests": len(rows), "errors": sum(row["wrong"] for row in rows)}
        for name in ("seconds", "first", "added"):
            found = sorted(row[name] for row in rows if row[name] is not None)
            parts = {f"p{part}": found[(len(found) - 1) * part // 100] for part in (50, 95, 99)} if found else None
            latency[name] = parts
        return latency

    def sessions(self, namespace: str | None = None, wanted: Wanted = ANY) -> list[Row]:
        """Return the sessions with the newest requests."""
        conditions, values = wanted.conditions(namespace, SESSION_WORDS, "last")
        query = f"SELECT *, {SAVED} AS saved FROM sessions WHERE true {conditions} ORDER BY last DESC LIMIT ? OFFSET ?"
        return [*map(_named, self._rows(query, *values, min(wanted.limit, MOST), wanted.offset))]

    def session(self, session: str, namespace: str | None = None) -> list[Row]:
        """Return the newest requests of a session, the oldest of them first."""
        own, values = _own(namespace)
        query = f"SELECT * FROM requests WHERE session = ? {own} ORDER BY id DESC LIMIT {REQUESTS}"
        return [*map(_shown, self._rows(query, _number(session), *values))][::-1]

    # -- sums --

    def sums(self, since: float, span: int = DAY, namespace: str | None = None) -> list[Row]:
        """Return the sums since then, by `KEYS`, of spans that do not end before."""
        own, values = _own(namespace)
        keys, sums = ", ".join(KEYS), ", ".join(f"sum({name}) AS {name}" for name in SUMS)
        query = f"SELECT {keys}, {sums} FROM {ALL_SUMS} WHERE span = ? AND start >= ? {own} GROUP BY {keys}"
        return self._rows(query, span, since // span * span, *values)

    def course(self, since: float, span: int = HOUR, namespace: str | None = None) -> list[Row]:
        """Return the sums of each span since then, without what was only observed. Costs of untouched requests are only
        compared with those of a holdout."""
        own, values = _own(namespace)
        query = f"""SELECT start AS time, sum(requests) AS requests, sum(tokens_before) AS tokens_before,
            sum(tokens_after) AS tokens_after, sum(iif(kind = '{Kind.UNTOUCHED}', 0, cost_before)) AS cost_before,
            sum(iif(kind = '{Kind.UNTOUCHED}', 0, cost_after)) AS cost_after FROM {ALL_SUMS}
            WHERE span = ? AND start >= ? AND kind != '{Kind.OBSERVED}' {own} GROUP BY start ORDER BY start"""
        return self._rows(query, span, since // span * span, *values)

    def groups(self, since: float, namespace: str | None = None) -> list[Row]:
        """Return the sessions of each group of a holdout that began since then, by tenant and model."""
        own, values = _own(namespace)
        query = f"""SELECT tenant, model, holdout, sum(sessions) AS sessions, sum(requests) AS requests
            FROM {ALL_SESSIONS} WHERE last >= ? AND began >= ? AND holdout != '' {own} GROUP BY 1, 2, 3"""
        return self._rows(query, since, since, *values)

    def losses(self, since: float, namespace: str | None = None) -> Row:
        """Return of the sessions with costs and a request since then how many there are, how many of them cost more
        than as they came, and how many of their moved results were read back: none of those that were only observed."""
        own, values = _own(namespace)
        query = f"""SELECT coalesce(sum(known), 0) AS sessions, coalesce(sum(losses), 0) AS losses,
            coalesce(sum(moved), 0) AS moved, coalesce(sum(reads), 0) AS reads FROM {ALL_SESSIONS}
            WHERE last >= ? AND holdout != '{Holdout.KEPT}' AND kind != '{Kind.OBSERVED}' {own}"""
        return self._rows(query, since, *values)[0]

    def extremes(self, since: float, namespace: str | None = None, most: int = 5) -> tuple[list[Row], list[Row]]:
        """Return the sessions with a request since then that saved most, and those that lost most."""
        own, values = _own(namespace)
        query = f"SELECT *, {SAVED} AS saved FROM sessions WHERE last >= ? AND kind != '{Kind.OBSERVED}' {own}"
        best = self._rows(f"{query} AND saved > 0 ORDER BY saved DESC LIMIT {most}", since, *values)
        worst = self._rows(f"{query} AND saved < 0 ORDER BY saved LIMIT {most}", since, *values)
        return [*map(_named, best)], [*map(_named, worst)]


def _unreadable(error: Exception) -> DashboardFault:
    """Return the fault of a page that cannot read the file, with what to do."""
    passes = isinstance(error, sqlite3.OperationalError)  # it is locked, was just removed, or the query took too long
    cure = "try again" if passes else "delete it, or name another with --dashboard"
    return DashboardFault(f"The dashboard's file cannot be read ({error}): {cure}")


def _own(namespace: str | None) -> tuple[str, Sequence[str]]:
    """Return a condition on the namespace, and its value."""
    return ("", ()) if namespace is None else ("AND namespace = ?", (namespace,))


def _number(session: str) -> int:
    """Return the number of a session with this name in addresses: that of no session, if it is no name."""
    with suppress(ValueError):
        return int(session[:16], 16) % (1 << 63)
    return -1


def _named(row: Row) -> Row:
    """Return a row with its session's name in addresses."""
    return {**row, "session": None if row["session"] is None else f"{row['session']:016x}"}


def _shown(row: Row) -> Row:
    """Return a request as pages get it."""
    return _named(row) | {
        name: msgspec.json.decode(row[name]) if row.get(name) else None for name in (*NESTED, "kinds")
    }
