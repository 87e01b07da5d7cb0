"""What an operation leaves behind in logs and metrics, and that it ends when its caller goes."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from proxy.apps import operations
from proxy.requests.exchange import Exchange
from tests.clock import wait_until
from tests.fake_upstream import StrictUpstream, hang, text
from tests.serving import PLAIN, Proxy

KEY = {"authorization": "Bearer key-of-4711"}
SECRET = "heliotrope"
HISTORY = [
    {"role": "user", "content": SECRET},
    {
        "role": "assistant",
        "tool_calls": [{"id": f"call_{SECRET}", "type": "function", "function": {"name": "f"}}],
    },
    {"role": "tool", "tool_call_id": f"call_{SECRET}", "content": f"{SECRET} " * 500},
    {"role": "user", "content": "Go on."},
]
OFFLOAD = {
    "messages": HISTORY,
    "store_dir": f"/{SECRET}",
    "max_total_tokens": 0,
    "max_tool_message_tokens": 100,
}


def logged(proxy: Proxy, kind: str = "operation") -> list[dict[str, Any]]:
    lines = (line for line in proxy.log().splitlines() if line.startswith("{"))
    return [line for line in map(json.loads, lines) if line.get("kind") == kind]


@pytest.fixture
def proxy(spawn: Callable[..., Proxy], up: StrictUpstream) -> Proxy:
    up.respond(lambda request: text("<state_snapshot>a record</state_snapshot>"))
    return spawn({"default": {"tenant": "acme", "upstream": {"base_url": up.url}}})


def test_logs_and_metrics_of_operations_contain_no_content(proxy: Proxy) -> None:
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/context_offload", OFFLOAD | {"context_manage_mode": "compact"}),
        (
            "/context_offload",
            OFFLOAD | {"context_manage_mode": "compress", "model": "m", "chat_id": SECRET},
        ),
        ("/grep", {"pattern": SECRET}),
        ("/read_file", {"file_path": f"/{SECRET}/none"}),
        ("/context_offload", OFFLOAD | {"store_dir": f"../{SECRET}"}),
    ]
    with httpx.Client(base_url=proxy.root, headers=KEY, trust_env=False, verify=PLAIN) as caller:
        statuses = [caller.post(path, json=body).status_code for path, body in asked]
    wait_until(lambda: len(logged(proxy)) == len(asked))
    lines = logged(proxy)
    assert statuses == [line["status"] for line in lines] == [200, 200, 200, 404, 400]
    assert [line["path"] for line in lines] == [path for path, _ in asked]
    assert {(line["tenant"], line["method"]) for line in lines} == {("acme", "POST")}
    assert [line["fault"] for line in lines] == ["", "", "", "client", "client"]
    compacted, compressed = lines[:2]
    assert compacted["mode"] == "compact" and compacted["compacted"] == 1
    assert compacted["tokens_after"] < 200 < 500 < compacted["tokens_before"]
    assert compressed["model"] == "m" and compressed["compressed"] == 1
    assert SECRET not in proxy.log() and "4711" not in proxy.log()
    assert proxy.metric("requests_total", 'kind="operation",status="200",tenant="acme"') == 3
    assert SECRET not in proxy.metrics()


COMPRESSING = json.dumps(OFFLOAD | {"context_manage_mode": "compress", "model": "m"}).encode()


@pytest.mark.parametrize(
    ("body", "kind"),
    [(COMPRESSING[:1], "refused"), (COMPRESSING, "operation")],
    ids=["partly sent", "whole"],
)
def test_a_caller_who_leaves_is_no_longer_served(
    proxy: Proxy, up: StrictUpstream, body: bytes, kind: str
) -> None:
    up.respond(lambda request: hang())
    head = f"POST /context_offload HTTP/1.1\r\nhost: localhost\r\nauthorization: {KEY['authorization']}\r\n"
    head += f"content-length: {len(COMPRESSING)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", proxy.port)) as caller:
        caller.sendall(head.encode() + body)
        wait_until(lambda: bool(up.chats) or kind == "refused")
    wait_until(lambda: bool(logged(proxy, kind)))
    assert [line["fault"] for line in logged(proxy, kind)] == ["client_gone"]


BODY = b'{"messages":[{"role":"user","content":"mine"}]}'


@pytest.mark.parametrize("coding", [b"", b"content-encoding: gzip\r\n"])
@pytest.mark.parametrize("path", [b"/context_offload", b"/context_compact", b"/grep"])
def test_the_body_of_a_refused_caller_is_not_read(
    serve: Callable[..., Proxy], monkeypatch: pytest.MonkeyPatch, path: bytes, coding: bytes
) -> None:
    """Whether it comes or not: it is neither waited for nor decoded nor parsed."""

    def look(*_: object) -> Any:
        raise AssertionError("the body was read")

    monkeypatch.setattr(Exchange, "body", look)
    monkeypatch.setattr(operations, "decoded_request", look)
    upstream = {"base_url": "http://127.0.0.1:9/v1"}
    proxy = serve(
        {"acme": {"tenant": "acme", "api_keys": [{"sha256": "0" * 64}], "upstream": upstream}}
    )
    for body in (BODY, b"{"):
        head = b"POST %b HTTP/1.1\r\nhost: localhost\r\n%bcontent-length: %d\r\n\r\n" % (
            path,
            coding,
            len(BODY),
        )
        with socket.create_connection(("127.0.0.1", proxy.port), timeout=60) as caller:
            caller.sendall(head + body)
            reply = caller.makefile("rb")
            status, *headers = iter(reply.readline, b"\r\n")
            [length] = [
                int(line.partition(b":")[2])
                for line in headers
                if line.lower().startswith(b"content-length:")
            ]
            assert status.startswith(b"HTTP/1.1 401 ") and b'"messages":[]' in reply.read(length)
