"""Recognises refusals of a context that is too long, in any vendor's wording, and reads the window that they name."""

from __future__ import annotations

import re
from collections.abc import Iterator

from proxy.dialects import error_text
from proxy.dialects.error_text import ErrorText

_STATUSES = {400, 413, 422, 500}
"""Most use 400; Anthropic and gateways also 413, TGI and vLLM 422, and Ollama and llama.cpp 500."""

LEAST = 256
"""The fewest tokens that a number may mean as a window. Smaller ones are counts of something else."""

_CODES = {
    "context_length_exceeded",  # OpenAI, Azure, DeepSeek, OpenRouter
    "model_max_prompt_tokens_exceeded",  # GitHub Copilot
    "tokens_limit_reached",  # GitHub Models
    "exceed_context_size_error",  # llama.cpp
    "context_exceeded",  # ds4
    "model_context_window_exceeded",  # Z.ai
    "1261",  # Zhipu
}

_N = r"(\d[\d,]{0,18})(?!,?\d)"
_COUNT = r"\d[\d,]{0,18}"

WORDINGS = {
    "Mistral": rf"too large for model with {_N} maximum context length",
    "OpenAI, Azure, DeepSeek, OpenRouter, vLLM, SGLang, Fireworks": (
        rf"maximum context length(?:(?: is| of|:)? ?\(?{_N})?"
    ),
    "OpenAI": r"exceeds? the context window",
    "Anthropic": rf"prompt is too long(?:: {_COUNT} tokens > {_N} maximum)?",
    "Anthropic, with the reply": rf"exceed context limit(?:: {_COUNT} \+ {_COUNT} > {_N})?",
    "Bedrock": r"input is too long for requested model",
    "Gemini": rf"input token count(?: \(?{_COUNT}\)?)? exceeds the maximum number of tokens(?: allowed \(?{_N})?",
    "xAI": rf"maximum prompt length is {_N}",
    "Copilot": rf"prompt token count of {_COUNT} exceeds the limit of {_N}",
    "GitHub Models": rf"request body too large for [^ ]{{1,80}} model\. max size: {_N} tokens",
    "Moonshot": rf"exceeded model token limit(?:: {_N})?",
    "Moonshot in 2024": rf"model max length exceeded(?:, max length: ?{_N})?",
    "Cohere": rf"total number of tokens \(prompt and prediction\) cannot exceed {_N}",
    "Zhipu": r"prompt (?:exceeds max length|too long$)|prompt ?超长",
    "MiniMax": r"context window exceeds limit",
    "DashScope": rf"range of input length should be \[{_COUNT}, ?{_N}\]",
    "SiliconFlow": rf"length of prompt_tokens \({_COUNT}\) must be less than max_seq_len \({_N}\)",
    "Cerebras": rf"reduce the length of the messages or completion\. current length is {_COUNT} while limit is {_N}",
    "OpenAI's advice, kept by many": r"reduce the length of the (?:messages|prompt|input)",
    "llama.cpp": rf"exceeds the available context size(?: \({_N} tokens\))?",
    "llama.cpp, LM Studio": r"context size has been exceeded",
    "llama-cpp-python": rf"requested tokens \({_COUNT}\) exceed context window of {_N}",
    "LM Studio": rf"is greater than the context length(?: \(n_keep: {_COUNT} ?>= ?n_ctx: {_N}\))?",
    "LM Studio, older": rf"loaded with (?:a )?context length of only {_N} tokens",
    "LM Studio, newer": rf"n_keep \({_COUNT}\) >= n_ctx \({_N}\)",
    "Ollama": r"prompt too long; exceeded max context length",
    "vLLM, older": rf"longer than the maximum model length(?: of {_N})?",
    "vLLM, without room for a reply": rf"max_tokens must be at least ?1, got -{_COUNT}",
    "SGLang, Together": rf"longer than the model's context length(?: \({_N} tokens\))?",
    "SGLang, for want of memory": rf"exceeds the maximum allowed length(?: \({_N} tokens\))?",
    "Poolside": rf"exceeds the maximum allowed input length(?: of {_N} tokens)?",
    "TGI, Together": rf"tokens \+ max_new_tokens must be <= {_N}",
    "TGI": rf"inputs(?: tokens)? must have less than {_N} tokens",
    "TensorRT-LLM": rf"prompt length \({_COUNT}\) exceeds maximum (?:input|sequence) length \({_N}\)",
    "ds4": rf"prompt tokens \({_COUNT}\) exceeds context size \({_N}\)",
    "LiteLLM": r"contextwindowexceedederror",
    "others": (
        rf"context (?:size|length|window|limit)(?: is| of|:)? \(?{_N}(?! ?\+)[^.]{{0,60}}exceed"
        r"|exceed\w{0,10}\b[^.]{0,60}\bcontext (?:size|length|window|limit)"
        rf"(?:(?: is| of|:)? \(?{_N}(?! ?\+))?"
        r"|context (?:size|length|window)\b[^.]{0,60}\bexceed"
        r"|input length\b[^.]{0,60}\bexceed|too many (?:input )?tokens|token limit exceeded"
    ),
}
"""Each vendor's wording; a group in it is the window. `tests/dialects/test_overflow.py` has the whole errors and where
they were seen. The first wording that names a window counts, so that the general ones come last."""

_wordings = {vendor: re.compile(pattern, re.IGNORECASE) for vendor, pattern in WORDINGS.items()}

_others = re.compile(r"rate.?limit|per min|\bTPM\b|throttl|too many requests|quota|please wait", re.IGNORECASE)
"""What speaks of tokens per minute, and not of a context."""


def may_be(status: int) -> bool:
    """Whether a reply with this status may mean that the context is too long."""
    return status in _STATUSES


def is_overflow(status: int, body: bytes) -> bool:
    """Whether this error reply means that the request has too many tokens."""
    if status not in _STATUSES:
        return False
    said = error_text.read(body)
    return bool(said.codes & _CODES) or next(_matches(said), None) is not None


def window(body: bytes) -> int | None:
    """Return the context window that the error names, in tokens, or None if it names none."""
    said = error_text.read(body)
    named = (group.replace(",", "") for match in _matches(said) for group in match.groups() if group)
    tokens = said.numbers.get("n_ctx") or int(next(named, "0"))  # n_ctx: llama.cpp
    return tokens if tokens >= LEAST else None


def _matches(said: ErrorText) -> Iterator[re.Match[str]]:
    if not _others.search(said.text):
        yield from filter(None, (pattern.search(said.text) for pattern in _wordings.values()))
