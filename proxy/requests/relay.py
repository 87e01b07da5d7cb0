"""Relays a request and its reply byte for byte, as they arrive, and reads the replies that are no
chat."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import aclosing, suppress
from functools import partial

from msgspec.structs import replace

from proxy.dialects import Dialect
from proxy.dialects.messages import MESSAGES
from proxy.errors import BadEncoding, Fault, ProxyError, UpstreamBroken, UpstreamFault
from proxy.plan.turn import Addition
from proxy.policies.tenants import Tenant
from proxy.requests.exchange import ClientGone, Exchange
from proxy.settings import Settings
from proxy.telemetry.outcome import Kind, Outcome
from proxy.upstream import codings
from proxy.upstream.client import UpstreamClient, UpstreamReply, UpstreamRequest, decoded_reply
from proxy.upstream.headers import (
    DIGESTS,
    Header,
    Headers,
    location_for,
    reply_headers,
    request_headers,
    url_for,
)

GATHERED = 1 << 20
"""Most bytes of a body that is collected before it goes upstream, so that slow clients occupy no
upstream connection. Larger bodies, which are uploads, are relayed as they arrive."""

ENDING = 4 << 10
"""Bytes at either end of a reply that are looked at. Its usage takes less than one KiB, and little
follows it."""

DECODED = 2 << 20
"""The most bytes into which a chunk of a reply is decompressed to see its end. That takes a few
milliseconds."""

REWRITTEN = (b"content-length", b"content-encoding", b"accept-encoding", *DIGESTS)
IDEMPOTENCY_KEY = b"idempotency-key"
ANOTHER = (*REWRITTEN, IDEMPOTENCY_KEY)
"""Headers that a second body must not have: upstream would take its idempotency key for the first
body's."""

WHOLE_LIMIT = 32 << 20
"""Most bytes of a reply that is not a stream."""
_BOUND = b"content-encoding", b"content-length"
"""With one of these headers, a reply takes nothing behind what upstream sent of it."""

_WHOLE = b"json", b"text/html"
"""Content types of what is no stream. A gateway's page of its own comes with status 200, too."""

_VERTEX = b":rawPredict", b":streamRawPredict"
"""The ends of Vertex's paths, which take no `x-api-key`."""

Sink = Callable[[Outcome], None]
"""Gets the outcome of a request."""


class Relay:
    """Serves every request that is neither a chat nor ours, and makes the upstream request for an
    unchanged chat."""

    def __init__(self, settings: Settings, upstream: UpstreamClient, sink: Sink) -> None:
        self._first_byte_timeout = settings.first_byte_timeout
        self._upstream = upstream
        self._sink = sink

    async def __call__(self, client: Exchange, tenant: Tenant) -> None:
        """Relay a request of any path to the upstream of `tenant.policy`."""
        outcome = client.outcome(Kind.RELAY, tenant.name, tenant.namespace)
        await served(client, self._sink, self._exchange(client, tenant), lambda: outcome)

    def request(
        self,
        client: Exchange,
        tenant: Tenant,
        content: bytes | AsyncIterator[bytes],
        target: bytes = b"",
    ) -> UpstreamRequest:
        """Return the client's request for upstream, with this body and the credentials that the
        tenant uses. `target`: the path and query if they are not the client's."""
        upstream = tenant.policy.upstream
        anthropic = client.api == MESSAGES.name
        client.relocated = partial(location_for, upstream.base_url, anthropic=anthropic)
        return UpstreamRequest(
            method=client.method,
            url=url_for(upstream.base_url, target or client.target, anthropic=anthropic),
            headers=request_headers(
                client.headers,
                tenant.credential(
                    upstream, anthropic=anthropic and not client.path.endswith(_VERTEX)
                ),
            ),
            content=content,
            connect_timeout=upstream.connect_timeout,
            first_byte_timeout=self._first_byte_timeout,
            idle_timeout=upstream.idle_timeout,
        )

    def changed(
        self,
        client: Exchange,
        tenant: Tenant,
        body: bytes,
        dialect: Dialect,
        without: frozenset[Addition],
        *,
        first: bool,
        target: bytes = b"",
    ) -> UpstreamRequest:
        """Return the client's request with another body, and with the idempotency key only if it is
        the `first` one. If it is to be sent without thinking, upstream is asked to drop what it
        would refuse. `target` as above."""
        request = rewritten(
            self.request(client, tenant, body, target), body, REWRITTEN if first else ANOTHER
        )
        if Addition.THINKING in without and body:
            body, headers = dialect.forgiving(body, request.headers)
            request = rewritten(replace(request, headers=Headers(headers)), body)
        return request

    async def _exchange(self, client: Exchange, tenant: Tenant) -> None:
        request = self.request(client, tenant, await client.body(GATHERED))
        with client.present():
            client.sent = time.perf_counter()
            try:
                sent = await self._upstream.send(request)
            except UpstreamFault as error:  # if the client's body broke off, that is the reason
                raise client.broken or error from error
            async with aclosing(sent) as reply:
                await pass_on(reply, client)


def rewritten(
    request: UpstreamRequest, body: bytes, dropped: Collection[bytes] = REWRITTEN
) -> UpstreamRequest:
    """Return the client's own request with another body and without the headers in `dropped`."""
    kept = request.headers.without(dropped)
    headers = Headers(
        (*kept, (b"accept-encoding", b"identity"), (b"content-length", b"%d" % len(body)))
    )
    return replace(request, content=body, headers=headers)


async def served(
    client: Exchange, sink: Sink, work: Awaitable[None], outcome: Callable[[], Outcome]
) -> None:
    """Await `work`, which replies to the client, and give the sink one outcome whatever happens:
    what `outcome` returns at the end, with status, times and fault. A client that is still there
    gets an error before the reply began."""
    fault = Fault.NONE
    detail = ""
    try:
        await work
    except ClientGone:
        fault = Fault.CLIENT_GONE
    except ProxyError as error:
        fault = Fault.CLIENT_GONE if client.gone else error.fault
        detail = error.detail if isinstance(error, UpstreamFault) else ""
        if not client.gone and not client.status:
            await client.fail(error)
    except BaseException:  # the server ends the request, or it met a bug
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
    error_event: Callable[[ProxyError], bytes] | None = None,
    watch: Callable[[bytes], object] = ignore,
    read: bytes = b"",
) -> None:
    """Relay upstream's reply as it arrives, with the headers `ours` added, and show each chunk to
    `watch`. `read` was read of it before. Raises UpstreamFault if it breaks off; an uncompressed
    stream then ends with an `error_event`."""
    client.error_event = None
    if error_event is not None and is_stream(reply) and not any(map(reply.headers.get_all, _BOUND)):
        client.error_event = lambda error: b"\n\n" + error_event(error)
    try:
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
    except UpstreamFault as fault:
        if client.status:
            await client.break_off(fault)
        raise


class ReplyEnds:
    """Keeps the beginning of a reply that is relayed, which may be an error in spite of its status,
    and the end, where upstream says what the request cost; some streams say at their beginning what
    the prompt cost. Both are decompressed, or empty if that is not possible. `all` is the whole
    reply, likewise, if it has no more than `most` bytes."""

    def __init__(self, reply: UpstreamReply, most: int = 0) -> None:
        self.first = b""
        self._latest: list[bytes] = []
        """The end is among these pieces. They are joined only now and then, as most are small."""
        self._held = 0
        """Bytes of these pieces."""
        self._most = most
        self._pieces: list[bytes] = []
        self._size = 0
        self._decoder: codings.ContentDecoder | None = None
        with suppress(BadEncoding):
            encoding = b",".join(reply.headers.get_all(b"content-encoding"))
            self._decoder = codings.reply_decoder(encoding.decode("latin-1"))

    @property
    def last(self) -> bytes:
        """The end."""
        return b"".join(self._latest)[-ENDING:]

    @property
    def both(self) -> bytes:
        """The beginning and the end, on lines of their own."""
        return self.first + b"\n" + self.last

    @property
    def all(self) -> bytes:
        """The whole reply; empty if it is longer, or cannot be read."""
        readable = self._decoder is not None and self._size <= self._most
        return b"".join(self._pieces) if readable else b""

    def take(self, chunk: bytes) -> None:
        """Take the reply's next chunk."""
        size = 0
        try:
            for piece in self._decoder.feed(chunk) if self._decoder else ():
                self._keep(piece)
                size += len(piece)
                if size > max(DECODED, len(chunk)):
                    raise BadEncoding("too large to be decompressed on the event loop")
        except BadEncoding:
            self._decoder = None
            self.first = b""
            self._latest = []

    def _keep(self, piece: bytes) -> None:
        self._size += len(piece)
        if self._size <= self._most:
            self._pieces.append(piece)
        elif self._pieces:
            self._pieces = []
        if len(self.first) < ENDING:
            self.first += piece[: ENDING - len(self.first)]
        self._latest.append(piece)
        self._held += len(piece)
        if self._held > 2 * ENDING:
            self._latest = [self.last]
            self._held = len(self._latest[0])


# -- replies that are read -------------------------------------------------------------------------


async def body(reply: UpstreamReply) -> bytes:
    """Return a whole reply, decompressed. Raises UpstreamFault if it breaks off or is too large."""
    whole = bytearray()
    async with aclosing(decoded_reply(reply)) as chunks:
        async for chunk in chunks:
            whole += chunk
            if len(whole) > WHOLE_LIMIT:
                raise UpstreamBroken(f"Upstream's reply is larger than {WHOLE_LIMIT} bytes")
    return bytes(whole)


def is_stream(reply: UpstreamReply, otherwise: bool = False) -> bool:
    """Return whether a reply is a stream, by its content type, or `otherwise` if that does not
    say."""
    kinds = b" ".join(reply.headers.get_all(b"content-type")).lower()
    return b"text/event-stream" in kinds or (otherwise and not any(one in kinds for one in _WHOLE))
