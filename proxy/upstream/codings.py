"""Content codings (RFC 9110, 8.4.1): decompresses bodies piece by piece, whatever their compression
ratio."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Protocol

import brotli  # type: ignore[import-untyped]
import zstandard

from proxy.errors import BadEncoding, BodyTooLarge
from proxy.threads import NEW, WorkPool

_PIECE = 16 * 1024
"""About the most bytes that one step of a decompressor yields, so that a bomb of any ratio is read
piece by piece. So many may hold thousands of events."""

_ZSTD_STEP = 64
"""Bytes given to zstandard at once, which cannot limit its output. A block of 128 KiB takes 4 bytes
(RFC 8878,
3.1.1.2), so this many expand to 2 MiB at most."""

_ZSTD_WINDOW = 8 << 20
"""The most bytes that a frame may make us remember: HTTP's limit (RFC 9659, 3). A frame's head can
ask for 128 MiB."""

_SHORT = 512
"""Bytes in the first piece for a new gzip member; each further piece is twice as large. zlib copies
whatever follows the member's end, so the first pieces must be small."""

_STEP = 1 << 20
"""Bytes in one step: about 2 ms of work, after which we check whether the caller still waits."""

_STEP_COST = 512
"""Bytes added to the count for each piece, because pieces may be empty and a million of them take a
second."""


_ZLIB_METHOD = 8
"""The lower half of the byte with which zlib's format begins (RFC 1950, 2.2). Some servers call
deflate what lacks that format's head (RFC 9110, 8.4.1.2)."""


class _Coding(Protocol):
    """`feed` decodes at most `_PIECE` bytes and yields the result in at least one piece, which may
    be empty."""

    def feed(self, data: bytes | memoryview) -> Iterator[bytes]: ...

    def finished(self) -> bool: ...


class _Zlib:
    """gzip with any number of members (RFC 1952, 2.2), or deflate, which is zlib's format (RFC
    9110, 8.4.1.2)."""

    def __init__(self, wbits: int) -> None:
        self._wbits = wbits
        self._inflate = zlib.decompressobj(wbits)
        self._begun = False

    def feed(self, data: bytes | memoryview) -> Iterator[bytes]:
        at = 0
        step = _PIECE
        if not self._begun and len(data):
            self._begun = True
            if self._wbits == zlib.MAX_WBITS and data[0] & 0x0F != _ZLIB_METHOD:
                self._wbits = -zlib.MAX_WBITS
                self._inflate = zlib.decompressobj(self._wbits)
        while at < len(data):
            if self._inflate.eof:
                self._inflate = zlib.decompressobj(self._wbits)
                step = _SHORT
            given = data[at : at + step]
            piece = self._inflate.decompress(given, _PIECE)
            yield piece
            while not self._inflate.eof and (self._inflate.unconsumed_tail or len(piece) == _PIECE):
                piece = self._inflate.decompress(self._inflate.unconsumed_tail, _PIECE)
                yield piece
            at += len(given) - len(self._inflate.unused_data)
            step *= 2

    def finished(self) -> bool:
        return self._inflate.eof


class _Brotli:
    def __init__(self) -> None:
        self._decompressor = brotli.Decompressor()

    def feed(self, data: bytes | memoryview) -> Iterator[bytes]:
        piece = self._decompressor.process(data, output_buffer_limit=_PIECE)
        yield piece
        while len(piece) >= _PIECE or not self._decompressor.can_accept_more_data():
            piece = self._decompressor.process(b"", output_buffer_limit=_PIECE)
            yield piece

    def finished(self) -> bool:
        return bool(self._decompressor.is_finished())


class _Zstd:
    def __init__(self) -> None:
        self._decompressor = zstandard.ZstdDecompressor(
            max_window_size=_ZSTD_WINDOW
        ).decompressobj()

    def feed(self, data: bytes | memoryview) -> Iterator[bytes]:
        for start in range(0, len(data), _ZSTD_STEP):
            yield self._decompressor.decompress(data[start : start + _ZSTD_STEP])

    def finished(self) -> bool:
        return self._decompressor.eof


_CODINGS: dict[str, Callable[[], _Coding]] = {
    "gzip": partial(_Zlib, 16 + zlib.MAX_WBITS),
    "x-gzip": partial(_Zlib, 16 + zlib.MAX_WBITS),
    "deflate": partial(_Zlib, zlib.MAX_WBITS),
    "br": _Brotli,
    "zstd": _Zstd,
}
_FAULTS = (zlib.error, brotli.error, zstandard.ZstdError)


class ContentDecoder:
    """Decodes a `Content-Encoding` of one coding, or of none.

    Raises BadEncoding if it is another or several, which nobody sends, if the data does not follow
    it, or (in `finish`) if the data stops early.
    """

    def __init__(self, content_encoding: str) -> None:
        names = [name.strip().lower() for name in content_encoding.split(",")]
        names = [name for name in names if name not in ("", "identity")]
        if len(names) > 1 or not all(name in _CODINGS for name in names):
            raise BadEncoding(
                f"Content-Encoding {content_encoding!r} is not one of gzip, deflate, br, zstd"
            )
        self._coding = _CODINGS[names[0]]() if names else None
        self._empty = True

    def feed(self, data: bytes) -> Iterable[bytes]:
        """Decode `data` piece by piece, as they are asked for. Some pieces are empty, so that the
        next one never takes long."""
        if self._coding is not None:
            return self._decoded(self._coding, data)
        if len(data) <= _PIECE:
            return (data,)
        return (data[start : start + _PIECE] for start in range(0, len(data), _PIECE))

    def _decoded(self, coding: _Coding, data: bytes) -> Iterator[bytes]:
        self._empty = self._empty and not data
        try:
            for start in range(0, len(data), _PIECE):
                yield from coding.feed(memoryview(data)[start : start + _PIECE])
        except _FAULTS as error:
            raise BadEncoding(f"The body is not what its Content-Encoding says: {error}") from error

    def finish(self) -> None:
        """Check that the body is complete; call it after the last data. An empty body is valid in
        any coding."""
        if self._coding and not self._empty and not self._coding.finished():
            raise BadEncoding("The compressed body stops before its end")


def reply_decoder(content_encoding: str) -> ContentDecoder:
    """Return the decoder of a reply. It ignores names that are no codings, as every client does:
    servers that mean a charset send `Content-Encoding: utf-8`."""
    names = [name.strip().lower() for name in content_encoding.split(",")]
    return ContentDecoder(",".join(name for name in names if name in _CODINGS))


async def decoded_request(
    body: bytes,
    headers: Iterable[tuple[bytes, bytes]],
    limit: int,
    pool: WorkPool,
    caller: str = "",
    hold: Callable[[int], None] = lambda _: None,
) -> bytes:
    """Decode a request's body. Raises BadEncoding, or BodyTooLarge above `limit` bytes.

    It is decoded in steps, between which others have their turn, until the caller no longer waits.
    After each step, `hold` is called with the number of new bytes; it may raise.
    """
    codings = [value for name, value in headers if name.lower() == b"content-encoding"]
    if not codings:
        return body
    decoder = ContentDecoder(b",".join(codings).decode("latin-1"))
    pieces = decoder.feed(body)
    whole = bytearray()

    def step() -> bool:
        """Decode some more, and return whether that was all."""
        done = 0
        for piece in pieces:
            whole.extend(piece)
            if len(whole) > limit:
                raise BodyTooLarge(f"The decompressed body is larger than {limit} bytes")
            done += len(piece) + _STEP_COST
            if done > _STEP:
                return False
        decoder.finish()
        return True

    ended = False
    while not ended:
        before = len(whole)
        ended = await pool.run(caller, step, NEW * len(body))
        hold(len(whole) - before)
    return bytes(whole)


def beginning(body: bytes, content_encoding: str, most: int) -> bytes:
    """Decode the first `most` bytes of a reply and return the result, up to about `most` bytes.
    Raises BadEncoding if a body of at most `most` bytes stops early."""
    decoder = reply_decoder(content_encoding)
    found = bytearray()
    for piece in decoder.feed(body[:most]):
        found += piece
        if len(found) >= most:
            return bytes(found)
    if len(body) <= most:
        decoder.finish()
    return bytes(found)
