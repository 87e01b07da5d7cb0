"""An entry of the Messages API: what is in it, and how it is rewritten without changing any other
byte."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from msgspec import Raw

from proxy import rawjson
from proxy.dialects import entries
from proxy.dialects.entries import Contents, Entry, Harmless, opaque
from proxy.dialects.messages.request import (
    BLOCKS,
    FRAME,
    IN_RESULTS,
    RESULT,
    blocks_in,
    is_reminder,
    is_text,
    parts_of,
)
from proxy.dialects.reply import is_object
from proxy.plan.plan import Role, ToolCall
from proxy.rawjson import EMPTY, NULL, Members, NotJson, elements_of, object_of, text_of

THINKING = ("thinking", "redacted_thinking")
MEDIA = frozenset(("image", "document"))
"""Blocks with a file's bytes or a reference to them, which results may hold."""
FETCHED = "web_fetch_tool_result"
UPLOAD = "container_upload"

CARRIERS = ("text", RESULT, *MEDIA, UPLOAD)
"""The blocks of a client that can carry a cache breakpoint."""

_ROLES = {"user": Role.USER, "assistant": Role.ASSISTANT, "system": Role.SYSTEM}

MESSAGE = "messages[]"
"""The path of a message."""

Parts = tuple[Members | None, Sequence[Raw | Members]]
"""A message's members and nothing, or nothing and the blocks."""


# -- what is in an entry ---------------------------------------------------------------------------


def opened(entry: Entry) -> tuple[Role, Parts]:
    message, blocks = parts_of(entry)
    role = Role.USER if message is None else _ROLES.get(text_of(message.get("role")), Role.TOOL)
    return role, (message, blocks)


def contents(role: Role, parts: Parts) -> Contents:
    """Of a message with a result, or of one that says more than text, nothing can move. What a
    client's reminders say has tokens and no meaning, because many a client sends each of them only
    once."""
    message, _ = parts
    if message is not None and role is Role.TOOL:
        raise NotJson("unknown role")
    blocks = _blocks(parts)
    client = role is not Role.ASSISTANT
    result = next((block for block in blocks if _type(block) == RESULT), None) if client else None
    if role is Role.SYSTEM and message is not None and message.keys() - FRAME:
        # how upstream thinks from here on; Claude Code describes its environment in one
        role = Role.SEALED
    found = Contents(role if result is None else Role.TOOL)
    inner = [] if result is None else list(_content(result.get("content")))
    if result is not None and message is None:
        found.answers = text_of(result.get("tool_use_id"))
        found.failed = bytes(result.get("is_error", b"")) == b"true"
    whole = role is not Role.SEALED and (result is None or message is None)
    for place, block in enumerate(blocks, len(inner)):
        if block is result:
            one = rawjson.is_string(result.get("content"))
            for number, part in enumerate(inner):
                _add(found, None if one else number, part, client=client, moves=whole, said=True)
        else:
            one = message is not None and rawjson.is_string(message.get("content"))
            moves = whole and result is None
            _add(
                found,
                None if one else place,
                block,
                client=client,
                moves=moves,
                said=result is None,
            )
    return found


def _add(
    found: Contents, place: int | None, block: Members, *, client: bool, moves: bool, said: bool
) -> None:
    kind = _type(block)
    part = medium(block)
    if kind == "text":
        if rawjson.is_string(block.get("text")):
            text = rawjson.text(block["text"])
            found.text(place, text, said=said and not (client and is_reminder(text)), moves=moves)
        found.sources(block)
        return
    if client:
        found.others.append(entries.unmarked(block))
    if kind in THINKING:
        found.thought(text_of(block.get("thinking")))
        found.opaque += 0 if kind == "thinking" else opaque(block.values())
    elif kind.endswith("tool_use"):
        theirs = kind == "tool_use"
        found.call(call_of(block), said=theirs, answered=theirs)
    elif part is None:
        found.other(block)
        if kind == UPLOAD:
            found.files.append(rawjson.encode(block))
        else:
            found.opaque += opaque(block.values())
    else:
        if kind == FETCHED:
            rest = {
                key: raw for key, raw in object_of(block["content"]).items() if key != "content"
            }
            found.other(block | {"content": Raw(rawjson.encode(rest))})
        found.medium(place or 0, part, moves=moves)


def medium(block: Members) -> bytes | None:
    """Return a block as an image or a file that a result may hold, or the one in it; None for other
    blocks."""
    if _type(block) == FETCHED:
        return medium(object_of(object_of(block.get("content")).get("content")))
    if _type(block) not in MEDIA or text_of(object_of(block.get("source")).get("type")) == "text":
        return None
    return entries.unmarked({key: raw for key, raw in block.items() if key != "citations"})


def unknown(found: Contents, parts: Parts, harmless: Harmless) -> str:
    message, _ = parts
    blocks = _blocks(parts)
    if message is not None:
        others = sorted(message.keys() - FRAME)
        foreign = next(
            (f"{MESSAGE}.{key}" for key in others if f"{MESSAGE}.{key}" not in harmless), ""
        )
        if foreign and found.role is not Role.SEALED:
            return foreign
        if found.role is Role.TOOL:
            return foreign or "results, which a message with other members holds together"
        # no call of upstream's own tools may go on in the next reply
        if found.role is Role.ASSISTANT:
            served = [one for one in blocks if _type(one) in ("server_tool_use", "mcp_tool_use")]
            answers = {text_of(one.get("tool_use_id")) for one in blocks if "tool_use_id" in one}
            if {text_of(one.get("id")) for one in served} != answers:
                return "call, which upstream answers in its next reply"
    return next(filter(None, (_unknown(block, harmless) for block in blocks)), "")


def _unknown(block: Members, harmless: Harmless) -> str:
    at = f"{MESSAGE}.content[]"
    parts = elements_of(block.get("content")) if _type(block) == RESULT else []
    cited = any(map(_cited, (block, *map(rawjson.members, parts))))
    return (
        entries.unknown(block, BLOCKS, _type(block), at, harmless)
        or entries.unknown_in(parts, IN_RESULTS, f"{at}.content[]", harmless)
        or ("sources, which replies cite by number" if cited else "")
    )


def _cited(block: Members) -> bool:
    """Whether replies cite this source by its number among all of the request, which must not
    change."""
    return bytes(object_of(block.get("citations")).get("enabled", NULL)) == b"true"


def _type(block: Members) -> str:
    return text_of(block.get("type"))


def _blocks(parts: Parts) -> list[Members]:
    message, blocks = parts
    if message is not None:
        return list(_content(message.get("content")))
    return [block if isinstance(block, dict) else rawjson.members(block) for block in blocks]


def _content(content: Raw | None) -> Iterator[Members]:
    """Yield a message's blocks; a string stands for one. Raises NotJson for anything else."""
    if content is None or rawjson.is_null(content):
        return
    if rawjson.is_string(content):
        yield {"type": Raw(b'"text"'), "text": content}
    else:
        yield from map(rawjson.members, rawjson.elements(content))


def call_of(block: Members) -> ToolCall:
    given = block.get("input")
    arguments = (
        "{}" if given is None or rawjson.is_null(given) else bytes(given).decode("utf-8", "replace")
    )
    return ToolCall(text_of(block.get("id")), text_of(block.get("name")), arguments)


def calling(calls: Sequence[ToolCall]) -> Entry:
    """Return a reply with these calls. Upstream takes no arguments but an object."""
    made = []
    for call in calls:
        given = (
            Raw(call.arguments.encode("utf-8", "replace")) if is_object(call.arguments) else EMPTY
        )
        made.append({"type": "tool_use", "id": call.id, "name": call.name, "input": given})
    return rawjson.encode({"role": "assistant", "content": made})


def spoken(blocks: Iterable[Members]) -> tuple[str, list[ToolCall]]:
    """Return the text of a reply, and the calls that the client answers."""
    found = contents(Role.ASSISTANT, (None, list(blocks)))
    return "".join(found.spoken), found.calls


# -- another content -------------------------------------------------------------------------------


def content(entry: Entry, result: bool) -> tuple[Raw | None, Callable[[Raw], bytes]]:
    message, blocks = parts_of(entry)
    if message is not None:
        return message.get("content"), lambda content: rawjson.encode(
            message | {"content": content}
        )
    found = list(map(rawjson.members, blocks))
    place = next(
        (place for place, block in enumerate(found) if result and _type(block) == RESULT), None
    )
    if place is None:
        return Raw(rawjson.array(blocks)), lambda content: bytes(content)[1:-1]

    def put(content: Raw) -> bytes:
        return b",".join(
            [
                *blocks[:place],
                rawjson.encode(found[place] | {"content": content}),
                *blocks[place + 1 :],
            ]
        )

    return found[place].get("content"), put


def result(id: str, text: str, part: str = "") -> bytes:
    """Return the result of a call, with an image or a file behind its text."""
    content = (
        [{"type": "text", "text": text}, Raw(part.encode("utf-8", "replace"))] if part else text
    )
    return rawjson.encode({"type": RESULT, "tool_use_id": id, "content": content})


# -- several entries -------------------------------------------------------------------------------


def said_by_user(entry: Entry) -> list[Raw] | None:
    """Return the blocks of what the user said; None for anything else, also for results, which wait
    for the others of their message."""
    if is_text(entry):
        return None
    message, found = parts_of(entry)
    if message is None:
        return None if any(_type(rawjson.members(raw)) == RESULT for raw in found) else found
    return (
        blocks_in(entry)
        if text_of(message.get("role")) == "user" and message.keys() <= FRAME
        else None
    )
