"""Hands a request on and its reply back, byte for byte, as they come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

from proxy.errors import ClientFault, ProxyError, UpstreamFault
from proxy.requests.exchange import ClientGone, Exchange
from proxy.telemetry.outcome import Outcome
from proxy.upstream.client import UpstreamReply, UpstreamRequest
from proxy.upstream.headers import Header, reply_headers, request_headers, url_for

if TYPE_CHECKING:
    from proxy.policies.tenants import Tenant
    from proxy.settings import Settings
    from proxy.upstream.client import UpstreamClient

GATHERED = 1 << 20
"""Bytes of a body that is collected before upstream is asked, so that who sends slowly takes no place there. Requests
with a larger body, which are uploads, are passed on as they come."""

Sink = Callable[[Outcome], None]
"""Who wants to know what became of a request."""


class Relay:
    """Every request that is none of ours, and a chat request that nothing is to be done about."""

    def __init__(self, settings: Settings, upstream: UpstreamClient, sink: Sink) -> None:
        self._first_byte_timeout = settings.first_byte_timeout
        self._upstream = upstream
        self._sink = sink

    async def __call__(self, client: Exchange, tenant: Tenant) -> None:
        """Relay a request of any path. The upstream is that of `tenant.policy`."""
        outcome = client.outcome("relay", tenant.name, tenant.namespace)
        await served(client, self._sink, self._exchange(client, tenant), lambda: outcome)

    def request(self, client: Exchange, tenant: Tenant, content: bytes | AsyncIterator[bytes]) -> UpstreamRequest:
        upstream = tenant.policy.upstream
        return UpstreamRequest(
            method=client.method,
            url=url_for(upstream.base_url, client.target),
            headers=request_headers(client.headers, tenant.credential(upstream)),
            content=content,
            connect_timeout=upstream.connect_timeout,
            first_byte_timeout=self._first_byte_timeout,
            idle_timeout=upstream.idle_timeout,
        )

    async def _exchange(self, client: Exchange, tenant: Tenant) -> None:
        request = self.request(client, tenant, await client.body(GATHERED))
        with client.present():
            client.sent = time.perf_counter()
            async with aclosing(await self._send(request, client)) as reply:
                await pass_on(reply, client)

    async def _send(self, request: UpstreamRequest, client: Exchange) -> UpstreamReply:
        """Raises ProxyError; where the client's body broke off, upstream has no part in it."""
        try:
            return await self._upstream.send(request)
        except UpstreamFault as error:
            raise client.broken or error from error


async def served(client: Exchange, sink: Sink, work: Awaitable[None], outcome: Callable[[], Outcome]) -> None:
    """Have `work` reply; whatever it and the client do, a reply and one outcome is what comes of it.

    `outcome` is what is known of the request in the end; the sink gets it completed.
    """
    fault = detail = ""
    try:
        await work
    except ClientGone:
        fault = "client_gone"
    except ProxyError as error:
        fault = await _failed(client, error)
        detail = error.detail if isinstance(error, UpstreamFault) else ""
    except asyncio.CancelledError:
        fault = "proxy"
        raise
    finally:
        sink(client.completed(outcome(), fault, detail))


async def pass_on(reply: UpstreamReply, client: Exchange, ours: Sequence[Header] = ()) -> None:
    await client.start(reply.status, reply_headers(reply.headers, ours))
    async with aclosing(reply.chunks()) as chunks:
        async for chunk in chunks:
            if reply.ended:
                await client.finish(chunk)
                return
            await client.write(chunk)
    await client.finish()


async def _failed(client: Exchange, error: ProxyError) -> str:
    """Say so, if that is still possible: a reply under way is left unfinished, which cuts it off. Returns the fault."""
    if client.gone:
        return "client_gone"
    if not client.status:
        await client.fail(error)
    if isinstance(error, UpstreamFault):
        return error.fault
    return "client" if isinstance(error, ClientFault) else "proxy"
