"""Compaction that a client asks for. Who serves it?

asked for ──upstream can, and all fits──> as it came
    └──> of all: the plan is cut at its end, and the client gets a reference to the snapshot
    └──> as upstream sees fit: the wish is left out, because the plan keeps the history short
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple
from urllib.parse import urlsplit

from msgspec.structs import replace

from proxy.dialects import Dialect
from proxy.dialects.render import shown_block
from proxy.plan.compacting import Compacting, Wish
from proxy.plan.plan import Role
from proxy.plan.turn import Reason, Request
from proxy.policy import Compaction
from proxy.requests import archive, rendering
from proxy.requests.callers import Caller
from proxy.requests.planned import Planned, Rendered
from proxy.requests.prepared import Prepared
from proxy.requests.records import References
from proxy.requests.references import NATIVE
from proxy.upstream.headers import Header

WRITING = 30.0
"""Seconds that a reply to a request for compaction waits for the store. Without the records behind it,
the proxy does not send it."""


class Compacted(NamedTuple):
    """The reply with the reference to a compacted history."""

    headers: Sequence[Header]
    body: bytes


async def serve(
    caller: Caller,
    prepared: Prepared,
    wish: Wish,
    accepted: Callable[[Prepared], Awaitable[Prepared]],
) -> tuple[Prepared, Compacted | None]:
    """Return the reply, which refers to a snapshot of all of the history; else None, and the
    request to be sent: with the wish for upstream if that is to compact, or if the request is only
    observed, else without it.

    `accepted` is awaited when upstream has accepted the call for the snapshot. It returns what is
    known of the request then. The client drops its history, so all that stands behind the reference
    is in the store before the reply.
    """
    planned = prepared.planned
    served = planned is not None and _serves(caller.dialect, prepared, planned)
    whole = wish.kind is Compacting.WHOLE
    if planned is None or not served or (whole and prepared.observed):
        return as_wished(prepared, wish), None
    if prepared.observed:
        return replace(prepared, continued=_body(wish)), None
    if not whole:
        return prepared, None
    if not planned.policy.store_originals:
        return as_wished(prepared, wish, "store_originals"), None
    found = await rendering.compacted(caller, prepared, planned)
    if found is None:
        return as_wished(prepared, wish, "unwritten"), None
    rendered, shown = found
    prepared = await accepted(replace(prepared, planned=rendered.planned, rendered=rendered))
    await caller.services.summaries.existing(rendered.planned, caller.records)  # it is used
    text = shown_block(rendered.planned.transcript, shown)
    digest = await _stored(caller, rendered, text, prepared.references)
    if not digest:
        return as_wished(prepared, wish, "unstored"), None
    make = partial(_reply, caller, planned, wish.request_as_sent, text, digest)
    return prepared, await caller.run(make, planned.request.size)


def _serves(dialect: Dialect, prepared: Prepared, planned: Planned) -> bool:
    """Whether the proxy serves the compaction that the client asks for."""
    policy = prepared.tenant.policy
    if prepared.unplanned or policy.compaction is Compaction.PASSTHROUGH:
        return False
    if all(message.role is Role.SYSTEM for message in planned.history.messages):
        return False  # upstream says better that there is nothing to compact
    host = urlsplit(policy.upstream.base_url).hostname
    native = host in NATIVE.get(dialect.name, ()) and planned.room.holds(planned.history.tokens)
    return policy.compaction is Compaction.SERVE or not native


def as_wished(prepared: Prepared, wish: Wish, obstacle: str = "") -> Prepared:
    """Return the request as the client sent it, for upstream to compact. `obstacle` is why the
    proxy does not."""
    prepared = prepared.unrendered(planned=None, wish=None, continued=_body(wish))
    if prepared.unplanned:
        return prepared
    obstacle = obstacle or wish.request.obstacle or "compact"
    return replace(prepared, unplanned=Reason.FIELD, obstacle=obstacle)


def _body(wish: Wish) -> bytes | None:
    """Return the body with the wish, if it is not as the client sent it."""
    return None if wish.request is wish.request_as_sent else wish.request.body


async def _stored(caller: Caller, rendered: Rendered, text: str, brought: References) -> str:
    """Store the moved texts, and then the snapshot's `text` with the names of all that stands
    behind it: of the references that it replaces, too. Returns the digest once the store has it
    all, else an empty string."""
    run = partial(caller.run, size=rendered.planned.request.size)
    store = caller.services.store
    with suppress(TimeoutError):
        async with asyncio.timeout(WRITING):
            if await archive.keep(rendered, store, caller.owner, run, sure=True):
                files = await run(lambda: rendered.files().described())
                return await caller.records.keep_compaction(text, {**brought.files, **files})
    return ""


def _reply(caller: Caller, planned: Planned, came: Request, text: str, digest: str) -> Compacted:
    request = replace(came, model=planned.request.model)
    tokens = planned.history.tokens, caller.services.reader.count(text, request.model)
    body = planned.dialect.compaction_reply(
        caller.client.path, request, text, digest, tokens, int(time.time())
    )
    kind = b"text/event-stream" if request.stream else b"application/json"
    head = [(b"content-type", kind), (b"content-length", b"%d" % len(body))]
    return Compacted(head, body)
