"""What clients send in the place of what our records or upstream have: references to compacted
histories, ids of kept replies, and tokens of declined requests.

A client asks for a reply that upstream keeps: it knows one id, and upstream has a reply for each
round.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from functools import partial
from urllib.parse import parse_qs, quote

from msgspec.structs import replace

from proxy.dialects import model_in
from proxy.dialects.responses import RESPONSES
from proxy.errors import ClientFault
from proxy.plan.compacting import MARK, MOST, Wish
from proxy.plan.turn import Continuation, Request
from proxy.policies.tenants import Tenant
from proxy.requests import relay
from proxy.requests.callers import Caller
from proxy.requests.exchange import Exchange
from proxy.requests.prepared import Prepared
from proxy.requests.records import Records, References
from proxy.requests.relay import GATHERED, pass_on
from proxy.requests.rounds import Services
from proxy.telemetry.outcome import Kind
from proxy.upstream.client import UpstreamReply
from proxy.upstream.headers import DIGESTS, reply_headers

NATIVE = {"responses": ("api.openai.com", "chatgpt.com"), "messages": ("api.anthropic.com",)}
"""The hosts that compact by themselves: developers.openai.com/api/docs/guides/compaction and
platform.claude.com/docs/en/build-with-claude/compaction, 2026-11."""


async def resolved(caller: Caller, prepared: Prepared, request: Request) -> Prepared:
    """Return the request with what stands behind its references, without its wish for compaction,
    and with the model of the declined one that it repeats. Raises Unplannable."""
    dialect = caller.dialect
    path = caller.client.path
    run = partial(caller.run, size=request.size)
    parse = partial(caller.services.reader.request, dialect, caller=caller.key.namespace)
    asked = request
    names = list[str]()
    wish = None
    brought = References()
    native = dialect.name in NATIVE
    known = request.known
    refers = (known.refers if known else False) or MARK in (request.fresh or request.body)
    if native and refers:
        names = await run(lambda: list(dict.fromkeys(dialect.references(asked)))[:MOST])
    if names:
        texts, brought = await caller.records.compactions(names)
        request = await run(lambda: parse(dialect.restored(asked, texts)))
    kind = dialect.compaction_asked(path, request) if native else None
    if kind is not None:
        wish = Wish(kind, request, asked)
        request = await run(lambda: dialect.parse(dialect.uncompacted(wish.request)))
    declined = await caller.records.declined(request.credit) if request.credit else None
    model = declined.model if declined else request.model or model_in(path)
    request = replace(request, model=model)
    return replace(
        prepared,
        request=request,
        continued=request.body if wish or brought.digests else None,
        declined=declined,
        wish=wish,
        references=brought,
    )


async def continued(caller: Caller, prepared: Prepared) -> Prepared:
    """Return the request that goes on from a reply upstream, from its last round if it had hidden
    ones: upstream takes no other, also if nothing is to change."""
    request = prepared.request
    if request is None or not request.continues:
        return prepared
    last = await caller.records.continuation(request.continues)
    if last is None:
        return prepared
    return replace(prepared, continued=caller.dialect.continued(request, last))


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
        known = await records.kept_reply(RESPONSES.kept_id(client.method, client.path))
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
