"""The MCP server: one tool for each operation of `recall`, over HTTP on the proxy and over stdio from the command line.

Needs `offload-proxy[mcp]`. Each call of a tool is a call of its operation, with the same caller, bounds and log line.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
from mcp.server import Server
from mcp.server.stdio import stdio_server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.types import CallToolResult, ListToolsResult, TextContent, Tool, ToolAnnotations

from proxy import __version__
from proxy.apps.operations import schema
from proxy.apps.operations.call import refusal
from proxy.apps.operations.schema import Envelope
from proxy.errors import ProxyError
from proxy.requests.exchange import RAW, Exchange

if TYPE_CHECKING:
    from starlette.types import Message, Receive

logging.getLogger("mcp").setLevel(logging.WARNING)  # at INFO it logs every request

Ask = Callable[[bytes, bytes], Awaitable[Envelope]]
"""Calls the operation at a path with a JSON body."""

INSTRUCTIONS = """\
What was moved out of this user's earlier conversations with a model, such as long results of tools. Search it before
you repeat work, and read it where a text names a path such as /context_store/billing.log.2e7dc01b9a01f2d4.txt."""

TOOLS: Mapping[str, type[msgspec.Struct]] = {
    "recall_sessions": schema.RecallSessions,
    "recall_search": schema.RecallSearch,
    "recall_read": schema.RecallRead,
}


def server(ask: Ask) -> Server[Any]:
    """Return a server whose tools call `ask`."""

    def said(text: str, *, failed: bool) -> CallToolResult:
        return CallToolResult(content=[TextContent(type="text", text=text)], is_error=failed)

    async def list_tools(context: Any, asked: Any) -> ListToolsResult:
        reads = ToolAnnotations(read_only_hint=True)
        _, schemas = msgspec.json.schema_components(TOOLS.values())
        tools = [
            Tool(name=name, description=kind.__doc__, input_schema=schemas[kind.__name__], annotations=reads)
            for name, kind in TOOLS.items()
        ]
        return ListToolsResult(tools=tools)

    async def call_tool(context: Any, asked: Any) -> CallToolResult:
        if asked.name not in TOOLS:
            return said(f"There is no tool {asked.name!r}", failed=True)
        try:
            reply = await ask(b"/%b" % asked.name.encode(), msgspec.json.encode(asked.arguments or {}))
        except ProxyError as error:
            return said(error.message, failed=True)
        return said(reply.answer, failed=not reply.success)

    return Server(
        "offload-proxy",
        version=__version__,
        instructions=INSTRUCTIONS,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )


async def over_stdio(ask: Ask) -> None:
    """Serve the client at standard input and output until it leaves."""
    made = server(ask)
    async with stdio_server() as (incoming, outgoing):
        await made.run(incoming, outgoing, made.create_initialization_options())


async def over_http(client: Exchange, body: bytes, operate: Callable[[Exchange], Awaitable[None]]) -> None:
    """Answer one request of the streamable HTTP transport, without a session. `operate` serves an operation."""

    async def ask(path: bytes, given: bytes) -> Envelope:
        """Call an operation as a request within this one of the same client."""
        written: list[bytes] = []

        async def send(message: Message) -> None:
            written.append(message.get("body", b""))

        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(given))]
        own = {"method": "POST", "path": path.decode(), "raw_path": path, "query_string": b"", "headers": headers}
        scope = {**client.scope, **own, "extensions": {RAW: client.scope["extensions"][RAW]}}
        inner = Exchange(scope, _after(given, client.receive), send)
        inner.fault_body = refusal()
        await operate(inner)
        return msgspec.json.decode(b"".join(written), type=Envelope)

    manager = StreamableHTTPSessionManager(app=server(ask), json_response=True, stateless=True)
    async with manager.run():
        await manager.handle_request(client.scope, _after(body, client.receive), client.send)


def _after(body: bytes, receive: Receive) -> Receive:
    """Return an ASGI `receive` that gives the body first."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        return waiting.pop() if waiting else await receive()

    return next_message
