"""LiteLLM's proxy, unmodified: in front of ours, behind it, and with ours as its service for
compression."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.clients.running import answers
from tests.fake_upstream import Message, Pieces, Recorded, StrictUpstream, calls, error, text
from tests.ports import free_port
from tests.sdks import openai
from tests.serving import PLAIN, Proxy, served, tight

ROOT = Path(__file__).parents[2]
LITELLM = ROOT / ".clients/litellm_proxy/bin/litellm"
COMPRESSION = "offload"
KEY = "sk-a-key-for-the-gateway-of-these-tests-0123456789"
NEEDLE = "the code word is heliotrope-7291"
MOVED = re.compile(r"stored in (/[^ ;]+\.([0-9a-f]{16})\.txt)")

pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(not LITELLM.exists(), reason="litellm is not installed: make test-clients"),
]


@contextmanager
def litellm(folder: Path, upstreams: dict[str, str], compression: str) -> Iterator[str]:
    """Run LiteLLM's proxy in front of these: model → base URL. Yields its own."""
    models = [
        {
            "model_name": name,
            "litellm_params": {"model": f"openai/{name}", "api_base": url, "api_key": KEY},
        }
        for name, url in upstreams.items()
    ]
    headroom = {
        "guardrail": "headroom",
        "mode": "pre_call",
        "api_base": compression,
        "api_key": KEY,
    }
    guardrails = [{"guardrail_name": COMPRESSION, "litellm_params": headroom}]
    (folder / "config.yaml").write_text(
        json.dumps({"model_list": models, "guardrails": guardrails})
    )
    port = free_port()
    command = [LITELLM, f"--config={folder / 'config.yaml'}", "--host=127.0.0.1", f"--port={port}"]
    home = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_MASTER_KEY": KEY,
    }
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, env=home, cwd=folder, stdout=log, stderr=log)
        try:
            health = f"http://127.0.0.1:{port}/health/liveliness"
            # it imports much, and other tests run beside it
            while process.poll() is None and not answers(health):
                time.sleep(0.2)
            assert process.poll() is None, (folder / "log").read_text()
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.kill()
            process.wait()


def history(turns: int = 6) -> list[Any]:
    """An agent's history: each turn reads a log of about 2,000 tokens. The first one has the
    needle."""
    messages: list[Any] = [{"role": "user", "content": "Read the logs."}]
    for number in range(turns):
        call = {"id": f"call_{number}", "type": "function"}
        function = {"name": "read_log", "arguments": json.dumps({"path": f"part{number}.log"})}
        lines = [
            f"{number}-{line} the pump of line {line} ran at {line * 7 % 93} percent"
            for line in range(120)
        ]
        if not number:
            lines[60] = NEEDLE
        messages.append(
            {"role": "assistant", "content": None, "tool_calls": [{**call, "function": function}]}
        )
        messages.append(
            {"role": "tool", "tool_call_id": f"call_{number}", "content": "\n".join(lines)}
        )
    messages.append({"role": "assistant", "content": "I have read them."})
    return [*messages, {"role": "user", "content": "What is the code word?"}]


TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": "read_log", "parameters": {"type": "object", "properties": {}}},
    }
]


def asked(url: str, model: str, *, stream: bool, **more: Any) -> str:
    client = openai.OpenAI(
        base_url=url, api_key=KEY, max_retries=0, http_client=httpx.Client(verify=PLAIN)
    )
    if not stream:
        done = client.chat.completions.create(model=model, messages=history(), tools=TOOLS, **more)
        return done.choices[0].message.content or ""
    chunks = client.chat.completions.create(
        model=model, messages=history(), tools=TOOLS, stream=True, **more
    )
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def reader(tool: str, argument: str) -> Any:
    """A model that reads the first result back with this tool, and then answers with what it
    got."""

    def respond(request: Recorded) -> Message | Pieces:
        if not request.is_chat:
            return error(404)  # we ask for the list of models
        last = request.messages[-1]
        if last.get("tool_call_id") == "call_read_back":
            return text(
                "It is heliotrope-7291."
                if NEEDLE in json.dumps(last["content"])
                else "I cannot tell."
            )
        moved = MOVED.search(request.body.decode())
        assert moved, "nothing moved"
        return calls(
            (tool, {argument: moved[1] if argument == "path" else moved[2]}, "call_read_back")
        )

    return respond


def offloading(upstream: str) -> dict[str, Any]:
    return tight(
        upstream,
        offload={"max_total_tokens": 4_000, "max_tool_message_tokens": 500, "keep_views": 1},
    )


def test_in_front_of_litellm_behind_it_and_as_its_service_for_compression(tmp_path: Path) -> None:
    """One LiteLLM, as it takes ten seconds to start: it sends one model to us, and we send it
    another."""
    with (
        StrictUpstream() as upstream,
        served({"default": offloading(upstream.url)}) as last,
        litellm(
            tmp_path, {"gpt-4.1": upstream.url, "gpt-4.1-mini": last.url}, last.root
        ) as gateway,
        served({"default": offloading(gateway)}) as first,
    ):
        ways: list[tuple[str, str, dict[str, Any]]] = [
            (first.url, "gpt-4.1", {}),
            (gateway, "gpt-4.1-mini", {}),
        ]
        ways.append((gateway, "gpt-4.1", {"extra_body": {"guardrails": [COMPRESSION]}}))
        for url, model, more in ways:
            upstream.respond(
                reader("headroom_retrieve", "hash") if more else reader("read_file", "path")
            )
            for stream in (False, True):
                asked_before = len(upstream.chats)
                assert asked(url, model, stream=stream, **more) == "It is heliotrope-7291."
                assert NEEDLE not in upstream.chats[asked_before].body.decode()
                assert not more or readable(last, upstream.chats[asked_before])


def readable(proxy: Proxy, request: Recorded) -> bool:
    """Whether `/read_file` gives the moved result back to who has the gateway's key."""
    moved = MOVED.search(request.body.decode())
    assert moved
    asking: dict[str, Any] = {
        "json": {"absolute_path": moved[1]},
        "headers": {"authorization": f"Bearer {KEY}"},
    }
    return NEEDLE in httpx.post(f"{proxy.root}/read_file", verify=PLAIN, **asking).text
