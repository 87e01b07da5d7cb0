"""Reads rows for the pages. A viewer other than the operator gets the rows of its own namespace only."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from proxy.dashboard.events import LiveEvent, live_event, name_of
from proxy.dashboard.file import moved, unreadable
from proxy.dashboard.rows import DAY, HOUR, HOURLY, KEYS, NO_ROW, SUMS, Damaged, decoded
from proxy.dashboard.sessions import detail, listed, sent_tokens
from proxy.telemetry.outcome import Holdout, Kind

SECONDS = 5.0
"""The longest time for one query."""

STEPS = 100_000
"""Instructions of SQLite between two looks at the clock; some milliseconds."""

PAGE = 200
"""Rows on one page."""

CACHED = 16 << 10
"""KiB of the file that a connection keeps, which are the sums of a month."""

REQUESTS = 2_000
"""Requests of one session that are shown, the newest."""

Row = dict[str, Any]

_OF_SESSION = """requests INDEXED BY requests_by_namespace ON requests.namespace = sessions.namespace
AND requests.session = sessions.session AND requests.id >= first_id"""
"""The rows of a session, found in the index alone: a session may begin and end a month and a million rows apart."""


class Reader:
    """One connection, for one thread, that cannot write. `namespace` None stands for all."""

    def __init__(self, path: Path) -> None:
        self.gone = moved(path)
        self._connection = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode=rw", timeout=1.0, isolation_level=None, check_same_thread=False, uri=True
        )
        self._connection.execute("PRAGMA query_only = ON")
        self._connection.execute(f"PRAGMA cache_size = -{CACHED}")
        self._connection.set_progress_handler(self._late, STEPS)
        self._until = 0.0

    def close(self) -> None:
        self._connection.close()

    def newest(self) -> int:
        """Return the id of the newest row; 0 if there is none."""
        [row] = self._rows(f"SELECT coalesce(max(id), 0) AS id FROM requests WHERE id < {NO_ROW}")
        return int(row["id"])

    def namespaces(self) -> list[str]:
        """Return the namespaces of up to `PAGE` sessions, the newest."""
        found = self._rows(
            f"""SELECT DISTINCT name FROM namespaces JOIN (SELECT namespace FROM sessions ORDER BY last DESC
            LIMIT {PAGE}) ON namespace = id"""
        )
        return [row["name"] for row in found]

    def after(self, id: int) -> list[LiveEvent]:
        """Return up to `PAGE` rows that are newer than this one, the newest of them, in their order."""
        query = f"""SELECT id, time, worker, session, outcome FROM requests WHERE id > ? AND id < {NO_ROW}
        ORDER BY id DESC LIMIT {PAGE}"""
        events = []
        for row in reversed(self._found(query, (id,))):
            with suppress(Damaged):
                events.append(live_event(*row))
        return events

    def before(self, id: int, namespace: str | None = None) -> list[Row]:
        """Return up to `PAGE` rows that are older than this one, the newest first."""
        own, values = _own("requests.namespace", namespace)
        return _readable(
            self._rows(f"SELECT * FROM requests WHERE id < ? {_by_id(own)} ORDER BY id DESC LIMIT {PAGE}", id, *values)
        )

    def sums(self, since: float, namespace: str | None = None) -> list[Row]:
        """Return the sums since the beginning of that day (UTC), by `KEYS`."""
        own, values = _own("namespace", namespace)
        sums = ", ".join(f"sum({name}) AS {name}" for name in SUMS)
        return self._rows(
            f"SELECT {', '.join(KEYS)}, {sums} FROM days WHERE day >= ? {own} GROUP BY {', '.join(KEYS)}",
            int(since) // DAY,
            *values,
        )

    def hours(self, since: float, namespace: str | None = None) -> list[Row]:
        """Return the sums of each hour since then, without what was only observed."""
        own, values = _own("namespace", namespace)
        return self._rows(
            f"""SELECT hour * {HOUR} AS time, {", ".join(f"sum({name}) AS {name}" for name in HOURLY)}
            FROM hours WHERE hour >= ? {own} GROUP BY hour ORDER BY hour""",
            int(since) // HOUR,
            *values,
        )

    def groups(self, since: float, namespace: str | None = None) -> list[Row]:
        """Return the sessions of each group of a holdout that began since then, by tenant and model."""
        own, values = _own("namespace", namespace)
        if not self._rows("SELECT 1 FROM sessions WHERE began >= ? AND holdout != '' LIMIT 1", since):
            return []
        # Where there is a holdout, most sessions are in one of its groups: to go through all is faster than an index.
        return self._rows(
            f"""SELECT tenant, model, holdout, count(*) AS sessions, sum(requests) AS requests,
            sum(cost_before) AS cost_before, sum(cost_after) AS cost_after
            FROM sessions {"NOT INDEXED" if namespace is None else ""}
            WHERE began >= ? AND holdout != '' {_by_id(own)} GROUP BY tenant, model, holdout""",
            since,
            *values,
        )

    def losses(self, since: float, namespace: str | None = None) -> Row:
        """Return how many sessions with costs began since then, and how many of them cost more than as they came."""
        own, values = _own("namespace", namespace)
        [row] = self._rows(
            f"""SELECT count(*) AS sessions, coalesce(sum(cost_after > cost_before), 0) AS losses
            FROM sessions
            WHERE began >= ? AND cost_before > 0 AND holdout != '{Holdout.KEPT}' {_by_id(own)}""",
            since,
            *values,
        )
        return row

    def sessions(self, namespace: str | None = None) -> list[Row]:
        """Return the `PAGE` sessions with the newest requests."""
        own, values = _own("name", namespace)
        found = self._rows(
            f"""SELECT sessions.*, namespaces.name, outcome
            FROM sessions JOIN namespaces ON namespaces.id = sessions.namespace
            LEFT JOIN requests ON requests.id = last_id
            WHERE true {own} ORDER BY last DESC LIMIT {PAGE}""",
            *values,
        )
        return [_of_session(row) for row in found]

    def session(self, session: int, namespace: str | None = None) -> list[Row]:
        """Return the newest requests of a session, the oldest of them first."""
        own, values = _own("name", namespace)
        return _readable(
            self._rows(
                f"""SELECT * FROM requests WHERE id IN (
                    SELECT requests.id FROM sessions JOIN namespaces ON namespaces.id = sessions.namespace
                    JOIN {_OF_SESSION} AND requests.id <= last_id
                    WHERE sessions.session = ? {own} ORDER BY requests.id DESC LIMIT {REQUESTS}
                ) ORDER BY id DESC""",
                session,
                *values,
            )
        )[::-1]

    def request(self, id: int, namespace: str | None = None) -> Row | None:
        """Return one request, or None if there is none. Its `detail` is None if nothing is known of its messages."""
        own, values = _own("name", namespace)
        found = self._rows(
            f"""SELECT requests.*, detail FROM requests LEFT JOIN details USING (id)
            JOIN namespaces ON namespaces.id = requests.namespace WHERE requests.id = ? {own}""",
            id,
            *values,
        )
        if not (shown := _readable(found)):
            return None
        [row], [one] = found, shown
        try:
            messages = detail(row["detail"]) if row["detail"] else self._listed(row, one)
        except Damaged:
            messages = None
        return {**one, "detail": messages}

    def _listed(self, row: Row, shown: Row) -> Row | None:
        """Return the messages of a request that went as it came, from what it and earlier ones added to its session."""
        own = sent_tokens(row["sent"]).added if row["sent"] else None
        if own is None or shown["kind"] != Kind.UNTOUCHED:
            return None
        rows = self._rows(
            f"""SELECT sent FROM requests WHERE sent IS NOT NULL AND id IN (
                SELECT requests.id FROM sessions JOIN {_OF_SESSION} AND requests.id < ?
                WHERE sessions.session = ? ORDER BY requests.id DESC LIMIT {REQUESTS}
            ) ORDER BY id DESC""",
            row["id"],
            row["session"],
        )
        earlier = [added for added in (sent_tokens(one["sent"]).added for one in rows) if added]
        try:
            messages, omitted = listed([own, *earlier])
        except (ValueError, IndexError) as error:
            raise Damaged(str(error)) from error
        return {"messages": messages, "omitted": omitted, "texts": {}, "snapshot": None}

    def _rows(self, query: str, *values: object) -> list[Row]:
        """Run one query. Raises DashboardFault."""
        return [dict(row) for row in self._found(query, values, sqlite3.Row)]

    def _found(self, query: str, values: Sequence[object], kind: type[sqlite3.Row] | None = None) -> list[Any]:
        """Return what a query finds, as tuples unless another `kind` is given. Raises DashboardFault."""
        self._until = time.monotonic() + SECONDS
        cursor = self._connection.cursor()
        cursor.row_factory = kind
        try:
            return cursor.execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise unreadable(error) from error

    def _late(self) -> bool:
        return time.monotonic() > self._until


def _of_session(row: Row) -> Row:
    """Return a session as pages get it. Its `kind` is that of its newest request."""
    newest = _readable([{"session": None, "sent": None, "outcome": row.pop("outcome") or b""}])
    kind = newest[0]["kind"] if newest else ""
    return {**row, "kind": kind, "namespace": row.pop("name"), "session": name_of(row["session"])}


def _own(column: str, namespace: str | None) -> tuple[str, tuple[str, ...]]:
    """Return a condition on the namespace, and its value."""
    return ("", ()) if namespace is None else (f"AND {column} = ?", (namespace,))


def _by_id(own: str) -> str:
    """Return a condition on the namespace's name as one on its number."""
    return own.replace("= ?", "= (SELECT id FROM namespaces WHERE name = ?)")


def _readable(rows: list[Row]) -> list[Row]:
    """Return requests as pages get them, without those that are damaged."""
    found = []
    for row in rows:
        with suppress(Damaged):
            found.append(_shown(row))
    return found


def _shown(row: Row) -> Row:
    """Return a request as pages get it: its outcome with what is known beside it. Raises Damaged."""
    sent = sent_tokens(row["sent"]) if row["sent"] else None
    beside = {"kinds": sent.tokens, "came": sent.came} if sent else {}
    kept: Row = {name: row[name] for name in ("id", "time", "worker") if name in row}
    session = None if row["session"] is None else name_of(row["session"])
    return {**decoded(row["outcome"]), **kept, **beside, "session": session}
