"""Content codings: whole, in small pieces, cut short, and far larger inside than outside."""

from __future__ import annotations

import asyncio
import gzip
import random
import tracemalloc
import zlib
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import brotli
import pytest
import zstandard

from proxy.errors import BadEncoding, BodyTooLarge, Overloaded
from proxy.threads import WorkPool
from proxy.upstream.codings import ContentDecoder, beginning, decoded_request
from tests.clock import turns
from tests.doubling import assert_linear

T = TypeVar("T")

TEXT = b'{"messages": []}' * 20_000


def decode(body: bytes, coding: str, limit: int) -> bytes:
    headers = [(b"content-encoding", coding.encode())]
    return asyncio.run(decoded_request(body, headers, limit, WorkPool("decoding", 1)))


ENCODED: list[tuple[str, bytes]] = [
    ("gzip", gzip.compress(TEXT)),
    ("x-gzip", gzip.compress(TEXT)),
    ("gzip", gzip.compress(TEXT[:70_000]) + gzip.compress(TEXT[70_000:])),
    ("deflate", zlib.compress(TEXT)),
    ("deflate", zlib.compress(TEXT, wbits=-zlib.MAX_WBITS)),
    ("deflate", zlib.compress(TEXT, level=0, wbits=-zlib.MAX_WBITS)),
    ("br", brotli.compress(TEXT)),
    ("zstd", zstandard.compress(TEXT)),
    ("identity, GZIP", gzip.compress(TEXT)),
    ("identity", TEXT),
    ("", TEXT),
]


@pytest.mark.parametrize(("coding", "body"), ENCODED, ids=range(len(ENCODED)))
def test_whole_in_small_pieces_and_within_the_limit(coding: str, body: bytes) -> None:
    assert decode(body, coding, len(TEXT)) == TEXT
    with pytest.raises(BodyTooLarge):
        decode(body, coding, len(TEXT) - 1)
    decoder, size = ContentDecoder(coding), 1 + len(body) // 10_000
    parts = (body[at : at + size] for at in range(0, len(body), size))
    assert b"".join(piece for part in parts for piece in decoder.feed(part)) == TEXT
    decoder.finish()


@pytest.mark.parametrize(("coding", "body"), ENCODED[:-2], ids=range(len(ENCODED) - 2))
def test_cut_short(coding: str, body: bytes) -> None:
    with pytest.raises(BadEncoding, match="stops before its end"):
        decode(body[:-9], coding, len(TEXT))


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "zstd"])
def test_not_what_it_says(coding: str) -> None:
    with pytest.raises(BadEncoding):
        decode(b"\xff\xfe plain text, nothing else", coding, 1000)


@pytest.mark.parametrize("coding", ["compress", "aws-chunked", "gzip, zip", "deflate, gzip"])
def test_unknown(coding: str) -> None:
    with pytest.raises(BadEncoding, match="not one of"):
        ContentDecoder(coding)


@pytest.mark.parametrize("coding", ["gzip", "br", "zstd", "deflate"])
def test_empty_body_stands_for_itself(coding: str) -> None:
    assert decode(b"", coding, 0) == b""


BOMB = 64 << 20
"""Bytes: far above the limit and the peak that the test allows."""
ENCODERS = {
    "gzip": lambda data: gzip.compress(data, 1),
    "br": lambda data: brotli.compress(data, quality=1),
    "zstd": zstandard.compress,
}


@pytest.mark.parametrize("coding", ENCODERS)
def test_a_bomb_is_met_piece_by_piece(coding: str) -> None:
    body = ENCODERS[coding](bytes(BOMB))
    tracemalloc.start()
    with pytest.raises(BodyTooLarge):
        decode(body, coding, 1 << 20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20


async def test_a_request_in_the_clear() -> None:
    pool = WorkPool("decoding", 1)
    headers = [(b"Content-Encoding", b"identity"), (b"x", b"y"), (b"content-encoding", b"gzip")]
    assert await decoded_request(gzip.compress(TEXT), headers, len(TEXT), pool) == TEXT
    assert await decoded_request(TEXT, headers[1:2], 0, pool) == TEXT, (
        "what is not compressed was measured already"
    )


# -- what it costs ---------------------------------------------------------------------------------


def members(number: int) -> bytes:
    return gzip.compress(b"", mtime=0) * number


HOSTILE: dict[str, tuple[str, Callable[[int], bytes]]] = {
    "empty gzip members": ("gzip", lambda size: members(size // 100)),
    "stored blocks of deflate": (
        "deflate",
        lambda size: zlib.compress(TEXT[:64] * (size // 16), 0),
    ),
    "a gzip bomb": ("gzip", lambda size: gzip.compress(bytes(size * 4), 1)),
    "zstd in small steps": (
        "zstd",
        lambda size: zstandard.compress(random.Random(1).randbytes(size * 2)),
    ),
    "brotli": ("br", lambda size: brotli.compress(random.Random(1).randbytes(size * 2), quality=1)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_twice_the_body_takes_twice_as_long(name: str) -> None:
    coding, made = HOSTILE[name]
    assert_linear(
        lambda body: deque(ContentDecoder(coding).feed(body), 0), made(1 << 20), made(2 << 20)
    )


def test_what_unfolds_to_nothing_is_still_given_up_piece_by_piece() -> None:
    assert len(list(ContentDecoder("gzip").feed(members(10_000)))) >= 10_000


class Counted(WorkPool):
    def __init__(self) -> None:
        super().__init__("decoding", 1)
        self.steps = 0
        self.third = asyncio.Event()

    async def run(self, caller: str, work: Callable[[], T], *args: Any, **kwargs: Any) -> T:
        self.steps += 1
        if self.steps == 3:
            self.third.set()
        return await super().run(caller, work, *args, **kwargs)


@pytest.mark.parametrize("size", [100, 8 << 20])
async def test_what_comes_out_is_accounted_for_while_it_does(size: int) -> None:
    headers, pool = [(b"content-encoding", b"gzip")], WorkPool("decoding", 1)
    body, held = gzip.compress(bytes(size)), list[int]()
    await decoded_request(body, headers, size, pool, hold=held.append)
    assert sum(held) == size and max(held) <= 2 << 20

    def full(_: int) -> None:
        raise Overloaded("full")

    with pytest.raises(Overloaded):
        await decoded_request(body, headers, size, pool, hold=full)


async def test_decoding_ends_when_the_client_leaves() -> None:
    pool = Counted()
    body = gzip.compress(bytes(32 << 20), 1) * 16
    task = asyncio.create_task(
        decoded_request(body, [(b"content-encoding", b"gzip")], 1 << 30, pool)
    )
    await pool.third.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    steps = pool.steps
    await turns()
    assert pool.steps == steps < 500


def test_the_beginning_of_a_long_refusal() -> None:
    assert beginning(gzip.compress(bytes(1 << 20)), "gzip", 1000)[:1000] == bytes(1000)
    assert beginning(TEXT, "", 1000)[:1000] == TEXT[:1000]
    noise = random.Random(1).randbytes(1000)
    packed = gzip.compress(noise)
    assert beginning(packed, "gzip", len(packed) - 1) == noise
    for most in (len(packed) - 1, 1 << 20):
        with pytest.raises(BadEncoding):
            beginning(packed[:-1], "gzip", most)


def test_a_zstd_frame_may_not_ask_for_more_memory_than_http_allows() -> None:
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=27)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    with pytest.raises(BadEncoding):
        decode(compressor.compress(TEXT) + compressor.flush(), "zstd", 1 << 30)
