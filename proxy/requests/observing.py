"""Requests that are only observed: upstream gets them as the client sent them, and what the plan
would have done is recorded.

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
from proxy.errors import Overloaded
from proxy.plan.history import OPENING_MESSAGES, beginning
from proxy.plan.plan import Message, Reading, Role
from proxy.plan.turn import Reason, Request, Unplannable
from proxy.policy import Offload
from proxy.requests.prepared import Prepared, foreseen
from proxy.telemetry.outcome import Holdout
from proxy.threads import WorkPool

HEARD = 16 << 20
"""Most bytes of a reply that is kept to be compared: at least 40,000 tokens of a stream."""


def holdout(dialect: Dialect, request: Request, offload: Offload) -> Holdout:
    """Return the group of the request's conversation, by its beginning, if the policy leaves a
    share of conversations as they come. Where upstream keeps the history, no request shows its
    beginning."""
    share = offload.holdout
    if share == 1:
        return Holdout.KEPT
    if not share or request.continues:
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
    if planned is None or not planned.asked_again or name in hearing:
        yield 0
        return
    hearing.add(name)
    try:
        yield HEARD
    finally:
        hearing.remove(name)


def _uncounted(_: str) -> int:
    return 0


async def foresee(prepared: Prepared, threads: WorkPool) -> Prepared:
    """Return the request with its forecast, if it has a plan. Called again after upstream's reply,
    the forecast rests on what upstream reported."""
    planned = prepared.planned
    reported = prepared.reported
    known = prepared.foreseen is not None and reported is None
    if planned is None or prepared.unplanned or known:
        return prepared
    work = partial(foreseen, planned, reported)
    size = planned.request.size
    begun = reported is not None
    try:
        found = await threads.run(prepared.tenant.namespace, work, size, begun=begun)
    except Overloaded:
        return prepared.unrendered(unplanned=Reason.BUSY)
    return replace(prepared, foreseen=found)
