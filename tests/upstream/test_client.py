"""The upstream client against sockets that say exactly what they got."""

from __future__ import annotations

import asyncio
import base64
import gzip
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest

from proxy.errors import (
    ClientFault,
    UpstreamBroken,
    UpstreamFault,
    UpstreamSilent,
    UpstreamUnreachable,
    UserMistake,
)
from proxy.settings import Settings
from proxy.upstream import client
from proxy.upstream.client import (
    CLOSING,
    ModelList,
    UpstreamClient,
    UpstreamReply,
    UpstreamRequest,
    certificates,
    decoded_reply,
    models,
)
from proxy.upstream.headers import Headers
from tests.clock import PATIENCE, Clock, soon, still, turns, until
from tests.wire import EVENTS, OK, Peer, chunk, replying, upstream

T = TypeVar("T")


@pytest.fixture
async def pool(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[UpstreamClient]:
    monkeypatch.setattr(client, "_STALE_WITHIN", PATIENCE)
    async with UpstreamClient(Settings()) as pool:
        yield pool


def request(url: str, **changes: Any) -> UpstreamRequest:
    asked: dict[str, Any] = {
        "method": "POST",
        "url": url,
        "headers": [],
        "content": b"",
        "connect_timeout": PATIENCE,
        "first_byte_timeout": PATIENCE,
        "idle_timeout": PATIENCE,
    }
    asked |= changes
    return UpstreamRequest(**asked | {"headers": Headers(asked["headers"])})


@asynccontextmanager
async def sent(pool: UpstreamClient, url: str, **changes: Any) -> AsyncIterator[UpstreamReply]:
    async with aclosing(await pool.send(request(url, **changes))) as reply:
        yield reply


async def body(pool: UpstreamClient, url: str, **changes: Any) -> bytes:
    async with sent(pool, url, **changes) as reply:
        return b"".join([piece async for piece in reply])


async def stream(*pieces: bytes) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


# What goes out


async def test_a_query_may_stand_behind_the_authority(pool: UpstreamClient) -> None:
    async with upstream(replying(OK)) as wire:
        for query in ("?", "?a=1", "?a=/b@c:1/"):
            assert await body(pool, wire.url + query) == b"ok"
    assert [asked.target for asked in wire.requests] == [b"/", b"/?a=1", b"/?a=/b@c:1/"]
    assert wire.connections == 1


@pytest.mark.parametrize("header", [(b"X", b"\xff\xfe"), (b"X", b"a\x01b"), (b"X", b"a\r\nY: b")])
async def test_headers_that_cannot_be_sent_are_refused(
    pool: UpstreamClient, header: tuple[bytes, bytes]
) -> None:
    async with upstream(replying(OK)) as wire:
        with pytest.raises(ClientFault, match="characters"):
            await pool.send(request(wire.url, headers=[header]))
    assert not wire.requests


@pytest.mark.parametrize(
    ("content", "headers", "framing"),
    [
        (b"abcdef", [], (b"Content-Length", b"6")),
        (b"abcdef", [(b"content-length", b"6")], (b"content-length", b"6")),
        (("abc", "def"), [(b"content-length", b"6")], (b"content-length", b"6")),
        (("abc", "def"), [], (b"Transfer-Encoding", b"chunked")),
        (
            ("abc", "def"),
            [(b"content-length", b"6"), (b"X-Mode", b"chunked")],
            (b"content-length", b"6"),
        ),
        (("abc", "def"), [(b"X-Mode", b"chunked")], (b"Transfer-Encoding", b"chunked")),
    ],
)
async def test_bodies(
    pool: UpstreamClient, content: Any, headers: Any, framing: tuple[bytes, bytes]
) -> None:
    content = (
        content if isinstance(content, bytes) else stream(*(part.encode() for part in content))
    )
    async with upstream(replying(OK)) as wire:
        await body(pool, wire.url, headers=headers, content=content)
    asked = wire.requests[0]
    says = [
        header
        for header in asked.headers
        if header[0].lower() in (b"content-length", b"transfer-encoding")
    ]
    assert (asked.body, says) == (b"abcdef", [framing])


async def test_a_body_that_breaks_off_ends_the_request(pool: UpstreamClient) -> None:
    async def content() -> AsyncIterator[bytes]:
        yield b"first"
        raise LookupError("there is no second")

    async with upstream(replying(OK)) as wire:
        with pytest.raises(UpstreamBroken) as broken:
            await pool.send(request(wire.url, content=content()))
    assert "no second" in broken.value.detail
    assert not wire.requests


async def test_a_connection_that_still_has_to_send_is_not_used_again(pool: UpstreamClient) -> None:
    async def early(peer: Peer) -> None:
        await peer.reader.readuntil(b"\r\n\r\n")
        await peer.send(OK)
        await asyncio.Event().wait()

    async with upstream(early) as wire:
        for content in (b"x" * (32 << 20), b"small"):
            assert await soon(body(pool, wire.url, method="POST", content=content)) == b"ok"
        assert wire.connections == 2


# What comes back


async def test_nothing_is_kept_but_the_connection(pool: UpstreamClient) -> None:
    reply = b"HTTP/1.1 302 Found\r\nLocation: /elsewhere\r\nSet-Cookie: a=1; Path=/\r\nContent-Length: 0\r\n\r\n"
    async with upstream(replying(reply)) as wire:
        for _ in range(3):
            async with sent(pool, wire.url, method="GET") as got:
                assert got.status == 302
    assert [asked.target for asked in wire.requests] == [b"/"] * 3
    assert not any(asked.get(b"cookie") for asked in wire.requests)
    assert wire.connections == 1


@pytest.mark.parametrize(
    ("method", "reply", "status"),
    [
        ("HEAD", b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n", 200),
        ("GET", b"HTTP/1.1 204 No Content\r\n\r\n", 204),
        ("GET", b"HTTP/1.1 304 Not Modified\r\nContent-Length: 1000\r\n\r\n", 304),
        (
            "POST",
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + OK,
            200,
        ),
        ("GET", b"HTTP/1.1 299\r\nContent-Length: 0\r\n\r\n", 299),
        ("GET", b"HTTP/1.1 999 What\r\nContent-Length: 2\r\n\r\nok", 999),
    ],
)
async def test_replies_without_the_usual(
    pool: UpstreamClient, method: str, reply: bytes, status: int
) -> None:
    async with upstream(replying(reply)) as wire:
        for _ in range(2):
            async with sent(pool, wire.url, method=method) as got:
                assert got.status == status
                assert not any(name.lower() == b"link" for name, _ in got.headers)
                assert b"".join([piece async for piece in got]) in (b"", b"ok")
    assert wire.connections == 1


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\nall of it", b"all of it"),  # ends with the connection
        (EVENTS + chunk(b"x") + b"0\r\nX-Sum: 1\r\n\r\n", b"x"),  # and trailers are ignored
    ],
)
async def test_bodies_without_a_length(pool: UpstreamClient, reply: bytes, expected: bytes) -> None:
    async def handle(peer: Peer) -> None:
        await peer.request()
        await peer.send(reply)

    async with upstream(handle) as wire:
        assert await body(pool, wire.url) == expected


async def test_heads_of_gateways_are_large(pool: UpstreamClient) -> None:
    many = b"".join(b"X-%d: %s\r\n" % (n, b"v" * 100) for n in range(300)) + b"X: " + b"v" * 60_000
    head = b"HTTP/1.1 200 OK\r\n" + many + b"\r\nContent-Length: 0\r\n\r\n"
    async with upstream(replying(head)) as wire, sent(pool, wire.url) as reply:
        assert len(reply.headers) == 302


PACKED = gzip.compress(b"data: 1\n\n")
BODIES = {
    "in spite of identity": (b"gzip", PACKED),
    "a coding that is none": (b"UTF-8", b"data: 1\n\n"),  # ignored, as by every client
    "none and gzip": (b"none, gzip", PACKED),
    "plain": (b"gzip", b"plain"),
}


@pytest.mark.parametrize(("coding", "sent_as"), BODIES.values(), ids=BODIES)
async def test_decoded_undoes_what_upstream_does_or_says_whose_fault_it_is(
    pool: UpstreamClient, coding: bytes, sent_as: bytes
) -> None:
    reply = (
        b"HTTP/1.1 200 OK\r\nContent-Encoding: %b\r\nContent-Length: %d\r\n\r\n"
        % (coding, len(sent_as))
        + sent_as
    )
    async with upstream(replying(reply)) as wire, sent(pool, wire.url) as got:
        if sent_as == b"plain":
            with pytest.raises(UpstreamBroken, match="decoded"):
                await anext(decoded_reply(got))
        else:
            assert b"".join([piece async for piece in decoded_reply(got)]) == b"data: 1\n\n"


async def test_few_of_many_small_chunks_wait_for_a_slow_reader(pool: UpstreamClient) -> None:
    number = 200_000

    async def handle(peer: Peer) -> None:
        await peer.request()
        await peer.send(EVENTS, chunk(b"x") * number, chunk(b""))

    async with upstream(handle) as wire, sent(pool, wire.url) as reply:
        await turns()
        sizes = []
        async for piece in reply:
            sizes.append(len(piece))
            await turns(10)
    assert sum(sizes) == number
    assert max(sizes) < number / 10


# What goes wrong


async def test_who_cannot_be_reached(pool: UpstreamClient) -> None:
    async with upstream(replying(OK)) as wire:
        pass
    refusal = f"connection refused at 127.0.0.1:{wire.port}"
    for url, detail in (
        (wire.url, refusal),
        ("http://nowhere.invalid/v1", "http://nowhere.invalid: "),
    ):
        with pytest.raises(UpstreamUnreachable, match=r"^Upstream cannot be reached$") as refused:
            await pool.send(request(url))
        assert refused.value.detail.startswith(detail)


HEAD = b"HTTP/1.1 200 OK\r\n"
BROKEN = {
    "a control character in a header": HEAD + b"X-A: a\x01b\r\nContent-Length: 2\r\n\r\nok",
    "DEL in a header": HEAD + b"X-A: a\x7fb\r\nContent-Length: 2\r\n\r\nok",
    "NUL in a header": HEAD + b"X-A: a\x00b\r\nContent-Length: 2\r\n\r\nok",
    "a bare CR in a header": HEAD + b"X-A: a\rb\r\nContent-Length: 2\r\n\r\nok",
    "a name that is none": HEAD + b"X\x01A: b\r\nContent-Length: 2\r\n\r\nok",
    "a header without an end": HEAD
    + b"X-A: "
    + b"a" * (1 << 20)
    + b"\r\nContent-Length: 2\r\n\r\nok",
    "too many headers": HEAD + b"X-A: a\r\n" * 5_000 + b"Content-Length: 2\r\n\r\nok",
    "no status line": b"<html>10.1.2.3:8000 says no</html>\r\n\r\n",
    "a length that is none": HEAD + b"Content-Length: two\r\n\r\nok",
    "two lengths": HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\nok",
    "a length and chunks": HEAD
    + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
    "a chunk's size that is none": HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nok\r\n",
    "a chunk's size above all": HEAD
    + b"Transfer-Encoding: chunked\r\n\r\n"
    + b"f" * 20
    + b"\r\nok\r\n",
}


@pytest.mark.parametrize("reply", BROKEN.values(), ids=BROKEN)
async def test_what_http_forbids_is_upstreams_fault(pool: UpstreamClient, reply: bytes) -> None:
    """And what the reply says is not quoted: it may name hosts that are nobody's business."""
    async with upstream(replying(reply)) as wire:
        with pytest.raises(UpstreamBroken) as broken:
            await body(pool, wire.url)
        told = broken.value
        assert told.status == 502
        for private in ("127.0.0.1", str(wire.port), "10.1.2.3"):
            assert private not in told.message
        assert "10.1.2.3" not in told.detail, "nor logged: a reply's bytes may be content"


LIMIT = 30.0
"""Seconds of a timeout that a test lets pass."""


async def mute(peer: Peer) -> None:
    """Hears the request, says nothing, and says when the connection is closed."""
    await peer.request()
    await peer.gone()
    peer.upstream.left.set()


async def late(clock: Clock, sending: Coroutine[Any, Any, T], begun: Callable[[], Any]) -> T:
    """Send, and put the clock forward by more than `LIMIT` once that has begun and gets no
    further."""
    task = asyncio.create_task(sending)
    await until(begun)
    await turns()
    clock.move(LIMIT + 1)
    return await task


async def test_connecting_takes_too_long(pool: UpstreamClient, clock: Clock) -> None:
    async with upstream(mute) as wire:
        with pytest.raises(UpstreamUnreachable):
            sending = pool.send(request(wire.url.replace("http", "https"), connect_timeout=LIMIT))
            await late(clock, sending, lambda: wire.connections)


async def test_all_connections_are_in_use(clock: Clock) -> None:
    """The wait is bounded, and the error says which limit it was."""
    async with upstream(hang) as wire, UpstreamClient(Settings(max_connections=1)) as pool:
        async with sent(pool, wire.url) as reply:
            await anext(reply)
            with pytest.raises(
                UpstreamUnreachable, match=r"at most 1 are open \(--max-connections\)"
            ):
                await late(clock, pool.send(request(wire.url, connect_timeout=LIMIT)), lambda: True)
            waiting = asyncio.create_task(pool.send(request(wire.url)))
            await turns()
        await (await waiting).aclose()


async def test_no_first_byte(pool: UpstreamClient, clock: Clock) -> None:
    async with upstream(mute) as wire:
        for number, content in enumerate((b"{}", stream(b"{}")), start=1):
            with pytest.raises(UpstreamSilent, match=r"no byte within 20 s"):
                asked = request(
                    wire.url, content=content, connect_timeout=LIMIT - 20, first_byte_timeout=20
                )
                await late(
                    clock, pool.send(asked), lambda number=number: len(wire.requests) == number
                )  # type: ignore[misc]


async def test_first_byte_timeout_ends_with_the_head(pool: UpstreamClient, clock: Clock) -> None:
    async def slow(peer: Peer) -> None:
        for _ in range(2):
            await peer.request()
            await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n")
            await arrived.wait()
            clock.move(LIMIT * 3)
            await turns()
            await peer.send(b"ok")
        await peer.gone()

    async with upstream(slow) as wire:
        for _ in range(2):
            arrived = asyncio.Event()
            limits = {
                "connect_timeout": LIMIT,
                "first_byte_timeout": LIMIT,
                "idle_timeout": LIMIT * 10,
            }
            async with sent(pool, wire.url, content=b"{}", **limits) as reply:
                arrived.set()
                assert [piece async for piece in reply] == [b"ok"]
        assert wire.connections == 1, "the connection stays usable"


async def test_idle_in_the_middle(pool: UpstreamClient, clock: Clock) -> None:
    async with upstream(hang) as wire, sent(pool, wire.url, idle_timeout=LIMIT) as reply:
        assert await anext(reply) == b"x"
        with pytest.raises(UpstreamSilent, match=r"nothing for 30 s"):
            await late(clock, anext(reply), lambda: True)


async def test_a_pause_of_the_reader_is_no_silence_of_upstreams(
    pool: UpstreamClient, clock: Clock
) -> None:
    async with upstream(hang) as wire, sent(pool, wire.url, idle_timeout=LIMIT) as reply:
        assert await anext(reply) == b"x"
        clock.move(LIMIT * 3.5)
        await turns()
        waiting = asyncio.ensure_future(anext(reply))
        await turns()
        clock.move(LIMIT - 1)
        await turns()
        assert not waiting.done()
        clock.move(1)
        with pytest.raises(UpstreamSilent):
            await waiting


async def test_upstream_takes_none_of_the_body(pool: UpstreamClient, clock: Clock) -> None:
    made = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal made
        while True:
            made += 1
            yield bytes(1 << 20)

    async with upstream(deaf) as wire:
        sending = asyncio.create_task(
            pool.send(request(wire.url, content=endless(), idle_timeout=LIMIT))
        )
        await until(lambda: made)
        await still(lambda: made)
        clock.move(LIMIT + 1)
        with pytest.raises(UpstreamSilent, match="took none"):
            await sending


async def test_a_slow_client_is_not_upstreams_fault(pool: UpstreamClient, clock: Clock) -> None:
    async def slow() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b"x"
            clock.move(LIMIT * 3)
            await turns()

    async with upstream(replying(OK)) as wire:
        limits = {"idle_timeout": LIMIT, "first_byte_timeout": LIMIT}
        assert await body(pool, wire.url, content=slow(), **limits) == b"ok"


SWITCHING = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n"


@pytest.mark.parametrize("reply", [b"", b"HTTP/1.1 200 OK\r\nContent-Le", SWITCHING])
async def test_not_a_reply(pool: UpstreamClient, reply: bytes) -> None:
    async def handle(peer: Peer) -> None:
        await peer.request()
        await peer.send(reply)

    async with upstream(handle) as wire:
        with pytest.raises(UpstreamBroken):
            await pool.send(request(wire.url))
    assert len(wire.requests) == 1


@pytest.mark.parametrize(
    "start", [b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc", EVENTS + chunk(b"abc")]
)
@pytest.mark.parametrize("reset", [False, True])
async def test_cut_off(pool: UpstreamClient, start: bytes, reset: bool) -> None:
    async def handle(peer: Peer) -> None:
        await peer.request()
        await peer.send(start)
        await read.wait()
        if reset:
            peer.reset()

    read = asyncio.Event()
    async with upstream(handle) as wire, sent(pool, wire.url) as reply:
        assert await anext(reply) == b"abc"
        read.set()
        with pytest.raises(UpstreamBroken):
            await anext(reply)


# Whose connection it is


async def deaf(peer: Peer) -> None:
    peer.reader._transport.pause_reading()  # type: ignore[attr-defined]
    await asyncio.Event().wait()


async def hang(peer: Peer) -> None:
    """Begins a reply, and says when the connection is closed."""
    await peer.request()
    await peer.send(EVENTS, chunk(b"x"))
    await peer.gone()
    peer.upstream.left.set()


@pytest.mark.parametrize("broken", [b"zz\r\n", b"5\r\nhelloXX5\r\n", b"ffffffffffffffffff\r\n"])
@pytest.mark.parametrize("reads", ["at once", "later"])
async def test_a_broken_chunk_behind_whole_ones(
    pool: UpstreamClient, broken: bytes, reads: str
) -> None:
    """Whoever waits for the next chunk hears of it at once, and so does whoever asks when the
    connection is gone."""
    taken = asyncio.Event()

    async def breaks(peer: Peer) -> None:
        await peer.request()
        await peer.send(EVENTS + chunk(b"whole"))
        await taken.wait()
        await peer.send(broken)
        await peer.gone()
        peer.upstream.left.set()

    async with upstream(breaks) as wire, sent(pool, wire.url, idle_timeout=60.0) as reply:
        chunks = reply
        assert await anext(chunks) == b"whole"
        taken.set()
        if reads == "later":
            await wire.left.wait()
        with pytest.raises(UpstreamBroken):
            async for piece in chunks:
                assert piece == b"hello"


def breaks_on_second(meanwhile: Callable[[], object] = lambda: None) -> Any:
    """Answers the first request of each connection and breaks at the second."""

    async def handle(peer: Peer) -> None:
        await peer.request()
        await peer.send(OK)
        await peer.reader.read(1)
        meanwhile()
        peer.reset()

    return handle


@pytest.mark.parametrize("method", ["POST", "GET", "PATCH"])
async def test_a_stale_connection_is_not_the_clients_trouble(
    pool: UpstreamClient, method: str
) -> None:
    async with upstream(breaks_on_second()) as wire:
        for n in range(4):
            assert await body(pool, wire.url, method=method, content=b"%d" % n) == b"ok"
    assert [asked.body for asked in wire.requests] == [b"0", b"1", b"2", b"3"]
    assert wire.connections == 4


async def test_the_second_try_takes_a_new_connection(pool: UpstreamClient) -> None:
    """Those that idle beside a stale one are most likely stale, too."""
    async with upstream(breaks_on_second()) as wire:
        assert (
            await asyncio.gather(*(body(pool, wire.url, content=b"x") for _ in range(20)))
            == [b"ok"] * 20
        )
        assert await body(pool, wire.url, content=b"x") == b"ok"
    assert (len(wire.requests), wire.connections) == (21, 21)


async def test_a_streamed_body_gets_a_new_connection(pool: UpstreamClient) -> None:
    """What was sent of it is not kept, however large, so that a stale connection would cost the
    request."""
    async with upstream(breaks_on_second()) as wire:
        for _ in range(3):
            assert await body(pool, wire.url, content=stream(bytes(3 << 20), b"end")) == b"ok"
        assert (len(wire.requests), wire.connections) == (3, 3)


async def test_what_upstream_may_have_worked_on_is_not_sent_again(
    pool: UpstreamClient, clock: Clock
) -> None:
    async with upstream(breaks_on_second(lambda: clock.move(PATIENCE + 1))) as wire:
        await body(pool, wire.url)
        with pytest.raises(UpstreamBroken):
            await pool.send(request(wire.url, content=b"costly", first_byte_timeout=PATIENCE * 10))
    assert wire.connections == 1


async def test_what_comes_unasked_is_nobodys_reply(pool: UpstreamClient) -> None:
    async def poisoned(peer: Peer) -> None:
        await peer.request()
        await peer.send(OK)
        await read.wait()
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\nsomebodyelse")
        await peer.delivered()
        said.set()
        await peer.gone()

    async with upstream(poisoned) as wire:
        for _ in range(2):
            read, said = asyncio.Event(), asyncio.Event()
            assert await body(pool, wire.url, content=b"x") == b"ok"
            read.set()
            await said.wait()
            await turns()
    assert wire.connections == 2


async def test_interim_replies_without_end_hold_up_nobody(
    pool: UpstreamClient, clock: Clock
) -> None:
    async def handle(peer: Peer) -> None:
        await peer.request()
        with suppress(OSError):
            while True:
                await peer.send(b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" * 1_000)
                clock.move(1)

    async with upstream(handle) as wire:
        with pytest.raises(UpstreamSilent):
            await pool.send(
                request(wire.url, content=b"x", connect_timeout=LIMIT, first_byte_timeout=LIMIT)
            )


async def test_a_new_connection_that_breaks_is_not_tried_again(pool: UpstreamClient) -> None:
    async def slam(peer: Peer) -> None:
        await peer.request()
        peer.reset()

    async with upstream(slam) as wire:
        with pytest.raises(UpstreamBroken):
            await pool.send(request(wire.url, content=b"x"))
    assert len(wire.requests) == 1


# The way out


def test_certificates(tmp_path: Path) -> None:
    assert certificates({}).cert_store_stats()["x509_ca"] > 0
    # A folder is looked into only when a certificate is to be checked.
    assert certificates({"SSL_CERT_DIR": str(tmp_path)}).cert_store_stats()["x509_ca"] == 0
    for bad in (tmp_path / "nowhere.pem", tmp_path / "empty.pem"):
        (tmp_path / "empty.pem").write_text("no certificate")
        with pytest.raises(UserMistake, match="SSL_CERT_FILE"):
            certificates({"SSL_CERT_FILE": str(bad)})


async def test_http_proxy() -> None:
    async with upstream(replying(OK)) as wire:
        environment = {
            "http_proxy": f"http://user:word@127.0.0.1:{wire.port}",
            "NO_PROXY": "direct.invalid",
        }
        async with UpstreamClient(Settings(environment=environment)) as pool:
            assert await body(pool, "http://there.invalid/a%2f|b?c", content=b"x") == b"ok"
            assert await body(pool, wire.url + "/direct") == b"ok"
            with pytest.raises(UpstreamUnreachable):
                await pool.send(request("http://direct.invalid/"))
    assert [asked.target for asked in wire.requests] == [
        b"http://there.invalid/a%2f|b?c",
        b"/direct",
    ]
    word = base64.b64encode(b"user:word")
    assert wire.requests[0].get(b"proxy-authorization") == [b"Basic " + word]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A certificate for localhost that signs itself, with its key."""
    if not shutil.which("openssl"):
        pytest.skip("needs the openssl command")
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost "
        "-addext subjectAltName=DNS:localhost,DNS:there.invalid"
    )
    subprocess.run(
        [*command.split(), "-keyout", path, "-out", path], check=True, capture_output=True
    )
    made = subprocess.run(
        [*command.split(), "-keyout", f"{path}.key"], check=True, capture_output=True
    )
    path.write_bytes(Path(f"{path}.key").read_bytes() + made.stdout)
    yield path


def tls(certificate: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    return context


async def test_own_certificates(pool: UpstreamClient, certificate: Path) -> None:
    async with upstream(replying(OK), tls(certificate)) as wire:
        url = f"https://localhost:{wire.port}/v1"
        with pytest.raises(UpstreamUnreachable) as distrusted:
            await pool.send(request(url))
        assert "certificate" in distrusted.value.detail
        async with UpstreamClient(
            Settings(environment={"SSL_CERT_FILE": str(certificate)})
        ) as trusting:
            assert await body(trusting, url) == b"ok"


async def test_a_proxy_that_we_cannot_ask_fails_only_the_requests_that_need_it() -> None:
    environment = {"ALL_PROXY": "socks5://127.0.0.1:7890", "HTTP_PROXY": ""}
    async with (
        upstream(replying(OK)) as wire,
        UpstreamClient(Settings(environment=environment)) as pool,
    ):
        assert await body(pool, wire.url) == b"ok"
        with pytest.raises(
            UpstreamUnreachable, match="ALL_PROXY of the environment is a socks5 proxy"
        ):
            await pool.send(request("http://there.invalid/"))


async def test_what_the_proxy_refuses_does_not_tell_its_password() -> None:
    async def refusing(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n")

    async with upstream(refusing) as wire:
        settings = Settings(
            environment={"HTTPS_PROXY": f"http://user:secret@127.0.0.1:{wire.port}"}
        )
        async with UpstreamClient(settings) as pool:
            with pytest.raises(UpstreamUnreachable, match="407") as refused:
                await pool.send(request("https://upstream.test/v1/x"))
    assert "secret" not in refused.value.message
    assert wire.requests[0].get(b"proxy-authorization") == [b"Basic dXNlcjpzZWNyZXQ="]


async def test_https_proxy(certificate: Path) -> None:
    """CONNECT, and then TLS with upstream itself; a proxy that refuses is upstream out of reach."""

    async def tunnel(peer: Peer) -> None:
        asked = await peer.request()
        if asked.target.startswith(b"refused"):
            await peer.send(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")
            return
        await peer.send(b"HTTP/1.1 200 Connected\r\n\r\n")
        reader, writer = await asyncio.open_connection("127.0.0.1", wire.port)
        await asyncio.wait(
            [
                asyncio.create_task(pump(peer.reader, writer)),
                asyncio.create_task(pump(reader, peer.writer)),
            ]
        )

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
        writer.close()

    async with upstream(replying(OK), tls(certificate)) as wire, upstream(tunnel) as between:
        environment = {
            "HTTPS_PROXY": f"127.0.0.1:{between.port}",
            "SSL_CERT_FILE": str(certificate),
        }
        async with UpstreamClient(Settings(environment=environment)) as pool:
            assert await body(pool, "https://there.invalid:8443/a%2fb") == b"ok"
            with pytest.raises(UpstreamUnreachable):
                await pool.send(request("https://refused.invalid/"))
        assert between.requests[0].target == b"there.invalid:8443"
    assert wire.requests[0].target == b"/a%2fb"


async def test_an_upstream_that_reads_nothing_does_not_delay_the_end(clock: Clock) -> None:
    """aiohttp waits until all that was written is sent, which is never."""
    async with upstream(deaf) as wire:
        async with UpstreamClient(Settings()) as pool:
            sending = asyncio.create_task(pool.send(request(wire.url, content=b"x" * (64 << 20))))
            await until(lambda: wire.connections)
            await turns()
            asyncio.get_running_loop().call_soon(clock.move, CLOSING + 1)  # while the block ends
        sending.cancel()
        await asyncio.wait([sending])


# Lists of models


async def test_models_are_asked_for_with_the_given_key_alone(pool: UpstreamClient) -> None:
    packed = gzip.compress(b'{"data":[{"id":"m","n_ctx":9}]}')
    reply = (
        b"HTTP/1.1 401 No\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(packed)
        + packed
    )
    async with upstream(replying(reply)) as wire:
        assert await models(pool, wire.url, (), PATIENCE, read=False) == ModelList(401, {})
        assert await models(pool, f"{wire.url}/v1/", [(b"api-key", b"k")], PATIENCE) == ModelList(
            401, {"m": 9}
        )
    first, second = wire.requests
    assert (first.line, second.line) == (b"GET /models HTTP/1.1", b"GET /v1/models HTTP/1.1")
    assert {name for name, _ in first.headers} == {b"Host", b"user-agent", b"accept"}
    assert second.headers[1:] == [*first.headers[1:], (b"api-key", b"k")]


async def test_a_list_of_models_that_does_not_come(
    pool: UpstreamClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with upstream(mute) as wire:
        with pytest.raises(UpstreamSilent, match=r"no answer within 0\.01 s"):
            await models(pool, wire.url, (), 0.01)
    with pytest.raises(UpstreamUnreachable) as gone:
        await models(pool, wire.url, (), PATIENCE)
    assert gone.value.detail == f"connection refused at 127.0.0.1:{wire.port}"
    with pytest.raises(UpstreamFault):
        await models(pool, "http://[::1::2]/v1", (), PATIENCE)
    monkeypatch.setattr(client, "LARGEST_LIST", 1)
    async with upstream(replying(OK)) as wire:
        with pytest.raises(UpstreamBroken, match="larger than 1 bytes"):
            await models(pool, wire.url, (), PATIENCE)
