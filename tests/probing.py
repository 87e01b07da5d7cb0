"""A process that repeatedly asks a proxy for /health and for small chats, and reports how long each
took.

    with Probe(port, key="k", interval=0.005) as probe:
        …
    probe.seen.health  # seconds

It is a separate process because the attacking one is busy and would measure its own stalls. Each
kind of request has its own connection.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

PATIENCE = 120.0
"""Seconds to wait for one reply."""
READ = 20_000
"""Bytes of a chat that the proxy reads in a thread, because it is above `reading.INLINE_BYTES`."""
READ_INTERVAL = 0.05
"""Seconds between two of these chats, because each takes a millisecond or two of CPU time."""


class Seen(msgspec.Struct, frozen=True):
    """The seconds of each request in order, and the failures. The end may have cut off the last
    request."""

    health: list[float] = []
    chat: list[float] = []
    """Chats of a few bytes."""
    read: list[float] = []
    """Chats of `READ` bytes, each different, so that each needs one of the proxy's threads."""
    failed: list[str] = []


class Probe:
    """The child process. `seen` is filled in when the block ends."""

    def __init__(self, port: int, key: str = "", interval: float = 0.005) -> None:
        self._command = [sys.executable, "-m", "tests.probing", str(port), str(interval), key]
        self.seen = Seen()

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[1],
        )
        assert self._process.stdout
        self._process.stdout.readline()  # the child has started
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        raised: BaseException | None,
        _: TracebackType | None,
    ) -> None:
        said, _ignored = self._process.communicate()
        self.seen = msgspec.json.decode(said, type=Seen)


Request = tuple[str, str, bytes | None, dict[str, str]]
"""Method, target, body, headers."""


class _Asking(threading.Thread):
    """Sends the same request repeatedly on one connection."""

    def __init__(self, port: int, interval: float, request: Callable[[], Request]) -> None:
        super().__init__(daemon=True)
        self._port, self._interval, self._request = port, interval, request
        self._begun: float | None = None
        self._took: list[float] = []
        self.failed: list[str] = []

    def run(self) -> None:
        client = HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE)
        while True:
            asked = self._request()
            self._begun = time.perf_counter()
            try:
                client.request(*asked)
                reply = client.getresponse()
                said = reply.read()
                if reply.status != 200:
                    self.failed.append(f"{asked[1]}: {reply.status} {said[:200]!r}")
            except (OSError, HTTPException) as error:
                self.failed.append(f"{asked[1]}: {error!r}")
                client.close()
            self._took.append(time.perf_counter() - self._begun)
            self._begun = None
            time.sleep(self._interval)

    def took(self) -> list[float]:
        """Return the seconds of all requests so far, including the time of one that is still
        waiting."""
        begun = self._begun
        return [*self._took, time.perf_counter() - begun] if begun else list(self._took)


def _chat(key: str, text: str) -> Request:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    return "POST", "/v1/chat/completions", body, headers


def main(port: int, interval: float, key: str) -> None:
    numbers = itertools.count()
    health = _Asking(port, interval, lambda: ("GET", "/health", None, {}))
    chat = _Asking(port, interval, lambda: _chat(key, "What is new?"))
    read = _Asking(
        port, READ_INTERVAL, lambda: _chat(key, f"{next(numbers)} what is new? ".ljust(READ, "n"))
    )
    asking = [health, chat, read] if key else [health]
    for one in asking:
        one.start()
    print(flush=True)
    sys.stdin.read()
    seen = Seen(health.took(), chat.took(), read.took(), health.failed + chat.failed + read.failed)
    sys.stdout.buffer.write(msgspec.json.encode(seen))


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3])
