"""Joins user messages. Many chat templates refuse two in a row, so a cut must not create such rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from msgspec import Raw

from proxy import rawjson
from proxy.dialects.chat.messages import is_known
from proxy.dialects.values import Members, text_of
from proxy.rawjson import NotJson

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
