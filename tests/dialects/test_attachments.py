"""How many tokens images, audio and files are taken for."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from proxy.dialects import attachments
from proxy.dialects.attachments import (
    MOST_PAGES,
    OTHER_PART_TOKENS,
    PAGE_BYTES,
    PAGE_TOKENS,
    SLICE,
    tokens,
)
from proxy.dialects.chat import CHAT
from tests.dialects.chat.test_messages import READING
from tests.doubling import assert_linear

PAGE = b"<< /Type /Page /Parent 2 0 R >>\n"
TREE = b"<< /Type /Pages /Kids [] /Count 3 >>\n"


def part(data: bytes, kind: str = "application/pdf") -> bytes:
    url = f"data:{kind};base64,{base64.b64encode(data).decode()}"
    return json.dumps({"type": "file", "file": {"filename": "a", "file_data": url}}).encode()


def pdf(body: bytes) -> bytes:
    return b"%PDF-1.7\n" + body


@pytest.mark.parametrize(
    ("body", "pages"),
    [
        (TREE + PAGE * 3, 3),
        (TREE + PAGE.replace(b" ", b"") * 3, 3),
        (TREE + PAGE.replace(b"/Page ", b"/Page\n") * 3, 3),
        (PAGE * 2 * MOST_PAGES, MOST_PAGES),
        (b"compressed", 1),
        (bytes(7 * PAGE_BYTES), 7),
        (b"/PageLabels /Type /PageLabel /Type /Pages", 1),
    ],
)
def test_pages_of_a_pdf(body: bytes, pages: int) -> None:
    assert tokens(part(pdf(body))) == pages * PAGE_TOKENS


@pytest.mark.parametrize(
    "raw",
    [
        part(pdf(PAGE * 2)).replace(b"/", b"\\/"),
        json.dumps({"file_data": base64.b64encode(pdf(PAGE * 2)).decode()}).encode(),
        part(pdf(PAGE * 2), "application/octet-stream"),
    ],
    ids=["slashes escaped", "without a type", "of another type"],
)
def test_a_pdf_is_known_by_its_first_bytes(raw: bytes) -> None:
    assert tokens(raw) == 2 * PAGE_TOKENS


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (part(b"a,b\n" * 10_000, "text/csv"), 10_000),
        (part(b"{}" * 10_000, "application/json"), 5_000),
        (part(b"x", "text/plain"), OTHER_PART_TOKENS),
        (part(bytes(99_999), "image/png"), OTHER_PART_TOKENS),
        (b'{"type":"file","file":{"file_id":"file-1"}}', OTHER_PART_TOKENS),
        (b'{"type":"input_audio","input_audio":{"data":"AAAA","format":"mp3"}}', OTHER_PART_TOKENS),
        (
            b'{"type":"image_url","image_url":{"url":"https://example.test/JVBERi0.png"}}',
            OTHER_PART_TOKENS,
        ),
    ],
)
def test_other_parts(raw: bytes, expected: int) -> None:
    assert tokens(raw) == pytest.approx(expected, abs=2)


@pytest.mark.parametrize(
    "raw", [b'"JVBERi0', b'"JVBERi0xLjcK', b'"JVBERi0!!!=?"', b'{"a":"JVBERi0\\u0000"}']
)
def test_what_is_no_base64_is_one_page(raw: bytes) -> None:
    assert tokens(raw) == PAGE_TOKENS


def test_a_message_counts_its_file() -> None:
    content: list[Any] = [{"type": "text", "text": "Sum it up."}, json.loads(part(pdf(PAGE * 9)))]
    read = CHAT.read(json.dumps({"role": "user", "content": content}).encode(), READING, len)
    assert read.fixed == 9 * PAGE_TOKENS


@pytest.mark.parametrize("unit", [PAGE, b"/Type" + b" " * 40, b"\\/", b"data:text/"])
def test_twice_the_file_takes_twice_as_long(unit: bytes) -> None:
    def looked_at(size: int) -> None:
        tokens(part(pdf(unit * (size // len(unit)))))
        tokens(b'"JVBERi0' + unit * (size // len(unit)))

    assert_linear(looked_at, SLICE, 2 * SLICE)


# -- what a part is --------------------------------------------------------------------------------

SOURCE = {"type": "base64", "media_type": "image/png", "data": "x" * 40_000}


@pytest.mark.parametrize(
    ("part", "about"),
    [
        ({"type": "image", "source": SOURCE}, "image, image/png, 30 kB"),
        (
            {"type": "image", "source": {"type": "url", "url": "https://a/b.png"}},
            "image, https://a/b.png",
        ),
        ({"type": "image", "source": {"type": "file", "file_id": "file_1"}}, "image, file_1"),
        ({"type": "image", "source": None}, "image"),
        (
            {"type": "document", "title": "a\nplan", "source": SOURCE},
            "document, image/png, a plan, 30 kB",
        ),
        (
            {"type": "image_url", "image_url": {"url": "data:image/gif;base64,xxxx"}},
            "image, image/gif, 1 kB",
        ),
        (
            {"type": "input_image", "image_url": "data:image/gif;base64,xxxx"},
            "image, image/gif, 1 kB",
        ),
        (
            {
                "type": "input_file",
                "filename": "a.pdf",
                "file_data": "data:application/pdf;base64,x",
            },
            "file, application/pdf, a.pdf, 1 kB",
        ),
        (
            {"type": "input_audio", "input_audio": {"data": "x" * 4_000, "format": "wav"}},
            "audio, wav, 3 kB",
        ),
        ({"type": "text", "text": "image"}, ""),
        (["image"], ""),
    ],
)
def test_a_part_is_named_by_its_kind_type_name_and_size(part: object, about: str) -> None:
    assert attachments.about(json.dumps(part).encode()) == about


def test_half_a_surrogate_pair_in_a_name_is_no_obstacle() -> None:
    part = r'{"type": "document", "title": "a\ud83d", "source": {"data": "JVBERi0"}}'
    assert attachments.about(part.encode()) == "document, a?, 1 kB"
    shown = attachments.media(part, {"document"})
    assert shown is not None and shown.part == part
    other = attachments.media(part, {"input_file"})
    assert other is not None and not other.part
