"""A chat-completions request as far as we look into it: a few members decoded, all of them kept as they came."""

from __future__ import annotations

from functools import cached_property

import msgspec
from msgspec import Raw

from proxy.core import rawjson
from proxy.core.history import Unplannable
from proxy.core.rawjson import NotJson

MAX_MESSAGES = rawjson.MAX_ELEMENTS
"""Messages of a request that we look into; one with more goes through as it came."""
MAX_DEFINITIONS = 2_000
"""Tools, likewise."""
MAX_MODEL = 1_000
"""Bytes of the model's name, likewise: caches and patterns take it as it is, at every request and for each message."""
MAX_OTHERS = 20_000
"""Commas outside of messages and tools, likewise: all that is there may be top-level members, and we make objects of
those. A large schema for the reply has a thousand."""

MAX_TOOLS = 128
"""OpenAI's limit for one request; we need room for two."""
TOOL_NAMES = ("grep", "read_file")
OTHER_NAMES = ("offload_grep", "offload_read_file")


LARGE_BYTES = 512 << 10
LARGE_MESSAGES = 1_000
"""What is larger is read, planned and rendered in a thread: up to here that takes the loop a few milliseconds at most,
as all but the newest messages are known from the request before."""

NULL = Raw(b"null")


class Known(msgspec.Struct, frozen=True):
    """The top-level members that we look at, `null` where they are missing."""

    messages: Raw = NULL
    model: Raw = NULL
    stream: Raw = NULL
    tools: Raw = NULL
    max_completion_tokens: Raw = NULL
    max_tokens: Raw = NULL
    n: Raw = NULL
    modalities: Raw = NULL
    functions: Raw = NULL
    function_call: Raw = NULL
    audio: Raw = NULL
    web_search_options: Raw = NULL
    prediction: Raw = NULL


_decoder = msgspec.json.Decoder(Known)


class ChatRequest(msgspec.Struct, frozen=True, dict=True):
    """A request's body, and what we need to know of it."""

    body: bytes
    known: Known
    messages: list[Raw]
    model: str
    stream: bool
    tool_names: tuple[str, ...]
    reply_tokens: int
    """What the client reserved for the reply; 0 where it did not say."""

    @cached_property
    def members(self) -> dict[str, Raw]:
        """All top-level members as raw JSON. Most requests are sent on as they came, and need only the known ones."""
        return rawjson.members(self.body)

    @property
    def large(self) -> bool:
        """Whether work on all of it takes more than a few milliseconds."""
        return len(self.body) > LARGE_BYTES or len(self.messages) > LARGE_MESSAGES

    def obstacle(self) -> str:
        """Why nothing can be offloaded from this request: the field that our tools do not go with. Empty: nothing."""
        for field in ("functions", "function_call", "audio", "web_search_options", "prediction"):
            if not rawjson.is_null(getattr(self.known, field)):
                return field
        if bytes(self.known.n) not in (b"1", b"null"):
            return "n"
        if b"audio" in bytes(self.known.modalities):
            return "modalities"
        return "" if self.our_names() else "tools"

    def our_names(self) -> tuple[str, str] | None:
        """What our two tools are called in this request; None where there is no room for them."""
        if len(self.tool_names) > MAX_TOOLS - len(TOOL_NAMES):
            return None
        for names in (TOOL_NAMES, OTHER_NAMES):
            if not set(names) & set(self.tool_names):
                return names
        return None


def parse(body: bytes) -> ChatRequest:
    """Raises Unplannable for what is not a chat request; upstream will say so better than we could."""
    try:
        known = _known(body)
        if len(memoryview(known.model)) > MAX_MODEL:
            raise Unplannable(f"the model's name has more than {MAX_MODEL} bytes")
        _check_others(body, known)
        return ChatRequest(
            body=body,
            known=known,
            messages=rawjson.elements(known.messages),
            model="" if rawjson.is_null(known.model) else rawjson.string(known.model),
            stream=bytes(known.stream) == b"true",
            tool_names=_tool_names(known.tools),
            reply_tokens=max(_whole(known.max_completion_tokens), _whole(known.max_tokens)),
        )
    except (NotJson, msgspec.MsgspecError) as error:
        raise Unplannable(str(error)) from error


def _known(body: bytes) -> Known:
    """One pass over the body, in which nothing is made of any message. Raises NotJson."""
    known, masked = rawjson.decode(_decoder, body)
    if not masked:
        return known
    return Known(*map(rawjson.unmasked, msgspec.structs.astuple(known)))


def _check_others(body: bytes, known: Known) -> None:
    """Raises Unplannable where there is too much besides messages and tools."""
    large = (known.messages, known.tools)
    if len(body) - sum(len(memoryview(raw)) for raw in large) > MAX_OTHERS:
        others = rawjson.commas(body) - sum(map(rawjson.commas, large))
        if others > MAX_OTHERS:
            raise Unplannable(f"more than {MAX_OTHERS} commas outside of messages and tools")


def function_tool(definition: bytes) -> bytes:
    """A tool of ours as this API wants it."""
    return rawjson.encode({"type": "function", "function": Raw(definition)})


def with_tools(defined: Raw | None, ours: list[bytes]) -> Raw | None:
    """The client's array of tools with ours behind; None where neither has any."""
    if not ours:
        return defined
    client = [] if defined is None or rawjson.is_null(defined) else rawjson.elements(defined)
    return Raw(rawjson.array([*client, *ours]))


def has_tools(defined: Raw) -> bool:
    """Whether there is anything in an array of tools; without, a `tool_choice` is refused."""
    return not rawjson.is_null(defined) and bool(rawjson.elements(defined))


def _tool_names(raw: Raw) -> tuple[str, ...]:
    tools = [] if rawjson.is_null(raw) else rawjson.elements(raw)
    if len(tools) > MAX_DEFINITIONS:
        raise Unplannable(f"more than {MAX_DEFINITIONS} tools")
    return tuple(map(_tool_name, tools))


def _tool_name(raw: Raw) -> str:
    """A tool's name, whatever its type: functions and custom tools nest it under that."""
    tool = rawjson.members(raw)
    kind = rawjson.string(tool.get("type", Raw(b'"function"')))
    inner = rawjson.members(tool[kind]) if kind in tool else tool
    return rawjson.string(inner["name"]) if rawjson.is_string(inner.get("name")) else ""


def _whole(raw: Raw) -> int:
    text = bytes(raw)
    return int(text) if text.isdigit() and len(text) < 10 else 0
