"""Reads what an error reply says, in any vendor's shape, without text that may quote the request.

An error may repeat parts of the request that caused it, and a client must not be able to choose words that we take for
upstream's. So only messages, codes and types are read, and quotations in messages are left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import msgspec

READ = 20_000
"""The most characters of a message that are looked at for quotations."""

KEPT = 2_000
"""The most characters of a message that are kept. No vendor's own words are longer."""

PARTS = 50
"""The most objects of an error that are read. A FastAPI server lists each mistake in the request."""

DEPTH = 6
"""The most levels of an error: a gateway's error may contain the provider's."""

_INSIDE = ("error", "errors", "detail", "base_resp", "metadata", "raw")
"""Members that contain an error or its text: of OpenAI, Cloudflare, FastAPI, MiniMax; the last two of OpenRouter."""

_MESSAGES = ("message", "msg", "status_msg")
_CODES = ("code", "type", "error_type", "status_code")

_PARAMETER = re.compile(r"`(\w{1,40})`(?= (?:tokens|and|exceed|must|is no smaller)\b|\.| \+)")
"""A parameter's name in an error's own words, as TGI, Anthropic and vLLM write it. It is no quotation."""

_QUOTE = re.compile(r"(?<!\w)['\u2019]|['\u2019](?!\w)|[\"`\u201c\u201d\u2018\u00ab\u00bb]")
"""A quotation mark. An apostrophe within a word is none."""


_json = json.JSONDecoder()


class ErrorText(msgspec.Struct, frozen=True):
    """What an error says. `text` has the messages on separate lines, `codes` is in lower case."""

    text: str
    codes: frozenset[str]
    numbers: Mapping[str, int]
    """Numbers beside a message, by name, as llama.cpp gives them."""


def parts(body: bytes) -> Iterator[str | Mapping[str, Any]]:
    """Yield the objects and the texts of an error reply, the outermost first. The texts may quote the request."""
    return islice(_parts(_decoded(body), 0), PARTS)


def read(body: bytes) -> ErrorText:
    """Read an error reply. A body that is neither JSON nor text says nothing."""
    said: list[str] = []
    codes: set[str] = set()
    numbers: dict[str, int] = {}
    for part in parts(body):
        if isinstance(part, str):
            said.append(_without_quotations(part))
            continue
        codes |= {str(part[key]).lower() for key in _CODES if isinstance(part.get(key), str | int)}
        numbers |= {key: value for key, value in part.items() if type(value) is int and key not in _CODES}
    return ErrorText("\n".join(said)[:READ], frozenset(codes), numbers)


def _decoded(body: bytes) -> Any:
    """Return the JSON value, or the text of a body that does not look like JSON. JSON that is cut off says nothing."""
    try:
        return msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        start = body[: 4 * READ].lstrip()  # UTF-8 has at most 4 bytes for a character
        return None if start[:1] in (b"{", b"[", b'"') else start.decode("utf-8", "replace")


def _parts(value: Any, depth: int) -> Iterator[str | Mapping[str, Any]]:
    """Yield the objects and the texts of an error, the outermost first."""
    if depth > DEPTH:
        return
    if isinstance(value, list):
        for element in value[:PARTS]:
            if isinstance(element, dict):  # a list of anything else quotes the request, or the error's place in it
                yield from _parts(element, depth + 1)
    elif isinstance(value, str):
        yield from _texts(value, depth)
    elif isinstance(value, dict):
        yield value
        for key in (*_MESSAGES, *_INSIDE):
            if key in value:
                yield from _parts(value[key], depth + 1)


def _texts(text: str, depth: int) -> Iterator[str | Mapping[str, Any]]:
    """Yield a text, and what a gateway puts behind or between its own words: the provider's error as JSON."""
    own, brace, behind = text.partition("{")
    if not brace or _QUOTE.search(own):
        yield text
        return
    try:
        inner, end = _json.raw_decode(brace + behind)
    except (ValueError, RecursionError):
        yield text
        return
    yield own
    yield from _parts(inner, depth + 1)
    yield behind[end - 1 :]


def _without_quotations(text: str) -> str:
    """Return a message without everything between its first and its last quotation mark, as quotations may contain
    marks of their own."""
    beginning = " ".join(_PARAMETER.sub(r"\1", text[:READ]).split())
    marks = [mark.start() for mark in _QUOTE.finditer(beginning)]
    if not marks:
        return beginning[:KEPT]
    if len(text) > READ:
        return beginning[: marks[0]][:KEPT]
    return (beginning[: marks[0]] + "''" + beginning[marks[-1] + 1 :])[:KEPT]
