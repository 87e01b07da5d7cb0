"""Requests that are only observed: upstream gets them as the client sent them, or without thinking
that it refused, and what the plan would have done is recorded.

The policy or the client wants that, or the conversation is held out, to be compared with others.
Nothing of such a request is stored, asked for or learned, and none is refused for want of a plan.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from msgspec.structs import replace

from proxy.dialects import Dialect
from proxy.dialects.usage import Reported
from proxy.errors import Overloaded
from proxy.plan.forecast import Billed, Forecast, forecast
from proxy.plan.history import OPENING_MESSAGES, beginning
from proxy.plan.plan import Message, Reading, Role
from proxy.plan.turn import Reason, Request, Unplannable
from proxy.policy import Mode, Offload
from proxy.requests.callers import Caller
from proxy.requests.planned import OUR_TOOLS_TOKENS, Planned
from proxy.requests.prepared import Prepared
from proxy.telemetry.outcome import Holdout

HEARD = 16 << 20
"""Most bytes of a reply that is kept to be compared: at least 40,000 tokens of a stream."""


async def chosen(
    caller: Caller, prepared: Prepared, request: Request, offload: Offload
) -> Prepared:
    """Return the request with whether it is only observed."""
    if offload.mode is Mode.OBSERVE or b"observe" in caller.client.our_header:
        return replace(prepared, observed=True)
    if not offload.holdout:
        return prepared
    if prepared.references.digests and offload.holdout < 1:
        return replace(prepared, holdout=Holdout.PLANNED)  # its history before that was planned
    holdout = await caller.run(partial(_holdout, caller.dialect, request, offload), request.size)
    return replace(prepared, holdout=holdout, observed=holdout is Holdout.KEPT)


def _holdout(dialect: Dialect, request: Request, offload: Offload) -> Holdout:
    """Return the group of the request's conversation, by its beginning. Where upstream keeps the
    history, no request shows its beginning."""
    share = offload.holdout
    if share == 1:
        return Holdout.KEPT
    if request.continues:
        return Holdout.NONE
    reading = Reading.of(offload)
    messages = list[Message]()
    try:
        for raw in request.entries[:OPENING_MESSAGES]:
            messages.append(dialect.read(raw, reading, _uncounted))
            if messages[-1].role is Role.USER:
                break
    except Unplannable:
        return Holdout.NONE
    drawn = int.from_bytes(hashlib.sha256(b"holdout" + beginning(messages)).digest()[:8])
    return Holdout.KEPT if drawn < share * 2**64 else Holdout.PLANNED


@contextmanager
def heard(prepared: Prepared, hearing: set[str]) -> Iterator[int]:
    """Yield how many bytes of the reply to keep: none, unless it is to be compared with the reply to
    the plan. No more are kept than are compared: one of each tenant, as `hearing` says."""
    planned = prepared.in_force
    name = prepared.tenant.name
    asked_again = planned is not None and planned.asked_again and not prepared.wish
    if not asked_again or name in hearing:
        yield 0
        return
    hearing.add(name)
    try:
        yield HEARD
    finally:
        hearing.remove(name)


def _uncounted(_: str) -> int:
    return 0


async def foresee(caller: Caller, prepared: Prepared) -> Prepared:
    """Return the request with its forecast, if it has a plan. Called again after upstream's reply,
    the forecast rests on what upstream reported."""
    planned = prepared.in_force
    reported = prepared.reported
    if planned is None or (prepared.foreseen is not None and reported is None):
        return prepared
    shortens = prepared.wish is not None
    work = partial(foreseen, planned, reported, shortens=shortens)
    size = planned.request.size
    begun = reported is not None
    try:
        found = await caller.services.threads.run(
            prepared.tenant.namespace, work, size, begun=begun
        )
    except Overloaded:
        return prepared.unrendered(unplanned=Reason.BUSY)
    return replace(prepared, foreseen=found)


def foreseen(
    planned: Planned, said: Reported | None = None, unseen: int = 0, *, shortens: bool = False
) -> Forecast:
    """Return what this plan would have sent and cost, by upstream's own numbers if it `said` them.
    `unseen` is the tokens before the history that the request had besides what is known of it.
    `shortens`: whether upstream may have read less than the history, as the client wishes."""
    billed = None if said is None or said.cached is None else Billed(said.prompt, said.cached)
    head = planned.before_history + unseen
    by = partial(
        forecast, planned.history.items, planned.plan, planned.policy, head, OUR_TOOLS_TOKENS
    )
    found = by(billed)
    return replace(found, after=max(found.after, by().after)) if shortens else found
