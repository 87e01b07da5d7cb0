"""Reads messages for the plan, and rewrites their texts without changing any other byte."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec import Raw

from proxy import rawjson
from proxy.dialects import attachments, cache_marks, measuring
from proxy.dialects.attachments import KINDS
from proxy.dialects.cache_marks import Mark
from proxy.dialects.chat.request import CALLS, MESSAGES, PARTS
from proxy.dialects.entries import texts_in, with_texts_in
from proxy.dialects.measuring import Places, known
from proxy.dialects.values import NULL, Members, text_of
from proxy.plan.message import Count, Message, Reading, ToolCall
from proxy.plan.plan import Role
from proxy.plan.turn import Unplannable
from proxy.rawjson import NotJson

NAME = "chat"
ROLES = {
    "system": Role.SYSTEM,
    "developer": Role.SYSTEM,
    "user": Role.USER,
    "assistant": Role.ASSISTANT,
    "tool": Role.TOOL,
}


# -- one message ------------------------------------------------------------------------------------------------------


def read(raw: bytes | Raw, reading: Reading, count: Count) -> Message:
    try:
        members = rawjson.members(raw)
    except NotJson as error:
        raise Unplannable(str(error)) from error
    role = text_of(members.get("role"))
    try:
        message = _measured(raw, members, role, reading, count)
        return message if is_known(members) else measuring.sealed(message)
    except (NotJson, msgspec.MsgspecError):  # it counts as a result of its step
        return measuring.unreadable(NAME, raw, ROLES.get(role, Role.TOOL), count)


def _measured(raw: bytes | Raw, members: Members, role: str, reading: Reading, count: Count) -> Message:
    if role not in ROLES:
        raise NotJson(f"unknown role {role[:40]!r}")
    texts, others, calls = texts_in(content := members.get("content")), _others(content), tool_calls(members)
    fixed = sum(map(attachments.tokens, others))
    if ROLES[role] is not Role.ASSISTANT:
        answers = _text(members.get("tool_call_id"))
        media = media_in(content)
        return measuring.of_client(
            NAME, ROLES[role], raw, texts, others, reading, count, answers=answers, fixed=fixed, media=media
        )
    tokens = sum(count(text) for _, text in texts) + count(reasoning(members)) + fixed
    tokens += sum(measuring.call_tokens(call, count) for call in calls)
    said = "".join(text for _, text in texts)
    return measuring.of_model(NAME, raw, said, calls, calls, tokens, fixed, count, others)


def is_known(members: Members) -> bool:
    """Whether we know everything in a message, so that it may be moved or cut. Raises NotJson."""
    content = members.get("content")
    if not (rawjson.is_null(content) or rawjson.is_string(content) or rawjson.is_array(content)):
        return False
    return known(members, MESSAGES, text_of(members.get("role"))) and all(
        known(one, table, text_of(one.get("type")) or unnamed)
        for field, table, unnamed in (("content", PARTS, "text"), ("tool_calls", CALLS, "function"))
        if rawjson.is_array(members.get(field))
        for one in map(rawjson.members, rawjson.elements(members[field]))
    )


def texts(raw: bytes | Raw) -> Places:
    content = rawjson.members(raw).get("content")
    return [*texts_in(content), *((place, part.decode("utf-8", "replace")) for place, part in media_in(content))]


def media_in(content: Raw | None) -> list[tuple[int, bytes]]:
    """Return images, audio and files as canonical JSON, with their places."""
    parts = rawjson.elements(content) if content and rawjson.is_array(content) else []
    found = enumerate(map(rawjson.members, parts))
    return [(place, cache_marks.unmarked(part)) for place, part in found if text_of(part.get("type")) in KINDS]


def reasoning(members: Members) -> str:
    """Return the model's reasoning, under any vendor's name for it."""
    for field in ("reasoning_content", "reasoning"):
        if rawjson.is_string(members.get(field)):
            return rawjson.string(members[field])
    return ""


def tool_calls(members: Members) -> list[ToolCall]:
    """Return an assistant message's calls of functions and custom tools."""
    if rawjson.is_null(members.get("tool_calls")):
        return []
    return [_call(rawjson.members(raw)) for raw in rawjson.elements(members["tool_calls"])]


def with_texts(raw: bytes | Raw, replaced: Mapping[int | None, str]) -> bytes:
    if not replaced:
        return bytes(raw)
    members = rawjson.members(raw)
    return rawjson.encode(members | {"content": with_texts_in(members.get("content", NULL), replaced)})


def said(raw: bytes | Raw) -> tuple[str, list[ToolCall]]:
    members = rawjson.members(raw)
    return "".join(text for _, text in texts_in(members.get("content"))), tool_calls(members)


def answered(raw: bytes | Raw) -> str:
    return text_of(rawjson.members(raw).get("tool_call_id"))


def text_message(role: str, text: str) -> bytes:
    return rawjson.encode({"role": role, "content": text})


def marked(raw: bytes | Raw, mark: Mark) -> bytes | Raw:
    members = rawjson.members(raw)
    content = cache_marks.content(members.get("content"), mark)
    return raw if content is None else rawjson.encode(members | {"content": content})


def _call(members: Members) -> ToolCall:
    kind = "custom" if "custom" in members else "function"
    inner = rawjson.members(members[kind]) if kind in members else members
    arguments = inner.get("input" if kind == "custom" else "arguments")
    return ToolCall(_text(members.get("id")), _text(inner.get("name")), _text(arguments))


def _text(raw: Raw | None) -> str:
    """Return a string's text, or the JSON of any other value: some clients send arguments as objects."""
    if raw is None or rawjson.is_null(raw):
        return ""
    return rawjson.string(raw) if rawjson.is_string(raw) else bytes(raw).decode("utf-8", "replace")


def _others(content: Raw | None) -> list[bytes]:
    """Return images, audio and files as canonical JSON, without cache breakpoints."""
    parts = rawjson.elements(content) if content and rawjson.is_array(content) else []
    return [
        cache_marks.unmarked(part) for part in map(rawjson.members, parts) if not rawjson.is_string(part.get("text"))
    ]
