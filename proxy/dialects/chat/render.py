"""Messages for upstream and for readers: a snapshot added, a message as readable sections."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from msgspec import Raw

from proxy import rawjson
from proxy.dialects.chat.messages import is_known, reasoning, text_message, tool_calls
from proxy.dialects.entries import appended, call_section, sources, title
from proxy.dialects.values import text_of
from proxy.plan.history import Message
from proxy.plan.summary import Section
from proxy.policy import SnapshotRole
from proxy.rawjson import NotJson


def with_snapshot(messages: list[bytes | Raw], leading: int, block: str, role: SnapshotRole) -> list[bytes | Raw]:
    """Return the messages, which begin with `leading` system messages, with the snapshot `block` added."""
    if role is SnapshotRole.USER or (role is SnapshotRole.AUTO and not leading):
        return [*messages[:leading], _user_message(block, messages[leading:]), *messages[leading:]]
    if leading:
        with suppress(NotJson):
            if is_known(rawjson.members(messages[0])):  # otherwise our text might mean what nobody knows
                return [appended(messages[0], "\n\n" + block), *messages[1:]]
    return [text_message("system", block), *messages]


def _user_message(text: str, before: Sequence[bytes | Raw]) -> bytes:
    """Return a user message with the name of the message that it stands before, so that the two can be joined."""
    first = rawjson.members(before[0]) if before else {}
    named = {"name": first["name"]} if "name" in first and text_of(first.get("role")) == "user" else {}
    return rawjson.encode({"role": "user", **named, "content": text})


def is_system(raw: bytes | Raw) -> bool:
    """Whether the message is a system message, by either name."""
    return text_of(rawjson.members(raw).get("role")) in ("system", "developer")


# -- for readers ------------------------------------------------------------------------------------------------------


def sections(raw: bytes | Raw, index: int, message: Message, tool: str) -> list[Section]:
    """Return one message in readable form; `tool` is the tool whose result it is. Raises NotJson."""
    members = rawjson.members(raw)
    heading = title(index, message, tool)
    thought = reasoning(members)
    made = [Section(f"{heading} reasoning", thought, message.role)] if thought else []
    made += [Section(heading, text, message.role) for text in _contents(members.get("content"))]
    made += sources(heading, members, message.role)
    made += [call_section(heading, call, message.role) for call in tool_calls(members)]
    return made or [Section(heading, "", message.role)]


def _contents(content: Raw | None) -> list[str]:
    """Return texts unchanged and other parts as JSON."""
    if content is None or rawjson.is_null(content):
        return []
    if rawjson.is_string(content):
        return [rawjson.string(content)]
    parts = [(part, rawjson.members(part)) for part in rawjson.elements(content)]
    return [
        rawjson.string(members["text"]) if rawjson.is_string(members.get("text")) else bytes(part).decode()
        for part, members in parts
    ]
