"""The statements that add rows to the dashboard's file."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from proxy.dashboard.rows import HOURLY, KEYS, SUMS

AT_ONCE = 142
"""Most rows that one statement adds, as SQLite allows at least 999 values. At each statement the interpreter passes to
another thread and back, which costs more than to add ten rows."""

SESSION = ("namespace", "tenant", "model", "dialect", "holdout", "began", "last", "first_id", "last_id")
COUNTED = ("requests", "events", "tokens_before", "tokens_after", "cost_before", "cost_after")


def _inserting(table: str, columns: Sequence[str]) -> str:
    return f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"


def _adding(table: str, keys: Sequence[str], sums: Sequence[str]) -> str:
    """Return the statement that adds sums to those of the same keys."""
    return f"""
{_inserting(table, (*keys, *sums))}
ON CONFLICT DO UPDATE SET {", ".join(f"{name} = {name} + excluded.{name}" for name in sums)}
"""


ADD = _inserting("requests", ("id", "time", "namespace", "session", "worker", "outcome", "sent"))
ADD_DAY = _adding("days", ("day", "namespace", *KEYS), SUMS)
ADD_HOUR = _adding("hours", ("hour", "namespace"), HOURLY)
ADD_SESSION = f"""
{_inserting("sessions", ("session", *SESSION, *COUNTED))}
ON CONFLICT DO UPDATE SET last = max(last, excluded.last), last_id = excluded.last_id, holdout = excluded.holdout,
{", ".join(f"{name} = {name} + excluded.{name}" for name in COUNTED if not name.startswith("tokens"))},
tokens_before = excluded.tokens_before, tokens_after = excluded.tokens_after
"""
"""A session shows the tokens of its newest request: those of all requests would count the same messages many times."""


@lru_cache(AT_ONCE)
def add_several(rows: int) -> str:
    """Return the statement that adds so many rows."""
    return ADD + ", (?, ?, ?, ?, ?, ?, ?)" * (rows - 1)
