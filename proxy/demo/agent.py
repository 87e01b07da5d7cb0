"""A typical agent: the `openai` client, a list of messages, tools, and a loop. It does not know about the proxy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from openai import OpenAI, OpenAIError
from openai.types.chat import ChatCompletionChunk

from proxy.demo.library import DEFINITIONS, TOOLS, Library
from proxy.errors import ProxyError

Json = dict[str, Any]

SYSTEM = "You are a careful engineer. You answer from what you have read, never from memory."
MODEL = "scripted-demo"


class AgentTurn(msgspec.Struct, frozen=True):
    """One reply of the model: its text and its tool calls (name and arguments)."""

    text: str
    calls: list[tuple[str, str]]


class Agent:
    """`messages` is the agent's whole memory, and every request carries all of it."""

    def __init__(self, client: OpenAI, library: Library) -> None:
        self.messages: list[Json] = [{"role": "system", "content": SYSTEM}]
        self._client = client
        self._library = library

    def work(self, request: str) -> Iterator[AgentTurn]:
        """The turns until the model calls no more tools. Raises ProxyError if an agent could not continue."""
        self.messages.append({"role": "user", "content": request})
        while True:
            reply = self._ask()
            self.messages.append(reply)
            calls = [call["function"] for call in reply.get("tool_calls") or ()]
            yield AgentTurn(reply["content"], [(call["name"], call["arguments"]) for call in calls])
            if not calls:
                return
            for call in reply["tool_calls"]:
                result = {"role": "tool", "tool_call_id": call["id"], "content": self._use(**call["function"])}
                self.messages.append(result)

    def _use(self, name: str, arguments: str) -> str:
        if name not in TOOLS:
            raise ProxyError(f"the agent was told to call {name}, which is not one of its tools")
        return self._library.call(name, arguments)

    def _ask(self) -> Json:
        definitions: Any = DEFINITIONS
        messages: Any = self.messages
        create = self._client.chat.completions.create
        try:
            with create(model=MODEL, messages=messages, tools=definitions, stream=True) as stream:
                return folded(stream)
        except OpenAIError as error:
            raise ProxyError(f"the agent got an error: {error}") from error


def folded(stream: Iterable[ChatCompletionChunk]) -> Json:
    """The assistant message that a stream adds up to."""
    text = ""
    calls: dict[int, Json] = {}
    for delta in (choice.delta for chunk in stream for choice in chunk.choices):
        text += delta.content or ""
        for part in delta.tool_calls or ():
            empty = {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
            call = calls.setdefault(part.index, empty)
            call["id"] += part.id or ""
            if part.function:
                call["function"]["name"] += part.function.name or ""
                call["function"]["arguments"] += part.function.arguments or ""
    made = [calls[index] for index in sorted(calls)]
    return {"role": "assistant", "content": text, **({"tool_calls": made} if made else {})}
