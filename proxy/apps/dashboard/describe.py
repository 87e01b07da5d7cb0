"""What a chat request shows beside its outcome: its session, the tokens that were sent of each
kind, and what became of each message. The thread that writes rows describes requests.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from typing import Any

import msgspec

from proxy import rawjson
from proxy.dialects import render
from proxy.plan.history import beginning
from proxy.plan.plan import Role, digest, live
from proxy.requests.planned import OUR_TOOLS_TOKENS, Planned
from proxy.requests.prepared import Prepared

KINDS = ("system", "tools", "user", "assistant", "results", "previews", "snapshot", "hidden")
"""Kinds of what is sent: `hidden` are rounds with our tools that the client does not see."""

SYSTEM, TOOLS, USER, ASSISTANT, RESULTS, PREVIEWS, SNAPSHOT, HIDDEN = range(len(KINDS))

_KIND = bytes((SYSTEM, USER, ASSISTANT, RESULTS, ASSISTANT))
"""By `Role`."""

MESSAGES = 1_000
"""Messages of one request that are listed, the newest."""

LONGEST_TEXT = 20_000
TEXTS = 500_000
"""Characters that are kept of one text, and of all texts of one request, if content is kept at
all."""

AS_IT_CAME, FIRST_SIGHT, EVENT, SUMMARISED, MARKED, RESTORED = (
    "", "first_sight", "event", "summarised", "marked", "restored",
)  # fmt: skip
"""What became of a message: nothing, moved before it was sent once, moved at an event, part of a
snapshot, sent with a cache breakpoint of ours, or sent as the model had written it."""

Described = tuple[int | None, Sequence[int] | None, bytes | None]
"""The session's number, the tokens of each of `KINDS`, and what became of each message."""

NOTHING: Described = (None, None, None)


class Fate(msgspec.Struct, frozen=True):
    """What became of one message: its tokens and digest as it came and as it was sent, and the rule
    that decided."""

    index: int
    kind: str
    digest: str
    """The beginning of the SHA-256 of its bytes."""
    tokens: int
    sent: int
    rule: str = AS_IT_CAME
    event: int = 0
    sent_digest: str = ""
    """Empty if the message was not sent, or as it came."""
    hidden: int = 0
    """Tokens of the hidden rounds that are put back with it."""
    origin: str = ""
    """Of a result: which tool's it is."""
    about: str = ""
    """The same with what the tool was called for, if content is kept."""
    files: tuple[str, ...] = ()
    """Of a result: the names of the files to which its texts move."""
    stays: str = ""
    """Why a result was sent whole: `small`, as no reference would be smaller, or `waiting` for an
    event."""


def describe(prepared: Prepared | None, *, content: bool = False) -> Described:
    """Return what a request shows, with its texts if `content` and its tenant's policy allow it."""
    planned = prepared.in_force if prepared is not None else None
    if prepared is None or planned is None or planned.dialect.counts:
        return NOTHING
    names = f"{prepared.tenant.namespace} {planned.dialect.name} {planned.request.model} "
    began = beginning(planned.history.messages)
    session = (
        int.from_bytes(hashlib.sha256(names.encode("utf-8", "surrogatepass") + began).digest()[:8])
        >> 1
    )

    content = content and prepared.tenant.policy.dashboard_content
    fates = _fates(prepared, planned, content)
    shown = fates[-MESSAGES:]
    snapshot = prepared.rendered.shown if prepared.rendered else None
    kept = {
        "messages": shown,
        "omitted": len(fates) - len(shown),
        "texts": _texts(prepared, planned, shown) if content else {},
        "snapshot": snapshot.text[:LONGEST_TEXT] if snapshot and content else None,
    }
    return session, _kinds(prepared, planned, fates), zlib.compress(msgspec.msgpack.encode(kept), 1)


def detail(kept: bytes) -> dict[str, Any]:
    """Return what became of each message, as the file has it."""
    return msgspec.msgpack.decode(zlib.decompress(kept), type=dict[str, Any], strict=False)


def _fates(prepared: Prepared, planned: Planned, content: bool) -> list[Fate]:
    """Return what became of each message, or would have under a plan that is only observed."""
    rendered = prepared.rendered
    moves = {}
    boundary = None
    if rendered:
        moves = rendered.plan.moves
        boundary = rendered.shown.boundary if rendered.shown else None
    elif prepared.foreseen:
        moves = planned.plan.moves
        boundary = next(reversed(planned.plan.boundaries), None)
    gone = set(render.replaced(planned.transcript, boundary)) if boundary else set()
    start = boundary.end if boundary else 0
    found = list[Fate]()
    past = planned.history
    for index, (item, message) in enumerate(zip(past.items, past.messages, strict=True)):
        came = message.digest.hex()[:16]
        sent_digest = ""
        if index in gone:
            move = None
            rule = SUMMARISED
            sent = 0
            hidden = None
        else:
            move = moves.get(index)
            hidden = rendered.rounds.get(index) if rendered else None
            rule = (EVENT if move.event else FIRST_SIGHT) if move else AS_IT_CAME
            sent = live(item, move)
            if rendered and index in rendered.altered:
                changed = digest(rendered.altered[index]).hex()[:16]
                sent_digest = changed if changed != came else ""
                rule = rule or (RESTORED if hidden else MARKED) if sent_digest else rule
        label = message.pieces[0].label if message.pieces else None
        fate = Fate(
            index=index,
            kind=KINDS[_KIND[item.role]],
            digest=came,
            tokens=item.tokens,
            sent=sent,
            rule=rule,
            event=move.event if move else 0,
            sent_digest=sent_digest,
            hidden=hidden.tokens if hidden and index >= start else 0,
            origin=label.origin if label else "",
            about=rawjson.encodable(label.about) if label and content else "",
            files=tuple(piece.name for piece in message.pieces),
            stays=""
            if rule or item.role is not Role.TOOL
            else "small"
            if item.preview >= item.tokens
            else "waiting",
        )
        found.append(fate)
    return found


def _kinds(prepared: Prepared, planned: Planned, fates: Sequence[Fate]) -> list[int]:
    """Return the tokens that were sent of each kind. Together they are the outcome's
    `tokens_after`, or of an observed request its `tokens_before`."""
    tokens = [0] * len(KINDS)
    for item, fate in zip(planned.history.items, fates, strict=True):
        if prepared.rendered is None:
            tokens[_KIND[item.role]] += item.tokens
        elif fate.rule != SUMMARISED:
            tokens[PREVIEWS if fate.rule in (FIRST_SIGHT, EVENT) else _KIND[item.role]] += fate.sent
            tokens[HIDDEN] += fate.hidden
    if prepared.rendered is not None:
        tokens[SNAPSHOT] = (
            max(prepared.history_tokens - sum(tokens), 0) if prepared.rendered.shown else 0
        )
        tokens[TOOLS] = OUR_TOOLS_TOKENS if prepared.rendered.injecting else 0
    tokens[TOOLS] += planned.room.aside - planned.room.reply - OUR_TOOLS_TOKENS
    tokens[SYSTEM] += planned.room.preamble
    return tokens


def _texts(
    prepared: Prepared, planned: Planned, fates: Sequence[Fate]
) -> dict[int, tuple[str, str | None]]:
    """Return messages as they came, and as they were sent where that differs: the newest, as far as
    there is room."""
    transcript = planned.transcript
    shape = planned.reading.shape
    room = TEXTS
    found: dict[int, tuple[str, str | None]] = {}
    for fate in reversed(fates):
        raw = transcript.raws[fate.index]
        changed = None
        if prepared.rendered is not None:
            changed = prepared.rendered.altered.get(fate.index)
        elif fate.rule in (FIRST_SIGHT, EVENT):
            message = transcript.messages[fate.index]
            first = fate.rule == FIRST_SIGHT
            changed = render.with_previews(
                planned.dialect, raw, message, shape, first_preview=first
            )
        came = _text(raw)
        sent = None if changed is None else _text(changed)
        room -= len(came) + len(sent or "")
        if room < 0:
            break
        found[fate.index] = came, sent
    return found


def _text(raw: bytes) -> str:
    """Return a message's JSON as text that can be encoded, as far as it is shown."""
    return str(memoryview(raw)[:LONGEST_TEXT], "utf-8", "replace")
