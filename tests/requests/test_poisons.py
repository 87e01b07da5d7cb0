"""What one caller provokes never touches another, and not even that caller's next conversation."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from proxy.dialects.chat import CHAT
from tests.requests.scripted import JSON, ScriptedReply
from tests.requests.test_handler import LONG, POLICY, World, chat

ME, OTHER = "acme-1", "globex-2"
TAKEN = 10_000
"""The most bytes that this upstream takes. Everything sent here is ASCII, and its tokens are its characters."""


class Poisoned(World):
    """A process whose upstream takes everything but what `refusal` says."""

    def __init__(self, refusal: Callable[[bytes], tuple[int, Any] | None]) -> None:
        super().__init__()
        self._refusal = refusal
        self.bodies: list[bytes] = []
        upstream: Any = self.upstream
        upstream.send = self.answer

    async def answer(self, request: Any) -> ScriptedReply:
        self.bodies.append(request.content)
        refused = self._refusal(request.content)
        if refused is not None:
            return ScriptedReply(json.dumps(refused[1]).encode(), status=refused[0], headers=[JSON])
        usage = {"prompt_tokens": len(request.content), "completion_tokens": 5}
        whole = {"choices": [{"message": {"role": "assistant", "content": "42"}, "finish_reason": "stop"}]}
        return ScriptedReply(json.dumps(whole | {"usage": usage}).encode())

    async def say(self, namespace: str, body: bytes) -> tuple[int, list[bytes]]:
        """Return the reply's status, and what went upstream."""
        self.bodies.clear()
        client = await self.send(body, namespace)
        return client.status, list(self.bodies)


WINDOW = {"message": "Your input exceeds the context window of this model.", "code": "context_length_exceeded"}
ECHO = "maximum context length is 300"


def with_pdf() -> bytes:
    pdf = base64.b64encode(b"%PDF-1.7 " + b"x" * 60_000).decode()
    file = {"type": "file", "file": {"filename": "a.pdf", "file_data": f"data:application/pdf;base64,{pdf}"}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "Sum it up."}, file]}]
    return json.dumps({"model": "m", "messages": messages}).encode()


def invalid(value: str) -> dict[str, Any]:
    return {"error": {"message": f"Invalid value: '{value}'. Supported values are: 'low' and 'high'."}}


POISONS: dict[str, tuple[bytes, int, Any]] = {
    "a PDF that counts as one image": (with_pdf(), 400, {"error": WINDOW}),
    "an echoed parameter": (chat("word " * 1_500, more=True, reasoning_effort=ECHO), 400, invalid(ECHO)),
    "an echoed parameter, with a plausible number": (
        chat("word " * 1_500, more=True, reasoning_effort=ECHO + "0"), 400, invalid(ECHO + "0"),
    ),
    "an echoed parameter, outside of quotation marks": (
        chat("word " * 1_500, more=True, reasoning_effort=ECHO), 400, {"error": {"message": f"Unsupported: {ECHO}"}},
    ),
    "an echoed prompt": (
        chat("word " * 1_500, more=True, poison=ECHO),
        422,
        {"detail": [{"type": "extra_forbidden", "loc": ["body", "x"], "msg": "Not permitted", "input": ECHO + "0"}]},
    ),
    "an error's number": (
        json.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * 60_000}], "poison": 1}).encode(),
        400,
        {"error": {"message": "invalid params, context window exceeds limit (2013)"}},
    ),
}  # fmt: skip


@pytest.fixture(params=POISONS.values(), ids=POISONS.keys())
async def poisoned(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Poisoned, bytes]]:
    body, status, error = request.param
    marks = (b'"file"', b"reasoning_effort", b'"poison"')
    world = Poisoned(lambda sent: (status, error) if any(mark in sent for mark in marks) else None)
    yield world, body
    await world.close()


NEXT = (LONG, chat("word " * 1_500, more=True), chat("word " * 300, more=True))
"""The requests of other conversations: one that is offloaded, and two that go as they came."""


async def test_a_poison_changes_no_other_request(poisoned: tuple[Poisoned, bytes]) -> None:
    world, poison = poisoned
    before = [await world.say(OTHER, body) for body in NEXT]
    for _ in range(3):
        status, _ = await world.say(ME, poison)
        assert status in (400, 422), "upstream refuses the client's own bytes"
    for namespace in (OTHER, ME):
        assert [await world.say(namespace, body) for body in NEXT] == before
    assert world.services.known.window(OTHER, POLICY, "m") is None


async def test_a_poison_does_not_harm_its_sender(poisoned: tuple[Poisoned, bytes]) -> None:
    """Also where no accepted prompt says yet what is plausible."""
    world, poison = poisoned
    fresh = Poisoned(lambda sent: None)
    expected = [await fresh.say(ME, body) for body in NEXT]
    await fresh.close()
    await world.say(ME, poison)
    assert [await world.say(ME, body) for body in NEXT] == expected


async def test_a_learned_window_is_its_callers_own() -> None:
    def refusal(sent: bytes) -> tuple[int, Any] | None:
        return (400, {"error": WINDOW}) if len(sent) > TAKEN else None

    world = Poisoned(refusal)
    large = chat("word " * 3_000, more=True)
    status, sent = await world.say(ME, large)
    assert status == 200 and len(sent) > 1
    window = world.services.known.window(ME, POLICY, "m")
    assert window is not None and window < len(large)
    assert (await world.say(ME, large))[1] == sent[-1:], "the window is remembered"
    assert world.services.known.window(OTHER, POLICY, "m") is None
    assert world.services.known.window(ME, POLICY, CHAT.name) is None
    await world.close()
