"""Beginnings of histories. A body that begins like an earlier one is compared with it, and only the
rest is parsed.

    body ──compare──> what is known of its beginning ──┐
      └─────the rest, behind one entry that stands in──┴──> the request, as if all had been parsed

A beginning ends with an entry: with the last one, or before the cache breakpoints that clients move
along with the end of their history. All that is kept with it is a pure function of its bytes. Where
anything is unusual, no beginning is kept, and the body is parsed whole.
"""

from __future__ import annotations

import re
from functools import cache

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from proxy import rawjson
from proxy.dialects.base import Dialect
from proxy.dialects.entries import marks_in
from proxy.dialects.request import opened
from proxy.plan import compacting
from proxy.plan.history import Beginning
from proxy.plan.turn import Request, Unplannable
from proxy.rawjson import NotJson

LEAST = 4 << 10
"""Bytes of the shortest beginning: a shorter one is parsed as fast as it is compared."""
TRAILING = 8
"""The last messages, among which clients move their cache breakpoints."""

STAND_IN = b'{"role":"user","content":"in the place of what is known"}'
"""Stands for the known messages."""
_BETWEEN = b" \t\r\n,"
_MASK = b"\x7f"
"""The byte with which `rawjson` masks backslashes. A body that has it must be read as a whole."""


def parsed(dialect: Dialect, body: bytes, known: Beginning | None = None) -> Request:
    """Parse a body. Its messages, from `place_in` it on, begin with those of `known`. Raises
    Unplannable."""
    request = _continued(dialect, body, known) if known else None
    return request or dialect.parse(body)


def place_in(dialect: Dialect, body: bytes) -> int | None:
    """Return where the messages seem to begin in a body; None if it has no list of them. Whatever
    is found there is compared with messages, or parsed."""
    found = _opening(dialect.listing).search(body)
    return found.end() if found else None


@cache
def _opening(listing: str) -> re.Pattern[bytes]:
    return re.compile(rb'"%b"[ \t\r\n]*:[ \t\r\n]*\[' % listing.encode())


def _continued(dialect: Dialect, body: bytes, known: Beginning) -> Request | None:
    """Return the request of which only what is new is parsed; None if it has to be parsed whole."""
    start = place_in(dialect, body)
    if start is None:
        return None
    if len(body) > rawjson.MAX_COMMAS and rawjson.commas(body) > rawjson.MAX_COMMAS:
        return None
    rest = memoryview(body)[start + len(known.text) :]
    short = b"".join((memoryview(body)[:start], STAND_IN, rest))
    try:
        members = opened(short, len(body))
        listed = members.get(dialect.listing, rawjson.NULL)
        there = bytes(memoryview(listed)[: len(STAND_IN) + 1]) == b"[" + STAND_IN
        if not there or short.count(STAND_IN) > 1 or _MASK in short:
            return None
        request = dialect.request_of(short, members)
        new = len(rawjson.elements(listed)) - 1
    except (NotJson, Unplannable, msgspec.MsgspecError):
        return None
    defines = any(type in short for type in dialect.defining)  # wherever that is
    if known.count + new > rawjson.MAX_ELEMENTS or defines or _unusual(dialect, bytes(listed)):
        return None
    end = start + len(known.text) + len(memoryview(listed)) - 1 - len(STAND_IN)
    members[dialect.listing] = Raw(memoryview(body)[start - 1 : end])
    return replace(
        request,
        body=body,
        entries=[*known.entries, *request.entries[1:]],
        replied=known.replied or request.replied,
        known=known,
        fresh=short,
    )


def coming(dialect: Dialect, request: Request) -> Beginning | None:
    """Return the beginning that later requests of this conversation probably have: the known one,
    if nothing is to be added to it. None if this one is unusual."""
    listed = memoryview(request.members.get(dialect.listing, rawjson.NULL))
    start = place_in(dialect, request.body)
    if start is None or len(listed) < LEAST or request.obstacle:
        return None
    if not (request.known or request.body.startswith(bytes(listed), start - 1)):
        return None
    known = request.known or Beginning(b"", 0, [])
    end = start + len(listed) - 2
    new = request.body[start + len(known.text) : end]
    if _unusual(dialect, new):
        return None
    elements = rawjson.elements(b"[%b]" % new.lstrip(_BETWEEN))
    first = max(len(elements) - TRAILING, 0)
    marked = (at for at in range(first, len(elements)) if marks_in(elements[at]))
    kept = next(marked, len(elements))
    while kept and not dialect.ends(elements[kept - 1]):
        kept -= 1
    if not kept:
        return request.known
    cut = len(new)
    for raw in reversed(elements[kept:]):
        cut = new.rindex(bytes(raw), 0, cut)
    end = start + len(known.text) + cut
    while request.body[end - 1] in _BETWEEN:
        end -= 1
    text = request.body[start:end]
    if len(text) < LEAST:
        return None
    # the bytes of these entries are their own, and keep no body in memory
    entries, _, more = dialect.split({dialect.listing: Raw(rawjson.array(elements[:kept]))})
    return Beginning(
        text,
        known.count + kept,
        [*known.entries, *entries],
        replied=known.replied or more.get("replied", False),
        refers=known.refers or compacting.MARK in new,
    )


def _unusual(dialect: Dialect, part: bytes) -> bool:
    """Whether this part of a history has something that may change how the rest is read."""
    changes = (_MASK, dialect.requests.updates or _MASK, *dialect.defining)
    return any(one in part for one in changes)
