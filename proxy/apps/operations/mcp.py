"""The MCP server: three operations as tools, over HTTP on the proxy and over stdio from the command
line.

Needs `offload-proxy[mcp]`. Each call of a tool is a call of its operation, with the same caller,
bounds and log line.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from mcp.server import Server
from mcp.server.stdio import stdio_server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.types import CallToolResult, ListToolsResult, TextContent, Tool, ToolAnnotations
from msgspec import Meta

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


class Grep(schema.Search, frozen=True, kw_only=True):
    """Lines of this user's moved texts that match a regular expression (RE2, ignoring case), the
    newest conversation's first. L1 is a text's first line, which is offset 0 of read_file."""

    archive: bool = True
    limit: Annotated[int, Meta(ge=1, le=1_000, description="matches at most")] = 50


class Read(schema.ReadFile, frozen=True, kw_only=True):
    """A moved text of this user, or as much of it as fits; then a last line in brackets says how to
    go on."""

    characters: Annotated[
        int, Meta(ge=1_000, le=16 << 20, description="most characters of the answer")
    ] = 40_000


TOOLS: Mapping[str, tuple[type[msgspec.Struct], Mapping[str, Any]]] = {
    "recall_sessions": (schema.RecallSessions, {}),
    "grep": (Grep, {"archive": True, "limit": 50}),
    "read_file": (Read, {"characters": 40_000}),
}
"""The operations that are tools, with what each takes, and what it gets where a model sends nothing
else."""


def _schema_of(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the JSON Schema of a tool's arguments, which has its own definitions."""
    [_], components = msgspec.json.schema_components([kind], ref_template="#/$defs/{name}")
    own = components.pop(kind.__name__)
    return {**own, "$defs": components} if components else own


def server(ask: Ask) -> Server[Any]:
    """Return a server whose tools call `ask`."""

    def said(text: str, *, failed: bool) -> CallToolResult:
        return CallToolResult(content=[TextContent(type="text", text=text)], is_error=failed)

    async def list_tools(context: Any, asked: Any) -> ListToolsResult:
        reads = ToolAnnotations(read_only_hint=True)
        tools = [
            Tool(
                name=name,
                description=kind.__doc__,
                input_schema=_schema_of(kind),
                annotations=reads,
            )
            for name, (kind, _) in TOOLS.items()
        ]
        return ListToolsResult(tools=tools)

    async def call_tool(context: Any, asked: Any) -> CallToolResult:
        if asked.name not in TOOLS:
            return said(f"There is no tool {asked.name!r}", failed=True)
        _, defaults = TOOLS[asked.name]
        sent = {name: value for name, value in (asked.arguments or {}).items() if value is not None}
        try:
            reply = await ask(
                b"/%b" % asked.name.encode(), msgspec.json.encode({**defaults, **sent})
            )
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


async def over_http(
    client: Exchange, body: bytes, operate: Callable[[Exchange], Awaitable[None]]
) -> None:
    """Answer one request of the streamable HTTP transport, without a session. `operate` serves an
    operation."""

    async def ask(path: bytes, given: bytes) -> Envelope:
        """Call an operation as a request within this one of the same client."""
        written: list[bytes] = []

        async def send(message: Message) -> None:
            written.append(message.get("body", b""))

        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(given))]
        own = {
            "method": "POST",
            "path": path.decode(),
            "raw_path": path,
            "query_string": b"",
            "headers": headers,
        }
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
