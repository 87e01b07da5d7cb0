"""Says of images, audio and files what they are, and estimates their tokens.

A file's base64 is found by the bytes with which it begins, and its name by what all APIs call one.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Collection, Iterator
from contextlib import suppress

from msgspec import Raw

from proxy import rawjson
from proxy.plan.preview import on_one_line
from proxy.rawjson import Members, object_of, text_of
from proxy.tools.answer import Media

OTHER_PART_TOKENS = 765
"""Tokens of a 1024 x 1024 image in high detail, by OpenAI's vision guide. Audio counts the same,
whatever its length, and so does a file of which only the name or the address is given."""

PAGE_TOKENS = 1_000
"""Tokens of a PDF's page. Gemini says 258, Anthropic 1,500 to 3,000; OpenAI counts its text and an
image of it."""

MOST_PAGES = 1_000
"""The most pages that a model takes (Gemini's limit), so the most that we count."""

PAGE_BYTES = 100_000
"""Bytes of a page where they cannot be counted. Text alone takes a tenth, so this rather estimates
too little: too much would make the plan take a request for too long."""

TOKEN_BYTES = 4
"""Bytes of a text file for each token, about."""

SLICE = 1 << 20
"""Bytes of base64 that are decoded at a time, as no other thread runs meanwhile."""

_PDF = (b'"JVBERi0', b",JVBERi0")
"""Where the base64 of a PDF begins: of `%PDF-`."""
_DATA = (b"data:text", b"data:application")
_TEXT = re.compile(rb"\bdata:(?:text\\?/|application\\?/(?:json|xml|yaml))[^,\"]{0,100};base64,")
_PAGE = re.compile(rb"/Type\s{0,4}/Page(?![A-Za-z])")

KINDS = {
    "image_url": "image",
    "input_image": "image",
    "image": "image",
    "input_audio": "audio",
    "video_url": "video",
    "document": "document",
    "input_file": "file",
    "file": "file",
}
"""What the APIs call an image or a file within a message, and what we call it."""

_INLINE = ("data", "file_data")
_ADDRESSES = (*_INLINE, "image_url", "url", "file_url", "file_id")
_NAMES = ("filename", "title", "name")
_DEPTH = 3


def about(part: bytes) -> str:
    """Return what an image or a file is, from its JSON: `image, image/png, 34 kB`. Empty for any
    other text."""
    members = object_of(Raw(part))
    kind = KINDS.get(text_of(members.get("type")))
    if not kind:
        return ""
    found = dict(_strings(members, _DEPTH))
    key = next((key for key in _ADDRESSES if found.get(key)), "")
    where = found.get(key, "")
    type = found.get("media_type") or found.get("format", "")
    if where.startswith("data:"):
        head, _, where = where.partition(",")
        key = "data"
        type = head[5:].partition(";")[0]
    size = f"{max(len(where) * 3 // 4_000, 1)} kB" if key in _INLINE else where
    name = next((found[key] for key in _NAMES if found.get(key)), "")
    return ", ".join(
        [kind, *(on_one_line(rawjson.encodable(said)) for said in (type, name, size) if said)]
    )


def media(part: str, takes: Collection[str]) -> Media | None:
    """Return this image or file, given its JSON, for an API whose results hold parts of the types
    `takes`. None if it is any other text."""
    whole = part.encode("utf-8", "replace")
    said = about(whole)
    taken = text_of(object_of(Raw(whole)).get("type")) in takes
    return Media(said, tokens(whole), part if taken else "") if said else None


def _strings(members: Members, depth: int) -> Iterator[tuple[str, str]]:
    """Yield the strings within an object and their names, outer ones last."""
    for key, raw in members.items():
        if rawjson.is_string(raw):
            yield key, text_of(raw)
        elif depth:
            yield from _strings(object_of(raw), depth - 1)


def tokens(part: bytes) -> int:
    """Return about how many tokens this part of a message takes, from its JSON."""
    start = next((at + 1 for begin in _PDF if (at := part.find(begin)) >= 0), 0)
    text = _TEXT.search(part) if not start and any(map(part.__contains__, _DATA)) else None
    if not start and text is None:
        return OTHER_PART_TOKENS
    start = text.end() if text else start
    end = part.find(b'"', start)
    end = end if end >= 0 else len(part)
    if text:
        return max(OTHER_PART_TOKENS, (end - start) * 3 // 4 // TOKEN_BYTES)
    return PAGE_TOKENS * min(
        max(_pages(part, start, end) or (end - start) * 3 // 4 // PAGE_BYTES, 1), MOST_PAGES
    )


def _pages(part: bytes, start: int, end: int) -> int:
    """Return the pages of a PDF whose base64, as far as it is valid, stands there; 0 if its objects
    are compressed. JSON may write slashes as `\\/`."""
    pages = 0
    encoded = part[start:end].replace(b"\\", b"")
    quads = memoryview(encoded)[: len(encoded) // 4 * 4]
    with suppress(binascii.Error):
        for at in range(0, len(quads), SLICE):
            pages += len(_PAGE.findall(binascii.a2b_base64(quads[at : at + SLICE])))
    return pages
