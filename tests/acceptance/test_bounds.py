"""What one unidentified client may use of the server: heads, bodies, time, and replies that it does
not read.

The tests use raw sockets against the real server, and put its clock forward.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from proxy.requests.exchange import Exchange
from proxy.requests.relay import GATHERED
from proxy.server.protocol import HEAD_BYTES, HEAD_FIELDS, LINGER_BYTES, PIPELINED, UNREAD_SECONDS
from tests.clock import Clock, soon, turns, until
from tests.serving import Proxy, served, spawned
from tests.wire import (
    EVENTS,
    OK,
    Message,
    Peer,
    Wire,
    ask,
    chunk,
    connection,
    heard,
    read_message,
    replying,
    upstream,
)

Json = dict[str, Any]
KNOWN = "948fe603f61dc036b5c596dc09fe3ce3f3d30dc90f024c85f3c82db2ccab679d"
"""SHA-256 of "client"."""
MANY, MANYS = hashlib.sha256(b"many").hexdigest(), b"Authorization: Bearer many"
needs_proc = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")

GET = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer client\r\n\r\n"


@asynccontextmanager
async def relay(
    policy: Json | None = None, handler: Any = None, **settings: Any
) -> AsyncIterator[tuple[Wire, Proxy]]:
    """Run an upstream and a proxy that serves everybody, unless `policy` says otherwise."""
    async with upstream(handler or replying(OK)) as wire:
        made = {
            "upstream": {"base_url": wire.url + "/v1"},
            "offload": {"mode": "off"},
            **(policy or {}),
        }
        with served({"acme" if "api_keys" in made else "default": made}, **settings) as proxy:
            yield wire, proxy
            # closes the test's connections, which the end of the proxy would wait for
            await turns()


def post(
    body: bytes = b"", *headers: bytes, target: bytes = b"/v1/embeddings", size: int | None = None
) -> bytes:
    size = len(body) if size is None else size
    lines = [
        b"POST %b HTTP/1.1" % target,
        b"Host: localhost",
        *headers,
        b"Content-Length: %d" % size,
        b"",
        b"",
    ]
    return b"\r\n".join(lines) + body


CHUNKED = b"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


async def refused(reader: asyncio.StreamReader) -> Message:
    """Read an error of the proxy, after which the connection must end."""
    reply = await soon(read_message(reader))
    assert reply.get(b"connection") == [b"close"]
    assert reply.get(b"content-type") == [b"application/json"]
    error = json.loads(reply.body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert await soon(reader.read()) == b""
    return reply


async def say(writer: asyncio.StreamWriter, *parts: bytes) -> None:
    """Send each part as its own segment."""
    writer.transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for part in parts:
        writer.write(part)
        await turns(1)


async def stalled(writer: asyncio.StreamWriter, proxy: Proxy) -> None:
    """Returns when the proxy takes no more of what we have to send."""
    left = -1
    while left != (left := writer.transport.get_write_buffer_size()):
        await heard(proxy.port)


def cuts(data: bytes, size: int) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]


# What a body may hold


HIDDEN = b"x\r\nupgrade: h2c\r\n\r\nGET /v1/hidden HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer client\r\n\r\n"
OFFER = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAE")
BODILESS = (
    b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
)


@pytest.mark.parametrize("size", [1, 3, 50, 1000])
@pytest.mark.parametrize("offer", [(), OFFER], ids=["plain", "h2c"])
async def test_a_body_is_never_read_as_a_head(size: int, offer: tuple[bytes, ...]) -> None:
    """However it is cut, and whatever stands behind it."""
    chunked = (
        CHUNKED.replace(b"Host: localhost", b"\r\n".join((b"Host: localhost", *offer)))
        + chunk(HIDDEN)
        + chunk(b"")
    )
    async with relay() as (wire, proxy), connection(proxy.port) as (reader, writer):
        await say(
            writer,
            *cuts(
                post(HIDDEN, *offer) + chunked + BODILESS + post(b"", *offer) + post(b"end"), size
            ),
        )
        replies = [await soon(read_message(reader)) for _ in range(5)]
    assert [reply.body for reply in replies] == [b"ok"] * 5
    assert [asked.body for asked in wire.requests] == [HIDDEN, HIDDEN, b"", b"", b"end"]


EARLY = {
    401: post(size=500, target=b"/v1/chat/completions"),
    403: post(b"", b"Authorization: Bearer client", size=500, target=b"/v1/../x"),
    413: post(b"", b"Authorization: Bearer client", size=500, target=b"/v1/chat/completions"),
}


@pytest.mark.parametrize("size", [1, 64, 499])
@pytest.mark.parametrize("status", EARLY)
async def test_an_early_reply_closes_the_connection(status: int, size: int) -> None:
    """The rest of the body is no request, nor is what comes behind it; the next connection is
    served. For a 503, see `test_uploads_take_a_share_of_the_places`."""
    async with relay({"api_keys": [{"sha256": KNOWN}]}, body_limit=400) as (wire, proxy):
        async with connection(proxy.port) as (reader, writer):
            *pieces, last = cuts((HIDDEN * 10)[:500], size)
            await say(writer, EARLY[status], *pieces)
            reply = await soon(read_message(reader))
            await say(writer, last, GET)
            assert (reply.status, reply.get(b"connection")) == (status, [b"close"])
            assert await soon(reader.read()) == b""
        assert (await ask(proxy.port, GET)).body == b"ok"
    assert [asked.target for asked in wire.requests] == [b"/v1/models"]


async def test_reading_after_an_early_reply_is_bounded() -> None:
    """The client cannot send it all, as nobody reads it."""
    async with relay(body_limit=1000) as (_, proxy), connection(proxy.port) as (reader, writer):
        ours = writer.transport.get_extra_info("socket")
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        writer.write(post(b"", target=b"/v1/chat/completions", size=100 << 20))
        assert (await read_message(reader)).status == 413
        writer.write(bytes(32 << 20))
        await stalled(writer, proxy)
        # much of the rest lies in the kernel's buffers
        assert writer.transport.get_write_buffer_size() > 16 << 20


async def test_an_early_reply_reaches_a_client_that_keeps_sending() -> None:
    async with relay(body_limit=1000) as (_, proxy), connection(proxy.port) as (reader, writer):
        writer.write(post(bytes(LINGER_BYTES // 2), target=b"/v1/chat/completions", size=100 << 20))
        assert (await refused(reader)).status == 413


# Heads


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\nA: " + b"x" * HEAD_BYTES + b"\r\n\r\n",
        b"GET /" + b"x" * HEAD_BYTES + b" HTTP/1.1\r\n\r\n",
        b"GET /" + b"x" * 10 * HEAD_BYTES,
        b"GET / HTTP/1.1\r\n" + b"x" * 10 * HEAD_BYTES,
        b"GET / HTTP/1.1\r\nA: " + b"x" * 10 * HEAD_BYTES,
        b"GET / HTTP/1.1\r\n" + b"A: 1\r\n" * (HEAD_FIELDS + 1) + b"\r\n",
        b"GET / HTTP/1.1\r\n" + b"A: 1\r\n" * 100_000,
        CHUNKED + b"0\r\n" + b"A: 1\r\n" * (HEAD_FIELDS + 1) + b"\r\n",
        CHUNKED + b"0\r\nA: " + b"x" * 10 * HEAD_BYTES,
        CHUNKED + b"1;" + b"x" * 10 * HEAD_BYTES,
    ],
    ids=[
        "a field",
        "a target",
        "an endless target",
        "an endless name",
        "an endless field",
        "fields",
        "endless fields",
        "trailers",
        "an endless trailer",
        "an endless extension",
    ],
)
async def test_the_size_of_a_head_is_bounded(head: bytes) -> None:
    async with relay() as (wire, proxy), connection(proxy.port) as (reader, writer):
        writer.write(GET + head)
        assert (await read_message(reader)).body == b"ok"
        reply = await refused(reader)
        assert reply.status == 431
        assert b"65536 bytes" in reply.body and b"200 fields" in reply.body
    assert len(wire.requests) == 1


async def test_valid_heads_are_accepted() -> None:
    most = b"GET /v1/x HTTP/1.1\r\n" + b"A: %b\r\n" % (b"x" * 300) * HEAD_FIELDS + b"\r\n"
    small = CHUNKED + chunk(b"x") * 50_000 + b"0\r\n" + b"A: 1\r\n" * HEAD_FIELDS + b"\r\n"
    async with relay() as (wire, proxy):
        for request in (most, small):
            assert (await ask(proxy.port, request)).body == b"ok"
    assert len(wire.requests[0].get(b"a")) == HEAD_FIELDS
    assert wire.requests[1].body == b"x" * 50_000


@pytest.mark.parametrize(
    "request_",
    [
        b"NOT HTTP\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: x\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
        CHUNKED + b"no size\r\n",
    ],
)
async def test_malformed_http_is_refused(request_: bytes) -> None:
    """It is answered when it is its turn, in our shape."""
    async with relay() as (_, proxy), connection(proxy.port) as (reader, writer):
        writer.write(GET + request_ + GET)
        assert (await read_message(reader)).body == b"ok"
        assert (await refused(reader)).status == 400


@pytest.mark.parametrize("coding", [b"gzip, chunked", b"gzip,\tChunked", b"identity, chunked"])
async def test_no_transfer_coding_is_lost(coding: bytes) -> None:
    head = CHUNKED.replace(b"chunked", coding)
    async with relay() as (wire, proxy), connection(proxy.port) as (reader, writer):
        writer.write(head + chunk(b"abc") + chunk(b""))
        assert (await refused(reader)).status == 501
    assert not wire.requests


async def test_connect_is_refused() -> None:
    async with relay() as (wire, proxy), connection(proxy.port) as (reader, writer):
        writer.write(b"CONNECT elsewhere:443 HTTP/1.1\r\nHost: elsewhere\r\n\r\n")
        assert (await refused(reader)).status == 501
    assert not wire.requests


# Time


@pytest.mark.parametrize("drip", [False, True])
async def test_the_time_for_a_head_is_bounded(drip: bool) -> None:
    clock = Clock(goes=True)
    async with (
        relay(head_timeout=60, clock=clock) as (_, proxy),
        connection(proxy.port) as (reader, writer),
    ):
        writer.write(GET)
        assert (await read_message(reader)).body == b"ok"
        clock.move(70)  # idle is nobody's head
        writer.write(b"GET / HTTP/1.1\r\nA: ")
        for _ in range(4):
            if drip:
                await say(writer, b"x")
            await heard(proxy.port)
            clock.move(16)
        reply = await refused(reader)
    assert reply.status == 408
    assert b"60 seconds" in reply.body


@pytest.mark.parametrize("target", [b"/v1/embeddings", b"/v1/chat/completions", b"/grep"])
@pytest.mark.parametrize("size", [100, GATHERED + 100])
async def test_the_time_for_a_body_without_progress_is_bounded(target: bytes, size: int) -> None:
    clock = Clock(goes=True)
    async with (
        relay(body_timeout=60, clock=clock) as (_, proxy),
        connection(proxy.port) as (reader, writer),
    ):
        writer.write(post(b"{", b"Authorization: Bearer k", target=target, size=size))
        await heard(proxy.port)
        clock.move(61)
        reply = await soon(read_message(reader))
        assert await soon(reader.read()) == b""
    assert (reply.status, reply.get(b"connection")) == (408, [b"close"])
    assert b"60 seconds" in reply.body


@pytest.mark.parametrize("size", [20, GATHERED + 20])
async def test_a_slow_but_steady_sender_is_served(size: int) -> None:
    body = bytes(size)
    clock = Clock(goes=True)
    limits = {"head_timeout": 60, "body_timeout": 60}
    async with (
        relay(clock=clock, **limits) as (wire, proxy),
        connection(proxy.port) as (reader, writer),
    ):
        writer.write(post(body[5:], size=size))
        await stalled(writer, proxy)  # it has taken all of that
        for _ in range(5):
            await say(writer, b"\0")
            await heard(proxy.port)
            clock.move(20)
        assert (await read_message(reader)).body == b"ok"
    assert wire.requests[0].body == body


async def test_a_slow_upstream_is_not_a_slow_client() -> None:
    """While it takes nothing of an upload, neither do we, and so nothing comes."""
    size = 40 << 20

    clock, go_on = Clock(goes=True), asyncio.Event()

    async def handle(peer: Peer) -> None:
        await peer.reader.readuntil(b"\r\n\r\n")
        await go_on.wait()
        await peer.reader.readexactly(size)
        await peer.send(OK)

    async with (
        relay(None, handle, body_timeout=60, clock=clock) as (wire, proxy),
        connection(proxy.port) as (reader, writer),
    ):
        writer.write(post(bytes(size)))
        await until(lambda: wire.connections)
        await stalled(writer, proxy)
        for _ in range(10):
            clock.move(20)
            await heard(proxy.port)
        go_on.set()
        assert (await soon(read_message(reader))).body == b"ok"


# Places and bytes


@pytest.mark.parametrize("target", [b"/v1/embeddings", b"/v1/chat/completions"])
async def test_slow_bodies_give_up_their_places(target: bytes) -> None:
    """As many as there are places, with keys that nobody knows; half of them would be uploads."""
    clock = Clock(goes=True)
    async with relay(clock=clock) as (_, proxy), AsyncExitStack() as held:
        for number in range(256):
            size = 100 if number % 2 else GATHERED + 100
            _, writer = await held.enter_async_context(connection(proxy.port))
            writer.write(post(b"{", b"Authorization: Bearer %d" % number, target=target, size=size))
        await heard(proxy.port)
        clock.move(2)
        replies = [
            await ask(proxy.port, post(b"{}", b"Authorization: Bearer honest", target=target))
            for _ in range(20)
        ]
    assert [reply.status for reply in replies] == [200] * 20


async def test_a_request_counts_from_its_head_on() -> None:
    """One caller's, too: it has a part of the places of `default.yaml`."""
    async with relay() as (_, proxy), AsyncExitStack() as held:
        for _ in range(64):
            _, writer = await held.enter_async_context(connection(proxy.port))
            writer.write(post(b"{", b"Authorization: Bearer one", size=100))
        await heard(proxy.port)
        async with connection(proxy.port) as (reader, writer):
            writer.write(post(b"{", b"Authorization: Bearer one", size=100))
            reply = await refused(reader)
        assert (reply.status, reply.get(b"retry-after")) == (503, [b"1"])
        assert b"One caller's requests are more than 64 at once" in reply.body
        assert (await ask(proxy.port, post(b"{}", b"Authorization: Bearer other"))).status == 200


async def test_uploads_take_a_share_of_the_places() -> None:
    async with (
        relay({"limits": {"concurrent_requests": 8}}) as (_, proxy),
        AsyncExitStack() as held,
    ):
        for _ in range(2):
            _, writer = await held.enter_async_context(connection(proxy.port))
            writer.write(post(b"{", size=GATHERED + 100))
        await heard(proxy.port)
        async with connection(proxy.port) as (reader, writer):
            writer.write(post(b"{", size=GATHERED + 100))
            reply = await refused(reader)
            assert (reply.status, reply.get(b"retry-after")) == (503, [b"1"])
        assert (await ask(proxy.port, GET)).status == 200


async def test_the_bytes_of_all_bodies_are_bounded_per_tenant() -> None:
    """Half of all for a tenant, and all the rest is the others'. What is refused can be sent
    again."""
    async with upstream(replying(OK)) as wire:
        policy: Json = {"upstream": {"base_url": wire.url + "/v1"}, "api_keys": [{"sha256": MANY}]}
        other = {**policy, "tenant": "other", "api_keys": [{"sha256": KNOWN}]}
        with served({"many": policy, "other": other}, buffered_limit=2_000_000) as proxy:
            async with AsyncExitStack() as held:
                held_writers = []
                for _ in range(9):
                    _, writer = await held.enter_async_context(connection(proxy.port))
                    writer.write(post(bytes(100_000), MANYS, size=200_000))
                    held_writers.append(writer)
                await heard(proxy.port)
                async with connection(proxy.port) as (reader, writer):
                    writer.write(post(bytes(300_000), MANYS))
                    reply = await soon(read_message(reader))
                assert (reply.status, reply.get(b"retry-after")) == (503, [b"1"])
                assert b"1000000 bytes" in reply.body and b"--buffered-limit" in reply.body
                assert (await ask(proxy.port, post(b"{}", MANYS))).status == 200
                again = post(bytes(300_000), b"Authorization: Bearer client")
                assert (await ask(proxy.port, again)).body == b"ok"
            await heard(proxy.port)
            assert (await ask(proxy.port, post(bytes(300_000), MANYS))).body == b"ok"
            for _ in range(10):
                assert (await ask(proxy.port, post(bytes(900_000), MANYS))).body == b"ok"


async def test_one_unknown_caller_has_a_small_share_of_the_bytes() -> None:
    """Of two million, an eighth. One body at a time may be larger, so that upstream can accept
    it."""
    async with relay(buffered_limit=2_000_000) as (_, proxy), AsyncExitStack() as held:
        one = b"Authorization: Bearer one"
        _, writer = await held.enter_async_context(connection(proxy.port))
        writer.write(post(bytes(300_000), one, size=300_001))
        await heard(proxy.port)
        async with connection(proxy.port) as (reader, other):
            other.write(post(bytes(2_000), one))
            reply = await soon(read_message(reader))
        assert reply.status == 503
        assert b"one caller's requests" in reply.body and b"250000 bytes" in reply.body
        assert (
            await ask(proxy.port, post(bytes(100_000), b"Authorization: Bearer other"))
        ).status == 200


async def test_an_endless_sender_makes_room_for_others() -> None:
    """At a byte now and then they are never silent for too long, and would hold all bytes for
    good."""
    clock = Clock(goes=True)
    limits = {"buffered_limit": 2_000_000, "body_timeout": 60}
    async with (
        relay({"api_keys": [{"sha256": MANY}]}, clock=clock, **limits) as (_, proxy),
        AsyncExitStack() as held,
    ):
        ends = [await held.enter_async_context(connection(proxy.port)) for _ in range(10)]
        for _, writer in ends:
            writer.write(post(bytes(99_990), MANYS, size=200_000))
        for _ in range(4):
            await heard(proxy.port)
            clock.move(20)
            for _, writer in ends:
                writer.write(b"x")
        await heard(proxy.port)
        assert (await ask(proxy.port, post(bytes(300_000), MANYS))).body == b"ok"
        for reader, _ in ends:
            assert (await soon(read_message(reader))).status == 503
            assert await soon(reader.read()) == b""


async def test_a_body_above_its_tenants_share_of_bytes_is_refused() -> None:
    async with relay({"api_keys": [{"sha256": KNOWN}]}, buffered_limit=1_000_000) as (wire, proxy):
        request = post(bytes(600_000), b"Authorization: Bearer client")
        reply = await ask(proxy.port, request)
        assert (reply.status, json.loads(reply.body)["error"]["code"]) == (503, "overloaded")
        assert (
            await ask(proxy.port, post(bytes(400_000), b"Authorization: Bearer client"))
        ).body == b"ok"
    assert len(wire.requests) == 1


# Replies


async def test_an_http_1_0_client_is_served() -> None:
    async def handle(peer: Peer) -> None:
        await peer.request()
        await peer.send(EVENTS, chunk(b"data: 1\n\n"), chunk(b"data: 2\n\n"), chunk(b""))

    async with relay(None, handle) as (_, proxy), connection(proxy.port) as (reader, writer):
        writer.write(
            GET.replace(b"1.1", b"1.0").replace(b"Host", b"Connection: keep-alive\r\nHost")
        )
        head, _, body = (await soon(reader.read())).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head and b"connection: close" in head
    assert body == b"data: 1\n\ndata: 2\n\n"


async def test_an_http_1_0_client_with_a_content_length_is_served() -> None:
    async with relay() as (_, proxy), connection(proxy.port) as (reader, writer):
        writer.write(GET.replace(b"1.1", b"1.0"))
        assert (await soon(reader.read())).endswith(b"connection: close\r\n\r\nok")


@pytest.mark.parametrize("reads", [False, True])
async def test_a_client_that_stops_reading_is_closed_after_a_timeout(reads: bool) -> None:
    clock, size = Clock(goes=True), 24 << 20

    async def handle(peer: Peer) -> None:
        await peer.request()
        try:
            await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
            for _ in range(24):
                await peer.send(bytes(1 << 20))
        finally:
            peer.upstream.left.set()

    async def reading() -> AsyncIterator[None]:
        for _ in range(8):
            await reader.readexactly(1 << 20)
            yield

    async def stopped() -> AsyncIterator[None]:
        while not wire.left.is_set():
            yield

    async with (
        relay(None, handle, clock=clock) as (wire, proxy),
        connection(proxy.port) as (reader, writer),
    ):
        writer.write(GET.replace(b"Host", b"Connection: close\r\nHost"))
        await soon(reader.readuntil(b"\r\n\r\n"))
        async for _ in reading() if reads else stopped():
            await heard(proxy.port)
            clock.move(UNREAD_SECONDS / 4)
        rest = len(await soon(reader_to_its_end(reader)))
    assert (rest == size - (8 << 20)) is reads


async def reader_to_its_end(reader: asyncio.StreamReader) -> bytes:
    said = b""
    with suppress(ConnectionError):
        while piece := await reader.read(1 << 20):
            said += piece
    return said


async def test_pipelined_requests_are_bounded() -> None:
    """Who sends more at once gets replies to the first, and is told by the end of the connection to
    ask again."""
    async with relay() as (wire, proxy), connection(proxy.port) as (reader, writer):
        writer.write(GET * 3000)
        said = await soon(reader.read())
    assert said.count(b"HTTP/1.1 200 OK") == len(wire.requests) < 3000
    assert len(wire.requests) >= PIPELINED
    assert said.endswith(b"ok") and said.count(b"connection: close") == 1


async def test_no_request_waits_for_the_garbage_collector() -> None:
    """A cycle of references in each request costs time, and keeps what it holds for as long as the
    collector waits."""
    chat = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}
    requests = (GET, post(b"body"), post(json.dumps(chat).encode(), target=b"/v1/chat/completions"))
    async with (
        relay({"offload": {"mode": "auto"}}) as (_, proxy),
        connection(proxy.port) as (reader, writer),
    ):
        gc.collect()
        kinds = RequestResponseCycle, Exchange
        # of other tests in this process
        before = [one for one in gc.get_objects() if type(one) in kinds]
        gc.disable()
        try:
            for request in requests * 20:
                writer.write(request)
                assert (await soon(read_message(reader))).status == 200
            left = [
                type(one) for one in gc.get_objects() if type(one) in kinds and one not in before
            ]
        finally:
            gc.enable()
    assert len(left) <= 2, left  # the connection's last


@needs_proc
async def test_the_proxy_survives_running_out_of_file_descriptors() -> None:
    with spawned(flags=["--log-format=full"]) as proxy:
        assert proxy.process
        pid = proxy.process.pid
        health = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
        assert (await ask(proxy.port, health)).status == 200
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        used = max(int(path.name) for path in Path(f"/proc/{pid}/fd").iterdir()) + 1  # noqa: ASYNC240
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (used + 4, before[1]))
        async with AsyncExitStack() as held:
            reader, writer = await held.enter_async_context(connection(proxy.port))
            for _ in range(20):
                await held.enter_async_context(connection(proxy.port))
            for _ in range(3):
                writer.write(health)
                assert (await soon(read_message(reader))).status == 200  # who is there is served on

        async def served_again() -> bool:
            with suppress(OSError, asyncio.IncompleteReadError):
                return (await ask(proxy.port, health)).status == 200
            return False

        await until(served_again)
