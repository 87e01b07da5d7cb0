"""The client that must be served whatever others do, and the book of its requests and the replies
they must get."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import re
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from tests.wire import Message, read_message
from tests.wire_fuzz import replies
from tests.wire_fuzz.attacks import RESULT, called, through_a_front, user

KEY = "honest-key"
IDENTITY = b"Bearer " + KEY.encode()
PATIENCE = 150.0
"""Seconds to wait for an honest reply. That is far above what it should take, so that a busy
machine fails nothing."""
KEPT = 100
"""Most violations whose texts are kept."""
HEARTBEAT = re.compile(
    rb'(?m)^(?::[^\n]*|data: [^\n]*"delta":\{\},"finish_reason":null\}\]\})\n\n?'
)
"""What the proxy may add to a stream while it waits."""
TOOL = {"type": "function", "function": {"name": "fetch", "parameters": {"type": "object"}}}


@dataclass(frozen=True)
class Asked:
    """An honest request: the bytes to send, and what must arrive upstream, in order, and come back.

    `expected` is what must arrive and come back. None means the same as while nobody attacked.
    """

    kind: str
    number: int
    wire: bytes
    target: str
    expected: tuple[tuple[bytes, ...], bytes] | None


@dataclass
class Book:
    """Running honest requests by number, finished ones by kind, and the violations."""

    say: Callable[[str], None] = lambda _: None
    """Called with each violation at once."""
    recent: deque[int] = field(default_factory=deque)
    """The attackers' cases of late: a violation names them."""
    violations: list[str] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)
    shared: int = 0
    """How many of them used a connection that an attacker had used before."""
    arrived: dict[int, list[bytes]] = field(default_factory=dict)
    known: dict[str, tuple[tuple[bytes, ...], bytes]] = field(default_factory=dict)
    """Maps kinds to the bodies upstream and the reply, as they were while nobody attacked."""
    numbers: int = 0

    faults: int = 0
    """The number of all violations. Only the first ones keep their texts."""

    def fault(self, text: str) -> None:
        self.faults += 1
        text += f"\n  cases of late: {' '.join(map(str, self.recent))}" if self.recent else ""
        if len(self.violations) < KEPT:
            self.violations.append(text)
            self.say(f"VIOLATION: {text}")

    def arrival(self, message: Message) -> None:
        """Note a request that reached upstream under the honest key. The proxy itself asks for
        models, once."""
        if message.line.startswith(b"GET /v1/models "):
            return
        number = message.get(b"x-honest")
        if len(number) != 1 or int(number[0]) not in self.arrived:
            self.fault(
                f"a request that nobody sent arrived under the honest key: {message.line!r} {message.body[:200]!r}"
            )
            return
        self.arrived[int(number[0])].append(message.line.rpartition(b" ")[0] + b"\n" + message.body)

    def check(self, asked: Asked, reply: Message, where: str = "") -> None:
        """Check that the right reply came back and that the right bodies arrived upstream."""
        name = f"honest {asked.kind} {asked.number}{where}"
        arrived = tuple(self.arrived.pop(asked.number))
        said = HEARTBEAT.sub(b"", reply.body)
        if asked.expected is None:
            upstream, wanted = self.known.setdefault(asked.kind, (arrived, said))
        else:
            upstream, wanted = asked.expected
        if reply.status != 200:
            self.fault(f"{name}: {reply.line!r} {reply.body[:300]!r}")
        elif said != wanted:
            self.fault(f"{name}: was told {said[:300]!r} instead of {wanted[:300]!r}")
        elif arrived != upstream:
            self.fault(f"{name}: upstream got {arrived!r:.600} instead of {upstream!r:.600}")
        self.done[asked.kind] += 1


# What it asks


def _post(number: int, target: str, body: bytes, *fields: bytes) -> bytes:
    lines = [f"POST {target} HTTP/1.1".encode(), b"Host: 127.0.0.1", b"Authorization: " + IDENTITY]
    lines += [
        b"X-Honest: %d" % number,
        b"Content-Type: application/json",
        b"Content-Length: %d" % len(body),
        *fields,
    ]
    return b"\r\n".join([*lines, b"", b""]) + body


def _chat(number: int, **members: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [user(f"number {number}")], **members}).encode()


def _text(number: int) -> dict[str, Any]:
    return {"content": f"This is said to number {number} alone."}


CHAT = "/v1/chat/completions"


def _direct(kind: str, number: int, body: bytes, reply: bytes, *fields: bytes) -> Asked:
    arrives = f"POST {CHAT}\n".encode() + body
    return Asked(kind, number, _post(number, CHAT, body, *fields), CHAT, ((arrives,), reply))


def plain(number: int) -> Asked:
    return _direct("plain", number, _chat(number), replies.completion(_text(number)))


def streamed(number: int) -> Asked:
    return _direct(
        "streamed", number, _chat(number, stream=True), b"".join(replies.events(_text(number)))
    )


def zipped(number: int) -> Asked:
    """A chat with nothing to move, so that the client's bytes must go through unchanged."""
    body = gzip.compress(_chat(number), mtime=0)
    return _direct(
        "zipped", number, body, replies.completion(_text(number)), b"Content-Encoding: gzip"
    )


def relayed(number: int) -> Asked:
    target = f"/v1/models?number={number}"
    wire = (
        _post(number, target, b"")
        .replace(b"POST", b"GET", 1)
        .replace(b"Content-Length: 0\r\n", b"")
    )
    arrives = f"GET {target}\n".encode()
    return Asked("relayed", number, wire, target, ((arrives,), replies.completion(_text(number))))


def _history(**members: Any) -> bytes:
    messages: list[Any] = [user("Fetch the logs.")]
    for turn in range(6):
        messages += called(f'{{"n": {turn}}}', f"log {turn}\n" + RESULT, f"call_{turn}")
        messages += [{"role": "assistant", "content": "I have it."}]
    return json.dumps(
        {
            "model": "m",
            "messages": [*messages, user("What is the code?")],
            "tools": [TOOL],
            **members,
        }
    ).encode()


def _same(kind: str, number: int, target: str, body: bytes) -> Asked:
    return Asked(kind, number, _post(number, target, body), target, None)


def offloaded(number: int) -> Asked:
    """A chat whose results move and in which the proxy answers a round of its tools."""
    return _same("offloaded", number, CHAT, _history())


def offloaded_stream(number: int) -> Asked:
    return _same("offloaded stream", number, CHAT, _history(stream=True))


def grep(number: int) -> Asked:
    body = {"pattern": "code is 1[0-9]*7$", "path": "/kept"}
    return _same("grep", number, "/grep", json.dumps(body).encode())


def compact(number: int) -> bytes:
    """Return the request that stores files for `grep`, before anybody attacks."""
    messages = json.loads(_history())["messages"]
    limits = {"max_total_tokens": 0, "max_tool_message_tokens": 0, "keep_recent_count": 0}
    return _post(
        number,
        "/context_compact",
        json.dumps({"messages": messages, "store_dir": "/kept", **limits}).encode(),
    )


KINDS: tuple[Callable[[int], Asked], ...] = (
    plain, streamed, zipped, relayed, offloaded, offloaded_stream, grep,
)  # fmt: skip


def answer(message: Message) -> list[replies.Piece]:
    """Return upstream's reply to the honest client."""
    number = int((message.get(b"x-honest") or [b"0"])[0])  # the proxy itself asks for models
    if message.line.startswith(b"GET"):
        return [replies.whole(replies.completion(_text(number)))]
    body = message.body
    if message.get(b"content-encoding"):
        return [replies.whole(replies.completion(_text(number)))]
    asked = json.loads(body)
    match asked["messages"][-1]:
        case {"role": "tool"}:
            return replies.fitting(message, {"content": "The code is what it was."})
        case {"content": "What is the code?"}:
            searched = [replies.call("grep", {"pattern": "line 7: .*"})]
            return replies.fitting(message, {"tool_calls": searched})
    return replies.fitting(message, _text(number))


# How it asks


@dataclass
class Link:
    """A kept connection to the proxy."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @staticmethod
    async def open(port: int) -> Link:
        return Link(*await asyncio.open_connection("127.0.0.1", port, limit=1 << 22))

    def close(self) -> None:
        self.writer.close()


class Client:
    """Sends one request after another, on one connection while it lasts."""

    def __init__(self, port: int, book: Book, chance: random.Random) -> None:
        self._port, self._book, self._chance = port, book, chance
        self._link: Link | None = None

    async def first(self) -> None:
        """Send everything once while nobody attacks, and twice what is compared with the first
        time."""
        reply = await self._told(await self._free(), compact(self._next()))
        if reply.status != 200:
            self._book.fault(f"nothing was stored: {reply.line!r} {reply.body[:300]!r}")
        await self.again()
        await self.again()

    async def again(self) -> None:
        """Send every kind of request once."""
        for kind in KINDS:
            await self.ask(kind)

    async def ask(self, kind: Callable[[int], Asked] | None = None) -> None:
        """Send one request on the client's own connection."""
        await self._asking(kind or self._chance.choice(KINDS), await self._free(), behind=None)

    async def ask_behind(self, number: int) -> None:
        """Send one request on a connection that has just served an attacker's request, as behind a
        front."""
        link = await Link.open(self._port)
        try:
            if await self._served(link, number):
                self._book.shared += 1
                await self._asking(self._chance.choice(KINDS), link, behind=number)
        finally:
            link.close()

    def close(self) -> None:
        if self._link:
            self._link.close()

    async def _free(self) -> Link:
        """Return the kept connection, or a new one if the proxy has closed it."""
        if self._link is None or self._link.reader.at_eof() or self._link.writer.is_closing():
            self.close()
            self._link = await Link.open(self._port)
        return self._link

    async def _served(self, link: Link, number: int) -> bool:
        """Send an attacker's whole request. Returns whether its reply allows the connection to be
        used again."""
        with suppress(OSError, asyncio.IncompleteReadError):
            for step in through_a_front(random.Random(f"front/{number}"), number):
                if isinstance(step, bytes):
                    link.writer.write(step)
                    await link.writer.drain()
                elif isinstance(step, float):
                    await asyncio.sleep(step)
            async with asyncio.timeout(PATIENCE):
                reply = await read_message(link.reader)
            closes = any(b"close" in value.lower() for value in reply.get(b"connection"))
            return not closes and not link.reader.at_eof()
        return False

    async def _asking(self, kind: Callable[[int], Asked], link: Link, behind: int | None) -> None:
        asked = kind(self._next())
        self._book.arrived[asked.number] = []
        where = "" if behind is None else f", --front {behind}"
        try:
            self._book.check(asked, await self._told(link, asked.wire), where)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, ValueError) as error:
            self._book.arrived.pop(asked.number, None)
            self._book.fault(f"honest {asked.kind} {asked.number}{where}: {error!r}")
            link.close()

    async def _told(self, link: Link, wire: bytes) -> Message:
        link.writer.write(wire)
        async with asyncio.timeout(PATIENCE):
            return await read_message(link.reader)

    def _next(self) -> int:
        self._book.numbers += 1
        return self._book.numbers
