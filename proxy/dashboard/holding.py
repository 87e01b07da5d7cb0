"""What is held of requests that have ended until their rows are made, and what it shows then.

Most requests are short and go as they came. Little is taken of each when it ends, while it is still at hand for the
processor, and nothing else of it is held. They are described together, about a hundred at a time, by functions of C.
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

from proxy.dashboard.rows import LONGEST_NAME, NOTHING_SEEN, Seen, Sent, Shown, together
from proxy.dashboard.sessions import SHORT, described, figures
from proxy.plan.conversation import opening
from proxy.plan.history import BEGINNING, extend
from proxy.plan.plan import Role, Room
from proxy.requests.attempt import AsItCame, Observed, Rewritten

if TYPE_CHECKING:
    from proxy.plan.history import Message
    from proxy.requests.attempt import Attempt
    from proxy.requests.prepare import PlannedRequest
    from proxy.telemetry.outcome import Outcome

logger = logging.getLogger(__name__)

BRIEF = 64
"""Messages of a request that is described by the thread that served it, if it went as it came, as that takes a few
microseconds. Others are described in another thread."""

SESSIONS = 4_096
"""Sessions whose numbers are remembered."""

_names = attrgetter("namespace", "dialect", "model")
_room = attrgetter("preamble", "aside", "reply")
_first: Callable[[Sequence[Message]], Message] = itemgetter(0)
_role, _meaning = attrgetter("role"), attrgetter("meaning")


class Short(msgspec.Struct, frozen=True, gc=False):
    """What is held of a short request that went as it came. The garbage collector need not look at it."""

    messages: Sequence[Message]
    came: int
    """Tokens of the messages as they came."""
    room: Room


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


def held(attempt: Attempt, content: bool = False) -> Held:
    """Return what to hold of a request that ended. `content` says whether any texts are kept. A bug costs no row."""
    try:
        planned = attempt.planned
        if planned is None or planned.dialect.counts:
            return NOTHING_SEEN
        past = planned.past
        if type(attempt) is AsItCame and 0 < len(past) <= SHORT:
            return Short(past.measured, past.sent_tokens, planned.room)
        return _unseen(attempt, planned, content)
    except Exception:
        logger.exception("a bug, in describing a request for the dashboard")
        return NOTHING_SEEN


def shown(held: Sequence[Held], outcomes: Sequence[Outcome]) -> Shown:
    """Return what requests with these outcomes show, or of a long one what is known of it until it is described."""
    if {*map(type, held)} == {Short}:
        return Shown(*_shown(cast("Sequence[Short]", held), outcomes), {})
    some = [(one, outcome) for one, outcome in zip(held, outcomes, strict=True) if isinstance(one, Short)]
    short = zip(*_shown(*zip(*some, strict=True)), strict=True) if some else iter(())
    return together(
        [
            Seen(*next(short)) if isinstance(one, Short) else Seen(one.session) if isinstance(one, Unseen) else one
            for one in held
        ]
    )


def _unseen(attempt: Attempt, planned: PlannedRequest, content: bool) -> Held:
    tenant, past = attempt.parsed.tenant, planned.past
    names, size = (tenant.namespace, planned.dialect.name, planned.request.model), len(attempt.parsed.body)
    unseen = Unseen(*names, past.measured, past.sent_tokens, planned.room, size)
    if isinstance(attempt, AsItCame):
        return unseen if len(past) > BRIEF else unseen.seen()
    kept = content and tenant.policy.dashboard.content
    return msgspec.structs.replace(unseen, attempt=attempt, content=kept)


def _shown(requests: Sequence[Short], outcomes: Sequence[Outcome]) -> tuple[list[int | None], list[Sent]]:
    """Return the sessions of short requests and what was sent. A bug with one of them costs no row."""
    try:
        return _together(requests, outcomes)
    except Exception:
        if len(requests) > 1:
            each = (_shown([one], [outcome]) for one, outcome in zip(requests, outcomes, strict=True))
            sessions, sent = zip(*each, strict=True)
            return [*chain.from_iterable(sessions)], [*chain.from_iterable(sent)]
        logger.exception("a bug, in describing a request for the dashboard")
        return [None], [None]


def _together(requests: Sequence[Short], outcomes: Sequence[Outcome]) -> tuple[list[int | None], list[Sent]]:
    """Return the same. The interpreter takes no step for a single one of them."""
    messages, came, rooms = zip(*map(msgspec.structs.astuple, requests), strict=True)
    namespaces, dialects, models = zip(*map(_names, outcomes), strict=True)
    began: Iterable[tuple[bytes, ...]] = map(opening, messages)
    if {*map(_role, map(_first, messages))} == {Role.USER}:
        began = zip(map(_meaning, map(_first, messages)), strict=True)
    number = _number if max(map(len, models)) <= LONGEST_NAME else _number.__wrapped__
    numbers = map(number, namespaces, dialects, models, began)
    return [*numbers], [*figures(messages, came, map(_room, rooms))]


@lru_cache(SESSIONS)
def _number(namespace: str, dialect: str, model: str, began: tuple[bytes, ...]) -> int:
    """Return the number of the session that begins so."""
    name = f"{namespace} {dialect} {model} ".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.sha256(name + reduce(extend, began, BEGINNING)).digest()[:8]) >> 1
