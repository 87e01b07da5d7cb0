"""The versions of a request that upstream may get, and what its refusals teach.

    as planned ──refused──> without the addition that is complained of ──refused──> as the client sent it
       └──too long──> planned anew for the window that upstream named, or that we guess

`Versions` belongs to one request. It says in which version to send it next: `without` some additions,
without `ANY` as the client sent it. A complaint strikes an addition. If the complaint is about
thinking that no longer fits what precedes it, the client's own request goes without that, too, as we
may have changed earlier ones; and if that does not help, exactly as the client sent it.

The client sees only a refusal of its own bytes, except those that no other version would avoid.

`Refusals` belongs to the process. It remembers what was struck before upstream took the rest: by
namespace, upstream, model and shape of the request, because what one caller provokes changes no other
caller's requests. Nothing is shared with other processes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import NamedTuple, Protocol

import msgspec

from proxy.dialects import Dialect, refusals
from proxy.errors import BadEncoding, OffloadError, UpstreamFault
from proxy.plan.plan import Role
from proxy.plan.turn import Addition, Complaint, Verdict
from proxy.policy import Policy
from proxy.requests import relay
from proxy.requests.planned import OUR_TOOLS_TOKENS, Planned
from proxy.requests.prepared import Prepared
from proxy.requests.windows import Known, PerNamespace
from proxy.telemetry import logs
from proxy.upstream import codings
from proxy.upstream.client import UpstreamReply
from proxy.upstream.headers import Headers

log = logging.getLogger(__name__)

REFUSAL_SECONDS = 15.0
"""Seconds for which we read a refusal's body. What it says comes first, and another try may serve
the client."""
REFUSAL_LIMIT = 128 << 10
"""Most bytes of a refusal, compressed or not, that we read to understand it."""

REPLANS = 2
"""How often a request is planned again because it is too long."""

ENOUGH = 2
FORGOTTEN_AFTER = 600.0
"""The requests that must be refused with an addition and taken without it before it is left out,
and for how many seconds it then is. The first one may have been refused by chance."""

REMOVABLE = frozenset((Addition.USAGE, Addition.PLACE, Addition.LOOSE))
"""What a changed request can do without. Without our tools no reference could be followed, so
nothing would be left."""

FORGIVING = frozenset((Addition.THINKING,))
"""What is changed in the client's own request if upstream is only asked to drop thinking that no
longer fits."""


class Refusal(OffloadError):
    """Upstream did not answer 200, or it sent an `error` in the place of a reply. `body` is as it
    came."""

    def __init__(
        self,
        status: int,
        headers: Headers,
        body: bytes,
        error: bytes | None = None,
        *,
        complete: bool = True,
    ) -> None:
        super().__init__(f"upstream answered {status}")
        self.status = status
        self.headers = headers
        self.body = body
        self.complete = complete
        """Whether `body` is all of it. One that is very long or slow, or that breaks off, is read
        only in part."""
        self._error = error

    @classmethod
    async def read(cls, reply: UpstreamReply) -> Refusal:
        """Read a reply whose status is not 200, as it came and as far as that is possible within
        our bounds. Reading `reply` then goes on where we stopped."""
        read = bytearray()
        complete = False
        with suppress(TimeoutError, UpstreamFault):
            async with asyncio.timeout(REFUSAL_SECONDS):
                async for chunk in reply:
                    read += chunk
                    if len(read) > relay.WHOLE_LIMIT:
                        break
                else:
                    complete = True
        return cls(reply.status, reply.headers, bytes(read), complete=complete)

    def error_body(self) -> bytes:
        """Return the error, or the beginning of the body decompressed, or the body as it came if
        that fails."""
        if self._error is not None:
            return self._error
        encoding = b",".join(self.headers.get_all(b"content-encoding"))
        try:
            return codings.beginning(self.body, encoding.decode("latin-1"), REFUSAL_LIMIT)
        except BadEncoding:
            return self.body


class Whose(Protocol):
    """Whose refusals these are."""

    owner: str
    """The namespace of the client, whose requests are sent by what was learned for it."""

    @property
    def namespace(self) -> str:
        """The namespace for which it teaches something now."""


class Versions:
    """The versions of one request, as far as upstream has not refused them."""

    def __init__(self, known: Known, memory: Refusals, dialect: Dialect, caller: Whose) -> None:
        self._known = known
        self._memory = memory
        self._dialect = dialect
        self._caller = caller
        # what refusals teach, for a namespace: for the client's own once it is vouched for
        self._lessons: list[Callable[[str], int]] = []
        self._window: int | None = None  # for which this request alone is planned
        self._own_refusal: Refusal | None = None  # the first one of the client's own bytes
        self._begins = True  # whether what is remembered is still to be struck
        self._blamed: frozenset[Addition] = frozenset()  # for what this request was refused
        self._replans = 0
        self._long: tuple[_Length, Refusal] | None = None  # of the one that was refused as too long
        self._limited = False  # whether another was sent with a lower limit for the reply alone
        self._repeated = False  # whether it was sent a second time unchanged
        self._in_vain = False  # whether its own version failed with and without thinking
        self.without: frozenset[Addition] = frozenset()
        """What the next version is sent without. Without `ANY`, it is as the client sent it."""
        self.refused: frozenset[Addition] = frozenset()
        """What upstream refused of our additions before it took the request without."""

    # -- which one is next --

    def next(self, prepared: Prepared) -> Prepared:
        """Return the planned request in its next version, to be rendered."""
        if self._begins:
            self._begins = False
            planned = prepared.planned
            self.without = frozenset()
            if planned is not None and planned.may_change and not prepared.observed:
                self.without = self._memory.refused(self._caller.owner, planned)
        return prepared.unrendered(without=self.without)

    def check(self, prepared: Prepared) -> None:
        """Check that this version is worth sending. If one was refused as too long, raises that
        refusal for another of the same length. A lower limit for the reply alone is tried once."""
        if self._long is None:
            return
        length = _Length.of(prepared)
        refused, refusal = self._long
        if length._replace(limit=refused.limit) != refused:
            return
        if self._limited or length == refused:
            raise refusal
        self._limited = True

    def refuse(self, prepared: Prepared, refusal: Refusal) -> bool:
        """Take upstream's refusal of a version. Returns whether the request is to be planned again
        before the next one. Raises the refusal that the client gets if no version is left. Without
        a plan, the only other one is without thinking."""
        complaint = self._dialect.complaint(refusal.status, refusal.error_body())
        unplanned = prepared.planned is None or prepared.observed
        if unplanned and complaint is not Addition.THINKING:
            raise self._own_refusal or refusal
        if complaint is Verdict.OVERFLOW:
            self._long = _Length.of(prepared), refusal
        carried = prepared.additions or prepared.without & FORGIVING
        replans = self._replans
        changed = prepared.may_have_changed
        if prepared.rounds or not self.strike(refusal, complaint, carried, changed):
            raise refusal if complaint is Verdict.FINAL else self._own_refusal or refusal
        if complaint is Verdict.OVERFLOW and prepared.planned is not None:
            self._learn_window(prepared, prepared.planned, refusal)
        again = self._replans > replans
        # only once it is planned again, there may be anything that upstream refuses
        self._begins = again and not prepared.additions
        return again

    def strike(
        self,
        refusal: Refusal,
        complaint: Complaint,
        carried: frozenset[Addition],
        changed: bool = True,
    ) -> bool:
        """Strike what upstream complains of in this refusal, and return whether a version is left.

        `carried` is what was changed in the refused one: empty for the client's own bytes,
        `FORGIVING` if only the wish to have thinking dropped was added to them, else with `ANY`.
        `changed` is whether we may have changed an earlier request of the conversation."""
        if not carried:
            self._own_refusal = self._own_refusal or refusal
        if complaint is Verdict.OVERFLOW and self._replans < REPLANS:
            self._replans += 1
            return True
        forgiven = self._in_vain or Addition.THINKING in self.without
        if complaint is Addition.THINKING and changed and not forgiven:
            self._blame(complaint)
            return True
        if complaint is Verdict.FINAL or not carried:
            return False
        if carried == FORGIVING:
            self.without -= FORGIVING
            self._blamed -= FORGIVING
            self._in_vain = True
            return self._own_refusal is None
        if complaint is Verdict.GENERATION and not self._repeated:
            self._repeated = True
            return True
        if isinstance(complaint, Addition):
            named = complaint if complaint in carried else Addition.ANY
            if complaint is Addition.ANY and Addition.PLACE in carried:
                named = Addition.PLACE  # templates refuse it in many words
            self._blame(named)
            if named in REMOVABLE:
                return True
        self.without |= {Addition.ANY}
        return self._own_refusal is None

    def _blame(self, addition: Addition) -> None:
        self.without |= {addition}
        self._blamed |= {addition}

    # -- windows --

    @property
    def too_long(self) -> bool:
        """Whether upstream refused the request as too long."""
        return self._window is not None

    def window(self, policy: Policy, model: str) -> int | None:
        """Return the window to plan with, None if it is not known."""
        known = self._known.window(self._caller.owner, policy, model)
        return min((window for window in (known, self._window) if window is not None), default=None)

    def _learn_window(self, prepared: Prepared, planned: Planned, refusal: Refusal) -> None:
        reply = planned.request.reply_tokens if prepared.limit is None else prepared.limit
        learn = partial(
            self._known.learn_window,
            policy=planned.policy,
            model=planned.request.model,
            named=refusals.window(refusal.error_body()),
            counted=planned.before_history + OUR_TOOLS_TOKENS + prepared.history_tokens + reply,
            measured=not planned.history.fixed,  # images, audio and files cannot be counted
        )
        self._window = learn(self._caller.namespace)
        self._lessons.append(learn)

    # -- what upstream takes --

    def vouched(self) -> None:
        """Upstream has taken the request: what its refusals taught holds for its client, too."""
        for learn in self._lessons:
            learn(self._caller.owner)

    def take(self, prepared: Prepared, read: int, refusal: Refusal | None = None) -> None:
        """Learn from a version that upstream took, and of which it counted `read` tokens. If it
        took the client's own bytes after all, `refusal` is that of this version."""
        planned = prepared.planned
        carried = prepared.additions
        if planned is None:
            return
        if refusal is not None and not prepared.rounds:
            complaint = self._dialect.complaint(refusal.status, refusal.error_body())
            if isinstance(complaint, Verdict):
                return
            self._blame(complaint if complaint in carried else Addition.ANY)
            carried = frozenset()
        self.refused = self._blamed
        self._memory.note(self._caller.owner, planned, self.refused, carried)
        # images, audio and files have no count of ours
        if read and refusal is None and not prepared.rounds and not planned.history.fixed:
            model = planned.request.model
            counted = prepared.tokens_after
            self._known.note_read(self._caller.owner, planned.policy, model, counted, read)


class _Length(NamedTuple):
    """What makes a version as long as it is. `tokens` are those of its history."""

    additions: frozenset[Addition]
    without: frozenset[Addition]
    tokens: int
    limit: int | None

    @classmethod
    def of(cls, prepared: Prepared) -> _Length:
        return cls(prepared.additions, prepared.without, prepared.history_tokens, prepared.limit)


# -- what is remembered ----------------------------------------------------------------------------

_Key = tuple[str, str, Addition, str]
"""Upstream, model, addition, and the shape of the requests that have it."""


class _Refused(msgspec.Struct):
    times: int = 0
    until: float = 0.0


class Refusals:
    """What upstreams have refused of our additions, as far as one process has seen it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._all: PerNamespace[_Key, _Refused] = PerNamespace()

    def refused(self, namespace: str, planned: Planned) -> frozenset[Addition]:
        """Return the additions that are to be left out. Once that has lasted long enough, the next
        requests try again."""
        known = self._all.of(namespace)
        if not len(known):
            return frozenset()
        found = {one: known.get(_key(planned, one)) or _Refused() for one in Addition}
        now = self._clock()
        return frozenset(
            one for one, seen in found.items() if seen.times >= ENOUGH and now < seen.until
        )

    def note(
        self,
        namespace: str,
        planned: Planned,
        refused: Iterable[Addition],
        carried: Iterable[Addition],
    ) -> None:
        """Note that a request was taken with the additions `carried`, after it had been `refused`
        for others."""
        for addition in sorted(refused):
            self._note_refused(namespace, _key(planned, addition))
        known = self._all.of(namespace)
        for addition in carried if len(known) else ():
            known.discard(_key(planned, addition))

    def _note_refused(self, namespace: str, key: _Key) -> None:
        seen = self._all.of(namespace).get(key) or _Refused()
        seen.times += 1
        seen.until = self._clock() + FORGOTTEN_AFTER
        self._all.put(namespace, key, seen)
        if seen.times < ENOUGH:
            return
        upstream, model, addition, shape = key
        logs.event(
            log,
            "upstream refuses what we add",
            logging.WARNING,
            namespace=namespace,
            upstream=upstream,
            model=model[: logs.LONGEST],
            addition=addition.value,
            shape=shape,
            left_out_seconds=FORGOTTEN_AFTER,
        )


def _key(planned: Planned, addition: Addition) -> _Key:
    """Return what a refusal of this addition is about. If it names none, it is about this
    conversation alone, which the history up to the first request that we changed identifies."""
    request = planned.request
    shape = request.shape
    if addition is Addition.ANY:
        roles = [message.role for message in planned.transcript.messages]
        point = roles.index(Role.USER) + 1 if Role.USER in roles else 0
        end = point if planned.plan.empty else planned.plan.first
        shape = f"{shape} {planned.chain[end].hex()}"
    return planned.policy.upstream.base_url, request.model, addition, shape
