"""What is held of requests that have ended until their rows are made, and what it shows then.

Most requests are short and go as they came. These are described together, some dozens at a time, by functions of C: at
the end of each request it would take several times as long.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, reduce
from itertools import chain
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, cast

import msgspec

from proxy.core.conversation import opening
from proxy.core.history import BEGINNING, extend
from proxy.core.plan import Role, Room
from proxy.dashboard.rows import LONGEST_NAME, NOTHING_SEEN, Seen
from proxy.dashboard.sessions import SHORT, described, packed
from proxy.requests.attempt import AsItCame, Observed, Rewritten
from proxy.requests.prepare import PlannedRequest

if TYPE_CHECKING:
    from proxy.core.history import Message
    from proxy.requests.attempt import Attempt

logger = logging.getLogger(__name__)

BRIEF = 64
"""Messages of a request that is described by the thread that served it, if it went as it came, as that takes a few
microseconds. Others are described in another thread."""

SESSIONS = 4_096
"""Sessions whose numbers are remembered."""

Short = tuple[str, str, str, Sequence["Message"], int, int, int, int]
"""What is held of a short request that went as it came: the first fields of `Unseen`, and of its room the preamble,
what is aside, and the reply."""

_planned, _counts = attrgetter("planned"), attrgetter("dialect.counts")
_short = attrgetter(
    "parsed.tenant.namespace",
    "planned.dialect.name",
    "planned.request.model",
    "planned.past.measured",
    "planned.past.sent_tokens",
    "planned.room.preamble",
    "planned.room.aside",
    "planned.room.reply",
)
_messages: Callable[[Short], Sequence[Message]] = itemgetter(3)
_first: Callable[[Sequence[Message]], Message] = itemgetter(0)
_role, _meaning = attrgetter("role"), attrgetter("meaning")


class Unseen(msgspec.Struct, frozen=True):
    """What is held of a long request until it is described in another thread. Of one that went as it came nothing else
    is held; the rest is freed at once, and its memory used again while it is warm."""

    namespace: str
    dialect: str
    model: str
    messages: Sequence[Message]
    came: int
    """Tokens of the messages as they came."""
    room: Room
    weight: int
    """Bytes that are held, at most."""
    attempt: Rewritten | Observed | None = None
    content: bool = False
    """Whether the texts of its messages are kept."""

    @property
    def session(self) -> int:
        number = _number if len(self.model) <= LONGEST_NAME else _number.__wrapped__
        return number(self.namespace, self.dialect, self.model, opening(self.messages))

    def seen(self) -> Seen:
        """Return what the request shows."""
        return Seen(self.session, *described(self.messages, self.came, self.room, self.attempt, content=self.content))


Held = Seen | Short | Unseen


def held(attempts: Sequence[Attempt | None], content: bool = False) -> Sequence[Held]:
    """Return what to hold of requests that ended. `content` says whether any texts are kept."""
    try:
        if len(attempts) > 1 and (short := _all_short(attempts)):
            return short
    except Exception:
        logger.exception("a bug, in describing requests for the dashboard")
    return [_held(attempt, content) for attempt in attempts]


def shown(held: Sequence[Held]) -> Sequence[Seen]:
    """Return what each request shows, or of a long one what is known of it until it is described."""
    if {*map(type, held)} == {tuple}:
        return _shown(cast("Sequence[Short]", held))
    short = iter(_shown([one for one in held if isinstance(one, tuple)]))
    return [
        next(short) if isinstance(one, tuple) else Seen(one.session) if isinstance(one, Unseen) else one for one in held
    ]


def _all_short(attempts: Sequence[Attempt | None]) -> Sequence[Short] | None:
    """Return what is held of these requests if all are short and went as they came."""
    if {*map(type, attempts)} != {AsItCame}:
        return None
    planned = [*map(_planned, attempts)]
    if {*map(type, planned)} != {PlannedRequest} or any(map(_counts, planned)):
        return None
    short: list[Short] = [*map(_short, attempts)]
    lengths = {*map(len, map(_messages, short))}
    return short if 0 not in lengths and max(lengths) <= SHORT else None


def _held(attempt: Attempt | None, content: bool) -> Held:
    """Return what to hold of a request. A bug there costs no row."""
    try:
        if attempt is None or attempt.planned is None or attempt.planned.dialect.counts:
            return NOTHING_SEEN
        short: Short = _short(attempt)
        namespace, dialect, model, messages, came, *_ = short
        count = len(messages)
        if isinstance(attempt, AsItCame) and 0 < count <= SHORT:
            return short
        unseen = Unseen(namespace, dialect, model, messages, came, attempt.planned.room, len(attempt.parsed.body))
        if isinstance(attempt, AsItCame):
            return unseen if count > BRIEF else unseen.seen()
        kept = content and attempt.parsed.tenant.policy.dashboard.content
        return msgspec.structs.replace(unseen, attempt=attempt, content=kept)
    except Exception:
        logger.exception("a bug, in describing a request for the dashboard")
        return NOTHING_SEEN


def _shown(requests: Sequence[Short]) -> list[Seen]:
    """Return what short requests show. A bug with one of them costs no row."""
    try:
        return _together(requests) if requests else []
    except Exception:
        if len(requests) > 1:
            return [*chain.from_iterable(_shown([one]) for one in requests)]
        logger.exception("a bug, in describing a request for the dashboard")
        return [NOTHING_SEEN]


def _together(requests: Sequence[Short]) -> list[Seen]:
    """Return what short requests show. The interpreter takes no step for a single one of them."""
    namespaces, dialects, models, messages, came, *room = zip(*requests, strict=True)
    began: Iterable[tuple[bytes, ...]] = map(opening, messages)
    if {*map(_role, map(_first, messages))} == {Role.USER}:
        began = zip(map(_meaning, map(_first, messages)), strict=True)
    number = _number if max(map(len, models)) <= LONGEST_NAME else _number.__wrapped__
    numbers = map(number, namespaces, dialects, models, began)
    return [*map(Seen, numbers, packed(messages, came, zip(*room, strict=True)))]


@lru_cache(SESSIONS)
def _number(namespace: str, dialect: str, model: str, began: tuple[bytes, ...]) -> int:
    """Return the number of the session that begins so."""
    name = f"{namespace} {dialect} {model} ".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.sha256(name + reduce(extend, began, BEGINNING)).digest()[:8]) >> 1
