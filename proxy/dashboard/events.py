"""Rows as the stream of the live page has them: by columns, as they are kept, with what this page shows and no more.

They are made soon after their requests ended, for whoever watches, and so take as little as possible: what a pack has
once is read, written and sent once. The page takes them apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from proxy.dashboard.packs import checked
from proxy.dashboard.rows import ADDED, STORED, Damaged

T = TypeVar("T")

LIVE = ("tenant", "kind", "method", "path", "dialect", "model", "status", "fault", "detail", "reason", "obstacle",
        "tokens_before", "tokens_after", "prompt_tokens", "cached_tokens", "compacted", "compressed", "reinserted",
        "rounds", "events", "new_event", "holdout")  # fmt: skip
"""Fields of an outcome that the live page shows of a request."""

_LEAST = len(STORED) - len(ADDED)
_SHOWN = [(STORED.index(name), name) for name in LIVE]
_NAMESPACE = STORED.index("namespace")
_encode = msgspec.json.Encoder().encode


class LiveRows(msgspec.Struct, frozen=True, gc=False):
    """Rows of one namespace, as viewers get them."""

    id: int
    """The newest one's."""
    namespace: str
    text: bytes
    """A JSON object: the `ids`, `times` and `sessions` of the rows; the `worker`; `same`, the fields in which they
    agree, without those that are empty or 0; and `each`, all values of the others."""


def live_rows(first: int, worker: int, sessions: bytes, rows: bytes, after: int) -> LiveRows:
    """Return those rows of a pack that have larger ids than `after`. Raises Damaged."""
    columns, places, numbers = checked(sessions, rows)
    values, others = columns.values, columns.others
    if len(values) < _LEAST or _NAMESPACE in others or not isinstance(values[_NAMESPACE], str):
        raise Damaged("these are not the values of a pack")
    try:
        new = [at for at, place in enumerate(places) if first + place > after]
        shown: dict[str, object] = {
            "ids": [first + places[at] for at in new],
            "times": _at(new, columns.times),
            "sessions": [name_of(number) for number in _at(new, numbers)],
            "worker": worker,
            "same": {name: values[at] for at, name in _SHOWN if at not in others and values[at]},
            "each": {name: _at(new, others[at]) for at, name in _SHOWN if at in others},
        }
        return LiveRows(first + max(places), values[_NAMESPACE], _encode(shown))
    except (msgspec.MsgspecError, RecursionError, TypeError, ValueError, OverflowError) as error:
        raise Damaged(str(error)) from error


def name_of(session: int | None) -> str | None:
    """Return a session's number as text, because JavaScript's numbers are not exact enough."""
    return None if session is None else f"{session:016x}"


def _at(places: Sequence[int], column: Sequence[T]) -> Sequence[T]:
    return column if len(places) == len(column) else [column[place] for place in places]
