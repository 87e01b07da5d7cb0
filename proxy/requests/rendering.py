"""Renders a plan with the records that exist: hidden rounds and summaries. What is missing is made.

plan ──records──> rendered ──a summary is missing, and the request waits for it──> rendered with it
                     └──hidden rounds do not fit──> rendered without the oldest
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial

from msgspec.structs import replace

from proxy.dialects import for_model
from proxy.dialects.render import ActiveSnapshot, put_back
from proxy.plan.recognise import Hidden
from proxy.plan.summary import SummaryAnswer
from proxy.plan.turn import Addition
from proxy.policy import SnapshotRole
from proxy.requests.callers import Caller
from proxy.requests.planned import Planned, Rendered
from proxy.requests.prepared import Prepared
from proxy.requests.summary_writer import ask


async def render(caller: Caller, prepared: Prepared, *, too_long: bool) -> Prepared:
    """Return the request rendered to its plan; as it came if there is no plan, or it is
    only observed or changes nothing. `too_long`: whether upstream has refused it as that."""
    planned = prepared.planned
    without = prepared.without
    if planned is None or prepared.reason or prepared.observed:
        return prepared
    if not planned.may_change:
        return await _shortened(caller, prepared, planned, too_long)
    if Addition.PLACE in without:
        planned = replace(planned, role=SnapshotRole.USER)
    if Addition.LOOSE in without:
        planned = replace(planned, strict=planned.among_strict)
    rendered = await _rendered(caller, prepared, planned)
    if not rendered.changed:
        return await _shortened(caller, prepared, planned, too_long)
    make = partial(rendered.turn, Addition.USAGE not in without)
    turn = await caller.run(make, planned.request.size)
    if prepared.declined is not None:
        turn.resume(prepared.declined.before)
    return replace(prepared, planned=planned, rendered=rendered, turn=turn, uses=[])


async def _shortened(
    caller: Caller, prepared: Prepared, planned: Planned, too_long: bool
) -> Prepared:
    """Return the request with a lower limit for the reply, if upstream would refuse the
    client's."""
    tokens = planned.history.tokens
    left = planned.reply_left(tokens)
    fits = planned.reply_limit(tokens) is None or not planned.exceeds(refused=too_long)
    if left is None or fits or prepared.continued is not None:
        return prepared
    shorten = partial(caller.dialect.with_lower_limit, planned.request, left)
    return replace(prepared, shortened=await caller.run(shorten, planned.request.size))


async def _rendered(caller: Caller, prepared: Prepared, planned: Planned) -> Rendered:
    reader = caller.services.reader
    summaries = caller.services.summaries
    size = planned.request.size
    shown, rounds = await asyncio.gather(
        summaries.existing(planned, caller.records), hidden(caller, planned)
    )
    rendered = await caller.run(partial(Rendered.of, planned, shown, rounds, reader), size)
    waits = summaries.waits(rendered)
    if not caller.dialect.counts and (caller.vouched or waits):
        rendered = await _summarised(caller, prepared, rendered, waits=waits)
    if rounds and not planned.room.holds(rendered.tokens):
        rendered = await caller.run(partial(rendered.fitting, reader), size)
    return rendered


async def compacted(
    caller: Caller, prepared: Prepared, planned: Planned
) -> tuple[Rendered, ActiveSnapshot] | None:
    """Return the request cut at its end, and the snapshot of its whole history; None if there is
    none."""
    cut = planned.cut()
    known = cut if caller.vouched else planned
    shown = await caller.services.summaries.existing(known, caller.records)
    rounds = await hidden(caller, planned)
    make = partial(Rendered.of, cut, shown, rounds, caller.services.reader)
    rendered = await caller.run(make, planned.request.size)
    rendered = await _summarised(caller, prepared, rendered, waits=True)
    shown = rendered.shown
    complete = shown is not None and shown.boundary == cut.plan.boundaries[-1]
    return (rendered, shown) if shown and complete else None


async def hidden(caller: Caller, planned: Planned) -> Mapping[int, Hidden]:
    """Return the hidden rounds of this history that have records."""
    size = planned.request.size
    model = planned.request.model
    records = caller.records
    history = planned.history.stem or planned.history
    before = records.still_there(history.sought)
    replies = await caller.run(partial(planned.replies, before.upto), size)
    found, sought = await records.rounds(replies, model, before)
    made = await caller.run(
        partial(put_back, planned.dialect, model, planned.transcript, found), size
    )
    rounds = {**before.rounds, **made}
    if not records.unread:
        history.sought = sought.ending(min(sought.upto, len(history)), rounds)
    return rounds


async def summarise_later(caller: Caller, prepared: Prepared) -> None:
    """Begin to make the snapshot that the request's plan needs, for later ones."""
    rendered = prepared.rendered
    if rendered is not None and rendered.planned.plan.boundaries:
        await _summarised(caller, prepared, rendered, waits=False)


async def _summarised(
    caller: Caller, prepared: Prepared, rendered: Rendered, *, waits: bool
) -> Rendered:
    """Return the request with the snapshot that its plan needs, if it waits for it."""
    services = caller.services
    tenant = prepared.tenant
    without = prepared.without

    async def summarise(body: bytes) -> SummaryAnswer:
        target = caller.dialect.target(caller.client.target)
        if other := tenant.policy.offload.compress.model:
            target = for_model(target, other)
        call = services.relay.changed(
            caller.client, tenant, body, caller.dialect, without, first=False, target=target
        )
        return await ask(services.upstream, call, caller.dialect)

    return await services.summaries.complete(
        rendered, caller.records, tenant, summarise, waits=waits
    )
