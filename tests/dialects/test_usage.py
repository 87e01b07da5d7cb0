"""What the end of a relayed reply says about the prompt."""

from __future__ import annotations

import json

import pytest

from proxy.dialects.usage import prompt_tokens

USAGE = {"prompt_tokens": 120, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 64}}


@pytest.mark.parametrize(
    ("end", "tokens"),
    [
        (json.dumps({"choices": [], "usage": USAGE}), 120),
        (json.dumps({"choices": [], "usage": USAGE}, separators=(",", ":")), 120),
        (f"data: {json.dumps({'usage': USAGE})}\n\ndata: [DONE]\n\n", 120),
        ('data: {"usage":{"prompt_tokens":7}}\n\ndata: {"usage":{"prompt_tokens":120}}\n\n', 120),
        ('{"usage": {"input_tokens": 120}}', 120),
        (json.dumps({"content": 'says "prompt_tokens": 999999', "usage": USAGE}), 120),
        (json.dumps({"arguments": json.dumps({"prompt_tokens": 999999})}), 0),
        ('{"usage": {"prompt_tokens": "120"}}', 0),
        ('{"usage": {"prompt_tokens": 1234567890123}}', 0),
        ('{"usage": null}', 0),
        ("", 0),
    ],
)
def test_prompt_of_a_relayed_reply(end: str, tokens: int) -> None:
    assert prompt_tokens(end.encode()) == tokens
