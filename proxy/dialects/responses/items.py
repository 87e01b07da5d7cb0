"""Reads entries for the plan, and rewrites the texts of results without changing any other byte."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec
from msgspec import Raw

from proxy import rawjson
from proxy.dialects import attachments, entries
from proxy.dialects.entries import MESSAGE_TOKENS, Mark, Places, known, text_part, texts_in
from proxy.dialects.responses.request import (
    CLIENT,
    COMPACTIONS,
    FOUND,
    ITEMS,
    OUTPUTS,
    PARTS,
    SEARCH,
    ItemKind,
    items_of,
    kind,
    members_of,
)
from proxy.plan.message import Count, Message, Reading, ToolCall
from proxy.plan.plan import Role
from proxy.plan.turn import Unplannable
from proxy.rawjson import Members, NotJson, object_of, string, text_of

APPROVAL = "mcp_approval_request"
"""A question whether upstream may call a tool. It has no `call_id`, and the answer names its id."""

ANSWERED = frozenset(
    (
        "function_call",
        "custom_tool_call",
        "local_shell_call",
        "shell_call",
        "apply_patch_call",
        "computer_call",
        APPROVAL,
    )
)
"""Calls that the client answers. All others are upstream's own business."""

DIRECT = Raw(b'{"type":"direct"}')
"""The `caller` of a call that no program of upstream's made."""

SHELL = "shell_call_output"

IMAGE = "image_generation_call"
"""A call of upstream's own tool, with a whole image in it."""
INTERPRETER = "code_interpreter_call"
"""A call of upstream's own tool, which may have made images."""

MEDIA = frozenset(("input_image", "input_file"))
"""The images and files that the client's results can hold."""
SCREENSHOT = "computer_screenshot"

ENCRYPTED_BYTES = 6
"""Base64 of encrypted reasoning for each token of it: four characters of text, a third more for base64, and a frame."""

_ARGUMENTS = {"function_call": "arguments", "custom_tool_call": "input"}
_ROLES = {"user": Role.USER, "system": Role.SYSTEM, "developer": Role.SYSTEM, "assistant": Role.ASSISTANT}
_ANSWERS = ("call_id", "approval_request_id", "id")
"""Members of a result with the call's id."""
MARKED = frozenset(("message", "function_call_output", "custom_tool_call_output"))
"""Items whose content can be a list of parts that carry a cache breakpoint."""
CARRIERS = ("input_text", "input_image", "input_file")
_UNSAID = frozenset((FOUND, "mcp_approval_response"))
"""Results without a text that could move."""
_SERVED = frozenset(("id", "status", "type", "call_id"))
"""Members that do not belong to what a call asks for."""
_REFERENCE = "item_reference"
"""An item that upstream has stored. Its id is all that it says."""

NAME = "responses"


# -- one entry --------------------------------------------------------------------------------------------------------


def read(entry: bytes | Raw, reading: Reading, count: Count) -> Message:
    try:
        items = items_of(entry)
        kinds = [kind(raw) for raw in items]
    except (NotJson, msgspec.MsgspecError) as error:
        raise Unplannable(str(error)) from error
    first = kinds[0]
    try:
        reply = len(items) != 1 or first.replies
        message = _reply(items, entry, count) if reply else _item(entry, items[0], first, reading, count)
        stays = message.role is Role.SEALED or all(map(is_known, map(members_of, items), kinds))
        return message if stays else entries.sealed(message)
    except (NotJson, msgspec.MsgspecError):
        role = Role.TOOL if first.answers else _ROLES.get(first.role, Role.SEALED)
        return entries.unreadable(NAME, entry, Role.ASSISTANT if first.replies else role, count)


def is_known(members: Members, kind: ItemKind) -> bool:
    """Whether we know everything in an item, so that it may be moved or cut. Raises NotJson."""
    if not known(members, ITEMS, kind.type) or object_of(members.get("caller")) not in ({}, object_of(DIRECT)):
        return False
    return all(
        known(part, PARTS, text_of(part.get("type")))
        for field in ("content", "output", "summary")
        for part in map(rawjson.members, listed(members.get(field)))
    )


def listed(content: Raw | None) -> list[Raw]:
    """Return the parts of an item's content: of a screenshot, itself, and of a text, none."""
    if content is None or rawjson.is_null(content) or rawjson.is_string(content):
        return []
    return rawjson.elements(content) if rawjson.is_array(content) else [content]


def texts(entry: bytes | Raw) -> Places:
    """Of a reply, there are only images and files."""
    items = items_of(entry)
    said = texts_of(members_of(items[0])) if len(items) == 1 else []
    return [*said, *((place, part.decode("utf-8", "replace")) for place, part in media_in(items))]


def media_in(items: Sequence[Raw]) -> list[tuple[int, bytes]]:
    """Return the images and files of an entry with these items, in the form of a result's parts, with their places."""
    if len(items) == 1:
        return list(media_of(members_of(items[0])))
    return list(enumerate(part for raw in items for _, part in media_of(members_of(raw))))


def media_of(members: Members) -> Iterator[tuple[int, bytes]]:
    """Yield the images and files of one item."""
    type = text_of(members.get("type"))
    if type == IMAGE and (made := text_of(members.get("result"))):
        yield 0, _image(f"data:image/{text_of(members.get('output_format')) or 'png'};base64,{made}")
    content = members.get("outputs" if type == INTERPRETER else _content_of(members))
    for place, part in enumerate(map(object_of, listed(content))):
        kind = text_of(part.get("type"))
        if kind in MEDIA:
            yield place, entries.unmarked(part)
        elif kind == SCREENSHOT:
            yield place, entries.unmarked(part | {"type": string("input_image")})
        elif kind == "image" and (url := text_of(part.get("url"))):
            yield place, _image(url)


def _image(url: str) -> bytes:
    return rawjson.encode({"image_url": url, "type": "input_image"})


def with_texts(entry: bytes | Raw, replaced: Mapping[int | None, str]) -> bytes:
    if not replaced:
        return bytes(entry)
    members = members_of(Raw(entry))
    content = "output" if text_of(members.get("type")) in OUTPUTS else "content"
    if None in replaced:
        return rawjson.encode(members | {content: Raw(rawjson.encode(replaced[None]))})
    parts = [rawjson.members(part) for part in rawjson.elements(members[content])]
    for place, text in ((place, text) for place, text in replaced.items() if place is not None):
        number, field = _part(members, place)
        media = text_of(parts[number].get("type")) in MEDIA
        parts[number] = text_part(parts[number], "input_text", text) if media else parts[number] | {field: string(text)}
    return rawjson.encode(members | {content: Raw(rawjson.array(map(rawjson.encode, parts)))})


def text_message(role: str, text: str) -> bytes:
    return rawjson.encode({"role": role, "content": text})


def output(call_id: str, text: str, part: str, more: Members) -> bytes:
    """Return the result of a function's call, with these members as well."""
    said = [{"type": "input_text", "text": text}, Raw(part.encode("utf-8", "replace"))] if part else text
    return rawjson.encode({"type": "function_call_output", "call_id": call_id, "output": said, **more})


def is_answered(type: str, members: Members) -> bool:
    """Whether the client answers this item of a reply."""
    return type in ANSWERED or (type == SEARCH and text_of(members.get("execution")) == CLIENT)


def without_id(members: Members) -> Members:
    """Return an item of a reply without its id, which upstream does not know. Only an answer may name it."""
    kept = text_of(members.get("type")) == APPROVAL
    return members if kept else {key: raw for key, raw in members.items() if key != "id"}


def call_of(members: Members, type: str) -> ToolCall:
    """Return a call of whatever tool. One of upstream's own tools has no id: clients do not always send it back."""
    id = (text_of(members.get("call_id")) or text_of(members.get("id"))) if is_answered(type, members) else ""
    if type in _ARGUMENTS:
        return ToolCall(id, text_of(members.get("name")), _argument(members.get(_ARGUMENTS[type])))
    asked = {key: members[key] for key in sorted(members) if key not in _SERVED or (type, key) == (_REFERENCE, "id")}
    return ToolCall(id, type, rawjson.encode(asked).decode())


def spoken(items: Sequence[bytes | Raw]) -> tuple[str, list[ToolCall]]:
    """Return the text and the calls of a reply. Raises NotJson."""
    words: list[str] = []
    calls: list[ToolCall] = []
    for raw in items:
        type, members = kind(raw).type, rawjson.members(raw)
        if type == "message":
            words += [text for _, text in texts_of(members)]
        elif type != "reasoning":
            calls.append(call_of(members, type))
    return "".join(words), calls


def said(entry: bytes | Raw) -> tuple[str, list[ToolCall]]:
    return spoken(items_of(entry))


def answered(entry: bytes | Raw) -> str:
    items = items_of(entry)
    ours = len(items) == 1 and kind(items[0]).type == "function_call_output"
    return text_of(rawjson.members(items[0]).get("call_id")) if ours else ""


def reasoning(members: Members) -> str:
    """Return the readable text of a reasoning item: its summary and, from some servers, its content."""
    return "\n".join(text for field in ("summary", "content") for _, text in texts_in(members.get(field)))


def without_media(members: Members) -> Members:
    """Return a call of upstream's own tool without the images that it made."""
    kept = [part for part in listed(members.get("outputs")) if text_of(object_of(part).get("type")) != "image"]
    made = {"outputs": Raw(rawjson.array(kept))} if "outputs" in members else {}
    return {key: raw for key, raw in members.items() if key != "result"} | made


def _argument(raw: Raw | None) -> str:
    return "" if raw is None or rawjson.is_null(raw) else rawjson.text(raw)


def texts_of(members: Members) -> Places:
    type = text_of(members.get("type")) or "message"
    content = members.get("output" if type in OUTPUTS else "content")
    if type == SHELL and rawjson.is_array(content):
        return list(_shell_texts(content))
    return texts_in(content) if rawjson.is_string(content) or rawjson.is_array(content) else []  # or a screenshot


_STREAMS = ("stdout", "stderr")


def _shell_texts(content: Raw) -> Iterator[tuple[int | None, str]]:
    """Yield what each command wrote. Two texts of one part have two places."""
    for number, part in enumerate(map(rawjson.members, rawjson.elements(content))):
        for place, field in enumerate(_STREAMS, len(_STREAMS) * number):
            if rawjson.is_string(part.get(field)):
                yield place, rawjson.text(part[field])


def _part(members: Members, place: int) -> tuple[int, str]:
    """Return the number of the part that has this place, and the name of its text."""
    if text_of(members.get("type")) == SHELL:
        return place // len(_STREAMS), _STREAMS[place % len(_STREAMS)]
    return place, "text"


def _others(members: Members, content: Raw | None) -> list[bytes]:
    """Return images and files as canonical JSON."""
    if text_of(members.get("type")) == SHELL:
        return []
    others = [part for part in map(rawjson.members, listed(content)) if not rawjson.is_string(part.get("text"))]
    return list(map(entries.unmarked, others))


def _content_of(members: Members) -> str:
    """Return the name of the member with an item's texts."""
    return "output" if (text_of(members.get("type")) or "message") in OUTPUTS else "content"


def marked(entry: bytes | Raw, mark: Mark) -> bytes | Raw:
    one = items_of(entry)
    if len(one) != 1 or (kind(one[0]).type or "message") not in MARKED:
        return entry
    item = rawjson.members(one[0])
    content = entries.marked_content(item.get(_content_of(item)), mark, CARRIERS)
    return entry if content is None else rawjson.encode(item | {_content_of(item): content})


# -- measures ---------------------------------------------------------------------------------------------------------


def _item(entry: bytes | Raw, raw: Raw, kind: ItemKind, reading: Reading, count: Count) -> Message:
    """Measure an item of the client's."""
    members = members_of(raw)
    if kind.type in COMPACTIONS:
        return _compaction(members, entry)
    role = Role.TOOL if kind.answers else _ROLES.get(kind.role)
    if role is None or (role is not Role.TOOL and kind.type != "message"):
        raise NotJson(f"unknown item {kind.type[:40]!r} of {kind.role[:40]!r}")
    answers = next((id for key in _ANSWERS if (id := text_of(members.get(key)))), "") if role is Role.TOOL else ""
    texts, others = texts_of(members), _others(members, members.get("output" if role is Role.TOOL else "content"))
    fixed = sum(map(attachments.tokens, others))
    if kind.type in _UNSAID:
        others = [rawjson.encode({key: members[key] for key in sorted(members) if key not in _SERVED})]
        fixed = count(others[0].decode("utf-8", "replace"))
    return entries.of_client(
        NAME,
        role,
        entry,
        texts,
        others,
        reading,
        count,
        answers=answers,
        fixed=fixed,
        failed=role is Role.TOOL and _failed(members),
        media=list(media_of(members)),
        movable=0 if kind.type == "computer_call_output" else len(listed(members.get(_content_of(members)))),
    )


def _failed(members: Members) -> bool:
    """Whether a result says that its call failed: a patch by its status, a shell by a command's exit code."""
    outputs = members.get("output") if text_of(members.get("type")) == SHELL else None
    ended = [object_of(object_of(one).get("outcome")) for one in listed(outputs)]
    codes = [bytes(one.get("exit_code", b"0")) for one in ended]
    return text_of(members.get("status")) == "failed" or any(code not in (b"0", b"null") for code in codes)


def _compaction(members: Members, entry: bytes | Raw) -> Message:
    """Measure upstream's own summary. It stays where it is, since nobody can summarise it."""
    tokens = _encrypted(members) + MESSAGE_TOKENS
    meaning = entries.meaning(NAME, Role.SYSTEM, "", [], "", [bytes(members.get("encrypted_content", b""))])
    return entries.message(Role.SEALED, entry, tokens, meaning)


def _reply(items: Sequence[Raw], entry: bytes | Raw, count: Count) -> Message:
    found = [(kind(raw).type, rawjson.members(raw)) for raw in items]
    fixed = sum(attachments.tokens(part) for _, part in media_in(items))
    tokens = sum(_tokens(type, members, count) for type, members in found) + fixed
    answered = [call_of(members, type) for type, members in found if is_answered(type, members)]
    text, calls = spoken(items)
    return entries.of_model(NAME, entry, text, calls, answered, tokens, fixed, count, media=media_in(items))


def _tokens(type: str, members: Members, count: Count) -> int:
    """Count the tokens of an item of a reply, without images and files."""
    if type == "message":
        return sum(count(text) for _, text in texts_of(members))
    if type == "reasoning":
        return count(reasoning(members)) + _encrypted(members)
    return entries.call_tokens(call_of(without_media(members), type), count)


def _encrypted(members: Members) -> int:
    raw = members.get("encrypted_content")
    return 0 if rawjson.is_null(raw) or raw is None else len(memoryview(raw)) // ENCRYPTED_BYTES
