"""Reads the context windows in an upstream's list of models (`GET /models`), and finds a request's
model in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

WINDOWS = {
    "max_model_len": "vLLM, SGLang",
    "context_length": "OpenRouter, Together, Hugging Face, Cohere, DeepInfra, Moonshot",
    "context_window": "Groq, Vercel",
    "max_context_length": "Mistral, LM Studio",
    "loaded_context_length": "LM Studio",
    "n_ctx": "llama.cpp, of the server",
    "n_ctx_train": "llama.cpp, of the model",
    "max_input_tokens": "Anthropic, GitHub Models",
    "max_context_window_tokens": "GitHub Copilot",
    "max_prompt_tokens": "GitHub Copilot",
    "availableContextTokens": "Venice",
    "context_size": "Novita",
    "inputTokenLimit": "Gemini",
}
"""Members that name a window in tokens, and who writes them; `tests/upstream/test_models.py` has a
recorded entry of each. They stand in the model's entry or within it: llama.cpp's in `meta`,
DeepInfra's in `metadata`, Copilot's in `capabilities.limits`, Hugging Face's for each of the
`providers`, and OpenRouter's once more in `top_provider`. Where there are several, the smallest
counts: who serves the request is not known before."""

DEPTH = 4
"""The most levels of a model's entry that are looked at."""

PREFIX = "models/"
"""What Gemini writes before names in its list, and takes with or without."""

Listed = Mapping[str, int | None]
"""The models of a list, each with its window in tokens; None if the list does not say."""


def listed_windows(body: bytes) -> Listed:
    """Return the models and their windows, or nothing if this is not a list of models."""
    try:
        page = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return {}
    if isinstance(page, dict):
        page = page.get("data") or page.get("models")
    if not isinstance(page, list):
        return {}
    entries = {name: entry for entry in page if (name := _name(entry))}
    windows = {name: min(_named(entry, DEPTH), default=None) for name, entry in entries.items()}
    return {name: windows[name] or windows.get(_base(entry)) for name, entry in entries.items()}


def _name(entry: Any) -> str:
    """Return a model's name; empty if this is no model. Cohere and Gemini have no `id`."""
    if not isinstance(entry, dict):
        return ""
    name = entry.get("id", entry.get("name"))
    return name if isinstance(name, str) else ""


def _base(entry: Mapping[str, Any]) -> str:
    """Return the model that this one is an adapter of, as vLLM lists LoRA; empty if it is no
    adapter."""
    parent = entry.get("parent")
    return parent if isinstance(parent, str) else ""


def _named(value: Any, depth: int) -> Iterator[int]:
    """Yield the windows that an entry, or a value within it, names."""
    if not depth:
        return
    if isinstance(value, list):
        for element in value:
            yield from _named(element, depth - 1)
    elif isinstance(value, dict):
        for key, inner in value.items():
            if key in WINDOWS and type(inner) is int and inner > 0:
                yield inner
            else:
                yield from _named(inner, depth - 1)


def window_of(listed: Listed, model: str) -> int | None:
    """Return the window of the model that a request names; None if the list does not tell.

    A suffix says how to serve a model: OpenRouter's `:nitro`, Hugging Face's `:together`. A server
    that lists one model takes any name for it, as llama.cpp does.
    """
    plain = model.removeprefix(PREFIX)
    base = plain.rpartition(":")[0] or plain
    for name in (model, plain, PREFIX + plain, base, PREFIX + base):
        if name in listed:
            return listed[name]
    return next(iter(listed.values())) if len(listed) == 1 else None
