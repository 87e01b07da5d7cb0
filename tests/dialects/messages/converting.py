"""Writes chat histories as a client of the Messages API would have them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

Json = dict[str, Any]


def request(messages: Iterable[Json], defined: Iterable[Json] = ()) -> Json:
    """The members of a request that says what these chat messages say. Leading system messages are
    its prompt."""
    made: list[Json] = []
    system: list[str] = []
    for message in messages:
        if message["role"] in ("system", "developer") and not made:
            system += _texts(message.get("content"))
        elif message["role"] == "assistant":
            made.append({"role": "assistant", "content": _reply(message)})
        elif message["role"] == "tool":
            content = "\n".join(_texts(message.get("content")))
            result = {
                "type": "tool_result",
                "tool_use_id": message["tool_call_id"],
                "content": content,
            }
            if (
                made
                and made[-1]["role"] == "user"
                and made[-1]["content"][-1]["type"] == "tool_result"
            ):
                made[-1]["content"].append(result)
            else:
                made.append({"role": "user", "content": [result]})
        else:
            content = [
                {"type": "text", "text": text or "-"} for text in _texts(message.get("content"))
            ]
            made.append({"role": "user", "content": content or [{"type": "text", "text": "-"}]})
    tools = [
        {"name": tool["function"]["name"], "input_schema": tool["function"].get("parameters", {})}
        for tool in defined
    ]
    return {
        "model": "m",
        "max_tokens": 4_000,
        "system": "\n\n".join(system),
        "messages": made,
        "tools": tools,
    }


def _reply(message: Json) -> list[Json]:
    said = [
        {"type": "text", "text": text} for text in _texts(message.get("content")) if text.strip()
    ]
    calls = [
        {
            "type": "tool_use",
            "id": call["id"],
            "name": call["function"]["name"],
            "input": _arguments(call["function"]["arguments"]),
        }
        for call in message.get("tool_calls") or []
    ]
    return [*said, *calls] or [{"type": "text", "text": "-"}]


def _arguments(text: str) -> Json:
    try:
        made = json.loads(text or "{}")
    except ValueError:
        made = text
    return made if isinstance(made, dict) else {"raw": made}


def _texts(content: str | list[Json] | None) -> list[str]:
    if isinstance(content, list):
        return [part["text"] for part in content if "text" in part]
    return [content or ""]
