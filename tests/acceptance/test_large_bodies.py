"""Costly bodies: each goes upstream unchanged or gets a clear error, while other clients are
served."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from tests.serving import Proxy, served


def chat(messages: bytes, others: bytes = b"") -> bytes:
    return b'{"model":"m","messages":[' + messages + b"]" + others + b"}"


def many(one: bytes, number: int) -> bytes:
    return b",".join([one] * number)


USER = b'{"role":"user","content":"hi"}'

BODIES: dict[str, tuple[str, Callable[[], bytes]]] = {
    "empty gzip members": ("gzip", lambda: gzip.compress(b"", mtime=0) * 60_000),
    "stored deflate": ("deflate", lambda: zlib.compress(chat(USER) + b" " * (8 << 20), 0)),
    "empty messages": ("", lambda: chat(many(b"{}", 500_000))),
    "messages": ("", lambda: chat(many(USER, 200_000))),
    "numbers": ("", lambda: chat(USER, b',"x":[' + many(b"1", 1_000_000) + b"]")),
    "parts": ("", lambda: chat(b'{"role":"user","content":[' + many(b"{}", 250_000) + b"]}")),
    "half a pair": ("", lambda: chat(b'{"role":"user","content":"' + b"text " * 2_000_000 + rb'\ud83d"}')),
    "nested": ("", lambda: chat(b"[" * 1_000_000)),
}  # fmt: skip


class Keeping(BaseHTTPRequestHandler):
    """An upstream that accepts anything, and keeps the last body."""

    body = b""

    def do_POST(self) -> None:
        type(self).body = self.rfile.read(int(self.headers["content-length"]))
        self.send_response(418)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def proxy() -> Iterator[Proxy]:
    upstream = ThreadingHTTPServer(("127.0.0.1", 0), Keeping)
    Thread(target=upstream.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{upstream.server_port}/v1"
    with served({"default": {"upstream": {"base_url": url}}}) as proxy:
        yield proxy
    upstream.shutdown()
    upstream.server_close()


@pytest.mark.parametrize("name", BODIES)
def test_requests_too_expensive_to_plan_go_as_they_came(proxy: Proxy, name: str) -> None:
    coding, made = BODIES[name]
    body = made()
    reply = proxy.post(
        "/v1/chat/completions", body, **({"content-encoding": coding} if coding else {})
    )
    assert reply.status_code == 418
    assert Keeping.body == body


@pytest.mark.parametrize(
    ("name", "words"), [("empty messages", "more than 20000"), ("nested", "recursion depth")]
)
def test_an_operation_names_the_bound_that_a_body_exceeds(
    proxy: Proxy, name: str, words: str
) -> None:
    reply = proxy.post("/context_offload", BODIES[name][1]())
    assert reply.status_code == 400
    assert words in reply.json()["answer"]
