"""Content codings (RFC 9110, 8.4.1): bodies decompressed piece by piece, however much a byte may unfold to."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Protocol

import brotli  # type: ignore[import-untyped]
import zstandard

from proxy.errors import BadEncoding, BodyTooLarge

_PIECE = 64 * 1024
"""Bytes that one step of a decompressor yields at most, about: a bomb of any ratio is met piece by piece."""

_ZSTD_STEP = 64
"""Bytes given to zstandard at once, which has no bound of its own: a block of 128 KiB takes 4 bytes (RFC 8878,
3.1.1.2), so this unfolds to 2 MiB at most."""

_MOST_CODINGS = 4
"""How many codings may lie on top of each other. One is usual."""


class _Layer(Protocol):
    def feed(self, data: bytes) -> Iterator[bytes]: ...

    def finished(self) -> bool: ...


class _Zlib:
    """gzip, of any number of members (RFC 1952, 2.2)."""

    wbits = 16 + zlib.MAX_WBITS

    def __init__(self) -> None:
        self._inflate = zlib.decompressobj(self.wbits)

    def feed(self, data: bytes) -> Iterator[bytes]:
        while data:
            if self._inflate.eof:
                self._inflate = zlib.decompressobj(self.wbits)
            yield from self._member(data)
            data = self._inflate.unused_data

    def _member(self, data: bytes) -> Iterator[bytes]:
        piece = self._inflate.decompress(data, _PIECE)
        yield piece
        while not self._inflate.eof and (self._inflate.unconsumed_tail or len(piece) == _PIECE):
            piece = self._inflate.decompress(self._inflate.unconsumed_tail, _PIECE)
            yield piece

    def finished(self) -> bool:
        return self._inflate.eof


class _Deflate(_Zlib):
    """deflate: zlib's format as RFC 9110 has it, or the raw one that some senders mean by the name."""

    def __init__(self) -> None:
        self._head = b""
        self._known = False

    def feed(self, data: bytes) -> Iterator[bytes]:
        if not self._known:
            self._head += data
            if len(self._head) < 2:
                return
            data, self._known = self._head, True
            # RFC 1950, 2.2: method 8, and a checksum over the first two bytes.
            zlibs = data[0] & 0x0F == 8 and (data[0] << 8 | data[1]) % 31 == 0
            self.wbits = zlib.MAX_WBITS if zlibs else -zlib.MAX_WBITS
            self._inflate = zlib.decompressobj(self.wbits)
        yield from super().feed(data)

    def finished(self) -> bool:
        return self._known and super().finished()


class _Brotli:
    def __init__(self) -> None:
        self._decompressor = brotli.Decompressor()

    def feed(self, data: bytes) -> Iterator[bytes]:
        piece = self._decompressor.process(data, output_buffer_limit=_PIECE)
        yield piece
        while len(piece) >= _PIECE or not self._decompressor.can_accept_more_data():
            piece = self._decompressor.process(b"", output_buffer_limit=_PIECE)
            yield piece

    def finished(self) -> bool:
        return bool(self._decompressor.is_finished())


class _Zstd:
    def __init__(self) -> None:
        self._decompressor = zstandard.ZstdDecompressor().decompressobj()

    def feed(self, data: bytes) -> Iterator[bytes]:
        view = memoryview(data)
        for start in range(0, len(data), _ZSTD_STEP):
            yield self._decompressor.decompress(view[start : start + _ZSTD_STEP])

    def finished(self) -> bool:
        return self._decompressor.eof


_LAYERS: dict[str, Callable[[], _Layer]] = {
    "gzip": _Zlib,
    "x-gzip": _Zlib,
    "deflate": _Deflate,
    "br": _Brotli,
    "zstd": _Zstd,
}
_FAULTS = (zlib.error, brotli.error, zstandard.ZstdError)


class Decoder:
    """Undoes a `Content-Encoding`, for instance `gzip` or `deflate, br`.

    Raises BadEncoding where the coding is unknown, the data is not in it, or (at `finish`) the data stops early.
    """

    def __init__(self, content_encoding: str) -> None:
        names = [name.strip().lower() for name in content_encoding.split(",")]
        names = [name for name in names if name not in ("", "identity")]
        if len(names) > _MOST_CODINGS or not all(name in _LAYERS for name in names):
            raise BadEncoding(f"Content-Encoding {content_encoding!r} is not one of gzip, deflate, br, zstd")
        self._layers = [_LAYERS[name]() for name in reversed(names)]
        self._empty = True

    def feed(self, data: bytes) -> Iterator[bytes]:
        """What `data` unfolds to, in pieces that are not empty."""
        self._empty = self._empty and not data
        pieces: Iterable[bytes] = (data,)
        for layer in self._layers:
            pieces = chain.from_iterable(map(layer.feed, pieces))
        try:
            yield from filter(None, pieces)
        except _FAULTS as error:
            raise BadEncoding(f"The body is not what its Content-Encoding says: {error}") from error

    def finish(self) -> None:
        """To be called when no more data comes. An empty body stands for itself, whatever its coding."""
        if not self._empty and not all(layer.finished() for layer in self._layers):
            raise BadEncoding("The compressed body stops before its end")


def decoded(body: bytes, headers: Iterable[tuple[bytes, bytes]], limit: int) -> bytes:
    """A request's body in the clear. Raises BadEncoding, and BodyTooLarge above `limit` bytes."""
    codings = [value for name, value in headers if name.lower() == b"content-encoding"]
    return decode(body, b",".join(codings).decode("latin-1"), limit) if codings else body


def decode(body: bytes, content_encoding: str, limit: int) -> bytes:
    """A whole body decompressed. Raises BadEncoding, or BodyTooLarge above `limit` bytes."""
    decoder = Decoder(content_encoding)
    decoded = bytearray()
    for piece in decoder.feed(body):
        decoded += piece
        if len(decoded) > limit:
            raise BodyTooLarge(f"The decompressed body is larger than {limit} bytes")
    decoder.finish()
    return bytes(decoded)
