"""Shows and deletes replies that upstream keeps: the client knows one id, and upstream has a reply for each round."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, quote

from proxy.dialects.responses import RESPONSES
from proxy.errors import ClientFault
from proxy.plan.turn import Continuation
from proxy.requests import relay
from proxy.requests.exchange import Exchange
from proxy.requests.records import Records
from proxy.requests.relay import GATHERED, pass_on, served
from proxy.telemetry.outcome import Kind
from proxy.upstream.client import UpstreamReply, UpstreamRequest
from proxy.upstream.headers import reply_headers

if TYPE_CHECKING:
    from proxy.policies.tenants import Tenant
    from proxy.requests.rounds import Services

Send = Callable[[str], Awaitable[UpstreamReply]]
"""Sends the client's request with another id in its path."""


class KeptReplies:
    """Serves these two requests. Where a reply had one round, the relay does."""

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
        await served(client, self._services.sink, work, lambda: outcome)

    async def _serve(self, client: Exchange, tenant: Tenant, records: Records, known: Continuation) -> None:
        content = await client.body(GATHERED)
        start, _, query = client.target.partition(b"?")

        def request(id: str) -> UpstreamRequest:
            path = start[: start.rindex(b"/") + 1] + quote(id, safe="").encode()
            return self._services.relay.request(client, tenant, content, path + (b"?" + query if query else b""))

        async def send(id: str) -> UpstreamReply:
            return await self._services.upstream.send(request(id))

        with client.present():
            client.sent = time.perf_counter()
            if client.method == "DELETE":
                await _delete(client, records, known, send)
            elif parse_qs(query).get(b"stream", [b""])[-1] == b"true":
                raise ClientFault("This reply took several rounds and can only be shown whole: ask without `stream`")
            else:
                await _show(client, known, send)


async def _show(client: Exchange, known: Continuation, send: Send) -> None:
    """Show the reply as the client saw it, if upstream still shows it to this caller."""
    async with aclosing(await send(known.shown)) as reply:
        if reply.status != 200:
            await pass_on(reply, client)
            return
        await relay.body(reply)
        headers = reply.headers.without((b"content-length", b"content-encoding"))
        length = (b"content-length", b"%d" % len(known.reply))
        await client.start(200, reply_headers(headers, [length]))
        await client.finish(known.reply)


async def _delete(client: Exchange, records: Records, known: Continuation, send: Send) -> None:
    """Delete all rounds, the one that the client knows last: if another one fails, the client can try again."""
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
