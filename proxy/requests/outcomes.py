"""What became of a chat request: its outcome, and our headers, which say of it what is known before
the reply."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from proxy.errors import Fault
from proxy.plan import compacting
from proxy.plan.forecast import (
    LEARNED,
    UNSEEN,
    cost,
    cost_as_it_came,
    described,
    event_at,
    newly_moved,
    unseen,
    waiting,
)
from proxy.plan.turn import Addition, unknown_words
from proxy.policy import Mode
from proxy.requests.exchange import Exchange
from proxy.requests.planned import Planned
from proxy.requests.prepared import Prepared
from proxy.requests.summary_writer import Spent, SummaryJob
from proxy.telemetry.outcome import DECIMALS, Basis, Kind, Outcome
from proxy.upstream.headers import Header

RESTORED = "Nothing moves, because by its `tool_choice` the model cannot read it back; earlier searches stay in place."
UNTHOUGHT = "sent without the thinking that upstream refused"
UNFOLLOWED = "The model cannot read back what moved: `tool_choice` forbids it, and the request does not fit whole."


def _mode(prepared: Prepared) -> Mode:
    """Return the mode that the request was served in; off without a plan."""
    if prepared.foreseen:
        return Mode.OBSERVE
    planned = prepared.in_force
    return planned.policy.offload.mode if planned else Mode.OFF


def _words(prepared: Prepared) -> str:
    """Say what the plan did at this request, or what it waits for; without a plan, why there is
    none."""
    words = list[str]()
    planned = prepared.planned
    rendered = prepared.rendered
    request = prepared.request
    if prepared.in_force is not None:
        words += _of_plan(prepared, prepared.in_force)
    if prepared.reason:
        unknown = request.unknown if request else ()
        words.append(prepared.reason.words(prepared.obstacle, unknown, _sent(prepared)))
    if planned is not None and planned.summary_asked is not None:  # its operator should know
        limit = compacting.limit(
            planned.history.tokens, rendered.tokens if rendered else planned.plan.standing.total
        )
        words.append(f"Your client compacts itself; raise its limit to {limit:,} tokens.")
    return " ".join([*words, *_remarks(prepared)])


def _of_plan(prepared: Prepared, planned: Planned) -> Iterator[str]:
    plan = planned.plan
    offload = planned.policy.offload
    window = planned.room.window
    if planned.restores:
        yield RESTORED
        return
    if plan.empty and not prepared.pointed:
        unknown = f"; {unknown_words(planned.unknown)}" if planned.unknown else ""
        yield waiting(plan, offload) + unknown
        return
    if planned.relearned and window is not None:
        yield f"Planned again for a context window of {window:,}, which was learned."
    if prepared.rendered:
        late = len(prepared.rendered.plan.events) < len(plan.events)
    else:
        late = not (prepared.foreseen or plan.empty)
    said = described(
        planned.history.items, plan, offload, window, late=late, answers=prepared.pointed
    )
    done = prepared.observed and not said.startswith("waiting")
    yield f"Only observed; the plan: {said}" if done else said


def _sent(prepared: Prepared) -> str:
    """Say how a request is sent without its plan."""
    if Addition.THINKING in prepared.without:
        return UNTHOUGHT
    if prepared.references.digests:
        return "sent with the history that its reference stands for"
    return "sent as it came"


def _remarks(prepared: Prepared) -> Sequence[str]:
    """Return what the client should know, also where the request is sent as planned."""
    unfollowed = UNFOLLOWED if prepared.unfollowed else ""
    observed = prepared.observed and prepared.in_force is not None
    forgiven = observed and Addition.THINKING in prepared.without
    unthought = f"{UNTHOUGHT.capitalize()}." if forgiven else ""
    return [text for text in (unfollowed, unthought, prepared.remark) if text]


def headers(prepared: Prepared) -> Sequence[Header]:
    """Return our headers for the client's reply."""
    planned = prepared.in_force
    moved = prepared.compacted or prepared.compressed
    why = " ".join(_remarks(prepared)) if moved else _words(prepared)
    shown = dict[bytes, int]()
    if planned is not None:
        shown = {
            b"x-offload-tokens-before": planned.tokens_before,
            b"x-offload-tokens-after": prepared.tokens_after,
            b"x-offload-compacted": prepared.compacted,
            b"x-offload-compressed": prepared.compressed,
        } | ({} if prepared.limit is None else {b"x-offload-max-tokens": prepared.limit})
    return [
        (b"x-offload-mode", _mode(prepared).value.encode()),
        *((name, b"%d" % number) for name, number in shown.items()),
        *([(b"x-offload-reason", why.encode())] if why else []),
    ]


def of_chat(
    prepared: Prepared,
    client: Exchange,
    store_errors: Mapping[str, int],
    refused: Iterable[Addition] = (),
) -> Outcome:
    """Return the outcome of a request as far as it got. `refused` is what upstream did not take."""
    request = prepared.request
    planned = prepared.in_force
    rendered = prepared.rendered
    spent = prepared.spent
    before, after, basis = _costs(prepared)
    kind = Kind.OFFLOADED if rendered else Kind.UNTOUCHED
    if prepared.foreseen:
        kind = Kind.OBSERVED
    outcome = replace(
        client.outcome(kind, prepared.tenant.name, prepared.tenant.namespace),
        model=request.model if request else "",
        stream=request.stream if request else False,
        mode=_mode(prepared).value,
        reason=prepared.reason,
        obstacle=prepared.obstacle,
        compacted=prepared.compacted,
        unfollowed=prepared.unfollowed,
        compressed=prepared.compressed,
        words=_words(prepared),
        reinserted=len(rendered.rounds) if rendered else 0,
        cost_before=before,
        cost_after=after,
        usage=basis,
        rounds=prepared.rounds,
        tool_uses=tuple(prepared.uses),
        prompt_tokens=spent.prompt,
        completion_tokens=spent.completion,
        cached_tokens=spent.cached,
        written_tokens=spent.written,
        store_errors=store_errors,
        refused=tuple(sorted(refused)),
    )
    if planned is None:
        return outcome
    cause = _cause(planned)
    return replace(
        outcome,
        messages=len(planned.history),
        left_alone=planned.history.irregular,
        tokens_before=planned.tokens_before,
        tokens_after=prepared.tokens_after,
        holdout=prepared.holdout,
        events=len(planned.plan.events),
        moved=newly_moved(planned.history.items, planned.plan) if cause else 0,
        new_event=bool(cause),
        cause=cause,
    )


def _cause(planned: Planned) -> str:
    """Say in a word why something newly moved at this request; empty if nothing has."""
    if planned.plan.empty:  # the most frequent case, for which no parts of the history are made
        return ""
    if planned.relearned:
        return LEARNED
    if event := event_at(planned.plan):
        return event.cause.name.lower()
    return UNSEEN if unseen(planned.history.items, planned.plan) else ""


def _costs(prepared: Prepared) -> tuple[int, int, Basis]:
    """Return the cost of a request's input as it came and as it was sent, or would have been, and
    what both rest on.

    It is unknown if upstream did not say it of each round, as where the last one broke off: a part
    would look cheap. The client's own bytes have costs only where they were looked at: observed, or
    to be compared with a holdout.
    """
    planned = prepared.in_force
    said = prepared.reported
    turn = prepared.turn
    rendered = prepared.rendered
    if turn is not None and rendered is not None:
        spent = turn.spent
        planned = rendered.planned
        if spent.counted_rounds <= turn.rounds:
            return 0, 0, Basis.UNKNOWN
        offload = planned.policy.offload
        head = planned.before_history
        sent = prepared.tokens_after + sum(use.tokens for use in prepared.uses)
        warm = spent.cached > 0 or event_at(planned.plan) is not None
        came = cost_as_it_came(
            planned.history.items, offload, head, spent.largest / sent, cached=warm
        )
        return (
            came,
            cost(offload, spent.prompt, spent.cached, spent.hidden, spent.largest),
            Basis.BILLED,
        )
    basis = Basis.UNKNOWN if said is None or said.cached is None else Basis.BILLED
    if prepared.foreseen is not None:
        return prepared.foreseen.before, prepared.foreseen.after, basis
    if said is None or planned is None:
        return 0, 0, Basis.NONE
    came = cost(planned.policy.offload, said.prompt, said.cached or 0)
    return came, came, basis


def of_summary(job: SummaryJob, spent: Spent, fault: str, seconds: float) -> Outcome:
    """Return the outcome of making a snapshot, which is reported separately because its request may
    have ended."""
    return Outcome(
        request_id=job.name,
        tenant=job.tenant.name,
        namespace=job.tenant.namespace,
        kind=Kind.SUMMARY,
        method="POST",
        path="",
        dialect=job.dialect,
        model=job.model,
        status=502 if fault else 200,
        fault=Fault.SUMMARY if fault else Fault.NONE,
        cost_after=cost(
            job.offload, spent.prompt_tokens, spent.cached_tokens, spent.completion_tokens
        ),
        usage=Basis.BILLED if spent.prompt_tokens else Basis.UNKNOWN,
        summary_prompt_tokens=spent.prompt_tokens,
        summary_completion_tokens=spent.completion_tokens,
        cached_tokens=spent.cached_tokens,
        seconds=round(seconds, DECIMALS),
    )
