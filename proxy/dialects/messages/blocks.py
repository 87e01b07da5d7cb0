"""Reads entries for the plan, and rewrites the texts of results without changing any other byte."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from proxy import rawjson
from proxy.dialects import attachments, entries
from proxy.dialects.entries import Mark, Places, item, known, numbered, sealed, texts_in, with_texts_in
from proxy.dialects.messages.request import BLOCKS, FRAME, IN_RESULTS, RESULT, is_reminder, parts_of
from proxy.plan.message import Count, Message, Reading, ToolCall
from proxy.plan.plan import Role
from proxy.plan.turn import Unplannable
from proxy.rawjson import NULL, Members, NotJson, object_of, text_of

THINKING = ("thinking", "redacted_thinking")
MEDIA = frozenset(("image", "document"))
"""Blocks with a file's bytes or a reference to them, which results may hold."""
FETCHED, UPLOAD = "web_fetch_tool_result", "container_upload"

CARRIERS = ("text", RESULT, *MEDIA, UPLOAD)
"""The blocks of a client that can carry a cache breakpoint."""

DIRECT = Raw(b'{"type":"direct"}')
"""The `caller` of a call that a program of upstream's did not make."""

OPAQUE_BYTES = 6
"""Bytes of a block for each token of it, where we cannot read it: encrypted text in base64, and a frame."""

_ROLES = {"user": Role.USER, "assistant": Role.ASSISTANT, "system": Role.SYSTEM}

NAME = "messages"


# -- one entry --------------------------------------------------------------------------------------------------------


def read(entry: bytes | Raw, reading: Reading, count: Count) -> Message:
    try:
        message, blocks = parts_of(entry)
    except (NotJson, msgspec.MsgspecError) as error:
        raise Unplannable(str(error)) from error
    role = Role.USER if message is None else _ROLES.get(text_of(message.get("role")))
    try:
        content = list(map(rawjson.members, blocks) if message is None else _content(message.get("content")))
        if role is None or (message is not None and role is not Role.ASSISTANT and _result(content) is not None):
            return entries.unreadable(NAME, entry, Role.TOOL, count)
        if role is Role.ASSISTANT:
            measured, fits = _reply(content, entry, count), message is not None and _whole(content, message)
        else:
            one = message is not None and rawjson.is_string(message.get("content"))
            measured, fits = _client(role, content, entry, reading, count, one=one), True
        if not fits or not all(map(_known, content)):
            return sealed(measured)
        if message is None or message.keys() <= FRAME:
            return measured
        return _alone(measured) if role is Role.SYSTEM else sealed(measured)
    except (NotJson, msgspec.MsgspecError):
        return entries.unreadable(NAME, entry, role or Role.TOOL, count)


def texts(entry: bytes | Raw) -> Places:
    """The texts are those of an entry's result, or of its message."""
    message, _ = parts_of(entry)
    found = blocks_of(entry)
    media = [(place, part.decode("utf-8", "replace")) for place, part in media_in(found)]
    result = _result(found)
    if message is not None:
        return [*texts_in(message.get("content"), "text"), *media]
    return [*(texts_in(result.get("content"), "text") if result is not None else numbered(found, "text")), *media]


def media_in(blocks: Sequence[Members]) -> list[tuple[int, bytes]]:
    """Return the images and files of an entry with these blocks, with their places: those of its result come first."""
    result = _result(blocks)
    content = [] if result is None else list(_content(result.get("content")))
    found = ((place, medium(block)) for place, block in enumerate((*content, *blocks)))
    return [(place, part) for place, part in found if part is not None]


def medium(block: Members) -> bytes | None:
    """Return a block as an image or a file that a result may hold, or the one in it; None if there is none."""
    kind = text_of(block.get("type"))
    if kind == FETCHED:
        return medium(object_of(object_of(block.get("content")).get("content")))
    if kind not in MEDIA or text_of(object_of(block.get("source")).get("type")) == "text":
        return None
    return entries.unmarked({key: raw for key, raw in block.items() if key != "citations"})


def with_texts(entry: bytes | Raw, replaced: Mapping[int | None, str]) -> bytes:
    if not replaced:
        return bytes(entry)
    message, blocks = parts_of(entry)
    if message is not None:
        return rawjson.encode(message | {"content": with_texts_in(message["content"], replaced)})
    found = list(map(rawjson.members, blocks))
    result = _result(found)
    if result is None:
        made: Sequence[bytes | Raw] = rawjson.elements(with_texts_in(Raw(rawjson.array(blocks)), replaced))
    else:
        changed = Raw(rawjson.encode(result | {"content": with_texts_in(result["content"], replaced)}))
        made = [changed if members is result else raw for raw, members in zip(blocks, found, strict=True)]
    return b",".join(made)


def text_message(role: str, text: str) -> bytes:
    return rawjson.encode({"role": role, "content": text})


def result(id: str, text: str, part: str = "") -> bytes:
    """Return the result of a call, with an image or a file behind its text."""
    content = [{"type": "text", "text": text}, Raw(part.encode("utf-8", "replace"))] if part else text
    return rawjson.encode({"type": RESULT, "tool_use_id": id, "content": content})


def call_of(block: Members) -> ToolCall:
    given = block.get("input")
    arguments = "{}" if given is None or rawjson.is_null(given) else bytes(given).decode("utf-8", "replace")
    return ToolCall(text_of(block.get("id")), text_of(block.get("name")), arguments)


def blocks_of(entry: bytes | Raw) -> list[Members]:
    """Return the blocks of an entry of any kind. Raises NotJson."""
    message, blocks = parts_of(entry)
    return list(map(rawjson.members, blocks) if message is None else _content(message.get("content")))


def marked(entry: bytes | Raw, mark: Mark) -> bytes | Raw:
    message, blocks = parts_of(entry)
    if message is None:
        made = entries.marked_blocks(list(blocks), mark, CARRIERS)
        return entry if made is None else b",".join(map(bytes, made))
    content = entries.marked_content(message.get("content"), mark, CARRIERS)
    return entry if content is None else rawjson.encode(message | {"content": content})


def spoken(blocks: Iterable[Members]) -> tuple[str, list[ToolCall]]:
    """Return the text of a reply, and the calls that the client answers."""
    words: list[str] = []
    calls: list[ToolCall] = []
    for block in blocks:
        kind = text_of(block.get("type"))
        if kind == "text":
            words.append(text_of(block.get("text")))
        elif kind == "tool_use":
            calls.append(call_of(block))
    return "".join(words), calls


def said(entry: bytes | Raw) -> tuple[str, list[ToolCall]]:
    return spoken(blocks_of(entry))


def answered(entry: bytes | Raw) -> str:
    message, blocks = parts_of(entry)
    block = rawjson.members(blocks[0]) if message is None and len(blocks) == 1 else {}
    return text_of(block.get("tool_use_id")) if text_of(block.get("type")) == RESULT else ""


def _content(content: Raw | None) -> Iterator[Members]:
    """Yield a message's blocks; a string stands for one. Raises NotJson for anything else."""
    if content is None or rawjson.is_null(content):
        return
    if rawjson.is_string(content):
        yield {"type": Raw(b'"text"'), "text": content}
    else:
        yield from map(rawjson.members, rawjson.elements(content))


def _result(blocks: Iterable[Members]) -> Members | None:
    return next((block for block in blocks if text_of(block.get("type")) == RESULT), None)


# -- measures ---------------------------------------------------------------------------------------------------------


def _client(
    role: Role, blocks: list[Members], entry: bytes | Raw, reading: Reading, count: Count, *, one: bool
) -> Message:
    """Measure what a client sends: a result, or what the user says. `one`: it is one text, and no list of blocks.

    Reminders have tokens and no meaning, because many a client sends each of them only once.
    """
    answer = _result(blocks)
    if answer is None:
        answers, reminders, others, failed, movable = "", 0, blocks, False, len(blocks)
        texts: Places = [(None if one else place, text) for place, text in numbered(blocks, "text")]
        meant = [text for _, text in texts if not is_reminder(text)]
    else:
        role, answers, texts = Role.TOOL, text_of(answer.get("tool_use_id")), texts_in(answer.get("content"), "text")
        around = [block for block in blocks if block is not answer]
        reminders = sum(count(text) for _, text in numbered(around, "text"))
        content = list(_content(answer.get("content")))
        others, movable = [*content, *around], len(content)
        meant = [text for _, text in texts]
        failed = bytes(answer.get("is_error", b"")) == b"true"
    others = [block for block in others if text_of(block.get("type")) != "text"]
    return entries.of_client(
        NAME,
        role,
        entry,
        texts,
        list(map(entries.unmarked, others)),
        reading,
        count,
        answers=answers,
        meant=meant,
        fixed=sum(map(_file_tokens, others)),
        more=reminders + sum(_tokens(block, count) for block in others),
        failed=failed,
        media=media_in(blocks),
        movable=movable,
    )


def _known(block: Members) -> bool:
    """Whether we know everything in a block, so that it may be moved or cut. Raises NotJson."""
    kind = text_of(block.get("type"))
    if not known(block, BLOCKS, kind) or object_of(block.get("caller")) not in ({}, object_of(DIRECT)) or _cited(block):
        return False
    parts = block.get("content") if kind == RESULT else None
    return not rawjson.is_array(parts) or all(
        known(part, BLOCKS, kind) and kind in IN_RESULTS and not _cited(part)
        for part in map(rawjson.members, rawjson.elements(parts))
        for kind in (text_of(part.get("type")),)
    )


def _cited(block: Members) -> bool:
    """Whether replies cite this source by its number among all of the request, which must not change."""
    return bytes(object_of(block.get("citations")).get("enabled", NULL)) == b"true"


def _whole(blocks: Sequence[Members], message: Members) -> bool:
    """Whether nothing outside of a reply hangs on it but the client's results: no call of upstream's own tools goes on
    in the next reply."""
    called = {
        text_of(one.get("id")) for one in blocks if text_of(one.get("type")) in ("server_tool_use", "mcp_tool_use")
    }
    answered = {text_of(one.get("tool_use_id")) for one in blocks if "tool_use_id" in one}
    return called == answered and message.keys() <= FRAME


def _alone(message: Message) -> Message:
    """Return a system message as one that stays where it is. It says more than text: how upstream thinks from here on,
    for example. Claude Code describes its environment in one."""
    return replace(message, role=Role.SEALED, item=item(Role.SEALED, message.tokens, 0, ()), pieces=())


def _reply(blocks: Sequence[Members], entry: bytes | Raw, count: Count) -> Message:
    fixed = sum(map(_file_tokens, blocks))
    text, calls = spoken(blocks)
    tokens = sum(_tokens(block, count) for block in blocks) + fixed
    return entries.of_model(NAME, entry, text, calls, calls, tokens, fixed, count, media=media_in(blocks))


def _tokens(block: Members, count: Count) -> int:
    """Count the tokens of a block that is no file."""
    kind = text_of(block.get("type"))
    if kind == "text":
        return count(text_of(block.get("text")))
    if kind == "thinking":
        return count(text_of(block.get("thinking")))
    if kind in ("tool_use", "server_tool_use", "mcp_tool_use"):
        return entries.call_tokens(call_of(block), count)
    if kind == UPLOAD or medium(block) is not None:
        return 0
    return sum(len(memoryview(raw)) for raw in block.values()) // OPAQUE_BYTES


def _file_tokens(block: Members) -> int:
    """Return the tokens of an image or a file; 0 for anything else, such as a document that is text."""
    part = rawjson.encode(block) if text_of(block.get("type")) == UPLOAD else medium(block)
    return attachments.tokens(part) if part else 0
