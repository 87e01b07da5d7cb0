"""Reads messages for the plan, and rewrites their texts without changing any other byte."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Raw

from proxy import rawjson
from proxy.dialects import attachments, cache_marks
from proxy.dialects.cache_marks import Mark
from proxy.dialects.chat.request import CALLS, MESSAGES, PARTS
from proxy.dialects.measuring import (
    MESSAGE_TOKENS,
    TextSource,
    canonical,
    hashed,
    item,
    known,
    pieces,
    sealed,
    spaces,
    unreadable,
)
from proxy.dialects.values import text_of
from proxy.plan import labels
from proxy.plan.history import Count, Message, Reading, ToolCall, Unplannable, digest
from proxy.plan.plan import Role
from proxy.plan.preview import Shape
from proxy.plan.request import Request
from proxy.plan.results import carried, reports_error
from proxy.rawjson import NotJson

ROLES = {
    "system": Role.SYSTEM,
    "developer": Role.SYSTEM,
    "user": Role.USER,
    "assistant": Role.ASSISTANT,
    "tool": Role.TOOL,
}


# -- one message ------------------------------------------------------------------------------------------------------


def read(raw: bytes | Raw, reading: Reading, count: Count) -> Message:
    """Measure a message. Raises Unplannable if it is not a JSON object."""
    try:
        members = rawjson.members(raw)
    except NotJson as error:
        raise Unplannable(str(error)) from error
    try:
        message = _Reader(members, reading, count).message(digest(raw))
        return message if is_known(members) else sealed(message)
    except (NotJson, msgspec.MsgspecError):
        return _unreadable(raw, members, count)


def is_known(members: dict[str, Raw]) -> bool:
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


def _unreadable(raw: bytes | Raw, members: dict[str, Raw], count: Count) -> Message:
    """Measure a message as a whole, whose role or content we do not know. It counts as a result of its step."""
    return unreadable(raw, ROLES.get(text_of(members.get("role")), Role.TOOL), _unreadable_meaning, count)


def _unreadable_meaning(text: str) -> bytes:
    return hashlib.sha256(b"unreadable\n" + canonical(text).encode("utf-8", "surrogatepass")).digest()[:16]


def texts(raw: bytes | Raw) -> list[tuple[int | None, str]]:
    """Return a message's texts: one text without a place, or each text part with its place. Raises NotJson."""
    return _content_texts(rawjson.members(raw).get("content"))


def reasoning(members: dict[str, Raw]) -> str:
    """Return the model's reasoning, under any vendor's name for it."""
    for field in ("reasoning_content", "reasoning"):
        if rawjson.is_string(members.get(field)):
            return rawjson.string(members[field])
    return ""


def tool_calls(members: dict[str, Raw]) -> list[ToolCall]:
    """Return an assistant message's calls of functions and custom tools."""
    if rawjson.is_null(members.get("tool_calls")):
        return []
    return [_call(rawjson.members(raw)) for raw in rawjson.elements(members["tool_calls"])]


def with_texts(raw: bytes | Raw, replaced: Mapping[int | None, str]) -> bytes:
    """Return the message with some of its texts replaced. All other members keep their bytes."""
    if not replaced:
        return bytes(raw)
    members = rawjson.members(raw)
    if None in replaced:
        content = rawjson.encode(replaced[None])
    else:
        parts = rawjson.elements(members["content"])
        for place, text in ((place, text) for place, text in replaced.items() if place is not None):
            part = rawjson.members(parts[place]) | {"text": Raw(rawjson.encode(text))}
            parts[place] = Raw(rawjson.encode(part))
        content = rawjson.array(parts)
    return rawjson.encode(members | {"content": Raw(content)})


def text_message(role: str, text: str) -> bytes:
    return rawjson.encode({"role": role, "content": text})


def cache_breakpoint(raw: bytes | Raw) -> Mark | None:
    """Return the last cache breakpoint that the client set in a message, on a part or on the message itself."""
    if not cache_marks.may_be_in(raw):
        return None
    members = rawjson.members(raw)
    content = members.get("content")
    try:
        parts = [rawjson.members(part) for part in rawjson.elements(content)] if content else []
    except NotJson:  # one text, or a form that we do not know
        parts = []
    return cache_marks.last_in([members, *parts])


def with_cache_breakpoint(raw: bytes, breakpoint: Mark) -> bytes:
    """Return the message, whose content must be a string, with this breakpoint at its end."""
    members = rawjson.members(raw)
    part = rawjson.encode({"type": "text", "text": members["content"], breakpoint.key: breakpoint.value})
    return rawjson.encode(members | {"content": Raw(rawjson.array([part]))})


def marked(request: Request, place: int, raw: bytes | Raw) -> bytes | Raw:
    """Return message `place` as it is sent, with a cache breakpoint of ours if it can carry one."""
    mark = cache_marks.own(request, place, cache_breakpoint)
    members = rawjson.members(raw) if mark is not None else {}
    content = cache_marks.content(members.get("content"), mark) if mark is not None else None
    return raw if content is None else rawjson.encode(members | {"content": content})


def _call(members: dict[str, Raw]) -> ToolCall:
    kind = "custom" if "custom" in members else "function"
    inner = rawjson.members(members[kind]) if kind in members else members
    arguments = inner.get("input" if kind == "custom" else "arguments")
    return ToolCall(_text(members.get("id")), _text(inner.get("name")), _text(arguments))


def _text(raw: Raw | None) -> str:
    """Return a string's text, or the JSON of any other value: some clients send arguments as objects."""
    if raw is None or rawjson.is_null(raw):
        return ""
    return rawjson.string(raw) if rawjson.is_string(raw) else bytes(raw).decode("utf-8", "replace")


def _content_texts(content: Raw | None) -> list[tuple[int | None, str]]:
    if content is None or rawjson.is_null(content):
        return []
    if rawjson.is_string(content):
        return [(None, rawjson.string(content))]
    parts = [rawjson.members(part) for part in rawjson.elements(content)]
    return [(place, rawjson.string(part["text"])) for place, part in enumerate(parts) if _is_text(part)]


def _is_text(part: dict[str, Raw]) -> bool:
    return rawjson.is_string(part.get("text"))


class _Reader:
    """Reads one message, and keeps the values that several of its measures need."""

    def __init__(self, members: dict[str, Raw], reading: Reading, count: Count) -> None:
        self._members = members
        self._reading = reading
        self._count = count
        role = _text(members.get("role"))
        if role not in ROLES:
            raise NotJson(f"unknown role {role[:40]!r}")
        self._role = ROLES[role]
        self._answers = _text(members.get("tool_call_id"))
        # In canonical form, so that spaces in the arguments influence no decision.
        written = tool_calls(members)
        self._calls = [(call.id, call.name, canonical(call.arguments)) for call in written]
        self._spaces = spaces(written, count)
        self._texts = _content_texts(members.get("content"))
        self._others = self._other_parts()
        texts = [text for _, text in self._texts]
        self._carries, self._kept = carried(self._role.name.lower(), texts, reading.results)

    def message(self, digest: bytes) -> Message:
        sizes = [self._count(text) for _, text in self._texts]
        called = sum(self._count(name) + self._count(arguments) for _, name, arguments in self._calls)
        fixed = sum(map(attachments.tokens, self._others))
        tokens = sum(sizes) + called + fixed + self._count(reasoning(self._members)) + MESSAGE_TOKENS
        source = TextSource(self._role, self._carries, self._kept)
        moved = pieces(self._texts, sizes, source, self._reading, self._count)
        return Message(
            digest=digest,
            role=self._role,
            meaning=self._meaning(),
            tokens=tokens,
            item=item(self._role, tokens, fixed, moved),
            pieces=moved,
            calls=tuple((call_id, name) for call_id, name, _ in self._calls),
            answers=self._answers,
            carries=self._carries,
            said=any(piece.spans for piece in moved),
            failed=self._role is Role.TOOL and reports_error([text for _, text in self._texts]),
            labels=tuple(labels.of_call(name, arguments, self._count) for _, name, arguments in self._calls),
            spaces=self._spaces,
        )

    def _other_parts(self) -> list[bytes]:
        """Return images, audio and files as canonical JSON, without cache breakpoints."""
        content = self._members.get("content")
        if not rawjson.is_array(content) or content is None:
            return []
        parts = [rawjson.members(part) for part in rawjson.elements(content)]
        others = [part for part in parts if not _is_text(part)]
        return list(map(cache_marks.unmarked, others))

    def _meaning(self) -> bytes:
        text = "".join(text for _, text in self._texts).strip()
        return hashed([int(self._role), text, self._calls, self._answers], self._others)


# -- the history ------------------------------------------------------------------------------------------------------


def reply_meaning(content: str, calls: Sequence[ToolCall]) -> bytes:
    """Return the meaning of an assistant message with this text and these calls when the client sends it back."""
    function_calls: list[dict[str, Any]] = [
        {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}} for call in calls
    ]
    raw = rawjson.encode({"role": "assistant", "content": content, "tool_calls": function_calls})
    return read(raw, Reading(Shape("", 0, 0), 0), len).meaning


def are_paired(raws: Iterable[bytes | Raw]) -> bool:
    """Whether these are only messages of a model and of tools, and every tool result answers a call among them."""
    called, answered = set[str](), set[str]()
    try:
        for raw in raws:
            json.loads(bytes(raw))  # msgspec does not look inside nested values
            members = rawjson.members(raw)
            if rawjson.string(members["role"]) == "tool":
                answered.add(rawjson.string(members["tool_call_id"]))
            elif rawjson.string(members["role"]) == "assistant":
                called |= {call.id for call in tool_calls(members)}
            else:
                return False
    except (NotJson, KeyError, ValueError, RecursionError):
        return False
    return answered <= called
