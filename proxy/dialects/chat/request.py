"""Reads a chat-completions request: decodes the few members that the proxy needs, and keeps the bytes of all."""

from __future__ import annotations

from operator import attrgetter

import msgspec
from msgspec import Raw

from proxy import rawjson
from proxy.dialects import parsing
from proxy.dialects.values import NULL
from proxy.plan.history import Unplannable
from proxy.plan.reasons import Reason
from proxy.plan.request import Request
from proxy.rawjson import NotJson

MAX_MESSAGES = rawjson.MAX_ELEMENTS
"""The most messages of a request that we parse. A request with more is forwarded unchanged."""
EXCLUSIVE = ("functions", "function_call", "audio", "web_search_options", "prediction")
"""Fields that our tools do not work with."""


class ChatMembers(msgspec.Struct, frozen=True):
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


_decoder = msgspec.json.Decoder(ChatMembers)
_exclusive = attrgetter(*EXCLUSIVE)
_NONE = (NULL,) * len(EXCLUSIVE)


def parse(body: bytes) -> Request:
    """Parse a body. Raises Unplannable if it is not a chat request; upstream explains the mistake better."""
    try:
        known = parsing.known(_decoder, body)
        model = parsing.model(known.model)
        parsing.check_others(body, known.messages, known.tools)
        names = parsing.our_names(known.tools, tool_name)
        return Request(
            body=body,
            entries=parsing.elements(known.messages, Reason.TOO_MANY_MESSAGES),
            model=model,
            stream=bytes(known.stream) == b"true",
            tools=known.tools,
            reply_tokens=max(parsing.whole(known.max_completion_tokens), parsing.whole(known.max_tokens)),
            names=names,
            obstacle=_obstacle(known) or ("" if names else "tools"),
        )
    except (NotJson, msgspec.MsgspecError) as error:
        raise Unplannable(str(error)) from error


def _obstacle(known: ChatMembers) -> str:
    values = _exclusive(known)
    if values != _NONE:
        return next((field for field, value in zip(EXCLUSIVE, values, strict=True) if not rawjson.is_null(value)), "")
    if bytes(known.n) not in (b"1", b"null"):
        return "n"
    return "modalities" if b"audio" in bytes(known.modalities) else ""


# -- tools ------------------------------------------------------------------------------------------------------------


def function_tool(definition: bytes) -> bytes:
    """Return one of our tools in the form that this API expects."""
    return rawjson.encode({"type": "function", "function": Raw(definition)})


def tool_name(raw: Raw) -> str:
    """Return the name in one of the client's definitions. Functions and custom tools nest it in a member named after
    their type."""
    tool = rawjson.members(raw)
    kind = rawjson.string(tool.get("type", Raw(b'"function"')))
    inner = rawjson.members(tool[kind]) if kind in tool else tool
    return rawjson.string(inner["name"]) if rawjson.is_string(inner.get("name")) else ""
