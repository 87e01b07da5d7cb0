"""The proxy's own cache breakpoints, for clients that mark what upstream shall cache.

Such a cache has an entry for each mark, found only from a mark (Anthropic: within 20 blocks before it). The client
marks the end of its history, so behind a change upstream would find no entry but that of the system prompt. Our first
mark is directly before the change. The next event mostly changes what follows this one's results, and until then no
request ends there. So our second mark is directly behind them.

There are two spellings: Anthropic's `cache_control`, and OpenAI's `prompt_cache_breakpoint` from GPT-5.6 on. Ours is
like the client's. A mark says nothing of what an entry means, so no meaning contains one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from msgspec import Raw

from proxy import rawjson
from proxy.plan.turn import Request
from proxy.rawjson import Members, NotJson, object_of, text_of


class Mark(NamedTuple):
    """A member of a block, or of a message."""

    key: str
    value: Raw


_ANTHROPIC = Mark("cache_control", Raw(b'{"type":"ephemeral"}'))
_OPENAI = Mark("prompt_cache_breakpoint", Raw(b'{"mode":"explicit"}'))
DEFAULTS = (_ANTHROPIC, _OPENAI)
KEYS = tuple(mark.key for mark in DEFAULTS)
MOST_MARKS = 4
"""The most breakpoints of one request that upstream takes or writes. OpenAI drops the first ones above that. It sets
one itself, unless the request says `prompt_cache_options: {mode: explicit}` (openai 3.54.0)."""
TEXT = ("text", "input_text")
"""The blocks that can carry a breakpoint, if their text is not empty."""

_MARK = re.compile(rb'(?<!\\)"(%b)"\s*:\s*(\{[^{}]*\})' % "|".join(KEYS).encode())
"""A breakpoint. Within a string, the quotation marks would be escaped."""


def room(request: Request) -> int:
    """Return how many breakpoints of ours the request has room for: none if the client sets none."""
    anthropic, openai = (_written(request.body, key) for key in KEYS)
    if not anthropic and not openai:
        return 0
    explicit = text_of(object_of(request.members.get("prompt_cache_options")).get("mode")) == "explicit"
    theirs = 0 if explicit or not openai else 1
    return max(MOST_MARKS - max(anthropic, openai + theirs), 0)


def _written(body: bytes, key: str) -> int:
    """Return how many breakpoints a body has. Clients that write all fields set most of them to null, which is none."""
    found = body.count(b'"%b"' % key.encode())
    nulls = (b'"%b":null' % key.encode(), b'"%b": null' % key.encode())
    return found - sum(map(body.count, nulls)) if found else 0


def own(request: Request, place: int) -> Mark | None:
    """Return the breakpoint to set in entry `place`: like the client's next one, as none may live longer than those
    before it. None if the client marks this entry itself."""
    if last_in(request.entries[place]) is not None:
        return None
    later = next((mark for entry in request.entries[place + 1 :] if (mark := last_in(entry))), None)
    whole = next((Mark(key, request.members[key]) for key in KEYS if object_of(request.members.get(key))), None)
    earlier = (mark for entry in request.entries[place::-1] if (mark := last_in(entry)))
    tools = (mark for mark in reversed(DEFAULTS) if _written(request.body, mark.key))
    return later or whole or next(earlier, None) or next(tools, _ANTHROPIC)


def last_in(entry: bytes | Raw) -> Mark | None:
    """Return the last breakpoint that the client set in an entry."""
    raw = bytes(entry)
    found = _MARK.findall(raw) if any(key.encode() in raw for key in KEYS) else ()
    return Mark(found[-1][0].decode(), Raw(found[-1][1])) if found else None


def unmarked(block: Members) -> bytes:
    """Return a block as canonical JSON, without its breakpoint."""
    return rawjson.encode({key: block[key] for key in sorted(block) if key not in KEYS})


def on_last(blocks: list[bytes | Raw], mark: Mark, carriers: Sequence[str] = TEXT) -> list[bytes | Raw] | None:
    """Return the blocks with this breakpoint on the last one; None if that is no carrier. Raises NotJson."""
    last: Members = rawjson.members(blocks[-1]) if blocks else {}
    kind = text_of(last.get("type"))
    if kind not in carriers or (kind in TEXT and not text_of(last.get("text"))):
        return None
    return [*blocks[:-1], rawjson.encode(last | {mark.key: mark.value})]


def content(given: Raw | None, mark: Mark, carriers: Sequence[str] = TEXT) -> Raw | None:
    """Return a message's content with this breakpoint at its end; None if it cannot carry one, whatever it is. A single
    text becomes a block of the first kind that can carry one."""
    if given is None or rawjson.is_null(given):
        return None
    try:
        if rawjson.is_string(given):
            blocks: list[bytes | Raw] = [rawjson.encode({"type": carriers[0], "text": given})]
        else:
            blocks = list(rawjson.elements(given))
        made = on_last(blocks, mark, carriers)
    except NotJson:
        return None
    return None if made is None else Raw(rawjson.array(made))
