"""HTTP by hand over loopback sockets: shows the exact bytes of a peer, and sends replies that no
library would."""

from __future__ import annotations

import asyncio
import fcntl
import ssl
import termios
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from tests.clock import soon, until

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
EVENTS = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@dataclass
class Message:
    """A request or a reply as it arrived: first line, headers in order, and the body without chunk
    framing."""

    line: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes = b""

    @property
    def target(self) -> bytes:
        return self.line.split(b" ", 2)[1]

    @property
    def status(self) -> int:
        return int(self.line.split(b" ", 2)[1])

    def get(self, name: bytes) -> list[bytes]:
        """Return all values of a header. The case of `name` does not matter."""
        return [value for key, value in self.headers if key.lower() == name.lower()]


async def read_head(reader: asyncio.StreamReader) -> Message:
    head = await reader.readuntil(b"\r\n\r\n")
    line, *lines = head[:-4].split(b"\r\n")
    pairs = (header.partition(b": ") for header in lines)
    return Message(line, [(name, value) for name, _, value in pairs])


async def chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield the chunks of a chunked body. Raises IncompleteReadError if it is cut off."""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        yield await reader.readexactly(size)
        await reader.readexactly(2)
    await reader.readexactly(2)


async def read_message(reader: asyncio.StreamReader, *, bodiless: bool = False) -> Message:
    message = await read_head(reader)
    if bodiless:
        return message
    if b"chunked" in message.get(b"transfer-encoding"):
        message.body = b"".join([chunk async for chunk in chunks(reader)])
    elif length := message.get(b"content-length"):
        message.body = await reader.readexactly(int(length[0]))
    return message


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


Handler = Callable[["Peer"], Awaitable[None]]


@dataclass
class Peer:
    """One connection to the upstream."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    upstream: Wire

    async def request(self) -> Message:
        message = await read_message(self.reader)
        self.upstream.requests.append(message)
        return message

    async def send(self, *parts: bytes) -> None:
        for part in parts:
            self.writer.write(part)
            await self.writer.drain()

    async def delivered(self) -> None:
        """Wait until the other side's kernel has everything that was sent."""
        sock = self.writer.get_extra_info("socket")
        await until(lambda: not any(fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4))))

    async def gone(self) -> None:
        """Wait until the other side has closed the connection."""
        with suppress(ConnectionError):
            while await self.reader.read(65536):
                pass

    def reset(self) -> None:
        self.writer.transport.abort()


@dataclass
class Wire:
    """An upstream, with the requests that it got and the number of connections that carried
    them."""

    port: int = 0
    requests: list[Message] = field(default_factory=list)
    connections: int = 0
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """Handlers set this when the other side has closed the connection."""
    faults: list[BaseException] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@asynccontextmanager
async def upstream(
    handler: Handler, tls: ssl.SSLContext | None = None, port: int = 0
) -> AsyncIterator[Wire]:
    """Run an upstream that calls `handler` for each connection, and closes the connection when it
    returns."""
    wire = Wire()
    tasks: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire.connections += 1
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await handler(Peer(reader, writer, wire))
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        except AssertionError as error:
            wire.faults.append(error)
        finally:
            writer.close()
            tasks.discard(task)

    server = await asyncio.start_server(connected, "127.0.0.1", port, limit=1 << 20, ssl=tls)
    wire.port = server.sockets[0].getsockname()[1]
    try:
        yield wire
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert not wire.faults, wire.faults


def replying(reply: bytes) -> Handler:
    """Return a handler that answers every request of a connection with the same bytes."""

    async def handle(peer: Peer) -> None:
        while True:
            await peer.request()
            await peer.send(reply)

    return handle


@asynccontextmanager
async def connection(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    try:
        yield reader, writer
    finally:
        writer.close()


async def heard(port: int) -> None:
    """Returns when the proxy has read whatever it was sent before: it reads in the order in which
    things come."""
    reply = await soon(ask(port, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"))
    assert reply.status == 200


async def ask(port: int, request: bytes, *, bodiless: bool = False) -> Message:
    """Send these bytes on a new connection, and return the reply."""
    async with connection(port) as (reader, writer):
        writer.write(request)
        return await read_message(reader, bodiless=bodiless)
