"""Bodies made to cost much: each goes upstream as it came, or gets a clear error, and others are served beside it."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator

import httpx
import pytest

from tests.serving import Proxy, served
from tests.upstream import StrictUpstream

KEY = {"authorization": "Bearer k", "content-type": "application/json"}


def chat(messages: bytes, others: bytes = b"") -> bytes:
    return b'{"model":"m","messages":[' + messages + b"]" + others + b"}"


def many(one: bytes, number: int) -> bytes:
    return b",".join([one] * number)


USER = b'{"role":"user","content":"hi"}'

BODIES: dict[str, tuple[str, Callable[[], bytes]]] = {
    "empty gzip members": ("gzip", lambda: gzip.compress(b"", mtime=0) * 60_000),
    "stored deflate": ("deflate", lambda: zlib.compress(chat(USER) + b" " * (8 << 20), 0)),
    "empty messages": ("", lambda: chat(many(b"{}", 2_000_000))),
    "messages": ("", lambda: chat(many(USER, 200_000))),
    "numbers": ("", lambda: chat(USER, b',"x":[' + many(b"1", 4_000_000) + b"]")),
    "tools": ("", lambda: chat(USER, b',"tools":[' + many(b'{"type":"function","function":{"name":"f"}}', 50_000) + b"]")),
    "parts": ("", lambda: chat(b'{"role":"user","content":[' + many(b"{}", 1_000_000) + b"]}")),
    "half a pair": ("", lambda: chat(b'{"role":"user","content":"' + b"text " * 2_000_000 + rb'\ud83d"}')),
    "nested": ("", lambda: chat(b"[" * 4_000_000)),
}  # fmt: skip


@pytest.fixture(scope="module")
def proxy() -> Iterator[tuple[Proxy, list[bytes]]]:
    taken: list[bytes] = []
    with StrictUpstream(expect_refusals=True) as up, served({"default": {"upstream": {"base_url": up.url}}}) as proxy:
        yield proxy, up
