"""Messages for upstream and for readers: a snapshot added, user messages joined, a message as readable sections."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import groupby

from msgspec import Raw

from proxy import rawjson
from proxy.dialects.chat.messages import is_known, reasoning, text_message, tool_calls
from proxy.dialects.entries import appended, call_section, sources, title
from proxy.dialects.values import Members, text_of
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


# -- user messages in a row, which many chat templates refuse, so that a cut must not create them ----------------------


BLANK_LINE = b"\\n\\n"
"""As it is written in a JSON string."""


def joined(messages: Sequence[bytes | Raw]) -> list[bytes | Raw]:
    """Return the messages with each run of user messages of the same name as one message."""
    if len(messages) < 2:
        return list(messages)
    users = [_user(raw) for raw in messages]
    names = [place if user is None else text_of(user.get("name")) for place, user in enumerate(users)]
    found: list[bytes | Raw] = []
    for _, places in groupby(range(len(messages)), key=names.__getitem__):
        first, *others = places
        run = [user for user in users[first : first + 1 + len(others)] if user is not None]
        found.append(_one(run) if others else messages[first])
    return found


def followed(message: bytes | Raw, by: bytes) -> bytes | None:
    """Return a user message that goes on with another one, whatever their names; None if it is no user message."""
    first, second = _user(message), _user(by)
    return None if first is None or second is None else _one([first, second])


def _user(raw: bytes | Raw) -> Members | None:
    """Return the members of a user message in which we know everything; None for everything else."""
    members = rawjson.members(raw)
    try:
        return members if text_of(members.get("role")) == "user" and is_known(members) else None
    except NotJson:
        return None


def _one(users: Sequence[Members]) -> bytes:
    """Return one message with the members of all; where several have one, that of the last message counts."""
    members: Members = {}
    contents: list[Raw] = []
    for user in users:
        members |= user
        if not rawjson.is_null(user.get("content")):
            contents.append(user["content"])
    return rawjson.encode(members | {"content": _content(contents)})


def _content(contents: Sequence[Raw]) -> Raw:
    """Return the contents as one, with a blank line between texts: as a string if all of them are strings."""
    if all(map(rawjson.is_string, contents)):
        texts = [bytes(content)[1:-1] for content in contents]
        return Raw(b'"%b"' % BLANK_LINE.join(text for text in texts if text))
    parts: list[Members] = []
    for content in contents:
        new = _parts(content)
        if new and parts and _is_text(new[0]) and _is_text(parts[-1]):
            new[0] |= {"text": Raw(b'"' + BLANK_LINE + bytes(new[0]["text"])[1:])}
        parts += new
    return Raw(rawjson.array([rawjson.encode(part) for part in parts]))


def _parts(content: Raw | None) -> list[Members]:
    """Return the parts of a message's content. Raises NotJson for a content of an unknown form."""
    if content is None or rawjson.is_null(content):
        return []
    if rawjson.is_string(content):
        return [{"type": Raw(b'"text"'), "text": content}]
    return [rawjson.members(part) for part in rawjson.elements(content)]


def _is_text(part: Members) -> bool:
    return rawjson.is_string(part.get("text"))
