"""A transport that sends a reply's head together with the first piece of its body."""

from __future__ import annotations

import asyncio
from typing import Any

JOINED = 64 * 1024
"""Bytes of a body that are copied behind their head; a larger one is not worth the copy."""


class HeldHead:
    """A transport on which a reply's head waits for what is written behind it in the same turn of the loop.

    uvicorn writes the two apart, which takes a system call more and wakes the client for a head alone.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._head = b""
        self.is_closing = transport.is_closing  # asked at every piece of a reply

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
