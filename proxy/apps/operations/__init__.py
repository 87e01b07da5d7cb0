"""The operations that clients call directly. All paths share one handler, and all replies share one
envelope.

body ──parameters──> operation (offload, search, compress) over the caller's files ──> envelope
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache, partial
from importlib import import_module
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from proxy.apps.operations import compress, offload, schema, search
from proxy.apps.operations.call import CallerFiles, Looking, OperationCall, refusal
from proxy.dialects.chat import CHAT
from proxy.errors import MethodNotAllowed, Overloaded, Unauthorized, Unsupported
from proxy.policies.tenants import Tenant
from proxy.release import install
from proxy.requests.exchange import Exchange
from proxy.requests.relay import served
from proxy.server.parts import Door, Part
from proxy.server.process import Process
from proxy.telemetry.outcome import Kind, Outcome
from proxy.upstream.codings import decoded_request

STORE_SECONDS = 30.0
"""Seconds that one call may wait for the store. It is long, because an operation cannot do without
the store and a search may read much."""

SECONDS = 600.0
"""Seconds that one call may take in all, including its summaries."""

MESSAGE_BYTES = 1 << 20
"""Most bytes of a message of MCP."""

MCP = b"/_offload/mcp"
"""The path of the MCP server."""


Run = Callable[[Any, Any], Awaitable[bytes]]
"""Takes an OperationCall, or anything that is Looking where the operation only looks, and the
parameters."""

PATHS: Mapping[bytes, tuple[str, Run, Sequence[type[msgspec.Struct]]]] = {
    b"/context_offload": ("Move old content out of a conversation", offload.offload, [schema.OffloadParameters]),
    b"/context_compact": ("The same in compact mode", offload.offload, [schema.CompactParameters]),
    b"/context_compress":
        ("The same in compress mode; keeps 5 messages by default", offload.offload, [schema.CompressParameters]),
    b"/grep": ("Search files or what conversations moved for a regular expression, or one file for a text",
               search.grep, [schema.Find, schema.Search]),
    b"/read_file": ("Read a file or a moved text, or some of its lines", search.read_file, [schema.ReadFile]),
    b"/recall_sessions":
        ("List your conversations that moved something", search.recall_sessions, [schema.RecallSessions]),
    b"/v1/compress": ("The messages as the proxy would send them, in Headroom's shape of reply",
                      compress.compress, [schema.CompressMessages]),
}  # fmt: skip
"""What each path does, in a few words and in code, and the parameters that it takes. Of two kinds,
calls with a `file_path` are of the first."""


async def look(path: bytes, call: Looking, body: bytes) -> bytes:
    """Return the reply of an operation that only looks into files, without a server. Raises
    ProxyError."""
    _, run, kinds = PATHS[path]
    given, _ = schema.body(body)
    return await run(call, schema.taken(given, kinds[-1]))


def check_caller(tenant: Tenant) -> None:
    """Raises Unauthorized for callers without a key: they share a namespace and could read each
    other's files."""
    if tenant.anonymous:
        raise Unauthorized(
            "Send a key as `Authorization: Bearer KEY`: the operations keep files for you, and your key is all that "
            "tells you from others. Where this server lists no keys, it may be any text that nobody else guesses"
        )


@cache
def description() -> bytes:
    """Return the OpenAPI document as JSON."""
    return schema.document(
        {path.decode(): (about, kinds) for path, (about, _, kinds) in PATHS.items()}
    )


async def _describe(request: Request) -> Response:
    return Response(description(), media_type="application/json")


class Operations(Part):
    """Serves every operation of this process."""

    def __init__(self, process: Process) -> None:
        self._services = process.services
        self.pages = [Route("/openapi.json", _describe)]
        self._operation = Door(self.operate, CHAT.name, refusal(), check_caller)
        self._mcp = Door(self.mcp, check=check_caller)

    def door(self, path: bytes) -> Door | None:
        if path == MCP:
            return self._mcp
        return self._operation if path in PATHS or path.startswith(compress.RETRIEVE) else None

    async def operate(self, client: Exchange, tenant: Tenant) -> None:
        """Send a reply, and record one outcome whatever happens."""
        services = self._services
        visit = self._services.store.visit(STORE_SECONDS)
        shelf = CallerFiles(visit, tenant.namespace, tenant.policy, services.threads)
        call = OperationCall(services, client, tenant, shelf)

        def outcome() -> Outcome:
            return Outcome(
                request_id=client.request_id,
                tenant=tenant.name,
                namespace=tenant.namespace,
                kind=Kind.OPERATION,
                method=client.method,
                path=client.shown_path,
                store_errors=visit.errors,
                **call.noted,
            )

        await served(client, services.sink, self._serve(call), outcome)

    async def _serve(self, call: OperationCall) -> None:
        """Raises ProxyError and ClientGone."""
        client = call.client
        caller = call.tenant.namespace
        threads = self._services.threads
        retrieves = client.path.startswith(compress.RETRIEVE)
        if client.method != ("GET" if retrieves else "POST"):
            raise MethodNotAllowed(
                f"This operation takes {'GET' if retrieves else 'POST'}, not {client.method}"
            )
        if retrieves:
            with client.present():
                await client.reply(200, await compress.retrieve(call))
            return
        limit = self._services.settings.body_limit
        body = await client.read(limit)
        with client.present():
            clear = await decoded_request(body, client.headers, limit, threads, caller, client.hold)
            given, call.messages = await threads.run(caller, partial(schema.body, clear))
            _, run, kinds = PATHS[client.path]
            if run is offload.offload:  # whose replies always hold messages
                client.fault_body = refusal(call.messages)
            kind = kinds[0 if "file_path" in given else -1]
            try:
                async with asyncio.timeout(SECONDS):
                    reply = await run(call, await call.read(schema.taken, given, kind))
            except TimeoutError as error:
                raise Overloaded(
                    f"This took longer than {SECONDS:g} seconds; ask for less at once"
                ) from error
            await client.reply(200, reply)

    async def mcp(self, client: Exchange, tenant: Tenant) -> None:
        """Answer one request of an MCP client. Raises ProxyError and ClientGone."""
        if client.method != "POST":
            raise MethodNotAllowed(
                f"This MCP server keeps no sessions and takes POST, not {client.method}"
            )
        try:  # in a thread, as this imports much
            mcp = await asyncio.to_thread(import_module, "proxy.apps.operations.mcp")
        except ModuleNotFoundError as error:
            raise Unsupported(f"The MCP server needs: {install('mcp')}") from error
        body = await client.read(MESSAGE_BYTES)
        with client.present():
            await mcp.over_http(client, body, lambda inner: self.operate(inner, tenant))
