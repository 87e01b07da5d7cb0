"""An entry of the Responses API: what is in it, and how it is rewritten without changing any other
byte."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

from msgspec import Raw

from proxy import rawjson
from proxy.dialects import entries, refusals
from proxy.dialects.entries import Contents, Entry, Harmless, opaque
from proxy.dialects.refusals import RawHeaders
from proxy.dialects.responses.request import (
    ANSWERED,
    APPROVAL,
    APPROVED,
    CLIENT,
    COMPACTIONS,
    FOUND,
    ITEMS,
    OUTPUTS,
    PARTS,
    SEARCH,
    ItemKind,
    given,
    items_of,
    joined,
    kind,
    members_of,
)
from proxy.plan.plan import Role, ToolCall
from proxy.plan.turn import Addition, Complaint
from proxy.rawjson import NULL, Members, NotJson, elements_of, object_of, string, text_of

SHELL = "shell_call_output"
SCREEN = "computer_call_output"
UNSAID = frozenset((FOUND, APPROVED))
"""Results without a text that could move."""

IMAGE = "image_generation_call"
"""A call of upstream's own tool, with a whole image in it."""

MEDIA = frozenset(("input_image", "input_file"))
"""The images and files that the client's results can hold."""
SCREENSHOT = "computer_screenshot"

_ARGUMENTS = {"function_call": "arguments", "custom_tool_call": "input"}
_ROLES = {
    "user": Role.USER,
    "system": Role.SYSTEM,
    "developer": Role.SYSTEM,
    "assistant": Role.ASSISTANT,
}
_ANSWERS = ("call_id", "approval_request_id", "id")
"""Members of a result with the call's id."""
MARKED = frozenset(("message", "function_call_output", "custom_tool_call_output"))
"""Items whose content can be a list of parts that carry a cache breakpoint."""
_SERVED = frozenset(("id", "status", "type", "call_id"))
"""Members that do not belong to what a call asks for."""
_REFERENCE = "item_reference"
"""An item that upstream has stored. Its id is all that it says."""

_STREAMS = ("stdout", "stderr")

Items = Sequence[tuple[ItemKind, Raw]]


# -- what is in an entry ---------------------------------------------------------------------------


def opened(entry: Entry) -> tuple[Role, Items]:
    items = [(kind(raw), raw) for raw in items_of(entry)]
    first, _ = items[0]
    if len(items) != 1 or first.replies:
        return Role.ASSISTANT, items
    return Role.TOOL if first.answers else _ROLES.get(first.role, Role.SEALED), items


def contents(role: Role, items: Items) -> Contents:
    found = Contents(role)
    alone = len(items) == 1
    for what, raw in items:
        members = members_of(raw)
        type = what.type
        if type in COMPACTIONS:  # it stays where it is, since nobody else can summarise it
            found.role = Role.SEALED
            found.opaque = opaque([members.get("encrypted_content", NULL)])
            found.others.append(bytes(members.get("encrypted_content", b"")))
            found.other(members)
        elif role is Role.TOOL:
            _add_result(found, type, members)
        elif type == "message" and role is not Role.SEALED:
            _add_content(found, members.get("content"), alone=alone)
            if found.empty:
                found.other(members)
        elif role is not Role.ASSISTANT:
            raise NotJson(f"unknown item {type[:40]!r} of {what.role[:40]!r}")
        elif type == "reasoning":
            texts = [
                text for field in ("summary", "content") for text in _texts_in(members.get(field))
            ]
            found.thought("\n".join(texts))
            found.opaque += opaque([members.get("encrypted_content", NULL)])
        else:
            _add_call(found, type, members, alone=alone)
    return found


def _add_result(found: Contents, type: str, members: Members) -> None:
    found.answers = next((id for key in _ANSWERS if (id := text_of(members.get(key)))), "")
    found.failed = text_of(members.get("status")) == "failed"  # a patch
    output = members.get(_content_of(type))
    if type == SCREEN or type in UNSAID:
        found.other({key: raw for key, raw in members.items() if key != "output"})
    if type in UNSAID:
        found.others.append(
            rawjson.encode({key: members[key] for key in sorted(members) if key not in _SERVED})
        )
        found.counted.append(found.others[-1].decode("utf-8", "replace"))
    if type != SHELL:
        _add_content(found, output, moves=type != SCREEN)
        return
    for number, part in enumerate(map(rawjson.members, listed(output))):
        for place, stream in enumerate(_STREAMS, len(_STREAMS) * number):
            if rawjson.is_string(part.get(stream)):
                found.text(place, rawjson.text(part[stream]))
        ended = object_of(part.get("outcome"))
        timeout = text_of(ended.get("type")) == "timeout"
        if timeout or bytes(ended.get("exit_code", b"0")) not in (b"0", b"null"):
            found.failed = True
            found.other(ended)


def _add_content(
    found: Contents, content: Raw | None, *, alone: bool = True, moves: bool = True
) -> None:
    """Add a text or parts. In a reply of several items, texts have no places, and images and files
    are counted on."""
    client = found.role is not Role.ASSISTANT
    if rawjson.is_string(content):
        found.text(None, rawjson.text(content), moves=alone)
        return
    for place, part in enumerate(map(rawjson.members, listed(content))):
        text = part.get("text")
        media = medium(part)
        if rawjson.is_string(text) and rawjson.is_array(content):
            found.text(place, rawjson.text(text), moves=alone)
            found.sources(part)
            continue
        if client:
            found.others.append(entries.unmarked(part))
        if media is not None:
            found.medium(place if alone else len(found.media), media, moves=moves)
        else:
            found.files += found.others[-1:] if client else []
            found.other(part)


def _add_call(found: Contents, type: str, members: Members, *, alone: bool) -> None:
    """Add a call. What upstream's own tools made of images is no part of its arguments for
    readers."""
    outputs = listed(members.get("outputs"))
    made = list[tuple[int, bytes]]()
    if type == IMAGE and (bytes64 := text_of(members.get("result"))):
        made.append(
            (
                0,
                _image(
                    f"data:image/{text_of(members.get('output_format')) or 'png'};base64,{bytes64}"
                ),
            )
        )
    parts = map(object_of, outputs)
    urls = [
        text_of(part.get("url")) if text_of(part.get("type")) == "image" else "" for part in parts
    ]
    made += [(place, _image(url)) for place, url in enumerate(urls) if url]
    kept = [part for part, url in zip(outputs, urls, strict=True) if not url]
    others = {"outputs": Raw(rawjson.array(kept))} if "outputs" in members else {}
    shown = call_of(
        {key: raw for key, raw in members.items() if key != "result"} | others, type
    ).arguments
    found.call(call_of(members, type), answered=is_answered(type, members), shown=shown)
    for place, part in made:
        found.medium(place if alone else len(found.media), part, moves=False)


def medium(part: Members) -> bytes | None:
    """Return a part as an image or a file that a result may hold."""
    kind = text_of(part.get("type"))
    if kind == SCREENSHOT:
        return entries.unmarked(part | {"type": string("input_image")})
    return entries.unmarked(part) if kind in MEDIA else None


def _image(url: str) -> bytes:
    return rawjson.encode({"image_url": url, "type": "input_image"})


def _texts_in(content: Raw | None) -> list[str]:
    if rawjson.is_string(content):
        return [rawjson.text(content)]
    texts = [part.get("text") for part in map(rawjson.members, listed(content))]
    return [rawjson.text(text) for text in texts if rawjson.is_string(text)]


def unknown(found: Contents, items: Items, harmless: Harmless) -> str:
    if found.role is Role.SEALED:
        return ""
    return next(
        filter(None, (_unknown(members_of(raw), kind, harmless) for kind, raw in items)), ""
    )


def _unknown(members: Members, kind: ItemKind, harmless: Harmless) -> str:
    at = "input[]"
    fields = ("content", "output", "outputs", "summary")
    parts = ((listed(members.get(field)), f"{at}.{field}[]") for field in fields)
    within = (entries.unknown_in(raws, PARTS, path, harmless) for raws, path in parts)
    return entries.unknown(members, ITEMS, kind.type, at, harmless) or next(
        filter(None, within), ""
    )


def listed(content: Raw | None) -> list[Raw]:
    """Return the parts of an item's content: of a screenshot, itself, and of a text, none."""
    if content is None or rawjson.is_null(content) or rawjson.is_string(content):
        return []
    return rawjson.elements(content) if rawjson.is_array(content) else [content]


def _content_of(type: str) -> str:
    """Return the name of the member with an item's texts."""
    return "output" if type in OUTPUTS else "content"


# -- calls and results -----------------------------------------------------------------------------


def is_answered(type: str, members: Members) -> bool:
    """Whether the client answers this item of a reply."""
    return type in ANSWERED or (type == SEARCH and text_of(members.get("execution")) == CLIENT)


def call_of(members: Members, type: str) -> ToolCall:
    """Return a call of whatever tool. One of upstream's own tools has no id: clients do not always
    send it back."""
    id = (
        (text_of(members.get("call_id")) or text_of(members.get("id")))
        if is_answered(type, members)
        else ""
    )
    if type in _ARGUMENTS:
        arguments = members.get(_ARGUMENTS[type], NULL)
        return ToolCall(id, text_of(members.get("name")), arguments_of(arguments))
    asked = {
        key: members[key]
        for key in sorted(members)
        if key not in _SERVED or (type, key) == (_REFERENCE, "id")
    }
    return ToolCall(id, type, rawjson.encode(asked).decode())


def arguments_of(given: Raw) -> str:
    """Return a call's arguments. Some gateways send an object in the place of its text."""
    if rawjson.is_null(given):
        return ""
    return (
        rawjson.text(given) if rawjson.is_string(given) else bytes(given).decode("utf-8", "replace")
    )


def spoken(items: Sequence[Entry]) -> tuple[str, list[ToolCall]]:
    """Return the text and the calls of a reply. Raises NotJson."""
    found = contents(Role.ASSISTANT, [(kind(raw), Raw(raw)) for raw in items])
    return "".join(found.spoken), found.calls


def calling(calls: Sequence[ToolCall]) -> Entry:
    """Return a reply with these calls of functions."""
    made = [
        {
            "type": "function_call",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
        }
        for call in calls
    ]
    return b",".join(map(rawjson.encode, made))


def output(call_id: str, text: str, part: str, more: Members) -> bytes:
    """Return the result of a function's call, with these members as well."""
    said = (
        [{"type": "input_text", "text": text}, Raw(part.encode("utf-8", "replace"))]
        if part
        else text
    )
    return rawjson.encode(
        {"type": "function_call_output", "call_id": call_id, "output": said, **more}
    )


def lasts(item: Raw) -> bool:
    """Whether an item of a reply that upstream has not stored means something later: reasoning must
    be in the item."""
    members = members_of(item)
    reasons = text_of(members.get("type")) == "reasoning"
    return not reasons or bool(
        text_of(members.get("encrypted_content")) or elements_of(members.get("content"))
    )


LOST = "without its required following item"
"""Words of a refusal of reasoning behind which a call is missing."""


def complaint(status: int, body: bytes) -> Complaint:
    """A call of ours is missing behind reasoning that the client has seen if the record of its
    round is lost."""
    found = refusals.complaint(status, body)
    lost = isinstance(found, Addition) and LOST in refusals.error_text(body).quoted
    return Addition.THINKING if lost else found


def forgiving(body: bytes, headers: RawHeaders) -> tuple[bytes, RawHeaders]:
    """Return the request without reasoning. The items of replies have no ids, by which upstream
    would miss it."""
    members = rawjson.members(Raw(body))
    sent = [(kind(raw), raw) for raw in given(members)]
    kept: list[bytes] = []
    for what, raw in sent:
        if what.type == "reasoning":
            continue
        named = what.replies and what.type != _REFERENCE
        kept.append(rawjson.encode(without_id(rawjson.members(raw))) if named else bytes(raw))
    if len(kept) == len(sent):
        return body, headers
    return rawjson.encode(members | {"input": joined(kept)}), headers


def thinking_before(calls: Container[str], entries: Sequence[Entry]) -> set[str]:
    """Return what identifies the reasoning that stands directly before one of these calls."""
    found = set[str]()
    waiting = set[str]()
    for raw in (raw for entry in entries for raw in items_of(entry)):
        members = members_of(raw)
        if thought := _thought(members):
            waiting.add(thought)
            continue
        if text_of(members.get("call_id")) in calls:
            found |= waiting
        waiting = set()
    return found


def without_thinking(entry: Entry, thoughts: Container[str]) -> list[Raw]:
    """Return an entry's items without this reasoning."""
    return [raw for raw in items_of(entry) if _thought(members_of(raw)) not in thoughts]


def _thought(members: Members) -> str:
    """Return what identifies an item of reasoning; empty for any other item."""
    if text_of(members.get("type")) != "reasoning":
        return ""
    return text_of(members.get("encrypted_content")) or text_of(members.get("id"))


def without_id(members: Members) -> Members:
    """Return an item of a reply without its id, which upstream does not know. Only an answer may
    name it, and open models' servers want one for reasoning that is in its content."""
    type = text_of(members.get("type"))
    kept = type == APPROVAL or (type == "reasoning" and elements_of(members.get("content")))
    return members if kept else {key: raw for key, raw in members.items() if key != "id"}


# -- another content -------------------------------------------------------------------------------


def content(entry: Entry, result: bool) -> tuple[Raw | None, Callable[[Raw], bytes]]:
    """Of a shell's result, the content that can be replaced has what each command wrote as parts of
    its own."""
    items = items_of(entry)
    type = kind(items[0]).type
    members = members_of(items[0])
    field = _content_of(type)
    given = members.get(field)

    def put(content: Raw) -> bytes:
        return rawjson.encode(members | {field: content})

    def put_streams(content: Raw) -> bytes:
        texts = iter([rawjson.members(raw).get("text", NULL) for raw in rawjson.elements(content)])
        made = [
            part | {key: text for key, text in zip(_STREAMS, texts, strict=False) if key in part}
            for part in parts
        ]
        return put(Raw(rawjson.array(map(rawjson.encode, made))))

    if result and type == SHELL and rawjson.is_array(given):
        parts = list(map(rawjson.members, rawjson.elements(given)))
        streams = [{"text": part.get(key, NULL)} for part in parts for key in _STREAMS]
        return Raw(rawjson.encode(streams)), put_streams
    return (given if result or (len(items) == 1 and type in MARKED) else None), put
