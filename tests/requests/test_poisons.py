"""What one caller provokes never touches another, and not even that caller's next conversation."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from msgspec.structs import replace

from proxy.policy import Mode
from tests.requests.scripted import JSON, ScriptedReply
from tests.requests.test_handler import LONG, POLICY, World, chat, fail

ME, OTHER = "acme-1", "globex-2"


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
        whole = {
            "choices": [
                {"message": {"role": "assistant", "content": "42"}, "finish_reason": "stop"}
            ]
        }
        return ScriptedReply(json.dumps(whole | {"usage": usage}).encode())

    async def say(self, namespace: str, body: bytes) -> tuple[int, list[bytes]]:
        """Return the reply's status, and what went upstream."""
        self.bodies.clear()
        client = await self.send(body, namespace)
        return client.status, list(self.bodies)


WINDOW = {
    "message": "Your input exceeds the context window of this model.",
    "code": "context_length_exceeded",
}
ECHO = "maximum context length is 300"


def with_pdf() -> bytes:
    pdf = base64.b64encode(b"%PDF-1.7 " + b"x" * 60_000).decode()
    file = {
        "type": "file",
        "file": {"filename": "a.pdf", "file_data": f"data:application/pdf;base64,{pdf}"},
    }
    messages = [{"role": "user", "content": [{"type": "text", "text": "Sum it up."}, file]}]
    return json.dumps({"model": "m", "messages": messages}).encode()


def invalid(value: str) -> dict[str, Any]:
    return {
        "error": {"message": f"Invalid value: '{value}'. Supported values are: 'low' and 'high'."}
    }


TASK = chat("word " * 5_000, poison=1)[:-1]
"""A request that is offloaded, to which members can be added."""

CHANGED: dict[str, tuple[bytes, int, Any]] = {
    "a generation that failed (Groq)": (
        TASK + b"}", 400, {"error": {"message": "Failed to call a function.", "code": "tool_use_failed"}},
    ),
    "JSON mode with tools (Gemini)": (
        TASK + b', "response_format": {"type": "json_object"}}',
        400,
        [{"error": {"message": "Function calling with a response mime type: 'application/json' is unsupported"}}],
    ),
    "reasoning effort with tools (OpenAI)": (
        TASK + b', "reasoning_effort": "high"}',
        400,
        {"error": {"message": "Function tools with reasoning_effort are not supported for m."}},
    ),
    "our stream_options (Mistral)": (
        TASK + b', "stream": true}',
        422,
        {"detail": [{"loc": ["body", "stream_options"], "msg": "Extra inputs are not permitted", "input": {}}]},
    ),
    "an odd refusal": (TASK + b"}", 400, {"error": {"message": "The model expects a single text element."}}),
    "a refusal that quotes the request": (
        TASK + b', "user": "maximum context length is 1300"}',
        422,
        {"detail": [{"loc": ["body", "user"], "msg": "no", "input": "this model does not support tools"}]},
    ),
}  # fmt: skip
"""Requests that are only refused as we change them."""
POISONS: dict[str, tuple[bytes, int, Any]] = CHANGED | {
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
    own = body if body.startswith(TASK) else None
    world = Poisoned(
        lambda sent: (
            (status, error) if sent != own and any(mark in sent for mark in marks) else None
        )
    )
    yield world, body
    await world.close()


NEXT = (
    LONG,
    LONG[:-1] + b', "stream": true}',
    chat("word " * 1_500, more=True),
    chat("word " * 300, more=True),
)
"""The requests of other conversations: two that are offloaded, and two that go as they came."""


@pytest.mark.parametrize(
    ("broken", "mode"),
    [
        ("proxy.dialects.chat.ChatDialect.parse", Mode.COMPACT),
        ("proxy.requests.handler.plan", Mode.COMPACT),
        ("proxy.requests.rendering.Rendered.of", Mode.COMPACT),
        ("proxy.requests.observing.foreseen", Mode.OBSERVE),
        ("proxy.requests.handler.Versions.next", Mode.COMPACT),
        ("proxy.requests.handler.converse", Mode.COMPACT),
    ],
)
async def test_a_bug_of_ours_costs_the_plan_and_not_the_reply(
    broken: str, mode: Mode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = Poisoned(lambda sent: None)
    world.policy = replace(POLICY, offload=replace(POLICY.offload, mode=mode))
    with monkeypatch.context() as patched:
        patched.setattr(broken, fail)
        assert await world.say(ME, LONG) == (200, [LONG])
        outcome = world.outcomes.pop()
    assert (outcome.kind, outcome.reason, outcome.fault) == ("untouched", "bug", "")
    assert (
        "of acme is sent as it came" in caplog.text and "nobody has thought of this" in caplog.text
    )
    await world.say(ME, LONG)
    assert world.outcomes.pop().kind == ("observed" if mode is Mode.OBSERVE else "offloaded")
    await world.close()


async def test_a_poison_changes_no_other_request(poisoned: tuple[Poisoned, bytes]) -> None:
    world, poison = poisoned
    before = [await world.say(OTHER, body) for body in NEXT]
    for _ in range(3):
        status, _ = await world.say(ME, poison)
        assert status in ((200,) if poison.startswith(TASK) else (400, 422)), (
            "upstream takes or refuses the client's own bytes"
        )
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
