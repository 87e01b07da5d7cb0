"""Measures what every API's entries are made of: calls, texts that can be moved, and everything that is not text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
from msgspec import Raw

from proxy import rawjson
from proxy.dialects import attachments
from proxy.plan import preview, texts
from proxy.plan.message import Count, Message, Piece, Reading, ToolCall, digest
from proxy.plan.plan import Item, Role
from proxy.plan.preview import Label, Shape
from proxy.plan.texts import Carries, carried, reports_error

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
    source = TextSource(role, carries, kept)
    moved = pieces(texts, sizes, source, reading, count)
    shape = reading.shape if role is Role.TOOL or carries else None
    moved += tuple(_medium(place, part, source, shape if place < movable else None, count) for place, part in media)
    return Message(
        digest=digest(entry),
        role=role,
        meaning=meaning(dialect, role, "".join(meant), [], answers, others),
        tokens=tokens,
        item=item(role, tokens, fixed, moved),
        pieces=moved,
        calls=(),
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
    tokens += MESSAGE_TOKENS
    return Message(
        digest=digest(entry),
        role=Role.ASSISTANT,
        meaning=meaning(dialect, Role.ASSISTANT, text, calls, "", others),
        tokens=tokens,
        item=item(Role.ASSISTANT, tokens, fixed, ()),
        pieces=tuple(_medium(place, part, TextSource(Role.ASSISTANT), None, count) for place, part in media),
        calls=tuple((call.id, call.name) for call in answered),
        answers="",
        labels=tuple(preview.of_call(call.name, canonical(call.arguments), count) for call in answered),
    )


def unreadable(dialect: str, entry: bytes | Raw, role: Role, count: Count) -> Message:
    """Measure an entry as a whole, whose form we do not know."""
    text = bytes(entry).decode("utf-8", "replace")
    tokens = count(text) + MESSAGE_TOKENS
    return Message(
        digest=digest(entry),
        role=role,
        meaning=meaning(dialect, role, "unreadable", [ToolCall("", "", text)]),
        tokens=tokens,
        item=item(role, tokens, 0, ()),
        pieces=(),
        calls=(),
        answers="",
        sealed=True,
    )


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


class TextSource(NamedTuple):
    """What the pieces of an entry's texts depend on besides the texts."""

    role: Role
    carries: Carries = Carries.NO
    """Whether the policy's `results` name the entry."""
    kept: int = 0
    """The characters at the beginning of its first text that stay in any case."""

    def label(self, count: Count) -> Label:
        """Return what such a text is called as long as no call is known whose result it is."""
        result = self.role is Role.TOOL or self.carries
        return preview.of_kind("tool result" if result else f"{self.role.name.lower()} message", count)


def pieces(
    texts: Places, sizes: Iterable[int], source: TextSource, reading: Reading, count: Count
) -> tuple[Piece, ...]:
    """Return an entry's texts, which have `sizes` tokens, as pieces that can be moved. A model's own never are."""
    if source.role is Role.ASSISTANT:
        return ()
    return tuple(
        _piece(place, text, tokens, source if index == 0 else source._replace(kept=0), reading, count)
        for index, ((place, text), tokens) in enumerate(zip(texts, sizes, strict=True))
    )


def _medium(place: int, part: bytes, source: TextSource, shape: Shape | None, count: Count) -> Piece:
    """Return an image or a file. Without a shape, it stays as long as its entry does.

    It never moves before the model has seen it, as only seeing it tells what is in it.
    """
    text, tokens, about = part.decode("utf-8", "replace"), attachments.tokens(part), attachments.about(part)
    name = preview.file_name(preview.NAMELESS, moved := preview.digest(text))
    left = min(count(preview.pointer(about, name, "", shape)), tokens) if shape else tokens
    spare = tokens * attachments.TOKEN_BYTES
    return Piece(place, moved, tokens, left, tokens, spare, source.label(count), media=about)


def item(role: Role, tokens: int, fixed: int, pieces: Sequence[Piece]) -> Item:
    """Return what the plan sees of an entry with these tokens."""
    preview = tokens - sum(piece.tokens - piece.preview for piece in pieces)
    first_preview = tokens - sum(piece.tokens - piece.first_preview for piece in pieces)
    return Item(role, tokens, first_preview, preview, fixed)


def _piece(place: int | None, text: str, tokens: int, source: TextSource, reading: Reading, count: Count) -> Piece:
    name = preview.file_name(preview.NAMELESS, moved := preview.digest(text))
    spans = texts.spans(text, reading.said)

    def replaced(shape: Shape) -> tuple[int, int]:
        """Return the tokens of the replacement without a label, and how many characters it is shorter than the text."""
        replacement = preview.replacement(text, name, "", tokens, shape, source.kept, spans)
        spare = len(text) - len(replacement)
        return (min(count(replacement), tokens) if spare > 0 else tokens), spare

    at_event, spare = replaced(reading.shape)
    first = tokens
    if tokens > reading.unseen_limit:
        first, first_spare = replaced(reading.shape.first_preview())
        spare = min(spare, first_spare) if first < tokens else spare
    label = source.label(count) if spare > 0 else preview.NAMELESS
    return Piece(place, moved, tokens, at_event, first, spare, label, source.kept, spans=spans)
