"""What a chat request shows beside its outcome: the tokens that were sent of each kind, and each message's fate.

It is described when the request ends, or, if it is short, when somebody reads its row.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any

import msgspec

from proxy.dashboard.rows import Damaged, converted, unpacked
from proxy.dialects import render
from proxy.plan.history import digest as history_digest
from proxy.plan.plan import Room, live
from proxy.requests.attempt import Observed, Rewritten
from proxy.requests.prepare import OUR_TOOLS_TOKENS

if TYPE_CHECKING:
    from proxy.plan.history import Message
    from proxy.requests.prepare import PlannedRequest

KINDS = ("system", "tools", "user", "assistant", "results", "previews", "snapshot", "hidden")
"""Kinds of what is sent: `hidden` are rounds with our tools that the client does not see."""

SYSTEM, TOOLS, USER, ASSISTANT, RESULTS, PREVIEWS, SNAPSHOT, HIDDEN = range(len(KINDS))

_KIND = bytes((SYSTEM, USER, ASSISTANT, RESULTS, ASSISTANT))
"""By `Role`."""

_KINDS = _KIND.ljust(256, b"\0")
"""The table that translates roles to kinds."""

_SYSTEM, _REPLY = bytes([SYSTEM]), bytes([ASSISTANT])

MESSAGES = 2_000
"""Messages of one request that are listed, the newest."""

SHORT = 8
"""A history of so few messages is kept with each of its requests."""

LONGEST_TEXT, TEXTS = 20_000, 500_000
"""Characters that are kept of one text, and of all texts of one request, if content is kept at all."""

AS_IT_CAME, FIRST_SIGHT, EVENT, SUMMARISED, MARKED, RESTORED = (
    "", "first_sight", "event", "summarised", "marked", "restored",
)  # fmt: skip
"""What became of a message: nothing, moved before it was sent once, moved at an event, part of a snapshot, sent with a
cache breakpoint of ours, or sent as the model had written it."""

_DIGEST = 8
"""Bytes of a digest that are kept."""

_encode = msgspec.msgpack.Encoder().encode
_role, _size, _meaning, _digest = map(attrgetter, ("role", "tokens", "meaning", "digest"))
_beginning = itemgetter(slice(_DIGEST))
_figures = attrgetter("role", "tokens", "digest", "meaning")


class AddedMessages(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The messages that a request added to its session. With those of the requests before it, these are all it had."""

    before: int
    """Identifies the history before them, without the leading system messages; 0 if that is none."""
    after: int
    """Identifies the history that ends with them."""
    first: int
    """The index of the first of them."""
    leading: int
    """So many leading system messages come before all others."""
    kinds: bytes
    """The place of each among `KINDS`: of the leading ones, and of those that were added."""
    tokens: list[int]
    digests: bytes
    """The beginnings of the digests of all of them."""

    def fates(self) -> list[Fate]:
        """Return the messages as they came, the leading ones first."""
        indexes = (*range(self.leading), *range(self.first, self.first + len(self.tokens) - self.leading))
        digests = (self.digests[at : at + _DIGEST].hex() for at in range(0, len(self.digests), _DIGEST))
        return [
            Fate(index, KINDS[kind], digest, tokens, tokens, AS_IT_CAME, sent_digest=digest)
            for index, kind, tokens, digest in zip(indexes, self.kinds, self.tokens, digests, strict=True)
        ]


class Figures(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What is kept of a message of a short request: see `Message`. They are taken as they are, which takes a fraction
    of what it takes to describe the request."""

    role: int
    tokens: int
    digest: bytes
    meaning: bytes


class SentTokens(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What was sent. `tokens` are those of each of `KINDS`, and `came` those of the request as it came."""

    tokens: list[int]
    came: int
    event: object = None
    """Figures of an event, in rows of the first version."""
    added: AddedMessages | None = None
    messages: Sequence[Figures] = ()
    """Those of a short request that went as it came, until it is read. Then `tokens` are of its room the preamble, what
    is aside, and the reply, `came` are those of its messages alone, and it has no `added`."""


class Fate(msgspec.Struct, frozen=True):
    """What became of one message: its tokens and digest as it came and as it was sent, and the rule that decided."""

    index: int
    kind: str
    digest: str
    """Of its bytes, as a part of their SHA-256."""
    tokens: int
    sent: int
    rule: str
    event: int = 0
    sent_digest: str = ""
    """Empty if the message was not sent."""
    hidden: int = 0
    """Tokens of the hidden rounds that are put back with it."""


def described(
    messages: Sequence[Message],
    came: int,
    room: Room,
    attempt: Rewritten | Observed | None = None,
    *,
    content: bool = False,
) -> tuple[bytes, bytes | None]:
    """Return what was sent, and what became of each message if anything did, as the file keeps them.

    `came` are the tokens of the messages as they came, `attempt` is None if the request went as it came, and `content`
    says whether the texts of its messages are kept.
    """
    if attempt is None:
        return _encode(_sent(messages, came, room)), None
    fates = _fates(attempt, attempt.planned)
    sent = _sent(messages, came, room, attempt if isinstance(attempt, Rewritten) else None, fates)
    return _encode(sent), _detail(attempt, attempt.planned, fates, content)


def figures(
    messages: Iterable[Sequence[Message]], came: Iterable[int], rooms: Iterable[tuple[int, int, int]]
) -> Iterator[tuple[Any, ...]]:
    """Return the values of `SentTokens` for short requests that went as they came, to be described when they are read.
    A room is its preamble, what is aside, and the reply."""
    return zip(rooms, came, repeat(None), repeat(None), map(list, map(map, repeat(_figures), messages)), strict=False)


def detail(kept: bytes) -> dict[str, Any]:
    """Return what became of each message, as the file has it. Raises Damaged."""
    try:
        return unpacked(zlib.decompress(kept), dict[str, Any], strict=False)
    except (zlib.error, TypeError) as error:
        raise Damaged(str(error)) from error


def listed(added: Sequence[AddedMessages]) -> tuple[list[Fate], int]:
    """Return the messages of a request that went as it came, and how many at its beginning are not known.

    `added` is what this request and those before it in its session added, the newest first.
    """
    newest, rest = added[0], {one.after: one for one in reversed(added)}
    one: AddedMessages | None = newest
    fates: list[Fate] = []
    while one is not None:
        fates = one.fates()[one.leading :] + fates
        one = rest.pop(one.before, None) if one.before else None
    fates = (newest.fates()[: newest.leading] + fates)[-MESSAGES:]
    return fates, (fates[-1].index + 1 if fates else 0) - len(fates)


def sent_tokens(kept: object) -> SentTokens:
    """Return what was sent, as the file has it: encoded, or as a list of its values. Raises Damaged."""
    sent = unpacked(kept, SentTokens) if isinstance(kept, bytes) else converted(kept, SentTokens)
    if not sent.messages:
        return sent
    try:
        preamble, aside, reply = sent.tokens
        return _sent(sent.messages, sent.came, Room(aside=aside, reply=reply, preamble=preamble))
    except ValueError as error:
        raise Damaged(str(error)) from error


def _sent(
    messages: Sequence[Message | Figures],
    came: int,
    room: Room,
    rewritten: Rewritten | None = None,
    fates: Sequence[Fate] = (),
) -> SentTokens:
    kinds, sizes = bytes(map(_role, messages)).translate(_KINDS), [*map(_size, messages)]
    definitions, tokens = room.aside - room.reply - OUR_TOOLS_TOKENS, [0] * len(KINDS)
    if rewritten is None:
        for kind, size in zip(kinds, sizes):  # noqa: B905 - it would take longer
            tokens[kind] += size
    else:
        _add_rewritten(tokens, rewritten, fates)
    tokens[TOOLS] += definitions
    tokens[SYSTEM] += room.preamble
    return SentTokens(tokens, came + definitions + room.preamble, None, _added(messages, kinds, sizes))


def _added(messages: Sequence[Message | Figures], kinds: bytes, sizes: list[int]) -> AddedMessages:
    """Return the messages from the newest reply on, which this request is the first one to have; all of a short one."""
    end, leading, before = len(kinds), len(kinds) - len(kinds.lstrip(_SYSTEM)), 0
    first = listed = leading
    if end > SHORT:
        if (reply := kinds.rfind(_REPLY)) >= 0:
            first = max(len(kinds[: reply + 1].rstrip(_REPLY)), leading)
            before = zlib.crc32(b"".join(map(_meaning, messages[leading:first])))
        listed = max(first, end - MESSAGES)
    after = zlib.crc32(b"".join(map(_meaning, messages[first:])), before)
    if listed > leading:
        messages = [*messages[:leading], *messages[listed:]]
        kinds, sizes = kinds[:leading] + kinds[listed:], sizes[:leading] + sizes[listed:]
    digests = b"".join(map(_beginning, map(_digest, messages)))
    return AddedMessages(before, after, listed, leading, kinds, sizes, digests)


def _add_rewritten(tokens: list[int], attempt: Rewritten, fates: Sequence[Fate]) -> None:
    rendered = attempt.rendered
    for fate in fates:
        if fate.rule != SUMMARISED:
            moved = fate.rule in (FIRST_SIGHT, EVENT)
            tokens[PREVIEWS if moved else _KIND[attempt.planned.past.items[fate.index].role]] += fate.sent
            tokens[HIDDEN] += fate.hidden
    tokens[SNAPSHOT] = max(attempt.tokens - sum(tokens), 0) if rendered.shown else 0
    tokens[TOOLS] += OUR_TOOLS_TOKENS if rendered.injecting else 0


def _detail(attempt: Rewritten | Observed, planned: PlannedRequest, fates: Sequence[Fate], content: bool) -> bytes:
    shown = fates[-MESSAGES:]
    snapshot = attempt.rendered.shown if isinstance(attempt, Rewritten) else None
    detail = {
        "messages": shown,
        "omitted": len(fates) - len(shown),
        "texts": _texts(attempt, planned, shown) if content else {},
        "snapshot": snapshot.text[:LONGEST_TEXT] if snapshot and content else None,
    }
    return zlib.compress(_encode(detail), 1)


def _texts(
    attempt: Rewritten | Observed, planned: PlannedRequest, fates: Sequence[Fate]
) -> dict[int, tuple[str, str | None]]:
    """Return messages as they came, and as they were sent where that differs: the newest, as far as there is room."""
    transcript, shape, room = planned.transcript, planned.reading.shape, TEXTS
    found: dict[int, tuple[str, str | None]] = {}
    for fate in reversed(fates):
        raw, message = transcript.raws[fate.index], transcript.messages[fate.index]
        came, sent = _text(raw), None
        if isinstance(attempt, Rewritten):
            sent = _text(attempt.rendered.altered[fate.index]) if fate.index in attempt.rendered.altered else None
        elif fate.rule in (FIRST_SIGHT, EVENT):
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
    past, rendered = planned.past, attempt.rendered if isinstance(attempt, Rewritten) else None
    plan, gone, start = planned.plan, set[int](), 0
    if rendered:
        plan, shown = rendered.plan, rendered.shown
        gone = set(render.taken(planned.transcript, shown.boundary)) if shown else gone
        start = shown.boundary.end if shown else 0
    elif plan.boundaries:
        gone = {index for index in range(plan.boundaries[-1].end) if index not in plan.boundaries[-1].pins}
    found = []
    for index, (item, message) in enumerate(zip(past.items, past.measured, strict=True)):
        move, altered = plan.moves.get(index), rendered.altered.get(index) if rendered else None
        came = message.digest[:_DIGEST].hex()
        rule = SUMMARISED if index in gone else EVENT if move and move.event else FIRST_SIGHT if move else AS_IT_CAME
        sent, digest, hidden = live(item, move), came, rendered.rounds.get(index) if rendered else None
        if rule == SUMMARISED:
            sent, digest, hidden = 0, "", None
        elif altered is not None:
            digest = history_digest(altered)[:_DIGEST].hex()
            rule = rule or (RESTORED if hidden else MARKED) if digest != came else rule
        elif move:
            digest = ""  # nobody has rendered it
        put_back = hidden.tokens if hidden and index >= start else 0
        event = move.event if move and rule == EVENT else 0
        found.append(Fate(index, KINDS[_KIND[item.role]], came, item.tokens, sent, rule, event, digest, put_back))
    return found
