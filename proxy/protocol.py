"""uvicorn's HTTP/1.1, made exact: a relay needs of a request what ASGI does not carry."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from proxy.client import RAW

if TYPE_CHECKING:
    from proxy.headers import Headers

_H2C = re.compile(rb"\r\nupgrade:[ \t]*h2c[ \t]*(?=\r\n)", re.IGNORECASE)

JOINED = 64 * 1024
"""Bytes of a body that are copied behind their head; a larger one is not worth the copy."""


class ExactProtocol(HttpToolsProtocol):
    """uvicorn's, that also hands over what ASGI's scope loses of a request; see `client.RAW`."""

    raw_headers: Headers

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._watching: set[Callable[[], object]] = set()
        self._head_ended = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(cast("asyncio.Transport", HeldHead(transport, self.loop)))

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._tell()

    def watch(self, left: Callable[[], object]) -> Callable[[], object]:
        """Have `left` called when the client hangs up, or soon if it has; what comes back takes that back."""
        self._watching.add(left)
        if self.transport.is_closing():
            self.loop.call_soon(self._tell)
        return lambda: self._watching.discard(left)

    def _tell(self) -> None:
        for left in tuple(self._watching):
            left()

    def data_received(self, data: bytes) -> None:
        if self.cycle is None or self.cycle.response_complete:
            data = without_offer(data)
        super().data_received(data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.raw_headers = []
        self._head_ended = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head_ended:
            return  # a trailer must not pass for a header, and may be dropped (RFC 9110, 6.5.1)
        self.raw_headers.append((name, value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._head_ended = True
        self.scope["extensions"] = {RAW: {"target": self.url, "headers": self.raw_headers, "watch": self.watch}}
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        if not self.pipeline:
            # Paused for a body that is whole now; but only while it reads does it hear that the client hangs up.
            self.flow.resume_reading()

    def _unsupported_upgrade_warning(self) -> None:
        """The application refuses it, or ignores it; either is no news."""


class HeldHead:
    """A transport on which a reply's head waits for what is written behind it in the same turn of the loop.

    uvicorn writes the two apart, which takes a system call more and wakes the client for a head alone.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._head = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._head and data.startswith(b"HTTP/1.1 "):
            self._head = data
            self._loop.call_soon(self._flush)
        elif self._head and len(data) <= JOINED:
            head, self._head = self._head, b""
            self._transport.write(head + data)
        else:
            self._flush()
            self._transport.write(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._head:
            self._transport.write(self._head)
            self._head = b""


def without_offer(data: bytes) -> bytes:
    """A request without the offer to go on in HTTP/2.

    Java's client makes it with requests that have a body, and llhttp then takes the body for HTTP/2 that follows.
    """
    ends = data.find(b"\r\n\r\n")
    if data.find(b"h2c", 0, ends if ends >= 0 else len(data)) < 0:
        return data
    head, end, rest = data.partition(b"\r\n\r\n")
    return _H2C.sub(b"", head + end[:2], count=1) + end[2:] + rest
