"""What goes out. What comes in, acceptance/test_bounds.py and test_relay.py show through the real server."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest
from uvicorn.server import ServerState

from proxy.server.runner import config
from proxy.settings import Settings
from tests.wire import connection, read_message

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


async def hello(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
    await send({"type": "http.response.body", "body": b"hello"})


@pytest.mark.parametrize("earlier", [0, 1])
async def test_a_request_that_has_arrived_when_the_process_ends_is_answered(earlier: int) -> None:
    """On a new connection, and on one that has carried requests."""
    made, state = config(Settings(), hello), ServerState()
    made.load()
    protocol = partial(made.http_protocol_class, config=made, server_state=state, app_state={})
    server = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0)  # type: ignore[arg-type]
    port = server.sockets[0].getsockname()[1]
    async with server, connection(port) as (reader, writer), connection(port) as (idle, idling):
        for stream, sending in [(reader, writer)] * earlier + [(idle, idling)]:
            sending.write(GET)
            assert (await read_message(stream)).body == b"hello"
        writer.write(GET)  # it is written at once, and not read yet
        for each in list(state.connections):
            each.shutdown()
        answer = await read_message(reader)
        assert (answer.body, answer.get(b"connection")) == (b"hello", [b"close"])
        assert await reader.read() == await idle.read() == b""
