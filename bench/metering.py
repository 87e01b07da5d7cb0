"""A proxy whose CPU time and memory are measured, between a client and an upstream that do
little."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import httpx
import msgspec

from tests.serving import Proxy, spawned

REPLY = "<state_snapshot>The search goes on as it was agreed.</state_snapshot>"
"""The reply to every request: an answer that is also a valid snapshot."""


class Cost(msgspec.Struct, frozen=True):
    """The cost of a request."""

    cpu: float
    """CPU seconds of the process."""
    peak: int
    """Peak RSS in bytes."""


class Meter:
    """A proxy's process and one connection to it."""

    def __init__(self, proxy: Proxy) -> None:
        assert proxy.process
        self._root = proxy.root
        self._writing = proxy.store / ".tmp"
        self._pid = proxy.process.pid
        # The process's CPU clock to the nanosecond, as clock_getcpuclockid(3) makes it;
        # /proc/PID/stat has only ticks.
        self._clock = (~self._pid << 3) | 2
        self._client = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=120)

    def ask(self, body: bytes) -> None:
        self._client.request(
            "POST", "/v1/chat/completions", body, {"Content-Type": "application/json"}
        )
        reply = self._client.getresponse()
        said = reply.read()
        if reply.status != 200:
            raise RuntimeError(f"{reply.status} {said[:200]!r}")

    def cost(self, body: bytes) -> Cost:
        """The cost of one request, background work included."""
        Path(f"/proc/{self._pid}/clear_refs").write_text("5")  # resets the peak RSS
        begun = self.cpu()
        self.ask(body)
        self.settle()
        return Cost(self.cpu() - begun, status(self._pid)["VmHWM"] * 1024)

    def settle(self) -> None:
        """Wait until the process was idle in three consecutive checks, with no record being
        written."""
        quiet = 0
        deadline = time.monotonic() + 60
        while quiet < 3 and time.monotonic() < deadline:
            before = self.cpu()
            time.sleep(0.03)
            quiet = quiet + 1 if self.cpu() - before < 0.0005 and not self._is_writing() else 0

    def _is_writing(self) -> bool:
        """Whether a record is being written; syncing it may take the disk longer than the checks
        last."""
        return self._writing.exists() and any(self._writing.iterdir())

    def cpu(self) -> float:
        return time.clock_gettime(self._clock)

    @property
    def rss(self) -> int:
        return status(self._pid)["VmRSS"] * 1024

    def cached(self) -> int:
        """Bytes of in-process caches, from the metrics."""
        page = httpx.get(f"{self._root}/metrics", timeout=10, trust_env=False).text
        return int(
            sum(map(float, re.findall(r"^offload_cache_bytes\{.*?\} (\S+)$", page, re.MULTILINE)))
        )


def status(pid: int) -> dict[str, int]:
    """The numbers in /proc/PID/status, such as `VmRSS`, `VmHWM` (kilobytes) and `Threads`."""
    said = Path(f"/proc/{pid}/status").read_text()
    return {name: int(value) for name, value in re.findall(r"^(\w+):\s+(\d+)", said, re.MULTILINE)}


@contextmanager
def metered(upstream: str, offload: Mapping[str, Any], first: bytes) -> Iterator[Meter]:
    """A proxy of its own with this `offload` section of its policy; `first` is a request to warm it
    up."""
    with spawned(
        {"default": {"upstream": {"base_url": upstream}, "offload": dict(offload)}}
    ) as proxy:
        meter = Meter(proxy)
        meter.ask(first)
        meter.settle()
        yield meter


class Answering(asyncio.Protocol):
    """Counts a request's bytes and answers. It keeps none: bodies have up to 50 MB."""

    def __init__(self) -> None:
        self._head = b""
        self._left = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if not self._left:
            self._head += data
            head, found, data = self._head.partition(b"\r\n\r\n")
            if not found:
                return
            self._head = b""
            length = re.search(rb"content-length:\s*(\d+)", head.lower())
            # the proxy asks for the list of models without a body
            self._left = int(length[1]) if length else 0
        self._left -= len(data)
        if self._left <= 0:
            self._transport.write(_answer())


def _answer() -> bytes:
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": REPLY},
        "finish_reason": "stop",
    }
    body = json.dumps(
        {"id": "chatcmpl-1", "object": "chat.completion", "model": "m", "choices": [choice]}
    ).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (
        len(body),
        body,
    )


@contextmanager
def answering() -> Iterator[str]:
    """Run an upstream in a thread; yields its base URL."""
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(loop.create_server(Answering, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        server.close()
        loop.close()
