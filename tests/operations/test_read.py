"""Which lines `/read_file` shows, on texts that end in all the ways that texts do."""

from __future__ import annotations

import pytest

from proxy.operations.search import shown


@pytest.mark.parametrize(
    ("text", "offset", "limit", "answer", "lines"),
    [
        ("a\nb\nc", 0, None, "a\nb\nc", 3),
        ("a\nb\nc\n", 0, None, "a\nb\nc\n", 3),
        ("a\nb\nc", 1, 1, "b\n", 3),
        ("a\nb\nc", 2, 5, "c", 3),
        ("a\nb\nc\n", 2, 1, "c\n", 3),
        ("a\nb\nc", 3, 1, "", 3),
        ("a\nb\nc\n", 3, None, "", 3),
        ("a\nb", 10**30, 10**30, "", 2),
        ("a\nb", 0, 0, "", 2),
        ("a\r\nb", 1, None, "b", 2),
        ("a\u2028b", 1, None, "", 1),
        ("", 0, None, "", 0),
        ("\n", 0, 1, "\n", 1),
        ("\ud83d\n", 0, None, "\ud83d\n", 1),
    ],
)
def test_read_file_returns_the_requested_lines(
    text: str, offset: int, limit: int | None, answer: str, lines: int
) -> None:
    content = text.encode("utf-8", "surrogatepass")
    reply = shown("./f", content, offset, limit)
    assert reply.answer == answer
    assert reply.metadata == {"path": "./f", "size_bytes": len(content), "lines": lines}
