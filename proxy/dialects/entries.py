"""What the dialects do alike with entries: adding to a text, describing one for readers, shortening hidden rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from msgspec import Raw

from proxy import rawjson
from proxy.dialects.values import Members
from proxy.plan.history import Message, ToolCall
from proxy.plan.plan import Role
from proxy.plan.summary import Section
from proxy.plan.turn import HiddenRound
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


def sources(title: str, part: Members, role: Role) -> list[Section]:
    """Return the sources that upstream named for a text, as readers get them: as JSON."""
    named = [raw for key in ("citations", "annotations") if rawjson.is_array(raw := part.get(key))]
    found = [bytes(one).decode("utf-8", "replace") for raw in named for one in rawjson.elements(raw)]
    return [Section(f"{title} sources", "\n".join(found), role)] if found else []


def _one_line(text: str) -> str:
    """Return at most 64 characters on one line, because line breaks in a client's ids and names would end a header."""
    return " ".join(text.split())[:64]


# -- answers of our tools that were read long ago leave a line each ----------------------------------------------------


POINTER_BYTES = 4
"""Bytes of a token of the line that replaces an answer, about."""


def shrunk(
    hidden: HiddenRound,
    least: int,
    names: Names = NAMES,
    *,
    calls: Callable[[bytes], Sequence[ToolCall]],
    answered: Callable[[bytes], str],
    replaced: Callable[[bytes, str], bytes],
) -> HiddenRound:
    """Return the round with a line in place of each answer above `least` tokens that says how to get it again. The tool
    is called what it is called now (`names`): the client may have got one of its own with the name that it had.

    `calls` returns the calls in an entry, `answered` the id of the call that an entry answers or "", and `replaced` an
    answer with another text.
    """
    entries, sizes = [*hidden.before, *hidden.after], hidden.sizes_of_each()
    if all(size <= least for size in sizes):
        return hidden
    made = [*entries, *([] if hidden.instead is None else [hidden.instead])]
    known = {call.id: call for entry in made for call in calls(entry)}
    for place, (entry, size) in enumerate(zip(entries, sizes, strict=True)):
        call = known.get(answered(entry)) if size > least else None
        if call is None:
            continue
        pointer = replaced(entry, _line(call, names))
        if len(pointer) < len(entry):
            entries[place], sizes[place] = pointer, len(pointer) // POINTER_BYTES
    first = len(hidden.before)
    before, after = tuple(entries[:first]), tuple(entries[first:])
    return msgspec.structs.replace(hidden, before=before, after=after, tokens=sum(sizes), sizes=tuple(sizes))


def _line(call: ToolCall, names: Names) -> str:
    name = next((names[known.index(call.name)] for known in (NAMES, OTHER_NAMES) if call.name in known), call.name)
    return f"(this answer was shown before and is left out now; to have it again call {name} with {call.arguments})"
