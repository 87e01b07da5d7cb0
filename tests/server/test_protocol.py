"""What goes out. What comes in, acceptance/test_bounds.py and test_relay.py show through the real server."""

from __future__ import annotations

import asyncio
from typing import Any

from proxy.server.held_head import HeldHead

HEAD = b"HTTP/1.1 200 OK\r\n\r\n"


class Written(asyncio.Transport):
    """What goes out, a write each; None for the end."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bytes | None] = []
        self.closing = False

    def is_closing(self) -> bool:
        return self.closing

    def write(self, data: Any) -> None:
        self.seen.append(bytes(data))

    def close(self) -> None:
        self.seen.append(None)


async def test_a_head_is_sent_together_with_its_first_body_bytes() -> None:
    written = Written()
    held = HeldHead(written, asyncio.get_running_loop())
    for data in (HEAD, b"one", b"two"):
        held.write(data)
    assert written.seen == [HEAD + b"one", b"two"]
    await asyncio.sleep(0)
    assert written.seen == [HEAD + b"one", b"two"]


async def test_a_head_waits_for_at_most_one_turn_of_the_loop() -> None:
    written = Written()
    held = HeldHead(written, asyncio.get_running_loop())
    held.write(HEAD)
    assert written.seen == []
    await asyncio.sleep(0)
    assert written.seen == [HEAD]
    held.write(b"late")
    assert written.seen == [HEAD, b"late"]


async def test_a_held_head_is_sent_when_its_writer_closes() -> None:
    written = Written()
    held = HeldHead(written, asyncio.get_running_loop())
    held.write(HEAD)
    held.close()
    await asyncio.sleep(0)
    assert written.seen == [HEAD, None]


async def test_a_held_head_is_dropped_when_the_connection_closes() -> None:
    """uvloop raises for a write to a closed transport, even before it has said that the connection is lost."""
    written = Written()
    held = HeldHead(written, asyncio.get_running_loop())
    held.write(HEAD)
    written.closing = True
    await asyncio.sleep(0)
    assert written.seen == []
