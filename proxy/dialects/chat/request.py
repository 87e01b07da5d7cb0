"""Reads a chat-completions request: decodes the few members that the proxy needs, and keeps the bytes of all."""

from __future__ import annotations

import msgspec
from msgspec import Raw

from proxy.core import rawjson
from proxy.core.history import Unplannable
from proxy.core.rawjson import NotJson, TooManyElements
from proxy.core.reasons import Reason
from proxy.core.request import Request

MAX_MESSAGES = rawjson.MAX_ELEMENTS
"""The most messages of a request that we parse. A request with more is forwarded unchanged."""
MAX_DEFINITIONS = 2_000
"""The most tools of a request that we parse. A request with more is forwarded unchanged."""
MAX_MODEL = 1_000
"""The most bytes of the model's name. A request with more is forwarded unchanged, because caches and patterns use the
name at every request and for each message."""
MAX_OTHERS = 20_000
"""The most commas outside of messages and tools. A request with more is forwarded unchanged, because each comma may
separate top-level members, and each member becomes an object. A large schema for the reply has a thousand commas."""

MAX_TOOLS = 128
"""OpenAI's limit for the tools of one request. Our two tools count towards it."""
TOOL_NAMES = ("grep", "read_file")
OTHER_NAMES = ("offload_grep", "offload_read_file")

NULL = Raw(b"null")

EXCLUSIVE = ("functions", "function_call", "audio", "web_search_options", "prediction")
"""Fields that our tools do not work with."""


class Known(msgspec.Struct, frozen=True):
    """The top-level members that we read. Missing ones are `null`."""

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


def parse(body: bytes) -> Request:
    """Parse a body. Raises Unplannable if it is not a chat request; upstream explains the mistake better."""
    try:
        known = _known(body)
        if len(memoryview(known.model)) > MAX_MODEL:
            raise Unplannable(f"the model's name has more than {MAX_MODEL} bytes")
        _check_others(body, known)
        names = _our_names(_tool_names(known.tools))
        return Request(
            body=body,
            entries=_elements(known.messages, Reason.TOO_MANY_MESSAGES),
            model="" if rawjson.is_null(known.model) else rawjson.string(known.model),
            stream=bytes(known.stream) == b"true",
            tools=known.tools,
            reply_tokens=max(_whole(known.max_completion_tokens), _whole(known.max_tokens)),
            names=names,
            obstacle=_obstacle(known) or ("" if names else "tools"),
        )
    except (NotJson, msgspec.MsgspecError) as error:
        raise Unplannable(str(error)) from error


def _known(body: bytes) -> Known:
    """Decode the body in one pass, without creating objects for messages. Raises NotJson."""
    known, masked = rawjson.decode(_decoder, body)
    if not masked:
        return known
    return Known(*map(rawjson.unmasked, msgspec.structs.astuple(known)))


def _check_others(body: bytes, known: Known) -> None:
    """Raises Unplannable if there is too much besides messages and tools."""
    large = (known.messages, known.tools)
    if len(body) - sum(len(memoryview(raw)) for raw in large) > MAX_OTHERS:
        others = rawjson.commas(body) - sum(map(rawjson.commas, large))
        if others > MAX_OTHERS:
            raise Unplannable(f"more than {MAX_OTHERS} commas outside of messages and tools", Reason.TOO_MANY_MEMBERS)


def _obstacle(known: Known) -> str:
    for field in EXCLUSIVE:
        if not rawjson.is_null(getattr(known, field)):
            return field
    if bytes(known.n) not in (b"1", b"null"):
        return "n"
    return "modalities" if b"audio" in bytes(known.modalities) else ""


def _our_names(client: tuple[str, ...]) -> tuple[str, str] | None:
    if len(client) > MAX_TOOLS - len(TOOL_NAMES):
        return None
    for names in (TOOL_NAMES, OTHER_NAMES):
        if not set(names) & set(client):
            return names
    return None


# -- tools ------------------------------------------------------------------------------------------------------------


def function_tool(definition: bytes) -> bytes:
    """Return one of our tools in the form that this API expects."""
    return rawjson.encode({"type": "function", "function": Raw(definition)})


def with_tools(defined: Raw | None, ours: list[bytes]) -> Raw | None:
    """Return the client's array of tools followed by ours, or None if there are no tools at all."""
    if not ours:
        return defined
    client = [] if defined is None or rawjson.is_null(defined) else rawjson.elements(defined)
    return Raw(rawjson.array([*client, *ours]))


def has_tools(defined: Raw) -> bool:
    """Whether an array of tools has any. Upstream refuses a `tool_choice` without tools."""
    return not rawjson.is_null(defined) and bool(rawjson.elements(defined))


def _tool_names(raw: Raw) -> tuple[str, ...]:
    tools = [] if rawjson.is_null(raw) else _elements(raw, Reason.TOO_MANY_TOOLS)
    if len(tools) > MAX_DEFINITIONS:
        raise Unplannable(f"more than {MAX_DEFINITIONS} tools", Reason.TOO_MANY_TOOLS)
    return tuple(map(_tool_name, tools))


def _elements(raw: Raw, reason: Reason) -> list[Raw]:
    """Return an array's elements. Raises Unplannable with this reason if there are too many."""
    try:
        return rawjson.elements(raw)
    except TooManyElements as error:
        raise Unplannable(str(error), reason) from error


def _tool_name(raw: Raw) -> str:
    """Return a tool's name. Functions and custom tools nest it in a member named after their type."""
    tool = rawjson.members(raw)
    kind = rawjson.string(tool.get("type", Raw(b'"function"')))
    inner = rawjson.members(tool[kind]) if kind in tool else tool
    return rawjson.string(inner["name"]) if rawjson.is_string(inner.get("name")) else ""


def _whole(raw: Raw) -> int:
    text = bytes(raw)
    return int(text) if text.isdigit() and len(text) < 10 else 0
