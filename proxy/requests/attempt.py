"""The stages of a chat request as values, each made from the one before. The log's outcome is built from the last.

    ParsedRequest ──plan──> AsItCame ──render──> Rewritten
                                └─────observe──> Observed

An attempt is one of the last three: the request as it came, with or without a plan; rewritten to its plan; or as it
came, beside what its plan would have done.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import msgspec

from proxy.dialects.turn import Turn
from proxy.dialects.usage import Reported
from proxy.plan.forecast import (
    Answers,
    Billed,
    Forecast,
    as_sent,
    cost,
    cost_as_it_came,
    event_at,
    forecast,
    newly_used,
    told,
    waiting,
)
from proxy.plan.reasons import Reason
from proxy.plan.refusals import Addition
from proxy.plan.request import Request
from proxy.plan.turn import Usage
from proxy.policies.tenants import Tenant
from proxy.policy import Mode, SnapshotRole
from proxy.regex import Budget
from proxy.requests.prepare import OUR_TOOLS_TOKENS, PlannedRequest, RenderedRequest
from proxy.requests.turn_io import RequestTurnIO
from proxy.telemetry.outcome import Basis, Holdout, Kind, Outcome, StoreError, ToolUse
from proxy.upstream.headers import Header

if TYPE_CHECKING:
    from proxy.requests.exchange import Exchange


class ParsedRequest(msgspec.Struct, frozen=True, dict=True):
    """A client's request as far as it was understood."""

    body: bytes
    """The client's own bytes."""
    tenant: Tenant
    """The tenant, with the policy for the request's model if the model is known."""
    chat: Request | None = None
    """What the body says; None if we could not read it."""
    reason: Reason = Reason.NONE
    """Why the request must not be planned."""
    continued: bytes | None = None
    """What goes upstream instead of `body`, if the request goes on from a reply with hidden rounds by its id."""
    observed: bool = False
    """Whether the plan is only recorded, and the request goes upstream as it came."""

    @cached_property
    def searching(self) -> Budget:
        """The time budget for all searches of the request, over all its attempts."""
        return Budget(self.tenant.policy.tools.max_search_seconds)


class Costs(msgspec.Struct, frozen=True):
    """The cost of a request's input as it came and as it was sent, or would have been, and what both rest on."""

    before: int
    after: int
    basis: Basis


NO_COSTS = Costs(0, 0, Basis.NONE)


class AsItCame(msgspec.Struct, frozen=True):
    """The client's own bytes go upstream, because there is no plan, for this `reason`, or the plan changes nothing."""

    parsed: ParsedRequest
    planned: PlannedRequest | None = None
    reason: Reason = Reason.NONE
    obstacle: str = ""
    """The field that prevents a plan, if the reason is `Reason.FIELD`."""
    refused: PlannedRequest | None = None
    """The plan that upstream refuses, if that is the reason."""
    shortened: bytes | None = None
    """The body with a lower limit for the reply, if upstream would refuse the client's."""
    reported: Reported | None = None
    """What upstream said about the cost, if it was asked for: see `costs`."""

    kind: ClassVar[Kind] = Kind.UNTOUCHED
    additions: ClassVar[frozenset[Addition]] = frozenset()
    compacted: ClassVar[int] = 0
    compressed: ClassVar[int] = 0
    reinserted: ClassVar[int] = 0
    rounds: ClassVar[int] = 0
    uses: ClassVar[tuple[ToolUse, ...]] = ()

    @property
    def spent(self) -> Usage:
        return _usage(self.reported)

    @property
    def costs(self) -> Costs:
        """They are only known where conversations are compared with those that a holdout leaves as they come."""
        said = self.reported
        if said is None or self.planned is None:
            return NO_COSTS
        came = cost(self.planned.policy.offload, said.prompt, said.cached or 0)
        return Costs(came, came, _basis(said))

    @property
    def tokens(self) -> int:
        """Tokens of the messages; 0 if they were not counted."""
        return self.planned.tokens if self.planned else 0

    @property
    def sent(self) -> int:
        """Tokens of the whole prompt; 0 if they were not counted."""
        return self.planned.whole(self.tokens) if self.planned else 0

    @property
    def concerned(self) -> bool:
        """Whether we may have changed an earlier request of the conversation."""
        planned = self.planned or self.refused
        return planned is not None and planned.concerns_us

    @property
    def limit(self) -> int | None:
        """The lower limit for the reply that upstream gets; None if it gets the client's."""
        return None if self.shortened is None or not self.planned else self.planned.reply_limit(self.tokens)

    def headers(self) -> Sequence[Header]:
        """Return our headers for the client's reply."""
        if self.planned:
            return offload_headers(self.planned, self.sent, 0, 0, self.limit)
        why = (self.obstacle or self.reason.value).encode()
        return [(b"x-offload-mode", b"off"), *([(b"x-offload-reason", why)] if why else [])]


class Rewritten(msgspec.Struct, frozen=True):
    """A rendered request goes upstream, in a turn that answers our tools. The properties show the turn's progress."""

    parsed: ParsedRequest
    rendered: RenderedRequest
    turn: Turn
    io: RequestTurnIO

    kind: ClassVar[Kind] = Kind.OFFLOADED
    concerned: ClassVar[bool] = True
    reason: ClassVar[Reason] = Reason.NONE
    obstacle: ClassVar[str] = ""

    @property
    def planned(self) -> PlannedRequest:
        return self.rendered.history

    @property
    def tokens(self) -> int:
        """Tokens of the messages as they are sent in the first round."""
        return self.rendered.tokens

    @property
    def sent(self) -> int:
        """Tokens of the whole prompt as it is sent in the first round."""
        return self.planned.whole(self.tokens, ours=self.rendered.injecting)

    @property
    def additions(self) -> frozenset[Addition]:
        """What the request has that the client did not send. `ANY` stands for all the rest."""
        rendered, role = self.rendered, self.planned.policy.offload.compress.snapshot_role
        in_system = role is SnapshotRole.AUTO and self.planned.transcript.leading > 0
        carried = {
            Addition.ANY: True,
            Addition.TOOLS: rendered.injecting,
            Addition.USAGE: self.turn.asks_usage,
            Addition.PLACE: rendered.shown is not None and in_system,
        }
        return frozenset(addition for addition, present in carried.items() if present)

    @property
    def limit(self) -> int | None:
        """The lower limit for the reply that upstream gets; None if it gets the client's."""
        return self.planned.reply_limit(self.tokens)

    @property
    def compacted(self) -> int:
        return self.rendered.compacted()

    @property
    def compressed(self) -> int:
        return self.rendered.compressed()

    @property
    def reinserted(self) -> int:
        return len(self.rendered.rounds)

    @property
    def rounds(self) -> int:
        return self.turn.rounds + self.turn.mixed

    @property
    def uses(self) -> tuple[ToolUse, ...]:
        return tuple(self.io.uses)

    @property
    def spent(self) -> Usage:
        return self.turn.spent

    @property
    def costs(self) -> Costs:
        """The cost of what was sent, and what the request would have cost as it came, in upstream's tokens. It is
        unknown if upstream did not say it of each round, as where the last one broke off: a part would look cheap."""
        spent, planned = self.spent, self.planned
        if spent.said <= self.turn.rounds:
            return Costs(0, 0, Basis.UNKNOWN)
        offload, head = planned.policy.offload, planned.prompt(0) - OUR_TOOLS_TOKENS
        sent = head + self.tokens + sum(use.tokens for use in self.uses)
        sent += OUR_TOOLS_TOKENS if self.rendered.injecting else 0
        warm = spent.cached > 0 or event_at(planned.plan, len(planned.past)) is not None
        came = cost_as_it_came(planned.past.items, offload, head, spent.largest / sent, cached=warm)
        return Costs(came, cost(offload, spent.prompt, spent.cached, spent.hidden), Basis.BILLED)

    def headers(self) -> Sequence[Header]:
        """Return our headers for the client's reply."""
        return rendered_headers(self.rendered)


class Observed(msgspec.Struct, frozen=True):
    """The client's own bytes go upstream, beside what the plan would have done. The reply then says what they cost."""

    parsed: ParsedRequest
    planned: PlannedRequest
    foreseen: Forecast
    reported: Reported | None = None
    """What upstream said about the cost, once its reply has ended."""

    kind: ClassVar[Kind] = Kind.OBSERVED
    reason: ClassVar[Reason] = Reason.NONE
    obstacle: ClassVar[str] = ""
    additions: ClassVar[frozenset[Addition]] = frozenset()
    limit: ClassVar[int | None] = None
    reinserted: ClassVar[int] = 0
    rounds: ClassVar[int] = 0
    uses: ClassVar[tuple[ToolUse, ...]] = ()

    @classmethod
    def of(cls, parsed: ParsedRequest, planned: PlannedRequest, reported: Reported | None = None) -> Observed:
        """Return the attempt with its forecast, which rests on upstream's numbers if these are known."""
        billed = None
        if reported is not None and reported.cached is not None:
            billed = Billed(reported.prompt, reported.cached)
        return cls(parsed, planned, foreseen(planned, billed), reported)

    @property
    def tokens(self) -> int:
        """Tokens of the messages as the plan would have sent them."""
        return self.foreseen.tokens

    @property
    def sent(self) -> int:
        """Tokens of the whole prompt as the plan would have sent it."""
        return self.planned.whole(self.tokens, ours=self.foreseen.ours)

    @property
    def compacted(self) -> int:
        return self.foreseen.compacted

    @property
    def compressed(self) -> int:
        return self.foreseen.compressed

    @property
    def spent(self) -> Usage:
        return _usage(self.reported)

    @property
    def costs(self) -> Costs:
        """The costs as foreseen."""
        return Costs(self.foreseen.before, self.foreseen.after, _basis(self.reported))

    def headers(self) -> Sequence[Header]:
        """Return our headers for the client's reply."""
        return offload_headers(self.planned, self.sent, self.compacted, self.compressed, mode=Mode.OBSERVE)


Sent = AsItCame | Rewritten
"""An attempt that upstream may refuse, so that another one follows."""
Attempt = Sent | Observed


def foreseen(planned: PlannedRequest, billed: Billed | None = None) -> Forecast:
    """Return what this plan would have sent and cost."""
    head = planned.prompt(0) - OUR_TOOLS_TOKENS
    return forecast(as_sent(planned.past), planned.plan, planned.policy, head, OUR_TOOLS_TOKENS, billed)


def rendered_headers(rendered: RenderedRequest) -> Sequence[Header]:
    """Return our headers for the reply to a rewritten request."""
    history, tokens = rendered.history, rendered.tokens
    limit, sent = history.reply_limit(tokens), history.whole(tokens, ours=rendered.injecting)
    return offload_headers(history, sent, rendered.compacted(), rendered.compressed(), limit)


def offload_headers(
    planned: PlannedRequest,
    after: int,
    compacted: int,
    compressed: int,
    limit: int | None = None,
    mode: Mode | None = None,
) -> Sequence[Header]:
    """Return headers that say what was done to a planned request.

    `after` is the tokens of its whole prompt as sent, `limit` is the lower limit for the reply, if it was lowered, and
    `mode` is the mode that applied, if that is not the one by which it was planned.
    """
    return [
        (b"x-offload-mode", (mode or planned.policy.offload.mode).value.encode()),
        (b"x-offload-tokens-before", b"%d" % planned.whole(planned.tokens)),
        (b"x-offload-tokens-after", b"%d" % after),
        (b"x-offload-compacted", b"%d" % compacted),
        (b"x-offload-compressed", b"%d" % compressed),
        *([] if limit is None else [(b"x-offload-max-tokens", b"%d" % limit)]),
    ]


def outcome(
    attempt: Attempt, client: Exchange, store_errors: Mapping[StoreError, int], refused: Iterable[Addition] = ()
) -> Outcome:
    """Return the outcome of a request whose last attempt this was. `refused` is what upstream did not take."""
    tenant, chat, planned, spent = attempt.parsed.tenant, attempt.parsed.chat, attempt.planned, attempt.spent
    messages, costs = len(planned.past) if planned else 0, attempt.costs
    event = event_at(planned.plan, messages) if planned else None
    mode = Mode.OBSERVE if isinstance(attempt, Observed) else planned.policy.offload.mode if planned else Mode.OFF
    return Outcome(
        request_id=client.request_id,
        dialect=client.dialect,
        tenant=tenant.name,
        namespace=tenant.namespace,
        kind=attempt.kind,
        method=client.method,
        path=client.shown_path,
        model=chat.model if chat else "",
        stream=chat.stream if chat else False,
        mode=mode.value,
        reason=attempt.reason,
        obstacle=attempt.obstacle,
        messages=messages,
        left_alone=planned.past.irregular if planned and planned.past.fold else {},
        tokens_before=planned.whole(planned.tokens) if planned else 0,
        tokens_after=attempt.sent,
        cost_before=costs.before,
        cost_after=costs.after,
        usage=costs.basis,
        holdout=planned.holdout if planned and not attempt.parsed.observed else Holdout.NONE,
        compacted=attempt.compacted,
        compressed=attempt.compressed,
        events=len(planned.plan.events) if planned else 0,
        new_event=event is not None,
        cause=event.cause.name.lower() if event else "",
        words=_told(attempt, planned) if planned else "",
        reinserted=attempt.reinserted,
        rounds=attempt.rounds,
        tool_uses=attempt.uses,
        prompt_tokens=spent.prompt,
        completion_tokens=spent.completion,
        cached_tokens=spent.cached,
        written_tokens=spent.written,
        store_errors=store_errors,
        refused=tuple(sorted(refused)),
    )


def _told(attempt: Attempt, planned: PlannedRequest) -> str:
    """Say what the plan did at this request, or what it waits for."""
    plan, answers, late = planned.plan, None, isinstance(attempt, AsItCame) and not planned.plan.empty
    if isinstance(attempt, Rewritten):
        answers, late = _answers(attempt), len(attempt.rendered.plan.events) < len(plan.events)
    offload, window = planned.policy.offload, planned.room.window
    if plan.empty and not answers:
        return waiting(plan, offload)
    return told(planned.past.items, plan, offload, window, late=late, answers=answers)


def _answers(attempt: Rewritten) -> Answers | None:
    """Return the answers of our tools that became pointers at this request."""
    rendered = attempt.rendered
    whole, sent = rendered.found, rendered.rounds
    places = newly_used(attempt.planned.past.items, rendered.plan)
    left = [place for place in places if place in sent and sent[place].tokens < whole[place].tokens]
    before, after = (sum(rounds[place].tokens for place in left) for rounds in (whole, sent))
    return Answers(len(left), before, after) if left else None


def _usage(said: Reported | None) -> Usage:
    return Usage(said.prompt, said.completion, said.cached or 0, said.written or 0) if said else Usage()


def _basis(said: Reported | None) -> Basis:
    return Basis.UNKNOWN if said is None or said.cached is None else Basis.BILLED
