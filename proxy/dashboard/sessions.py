"""What a chat request shows beside its outcome: its session, the tokens that were sent of each kind, and what became of
each message.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from proxy.core.conversation import beginning
from proxy.core.plan import Role, live
from proxy.dashboard.rows import NOTHING_SEEN, Seen
from proxy.dialects import render
from proxy.requests.attempt import AsItCame, Observed, Rewritten
from proxy.requests.prepare import OUR_TOOLS_TOKENS

if TYPE_CHECKING:
    from proxy.requests.attempt import Attempt
    from proxy.requests.prepare import PlannedRequest

KINDS = ("system", "tools", "user", "assistant", "results", "previews", "snapshot", "hidden")
"""Kinds of what is sent: `hidden` are rounds with our tools that the client does not see."""

SYSTEM, TOOLS, USER, ASSISTANT, RESULTS, PREVIEWS, SNAPSHOT, HIDDEN = range(len(KINDS))

_KIND = {
    Role.SYSTEM: SYSTEM,
    Role.USER: USER,
    Role.ASSISTANT: ASSISTANT,
    Role.TOOL: RESULTS,
    Role.SEALED: ASSISTANT,
}

MESSAGES = 2_000
"""Messages of one request that are listed, the newest."""

LONGEST_TEXT, TEXTS = 20_000, 500_000
"""Characters that are kept of one text, and of all texts of one request, if content is kept at all."""

AS_IT_CAME, FIRST_SIGHT, EVENT, SUMMARISED = "", "first_sight", "event", "summarised"
"""What became of a message: nothing, moved before it was sent once, moved at an event, or part of a snapshot."""

_encode = msgspec.msgpack.Encoder().encode


class SentTokens(msgspec.Struct, array_like=True, frozen=True):
    """What was sent. `tokens` are those of each of `KINDS`, and `came` those of the request as it came."""

    tokens: list[int]
    came: int
    event: object = None
    """Figures of an event, in rows of the first version."""


class Fate(msgspec.Struct, frozen=True):
    """What became of one message: its tokens as it came and as it was sent, and the rule that decided."""

    index: int
    kind: str
    digest: str
    tokens: int
    sent: int
    rule: str
    event: int = 0


def seen(attempt: Attempt, namespace: str, *, content: bool = False) -> Seen:
    """Return what a request shows, as far as it was planned; with `content`, also the texts of its messages."""
    planned = attempt.planned
    if planned is None or planned.dialect.counts:
        return NOTHING_SEEN
    name = f"{namespace} {planned.dialect.name} {planned.request.model} ".encode("utf-8", "surrogatepass")
    drawn = hashlib.sha256(name + beginning(planned.past.measured)).digest()
    return Seen(
        int.from_bytes(drawn[:8]) >> 1, partial(_described, attempt, planned, content), len(attempt.parsed.body)
    )


def detail(kept: bytes) -> dict[str, Any]:
    """Return what became of each message, as the file has it."""
    found: dict[str, Any] = msgspec.msgpack.decode(zlib.decompress(kept), strict=False)
    return found


def _described(attempt: Attempt, planned: PlannedRequest, content: bool) -> tuple[bytes, bytes | None]:
    detail = None if isinstance(attempt, AsItCame) else _detail(attempt, planned, content)
    return _encode(_sent(attempt, planned)), detail


def _sent(attempt: Attempt, planned: PlannedRequest) -> SentTokens:
    past, tokens = planned.past, [0] * len(KINDS)
    rewritten = attempt if isinstance(attempt, Rewritten) else None
    definitions = planned.prompt(0) - OUR_TOOLS_TOKENS - planned.room.preamble
    if rewritten is None:
        for message in past.measured:
            tokens[_KIND[message.role]] += message.tokens
    else:
        _add_rewritten(tokens, rewritten)
    tokens[TOOLS] = definitions + (OUR_TOOLS_TOKENS if rewritten and rewritten.rendered.injecting else 0)
    tokens[SYSTEM] += planned.room.preamble
    return SentTokens(tokens, planned.tokens + definitions + planned.room.preamble)


def _add_rewritten(tokens: list[int], attempt: Rewritten) -> None:
    rendered = attempt.rendered
    start = rendered.shown.boundary.end if rendered.shown else 0
    for index, fate in enumerate(_fates(attempt, attempt.planned)):
        if fate.rule != SUMMARISED:
            kind = PREVIEWS if fate.rule else _KIND[attempt.planned.past.items[index].role]
            tokens[kind] += fate.sent
    tokens[HIDDEN] = sum(one.tokens for index, one in rendered.rounds.items() if index >= start)
    tokens[SNAPSHOT] = max(attempt.tokens - sum(tokens), 0) if rendered.shown else 0


def _detail(attempt: Rewritten | Observed, planned: PlannedRequest, content: bool) -> bytes:
    fates = _fates(attempt, planned)
    listed = fates[-MESSAGES:]
    texts = _texts(planned, listed) if content else {}
    shown = attempt.rendered.shown if isinstance(attempt, Rewritten) else None
    snapshot = shown.text[:LONGEST_TEXT] if shown and content else None
    detail = {"messages": listed, "omitted": len(fates) - len(listed), "texts": texts, "snapshot": snapshot}
    return zlib.compress(_encode(detail), 1)


def _texts(planned: PlannedRequest, fates: Sequence[Fate]) -> dict[int, tuple[str, str | None]]:
    """Return messages as they came, and as they were sent where that differs: the newest, as far as there is room."""
    transcript, shape, room = planned.transcript, planned.reading.shape, TEXTS
    found: dict[int, tuple[str, str | None]] = {}
    for fate in reversed(fates):
        raw, message = transcript.raws[fate.index], transcript.messages[fate.index]
        came, sent = _text(raw), None
        if fate.rule in (FIRST_SIGHT, EVENT):
            first = fate.rule == FIRST_SIGHT
            sent = _text(render.compact(planned.dialect, raw, message, shape, first_preview=first))
        room -= len(came) + len(sent or "")
        if room < 0:
            break
        found[fate.index] = came, sent
    return found


def _text(raw: bytes) -> str:
    """Return a message's JSON as text that can be encoded, as far as it is shown."""
    return str(memoryview(raw)[:LONGEST_TEXT], "utf-8", "replace")


def _fates(attempt: Rewritten | Observed, planned: PlannedRequest) -> list[Fate]:
    """Return what became of each message, or would have under the plan that is only observed."""
    past, found = planned.past, []
    plan, shown = planned.plan, None
    gone: set[int] = set()
    if isinstance(attempt, Rewritten):
        plan, shown = attempt.rendered.plan, attempt.rendered.shown
        gone = set(render.taken(planned.transcript, shown.boundary)) if shown else set()
    elif plan.boundaries:
        gone = {index for index in range(plan.boundaries[-1].end) if index not in plan.boundaries[-1].pins}
    for index, item in enumerate(past.items):
        move = plan.moves.get(index)
        rule = AS_IT_CAME if move is None else EVENT if move.event else FIRST_SIGHT
        rule, sent = (SUMMARISED, 0) if index in gone else (rule, live(item, move))
        digest = past.messages[index].digest.hex()[:16]
        event = move.event if move and rule == EVENT else 0
        found.append(Fate(index, KINDS[_KIND[item.role]], digest, item.tokens, sent, rule, event))
    return found
