"""A client that closes right after the last byte counts as served, and one that closes earlier as
gone."""

from __future__ import annotations

import json
import socket
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tests.clock import PATIENCE, wait_until
from tests.fake_upstream import Pieces, StrictUpstream, endless, text, whole
from tests.serving import Proxy, tight
from tests.steps import CHAT_TOOL, chat

Json = dict[str, Any]

TIMES = 10
LONG: list[Json] = [
    {"role": "user", "content": "Look it up."},
    *chat("call_1", "heliotrope " * 1_000),
    {"role": "assistant", "content": "I have seen it."},
    {"role": "user", "content": "Go on."},
]
OFFLOADED = {"model": "m", "messages": LONG, "tools": [CHAT_TOOL]}
UNTOUCHED = {"model": "m", "messages": LONG[:1]}

CHAT = "/v1/chat/completions"
KINDS: dict[str, tuple[str, Json, str]] = {
    "offloaded": (CHAT, OFFLOADED, "offloaded"),
    "offloaded stream": (CHAT, OFFLOADED | {"stream": True}, "offloaded"),
    "untouched": (CHAT, UNTOUCHED, "untouched"),
    "untouched stream": (CHAT, UNTOUCHED | {"stream": True}, "untouched"),
    "relay": ("/v1/embeddings", {"model": "m", "input": "x"}, "relay"),
    "operation": ("/context_compact", {"messages": LONG, "store_dir": "/s"}, "operation"),
}


def request(path: str, body: Json, *headers: str) -> bytes:
    content = json.dumps(body).encode()
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "Authorization: Bearer k",
        f"Content-Length: {len(content)}",
    ]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + content


def whole_reply(caller: socket.socket) -> bytes:
    """Read up to the last byte, without waiting for the connection to close."""
    reply = b""
    while True:
        head, end, body = reply.partition(b"\r\n\r\n")
        if end and b"transfer-encoding: chunked" in head.lower():
            if body.endswith(b"0\r\n\r\n"):
                return reply
        elif end and len(body) == int(
            head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
        ):
            return reply
        more = caller.recv(65536)
        assert more, reply
        reply += more


def logged(proxy: Proxy, number: int) -> list[Json]:
    """Wait for the log lines of `number` requests, and return them."""

    def requests() -> list[Json]:
        lines = [json.loads(line) for line in proxy.log().splitlines() if line.startswith("{")]
        return [line for line in lines if "request_id" in line]

    wait_until(lambda: len(requests()) >= number)
    return requests()


@pytest.mark.parametrize("headers", [(), ("Connection: close",)], ids=["kept", "closed"])
def test_a_client_that_closes_after_the_last_byte_counts_as_served(
    up: StrictUpstream, spawn: Callable[..., Proxy], headers: tuple[str, ...]
) -> None:
    up.respond(
        lambda asked: text("Yes.") if asked.is_chat else whole({"object": "list", "data": []})
    )
    proxy = spawn({"default": tight(up.url)})
    for path, body, _ in KINDS.values():
        for _ in range(TIMES):
            with socket.create_connection(("127.0.0.1", proxy.port), timeout=PATIENCE) as caller:
                caller.sendall(request(path, body, *headers))
                assert whole_reply(caller).startswith(b"HTTP/1.1 200 ")
    seen = Counter((line["kind"], line["fault"]) for line in logged(proxy, TIMES * len(KINDS)))
    assert seen == Counter([(kind, "") for *_, kind in KINDS.values()] * TIMES)


@pytest.mark.parametrize("body", [OFFLOADED, UNTOUCHED], ids=["offloaded", "untouched"])
def test_a_client_that_closes_before_the_last_byte_counts_as_gone(
    up: StrictUpstream, spawn: Callable[..., Proxy], body: Json
) -> None:
    def respond(_: object) -> Pieces:
        return endless()

    up.respond(respond)
    proxy = spawn({"default": tight(up.url)})
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=PATIENCE) as caller:
        caller.sendall(request(CHAT, body | {"stream": True}))
        assert caller.recv(65536)
    assert [line["fault"] for line in logged(proxy, 1)] == ["client_gone"]
