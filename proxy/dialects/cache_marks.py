"""The proxy's own cache breakpoints, for clients that mark what upstream shall cache.

Such a cache has an entry for each mark, found only from a mark, and only within 20 blocks before it. The client marks
the end of its history, so behind a change upstream would find no entry but that of the system prompt. Our first mark is
directly before the change. The next event mostly changes what follows this one's results, and until then no request
ends there. So our second mark is directly behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Raw

from proxy import rawjson
from proxy.dialects.values import Members, text_of
from proxy.plan.request import Request
from proxy.rawjson import NotJson

MOST_MARKS = 4
"""The most breakpoints of one request that Anthropic takes."""
KEY = "cache_control"
TEXT = ("text",)
"""The blocks that can carry a breakpoint in every API, if their text is not empty."""
_KEY, _NULLS = b'"cache_control"', (b'"cache_control":null', b'"cache_control": null')
_DEFAULT = Raw(b'{"type":"ephemeral"}')

Marked = Callable[[bytes | Raw], Raw | None]
"""Returns the last breakpoint that the client set in an entry."""


def room(request: Request) -> int:
    """Return how many breakpoints of ours the request has room for: none if the client sets none."""
    written = _written(request.body)
    return max(MOST_MARKS - written, 0) if written else 0


def _written(body: bytes) -> int:
    """Return how many breakpoints a body has. Clients that write all fields set most of them to null, which is none."""
    found = body.count(_KEY)
    return found - sum(map(body.count, _NULLS)) if found else 0


def own(request: Request, place: int, marked: Marked) -> Raw | None:
    """Return the breakpoint to set in entry `place`: like the client's next one, as none may live longer than those
    before it. None if the client marks this entry itself."""
    if _read(request.entries[place], marked) is not None:
        return None
    for entry in request.entries[place + 1 :]:
        if mark := _read(entry, marked):
            return mark
    whole = request.members.get(KEY)
    if whole is not None and not rawjson.is_null(whole):
        return whole
    return next((mark for entry in request.entries[place::-1] if (mark := _read(entry, marked))), _DEFAULT)


def on_last(blocks: list[bytes | Raw], mark: Raw, carriers: Sequence[str] = TEXT) -> list[bytes | Raw] | None:
    """Return the blocks with this breakpoint on the last one; None if that is no carrier. Raises NotJson."""
    last: Members = rawjson.members(blocks[-1]) if blocks else {}
    kind = text_of(last.get("type"))
    if kind not in carriers or (kind == "text" and not text_of(last.get("text"))):
        return None
    return [*blocks[:-1], rawjson.encode(last | {KEY: mark})]


def content(given: Raw | None, mark: Raw, carriers: Sequence[str] = TEXT) -> Raw | None:
    """Return a message's content with this breakpoint at its end; None if it cannot carry one, whatever it is."""
    if given is None or rawjson.is_null(given):
        return None
    try:
        if rawjson.is_string(given):
            blocks: list[bytes | Raw] = [rawjson.encode({"type": "text", "text": given})]
        else:
            blocks = list(rawjson.elements(given))
        made = on_last(blocks, mark, carriers)
    except NotJson:
        return None
    return None if made is None else Raw(rawjson.array(made))


def _read(entry: bytes | Raw, marked: Marked) -> Raw | None:
    try:
        return marked(entry)
    except NotJson:
        return None
