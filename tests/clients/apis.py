"""The APIs that agents speak: what a request asks of the scripted model, and what the model says in
that API's words.

`chat` is answered by a `StrictUpstream` itself, the others by the strict APIs of their dialects'
tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tests.dialects.messages import api as messages
from tests.dialects.responses import api as responses
from tests.fake_upstream import Message, Recorded, Reply, error

Json = dict[str, Any]


@dataclass(frozen=True)
class Asked:
    """What the model sees of a request, whatever the API."""

    model: str
    tools: list[str]
    """The names of its tools."""
    history: list[Json]
    """The messages or items, without the breakpoints that clients move on."""
    system: str = ""

    @property
    def texts(self) -> list[str]:
        return [self.system, *map(_text, self.history)]

    @property
    def shown(self) -> str:
        """All the text in it."""
        return "\n".join(self.texts)


Answer = Callable[[Asked], Message]


@dataclass
class Chat:
    answer: Answer
    refused: list[str] = field(default_factory=list)

    def __call__(self, request: Recorded) -> Reply:
        return self.answer(chat_asked(request.json)) if request.is_chat else error(404)


@dataclass
class Strict:
    """An API of `tests.dialects`. Clients may ask for more than it has, such as lists of models."""

    answer: Answer
    api: Any
    path: str
    asked: Callable[[Json], Asked]
    said: Callable[[Json, Message], Sequence[Json]]

    def __post_init__(self) -> None:
        self.api.respond(lambda body: self.said(body, self.answer(self.asked(body))))

    @property
    def refused(self) -> list[str]:
        refused: list[str] = self.api.refused
        return refused

    def __call__(self, request: Recorded) -> Reply:
        served = request.method == "POST" and self.path in request.path
        reply: Reply = self.api(request) if served else error(404)
        return reply


def api(name: str, answer: Answer, *, thinks: str = "I think.") -> Chat | Strict:
    """The API of this name, whose model answers so, and first thinks this."""
    if name == "responses":
        said = partial(_items, thinks=thinks)
        return Strict(answer, responses.ResponsesApi(), "/v1/responses", responses_asked, said)
    if name == "messages":
        said = partial(_blocks, thinks=thinks)
        return Strict(answer, messages.MessagesApi(), "/v1/messages", messages_asked, said)
    return Chat(answer)


# -- what is asked ---------------------------------------------------------------------------------


def chat_asked(body: Json) -> Asked:
    names = [tool[tool["type"]]["name"] for tool in body.get("tools") or ()]
    return Asked(body["model"], names, body["messages"])


def responses_asked(body: Json) -> Asked:
    names = [tool["name"] for tool in body.get("tools") or () if "name" in tool]
    given = body["input"]
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    return Asked(body["model"], names, items, body.get("instructions") or "")


def messages_asked(body: Json) -> Asked:
    names = [tool["name"] for tool in body.get("tools") or ()]
    history = [
        messages.unmarked({**message, "content": _listed(message["content"])})
        for message in body["messages"]
    ]
    return Asked(body["model"], names, history, _text({"content": body.get("system") or ""}))


def _listed(content: str | list[Json]) -> list[Json]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _text(entry: Json) -> str:
    """The text of a message, an item or a block: what it says, or what a tool gave."""
    content = entry.get("content") or entry.get("output") or entry.get("text") or ""
    return content if isinstance(content, str) else "\n".join(map(_text, content))


# -- what is said ----------------------------------------------------------------------------------


def _items(body: Json, message: Message, thinks: str) -> list[Json]:
    custom = {
        tool["name"] for item in body["input"] for tool in _added(item) if tool["type"] == "custom"
    }
    made: list[Json] = [responses.reasoning(thinks)] if thinks else []
    made += [responses.say(message.content)] if message.content else []
    for name, arguments, *_ in message.calls:
        if name in custom:
            made.append(
                {
                    "type": "custom_tool_call",
                    "name": name,
                    "input": arguments,
                    "status": "completed",
                }
            )
        else:
            made.append(responses.call(name, arguments))
    return made


def _added(item: Json) -> list[Json]:
    """The tools that an item of Codex's brings."""
    return [tool for space in item.get("tools") or () for tool in space.get("tools") or ()]


def _blocks(body: Json, message: Message, thinks: str) -> list[Json]:
    made = [messages.thinking(thinks)] if thinks and "thinking" in body else []
    made += [messages.say(message.content)] if message.content else []
    return [*made, *(messages.call(name, arguments) for name, arguments, *_ in message.calls)]
