"""What became of a chat request or a summary, as the one value that log, metrics and dashboard are made from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from proxy.errors import Fault
from proxy.plan.forecast import (
    LEARNED,
    UNSEEN,
    Billed,
    Forecast,
    cost,
    cost_as_it_came,
    event_at,
    forecast,
    unseen,
)
from proxy.plan.plan import OffloadEvent
from proxy.plan.turn import Addition
from proxy.policy import Mode
from proxy.requests.planned import OUR_TOOLS_TOKENS
from proxy.telemetry.outcome import DECIMALS, Basis, Holdout, Kind, Outcome

if TYPE_CHECKING:
    from proxy.dialects.turn import Turn
    from proxy.dialects.usage import Reported
    from proxy.requests.exchange import Exchange
    from proxy.requests.planned import Planned, Rendered
    from proxy.requests.prepared import Prepared
    from proxy.requests.summary_writer import Spent, SummaryJob


def of_chat(
    prepared: Prepared, client: Exchange, store_errors: Mapping[str, int], refused: Iterable[Addition] = ()
) -> Outcome:
    """Return the outcome of a request as far as it got. `refused` is what upstream did not take."""
    tenant, request, planned, costs = prepared.tenant, prepared.request, prepared.in_force, _costs(prepared)
    messages = len(planned.history) if planned else 0
    event = event_at(planned.plan) if planned else None
    cause = _cause(planned, event) if planned else ""
    spent = prepared.spent
    mode = planned.policy.offload.mode if planned else Mode.OFF
    return Outcome(
        request_id=client.request_id,
        dialect=client.dialect,
        tenant=tenant.name,
        namespace=tenant.namespace,
        kind=Kind.OFFLOADED if prepared.rendered else Kind.OBSERVED if prepared.foreseen else Kind.UNTOUCHED,
        method=client.method,
        path=client.shown_path,
        model=request.model if request else "",
        stream=request.stream if request else False,
        mode=(Mode.OBSERVE if prepared.foreseen else mode).value,
        reason=prepared.reason,
        obstacle=prepared.obstacle,
        messages=messages,
        left_alone=planned.history.irregular if planned else {},
        tokens_before=planned.whole(planned.tokens) if planned else 0,
        tokens_after=prepared.prompt if planned else 0,
        cost_before=costs.before,
        cost_after=costs.after,
        usage=costs.basis,
        holdout=planned.holdout if planned and not prepared.observed else Holdout.NONE,
        compacted=prepared.compacted,
        unfollowed=prepared.unfollowed,
        compressed=prepared.compressed,
        events=len(planned.plan.events) if planned else 0,
        new_event=bool(cause),
        cause=cause,
        words=prepared.words,
        reinserted=len(prepared.rendered.rounds) if prepared.rendered else 0,
        rounds=prepared.rounds,
        tool_uses=tuple(prepared.uses),
        prompt_tokens=spent.prompt,
        completion_tokens=spent.completion,
        cached_tokens=spent.cached,
        written_tokens=spent.written,
        store_errors=store_errors,
        refused=tuple(sorted(refused)),
    )


def of_summary(job: SummaryJob, spent: Spent, fault: str, seconds: float) -> Outcome:
    """Return the outcome of making a snapshot, which is reported separately because its request may have ended."""
    return Outcome(
        request_id=job.name,
        tenant=job.tenant,
        namespace=job.namespace,
        kind=Kind.SUMMARY,
        method="POST",
        path="",
        dialect=job.dialect,
        model=job.model,
        status=502 if fault else 200,
        fault=Fault.SUMMARY if fault else Fault.NONE,
        cost_after=cost(job.prices, spent.prompt_tokens, spent.cached_tokens, spent.completion_tokens),
        usage=Basis.BILLED if spent.prompt_tokens else Basis.UNKNOWN,
        summary_prompt_tokens=spent.prompt_tokens,
        summary_completion_tokens=spent.completion_tokens,
        cached_tokens=spent.cached_tokens,
        seconds=round(seconds, DECIMALS),
    )


def foreseen(planned: Planned, said: Reported | None = None) -> Forecast:
    """Return what this plan would have sent and cost, by upstream's own numbers if it `said` them."""
    billed = None if said is None or said.cached is None else Billed(said.prompt, said.cached)
    head = planned.prompt(0) - OUR_TOOLS_TOKENS
    return forecast(planned.history.items, planned.plan, planned.policy, head, OUR_TOOLS_TOKENS, billed)


class _Costs(NamedTuple):
    """The cost of a request's input as it came and as it was sent, or would have been, and what both rest on."""

    before: int = 0
    after: int = 0
    basis: Basis = Basis.NONE


def _costs(prepared: Prepared) -> _Costs:
    """The client's own bytes have costs only where they were looked at: observed, or to be compared with a holdout."""
    planned, said = prepared.in_force, prepared.reported
    if prepared.turn is not None and prepared.rendered is not None:
        return _costs_of_turn(prepared, prepared.rendered, prepared.turn)
    if prepared.foreseen is not None:
        return _Costs(prepared.foreseen.before, prepared.foreseen.after, _basis(said))
    if said is None or planned is None:
        return _Costs()
    came = cost(planned.policy.offload, said.prompt, said.cached or 0)
    return _Costs(came, came, _basis(said))


def _costs_of_turn(prepared: Prepared, rendered: Rendered, turn: Turn) -> _Costs:
    """Return the cost of what was sent, and what the request would have cost as it came, in upstream's tokens. It is
    unknown if upstream did not say it of each round, as where the last one broke off: a part would look cheap."""
    spent, planned = turn.spent, rendered.planned
    if spent.said <= turn.rounds:
        return _Costs(basis=Basis.UNKNOWN)
    offload, head = planned.policy.offload, planned.prompt(0) - OUR_TOOLS_TOKENS
    sent = head + rendered.tokens + sum(use.tokens for use in prepared.uses)
    sent += OUR_TOOLS_TOKENS if rendered.injecting else 0
    warm = spent.cached > 0 or event_at(planned.plan) is not None
    came = cost_as_it_came(planned.history.items, offload, head, spent.largest / sent, cached=warm)
    return _Costs(came, cost(offload, spent.prompt, spent.cached, spent.hidden, spent.largest), Basis.BILLED)


def _cause(planned: Planned, event: OffloadEvent | None) -> str:
    """Say in a word why something newly moved at this request; empty if nothing has."""
    if planned.plan.empty:  # the most frequent case, for which no parts of the history are made
        return ""
    if planned.relearned:
        return LEARNED
    if event:
        return event.cause.name.lower()
    return UNSEEN if unseen(planned.history.items, planned.plan) else ""


def _basis(said: Reported | None) -> Basis:
    return Basis.UNKNOWN if said is None or said.cached is None else Basis.BILLED
