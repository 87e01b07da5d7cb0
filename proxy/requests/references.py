"""What clients send in the place of what our records have: references to compacted histories, and
ids of kept replies.

A client asks upstream to compact its history. Who serves it?

    asked for ──upstream can, and all fits──> as it came
        └──> of all: the plan is cut at its end, and the client gets a reference to the snapshot
        └──> as upstream sees fit: the wish is left out, because the plan keeps the history short

A client asks for a reply that upstream keeps: it knows one id, and upstream has a reply for each
round.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from urllib.parse import parse_qs, quote, urlsplit

from msgspec.structs import replace

from proxy.dialects import Dialect
from proxy.dialects.responses import RESPONSES
from proxy.errors import ClientFault
from proxy.plan.compacting import MARK, MOST, Wish
from proxy.plan.plan import Role
from proxy.plan.turn import Continuation, Reason, Request
from proxy.policies.tenants import Tenant
from proxy.policy import Compaction
from proxy.requests import relay
from proxy.requests.cache import MessageCache
from proxy.requests.exchange import Exchange
from proxy.requests.planned import Planned
from proxy.requests.prepared import Prepared
from proxy.requests.records import Records, References, Run
from proxy.requests.relay import GATHERED, pass_on
from proxy.requests.rounds import Services
from proxy.telemetry.outcome import Kind
from proxy.upstream.client import UpstreamReply
from proxy.upstream.headers import DIGESTS, Header, reply_headers

NATIVE = {"responses": ("api.openai.com", "chatgpt.com"), "messages": ("api.anthropic.com",)}
"""The hosts that compact by themselves: developers.openai.com/api/docs/guides/compaction and
platform.claude.com/docs/en/build-with-claude/compaction, 2026-11."""


async def read(
    dialect: Dialect,
    path: bytes,
    request: Request,
    records: Records,
    run: Run,
    parse: Callable[[bytes], Request],
) -> tuple[Request, Wish | None, References]:
    """Return the request without references and without a wish for compaction, the wish, and the
    references. Raises Unplannable."""
    asked = request
    names = list[str]()
    known = request.known
    refers = (known.refers if known else False) or MARK in (request.fresh or request.body)
    if dialect.name in NATIVE and refers:
        names = await run(lambda: list(dict.fromkeys(dialect.references(asked)))[:MOST])
    brought = References()
    if names:
        texts, brought = await records.compactions(names)
        request = await run(lambda: parse(dialect.restored(asked, texts)))
    kind = dialect.compaction_asked(path, request)
    if kind is None:
        return request, None, brought
    wish = Wish(kind, request, asked)
    return await run(lambda: dialect.parse(dialect.uncompacted(wish.request))), wish, brought


def compacts(prepared: Prepared, dialect: Dialect) -> bool:
    """Whether the proxy serves the compaction that the client asks for."""
    planned = prepared.planned
    policy = prepared.tenant.policy
    if (
        planned is None
        or prepared.unplanned
        or prepared.observed
        or policy.compaction is Compaction.PASSTHROUGH
    ):
        return False
    if all(message.role is Role.SYSTEM for message in planned.history.messages):
        return False  # upstream says better that there is nothing to compact
    host = urlsplit(policy.upstream.base_url).hostname
    native = host in NATIVE.get(dialect.name, ()) and planned.room.holds(planned.history.tokens)
    return policy.compaction is Compaction.SERVE or not native


def as_wished(prepared: Prepared, wish: Wish, obstacle: str = "") -> Prepared:
    """Return the request as the client sent it, for upstream to compact. `obstacle` is why the
    proxy does not."""
    body = None if wish.request is wish.came else wish.request.body
    obstacle = obstacle or wish.request.obstacle or "compact"
    unplanned = prepared.unplanned or Reason.FIELD
    return prepared.unrendered(
        planned=None, wish=None, continued=body, unplanned=unplanned, obstacle=obstacle
    )


def reply_to_wish(
    planned: Planned, came: Request, path: bytes, text: str, digest: str, reader: MessageCache
) -> tuple[list[Header], bytes]:
    """Return the head and the body of the reply with the reference to the snapshot `text`, which
    has this digest."""
    request = replace(came, model=planned.request.model)
    tokens = planned.history.tokens, reader.count(text, request.model)
    body = planned.dialect.compaction_reply(path, request, text, digest, tokens, int(time.time()))
    kind = b"text/event-stream" if request.stream else b"application/json"
    return [(b"content-type", kind), (b"content-length", b"%d" % len(body))], body


# -- kept replies --

Send = Callable[[str], Awaitable[UpstreamReply]]
"""Sends the client's request with another id in its path."""


class KeptReplies:
    """Shows and deletes replies that upstream keeps. Where a reply had one round, the relay
    does."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, client: Exchange, tenant: Tenant) -> None:
        records = Records(self._services.store.visit(), tenant.namespace)
        known = await records.continuation(RESPONSES.kept(client.method, client.path))
        if known is None or (client.method == "GET" and not known.reply):
            await self._services.relay(client, tenant)
            return
        outcome = client.outcome(Kind.RELAY, tenant.name, tenant.namespace)
        work = self._serve(client, tenant, records, known)
        await relay.served(client, self._services.sink, work, lambda: outcome)

    async def _serve(
        self, client: Exchange, tenant: Tenant, records: Records, known: Continuation
    ) -> None:
        services = self._services
        content = await client.body(GATHERED)
        start, _, query = client.target.partition(b"?")

        async def send(id: str) -> UpstreamReply:
            path = start[: start.rindex(b"/") + 1] + quote(id, safe="").encode()
            target = path + (b"?" + query if query else b"")
            return await services.upstream.send(
                services.relay.request(client, tenant, content, target)
            )

        with client.present():
            client.sent = time.perf_counter()
            if client.method == "DELETE":
                await _delete(client, records, known, send)
            elif parse_qs(query).get(b"stream", [b""])[-1] == b"true":
                raise ClientFault(
                    "This reply took several rounds and can only be shown whole: ask without `stream`"
                )
            else:
                await _show(client, known, send)


async def _show(client: Exchange, known: Continuation, send: Send) -> None:
    """Show the reply as the client saw it, if upstream still shows it to this caller."""
    async with aclosing(await send(known.shown)) as reply:
        if reply.status != 200:
            await pass_on(reply, client)
            return
        await relay.body(reply)
        headers = reply.headers.without((b"content-length", b"content-encoding", *DIGESTS))
        length = (b"content-length", b"%d" % len(known.reply))
        await client.start(200, reply_headers(headers, [length]))
        await client.finish(known.reply)


async def _delete(client: Exchange, records: Records, known: Continuation, send: Send) -> None:
    """Delete all rounds, the one that the client knows last: if another one fails, the client can
    try again."""
    for id in known.rounds:
        if id == known.shown:
            continue
        async with aclosing(await send(id)) as reply:
            if reply.status >= 300 and reply.status != 404:
                await pass_on(reply, client)
                return
            await relay.body(reply)
    async with aclosing(await send(known.shown)) as reply:
        if reply.status < 300 or reply.status == 404:
            await records.forget_continuation(known.shown)
        await pass_on(reply, client)
