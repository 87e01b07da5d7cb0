"""A chat-completions request as far as we look into it: a few members decoded, all of them kept as they came."""

from __future__ import annotations

import msgspec
from msgspec import Raw

from proxy.core import rawjson
from proxy.core.rawjson import NotJson
from proxy.core.transcript import Unplannable

MAX_TOOLS = 128
"""OpenAI's limit for one request; we need room for two."""
TOOL_NAMES = ("grep", "read_file")
OTHER_NAMES = ("offload_grep", "offload_read_file")


class ChatRequest(msgspec.Struct, frozen=True):
    """The request's top-level members as raw JSON, and what we need to know of them."""

    members: dict[str, Raw]
    messages: list[Raw]
    model: str
    stream: bool
    tool_names: tuple[str, ...]
    reply_tokens: int
    """What the client reserved for the reply; 0 where it did not say."""

    def obstacle(self) -> str:
        """Why nothing can be offloaded from this request: the field that our tools do not go with. Empty: nothing."""
        for field in ("functions", "function_call", "audio", "web_search_options", "prediction"):
            if not rawjson.is_null(self.members.get(field)):
                return field
        if bytes(self.members.get("n", Raw(b"1"))) not in (b"1", b"null"):
            return "n"
        if b"audio" in bytes(self.members.get("modalities", Raw(b""))):
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
        members = rawjson.members(body)
        return ChatRequest(
            members=members,
            messages=rawjson.elements(members.get("messages", Raw(b""))),
            model=rawjson.string(members.get("model", Raw(b'""'))),
            stream=bytes(members.get("stream", Raw(b""))) == b"true",
            tool_names=_tool_names(members.get("tools")),
            reply_tokens=max(_whole(members.get(field)) for field in ("max_completion_tokens", "max_tokens")),
        )
    except (NotJson, msgspec.MsgspecError) as error:
        raise Unplannable(str(error)) from error


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


def _tool_names(raw: Raw | None) -> tuple[str, ...]:
    return () if raw is None or rawjson.is_null(raw) else tuple(map(_tool_name, rawjson.elements(raw)))


def _tool_name(raw: Raw) -> str:
    """A tool's name, whatever its type: functions and custom tools nest it under that."""
    tool = rawjson.members(raw)
    kind = rawjson.string(tool.get("type", Raw(b'"function"')))
    inner = rawjson.members(tool[kind]) if kind in tool else tool
    return rawjson.string(inner["name"]) if rawjson.is_string(inner.get("name")) else ""


def _whole(raw: Raw | None) -> int:
    text = b"" if raw is None else bytes(raw)
    return int(text) if text.isdigit() and len(text) < 10 else 0
