"""Hands a request on and its reply back, byte for byte, as they come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

from proxy.client import Client, ClientGone
from proxy.errors import ClientFault, ProxyError, UpstreamFault
from proxy.headers import Header, reply_headers, request_headers, url_for
from proxy.outcome import Outcome
from proxy.upstream import Reply, Request

if TYPE_CHECKING:
    from proxy.settings import Settings
    from proxy.tenants import Tenant
    from proxy.upstream import Upstream

Sink = Callable[[Outcome], None]
"""Who wants to know what became of a request."""


class Relay:
    """Every request that is none of ours, and a chat request that nothing is to be done about."""

    def __init__(self, settings: Settings, upstream: Upstream, sink: Sink) -> None:
        self._first_byte_timeout = settings.first_byte_timeout
        self._upstream = upstream
        self._sink = sink

    async def __call__(self, client: Client, tenant: Tenant) -> None:
        """Relay a request of any path."""
        await self.respond(client, tenant, client.outcome("relay", tenant.name, tenant.namespace))

    async def respond(
        self,
        client: Client,
        tenant: Tenant,
        outcome: Outcome,
        content: bytes | None = None,
        ours: Sequence[Header] = (),
    ) -> None:
        """Relay the request; whatever client or upstream do, a reply and an outcome is what comes of it.

        `outcome` is what is known so far; the sink gets it completed. `content` is the client's body, unchanged, where
        it was read already; `ours` are headers to add to the reply. The upstream is that of `tenant.policy`.
        """
        fault = ""
        try:
            body = await client.body() if content is None else content
            with client.present():
                await self._exchange(client, self.request(client, tenant, body), ours)
        except ClientGone:
            fault = "client_gone"
        except ProxyError as error:
            fault = await failed(client, error)
        except asyncio.CancelledError:
            fault = "proxy"
            raise
        finally:
            self._sink(client.completed(outcome, fault))

    def request(self, client: Client, tenant: Tenant, content: bytes | AsyncIterator[bytes]) -> Request:
        upstream = tenant.policy.upstream
        return Request(
            method=client.method,
            url=url_for(upstream.base_url, client.target),
            headers=request_headers(client.headers, tenant.credential(upstream)),
            content=content,
            connect_timeout=upstream.connect_timeout,
            first_byte_timeout=self._first_byte_timeout,
            idle_timeout=upstream.idle_timeout,
        )

    async def _exchange(self, client: Client, request: Request, ours: Sequence[Header]) -> None:
        client.sent = time.perf_counter()
        async with aclosing(await self._upstream.send(request)) as reply:
            await pass_on(reply, client, ours)


async def pass_on(reply: Reply, client: Client, ours: Sequence[Header]) -> None:
    await client.start(reply.status, reply_headers(reply.headers, ours))
    async with aclosing(reply.chunks()) as chunks:
        async for chunk in chunks:
            if reply.ended:
                await client.finish(chunk)
                return
            await client.write(chunk)
    await client.finish()


async def failed(client: Client, error: ProxyError) -> str:
    """Say so, if that is still possible: a reply under way is left unfinished, which cuts it off. Returns the fault."""
    if client.gone:
        return "client_gone"
    if not client.status:
        await client.fail(error)
    if isinstance(error, UpstreamFault):
        return error.fault
    return "client" if isinstance(error, ClientFault) else "proxy"
