"""A transport that sends a reply's head together with the first piece of its body."""

from __future__ import annotations

import asyncio
from typing import Any

JOINED = 64 * 1024
"""Most bytes of a piece that is copied to join it to the head; a larger piece is not worth the copy."""


class HeldHead:
    """A transport that joins a reply's head to the next piece written in the same turn of the event loop.

    uvicorn writes the two separately, which costs one more system call and wakes the client for the head alone.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._head = b""
        self.is_closing = transport.is_closing  # bound once, as it is called for every piece of a reply

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

    def write_eof(self) -> None:
        self._flush()
        self._transport.write_eof()

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        head, self._head = self._head, b""
        if head and not self._transport.is_closing():
            self._transport.write(head)
