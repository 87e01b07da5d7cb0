"""What the parser is given. What comes of it, acceptance/test_relay.py shows through the real server."""

from __future__ import annotations

import pytest

from proxy.protocol import without_offer


@pytest.mark.parametrize(
    ("data", "parsed"),
    [
        (b"GET / HTTP/1.1\r\nUpgrade: h2c\r\nA: 1\r\n\r\n", b"GET / HTTP/1.1\r\nA: 1\r\n\r\n"),
        (b"GET / HTTP/1.1\r\nA: 1\r\nUPGRADE:h2c \r\n\r\nbody", b"GET / HTTP/1.1\r\nA: 1\r\n\r\nbody"),
        (b"GET / HTTP/1.1\r\nUpgrade: websocket\r\n\r\n", b"GET / HTTP/1.1\r\nUpgrade: websocket\r\n\r\n"),
        (
            b"GET / HTTP/1.1\r\nA: h2c\r\n\r\nx\r\nUpgrade: h2c\r\n",
            b"GET / HTTP/1.1\r\nA: h2c\r\n\r\nx\r\nUpgrade: h2c\r\n",
        ),
        (b"", b""),
    ],
)
def testwithout_offer(data: bytes, parsed: bytes) -> None:
    assert without_offer(data) == parsed
