"""The benchmarks' chat requests, in three sizes, with histories like an agent's."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]

WORDS = [
    "".join(random.Random(seed).choices("abcdefghijklmnop", k=2 + seed % 8))
    for seed in range(5_000)
]
TOOL = {
    "type": "function",
    "function": {"name": "search", "parameters": {"type": "object", "properties": {}}},
}
QUESTION = "Please look at the traceback above and tell me what is wrong with it. " * 12

HEAD = """\
POST /v1/chat/completions HTTP/1.1
Host: 127.0.0.1
Accept: application/json
Authorization: Bearer sk-bench
Content-Type: application/json
User-Agent: OpenAI/Python 3.52.0
X-Stainless-Lang: python
X-Stainless-Retry-Count: 0
""".replace("\n", "\r\n")
"""About the headers that the openai client sends."""


@dataclass(frozen=True)
class Size:
    """A size of body: its name, the number of messages, and the words of a tool result."""

    name: str
    messages: int
    words: int


SIZES = (Size("1 KB", 1, 0), Size("100 KB", 100, 285), Size("1 MB", 1_000, 285))


def body(size: Size, *, stream: bool, seed: int = 0) -> bytes:
    asked: Json = {"model": "gpt-4.1", "stream": stream}
    if size.messages == 1:
        return json.dumps({**asked, "messages": [{"role": "user", "content": QUESTION}]}).encode()
    return json.dumps(
        {**asked, "messages": history(size.messages, size.words, seed), "tools": [TOOL]}
    ).encode()


def history(messages: int, words: int, seed: int) -> list[Json]:
    """So many messages, half of them tool results of `words` words. Another seed gives entirely
    different results."""
    chosen = random.Random(seed)
    made: list[Json] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Go on."},
    ]
    for number in range(messages // 2 - 1):
        call = {
            "id": f"call_{number}",
            "type": "function",
            "function": {"name": "search", "arguments": "{}"},
        }
        made.append({"role": "assistant", "content": None, "tool_calls": [call]})
        text = " ".join(chosen.choices(WORDS, k=words))
        made.append({"role": "tool", "tool_call_id": call["id"], "content": text})
    return made


def request(body: bytes, headers: Mapping[str, str] | None = None) -> bytes:
    """The request in wire format, with a system's own headers."""
    more = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
    return f"{HEAD}{more}Content-Length: {len(body)}\r\n\r\n".encode() + body
