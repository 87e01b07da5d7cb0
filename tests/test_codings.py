"""Content codings: whole, byte by byte, stacked, cut short, and far larger inside than outside."""

from __future__ import annotations

import gzip
import tracemalloc
import zlib

import brotli
import pytest
import zstandard

from proxy.codings import Decoder, decode, decoded
from proxy.errors import BadEncoding, BodyTooLarge
from proxy.threads import Pool

TEXT = b'{"messages": []}' * 20_000


def raw_deflate(data: bytes) -> bytes:
    compressor = zlib.compressobj(wbits=-15)
    return compressor.compress(data) + compressor.flush()


ENCODED: list[tuple[str, bytes]] = [
    ("gzip", gzip.compress(TEXT)),
    ("x-gzip", gzip.compress(TEXT)),
    ("gzip", gzip.compress(TEXT[:70_000]) + gzip.compress(TEXT[70_000:])),
    ("deflate", zlib.compress(TEXT)),
    ("deflate", raw_deflate(TEXT)),
    ("br", brotli.compress(TEXT)),
    ("zstd", zstandard.compress(TEXT)),
    ("deflate, GZIP", gzip.compress(zlib.compress(TEXT))),
    ("identity", TEXT),
    ("", TEXT),
]


@pytest.mark.parametrize(("coding", "body"), ENCODED, ids=range(len(ENCODED)))
def test_whole(coding: str, body: bytes) -> None:
    assert decode(body, coding, len(TEXT)) == TEXT


@pytest.mark.parametrize(("coding", "body"), ENCODED, ids=range(len(ENCODED)))
def test_byte_by_byte(coding: str, body: bytes) -> None:
    decoder = Decoder(coding)
    pieces = [piece for byte in body for piece in decoder.feed(bytes([byte]))]
    decoder.finish()
    assert b"".join(pieces) == TEXT


@pytest.mark.parametrize(("coding", "body"), ENCODED[:-2], ids=range(len(ENCODED) - 2))
def test_cut_short(coding: str, body: bytes) -> None:
    with pytest.raises(BadEncoding, match="stops before its end"):
        decode(body[:-9], coding, len(TEXT))


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "zstd"])
def test_not_what_it_says(coding: str) -> None:
    with pytest.raises(BadEncoding):
        decode(b"\xff\xfe plain text, nothing else", coding, 1000)


@pytest.mark.parametrize("coding", ["compress", "aws-chunked", "gzip, zip", "gzip, gzip, gzip, gzip, gzip"])
def test_unknown(coding: str) -> None:
    with pytest.raises(BadEncoding, match="not one of"):
        Decoder(coding)


@pytest.mark.parametrize("coding", ["gzip", "br", "zstd", "deflate"])
def test_empty_body_stands_for_itself(coding: str) -> None:
    assert decode(b"", coding, 0) == b""


@pytest.mark.parametrize(("coding", "body"), ENCODED, ids=range(len(ENCODED)))
def test_limit_is_exact(coding: str, body: bytes) -> None:
    with pytest.raises(BodyTooLarge):
        decode(body, coding, len(TEXT) - 1)


BOMB = bytes(256 << 20)


@pytest.mark.parametrize(
    ("coding", "body"),
    [
        ("gzip", gzip.compress(BOMB, 1)),
        ("br", brotli.compress(BOMB, quality=1)),
        ("zstd", zstandard.compress(BOMB)),
    ],
    ids=["gzip", "br", "zstd"],
)
def test_a_bomb_is_met_piece_by_piece(coding: str, body: bytes) -> None:
    tracemalloc.start()
    with pytest.raises(BodyTooLarge):
        decode(body, coding, 1 << 20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20


async def test_a_request_in_the_clear() -> None:
    pool = Pool("decoding", 1)
    headers = [(b"Content-Encoding", b"deflate"), (b"x", b"y"), (b"content-encoding", b"gzip")]
    assert await decoded(gzip.compress(zlib.compress(TEXT)), headers, len(TEXT), pool) == TEXT
    assert await decoded(TEXT, headers[1:2], 0, pool) == TEXT, "what is not compressed was measured when it was read"
