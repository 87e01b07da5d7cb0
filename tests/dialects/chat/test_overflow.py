"""The wordings are those that the vendors' servers and clients are known to send; each row names whose it is."""

# ruff: noqa: E501  (error bodies are quoted as they come)

from __future__ import annotations

import pytest

from proxy.dialects.chat.overflow import is_overflow, may_be, refuses_additions, window

OVERFLOWS = {
    "OpenAI": (
        400,
        b'{"error":{"message":"This model\'s maximum context length is 128000 tokens. However, your messages resulted in '
        b'130000 tokens. Please reduce the length of the messages.","code":"context_length_exceeded"}}',
        128_000,
    ),
    "OpenAI's newer one": (
        400,
        b'{"error":{"message":"Your input exceeds the context window of this model. Please adjust your input and try '
        b'again.","type":"invalid_request_error","param":"input","code":"context_length_exceeded"}}',
        None,
    ),
    "Azure": (
        400,
        b'{"error":{"message":"This model\'s maximum context length is 16385 tokens. However, you requested 16500 tokens '
        b'(16000 in the messages, 500 in the completion).","code":"context_length_exceeded"}}',
        16_385,
    ),
    "vLLM": (
        400,
        b'{"object":"error","message":"This model\'s maximum context length is 4096 tokens. However, you requested 5000 '
        b'tokens in the messages, Please reduce the length of the messages.","type":"BadRequestError","code":400}',
        4096,
    ),
    "llama.cpp": (
        400,
        b'{"error":{"code":400,"message":"the request exceeds the available context size. try increasing the context '
        b'size or enable context shift","type":"exceed_context_size_error","n_prompt_tokens":5000,"n_ctx":2048}}',
        2048,
    ),
    "Ollama": (400, b'{"error":{"message":"input length exceeds maximum context length","type":"api_error"}}', None),
    "OpenRouter": (
        400,
        b'{"error":{"message":"This endpoint\'s maximum context length is 131072 tokens. However, you requested about '
        b'200000 tokens (199000 of text input, 1000 in the output).","code":400}}',
        131_072,
    ),
    "DeepSeek": (
        400,
        b'{"error":{"message":"This model\'s maximum context length is 65536 tokens. However, you requested 70000 tokens '
        b'(66000 in the messages, 4000 in the completion).","type":"invalid_request_error"}}',
        65_536,
    ),
    "Anthropic": (
        400,
        b'{"type":"error","error":{"type":"invalid_request_error","message":"prompt is too long: 208310 tokens > 200000 '
        b'maximum"}}',
        200_000,
    ),
    "Anthropic with the reply": (
        400,
        b'{"error":{"message":"input length and `max_tokens` exceed context limit: 190000 + 20000 > 200000, decrease"}}',
        200_000,
    ),
    "Gemini": (
        400,
        b'{"error":{"message":"The input token count (1200000) exceeds the maximum number of tokens allowed (1048576)."}}',
        1_048_576,
    ),
    "too large to be taken": (413, b'{"error":{"message":"Prompt is too long"}}', None),
}

OTHERS = [
    (429, b'{"error":{"message":"Rate limit reached: too many tokens per minute"}}'),
    (400, b'{"error":{"message":"Invalid parameter: messages with role tool must follow tool_calls"}}'),
    (
        400,
        b'{"error":{"message":"max_tokens is too large: 100000. This model supports at most 16384 completion tokens"}}',
    ),
    (401, b'{"error":{"message":"maximum context length"}}'),
    (500, b"Internal Server Error"),
    (400, b"\xff\xfe"),
    (400, b""),
]


@pytest.mark.parametrize(("status", "body", "tokens"), OVERFLOWS.values(), ids=OVERFLOWS.keys())
def test_overflow(status: int, body: bytes, tokens: int | None) -> None:
    assert may_be(status) and is_overflow(status, body)
    assert window(body) == tokens


@pytest.mark.parametrize(("status", "body"), OTHERS)
def test_other_errors_are_others(status: int, body: bytes) -> None:
    assert not is_overflow(status, body)


@pytest.mark.parametrize(
    ("status", "body", "refuses"),
    [
        (400, b'{"error":{"message":"This model does not support tools."}}', True),
        (422, b'{"detail":[{"loc":["body","stream_options"],"msg":"extra fields not permitted"}]}', True),
        (400, b'{"error":{"message":"\\"auto\\" tool choice requires --enable-auto-tool-choice"}}', True),
        (400, b'{"error":{"message":"invalid temperature"}}', False),
        (404, b'{"error":{"message":"no tools here"}}', False),
    ],
)
def test_who_refuses_our_additions(status: int, body: bytes, refuses: bool) -> None:
    assert refuses_additions(status, body) is refuses


@pytest.mark.parametrize("digits", [21, 5_000])
def test_a_number_without_end_is_no_window(digits: int) -> None:
    assert window(b"maximum context length is " + b"9" * digits) is None
