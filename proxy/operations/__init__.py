"""The operations that clients call directly. All paths share one handler, and all replies share one envelope.

body ──parameters──> operation (offload, search, read) over the caller's files ──> envelope
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from proxy.errors import MethodNotAllowed, Overloaded, Unauthorized, Unsupported
from proxy.operations import compress, offload, recall, schema, search
from proxy.operations.call import BareReply, OperationCall, OperationReply, refusal
from proxy.operations.files import CallerFiles
from proxy.requests.relay import served
from proxy.telemetry.outcome import Kind, Outcome
from proxy.upstream.codings import decoded

if TYPE_CHECKING:
    from proxy.policies.tenants import Tenant
    from proxy.requests.exchange import Exchange
    from proxy.requests.rounds import Services

__all__ = ["MCP", "PATHS", "Operations", "check_caller", "description", "refusal", "serves"]

STORE_SECONDS = 30.0
"""Seconds that one call may wait for the store. It is long, because an operation cannot do without the store and a
search may read much."""

SECONDS = 600.0
"""Seconds that one call may take in all, including its summaries."""


MESSAGE_BYTES = 1 << 20
"""Most bytes of a message of MCP."""

MCP = b"/_offload/mcp"
"""The path of the MCP server."""

_OFFLOADS = frozenset((b"/context_offload", b"/context_compact", b"/context_compress"))
"""The paths whose replies always hold messages."""

PATHS: Mapping[bytes, Callable[[OperationCall], Awaitable[OperationReply | BareReply]]] = {
    b"/context_offload": offload.offload,
    b"/context_compact": offload.compact,
    b"/context_compress": offload.compress,
    b"/grep": search.grep,
    b"/read_file": search.read_file,
    b"/recall_sessions": recall.sessions,
    b"/recall_search": recall.find,
    b"/recall_read": recall.read,
    b"/v1/compress": compress.compress,
}

description = schema.description


def serves(path: bytes) -> bool:
    """Whether this path is an operation's, or the MCP server's."""
    return path in PATHS or path == MCP or path.startswith(compress.RETRIEVE)


def check_caller(tenant: Tenant) -> None:
    """Raises Unauthorized for callers without a key: they share a namespace and could read each other's files."""
    if tenant.anonymous:
        raise Unauthorized("The operations keep files for you, so they need your key: `Authorization: Bearer KEY`")


class Operations:
    """Serves every operation of this process."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, client: Exchange, tenant: Tenant) -> None:
        """Send a reply, and record one outcome whatever happens."""
        visit = self._services.store.visit(STORE_SECONDS)
        shelf = CallerFiles(visit, tenant.namespace, tenant.policy, self._services.threads)
        call = OperationCall(self._services, client, tenant, shelf)
        await served(client, self._services.sink, self._serve(call), lambda: _outcome(call))

    async def mcp(self, client: Exchange, tenant: Tenant) -> None:
        """Answer one request of an MCP client. Raises ProxyError and ClientGone."""
        if client.method != "POST":
            raise MethodNotAllowed(f"This MCP server keeps no sessions and takes POST, not {client.method}")
        try:  # in a thread, as this imports much
            mcp = await asyncio.to_thread(import_module, "proxy.operations.mcp")
        except ModuleNotFoundError as error:
            raise Unsupported("The MCP server needs: pip install 'offload-proxy[mcp]'") from error
        body = await client.read(MESSAGE_BYTES)
        with client.present():
            await mcp.over_http(client, body, lambda inner: self(inner, tenant))

    async def _serve(self, call: OperationCall) -> None:
        """Raises ProxyError and ClientGone."""
        client, retrieves = call.client, call.client.path.startswith(compress.RETRIEVE)
        if client.method != ("GET" if retrieves else "POST"):
            raise MethodNotAllowed(f"This operation takes {'GET' if retrieves else 'POST'}, not {client.method}")
        if retrieves:
            with client.present():
                await client.reply(200, (await compress.retrieve(call)).body())
            return
        limit = self._services.settings.body_limit
        body = await client.read(limit)
        with client.present():
            threads, caller = self._services.threads, call.tenant.namespace
            clear = await decoded(body, client.headers, limit, threads, caller, client.hold)
            call.given = await threads.run(caller, partial(schema.body, clear))
            if client.path in _OFFLOADS:
                client.fault_body = refusal(call.given.messages)
            await client.reply(200, await _answered(call))


async def _answered(call: OperationCall) -> bytes:
    """Return the reply's body. Raises ProxyError."""
    try:
        async with asyncio.timeout(SECONDS):
            reply = await PATHS[call.client.path](call)
            return await call.read(reply.body)
    except TimeoutError as error:
        raise Overloaded(f"This took longer than {SECONDS:g} seconds; ask for less at once") from error


def _outcome(call: OperationCall) -> Outcome:
    client, tenant = call.client, call.tenant
    return Outcome(
        request_id=client.request_id,
        tenant=tenant.name,
        namespace=tenant.namespace,
        kind=Kind.OPERATION,
        method=client.method,
        path=client.shown_path,
        store_errors=call.shelf.errors,
        **call.noted,
    )
