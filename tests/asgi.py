"""Plays an ASGI server's part in one request."""

from __future__ import annotations

import asyncio
from typing import Any

from proxy.requests.exchange import Exchange

Headers = list[tuple[bytes, bytes]]


class ScriptedClient:
    """Sends `pieces` as the request's body, then nothing until `hang_up`. Keeps the messages that it receives."""

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
            "client": ("127.0.0.1", 1),
            **scope,
        }

    def say(self, body: bytes, more: bool) -> None:
        self._incoming.put_nowait({"type": "http.request", "body": body, "more_body": more})

    def hang_up(self) -> None:
        self._incoming.put_nowait({"type": "http.disconnect"})

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
        return bool(self.messages) and not self.messages[-1].get("more_body", False) and len(self.messages) > 1
