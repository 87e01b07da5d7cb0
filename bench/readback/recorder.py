"""A relay in front of the model's server that keeps every request and reply, to count what really
went there."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import msgspec

Json = dict[str, Any]

SECONDS = 1_800.0
"""Seconds for one reply; small models on processors are slow."""


class Passed(msgspec.Struct, frozen=True):
    """One request as it went to the server, and the reply."""

    request: Json
    reply: Json

    @property
    def message(self) -> Json:
        choices = self.reply.get("choices") or [{}]
        return choices[0].get("message") or {}

    @property
    def prompt(self) -> int:
        return (self.reply.get("usage") or {}).get("prompt_tokens") or 0

    @property
    def cached(self) -> int:
        details = (self.reply.get("usage") or {}).get("prompt_tokens_details") or {}
        return details.get("cached_tokens") or 0


class Recorder:
    """`url` ends in /v1. `taken` returns what has passed since the last call."""

    def __init__(self, base_url: str) -> None:
        self.url = ""
        self._base_url = base_url.rstrip("/")
        self._passed: list[Passed] = []

    def taken(self) -> list[Passed]:
        passed = self._passed
        self._passed = []
        return passed

    async def relay(
        self, path: str, body: bytes, authorization: str, client: socket.socket
    ) -> tuple[int, bytes]:
        """Pass a request on; returns status and body of the reply. A request whose client has left
        is given up, because small servers answer one after another. Raises ConnectionError then."""
        headers = {
            "content-type": "application/json",
            **({"authorization": authorization} if authorization else {}),
        }
        gone = asyncio.Event()
        asyncio.get_running_loop().add_reader(client, gone.set)
        async with httpx.AsyncClient(
            base_url=self._base_url, timeout=SECONDS, trust_env=False
        ) as upstream:
            asking = asyncio.create_task(
                upstream.post(path.removeprefix("/v1"), content=body, headers=headers)
            )
            leaving = asyncio.create_task(gone.wait())
            await asyncio.wait([asking, leaving], return_when=asyncio.FIRST_COMPLETED)
            for task in (asking, leaving):
                task.cancel()
            await asyncio.wait([asking, leaving])
        if asking.cancelled():
            raise ConnectionAbortedError("the client has left")
        reply = asking.result()
        if reply.status_code == 200:
            self._passed.append(Passed(json.loads(body), reply.json()))
        return reply.status_code, reply.content


@contextmanager
def recording(base_url: str) -> Iterator[Recorder]:
    """Listen on a free port of loopback."""
    recorder = Recorder(base_url)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # head and body are two segments, and the second waits 40 ms otherwise
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            try:
                key = self.headers.get("authorization", "")
                status, content = asyncio.run(recorder.relay(self.path, body, key, self.connection))
            except ConnectionAbortedError:
                self.close_connection = True
                return
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        recorder.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield recorder
        finally:
            server.shutdown()
            thread.join()
