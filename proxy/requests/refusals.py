"""What to try after upstream refused a request that we changed, and what its refusals have taught.

    as planned ──refused──> without the addition that the refusal names ──refused──> as the client sent it

What the refusal names may be thinking that no longer fits what precedes it: then the client's own request also goes
without, as we may have changed earlier ones, and if that is in vain as well, exactly as the client sent it.

The client sees only a refusal of its own bytes, except those that no other form of the request would avoid.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

import msgspec
from msgspec.structs import replace

from proxy.lru import Lru
from proxy.plan.reasons import Reason
from proxy.plan.refusals import Addition, Complaint, Verdict
from proxy.telemetry import logs

log = logging.getLogger(__name__)

REPLANS = 2
"""How often a request is planned again because it is too long."""

REMOVABLE = frozenset((Addition.USAGE, Addition.PLACE))
"""What a changed request can do without. Without our tools no reference could be followed, so nothing would be left."""

FORGIVING = frozenset((Addition.THINKING,))
"""What is changed in the client's own request if upstream is only asked to drop thinking that no longer fits."""

ENOUGH = 2
"""The requests that must be refused with an addition, and accepted without it, before that is believed."""

FIRST_SPAN, LONGEST_SPAN = 600.0, 86_400.0
"""Seconds that a belief lasts. Then one request tries again, and each time in vain doubles the seconds."""

NAMESPACES, SUBJECTS = 10_000, 200
"""The most namespaces that are remembered, and the most subjects of each, so that no caller can push out others'."""


class Tries(msgspec.Struct, frozen=True):
    """How a request is sent, and what was tried for it before."""

    without: frozenset[Addition] = frozenset()
    """What it is sent without. Without `TOOLS` or `ANY`, it is sent as the client sent it."""
    blamed: frozenset[Addition] = frozenset()
    """Those that were left out because upstream refused this very request with them."""
    replanned: int = 0
    repeated: bool = False
    """Whether it was sent a second time unchanged."""
    bare_refused: bool = False
    """Whether upstream refused the client's own bytes."""
    in_vain: bool = False
    """Whether upstream refused the client's own request even without the thinking that it complained of."""

    @property
    def reason(self) -> Reason:
        """Why the request is sent as the client sent it, or `Reason.NONE`."""
        if Addition.TOOLS in self.without:
            return Reason.TOOLS_REFUSED
        return Reason.REFUSED if Addition.ANY in self.without else Reason.NONE

    def after(self, complaint: Complaint, carried: frozenset[Addition], *, concerned: bool = True) -> Tries | None:
        """Return what to try after this complaint, or None if upstream's refusal must go to the client.

        `carried` is what was changed in the refused request: empty for the client's own bytes, `FORGIVING` if only the
        wish to have thinking dropped was added to them, else with `ANY`.
        `concerned` is whether we may have changed an earlier request of the conversation.
        """
        tried = replace(self, bare_refused=self.bare_refused or not carried)
        if complaint is Verdict.OVERFLOW and self.replanned < REPLANS:
            return replace(tried, replanned=self.replanned + 1)
        if complaint is Addition.THINKING and concerned and complaint not in self.without and not self.in_vain:
            return replace(tried, without=self.without | {complaint}, blamed=self.blamed | {complaint})
        if not carried or complaint is Verdict.FINAL or (carried == FORGIVING and self.bare_refused):
            return None
        if carried == FORGIVING:
            return replace(tried, without=self.without - FORGIVING, blamed=self.blamed - FORGIVING, in_vain=True)
        if complaint is Verdict.GENERATION and not self.repeated:
            return replace(tried, repeated=True)
        if isinstance(complaint, Addition):
            named = complaint if complaint in carried else Addition.ANY
            tried = replace(tried, without=self.without | {named}, blamed=self.blamed | {named})
            if named in REMOVABLE:
                return tried
        return None if self.bare_refused else replace(tried, without=tried.without | _whole(tried.without))


def _whole(without: frozenset[Addition]) -> frozenset[Addition]:
    """Return what more to leave out, so that nothing is added."""
    return frozenset() if without & {Addition.TOOLS, Addition.ANY} else frozenset((Addition.ANY,))


class Subject(msgspec.Struct, frozen=True):
    """What a refusal is about: an addition to one namespace's requests of one shape."""

    namespace: str
    upstream: str
    model: str
    addition: Addition
    shape: str


class Belief(msgspec.Struct, frozen=True):
    """That upstream refuses an addition, until a time (in Unix seconds). Replicas tell each other their beliefs."""

    subject: Subject
    until: float
    span: float
    """The seconds that it lasts."""


class RefusalMemory:
    """Which additions are refused, by namespace, upstream, model and shape of the request.

    `on_believed` gets every belief that this process forms, to share it; `accept` takes those of others.
    """

    def __init__(
        self, on_believed: Callable[[Belief], None] = lambda _: None, clock: Callable[[], float] = time.time
    ) -> None:
        self.on_believed = on_believed
        self._clock = clock
        self._known: Lru[str, dict[Subject, _Known]] = Lru(NAMESPACES)

    def knows(self, namespace: str) -> bool:
        """Whether anything is known of this namespace's requests."""
        return self._known.get(namespace) is not None

    def holds(self, subject: Subject) -> bool:
        """Whether to leave the addition out. Once a belief has expired, says no to one request, which tries again."""
        known = self._find(subject)
        if known is None or known.refusals < ENOUGH:
            return False
        now = self._clock()
        if now < known.until < now + known.span + 1:  # later only if the clock was set back
            return True
        known.until, known.trying = now + known.span, True
        return False

    def refused(self, subject: Subject) -> None:
        """Note that a request was refused with the addition and accepted without it."""
        known = self._find(subject) or _Known()
        self._keep(subject, known)
        known.refusals += 1
        # A request that was under way when the belief was formed says nothing new.
        if known.refusals < ENOUGH or (known.span and not known.trying):
            return
        known.span = min(2 * known.span, LONGEST_SPAN) if known.span else FIRST_SPAN
        known.until, known.trying = self._clock() + known.span, False
        logs.event(
            log,
            "upstream refuses what we add",
            logging.WARNING,
            namespace=subject.namespace,
            upstream=subject.upstream,
            model=subject.model[: logs.LONGEST],
            addition=subject.addition.value,
            shape=subject.shape,
            left_out_seconds=known.span,
        )
        self.on_believed(Belief(subject, known.until, known.span))

    def accepted(self, subject: Subject) -> None:
        """Note that a request with the addition was accepted."""
        if beliefs := self._known.get(subject.namespace):
            beliefs.pop(subject, None)

    def beliefs(self, namespace: str) -> Iterator[Belief]:
        """Yield what is believed of this namespace's requests."""
        for subject, known in (self._known.get(namespace) or {}).items():
            if self._clock() < known.until:
                yield Belief(subject, known.until, known.span)

    def accept(self, belief: Belief) -> None:
        """Take over a belief that another process formed. It lasts for its span at most, whatever that one's clock."""
        known, now = self._find(belief.subject) or _Known(), self._clock()
        span = min(max(known.span, belief.span, FIRST_SPAN), LONGEST_SPAN)
        until = min(belief.until, now + span)
        if until > max(known.until, now):
            known.refusals, known.until, known.span = max(known.refusals, ENOUGH), until, span
            self._keep(belief.subject, known)

    def _find(self, subject: Subject) -> _Known | None:
        beliefs = self._known.get(subject.namespace)
        return beliefs.get(subject) if beliefs else None

    def _keep(self, subject: Subject, known: _Known) -> None:
        beliefs = self._known.get(subject.namespace)
        if beliefs is None:
            beliefs = {}
            self._known.put(subject.namespace, beliefs)
        beliefs[subject] = known
        if len(beliefs) > SUBJECTS:
            del beliefs[next(iter(beliefs))]


class _Known:
    """What is known of one subject."""

    def __init__(self) -> None:
        self.refusals = 0
        self.until = 0.0
        self.span = 0.0
        self.trying = False
        """Whether a request tries again at the moment."""
