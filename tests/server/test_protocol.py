"""What goes out. What comes in, acceptance/test_bounds.py and test_relay.py show through the real
server."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import Any

import pytest
from uvicorn.server import ServerState

from proxy.server.protocol import FIRST_LOOK
from proxy.server.runner import config
from proxy.settings import Settings
from tests.clock import Clock, still, until
from tests.wire import connection, heard, read_message

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


async def hello(scope: Any, receive: Any, send: Any) -> None:
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]}
    )
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


async def test_a_reply_that_begins_when_the_process_ends_is_the_last_one() -> None:
    asked, ends = asyncio.Event(), asyncio.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        asked.set()
        await ends.wait()
        await hello(scope, receive, send)

    made, state = config(Settings(), slow), ServerState()
    made.load()
    protocol = partial(made.http_protocol_class, config=made, server_state=state, app_state={})
    server = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0)  # type: ignore[arg-type]
    async with server, connection(server.sockets[0].getsockname()[1]) as (reader, writer):
        writer.write(GET)
        await asked.wait()
        for each in list(state.connections):
            each.shutdown()
        ends.set()
        assert (await read_message(reader)).get(b"connection") == [b"close"]
        assert await reader.read() == b""


@pytest.mark.parametrize("earlier", [0, 1])
async def test_a_request_that_is_arriving_when_the_process_ends_is_answered(
    clock: Clock, earlier: int
) -> None:
    made, state = config(Settings(), hello), ServerState()
    made.load()
    protocol = partial(made.http_protocol_class, config=made, server_state=state, app_state={})
    server = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0)  # type: ignore[arg-type]
    port = server.sockets[0].getsockname()[1]
    async with server, connection(port) as (reader, writer):
        for _ in range(earlier):
            writer.write(GET)
            assert (await read_message(reader)).body == b"hello"
        writer.write(GET[:-2])
        await heard(port)
        for each in list(state.connections):
            each.shutdown()
        await clock.let_pass(2 * FIRST_LOOK)
        writer.write(GET[-2:])
        answer = await read_message(reader)
        assert (answer.body, answer.get(b"connection")) == (b"hello", [b"close"])
        assert await reader.read() == b""


async def test_whoever_has_just_connected_may_still_send_a_request(clock: Clock) -> None:
    """As nginx does, which connects for each request, and may be slow to send it."""
    made, state = config(Settings(), hello), ServerState()
    made.load()
    protocol = partial(made.http_protocol_class, config=made, server_state=state, app_state={})
    server = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0)  # type: ignore[arg-type]
    async with server, connection(server.sockets[0].getsockname()[1]) as (reader, writer):
        await until(lambda: state.connections)
        for each in list(state.connections):
            each.shutdown()
        await clock.let_pass(FIRST_LOOK / 2)
        writer.write(GET)
        answer = await read_message(reader)
        assert (answer.body, answer.get(b"connection")) == (b"hello", [b"close"])
        assert await reader.read() == b""


SEEN: list[tuple[Any, bytes]] = []


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Note the request, and reply with the body's length."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    SEEN.append((dict(scope), body))
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"%d" % len(body)})


async def said(raw: bytes, app: Any = echo) -> tuple[list[tuple[Any, bytes]], bytes]:
    """Send these bytes, and return the requests that the application got and all that came back."""
    SEEN.clear()
    made, state = config(Settings(), app), ServerState()
    made.load()
    protocol = partial(made.http_protocol_class, config=made, server_state=state, app_state={})
    server = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0)  # type: ignore[arg-type]
    async with server, connection(server.sockets[0].getsockname()[1]) as (reader, writer):
        writer.write(raw)
        back = b""

        async def read() -> None:
            nonlocal back
            while piece := await reader.read(65536):
                back += piece

        reading = asyncio.create_task(read())
        await still(lambda: back)
        reading.cancel()
    return list(SEEN), back


async def test_a_reply_has_no_header_but_the_applications() -> None:
    """Upstream has said when it answered, and what it is."""
    _, back = await said(GET, hello)
    assert back == b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"


POST = b"POST /v1/x HTTP/1.1\r\nHost: localhost\r\n"
HIDDEN = b"GET /hidden HTTP/1.1\r\nHost: localhost\r\n\r\n"

DESYNCS = {
    "two lengths": POST + b"Content-Length: 0\r\nContent-Length: 41\r\n\r\n" + HIDDEN,
    "a list of lengths": POST + b"Content-Length: 0, 41\r\n\r\n" + HIDDEN,
    "a signed length": POST + b"Content-Length: +41\r\n\r\n" + HIDDEN,
    "a spaced length": POST + b"Content-Length : 41\r\n\r\n" + HIDDEN,
    "an underscored length": POST + b"Content-Length: 4_1\r\n\r\n" + HIDDEN,
    "a length and chunks": POST
    + b"Content-Length: 41\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    + HIDDEN,
    "chunks and a length": POST
    + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n"
    + HIDDEN,
    "chunked twice": POST
    + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n"
    + HIDDEN,
    "chunked, disguised": POST + b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    "xchunked": POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    "folded": POST + b"Transfer-Encoding:\r\n chunked\r\nX: 1\r\n 2\r\n\r\n0\r\n\r\n" + HIDDEN,
    "a bare CR": POST + b"X: 1\rContent-Length: 41\r\n\r\n" + HIDDEN,
    "a NUL": POST + b"X: \x00\r\nContent-Length: 0\r\n\r\n" + HIDDEN,
    "a size with a sign": POST
    + b"Transfer-Encoding: chunked\r\n\r\n+2\r\nab\r\n0\r\n\r\n"
    + HIDDEN,
    "a size with 0x": POST + b"Transfer-Encoding: chunked\r\n\r\n0x2\r\nab\r\n0\r\n\r\n" + HIDDEN,
    "a size above all": POST
    + b"Transfer-Encoding: chunked\r\n\r\n"
    + b"f" * 17
    + b"\r\nab\r\n0\r\n\r\n"
    + HIDDEN,
    "a chunk without its end": POST
    + b"Transfer-Encoding: chunked\r\n\r\n2\r\nabXX0\r\n\r\n"
    + HIDDEN,
    "a chunk that ends in LF": POST + b"Transfer-Encoding: chunked\r\n\r\n2\nab\n0\n\n" + HIDDEN,
    "an extension with LF": POST
    + b"Transfer-Encoding: chunked\r\n\r\n2;\nxx\r\nab\r\n0\r\n\r\n"
    + HIDDEN,
    "HTTP/1.0 with chunks": POST.replace(b"1.1", b"1.0")
    + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    + HIDDEN,
    "an upgrade with a length": POST
    + b"Connection: upgrade\r\nUpgrade: x\r\nContent-Length: 41\r\n\r\n"
    + HIDDEN,
    "an upgrade with two lengths": POST
    + b"Connection: upgrade\r\nUpgrade: x\r\nContent-Length: 0\r\nContent-Length: 41\r\n\r\n"
    + HIDDEN,
}


@pytest.mark.parametrize("raw", DESYNCS.values(), ids=DESYNCS)
async def test_no_request_hides_in_another(raw: bytes) -> None:
    """Whatever a front proxy may take this for, what stands in its body is never served as a
    request of its own."""
    seen, back = await said(raw)
    assert [scope["path"] for scope, _ in seen] in ([], ["/v1/x"])
    assert back.count(b"HTTP/1.1 ") <= 2
    for scope, body in seen:
        lengths = [value for name, value in scope["headers"] if name == b"content-length"]
        assert len(lengths) <= 1 and (not lengths or int(lengths[0]) == len(body))
        assert not any(
            b"\r" in value or b"\n" in value or b"\0" in value for _, value in scope["headers"]
        )


@pytest.mark.parametrize("trailer", [b"Authorization: Bearer k", b"X-Offload: mode=off"])
async def test_a_trailer_is_no_header(trailer: bytes) -> None:
    raw = POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n" + trailer + b"\r\n\r\n"
    [(scope, body)], _ = await said(raw)
    assert body == b"ab"
    assert [name for name, _ in scope["headers"]] == [b"host", b"transfer-encoding"]


UPGRADE = b"GET /v1/responses HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"


@pytest.mark.parametrize(
    "head",
    [
        UPGRADE
        + b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
        UPGRADE.replace(b"websocket", b"WebSocket").replace(b"/v1/responses", b"/health") + b"\r\n",
        UPGRADE + b"Upgrade: h2c\r\n\r\n",
        UPGRADE + b"Content-Length: 41\r\n\r\n",
    ],
    ids=["a handshake", "another path", "two offers", "a body"],
)
async def test_websocket_is_refused_before_anything_else(
    head: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Clients go on over HTTP after a 426. It is nothing that an operator could mend, so it is no
    warning."""
    seen, back = await said(head + HIDDEN)
    assert seen == []
    answer, _, body = back.partition(b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 426 ") and b"upgrade: http/1.1" in answer.lower()
    assert (
        json.loads(body)["error"]["message"]
        == "This proxy does not speak WebSocket: send the request over plain HTTP"
    )
    assert not caplog.records


async def test_websocket_behind_another_request_is_refused_in_its_turn() -> None:
    seen, back = await said(GET + UPGRADE + b"\r\n")
    assert [scope["path"] for scope, _ in seen] == ["/"]
    assert [line[:12] for line in back.split(b"\r\n") if line.startswith(b"HTTP/")] == [
        b"HTTP/1.1 200",
        b"HTTP/1.1 426",
    ]


@pytest.mark.parametrize(
    ("method", "offer"), [(b"GET", b"h2c"), (b"POST", b"h2c"), (b"POST", b"websocket")]
)
async def test_an_offer_that_is_not_taken_is_no_header(method: bytes, offer: bytes) -> None:
    """A server may ignore one (RFC 9110, 7.8), and WebSocket begins with a GET."""
    fields = b"Connection: upgrade\r\nUpgrade: %b\r\nContent-Length: 2\r\n\r\nab" % offer
    raw = POST.replace(b"POST", method) + fields + HIDDEN
    seen, back = await said(raw)
    assert [(scope["path"], body) for scope, body in seen] == [("/v1/x", b"ab"), ("/hidden", b"")]
    assert back.count(b"HTTP/1.1 200") == 2
    assert b"upgrade" not in dict(seen[0][0]["headers"])


@pytest.mark.parametrize("status", [600, 799, 999])
async def test_a_status_that_nobody_knows_passes(status: int) -> None:
    async def odd(scope: Any, receive: Any, send: Any) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [(b"content-length", b"0")],
            }
        )
        await send({"type": "http.response.body"})

    _, back = await said(GET.replace(b"Host", b"Connection: close\r\nHost"), odd)
    assert back.startswith(b"HTTP/1.1 %d \r\n" % status)
