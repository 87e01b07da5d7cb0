"""Lists of models as servers write them, and the window of the model that a request names."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.upstream.models import WINDOWS, listed_windows, window_of

# Where a server's documentation or source names the member; an entry with it, shortened; its
# window.
ENTRIES: list[tuple[str, dict[str, Any], int | None]] = [
    (
        "vllm-project/vllm, entrypoints/openai: ModelCard",
        {"id": "m", "owned_by": "vllm", "root": "m", "parent": None, "max_model_len": 32768},
        32768,
    ),
    (
        "openrouter.ai/docs: List models",
        {"id": "m", "context_length": 131072, "top_provider": {"context_length": None}},
        131072,
    ),
    (
        "anomalyco/models.dev#2796",
        {"id": "m", "context_length": 1048576, "top_provider": {"context_length": 32000}},
        32000,
    ),
    ("speakeasy-api/gram, openrouter", {"id": "m", "top_provider": {"context_length": 8192}}, 8192),
    ("console.groq.com/docs: List models", {"id": "m", "context_window": 131072}, 131072),
    (
        "mistralai/client-python: BaseModelCard",
        {"id": "m", "capabilities": {"completion_chat": True}, "max_context_length": 131072},
        131072,
    ),
    (
        "lmstudio.ai/docs: REST API v0",
        {"id": "m", "max_context_length": 131072, "loaded_context_length": 4096},
        4096,
    ),
    (
        "ggml-org/llama.cpp, tools/server: models",
        {"id": "m", "owned_by": "llamacpp", "meta": {"n_ctx_train": 131072, "n_ctx": 8192}},
        8192,
    ),
    ("the same, older", {"id": "m", "owned_by": "llamacpp", "meta": {"n_ctx_train": 4096}}, 4096),
    (
        "docs.anthropic.com: List models",
        {"id": "m", "type": "model", "max_input_tokens": 200000, "max_tokens": 64000},
        200000,
    ),
    (
        "alvin0/copilot-proxy-clouflare, src/models.ts",
        {
            "id": "m",
            "capabilities": {
                "limits": {
                    "max_context_window_tokens": 16384,
                    "max_prompt_tokens": 12288,
                    "max_output_tokens": 4096,
                }
            },
        },
        12288,
    ),
    (
        "huggingface.co: router, HFProviderInfo",
        {
            "id": "m",
            "providers": [
                {"provider": "novita", "status": "live", "context_length": 131072},
                {"provider": "hf-inference", "status": "live"},
                {"provider": "groq", "status": "live", "context_length": 32768},
            ],
        },
        32768,
    ),
    (
        "docs.venice.ai: List models",
        {"id": "m", "model_spec": {"availableContextTokens": 65536}},
        65536,
    ),
    ("novita.ai/docs: List models", {"id": "m", "context_size": 160000}, 160000),
    (
        "deepinfra.com/docs: /v1/openai/models",
        {"id": "m", "metadata": {"context_length": 40960, "max_tokens": 8192}},
        40960,
    ),
    ("docs.cohere.com: List models", {"name": "m", "context_length": 128000}, 128000),
    ("ai.google.dev: models.list", {"name": "models/m", "inputTokenLimit": 1048576}, 1048576),
    (
        "platform.openai.com: List models",
        {"id": "m", "object": "model", "owned_by": "openai"},
        None,
    ),
    ("ollama/ollama, openai.Model", {"id": "m", "object": "model", "owned_by": "library"}, None),
]


@pytest.mark.parametrize(
    ("entry", "window"), [row[1:] for row in ENTRIES], ids=[row[0] for row in ENTRIES]
)
def test_windows_as_servers_name_them(entry: dict[str, Any], window: int | None) -> None:
    for page in ({"object": "list", "data": [entry]}, [entry], {"models": [entry]}):
        listed = listed_windows(json.dumps(page).encode())
        assert window_of(listed, "m") == window and len(listed) == 1


def test_each_name_of_a_window_has_a_recorded_entry() -> None:
    shown = json.dumps([entry for _, entry, _ in ENTRIES])
    assert [name for name in WINDOWS if f'"{name}"' not in shown] == []


@pytest.mark.parametrize(
    "entry",
    [
        {"max_model_len": "32768"},
        {"max_model_len": True},
        {"max_model_len": 0},
        {"max_model_len": -1},
        {"max_model_len": None},
        {"meta": [1]},
        {"parent": "nobody"},
        {"parent": 3},
        {"max_output_tokens": 9},
        {"a": {"b": {"c": {"d": {"n_ctx": 9}}}}},
    ],
)
def test_what_names_no_window(entry: dict[str, Any]) -> None:
    assert listed_windows(json.dumps({"data": [{"id": "m"} | entry]}).encode()) == {"m": None}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        b"[]",
        b"{}",
        b'{"data":{}}',
        b'{"data":[1,{"id":2},{"name":[]}]}',
        b"[" * 9999,
        b"[" * 500 + b"]" * 500,
    ],
)
def test_what_is_no_list_of_models_has_none(body: bytes) -> None:
    assert listed_windows(body) == {}


def test_an_adapter_has_the_window_of_its_base() -> None:
    base = {"id": "base", "max_model_len": 16384, "parent": None}
    adapter = {"id": "lora", "root": "/adapters/lora", "parent": "base", "max_model_len": None}
    listed = listed_windows(json.dumps({"data": [adapter, base]}).encode())
    assert listed == {"lora": 16384, "base": 16384}


@pytest.mark.parametrize(
    ("asked", "window"),
    [
        ("qwen/qwen3-coder", 1),
        ("qwen/qwen3-coder:free", 2),
        ("qwen/qwen3-coder:nitro", 1),
        ("qwen/qwen3-coder:free:floor", 2),
        ("models/gemini-3", 3),
        ("gemini-3", 3),
        ("gemini-3:online", 3),
        ("models/qwen/qwen3-coder", 1),
        ("qwen/qwen3", None),
        ("unknown:nitro", None),
        (":nitro", None),
        ("", None),
    ],
)
def test_the_model_that_a_request_names(asked: str, window: int | None) -> None:
    listed = {"qwen/qwen3-coder": 1, "qwen/qwen3-coder:free": 2, "models/gemini-3": 3}
    assert window_of(listed, asked) == window


def test_a_server_with_one_model_serves_it_under_any_name() -> None:
    assert window_of({"/models/qwen3.gguf": 8192}, "gpt-4o") == 8192
    assert window_of({"/models/qwen3.gguf": 8192}, "") == 8192
    assert window_of({}, "gpt-4o") is None
