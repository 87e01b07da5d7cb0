"""Upstream, written down beforehand: what it answers, piece by piece, and what it was sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from proxy.upstream.headers import Header, Headers

STREAM = (b"Content-Type", b"text/event-stream; charset=utf-8")
JSON = (b"Content-Type", b"application/json")

Step = bytes | float | Exception | asyncio.Event
"""A piece of a body; a pause in seconds; a fault; or an event that has to happen before the reply
goes on."""


class ScriptedReply:
    """A reply of upstream, as far as the proxy looks at one."""

    def __init__(
        self, *steps: Step, status: int = 200, headers: Sequence[Header] | None = None
    ) -> None:
        self.status = status
        kind = STREAM if steps and not str(steps[0]).startswith("b'{") else JSON
        self.headers = Headers([kind] if headers is None else headers)
        self.steps = steps
        self.read = 0
        self.closed = False
        self.reached = asyncio.Event()
        """Set when the reply waits for an event of its script."""

    @property
    def ended(self) -> bool:
        return False

    async def __aiter__(self) -> AsyncGenerator[bytes, None]:
        for step in self.steps:
            if isinstance(step, Exception):
                raise step
            if isinstance(step, asyncio.Event):
                self.reached.set()
                await step.wait()
            elif isinstance(step, float):
                await asyncio.sleep(step)
            else:
                self.read += 1
                yield step

    async def aclose(self) -> None:
        self.closed = True


class ScriptedUpstream:
    """Answers each request with the next of `replies`, or raises it; keeps the requests."""

    def __init__(self, *replies: ScriptedReply | Exception) -> None:
        self.replies = list(replies)
        self.requests: list[Any] = []

    async def send(self, request: Any) -> Any:
        self.requests.append(request)
        reply = self.replies[len(self.requests) - 1]
        if isinstance(reply, Exception):
            raise reply
        return reply

    @property
    def read(self) -> list[ScriptedReply]:
        """The replies that were given so far."""
        return [
            reply
            for reply in self.replies[: len(self.requests)]
            if isinstance(reply, ScriptedReply)
        ]
