"""What goes out. What comes in, acceptance/test_bounds.py and test_relay.py show through the real server."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.server import ServerState

from proxy.server.cycle import WRITTEN, Cycle
from proxy.server.held_head import HeldHead
from proxy.server.runner import config
from proxy.settings import Settings
from tests.wire import connection, read_message

HEAD = b"HTTP/1.1 200 OK\r\n\r\n"


class Written(asyncio.Transport):
    """What goes out, a write each; None for the end."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bytes | None] = []
        self.closing = False

    def is_closing(self) -> bool:
        return self.closing

    def write(self, data: Any) -> None:
        self.seen.append(bytes(data))

    def close(self) -> None:
        self.seen.append(None)


async def test_a_head_is_sent_together_with_its_first_body_bytes() -> None:
    written = Written()
    held = HeldHead(written, asyncio.get_running_loop())
    for data in (HEAD, b"one", b"two"):
        held.write(data)
    assert written.seen == [HEAD + b"one", b"two"]
    await asyncio.sleep(0)
    assert written.seen == [HEAD + b"one", b"two"]


async def test_a_head_waits_for_at_most_one_turn_of_the_loop() -> None:
    written = Written()
    held = HeldHead(written, asyncio.get_running_loop())
    held.write(HEAD)
    assert written.seen == []
    await asyncio.sleep(0)
    assert written.seen == [HEAD]
    held.write(b"late")
    assert written.seen == [HEAD, b"late"]


async def test_a_held_head_is_sent_when_its_writer_closes() -> None:
    written = Written()
    held = HeldHead(written, asyncio.get_running_loop())
    held.write(HEAD)
    held.close()
    await asyncio.sleep(0)
    assert written.seen == [HEAD, None]


async def test_a_held_head_is_dropped_when_the_connection_closes() -> None:
    """uvloop raises for a write to a closed transport, even before it has said that the connection is lost."""
    written = Written()
    held = HeldHead(written, asyncio.get_running_loop())
    held.write(HEAD)
    written.closing = True
    await asyncio.sleep(0)
    assert written.seen == []


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_a_piece_is_pushed_only_where_it_can_be_written_at_once(version: str) -> None:
    written = Written()
    flow = FlowControl(written)
    protocol: Any = SimpleNamespace(
        scope={"method": "GET", "http_version": version},
        transport=written,
        flow=flow,
        logger=logging.getLogger(__name__),
        access_logger=logging.getLogger(__name__),
        server_state=SimpleNamespace(default_headers=[]),
        expect_100_continue=False,
        loop=asyncio.get_running_loop(),
        inbound=None,
        answered=lambda cycle: None,
    )
    cycle = Cycle(protocol, keep_alive=True)
    cycle.more_body = False
    assert not cycle.push(b"before the head")
    await cycle.send({"type": "http.response.start", "status": 200, "headers": []})
    assert cycle.push(b"one") and not cycle.push(b"x" * (WRITTEN + 1))
    flow.pause_writing()
    assert not cycle.push(b"the client is behind")
    flow.resume_writing()
    assert cycle.push(b"two")
    written.closing = True
    assert not cycle.push(b"closed")
    written.closing = False
    await cycle.send({"type": "http.response.body", "body": b"end"})
    assert not cycle.push(b"after the end")
    chunks = [b"3\r\none\r\n", b"3\r\ntwo\r\n", b"3\r\nend\r\n0\r\n\r\n"]
    assert written.seen[1:] == (chunks if version == "1.1" else [b"one", b"two", b"end"])


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
