"""Through the proxy to a server that is not ours: llama.cpp's own, with a small model. `make
test-clients` installs it.

For interoperability, not for quality: the model is too small to follow a reference, but the server
templates, counts and streams like any other.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.sdks import openai
from tests.serving import Proxy, served, stop, tight

pytestmark = [pytest.mark.clients, pytest.mark.xdist_group("llama")]

ROOT = Path(__file__).parents[2]
ENVIRONMENT = ROOT / ".clients" / "llama"
MODEL = "smollm2"
WINDOW = 4096
"""The server's context window in tokens."""
READ_LOG = {
    "type": "function",
    "function": {
        "name": "read_log",
        "description": "The text of a log file.",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string"}},
            "required": ["path"],
        },
    },
}


@pytest.fixture(scope="module")
def llama() -> Iterator[str]:
    """Run the server, and yield its base URL."""
    if not (ENVIRONMENT / ".installed").exists():
        pytest.skip("llama.cpp is not installed: make test-clients")
    command = [ENVIRONMENT / "bin" / "python", ROOT / "tests" / "clients" / "llama" / "serve.py"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        yield f"{process.stdout.readline().decode().strip()}/v1"
    finally:
        stop(process)


@pytest.fixture(scope="module")
def proxy(llama: str) -> Iterator[Proxy]:
    with served({"default": tight(llama)}) as proxy:
        yield proxy


@pytest.fixture
def direct(llama: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=llama, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def proxied(proxy: Proxy) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=proxy.url, api_key="none", max_retries=0) as client:
        yield client


def short(**options: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Name three colours."}]
    return {"model": MODEL, "messages": messages, "max_tokens": 16, "temperature": 0, **options}


def after_reading(logs: int, **options: Any) -> dict[str, Any]:
    """Return a request after `logs` tool results of about 300 of this model's tokens each."""
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Read the logs and say what you saw."}
    ]
    for number in range(logs):
        function = {"name": "read_log", "arguments": f'{{"path": "{number}.log"}}'}
        call = {"id": f"call_{number}", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        text = "\n".join(
            f"{number}:{line:02} worker {line * 37 % 101} moved {line * 53 % 997} crates"
            for line in range(20)
        )
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
    return short(messages=messages, tools=[READ_LOG], **options)


def test_a_real_servers_models_are_relayed(llama: str, proxy: Proxy) -> None:
    there, here = (httpx.get(f"{url}/models") for url in (llama, proxy.url))
    assert here.status_code == 200
    assert [model["id"] for model in here.json()["data"]] == [MODEL]
    assert here.headers["content-type"] == there.headers["content-type"]


def test_a_real_servers_refusal_is_relayed(llama: str, proxy: Proxy) -> None:
    there, here = (
        httpx.post(f"{url}/chat/completions", json=short(messages="none"))
        for url in (llama, proxy.url)
    )
    assert (here.status_code, here.content) == (there.status_code, there.content)
    assert here.is_client_error


def test_a_real_server_answers_plain_chats(direct: openai.OpenAI, proxied: openai.OpenAI) -> None:
    there, here = (client.chat.completions.create(**short()) for client in (direct, proxied))
    assert here.choices[0].message.content == there.choices[0].message.content
    assert here.choices[0].message.content
    assert here.usage.completion_tokens == there.usage.completion_tokens


@pytest.mark.parametrize("include_usage", [True, False])
def test_a_real_server_answers_streamed_chats(
    direct: openai.OpenAI, proxied: openai.OpenAI, include_usage: bool
) -> None:
    options = short(stream=True, stream_options={"include_usage": include_usage})
    there, here = (list(client.chat.completions.create(**options)) for client in (direct, proxied))
    assert said(here) == said(there) != ""
    assert len(here) == len(there)
    assert [chunk.usage is not None for chunk in here] == [
        chunk.usage is not None for chunk in there
    ]


def test_a_real_server_gets_fewer_tokens_after_compaction(
    direct: openai.OpenAI, proxied: openai.OpenAI
) -> None:
    """By the server's own count: what it read of the compacted request is less than half of what it
    would have read."""
    there = direct.chat.completions.create(**after_reading(6))
    raw = proxied.chat.completions.with_raw_response.create(**after_reading(6))
    here = raw.parse()
    assert int(raw.headers["x-offload-compacted"]) == 5
    assert here.choices[0].finish_reason in ("stop", "length", "tool_calls")
    assert here.usage.prompt_tokens < there.usage.prompt_tokens / 2


@pytest.mark.parametrize("include_usage", [True, False])
def test_a_real_server_streams_after_compaction(
    proxied: openai.OpenAI, include_usage: bool
) -> None:
    options = after_reading(4, stream=True, stream_options={"include_usage": include_usage})
    chunks = list(proxied.chat.completions.create(**options))
    assert len({chunk.id for chunk in chunks}) == 1
    assert [
        choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason
    ]
    assert sum(chunk.usage is not None for chunk in chunks) == include_usage
    assert not any(chunk.choices for chunk in chunks if chunk.usage)


def test_a_real_server_is_kept_within_its_window(llama: str, direct: openai.OpenAI) -> None:
    """The server refuses what is longer than its window; its words tell the proxy the window, and
    the next try fits."""
    asked = after_reading(16)
    with pytest.raises(openai.BadRequestError, match="context size"):
        direct.chat.completions.create(**asked)
    with (
        served({"default": tight(llama, offload={"max_total_tokens": 100_000})}) as proxy,
        openai.OpenAI(base_url=proxy.url, api_key="none", max_retries=0) as proxied,
    ):
        raw = proxied.chat.completions.with_raw_response.create(**asked)
    assert int(raw.headers["x-offload-compacted"]) > 0
    assert raw.parse().usage.prompt_tokens < WINDOW


def said(chunks: list[Any]) -> str:
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
