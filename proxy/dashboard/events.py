"""Rows as the stream of the live page has them: one server-sent event each, with what this page shows and no more.

They are made soon after their requests ended, for whoever watches, and so take as little as possible: 72 rows in a
fifth of a millisecond.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import msgspec

from proxy.dashboard.packs import PackedRow
from proxy.dashboard.rows import ADDED, STORED, Damaged
from proxy.telemetry.outcome import Kind, Outcome

LIVE = ("tenant", "kind", "dialect", "model", "status", "fault", "detail", "reason",
        "obstacle", "tokens_before", "tokens_after", "prompt_tokens", "cached_tokens", "compacted", "compressed",
        "reinserted", "rounds", "events", "new_event", "holdout")  # fmt: skip
"""Fields of an outcome that the live page shows of a request."""

ADDRESS = ("method", "path")
"""Those that it shows of requests of these kinds, too."""

_WITH_ADDRESS = (Kind.RELAY, Kind.OPERATION)

_LEAST = len(STORED) - len(ADDED)


class LiveEvent(msgspec.Struct, frozen=True, gc=False):
    """A row, as viewers get it."""

    id: int
    namespace: str
    text: bytes


def _empty(name: str) -> object:
    """Return the value of a field that the stream leaves out."""
    default = _DEFAULTS[name]
    return "" if default is msgspec.NODEFAULT or isinstance(default, str) else default


_DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(Outcome)}
_Shown: Callable[..., msgspec.Struct] = msgspec.defstruct(
    "_Shown",
    [
        *(("id", int), ("time", float), ("worker", int)),
        *((name, Any, _empty(name)) for name in LIVE),
        ("session", str | None, None),
        *((name, Any, "") for name in ADDRESS),
    ],
    omit_defaults=True,
    gc=False,
)
_live = itemgetter(*map(STORED.index, LIVE))
_address = itemgetter(*map(STORED.index, ADDRESS))
_NAMESPACE, _KIND = map(STORED.index, ("namespace", "kind"))
_encode = msgspec.json.Encoder().encode


def live_event(entry: PackedRow) -> LiveEvent:
    """Return a row's event, without fields that are empty or 0. Raises Damaged."""
    try:
        values = entry.values
        if len(values) < _LEAST:
            raise Damaged("too few values")
        session = None if entry.session is None else name_of(entry.session)
        address = _address(values) if values[_KIND] in _WITH_ADDRESS else ()
        shown = _Shown(entry.id, entry.time, entry.worker, *_live(values), session, *address)
        return LiveEvent(entry.id, values[_NAMESPACE], b"id: %d\ndata: %b\n\n" % (entry.id, _encode(shown)))
    except (msgspec.MsgspecError, RecursionError, TypeError, ValueError, OverflowError) as error:
        raise Damaged(str(error)) from error


def name_of(session: int) -> str:
    """Return a session's number as text, because JavaScript's numbers are not exact enough."""
    return f"{session:016x}"
