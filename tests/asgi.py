"""Plays an ASGI server's part in one request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from proxy.errors import ProxyError
from proxy.requests.exchange import RAW, Account, Exchange

Headers = list[tuple[bytes, bytes]]


class ScriptedInflow:
    """What our server tells beyond ASGI."""

    def __init__(self, target: bytes) -> None:
        self.target = target
        self.fault: ProxyError | None = None
        self.watching: list[Callable[[], object]] = []
        self.admitted: list[Account] = []
        self.held = 0

    def watch(self, left: Callable[[], object], /) -> Callable[[], object]:
        self.watching.append(left)
        return lambda: self.watching.remove(left) if left in self.watching else None

    def admit(self, accounts: Sequence[Account]) -> None:
        self.admitted += accounts

    def hold(self, size: int) -> None:
        self.held += size

    def release(self, size: int) -> None:
        self.held -= size

    def let_go(self) -> None:
        self.held = 0


class ScriptedClient:
    """Sends `pieces` as the request's body, then nothing until `hang_up`. Keeps the messages that
    it receives."""

    def __init__(self, *pieces: bytes, headers: Headers | None = None, **scope: Any) -> None:
        self.messages: list[Any] = []
        self._incoming: asyncio.Queue[Any] = asyncio.Queue()
        for number, piece in enumerate(pieces, 1):
            self.say(piece, more=number < len(pieces))
        if headers is None:
            headers = [(b"transfer-encoding", b"chunked")] if pieces else []
        self.scope: dict[str, Any] = {
            "type": "http",
            "method": "POST",
            "path": "/v1/x",
            "raw_path": b"/v1/x",
            "query_string": b"",
            "headers": headers,
            "client": ("192.0.2.1", 1),
            "extensions": {},
            **scope,
        }
        self.inflow = ScriptedInflow(self.scope["raw_path"])
        self.scope["extensions"][RAW] = self.inflow

    def say(self, body: bytes, more: bool) -> None:
        self._incoming.put_nowait({"type": "http.request", "body": body, "more_body": more})

    def hang_up(self) -> None:
        self._incoming.put_nowait({"type": "http.disconnect"})
        for left in tuple(self.inflow.watching):
            left()

    async def receive(self) -> Any:
        return await self._incoming.get()

    async def send(self, message: Any) -> None:
        self.messages.append(message)

    def client(self) -> Exchange:
        return Exchange(self.scope, self.receive, self.send)

    @property
    def status(self) -> int:
        status: int = self.messages[0]["status"]
        return status

    @property
    def headers(self) -> Headers:
        headers: Headers = self.messages[0]["headers"]
        return headers

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages[1:])

    @property
    def complete(self) -> bool:
        return (
            bool(self.messages)
            and not self.messages[-1].get("more_body", False)
            and len(self.messages) > 1
        )
