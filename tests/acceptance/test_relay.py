"""The relay through the real server, between raw sockets: what goes in comes out, in both
directions."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from proxy.policy import Upstream
from proxy.requests.relay import GATHERED
from tests.clock import PATIENCE, Clock, soon, until
from tests.ports import free_port
from tests.serving import served, spawned
from tests.wire import (
    EVENTS,
    OK,
    Handler,
    Message,
    Peer,
    Wire,
    ask,
    chunk,
    chunks,
    connection,
    heard,
    read_head,
    read_message,
    replying,
    upstream,
)

Json = dict[str, Any]


class Shared:
    """A proxy that most tests share, because starting one takes longer than a test."""

    def __init__(self, port: int, upstream_port: int) -> None:
        self.port = port
        self._upstream_port = upstream_port

    @asynccontextmanager
    async def relay(self, handler: Handler) -> AsyncIterator[Link]:
        """Give the shared proxy this upstream while the block runs."""
        async with upstream(handler, port=self._upstream_port) as wire:
            yield Link(wire, self.port)


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    port = free_port()
    policy = {"upstream": {"base_url": f"http://127.0.0.1:{port}/v1"}, "offload": {"mode": "off"}}
    with served({"default": policy}) as proxy:
        yield Shared(proxy.port, port)


@asynccontextmanager
async def relay(
    handler: Handler, upstream_options: Json | None = None, **settings: Any
) -> AsyncIterator[Link]:
    """Run an upstream and a new proxy in front of it."""
    async with upstream(handler) as wire:
        policy = {
            "upstream": {"base_url": wire.url + "/v1", **(upstream_options or {})},
            "offload": {"mode": "off"},
        }
        with served({"default": policy}, **settings) as proxy:
            yield Link(wire, proxy.port)


class Link:
    def __init__(self, wire: Wire, port: int) -> None:
        self.wire = wire
        self.port = port

    async def ask(self, request: bytes, **options: Any) -> Message:
        return await ask(self.port, request, **options)

    async def counts(self, name: str) -> None:
        """Returns when this metric is 1, which is soon after the reply."""

        async def counted() -> bool:
            return f"\n{name} 1.0\n".encode() in (await self.ask(get("/metrics"))).body

        await until(counted)


def get(target: str, *headers: str) -> bytes:
    return "\r\n".join([f"GET {target} HTTP/1.1", "Host: localhost", *headers, "", ""]).encode()


def post(body: bytes, *headers: str, target: str = "/v1/embeddings") -> bytes:
    lines = [
        f"POST {target} HTTP/1.1",
        "Host: localhost",
        *headers,
        f"Content-Length: {len(body)}",
        "",
        "",
    ]
    return "\r\n".join(lines).encode() + body


def error_of(reply: Message) -> Json:
    assert reply.get(b"content-type") == [b"application/json"]
    assert reply.get(b"x-request-id")
    error: Json = json.loads(reply.body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


# What goes in comes out


@pytest.mark.parametrize(
    ("asked", "gets"),
    [
        ("/v1/models", "/v1/models"),
        ("/v1/models?", "/v1/models"),
        ("/v1", "/v1"),
        ("/v1?", "/v1"),
        ("/v1/a%2Fb%2fc", "/v1/a%2Fb%2fc"),
        ("/v1//a///b/", "/v1//a///b/"),
        ('/v1/a|b"c{d}^e`f\\', '/v1/a|b"c{d}^e`f\\'),
        ("/v1/%zz?a=%20+&a=&&b=1?2/3;[x]={y}|'", "/v1/%zz?a=%20+&a=&&b=1?2/3;[x]={y}|'"),
        ("/v1/;p=1/~u/!$&'()*,@:", "/v1/;p=1/~u/!$&'()*,@:"),
        ("/v1beta/models/x:generate", "/v1beta/models/x:generate"),
        (
            "/openai/deployments/d/embeddings?api-version=1",
            "/openai/deployments/d/embeddings?api-version=1",
        ),
        ("//v1/x", "//v1/x"),
        ("/", "/"),
        ("http://localhost:1/v1/x?q=%2f", "/v1/x?q=%2f"),
    ],
)
async def test_request_targets_are_relayed_exactly(shared: Shared, asked: str, gets: str) -> None:
    async with shared.relay(replying(OK)) as link:
        assert (await link.ask(get(asked))).body == b"ok"
    assert link.wire.requests[0].target == gets.encode()


async def test_request_headers_are_relayed(shared: Shared) -> None:
    kept = [
        "X-Same: 1",
        "X-Other: a",
        "X-Same: 2",
        "authorization: Bearer k",
        "X-Utf8: ☃",
        "X-Empty: ",
        "COOKIE: a=1",
    ]
    dropped = [
        "Connection: keep-alive, X-Hop",
        "x-hop: 1",
        "TE: trailers",
        "Keep-Alive: 1",
        "X-Offload: off",
    ]
    async with shared.relay(replying(OK)) as link:
        await link.ask(get("/v1/models", *kept, *dropped))
        host = (b"Host", b"127.0.0.1:%d" % link.wire.port)
    lines = [line.encode().split(b": ", 1) for line in kept]
    expected = [(name.lower(), value) for name, value in lines]
    assert link.wire.requests[0].headers == [host, *expected]


async def test_reply_headers_are_relayed(shared: Shared) -> None:
    kept = [
        (b"set-cookie", b"a=1"),
        (b"x-b", b"\xe9"),
        (b"set-cookie", b"b=2"),
        (b"content-length", b"2"),
        (b"date", b"d"),
    ]
    head = (
        b"HTTP/1.1 200 OK\r\nConnection: keep-alive, X-Hop\r\nX-Hop: 1\r\nKeep-Alive: timeout=5\r\n"
    )
    async with shared.relay(
        replying(head + b"".join(b"%s: %s\r\n" % pair for pair in kept) + b"\r\nok")
    ) as link:
        reply = await link.ask(get("/v1/models"))
    assert (reply.headers, reply.body) == (kept, b"ok")


BODIES = [
    b'{"a":  1e400,\n"b": 123456789012345678901234, "\\u0061": "\\ud800"}',
    gzip.compress(b"x" * 1000),
    bytes(range(256)),
]


@pytest.mark.parametrize("body", BODIES, ids=["json", "gzip", "binary"])
@pytest.mark.parametrize(
    "path", ["/v1/embeddings", "/v1/chat/completions", "/openai/deployments/d/chat/completions"]
)
async def test_bodies_are_relayed_byte_for_byte(shared: Shared, body: bytes, path: str) -> None:
    reply = (
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(body)
        + body
    )
    async with shared.relay(replying(reply)) as link:
        got = await link.ask(post(body, "Content-Encoding: gzip", target=path))
    asked = link.wire.requests[0]
    assert asked.body == body == got.body
    assert asked.get(b"content-length") == got.get(b"content-length") == [b"%d" % len(body)]
    assert asked.get(b"content-encoding") == got.get(b"content-encoding") == [b"gzip"]
    assert not asked.get(b"transfer-encoding")


async def test_chunked_requests_are_relayed(shared: Shared) -> None:
    head = b"PUT /v1/x HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with shared.relay(replying(OK)) as link:
        await link.ask(head + chunk(b"one,") + chunk(b"two") + b"0\r\nX-Trailer: 1\r\n\r\n")
        await link.ask(head + chunk(b""))
    first, second = link.wire.requests
    assert (first.line, first.body) == (b"PUT /v1/x HTTP/1.1", b"one,two")
    assert second.body == b""


async def test_a_request_without_a_body_is_relayed_without_one(shared: Shared) -> None:
    async with shared.relay(replying(OK)) as link:
        for method in (b"GET", b"DELETE", b"OPTIONS"):
            await link.ask(method + b" /v1/files/f HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert [asked.line.split()[0] for asked in link.wire.requests] == [
        b"GET",
        b"DELETE",
        b"OPTIONS",
    ]
    assert not any(asked.get(b"transfer-encoding") for asked in link.wire.requests)
    assert [asked.get(b"content-length") for asked in link.wire.requests] == [[], [b"0"], []]


async def test_expect_100_continue_is_answered(shared: Shared) -> None:
    async with shared.relay(replying(OK)) as link, connection(link.port) as (reader, writer):
        writer.write(
            b"POST /v1/x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n"
        )
        assert (await read_head(reader)).status == 100
        writer.write(b"abc")
        assert (await read_message(reader)).body == b"ok"
    assert link.wire.requests[0].body == b"abc"
    assert not link.wire.requests[0].get(b"expect")


@pytest.mark.parametrize(
    ("method", "reply", "status", "length"),
    [
        ("HEAD", b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n", 200, [b"1000"]),
        ("GET", b"HTTP/1.1 204 No Content\r\n\r\n", 204, []),
        ("GET", b"HTTP/1.1 204 No Content\r\nContent-Length: 5\r\n\r\n", 204, []),
        ("GET", b'HTTP/1.1 304 Not Modified\r\nETag: "e"\r\nContent-Length: 1000\r\n\r\n', 304, []),
        ("GET", b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + OK, 200, [b"2"]),
    ],
)
async def test_unusual_replies_are_relayed(
    shared: Shared, method: str, reply: bytes, status: int, length: list[bytes]
) -> None:
    async with shared.relay(replying(reply)) as link, connection(link.port) as (reader, writer):
        for _ in range(2):
            writer.write(f"{method} /v1/x HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            got = await read_message(reader, bodiless=status != 200 or method == "HEAD")
            assert (got.status, got.get(b"content-length")) == (status, length)
            assert not got.get(b"transfer-encoding")


@pytest.mark.parametrize("status", [302, 400, 401, 404, 429, 500, 503, 529])
async def test_upstream_errors_are_relayed_as_they_came(shared: Shared, status: int) -> None:
    body = b'{"error": {"message": "no",  "odd": 1.0}}\n'
    head = b"HTTP/1.1 %d X\r\nRetry-After: 7\r\nLocation: /x\r\nX-Request-Id: r\r\nContent-Length: %d\r\n\r\n"
    async with shared.relay(replying(head % (status, len(body)) + body)) as link:
        reply = await link.ask(post(b"{}"))
    assert (reply.status, reply.body) == (status, body)
    assert (reply.get(b"retry-after"), reply.get(b"x-request-id"), reply.get(b"location")) == (
        [b"7"],
        [b"r"],
        [b"/x"],
    )


@pytest.mark.parametrize("status", [201, 301, 307, 308])
@pytest.mark.parametrize("path", ["/v1/models", "/v1/chat/completions"])
async def test_a_redirect_of_upstreams_to_itself_leads_through_us(
    shared: Shared, status: int, path: str
) -> None:
    """FastAPI names itself by the host that it was asked for (letta-ai/letta#3189)."""

    async def redirecting(peer: Peer) -> None:
        asked = await peer.request()
        location = b"http://%b%b/?x=1" % (asked.get(b"host")[0], asked.target)
        head = b"HTTP/1.1 %d Moved\r\nLocation: %b\r\nContent-Length: 0\r\n\r\n"
        await peer.send(head % (status, location))

    method = "GET" if path.endswith("models") else "POST"
    question = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n"
    async with shared.relay(redirecting) as link:
        reply = await ask(link.port, question.encode())
    assert reply.status == status and reply.get(b"location") == [f"{path}/?x=1".encode()]


async def test_pipelined_requests_are_answered_in_order(shared: Shared) -> None:
    async with shared.relay(replying(OK)) as link, connection(link.port) as (reader, writer):
        writer.write(b"".join(post(b"%d" % n) for n in range(20)))
        assert [(await read_message(reader)).body for _ in range(20)] == [b"ok"] * 20
    assert [asked.body for asked in link.wire.requests] == [b"%d" % n for n in range(20)]
    assert link.wire.connections == 1


# As it arrives


async def test_streamed_chunks_arrive_one_by_one(shared: Shared) -> None:
    seen = asyncio.Event()

    async def handle(peer: Peer) -> None:
        await peer.request()
        await peer.send(EVENTS)
        for n in range(3):
            await peer.send(chunk(b"data: %d\n\n" % n))
            await soon(seen.wait())
            seen.clear()
        await peer.send(chunk(b""))

    async with shared.relay(handle) as link, connection(link.port) as (reader, writer):
        writer.write(post(b"{}"))
        assert (await read_head(reader)).get(b"content-type") == [b"text/event-stream"]
        got = []
        async for piece in chunks(reader):
            got.append(piece)
            seen.set()
    assert got == [b"data: 0\n\n", b"data: 1\n\n", b"data: 2\n\n"]


async def test_an_upload_arrives_as_it_is_sent(shared: Shared) -> None:
    """This holds above GATHERED bytes. The proxy collects a smaller body first."""
    arrived = asyncio.Event()
    second = bytes(GATHERED)

    async def handle(peer: Peer) -> None:
        await peer.reader.readuntil(b"first")
        arrived.set()
        await peer.reader.readexactly(len(second))
        await peer.send(OK)

    async with shared.relay(handle) as link, connection(link.port) as (reader, writer):
        writer.write(
            b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\nfirst"
            % (5 + len(second))
        )
        await soon(arrived.wait())
        writer.write(second)
        assert (await read_message(reader)).body == b"ok"


async def test_upstream_refuses_an_upload_before_its_end(shared: Shared) -> None:
    async def handle(peer: Peer) -> None:
        await read_head(peer.reader)
        await peer.send(b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nbig")
        await peer.gone()

    async with shared.relay(handle) as link, connection(link.port) as (reader, writer):
        writer.write(
            b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10000000\r\n\r\nbegins"
        )
        reply = await soon(read_message(reader))
    assert (reply.status, reply.body) == (413, b"big")


@pytest.mark.parametrize("target", ["/v1/responses", "/v1/embeddings"])
@pytest.mark.parametrize(
    "reply", [OK, EVENTS + chunk(b"data: 1\n\n") + chunk(b"")], ids=["whole", "stream"]
)
async def test_an_upstream_that_closes_idle_connections_without_a_word(
    shared: Shared, target: str, reply: bytes
) -> None:
    """Each of its connections carries one request, and looks as if it could carry another."""

    async def once(peer: Peer) -> None:
        await peer.request()
        await peer.send(reply)
        await peer.reader.read(1)

    async with shared.relay(once) as link:
        for _ in range(2):
            asked = [link.ask(post(b"{}", target=target)) for _ in range(20)]
            assert {answer.status for answer in await asyncio.gather(*asked)} == {200}
            assert (await link.ask(post(b"{}", target=target))).status == 200
        assert len(link.wire.requests) == 42


def resident(pid: int) -> int:
    """Return the most memory that a process has used, in bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found
    return int(found[1]) * 1024


needs_proc = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
PART = bytes(1 << 20)


@needs_proc
async def test_uploads_are_not_collected() -> None:
    async def handle(peer: Peer) -> None:
        head = await read_head(peer.reader)
        left = int(head.get(b"content-length")[0])
        while left:
            left -= len(await peer.reader.readexactly(min(left, len(PART))))
        await peer.send(OK)

    async with upstream(handle) as wire:
        with await asyncio.to_thread(lambda: spawned(flags=[f"--upstream={wire.url}"])) as proxy:
            assert proxy.process
            assert (await ask(proxy.port, post(PART, target="/v1/files"))).status == 200
            before = resident(proxy.process.pid)
            async with connection(proxy.port) as (reader, writer):
                writer.write(
                    b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
                    % (40 << 20)
                )
                for _ in range(40):
                    writer.write(PART)
                    await writer.drain()
                assert (await read_message(reader)).body == b"ok"
            assert resident(proxy.process.pid) - before < 16 << 20


@needs_proc
async def test_a_slow_reader_does_not_fill_the_memory() -> None:
    written = 0

    async def handle(peer: Peer) -> None:
        nonlocal written
        await peer.request()
        await peer.send(EVENTS)
        for _ in range(80):
            await peer.send(chunk(PART))
            written += len(PART)
        await peer.send(chunk(b""))

    async with upstream(handle) as wire:
        with await asyncio.to_thread(lambda: spawned(flags=[f"--upstream={wire.url}"])) as proxy:
            assert proxy.process
            before = resident(proxy.process.pid)
            async with connection(proxy.port) as (reader, writer):
                writer.write(get("/v1/files/f/content"))
                await read_head(reader)
                await until(lambda: written)
                before_that = 0
                while written > before_that:
                    before_that = written
                    await heard(proxy.port)
                assert written < 40 << 20
                assert sum([len(piece) async for piece in chunks(reader)]) == 80 << 20
            assert resident(proxy.process.pid) - before < 16 << 20


# Who has gone


async def began(peer: Peer) -> None:
    await peer.request()
    await peer.send(EVENTS, chunk(b"data: 1\n\n"))
    await peer.gone()
    peer.upstream.left.set()


async def mute(peer: Peer) -> None:
    await peer.request()
    await peer.gone()
    peer.upstream.left.set()


async def taking(peer: Peer) -> None:
    await read_head(peer.reader)
    await peer.gone()
    peer.upstream.left.set()


@pytest.mark.parametrize("abruptly", [False, True])
@pytest.mark.parametrize(
    ("handler", "request_", "sees"),
    [
        (mute, post(b"{}"), b""),
        (began, post(b"{}"), b"data: 1"),
        (
            taking,
            b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9000000\r\n\r\nabc",
            b"",
        ),
        (
            taking,
            b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
            + chunk(bytes(GATHERED + 1)),
            b"",
        ),
    ],
    ids=["waiting", "streaming", "uploading", "uploading chunks"],
)
async def test_client_gone_closes_upstream(
    handler: Handler, request_: bytes, sees: bytes, abruptly: bool
) -> None:
    async with relay(handler) as link:
        async with connection(link.port) as (reader, writer):
            writer.write(request_)
            if sees:
                await reader.readuntil(sees)
            await until(lambda: link.wire.connections)
            await heard(link.port)
            if abruptly:
                writer.transport.abort()
        await soon(link.wire.left.wait())
        await link.counts('offload_request_errors_total{fault="client_gone",tenant="default"}')


async def test_a_client_is_heard_to_go_although_much_of_its_body_came_at_once() -> None:
    async with relay(mute) as link:
        async with connection(link.port) as (_, writer):
            whole = post(b" " * 600_000)
            writer.write(whole[:1000])
            # the server waits for the rest, and stops reading with what comes
            await heard(link.port)
            writer.write(whole[1000:])
            await until(lambda: link.wire.requests)
        await soon(link.wire.left.wait())


async def test_a_silent_upstream_is_504() -> None:
    clock = Clock(goes=True)
    async with relay(mute, first_byte_timeout=60, clock=clock) as link:
        asking = asyncio.create_task(link.ask(post(b"{}")))
        await until(lambda: link.wire.requests)
        clock.move(PATIENCE + Upstream().connect_timeout)
        reply = await soon(asking)
        await soon(link.wire.left.wait())
    assert reply.status == 504
    assert error_of(reply)["code"] == "upstream_timeout"


async def breaking(peer: Peer) -> None:
    await peer.request()
    await peer.send(EVENTS, chunk(b"data: 1\n\n"))


@pytest.mark.parametrize(("handler", "fault"), [(began, "timeout"), (breaking, "broken")])
async def test_a_broken_stream_reaches_the_client_as_broken(handler: Handler, fault: str) -> None:
    clock = Clock(goes=True)
    async with relay(handler, {"idle_timeout": 60}, clock=clock) as link:
        async with connection(link.port) as (reader, writer):
            writer.write(post(b"{}"))
            await read_head(reader)
            got = chunks(reader)
            assert await anext(got) == b"data: 1\n\n"
            if fault == "timeout":
                await heard(link.port)  # so that it waits for the next event
                clock.move(61)
            with pytest.raises(asyncio.IncompleteReadError):
                await anext(got)
        await link.counts(f'offload_request_errors_total{{fault="{fault}",tenant="default"}}')


async def test_a_truncated_reply_reaches_the_client_as_truncated(shared: Shared) -> None:
    async def short(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc")

    async with shared.relay(short) as link:
        with pytest.raises(asyncio.IncompleteReadError) as cut:
            await link.ask(get("/v1/models"))
    assert cut.value.partial == b"abc"


@pytest.mark.parametrize(
    "reply",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX-A: a\x01b\r\nContent-Length: 2\r\n\r\nok",
    ],
)
@pytest.mark.parametrize("target", ["/v1/files", "/v1/chat/completions"])
async def test_an_upstream_that_does_not_speak_http_is_502(
    shared: Shared, reply: bytes, target: str
) -> None:
    async with shared.relay(replying(reply)) as link, connection(link.port) as (reader, writer):
        for _ in range(2):
            writer.write(post(b"{}", target=target))
            got = await read_message(reader)
            assert (got.status, error_of(got)["code"]) == (502, "upstream_broken")


# Who may


async def test_paths_of_the_proxy_are_never_relayed(shared: Shared) -> None:
    async with shared.relay(replying(OK)) as link:
        for target, status in (
            ("/health", 200),
            ("/_offload/x", 404),
            ("/_offload/chat/completions", 404),
        ):
            reply = await link.ask(get(target))
            assert reply.status == status
        assert json.loads(reply.body)["error"]["type"] == "invalid_request_error"
        assert (await link.ask(post(b"", target="/health"))).status == 405
    assert not link.wire.requests


async def test_tenants_are_told_apart_by_key() -> None:
    """The tenant's key replaces the client's and allows inference only. Strangers are refused."""
    async with upstream(replying(OK)) as wire:
        acme = {
            "tenant": "acme",
            # SHA-256 of "client"
            "api_keys": [
                {"sha256": "948fe603f61dc036b5c596dc09fe3ce3f3d30dc90f024c85f3c82db2ccab679d"}
            ],
            "upstream": {"base_url": wire.url, "api_key": "tenants"},
        }
        with served({"acme": acme}) as proxy:
            stranger = await ask(proxy.port, get("/v1/models", "Authorization: Bearer other"))
            known = ["Authorization: Bearer client", "Cookie: a=1", "X-A: 1"]
            models = await ask(proxy.port, get("/v1/models", *known))
            files = await ask(proxy.port, get("/v1/files", *known))
    assert (stranger.status, error_of(stranger)["code"]) == (401, "invalid_api_key")
    assert models.status == 200
    assert (files.status, error_of(files)["code"]) == (403, "path_not_allowed")
    [asked] = wire.requests
    assert asked.headers[1:] == [(b"x-a", b"1"), (b"authorization", b"Bearer tenants")]


async def test_too_many_concurrent_requests_are_503() -> None:
    let_go = asyncio.Event()

    async def hold(peer: Peer) -> None:
        await peer.request()
        await soon(let_go.wait())
        await peer.send(OK)

    async with upstream(hold) as wire:
        policy = {"upstream": {"base_url": wire.url}, "limits": {"concurrent_requests": 2}}
        with served({"default": policy}) as proxy:
            held = [asyncio.create_task(ask(proxy.port, post(b"{}"))) for _ in range(2)]
            await until(lambda: len(wire.requests) == 2)
            reply = await ask(proxy.port, post(b"{}"))
            let_go.set()
            assert [(await one).status for one in held] == [200, 200]
            assert (await ask(proxy.port, post(b"{}"))).status == 200
    assert reply.status == 503
    assert reply.get(b"retry-after") == [b"1"]
    assert error_of(reply)["code"] == "overloaded"


async def test_a_chat_request_has_a_size() -> None:
    """The relay holds no body of more than a little, and so knows no limit."""
    chunked = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with relay(replying(OK), body_limit=10) as link:
        announced = await link.ask(post(b"x" * 11, target="/v1/chat/completions"))
        streamed = await link.ask(chunked + chunk(b"x" * 5) + chunk(b"x" * 6))
        assert (await link.ask(post(b"x" * 11))).status == 200
    for reply in (announced, streamed):
        assert (reply.status, error_of(reply)["code"]) == (413, "request_too_large")
    assert len(link.wire.requests) == 1


async def test_tenants_do_not_learn_where_upstream_is_and_operators_do() -> None:
    port = free_port()
    policy = {"upstream": {"base_url": f"http://127.0.0.1:{port}/v1"}}
    with spawned({"default": policy}) as proxy:
        for path in (b"/v1/models", b"/v1/chat/completions"):
            head = (
                b"POST %b HTTP/1.1\r\nHost: localhost\r\nVia: 1.1 front\r\nContent-Length: 2\r\n\r\n"
                % path
            )
            reply = await ask(proxy.port, head + b"{}")
            assert reply.status == 502
            said = b" ".join([*(value for _, value in reply.headers), reply.body])
            assert str(port).encode() not in said and b"127.0.0.1" not in said
        await until(lambda: proxy.log().count("request_id") == 2)
        lines = [json.loads(one) for one in proxy.log().splitlines() if "request_id" in one]
    assert [line["fault"] for line in lines] == ["connect", "connect"]
    assert all(line["detail"] == f"connection refused at 127.0.0.1:{port}" for line in lines)
