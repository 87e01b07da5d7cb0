"""What a chat request shows beside its outcome: its session, the tokens that were sent of each kind, and what became of
each message.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from functools import lru_cache, partial, reduce
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any

import msgspec

from proxy.core.conversation import opening
from proxy.core.history import BEGINNING, History, extend
from proxy.core.history import digest as history_digest
from proxy.core.plan import Room, live
from proxy.dashboard.rows import LONGEST_NAME, Damaged, Seen, unpacked
from proxy.dialects import render
from proxy.requests.attempt import AsItCame, Observed, Rewritten
from proxy.requests.prepare import OUR_TOOLS_TOKENS

if TYPE_CHECKING:
    from proxy.core.history import Message
    from proxy.requests.attempt import Attempt
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

BRIEF = 64
"""Messages of a request that is described when it ends. One with more is described later, in another thread."""

SESSIONS = 4_096
"""Sessions whose numbers are remembered."""

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
_roles = partial(map, attrgetter("role"))
_tokens = partial(map, attrgetter("tokens"))
_meanings = partial(map, attrgetter("meaning"))
_digests = partial(map, attrgetter("digest"))
_beginnings = partial(map, itemgetter(slice(_DIGEST)))


class AddedMessages(msgspec.Struct, array_like=True, frozen=True):
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


class SentTokens(msgspec.Struct, array_like=True, frozen=True):
    """What was sent. `tokens` are those of each of `KINDS`, and `came` those of the request as it came."""

    tokens: list[int]
    came: int
    event: object = None
    """Figures of an event, in rows of the first version."""
    added: AddedMessages | None = None


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


class Unseen(msgspec.Struct, frozen=True):
    """What is held of a request until it is described. Of one that went as it came nothing else is held; the rest is
    freed at once, and its memory used again while it is warm."""

    namespace: str
    dialect: str
    model: str
    past: History
    room: Room
    weight: int
    """Bytes that are held, at most."""
    attempt: Rewritten | Observed | None = None
    content: bool = False
    """Whether the texts of its messages are kept."""

    @property
    def brief(self) -> bool:
        """Whether it is described at once, as that takes a few microseconds."""
        return self.attempt is None and len(self.past.measured) <= BRIEF

    @property
    def session(self) -> int:
        number = _session if len(self.model) <= LONGEST_NAME else _session.__wrapped__
        return number(self.namespace, self.dialect, self.model, opening(self.past.measured))

    def seen(self) -> Seen:
        """Return what the request shows."""
        attempt = self.attempt
        if attempt is None:
            return Seen(self.session, _encode(_sent(self)))
        fates = _fates(attempt, attempt.planned)
        return Seen(self.session, _encode(_sent(self, fates)), _detail(attempt, attempt.planned, fates, self.content))


def unseen(attempt: Attempt, content: bool = False) -> Unseen | None:
    """Return what to hold of a request; None if it was not planned. `content` says whether any texts are kept."""
    planned, parsed = attempt.planned, attempt.parsed
    if planned is None or planned.dialect.counts:
        return None
    tenant, dialect, model = parsed.tenant, planned.dialect.name, planned.request.model
    held = tenant.namespace, dialect, model, planned.past, planned.room, len(parsed.body)
    if isinstance(attempt, AsItCame):
        return Unseen(*held)
    return Unseen(*held, attempt, content and tenant.policy.dashboard.content)


@lru_cache(SESSIONS)
def _session(namespace: str, dialect: str, model: str, began: tuple[bytes, ...]) -> int:
    name = f"{namespace} {dialect} {model} ".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.sha256(name + reduce(extend, began, BEGINNING)).digest()[:8]) >> 1


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


def _sent(one: Unseen, fates: Sequence[Fate] = ()) -> SentTokens:
    messages, room, tokens = one.past.measured, one.room, [0] * len(KINDS)
    rewritten = one.attempt if isinstance(one.attempt, Rewritten) else None
    definitions = room.aside - room.reply - OUR_TOOLS_TOKENS
    kinds = bytes(_roles(messages)).translate(_KINDS)
    if rewritten is None:
        for kind, size in zip(kinds, _tokens(messages)):  # noqa: B905 - it would take longer
            tokens[kind] += size
    else:
        _add_rewritten(tokens, rewritten, fates)
    tokens[TOOLS] = definitions + (OUR_TOOLS_TOKENS if rewritten and rewritten.rendered.injecting else 0)
    tokens[SYSTEM] += room.preamble
    came = one.past.sent_tokens + definitions + room.preamble
    return SentTokens(tokens, came, None, _added(messages, kinds))


def _added(messages: Sequence[Message], kinds: bytes) -> AddedMessages:
    """Return the messages from the newest reply on, which this request is the first one to have; all of a short one."""
    end, leading = len(kinds), len(kinds) - len(kinds.lstrip(_SYSTEM))
    before, first = 0, leading
    if end > SHORT and (reply := kinds.rfind(_REPLY)) >= 0:
        first = max(len(kinds[: reply + 1].rstrip(_REPLY)), leading)
        before = zlib.crc32(b"".join(_meanings(messages[leading:first])))
    after = zlib.crc32(b"".join(_meanings(messages[first:])), before)
    listed = max(first, end - MESSAGES)
    if listed > leading:
        messages, kinds = [*messages[:leading], *messages[listed:]], kinds[:leading] + kinds[listed:]
    digests = b"".join(_beginnings(_digests(messages)))
    return AddedMessages(before, after, listed, leading, kinds, list(_tokens(messages)), digests)


def _add_rewritten(tokens: list[int], attempt: Rewritten, fates: Sequence[Fate]) -> None:
    rendered = attempt.rendered
    for fate in fates:
        if fate.rule != SUMMARISED:
            moved = fate.rule in (FIRST_SIGHT, EVENT)
            tokens[PREVIEWS if moved else _KIND[attempt.planned.past.items[fate.index].role]] += fate.sent
            tokens[HIDDEN] += fate.hidden
    tokens[SNAPSHOT] = max(attempt.tokens - sum(tokens), 0) if rendered.shown else 0


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
