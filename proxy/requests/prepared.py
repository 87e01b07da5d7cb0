"""A chat request with all that is known of it so far: ONE value, which each stage of its life fills in further.

parse ──> request, or why not ──plan──> planned ──render──> rendered, turn ──> it is sent as planned
                     │                     ├──nothing to change, or refused──> it is sent as it came
                     └──> unplanned        └──observe──> foreseen ──> it is sent as it came
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from proxy.dialects import refusals
from proxy.plan import compacting
from proxy.plan.compacting import Wish
from proxy.plan.forecast import Answers, newly_used, told, waiting
from proxy.plan.turn import FORGIVING, Addition, Form, Reason, Usage, Verdict
from proxy.policy import Mode, SnapshotRole
from proxy.requests.planned import Planned, Rendered
from proxy.telemetry.outcome import Holdout

if TYPE_CHECKING:
    from proxy.dialects import Dialect
    from proxy.dialects.turn import Turn
    from proxy.dialects.usage import Reported
    from proxy.plan.forecast import Forecast
    from proxy.plan.turn import Request
    from proxy.policies.tenants import Tenant
    from proxy.policy import Policy
    from proxy.requests.relay import Refusal
    from proxy.requests.windows import Known
    from proxy.telemetry.outcome import ToolUse
    from proxy.upstream.headers import Header


UNFOLLOWED = "The model may not read back what moved: `tool_choice` forbids it, and the request does not fit whole."


class Prepared(msgspec.Struct, frozen=True, dict=True):
    """What is None has not been reached, or there is none, for a `reason`."""

    body: bytes
    """The client's own bytes."""
    tenant: Tenant
    """The tenant, with the policy for the request's model if the model is known."""
    request: Request | None = None
    """What the body says."""
    continued: bytes | None = None
    """What goes upstream instead of `body`, if the request goes on from a reply with hidden rounds by its id."""
    wish: Wish | None = None
    """What compaction the client asks for, as long as the proxy may serve it."""
    observed: bool = False
    """Whether the client or the policy wants the plan recorded and not carried out."""
    unplanned: Reason = Reason.NONE
    """Why there is no plan."""
    obstacle: str = ""
    """The field that prevents a plan or has it wait, if that is the reason."""
    planned: Planned | None = None
    form: Form = Form()
    """How it is sent."""
    rendered: Rendered | None = None
    """The request as planned, if that differs from what the client sent."""
    turn: Turn | None = None
    """The turn that sends it. It shows how far it got."""
    uses: list[ToolUse] = []
    """The calls of our tools so far, likewise."""
    shortened: bytes | None = None
    """The body with a lower limit for the reply, if upstream would refuse the client's."""
    foreseen: Forecast | None = None
    """What the plan would have sent and cost, if it is only observed."""
    reported: Reported | None = None
    """What upstream said about the cost of the client's own bytes, if it was looked at."""

    @property
    def spent(self) -> Usage:
        """The tokens of all rounds as upstream counted them, as far as it said them."""
        said = self.reported
        if self.turn is not None or said is None:
            return self.turn.spent if self.turn else Usage()
        return Usage(
            said.prompt,
            said.completion,
            said.cached or 0,
            said.written or 0,
            cache_told=said.cached is not None,
            largest=said.prompt,
        )

    def again(self, **changes: Any) -> Prepared:
        """Return the request before it was rendered, with these changes."""
        before: dict[str, Any] = {"rendered": None, "turn": None, "uses": [], "shortened": None}
        return replace(self, **before | changes)

    @property
    def only_observed(self) -> bool:
        """Whether it is sent as it came and its plan recorded: somebody wants that, or it is of a holdout's group."""
        return self.observed or (self.planned is not None and self.planned.holdout is Holdout.KEPT)

    @cached_property
    def reason(self) -> Reason:
        """Why the request is sent as the client sent it, without its plan."""
        held = Reason.FIELD if self.obstacle else Reason.NONE
        why = self.unplanned or held or (self.form.reason if self.concerned else Reason.NONE)
        whole = self.planned is not None and self.planned.sent_whole and not self.observed
        return why or (Reason.SUMMARY if whole else Reason.NONE)

    @property
    def in_force(self) -> Planned | None:
        """The plan, unless the request is sent without it."""
        return None if self.reason else self.planned

    @property
    def concerned(self) -> bool:
        """Whether we may have changed this request, or an earlier one of the conversation."""
        return self.planned is not None and self.planned.concerns_us

    @property
    def additions(self) -> frozenset[Addition]:
        """What is sent that the client did not send. `ANY` stands for all the rest."""
        rendered, turn = self.rendered, self.turn
        if rendered is None or turn is None:
            return frozenset()
        planned = rendered.planned
        in_system = planned.role is SnapshotRole.AUTO and planned.transcript.leading > 0
        carried = {
            Addition.ANY: True,
            Addition.USAGE: turn.asks_usage,
            Addition.PLACE: rendered.shown is not None and in_system,
        }
        return frozenset(addition for addition, present in carried.items() if present)

    @property
    def rounds(self) -> int:
        """Hidden rounds so far."""
        return self.turn.rounds + self.turn.mixed if self.turn else 0

    @property
    def tokens(self) -> int:
        """Tokens of the history as it is sent, or would be by a plan that is only observed; 0 if it was not counted."""
        if self.rendered is not None:
            return self.rendered.tokens
        if self.foreseen is not None:
            return self.foreseen.tokens
        return self.planned.tokens if self.planned else 0

    @property
    def prompt(self) -> int:
        """Tokens of the whole prompt, likewise."""
        if self.planned is None:
            return 0
        ours = self.rendered.injecting if self.rendered else bool(self.foreseen and self.foreseen.ours)
        return self.planned.whole(self.tokens, ours=ours)

    @property
    def limit(self) -> int | None:
        """The lower limit for the reply that upstream gets; None if it gets the client's."""
        if self.planned is None or (self.rendered is None and self.shortened is None):
            return None
        return self.planned.reply_limit(self.tokens)

    @cached_property
    def compacted(self) -> int:
        """Messages whose texts moved."""
        return self.rendered.compacted() if self.rendered else self.foreseen.compacted if self.foreseen else 0

    @cached_property
    def compressed(self) -> int:
        """Messages that a snapshot replaces."""
        return self.rendered.compressed() if self.rendered else self.foreseen.compressed if self.foreseen else 0

    @property
    def pointed(self) -> bool:
        """Whether answers of our tools became pointers at this request."""
        return self.rendered is not None and _answers(self.rendered) is not None

    @property
    def unfollowed(self) -> bool:
        """Whether something moved that the model may not read back, because the request did not fit whole."""
        return self.rendered is not None and self.rendered.planned.request.bound and self.compacted > 0

    @cached_property
    def words(self) -> str:
        """What the plan did at this request, or what it waits for; empty if there is no plan."""
        return " ".join(filter(None, (self._advice, self._told, UNFOLLOWED if self.unfollowed else "")))

    @property
    def _advice(self) -> str:
        """What the operator of a client should know that compacts a history of which results have moved."""
        planned = self.planned
        if planned is None or planned.summary_asked is None:
            return ""
        sent = self.rendered.tokens if self.rendered else planned.plan.standing.total
        limit = compacting.limit(planned.tokens, sent)
        whole = "The history was sent whole for it. " if self.reason is Reason.SUMMARY else ""
        return f"{whole}Your client compacts itself; raise its limit to {limit:,} tokens."

    @property
    def _told(self) -> str:
        planned, rendered = self.in_force, self.rendered
        if planned is None:
            return ""
        plan, answers, late = planned.plan, None, self.foreseen is None and not planned.plan.empty
        if rendered is not None:
            answers, late = _answers(rendered), len(rendered.plan.events) < len(plan.events)
        offload, window = planned.policy.offload, planned.room.window
        if plan.empty and not answers:
            return waiting(plan, offload)
        said = told(planned.history.items, plan, offload, window, late=late, answers=answers)
        if not planned.relearned or window is None:
            return said
        return f"Planned again for a context window of {window:,}, which was learned. {said}"

    def headers(self) -> Sequence[Header]:
        """Return our headers for the client's reply."""
        planned, limit = self.in_force, self.limit
        if planned is None:
            why = (self.obstacle or self.reason.value).encode()
            return [(b"x-offload-mode", b"off"), *([(b"x-offload-reason", why)] if why else [])]
        changed = self.compacted or self.compressed
        return [
            (b"x-offload-mode", (Mode.OBSERVE if self.foreseen else planned.policy.offload.mode).value.encode()),
            (b"x-offload-tokens-before", b"%d" % planned.whole(planned.tokens)),
            (b"x-offload-tokens-after", b"%d" % self.prompt),
            (b"x-offload-compacted", b"%d" % self.compacted),
            (b"x-offload-compressed", b"%d" % self.compressed),
            *([] if limit is None else [(b"x-offload-max-tokens", b"%d" % limit)]),
            *([] if changed else [(b"x-offload-reason", self.words.encode())]),
            *([(b"x-offload-reason", UNFOLLOWED.encode())] if self.unfollowed else []),
        ]


def _answers(rendered: Rendered) -> Answers | None:
    """Return the answers of our tools that became pointers at this request."""
    whole, sent = rendered.found, rendered.rounds
    places = newly_used(rendered.planned.history.items, rendered.plan)
    left = [place for place in places if place in sent and sent[place].tokens < whole[place].tokens]
    before, after = (sum(rounds[place].tokens for place in left) for rounds in (whole, sent))
    return Answers(len(left), before, after) if left else None


# -- after a refusal --------------------------------------------------------------------------------------------------


class Ladder:
    """The forms of one request, with what upstream's replies teach and what earlier ones have taught.

    The forms themselves are in `plan.turn`. A request that is too long is first planned again, for the window that
    upstream named or that we guess.
    """

    def __init__(self, known: Known, dialect: Dialect, namespace: str, own: str) -> None:
        """Refusals teach only what is kept under the namespace `own`, until the request is `accepted`."""
        self._known = known
        self._dialect = dialect
        self._namespace = namespace
        self._to_learn: list[Callable[[str], int]] = []  # of the request's refusals, for a namespace
        self._learner = own
        self._own: Refusal | None = None  # upstream's first refusal of the client's own bytes
        self._window: int | None = None  # for which this request alone is planned
        self.refused: frozenset[Addition] = frozenset()
        """What upstream refused of our additions before it took the request without."""

    @property
    def too_long(self) -> bool:
        """Whether upstream refused the request as too long."""
        return self._window is not None

    def window(self, policy: Policy, model: str) -> int | None:
        """Return the window to plan with, None if it is not known."""
        known = self._known.window(self._namespace, policy, model)
        return min((window for window in (known, self._window) if window is not None), default=None)

    def first(self, prepared: Prepared, form: Form) -> Form:
        """Return `form` without the additions that upstream refuses, as far as is known."""
        planned = prepared.planned
        if planned is None or not planned.concerns_us or not self._known.has_refusals(self._namespace):
            return replace(form, without=frozenset())
        possible = [Addition.ANY, Addition.THINKING]
        possible += [Addition.USAGE] if planned.request.stream else []
        possible += [Addition.PLACE] if planned.plan.boundaries else []
        refused = [one for one in possible if self._known.refuses(planned.refusable(self._namespace, one))]
        return replace(form, without=frozenset(refused))

    def next(self, prepared: Prepared, refusal: Refusal) -> Form | Refusal:
        """Return the next form after a refusal, or the refusal that the client gets."""
        form, planned = prepared.form, prepared.planned
        complaint = self._dialect.complaint(refusal.status, refusal.said())
        carried = prepared.additions or form.without & FORGIVING
        if not carried:
            self._own = self._own or refusal
        again = None if prepared.rounds else form.after(complaint, carried, concerned=prepared.concerned)
        if again is None:
            return refusal if complaint is Verdict.FINAL else self._own or refusal
        if complaint is Verdict.OVERFLOW and planned is not None:
            learn = partial(
                self._known.too_long,
                policy=planned.policy,
                model=planned.request.model,
                named=refusals.window(refusal.said()),
                counted=planned.needs(prepared.tokens, prepared.limit),
                measured=not planned.history.fixed,  # images, audio and files cannot be counted
            )
            self._window = learn(self._learner)
            self._to_learn.append(learn)
        return again

    def accepted(self) -> None:
        """Upstream has taken the request: what its refusals taught holds for its client, too."""
        if self._learner != self._namespace:
            self._learner = self._namespace
            for learn in self._to_learn:
                learn(self._namespace)

    def took(self, prepared: Prepared, carried: frozenset[Addition], blamed: frozenset[Addition]) -> None:
        """Learn from a request that upstream took with the additions `carried`, having refused those in `blamed`."""
        planned = prepared.planned
        if planned is None:
            return
        self.refused = blamed
        for addition in sorted(blamed):
            self._known.refused(planned.refusable(self._namespace, addition))
        if self._known.has_refusals(self._namespace):
            for addition in carried:
                self._known.accepted(planned.refusable(self._namespace, addition))
