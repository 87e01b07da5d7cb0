"""Relays a request and its reply byte for byte, as they arrive."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING

from proxy.dialects.messages import MESSAGES
from proxy.errors import BadEncoding, Fault, ProxyError, UpstreamFault
from proxy.requests.exchange import ClientGone, Exchange
from proxy.telemetry.outcome import Kind, Outcome
from proxy.upstream.client import UpstreamReply, UpstreamRequest
from proxy.upstream.codings import ContentDecoder, reply_decoder
from proxy.upstream.headers import Header, reply_headers, request_headers, url_for

if TYPE_CHECKING:
    from proxy.policies.tenants import Tenant
    from proxy.settings import Settings
    from proxy.upstream.client import UpstreamClient

GATHERED = 1 << 20
"""Most bytes of a body that is collected before it goes upstream, so that slow clients occupy no upstream connection.
Larger bodies, which are uploads, are relayed as they arrive."""

ENDING = 4 << 10
"""Bytes at either end of a reply that are looked at. Its usage takes less than one KiB, and little follows it."""

DECODED = 2 << 20
"""The most bytes into which a chunk of a reply is decompressed to see its end. That takes a few milliseconds."""

Sink = Callable[[Outcome], None]
"""Gets the outcome of every request."""


class Relay:
    """Serves every request that is neither a chat nor ours, and makes the upstream request for an unchanged chat."""

    def __init__(self, settings: Settings, upstream: UpstreamClient, sink: Sink) -> None:
        self._first_byte_timeout = settings.first_byte_timeout
        self._upstream = upstream
        self._sink = sink

    async def __call__(self, client: Exchange, tenant: Tenant) -> None:
        """Relay a request of any path to the upstream of `tenant.policy`."""
        outcome = client.outcome(Kind.RELAY, tenant.name, tenant.namespace)
        await served(client, self._sink, self._exchange(client, tenant), lambda: outcome)

    def request(
        self, client: Exchange, tenant: Tenant, content: bytes | AsyncIterator[bytes], target: bytes = b""
    ) -> UpstreamRequest:
        """Return the client's request for upstream, with this body and the credentials that the tenant uses. `target`:
        the path and query if they are not the client's."""
        upstream = tenant.policy.upstream
        anthropic = client.api == MESSAGES.name
        return UpstreamRequest(
            method=client.method,
            url=url_for(upstream.base_url, target or client.target, anthropic=anthropic),
            headers=request_headers(
                client.headers, tenant.credential(upstream, anthropic=anthropic), fields=client.fields
            ),
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
        """Send the request. Raises ProxyError: that of the client's body if it broke off, whatever happens upstream."""
        try:
            return await self._upstream.send(request)
        except UpstreamFault as error:
            raise client.broken or error from error


async def served(client: Exchange, sink: Sink, work: Awaitable[None], outcome: Callable[[], Outcome]) -> None:
    """Await `work`, which replies to the client, and give the sink one outcome whatever happens.

    If `work` raises ProxyError before its reply has begun, a client that is still there gets the error. The outcome is
    what `outcome` returns at the end, completed with status, times and fault.
    """
    fault, detail = Fault.NONE, ""
    try:
        await work
    except ClientGone:
        fault = Fault.CLIENT_GONE
    except ProxyError as error:
        fault = await _report(client, error)
        detail = error.detail if isinstance(error, UpstreamFault) else ""
    except asyncio.CancelledError:
        fault = Fault.PROXY
        raise
    finally:
        sink(client.completed(outcome(), fault, detail))


def ignore(_: bytes) -> None:
    """Look at no chunk of a reply."""


async def pass_on(
    reply: UpstreamReply,
    client: Exchange,
    ours: Sequence[Header] = (),
    watch: Callable[[bytes], object] = ignore,
    read: bytes = b"",
) -> None:
    """Relay upstream's reply as it arrives, with the headers `ours` added, and show each chunk to `watch`. `read` was
    read of it before. Raises UpstreamFault if it breaks off."""
    await client.start(reply.status, reply_headers(reply.headers, ours))
    if read:
        await client.write(read)
    async for chunk in reply:
        watch(chunk)
        if reply.ended:
            await client.finish(chunk)
            return
        await client.write(chunk)
    await client.finish()


class ReplyEnds:
    """Keeps the beginning of a reply that is relayed, which may be an error in spite of its status, and the end, where
    upstream says what the request cost."""

    def __init__(self, reply: UpstreamReply | None = None) -> None:
        """With `reply`, both are also kept decompressed."""
        self.first = self.last = b""
        self._decoded = None if reply is None else DecodedEnds(reply)

    @property
    def clear(self) -> bytes:
        """`both`, decompressed; empty if that was not asked for, or is not possible."""
        return self._decoded.both if self._decoded else b""

    @property
    def both(self) -> bytes:
        """The beginning and the end, on lines of their own."""
        return self.first + b"\n" + self.last

    def take(self, chunk: bytes) -> None:
        """Take the reply's next chunk."""
        if len(self.first) < ENDING:
            self.first += chunk[: ENDING - len(self.first)]
        self.last = (self.last + chunk[-ENDING:])[-ENDING:]
        if self._decoded:
            self._decoded.take(chunk)


class DecodedEnds(ReplyEnds):
    """Keeps the beginning and the end of a reply that is relayed, decompressed. They are empty if that is not possible.

    Some streams say at their beginning what the prompt cost, and at their end what the reply did.
    """

    def __init__(self, reply: UpstreamReply) -> None:
        super().__init__()
        self._decoder: ContentDecoder | None = None
        codings = b",".join(reply.headers.get_all(b"content-encoding")).decode("latin-1")
        with suppress(BadEncoding):
            self._decoder = reply_decoder(codings)

    def take(self, chunk: bytes) -> None:
        """Take the reply's next chunk."""
        size = 0
        try:
            for piece in self._decoder.feed(chunk) if self._decoder else ():
                super().take(piece)
                size += len(piece)
                if size > DECODED:
                    raise BadEncoding("too large to be decompressed on the event loop")
        except BadEncoding:
            self._decoder, self.first, self.last = None, b"", b""


async def _report(client: Exchange, error: ProxyError) -> Fault:
    """Reply with the error, unless a reply has begun: that one is left unfinished and so cut off. Returns the fault."""
    if client.gone:
        return Fault.CLIENT_GONE
    if not client.status:
        await client.fail(error)
    return error.fault
