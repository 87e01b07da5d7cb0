"""What upstream's refusal of a request is about, and how the request is sent next. Pure.

    as planned ──refused──> without the addition that the refusal names ──refused──> as the client sent it

What the refusal names may be thinking that no longer fits what precedes it: then the client's own request also goes
without, as we may have changed earlier ones, and if that does not help, exactly as the client sent it.

The client sees only a refusal of its own bytes, except those that no other form of the request would avoid.
"""

from __future__ import annotations

from enum import Enum, StrEnum, auto

import msgspec
from msgspec.structs import replace

from proxy.plan.reasons import Reason


class Addition(StrEnum):
    """What we add to a client's request. Metrics and the log show these values."""

    TOOLS = "tools"
    USAGE = "usage"
    """The wish to have the usage of a stream reported."""
    PLACE = "place"
    """The place of the snapshot: a system message of ours, or text at the end of the client's."""
    THINKING = "thinking"
    """The client's signed thinking, which upstream takes only behind what it took before. We have changed that."""
    SUMMARY = "summary"
    """The task of a summary call that continues the conversation."""
    ANY = "any"
    """No addition in particular: upstream takes the conversation as the client sent it and not as we changed it."""


class Verdict(Enum):
    """A refusal that is about none of our additions."""

    OVERFLOW = auto()
    """The request has too many tokens."""
    GENERATION = auto()
    """The model wrote something that upstream could not use. The same request may succeed."""
    FINAL = auto()
    """Whatever we left out would not help: safety, credentials, quota, an unknown model, a fault of upstream's own."""


Complaint = Addition | Verdict

REPLANS = 2
"""How often a request is planned again because it is too long."""

REMOVABLE = frozenset((Addition.USAGE, Addition.PLACE))
"""What a changed request can do without. Without our tools no reference could be followed, so nothing would be left."""

FORGIVING = frozenset((Addition.THINKING,))
"""What is changed in the client's own request if upstream is only asked to drop thinking that no longer fits."""


class Step(msgspec.Struct, frozen=True):
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

    def after(self, complaint: Complaint, carried: frozenset[Addition], *, concerned: bool = True) -> Step | None:
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
