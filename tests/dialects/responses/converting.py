"""Writes chat histories as a client of the Responses API would have them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Json = dict[str, Any]

PARTS = {"text": "input_text", "image_url": "input_image"}


def items(messages: Iterable[Json]) -> list[Json]:
    """The input items that say what these chat messages say."""
    return [item for message in messages for item in _items(message)]


def tools(defined: Iterable[Json]) -> list[Json]:
    return [{"type": "function", "strict": False, **tool["function"]} for tool in defined]


def _items(message: Json) -> list[Json]:
    if message["role"] == "tool":
        output = _content(message.get("content"))
        return [
            {"type": "function_call_output", "call_id": message["tool_call_id"], "output": output}
        ]
    if message["role"] != "assistant":
        return [
            {
                "type": "message",
                "role": message["role"],
                "content": _content(message.get("content")),
            }
        ]
    calls = [_call(call) for call in message.get("tool_calls") or []]
    thought = message.get("reasoning_content") or message.get("reasoning")
    text = message.get("content") or ""
    thoughts = (
        [{"type": "reasoning", "summary": [{"type": "summary_text", "text": thought}]}]
        if thought
        else []
    )
    said = (
        []
        if calls and not text
        else [{"type": "message", "role": "assistant", "content": _said(text)}]
    )
    return [*thoughts, *said, *calls]


def _call(call: Json) -> Json:
    function = call["function"]
    return {
        "type": "function_call",
        "call_id": call["id"],
        "name": function["name"],
        "arguments": function["arguments"],
    }


def _said(content: str | list[Json]) -> list[Json]:
    texts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
    return [{"type": "output_text", "text": text, "annotations": []} for text in texts]


def _content(content: str | list[Json] | None) -> str | list[Json]:
    if not isinstance(content, list):
        return content or ""
    return [_part(part) for part in content]


def _part(part: Json) -> Json:
    if part["type"] == "image_url":
        return {"type": "input_image", "image_url": part["image_url"]["url"], "detail": "auto"}
    return {**part, "type": PARTS.get(part["type"], part["type"])}
