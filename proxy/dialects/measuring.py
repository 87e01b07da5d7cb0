"""Measures what every API's entries are made of: calls, texts that can be moved, and everything that is not text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from proxy.core import preview
from proxy.core.history import Count, Piece, Reading
from proxy.core.plan import Item, Role
from proxy.core.preview import Shape

MESSAGE_TOKENS = 4
"""Tokens of a message's frame. OpenAI's cookbook says 3, and 1 for a name; other models' templates need a few more."""
OTHER_PART_TOKENS = 765
"""Tokens of a 1024 x 1024 image in high detail, by OpenAI's vision guide. Audio and files count the same, whatever the
length of their base64."""

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


def pieces(
    texts: Iterable[tuple[int | None, str]], sizes: Iterable[int], answers: str, reading: Reading, count: Count
) -> tuple[Piece, ...]:
    """Return the texts of a tool result, which have `sizes` tokens, as pieces that can be moved.

    `answers` is the id of the call whose result it is.
    """
    return tuple(
        _piece(place, text, tokens, answers, reading, count) for (place, text), tokens in zip(texts, sizes, strict=True)
    )


def item(role: Role, tokens: int, fixed: int, pieces: Sequence[Piece]) -> Item:
    """Return what the plan sees of an entry with these tokens."""
    preview = tokens - sum(piece.tokens - piece.preview for piece in pieces)
    first_preview = tokens - sum(piece.tokens - piece.first_preview for piece in pieces)
    return Item(role, tokens, first_preview, preview, fixed)


def _piece(place: int | None, text: str, tokens: int, answers: str, reading: Reading, count: Count) -> Piece:
    name = preview.file_name(answers, preview.digest(text))
    shape, limit = reading.shape, reading.max_unseen_tool_tokens
    return Piece(
        part=place,
        name=name,
        tokens=tokens,
        preview=_replaced(text, name, tokens, shape, count),
        first_preview=_replaced(text, name, tokens, shape.first_preview(), count) if tokens > limit else tokens,
    )


def _replaced(text: str, name: str, tokens: int, shape: Shape, count: Count) -> int:
    replacement = preview.replacement(text, name, tokens, shape)
    return min(count(replacement), tokens) if len(replacement) < len(text) else tokens
