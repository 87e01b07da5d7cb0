"""What a request that ended adds to the dashboard's tables. Pure, but for the number of the process."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from operator import add, itemgetter
from typing import Any

import msgspec

from proxy.errors import Fault
from proxy.telemetry.outcome import Kind, Outcome

MINUTE, HOUR, DAY = 60, 3600, 86_400

SPANS = {MINUTE: 2 * HOUR, HOUR: 8 * DAY, DAY: 366 * DAY}
"""Sums are kept by these spans, each for so many seconds. A tenant's retention may be shorter."""

KEYS = ("tenant", "model", "dialect", "kind", "usage", "holdout", "miss")
"""Fields of an outcome by which sums are kept apart, beside the namespace."""

SUMMED = (
"tokens_before", "tokens_after", "cost_before", "cost_after", "prompt_tokens", "completion_tokens", "cached_tokens",
    "written_tokens", "missed_tokens", "summary_prompt_tokens", "summary_completion_tokens", "compacted", "compressed",
    "reinserted", "rounds", "new_event", "unfollowed",
    "again_tools", "again_exact", "whole_tools", "whole_exact",
)  # fmt: skip
"""Fields of an outcome that are added up."""

SUMS = ("requests", "faults", "losses", "reads", "retrieved_tokens", *SUMMED)
"""The columns of sums: requests, those that went wrong, those that cost more than as they came, calls of our tools and
the tokens that these read back, and the sums of fields."""

TEXTS = ("method", "path", "model", "obstacle", "detail")
"""Fields of an outcome that the client or upstream worded."""

LONGEST_TEXT = 200
"""Most characters of those."""

MOST = 10**12
"""The most that a number counts for, as in the metrics: upstream may report any."""

SUMS_KEYS = ("span", "start", "namespace", *KEYS)
"""The columns by which sums are kept apart."""

_NESTED = tuple(
    one.name for one in msgspec.structs.fields(Outcome) if one.default in ((), msgspec.NODEFAULT) and not one.required
)
Row = dict[str, Any]


class Recorded(msgspec.Struct, frozen=True):
    """A request that ended: when, in seconds since the epoch, how, and what it shows beside its outcome."""

    time: float
    outcome: Outcome
    session: int | None = None
    """Identifies its session, in 63 bits; None if it has no history."""
    kinds: Sequence[int] | None = None
    """The tokens that were sent of each of `describe.KINDS`."""
    detail: bytes | None = None
    """What became of its messages: see `describe`."""


def row_of(id: int, recorded: Recorded) -> Row:
    """Return the values of a request's row."""
    row: Row = msgspec.to_builtins(recorded.outcome)
    for name in TEXTS:
        text = row[name]
        if len(text) > LONGEST_TEXT or not text.isascii():
            row[name] = text[:LONGEST_TEXT].encode("utf-8", "replace").decode()
    for name in SUMMED:
        if row[name] > MOST:
            row[name] = MOST
    for name in _NESTED:
        row[name] = msgspec.json.encode(row[name]).decode() if row[name] else ""
    row["id"], row["time"], row["worker"], row["session"] = id, recorded.time, os.getpid(), recorded.session
    row["kinds"] = msgspec.json.encode(recorded.kinds).decode() if recorded.kinds else ""
    return row


def nested(row: Row) -> Row:
    """Return a row with its values that are no numbers or texts as such."""
    for name in (*_NESTED, "kinds"):
        row[name] = msgspec.json.decode(row[name]) if row.get(name) else None
    return row


def _amounts(row: Row) -> list[int]:
    """Return what a request adds to `SUMS`."""
    fault = int(row["fault"] != Fault.NONE)
    if row["kind"] == Kind.OBSERVED and row["status"] != 200:  # as in the metrics: nothing was planned for its reply
        return [1, fault, *[0] * (len(SUMS) - 2)]
    lost = int(row["kind"] != Kind.SUMMARY and row["cost_after"] > row["cost_before"])
    return [1, fault, lost, *_read_back(row), *_summed(row)]


def _read_back(row: Row) -> tuple[int, int]:
    """Return how many calls of our tools there were, and the tokens that these read back."""
    if not row["tool_uses"]:
        return 0, 0
    uses = msgspec.json.decode(row["tool_uses"])
    return sum(use.get("calls", 1) for use in uses), min(sum(use["tokens"] for use in uses), MOST)


def sums_of(rows: Sequence[Row]) -> list[tuple[Any, ...]]:
    """Return what requests add to the sums of minutes, hours and days."""
    found: dict[tuple[Any, ...], list[int]] = {}
    for row in rows:
        amounts = _amounts(row)
        for span in SPANS:
            key = span, int(row["time"] // span * span), *_keys(row)
            found[key] = [*map(add, found[key], amounts)] if key in found else amounts
    return [(*key, *amounts) for key, amounts in found.items()]


_keys, _summed = itemgetter("namespace", *KEYS), itemgetter(*SUMMED)


def sessions_of(rows: Sequence[Row]) -> Iterator[Row]:
    """Yield what requests add to their sessions."""
    for row in rows:
        if row["session"] is not None:
            yield row | {
                "began": row["time"],
                "last": row["time"],
                "last_id": row["id"],
                "requests": 1,
                "events": row["new_event"],
                "reads": _read_back(row)[0],
                "moved": row["compacted"],
                "newest_before": row["tokens_before"],
                "newest_after": row["tokens_after"],
            }
