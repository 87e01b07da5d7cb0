"""What the dialects do alike with entries: adding to a text, and describing one for readers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Raw

from proxy import rawjson
from proxy.dialects import attachments, cache_marks
from proxy.dialects.measuring import Places
from proxy.plan.message import Message, ToolCall
from proxy.plan.plan import Role
from proxy.plan.summary import Section
from proxy.rawjson import Members, string, text_of
from proxy.tools.definitions import NAMES, OTHER_NAMES, Names


def appended(entry: bytes | Raw, text: str, part: str = "text") -> bytes:
    """Return the entry with `text` added at its end, as a part of the type `part` where the content has parts. Its
    other content keeps its bytes."""
    members = rawjson.members(entry)
    content = members.get("content")
    if content is None or rawjson.is_null(content):
        grown = rawjson.encode(text)
    elif rawjson.is_string(content):
        grown = bytes(content)[:-1] + rawjson.encode(text)[1:]
    else:
        grown = rawjson.array([*rawjson.elements(content), rawjson.encode({"type": part, "text": text})])
    return rawjson.encode(members | {"content": Raw(grown)})


def title(index: int, message: Message, tool: str) -> str:
    """Return the title of the entry at `index`; `tool` is the tool whose result it is."""
    named = f"{index + 1} {message.role.name.lower()}"
    return f"{named} {_one_line(message.answers)} {_one_line(tool)}" if message.role is Role.TOOL else named


def call_section(title: str, call: ToolCall, role: Role) -> Section:
    return Section(f"{title} calls {_one_line(call.name)} {_one_line(call.id)}", call.arguments, role)


def media_section(title: str, part: bytes, role: Role) -> Section:
    return Section(title, f"[{attachments.about(part)}]", role, part=part.decode("utf-8", "replace"))


def text_part(part: Members, type: str, text: str) -> Members:
    """Return a part with another text: of this type, if it is an image or a file."""
    marks = {key: part[key] for key in cache_marks.KEYS if key in part}
    known = part if rawjson.is_string(part.get("text")) else {"type": string(type), **marks}
    return known | {"text": string(text)}


def texts_in(content: Raw | None, type: str = "") -> Places:
    """Return a content's texts: one without a place, or each text part with its place; see `numbered`. Raises
    NotJson."""
    if content is None or rawjson.is_null(content):
        return []
    if rawjson.is_string(content):
        return [(None, rawjson.text(content))]
    return numbered(map(rawjson.members, rawjson.elements(content)), type)


def numbered(parts: Iterable[Members], type: str = "") -> Places:
    """Return the texts of these parts with their places, if `type` is given of those of this type."""
    found = [(place, part.get("text")) for place, part in enumerate(parts) if type in ("", text_of(part.get("type")))]
    return [(place, rawjson.text(text)) for place, text in found if rawjson.is_string(text)]


def with_texts_in(content: Raw, replaced: Mapping[int | None, str], type: str = "text") -> Raw:
    """Return a content with these texts. An image or a file becomes a part of this type."""
    if None in replaced:
        return string(replaced[None])
    parts = rawjson.elements(content)
    for place, text in replaced.items():
        if place is not None:
            parts[place] = Raw(rawjson.encode(text_part(rawjson.members(parts[place]), type, text)))
    return Raw(rawjson.array(parts))


def sources(title: str, part: Members, role: Role) -> list[Section]:
    """Return the sources that upstream named for a text, as readers get them: as JSON."""
    named = [raw for key in ("citations", "annotations") if rawjson.is_array(raw := part.get(key))]
    found = [bytes(one).decode("utf-8", "replace") for raw in named for one in rawjson.elements(raw)]
    return [Section(f"{title} sources", "\n".join(found), role)] if found else []


def _one_line(text: str) -> str:
    """Return at most 64 characters on one line, because line breaks in a client's ids and names would end a header."""
    return " ".join(text.split())[:64]


def left_out(call: ToolCall, names: Names) -> str:
    """Return the line for an answer of our tools that was read long ago."""
    name = next((names[known.index(call.name)] for known in (NAMES, OTHER_NAMES) if call.name in known), call.name)
    return f"(this answer was shown before and is left out now; to have it again call {name} with {call.arguments})"
