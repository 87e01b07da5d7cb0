"""Requests like an agent's: source code and JSON as tool results, four tools, a new turn each time.

A `Talk` is an endless conversation. Its texts have what makes JSON costly to read: backslashes,
quotes, newlines and characters beyond ASCII. Two conversations of different seeds have no line in
common. Bodies are serialised as the SDKs do it: compact, in UTF-8.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from tests.dialects.messages import converting

Json = dict[str, Any]

MODEL = "gpt-4.1"
CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
RESULT = 20_000
"""Bytes of a tool result, about."""
MARK = {"cache_control": {"type": "ephemeral"}}
MARKED = 2
"""Newest messages that bear a mark, as Claude Code sets them."""
PLACES = ["Zürich", "São Paulo", "東京", "Кишинёв", "Malmö", "İzmir"]


def _tool(name: str, purpose: str, **parameters: str) -> Json:
    properties = {
        parameter: {"type": "string", "description": text} for parameter, text in parameters.items()
    }
    schema = {"type": "object", "properties": properties, "required": list(parameters)[:1]}
    function = {"name": name, "description": purpose, "parameters": schema}
    return {"type": "function", "function": function}


TOOLS = [
    _tool("view", 'Show a file\'s lines as "number→text".', file="A path.", first="A line."),
    _tool("query", "Ask the service's API.\nReturns JSON.", path='Such as "/v1/orders?limit=50".'),
    _tool(
        "edit", "Replace a text in a file.", file="A path.", old="Its text now.", new="Its text."
    ),
    _tool("run", "Run a command with bash -c '…'.", command="The command, quoted for the shell."),
]


@cache
def _source() -> list[str]:
    """The lines of this Python's own library."""
    paths = sorted(Path(json.__file__).parents[1].glob("*.py"))
    return [line for path in paths for line in path.read_text(encoding="utf-8").splitlines()]


def code(chosen: random.Random, size: int) -> str:
    """Lines of source with their numbers, as agents' tools show files."""
    lines = _source()
    start = chosen.randrange(len(lines))
    first = chosen.randrange(1, 10**6)
    shown = list[str]()
    length = 0
    while length < size:
        number = len(shown)
        shown.append(f"{first + number:6}→{lines[(start + number) % len(lines)]}")
        length += len(shown[-1]) + 1
    return "\n".join(shown)


def records(chosen: random.Random, size: int) -> str:
    """A reply of an API as indented JSON, with paths of Windows and quotes in its texts."""
    rows = [
        {
            "id": chosen.randrange(10**9),
            "place": chosen.choice(PLACES),
            "file": f"C:\\data\\{chosen.randrange(10**6)}.csv",
            "note": f'said "no" at {chosen.random():.4f};\n\tsee above',
            "open": chosen.random() < 0.5,
        }
        for _ in range(size // 165 + 1)
    ]
    return json.dumps(rows, indent=1, ensure_ascii=False)


@lru_cache(8_000)
def turn(seed: int, number: int, result: int) -> list[Json]:
    """A call and its result of about so many bytes."""
    chosen = random.Random(seed * 1_000_003 + number)
    function = {"name": "view", "arguments": json.dumps({"file": f"src/part_{number}.py"})}
    content = code(chosen, result)
    if number % 4 == 3:
        asked = {"path": f"/v1/orders?page={number}"}
        function = {"name": "query", "arguments": json.dumps(asked)}
        content = records(chosen, result)
    call = {"id": f"call_{number}", "type": "function", "function": function}
    said = f"That doesn't explain it → next, part {number}."
    return [
        {"role": "assistant", "content": said, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": content},
    ]


@dataclass(frozen=True)
class Talk:
    """An agent's conversation for one of the APIs: each turn is a call and its result."""

    seed: int
    api: str = CHAT
    marks: bool = False
    """Whether the system prompt and the newest messages bear cache marks; Messages only."""
    result: int = RESULT
    """Bytes of each result, about."""
    model: str = MODEL

    def begun(self) -> list[Json]:
        """The messages before the first turn."""
        task = f'Find out why "billing_{self.seed}" fails, and mend it.\nThe tests are in tests/.'
        return [
            {"role": "system", "content": "You are a careful engineer. " * 20},
            {"role": "user", "content": task},
        ]

    def turn(self, number: int) -> list[Json]:
        """A call and its result."""
        return turn(self.seed, number, self.result)

    def body(self, turns: int, *, stream: bool = False) -> bytes:
        """The request after so many turns."""
        messages = self.begun()
        for number in range(turns):
            messages += self.turn(number)
        head = {"model": self.model, "stream": stream}
        if self.api == CHAT:
            return _dumped({**head, "messages": messages, "tools": TOOLS})
        asked = {**converting.request(messages, TOOLS), **head}
        if self.marks:
            asked["system"] = [{"type": "text", "text": asked["system"], **MARK}]
            for message in asked["messages"][-MARKED:]:
                message["content"][-1] |= MARK
        return _dumped(asked)

    def turns(self, size: int) -> int:
        """The number of turns that make a body of about this many bytes."""
        return max((size - len(self.body(0))) // (len(self.body(8)) // 8), 0)


def small(number: int, *, stream: bool, model: str = MODEL) -> bytes:
    """A request of 1 KB with one tool; another one for each number."""
    question = f"In line {number} it says \"KeyError: 'é'\"\n\tand nothing else. Why? " * 11
    message = {"role": "user", "content": question}
    head = {"model": model, "stream": stream}
    return _dumped({**head, "messages": [message], "tools": TOOLS[:1]})


def _dumped(body: Json) -> bytes:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()


def request(body: bytes, path: str = CHAT, headers: Mapping[str, str] | None = None) -> bytes:
    """The request in wire format, with about the headers that the OpenAI client sends."""
    fields = {
        "Host": "127.0.0.1",
        "Accept": "application/json",
        "Authorization": "Bearer sk-bench",
        "Content-Type": "application/json",
        "User-Agent": "OpenAI/Python 3.52.0",
        "X-Stainless-Lang": "python",
        "X-Stainless-Retry-Count": "0",
        **(headers or {}),
        "Content-Length": str(len(body)),
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"POST {path} HTTP/1.1\r\n{lines}\r\n".encode() + body
