"""The statements that add rows to the dashboard's file."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import msgspec

from proxy.dashboard.rows import HOURLY, KEYS, SUMS

SIZES = (1_024, 256, 64, 16, 4, 1)
"""So many rows are added by one statement. At each one the interpreter passes to another thread and back several times,
which costs as much as to add some dozens of rows. To prepare one costs more than to add its rows, and there are so few
that SQLite's module keeps them prepared."""

SESSION = ("namespace", "tenant", "model", "dialect", "holdout", "began", "last", "first_id", "last_id")
COUNTED = ("requests", "events", "cost_before", "cost_after")
NEWEST = ("tokens_before", "tokens_after", "kind")
"""What a session has of its newest request: tokens of all requests would count the same messages many times."""


class Insertion(msgspec.Struct, frozen=True):
    """Adds rows to a table. `otherwise` says what becomes of one that is there already."""

    table: str
    columns: tuple[str, ...]
    otherwise: str = ""

    def of(self, rows: int) -> str:
        """Return the statement that adds so many rows."""
        return _inserting(self.table, self.columns, self.otherwise, rows)


@lru_cache(100)
def _inserting(table: str, columns: Sequence[str], otherwise: str, rows: int) -> str:
    row = f"({', '.join('?' * len(columns))})"
    return f"INSERT INTO {table} ({', '.join(columns)}) VALUES {', '.join([row] * rows)} {otherwise}"


def _sums(names: Sequence[str]) -> str:
    return ", ".join(f"{name} = {name} + excluded.{name}" for name in names)


ADD_PACK = Insertion("packs", ("last", "first", "namespace", "worker", "count", "newest", "sessions", "rows", "sent"))
ADD_DETAIL = Insertion("details", ("id", "namespace", "detail"))
ADD_DAY = Insertion("days", ("day", "namespace", *KEYS, *SUMS), f"ON CONFLICT DO UPDATE SET {_sums(SUMS)}")
ADD_HOUR = Insertion("hours", ("hour", "namespace", *HOURLY), f"ON CONFLICT DO UPDATE SET {_sums(HOURLY)}")
ADD_SESSION = Insertion(
    "sessions",
    ("session", *SESSION, *COUNTED, *NEWEST),
    f"""ON CONFLICT DO UPDATE SET last = max(last, excluded.last), last_id = excluded.last_id,
    holdout = excluded.holdout, {_sums(COUNTED)}, {", ".join(f"{name} = excluded.{name}" for name in NEWEST)}""",
)
