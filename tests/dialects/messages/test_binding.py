"""Thinking that upstream takes only behind the very text that the model thought about."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.dialects.messages import MESSAGES
from proxy.dialects.responses import RESPONSES
from proxy.plan.turn import Addition, Verdict

BOUND = (
    "messages.1.content.0: Invalid `signature` in `thinking` block. The block is bound to a different conversation. "
    'Remove the block, or set `thinking.block_binding.prefix_mismatch_behavior` to "drop_block".'
)
MORE = " The `system` prompt differs from the one this block was created with."
DROPPING = {"prefix_mismatch_behavior": "drop_block"}
BETA = b"thinking-binding-controls-2026-08-01"


def refused(message: str, status: int = 400) -> Any:
    body = {"type": "error", "error": {"type": "invalid_request_error", "message": message}}
    return MESSAGES.complaint(status, json.dumps(body).encode())


@pytest.mark.parametrize("message", [BOUND, BOUND + MORE])
def test_the_refusal_is_recognised(message: str) -> None:
    assert refused(message) is Addition.THINKING


def test_other_refusals_are_about_something_else() -> None:
    assert refused(BOUND, 401) is Verdict.FINAL
    assert refused("messages.1.content.0: Invalid `signature` in `thinking` block") is Addition.ANY
    assert refused("tools are not supported") is Addition.ANY


@pytest.mark.parametrize(
    ("thinking", "made"),
    [
        (None, {"type": "adaptive", "block_binding": DROPPING}),
        ({"type": "adaptive"}, {"type": "adaptive", "block_binding": DROPPING}),
        (
            {"type": "enabled", "budget_tokens": 9},
            {"type": "enabled", "budget_tokens": 9, "block_binding": DROPPING},
        ),
    ],
)
def test_upstream_is_asked_to_drop_it(thinking: Any, made: Any) -> None:
    asked = {"model": "m", "messages": [], **({} if thinking is None else {"thinking": thinking})}
    headers = [(b"x-api-key", b"k"), (b"Anthropic-Beta", b"one,two")]
    body, sent = MESSAGES.forgiving(json.dumps(asked).encode(), headers)
    assert json.loads(body) == {**asked, "thinking": made}
    assert sent == [(b"x-api-key", b"k"), (b"anthropic-beta", b"one,two," + BETA)]
    assert MESSAGES.forgiving(body, [])[1] == []  # the client has said it itself


def test_a_request_without_thinking_stays_as_it_is() -> None:
    body = b'{"thinking":{"type":"disabled"}}'
    assert MESSAGES.forgiving(body, []) == (body, [])
    assert RESPONSES.forgiving(b"{}", []) == (b"{}", [])
