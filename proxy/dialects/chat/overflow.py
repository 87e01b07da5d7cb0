"""Recognises refusals of a context that is too long, in any vendor's wording, and reads the window that they name."""

from __future__ import annotations

import re

_STATUSES = {400, 413, 422, 500}
"""Most use 400; Anthropic and gateways also use 413, vLLM has used 422, and Ollama and llama.cpp also use 500."""

_wordings = re.compile(
    r"""
      context_length_exceeded            # OpenAI, Azure, DeepSeek, OpenRouter: the code
    | maximum\ context\ length           # OpenAI, Azure, vLLM, DeepSeek, OpenRouter
    | exceed_context_size_error          # llama.cpp: the type
    | exceeds\ the\ available\ context   # llama.cpp
    | context\ (size|length|window)\b.{0,60}\bexceed     # LM Studio, Groq and others
    | exceed\w{0,10}\b.{0,60}\bcontext\ (size|length|window|limit)  # Ollama, Anthropic, Bedrock, vLLM
    | prompt\ is\ too\ long              # Anthropic
    | input\ (length|token\ count|is)\b.{0,60}\b(exceed|too\ long)  # Ollama, Gemini, Bedrock
    | reduce\ the\ length\ of\ the\ (messages|prompt|input)  # OpenAI's advice, kept by many
    | too\ many\ (input\ )?tokens
    """,
    re.IGNORECASE | re.VERBOSE | re.DOTALL,
)

_windows = re.compile(
    r"""
      maximum\ context\ length\ (?:is|of)\ (\d[\d,]*)
    | "n_ctx"\s*:\s*(\d+)
    | available\ context\ size\ \(?(\d[\d,]*)
    | >\s*(\d[\d,]*)
    | (?:context\ (?:limit|window|length|size)|token\ limit|maximum\ number\ of\ tokens\ allowed)
      \D{0,20}(\d[\d,]*+)(?!\s*\+)
    """,
    re.IGNORECASE | re.VERBOSE,
)


_LONGEST = 20
"""The most characters of a number that may be a window's size."""


def may_be(status: int) -> bool:
    """Whether a reply with this status may mean that the context is too long."""
    return status in _STATUSES


def is_overflow(status: int, body: bytes) -> bool:
    """Whether this error reply means that the request has too many tokens."""
    return status in _STATUSES and _wordings.search(_text(body)) is not None


def window(body: bytes) -> int | None:
    """Return the context window that the error names, in tokens, or None if it names none."""
    match = _windows.search(_text(body))
    found = next((group for group in match.groups() if group), "") if match else ""
    tokens = int(found.replace(",", "")) if 0 < len(found) <= _LONGEST else 0
    return tokens if tokens >= 256 else None


def refuses_additions(status: int, body: bytes) -> bool:
    """Whether upstream refuses the tools or the `stream_options` that we added."""
    return (
        status in (400, 422) and re.search(r"\btools?\b|tool_choice|stream_options|function", _text(body)) is not None
    )


def _text(body: bytes) -> str:
    """Return the beginning of the body, because some vendors quote the whole prompt after their message."""
    return body[:20_000].decode("utf-8", "replace")
