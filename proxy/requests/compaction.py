"""Compaction that a client asks upstream for: who serves it, and what its references stand for.

asked for ──upstream can, and all fits──> as it came
    └──> of all: the plan is cut at its end, and the client gets a reference to the snapshot
    └──> as upstream sees fit: the wish is left out, because the plan keeps the history short
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from proxy.dialects import Dialect
from proxy.plan.compacting import MARK, MOST, Wish
from proxy.plan.plan import Role
from proxy.plan.turn import Reason, Request
from proxy.policy import Compaction
from proxy.upstream.headers import Header

if TYPE_CHECKING:
    from proxy.requests.cache import MessageCache
    from proxy.requests.planned import Planned
    from proxy.requests.prepared import Prepared
    from proxy.requests.records import Records, Run

NATIVE = {"responses": ("api.openai.com", "chatgpt.com"), "messages": ("api.anthropic.com",)}
"""The hosts that compact by themselves: developers.openai.com/api/docs/guides/compaction and
platform.claude.com/docs/en/build-with-claude/compaction, 2026-11."""


async def read(
    dialect: Dialect, path: bytes, request: Request, records: Records, run: Run
) -> tuple[Request, Wish | None, bool]:
    """Return the request without references and without a wish for compaction, the wish, and whether there were
    references. Raises Unplannable."""
    asked, names = request, list[str]()
    if dialect.name in NATIVE and MARK in request.body:
        names = await run(lambda: list(dict.fromkeys(dialect.references(asked)))[:MOST])
    if names:
        texts = {name: await records.compaction(name) for name in names}
        request = await run(lambda: dialect.parse(dialect.restored(asked, texts)))
    kind = dialect.compaction_asked(path, request)
    if kind is None:
        return request, None, bool(names)
    wish = Wish(kind, request, bool(names))
    return await run(lambda: dialect.parse(dialect.uncompacted(wish.request))), wish, bool(names)


def served(prepared: Prepared, dialect: Dialect) -> bool:
    """Whether the proxy serves what the client asks for."""
    planned, policy = prepared.planned, prepared.tenant.policy
    if planned is None or prepared.unplanned or prepared.only_observed or policy.compaction is Compaction.PASSTHROUGH:
        return False
    if all(message.role is Role.SYSTEM for message in planned.history.measured):
        return False  # upstream says better that there is nothing to compact
    host = urlsplit(policy.upstream.base_url).hostname
    native = host in NATIVE.get(dialect.name, ()) and planned.room.holds(planned.tokens)
    return policy.compaction is Compaction.SERVE or not native


def as_wished(prepared: Prepared, wish: Wish) -> Prepared:
    """Return the request as the client sent it, for upstream to compact."""
    body = wish.request.body if wish.restored else None
    obstacle = wish.request.obstacle or "compact"
    unplanned = prepared.unplanned or Reason.FIELD
    return prepared.again(planned=None, wish=None, continued=body, unplanned=unplanned, obstacle=obstacle)


def reply(planned: Planned, path: bytes, text: str, reader: MessageCache) -> tuple[list[Header], bytes]:
    """Return the head and the body of the reply with the reference to the snapshot `text`."""
    request = planned.request
    tokens = planned.tokens, reader.count(text, request.model)
    body = planned.dialect.compacted(path, request, text, tokens, int(time.time()))
    kind = b"text/event-stream" if request.stream else b"application/json"
    return [(b"content-type", kind), (b"content-length", b"%d" % len(body))], body
