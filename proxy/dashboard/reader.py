"""Reads rows for the pages. A viewer other than the operator gets the rows of its own namespace only."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from operator import attrgetter
from pathlib import Path
from typing import Any

from proxy.dashboard.events import LiveRows, live_rows, name_of
from proxy.dashboard.file import moved, unreadable
from proxy.dashboard.packs import SPAN, PackedRow, entries, name
from proxy.dashboard.rows import DAY, HOUR, HOURLY, KEYS, NO_ROW, SUMS, Damaged, named
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

_id = attrgetter("id")

_OF_SESSION = "packs INDEXED BY packs_by_namespace WHERE namespace = ? AND last >= ? AND instr(sessions, ?)"
"""The packs with rows of a session, found in the index alone: it may begin and end a month and a million rows apart."""


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
        [(newest,)] = self._found(f"SELECT coalesce(max(last), 0) FROM packs WHERE last < {NO_ROW}", ())
        return int(newest)

    def namespaces(self) -> list[str]:
        """Return the namespaces of up to `PAGE` sessions, the newest."""
        found = self._rows(
            f"""SELECT DISTINCT name FROM namespaces JOIN (SELECT namespace FROM sessions ORDER BY last DESC
            LIMIT {PAGE}) ON namespace = id"""
        )
        return [row["name"] for row in found]

    def after(self, id: int) -> list[LiveRows]:
        """Return the rows that are newer than this one, of the `PAGE` newest, in the order of the newest of each
        pack."""
        found = list[LiveRows]()
        query = f"SELECT last, first, worker, sessions, rows FROM packs WHERE last > ? AND last < {NO_ROW}"
        for last, first, worker, sessions, rows in self._each(f"{query} ORDER BY last DESC", (id,)):
            if not found:
                id = max(id, last - PAGE)
            if last <= id:
                break
            with suppress(Damaged):
                found.append(live_rows(first, worker, sessions, rows, id))
        return found[::-1]

    def before(self, id: int, namespace: str | None = None) -> list[Row]:
        """Return up to `PAGE` rows that are older than this one, the newest first."""
        own, values = _own("namespace", namespace)
        return _readable(self._newest(f"packs WHERE last < ? {_by_id(own)}", (id + SPAN, *values), before=id))

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
        """Return how many sessions with costs began since then, and how many of them cost more than as they came:
        none of those that were only observed."""
        own, values = _own("namespace", namespace)
        [row] = self._rows(
            f"""SELECT count(*) AS sessions, coalesce(sum(cost_after > cost_before), 0) AS losses
            FROM sessions
            WHERE began >= ? AND cost_before > 0 AND holdout != '{Holdout.KEPT}' AND kind != '{Kind.OBSERVED}'
            {_by_id(own)}""",
            since,
            *values,
        )
        return row

    def sessions(self, namespace: str | None = None) -> list[Row]:
        """Return the `PAGE` sessions with the newest requests."""
        own, values = _own("name", namespace)
        found = self._rows(
            f"""SELECT sessions.*, namespaces.name FROM sessions JOIN namespaces ON namespaces.id = sessions.namespace
            WHERE true {own} ORDER BY last DESC LIMIT {PAGE}""",
            *values,
        )
        return [{**row, "namespace": row.pop("name"), "session": name_of(row["session"])} for row in found]

    def session(self, session: int, namespace: str | None = None) -> list[Row]:
        """Return the newest requests of a session, the oldest of them first."""
        own, values = _own("name", namespace)
        found = self._rows(
            f"""SELECT sessions.namespace, first_id, CAST(last_id AS INTEGER) AS last_id FROM sessions
            JOIN namespaces ON namespaces.id = sessions.namespace WHERE session = ? {own}""",
            session,
            *values,
        )
        if not found:
            return []
        return _readable(self._of_session(session, found[0], before=found[0]["last_id"] + 1))[::-1]

    def request(self, id: int, namespace: str | None = None) -> Row | None:
        """Return one request, or None if there is none. Its `detail` is None if nothing is known of its messages."""
        own, values = _own("namespace", namespace)
        found = self._newest(
            f"packs WHERE last >= ? AND last < ? AND first <= ? {_by_id(own)}",
            (id, id + SPAN, id, *values),
            after=id - 1,
            before=id + 1,
        )
        if not (shown := _readable(found)):
            return None
        row, one = found[0], shown[0]
        kept = self._found(f"SELECT detail FROM details WHERE id = ? {_by_id(own)}", (id, *values))
        try:
            messages = detail(kept[0][0]) if kept else self._listed(row, one)
        except Damaged:
            messages = None
        return {**one, "detail": messages}

    def _listed(self, row: PackedRow, shown: Row) -> Row | None:
        """Return the messages of a request that went as it came, from what it and earlier ones added to its session."""
        own = sent_tokens(row.sent).added if row.sent else None
        if own is None or row.session is None or shown["kind"] != Kind.UNTOUCHED:
            return None
        found = self._rows("SELECT namespace, first_id FROM sessions WHERE session = ?", row.session)
        rows = self._of_session(row.session, found[0], before=row.id) if found else []
        earlier = [added for added in (sent_tokens(one.sent).added for one in rows if one.sent) if added]
        try:
            messages, omitted = listed([own, *earlier])
        except (ValueError, IndexError) as error:
            raise Damaged(str(error)) from error
        return {"messages": messages, "omitted": omitted, "texts": {}, "snapshot": None}

    def _of_session(self, session: int, found: Row, before: int) -> list[PackedRow]:
        """Return the newest `REQUESTS` rows of a session with smaller ids, the newest first."""
        values = found["namespace"], found["first_id"], name(session), before + SPAN
        return self._newest(f"{_OF_SESSION} AND last < ?", values, before=before, most=REQUESTS, session=session)

    def _newest(
        self,
        packs: str,
        values: Sequence[object],
        *,
        after: int = 0,
        before: int = NO_ROW,
        most: int = PAGE,
        session: int | None = None,
    ) -> list[PackedRow]:
        """Return the newest rows of these packs, the newest first: with an id between these, and of a session if one is
        given. Raises DashboardFault."""
        found: list[PackedRow] = []
        query = f"SELECT last, first, worker, sessions, rows, sent FROM {packs} ORDER BY last DESC"
        for last, *kept in self._each(query, values):
            if len(found) >= most:
                found = _latest(found, most)
                if last < found[-1].id:
                    break
            with suppress(Damaged):
                found += [row for row in entries(*kept, only=session) if after < row.id < before]
        return _latest(found, most)

    def _rows(self, query: str, *values: object) -> list[Row]:
        """Run one query. Raises DashboardFault."""
        return [dict(row) for row in self._found(query, values, sqlite3.Row)]

    def _found(self, query: str, values: Sequence[object], kind: type[sqlite3.Row] | None = None) -> list[Any]:
        """Return what a query finds, as tuples unless another `kind` is given. Raises DashboardFault."""
        return [*self._each(query, values, kind)]

    def _each(self, query: str, values: Sequence[object], kind: type[sqlite3.Row] | None = None) -> Iterator[Any]:
        """Yield the same one by one."""
        self._until = time.monotonic() + SECONDS
        with closing(self._connection.cursor()) as cursor:
            cursor.row_factory = kind
            try:
                yield from cursor.execute(query, values)
            except (sqlite3.Error, OverflowError) as error:  # ids that others wrote may be too large to go on from
                raise unreadable(error) from error

    def _late(self) -> bool:
        return time.monotonic() > self._until


def _own(column: str, namespace: str | None) -> tuple[str, tuple[str, ...]]:
    """Return a condition on the namespace, and its value."""
    return ("", ()) if namespace is None else (f"AND {column} = ?", (namespace,))


def _by_id(own: str) -> str:
    """Return a condition on the namespace's name as one on its number."""
    return own.replace("= ?", "= (SELECT id FROM namespaces WHERE name = ?)")


def _latest(rows: Iterable[PackedRow], most: int) -> list[PackedRow]:
    return sorted(rows, key=_id, reverse=True)[:most]


def _readable(rows: Sequence[PackedRow]) -> list[Row]:
    """Return requests as pages get them, without those that are damaged."""
    found = []
    for row in rows:
        with suppress(Damaged):
            found.append(_shown(row))
    return found


def _shown(row: PackedRow) -> Row:
    """Return a request as pages get it: its outcome with what is known beside it. Raises Damaged."""
    sent = sent_tokens(row.sent) if row.sent else None
    beside = {"kinds": sent.tokens, "came": sent.came} if sent else {}
    about = {"id": row.id, "time": row.time, "worker": row.worker, "session": name_of(row.session)}
    return {**named(row.values), **beside, **about}
