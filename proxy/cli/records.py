"""What a record of another tool gives: requests' bodies, and how a whole conversation becomes one for each turn."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import msgspec

from proxy.dialects.usage import Reported

Json = dict[str, Any]
CHAT, RESPONSES, MESSAGES = "chat", "responses", "messages"


class Exported(NamedTuple):
    body: Json | bytes | None
    """None: there is none, and `why` says so."""
    api: str = ""
    """The dialect's name; empty: the body shows it."""
    said: Reported | None = None
    caller: str = ""
    why: str = ""


class RecordReader:
    """Reads the records of one file in their order."""

    def take(self, record: Json) -> Iterator[Exported]:
        """Yield the requests that are complete with this record."""
        raise NotImplementedError

    def end(self) -> Iterator[Exported]:
        yield from ()


def value_of(raw: bytes) -> Any:
    """Return a JSON value, also one with half surrogate pairs. Raises ValueError."""
    try:
        return msgspec.json.decode(raw)
    except msgspec.MsgspecError:
        return json.loads(bytes(raw))


def loaded(value: Any) -> Any:
    """Return what a text of JSON says, and any other value as it is: databases keep JSON as text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def inside(value: Any, *names: str) -> Any:
    for name in names:
        value = loaded(value)
        value = value.get(name) if isinstance(value, dict) else None
    return value


def number(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0


# -- turns of a whole conversation -------------------------------------------------------------------------------------


def is_reply(entry: Any) -> bool:
    """Whether the model wrote this entry of a history, in any API."""
    if not isinstance(entry, dict):
        return False
    kind = entry.get("type", "message")
    return (
        entry.get("role") == "assistant" or kind == "reasoning" or (kind != "message" and str(kind).endswith("_call"))
    )


def turns(body: Json, key: str) -> Iterator[Json]:
    """Yield the body of the request before each reply of this conversation, and of one that is still unanswered."""
    history = body[key]
    for place, entry in enumerate(history):
        if is_reply(entry) and place and not is_reply(history[place - 1]):
            yield {**body, key: history[:place]}
    if history and not is_reply(history[-1]):
        yield body


def whole_conversation(body: Json) -> str:
    """Return the member that holds the history if it ends with a reply, so that this is no request; else ""."""
    for key in ("messages", "input"):
        history = body.get(key)
        if isinstance(history, list) and len(history) > 1 and is_reply(history[-1]):
            return key
    return ""


# -- parts of chat messages, and what a reply cost ---------------------------------------------------------------------


def texts(parts: Iterable[Json]) -> str:
    return "\n".join(part["text"] for part in parts if part.get("type") == "text" and isinstance(part.get("text"), str))


def call(name: str, function: str, arguments: Any) -> Json:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": name, "type": "function", "function": {"name": function, "arguments": text}}


def cost(prompt: Any, completion: Any, cached: Any, *apart: Any) -> Reported | None:
    """What a reply cost; None if the input is not known. Some count what is cached or `apart` beside the prompt."""
    whole = number(prompt) + sum(map(number, apart))
    return Reported(whole, number(completion), min(number(cached), whole)) if whole else None


def anthropic_usage(usage: Any) -> Reported | None:
    cached, written = inside(usage, "cache_read_input_tokens"), inside(usage, "cache_creation_input_tokens")
    return cost(inside(usage, "input_tokens"), inside(usage, "output_tokens"), cached, cached, written)
