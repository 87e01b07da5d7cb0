"""A chat request with all that is known of it so far: ONE value, which each stage of its life fills
in further.

parse ──> request, or why not ──plan──> planned ──render──> rendered, turn ──> it is sent as planned
                     │                     ├──nothing to change, or refused──> it is sent as it came
                     └──> unplanned        └──observe──> foreseen ──> it is sent as it came

`versions` says how it is sent again after a refusal, and `outcomes` what became of it.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import msgspec
from msgspec.structs import replace

from proxy.dialects.turn import Turn
from proxy.dialects.usage import Reported
from proxy.plan.compacting import Wish
from proxy.plan.forecast import Answers, Forecast, newly_used
from proxy.plan.turn import Addition, Declined, Reason, Request, Usage
from proxy.policies.tenants import Tenant
from proxy.policy import SnapshotRole
from proxy.requests.planned import OUR_TOOLS_TOKENS, Planned, Rendered
from proxy.requests.records import References
from proxy.telemetry.outcome import Holdout, ToolUse


class Prepared(msgspec.Struct, frozen=True, dict=True):
    """A member that is None was not reached yet, or `reason` says why there is none."""

    body: bytes
    """The client's own bytes."""
    tenant: Tenant
    """The tenant, with the policy for the request's model if the model is known."""
    request: Request | None = None
    """What the body says."""
    continued: bytes | None = None
    """What goes upstream instead of `body`, if the request goes on from a reply with hidden rounds
    by its id."""
    declined: Declined | None = None
    """The request that this one repeats for another model: it is planned and sent as that one
    was."""
    wish: Wish | None = None
    """What compaction the client asks for, as long as the proxy may serve it."""
    references: References = References()
    """Those to compacted histories that the request brought, and what stands behind them."""
    observed: bool = False
    """Whether the plan is only recorded, because the client or the policy wants that, or the
    conversation is held out."""
    holdout: Holdout = Holdout.NONE
    """The conversation's group, if the policy leaves a share of conversations as they come."""
    unplanned: Reason = Reason.NONE
    """Why there is no plan."""
    obstacle: str = ""
    """The field that prevents a plan or has it wait, if that is the reason."""
    remark: str = ""
    """What upstream has shown of itself that its operator should know."""
    planned: Planned | None = None
    without: frozenset[Addition] = frozenset()
    """What the version that is sent lacks. Without `ANY`, it is as the client sent it."""
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
    reply: bytes = b""
    """Upstream's reply to the client's own bytes, decompressed, if it is to be compared with the
    reply to the plan, which is only observed."""

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

    def unrendered(self, **changes: Any) -> Prepared:
        """Return the request before it was rendered, with these changes."""
        before: dict[str, Any] = {"rendered": None, "turn": None, "uses": [], "shortened": None}
        return replace(self, **before | changes)

    @property
    def records_cost(self) -> bool:
        """Whether the outcome says what the client's own bytes cost: they are observed, or compared
        with a holdout."""
        return self.observed or (self.in_force is not None and bool(self.holdout))

    @cached_property
    def reason(self) -> Reason:
        """Why the request is sent as the client sent it, without its plan."""
        why = self.unplanned or (Reason.FIELD if self.obstacle else Reason.NONE)
        if not why and Addition.ANY in self.without and self.may_have_changed:
            why = Reason.REFUSED
        whole = self.planned is not None and self.planned.whole_for_summary and not self.observed
        return why or (Reason.SUMMARY if whole else Reason.NONE)

    @property
    def in_force(self) -> Planned | None:
        """The plan, unless the request is sent without it."""
        return None if self.reason else self.planned

    @property
    def may_have_changed(self) -> bool:
        """Whether we may have changed this request, or an earlier one of the conversation: without
        a plan that is not known."""
        return self.planned is None or self.planned.may_change

    @property
    def additions(self) -> frozenset[Addition]:
        """What is sent that the client did not send. `ANY` stands for all the rest."""
        rendered = self.rendered
        turn = self.turn
        if rendered is None or turn is None:
            return frozenset()
        shown = rendered.shown
        leading = rendered.planned.transcript.leading
        usage = [Addition.USAGE] if turn.asks_usage else []
        place = [Addition.PLACE] if shown and leading and shown.role is SnapshotRole.AUTO else []
        strict = rendered.planned.strict or not rendered.injecting
        loose = [] if strict or not rendered.planned.among_strict else [Addition.LOOSE]
        return frozenset([Addition.ANY, *usage, *place, *loose])

    @property
    def rounds(self) -> int:
        """Hidden rounds so far."""
        return self.turn.rounds + self.turn.mixed if self.turn else 0

    @property
    def history_tokens(self) -> int:
        """Tokens of the history as it is sent, or would be by a plan that is only observed; 0 if it
        was not counted."""
        known = self.rendered or self.foreseen or (self.planned and self.planned.history)
        return known.tokens if known else 0

    @property
    def tokens_after(self) -> int:
        """Tokens of the whole prompt, likewise."""
        if self.planned is None:
            return 0
        ours = (
            self.rendered.injecting if self.rendered else bool(self.foreseen and self.foreseen.ours)
        )
        return self.planned.before_history + self.history_tokens + (OUR_TOOLS_TOKENS if ours else 0)

    @property
    def limit(self) -> int | None:
        """The lower limit for the reply that upstream gets; None if it gets the client's."""
        if self.planned is None or (self.rendered is None and self.shortened is None):
            return None
        return self.planned.reply_limit(self.history_tokens)

    @cached_property
    def compacted(self) -> int:
        """Messages whose texts moved."""
        if self.rendered:
            return self.rendered.compacted()
        return self.foreseen.compacted if self.foreseen else 0

    @cached_property
    def compressed(self) -> int:
        """Messages that a snapshot replaces."""
        if self.rendered:
            return self.rendered.compressed()
        return self.foreseen.compressed if self.foreseen else 0

    @cached_property
    def pointed(self) -> Answers | None:
        """The answers of our tools that became pointers at this request."""
        if self.rendered is None:
            return None
        whole = self.rendered.found
        sent = self.rendered.rounds
        places = newly_used(self.rendered.planned.history.items, self.rendered.plan)
        left = [
            place for place in places if place in sent and sent[place].tokens < whole[place].tokens
        ]
        before = sum(whole[place].tokens for place in left)
        after = sum(sent[place].tokens for place in left)
        return Answers(len(left), before, after) if left else None

    @property
    def unfollowed(self) -> bool:
        """Whether something moved that the model may not read back, because the request did not fit
        whole."""
        return (
            self.rendered is not None
            and self.rendered.planned.request.forbids_ours
            and self.compacted > 0
        )
