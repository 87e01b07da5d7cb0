"""What the dialects do alike with entries: measure them, mark them for upstream's cache, describe them to readers."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw

from proxy import rawjson
from proxy.dialects import attachments
from proxy.plan import preview, texts
from proxy.plan.message import Count, Message, Piece, Reading, ToolCall, digest
from proxy.plan.plan import Item, Role
from proxy.plan.preview import Shape
from proxy.plan.summary import Section
from proxy.plan.texts import Carries, carried, reports_error
from proxy.rawjson import Members, NotJson, elements_of, string, text_of
from proxy.tools.definitions import NAMES, OTHER_NAMES, Names

Places = list[tuple[int | None, str]]
"""Texts, each with the place by which `replace` finds it again."""
Media = Sequence[tuple[int, bytes]]
"""Images and files as canonical JSON, with their places."""

MESSAGE_TOKENS = 4
"""Tokens of a message's frame. OpenAI's cookbook says 3, and 1 for a name; other models' templates need a few more."""

MAX_ARGUMENTS, MAX_SEPARATORS = 256 << 10, 50_000
"""The most characters of a call's arguments, and the most characters in them that may begin a value, for which the
arguments are parsed. That takes some 40 ms, during which no other thread can use the interpreter. Larger arguments
are used as written."""


def canonical(arguments: str) -> str:
    """Return the arguments as canonical JSON, or unchanged if they are not JSON or too large to parse."""
    if len(arguments) > MAX_ARGUMENTS or sum(map(arguments.count, ",[{")) > MAX_SEPARATORS:
        return arguments.strip()
    try:
        return json.dumps(json.loads(arguments or "{}"), sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    except (ValueError, RecursionError):
        return arguments.strip()


def meaning(
    dialect: str,
    role: Role,
    text: str,
    calls: Iterable[ToolCall] = (),
    answers: str = "",
    others: Iterable[bytes] = (),
) -> bytes:
    """Return an entry's `Message.meaning`. The dialect's name is part of it, so that no record of another API is ever
    found."""
    called = [(call.id, call.name, canonical(call.arguments)) for call in calls]
    seen = hashlib.sha256(rawjson.encode([dialect, int(role), text.strip(), called, answers]))
    for other in others:
        seen.update(b"\n")
        seen.update(other)
    return seen.digest()[:16]


def of_client(
    dialect: str,
    role: Role,
    entry: bytes | Raw,
    texts: Places,
    others: Sequence[bytes],
    reading: Reading,
    count: Count,
    *,
    answers: str = "",
    meant: Sequence[str] | None = None,
    fixed: int = 0,
    more: int = 0,
    failed: bool = False,
    media: Media = (),
    movable: int = 0,
) -> Message:
    """Measure what a client sends. `others` is all that is not text, as canonical JSON, and `fixed` its tokens; `more`
    are tokens of texts that never move. `meant`: those of the texts that somebody said, if not all of them. `media` in
    results at places below `movable` can move."""
    sizes = [count(text) for _, text in texts]
    tokens = sum(sizes) + fixed + more + MESSAGE_TOKENS
    plain = [text for _, text in texts]
    carries, kept = carried(role.name.lower(), plain, reading.results)
    meant = plain if meant is None else meant
    if role is Role.SYSTEM and texts and not meant:
        carries = Carries.YES  # the client's reminders, which belong to the step before them
    result = role is Role.TOOL or carries
    kind, shape = "tool result" if result else f"{role.name.lower()} message", reading.shape if result else None
    moved: list[Piece] = []
    for (place, text), size in zip(texts, sizes, strict=True):
        moved.append(_piece(place, text, size, kind, kept if not moved else 0, reading, count))
    moved += [_medium(place, part, kind, shape if place < movable else None, count) for place, part in media]
    return message(
        role,
        entry,
        tokens,
        meaning(dialect, role, "".join(meant), [], answers, others),
        fixed,
        moved,
        answers=answers,
        carries=carries,
        said=any(piece.spans for piece in moved),
        failed=role is Role.TOOL and (failed or reports_error(meant)),
    )


def of_model(
    dialect: str,
    entry: bytes | Raw,
    text: str,
    calls: Sequence[ToolCall],
    answered: Sequence[ToolCall],
    tokens: int,
    fixed: int,
    count: Count,
    others: Sequence[bytes] = (),
    media: Media = (),
) -> Message:
    """Measure a reply with this `text` and these `calls`, of which the client has `answered` some. It has so many
    `tokens` without its frame, `fixed` ones of files included."""
    return message(
        Role.ASSISTANT,
        entry,
        tokens + MESSAGE_TOKENS,
        meaning(dialect, Role.ASSISTANT, text, calls, "", others),
        fixed,
        [_medium(place, part, "assistant message", None, count) for place, part in media],
        calls=tuple((call.id, call.name) for call in answered),
        labels=tuple(preview.of_call(call.name, canonical(call.arguments), count) for call in answered),
    )


def unreadable(dialect: str, entry: bytes | Raw, role: Role, count: Count) -> Message:
    """Measure an entry as a whole, whose form we do not know."""
    text = bytes(entry).decode("utf-8", "replace")
    meant = meaning(dialect, role, "unreadable", [ToolCall("", "", text)])
    return message(role, entry, count(text) + MESSAGE_TOKENS, meant, sealed=True)


def message(
    role: Role,
    entry: bytes | Raw,
    tokens: int,
    meaning: bytes,
    fixed: int = 0,
    pieces: Sequence[Piece] = (),
    calls: tuple[tuple[str, str], ...] = (),
    answers: str = "",
    **more: Any,
) -> Message:
    seen = item(role, tokens, fixed, pieces)
    return Message(digest(entry), role, meaning, tokens, seen, tuple(pieces), calls, answers, **more)


def call_tokens(call: ToolCall, count: Count) -> int:
    """Return the tokens of a call, with its arguments in canonical form: spaces in them influence no decision."""
    return count(call.name) + count(canonical(call.arguments))


def known(members: Mapping[str, Raw], table: Mapping[str, Collection[str]], kind: str) -> bool:
    """Whether `table` has this kind, with all members that are not null: what we do not know may mean anything."""
    return kind in table and all(key in table[kind] or rawjson.is_null(raw) for key, raw in members.items())


def sealed(message: Message) -> Message:
    """Return the message as one that stays as it is, with its step; see `pairing`."""
    whole = item(message.role, message.tokens, message.item.fixed, ())
    return msgspec.structs.replace(message, item=whole, pieces=(), sealed=True)


def _medium(place: int, part: bytes, kind: str, shape: Shape | None, count: Count) -> Piece:
    """Return an image or a file. Without a shape, it stays as long as its entry does.

    It never moves before the model has seen it, as only seeing it tells what is in it.
    """
    text, tokens, about = part.decode("utf-8", "replace"), attachments.tokens(part), attachments.about(part)
    name = preview.file_name(preview.NAMELESS, moved := preview.digest(text))
    left = min(count(preview.pointer(about, name, "", shape)), tokens) if shape else tokens
    spare = tokens * attachments.TOKEN_BYTES
    return Piece(place, moved, tokens, left, tokens, spare, preview.of_kind(kind, count), media=about)


def item(role: Role, tokens: int, fixed: int, pieces: Sequence[Piece]) -> Item:
    """Return what the plan sees of an entry with these tokens."""
    preview = tokens - sum(piece.tokens - piece.preview for piece in pieces)
    first_preview = tokens - sum(piece.tokens - piece.first_preview for piece in pieces)
    return Item(role, tokens, first_preview, preview, fixed)


def _piece(place: int | None, text: str, tokens: int, kind: str, kept: int, reading: Reading, count: Count) -> Piece:
    """Return a text. It is called by its `kind` as long as no call is known whose result it is; its first `kept`
    characters stay in any case."""
    name = preview.file_name(preview.NAMELESS, moved := preview.digest(text))
    spans = texts.spans(text, reading.said)

    def replaced(shape: Shape) -> tuple[int, int]:
        """Return the tokens of the replacement without a label, and how many characters it is shorter than the text."""
        replacement = preview.replacement(text, name, "", tokens, shape, kept, spans)
        spare = len(text) - len(replacement)
        return (min(count(replacement), tokens) if spare > 0 else tokens), spare

    at_event, spare = replaced(reading.shape)
    first = tokens
    if tokens > reading.unseen_limit:
        first, first_spare = replaced(reading.shape.first_preview())
        spare = min(spare, first_spare) if first < tokens else spare
    label = preview.of_kind(kind, count) if spare > 0 else preview.NAMELESS
    return Piece(place, moved, tokens, at_event, first, spare, label, kept, spans=spans)


# -- texts within an entry ---------------------------------------------------------------------------------------------


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


def text_part(part: Members, type: str, text: str) -> Members:
    """Return a part with another text: of this type, if it is an image or a file."""
    marks = {key: part[key] for key in KEYS if key in part}
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


# -- for readers -------------------------------------------------------------------------------------------------------


def title(index: int, message: Message, tool: str) -> str:
    """Return the title of the entry at `index`; `tool` is the tool whose result it is."""
    named = f"{index + 1} {message.role.name.lower()}"
    return f"{named} {_one_line(message.answers)} {_one_line(tool)}" if message.role is Role.TOOL else named


def call_section(title: str, call: ToolCall, role: Role) -> Section:
    return Section(f"{title} calls {_one_line(call.name)} {_one_line(call.id)}", call.arguments, role)


def media_section(title: str, part: bytes, role: Role) -> Section:
    return Section(title, f"[{attachments.about(part)}]", role, part=part.decode("utf-8", "replace"))


def sources(title: str, part: Members, role: Role) -> list[Section]:
    """Return the sources that upstream named for a text, as readers get them: as JSON."""
    named = [one for key in ("citations", "annotations") for one in elements_of(part.get(key))]
    found = [bytes(one).decode("utf-8", "replace") for one in named]
    return [Section(f"{title} sources", "\n".join(found), role)] if found else []


def _one_line(text: str) -> str:
    """Return at most 64 characters on one line, because line breaks in a client's ids and names would end a header."""
    return " ".join(text.split())[:64]


def left_out(call: ToolCall, names: Names) -> str:
    """Return the line for an answer of our tools that was read long ago."""
    name = next((names[known.index(call.name)] for known in (NAMES, OTHER_NAMES) if call.name in known), call.name)
    return f"(this answer was shown before and is left out now; to have it again call {name} with {call.arguments})"


# -- cache breakpoints: no meaning contains one ------------------------------------------------------------------------


class Mark(NamedTuple):
    """A member of a block, or of a message."""

    key: str
    value: Raw


_ANTHROPIC = Mark("cache_control", Raw(b'{"type":"ephemeral"}'))
_OPENAI = Mark("prompt_cache_breakpoint", Raw(b'{"mode":"explicit"}'))
DEFAULTS = (_ANTHROPIC, _OPENAI)
KEYS = tuple(mark.key for mark in DEFAULTS)
TEXT = ("text", "input_text")
"""The blocks that can carry a breakpoint, if their text is not empty."""

_MARK = re.compile(rb'(?<!\\)"(%b)"\s*:\s*(\{[^{}]*\})' % "|".join(KEYS).encode())
"""A breakpoint. Within a string, the quotation marks would be escaped."""


def last_in(entry: bytes | Raw) -> Mark | None:
    """Return the last breakpoint that the client set in an entry."""
    raw = bytes(entry)
    found = _MARK.findall(raw) if any(key.encode() in raw for key in KEYS) else ()
    return Mark(found[-1][0].decode(), Raw(found[-1][1])) if found else None


def unmarked(block: Members) -> bytes:
    """Return a block as canonical JSON, without its breakpoint."""
    return rawjson.encode({key: block[key] for key in sorted(block) if key not in KEYS})


def marked_blocks(blocks: list[bytes | Raw], mark: Mark, carriers: Sequence[str] = TEXT) -> list[bytes | Raw] | None:
    """Return the blocks with this breakpoint on the last one; None if that is no carrier. Raises NotJson."""
    last: Members = rawjson.members(blocks[-1]) if blocks else {}
    kind = text_of(last.get("type"))
    if kind not in carriers or (kind in TEXT and not text_of(last.get("text"))):
        return None
    return [*blocks[:-1], rawjson.encode(last | {mark.key: mark.value})]


def marked_content(given: Raw | None, mark: Mark, carriers: Sequence[str] = TEXT) -> Raw | None:
    """Return a message's content with this breakpoint at its end; None if it cannot carry one, whatever it is. A single
    text becomes a block of the first kind that can carry one."""
    if given is None or rawjson.is_null(given):
        return None
    try:
        if rawjson.is_string(given):
            blocks: list[bytes | Raw] = [rawjson.encode({"type": carriers[0], "text": given})]
        else:
            blocks = list(rawjson.elements(given))
        made = marked_blocks(blocks, mark, carriers)
    except NotJson:
        return None
    return None if made is None else Raw(rawjson.array(made))
