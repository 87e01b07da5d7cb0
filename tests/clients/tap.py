"""A relay between a client and its server that records the bytes of both directions."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tests import wire

ASKING = re.compile(rb"POST \S*/(chat/completions|responses|messages)[ ?]")


@dataclass
class Tap:
    port: int = 0
    sent: list[bytearray] = field(default_factory=list)
    """The client's bytes, by connection."""
    shown: list[bytearray] = field(default_factory=list)
    """The server's bytes, by connection."""

    async def requests(self) -> list[dict[str, Any]]:
        """The bodies of the client's requests for replies."""
        messages = [message for stream in self.sent for message in await _parse(stream)]
        return [json.loads(message.body) for message in messages if ASKING.search(message.line)]

    @property
    def upgrades(self) -> int:
        """How many of the connections the server asked to go on over plain HTTP."""
        return sum(stream.startswith(b"HTTP/1.1 426 ") for stream in self.shown)

    async def replies(self) -> list[bytes]:
        """The bodies of all replies."""
        return [message.body for stream in self.shown for message in await _parse(stream)]


async def _parse(stream: bytes) -> list[wire.Message]:
    reader = asyncio.StreamReader(limit=1 << 20)
    reader.feed_data(stream)
    reader.feed_eof()
    messages = []
    with suppress(asyncio.IncompleteReadError):
        while True:
            messages.append(await wire.read_message(reader))
    return messages


@asynccontextmanager
async def tap(server_port: int) -> AsyncIterator[Tap]:
    """Listen on a port of its own, and relay to `server_port`."""
    tapped = Tap()
    server = await asyncio.start_server(partial(_connect, tapped, server_port), "127.0.0.1", 0)
    tapped.port = server.sockets[0].getsockname()[1]
    try:
        yield tapped
    finally:
        server.close()


async def _connect(
    tapped: Tap, server_port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    sent, shown = bytearray(), bytearray()
    tapped.sent.append(sent)
    tapped.shown.append(shown)
    server_reader, server_writer = await asyncio.open_connection("127.0.0.1", server_port)
    await asyncio.gather(_copy(reader, server_writer, sent), _copy(server_reader, writer, shown))


async def _copy(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kept: bytearray
) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(65536):
            kept += data
            writer.write(data)
            await writer.drain()
    writer.close()
