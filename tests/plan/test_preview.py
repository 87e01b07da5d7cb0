"""What stands in the context instead of a tool result."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.plan import preview
from proxy.plan.preview import GLIMPSE_CHARS, Shape

SHAPE = Shape("/context_store", 10)


def test_a_preview_has_the_documented_form() -> None:
    text = "0123456789 and more\nsecond line"
    assert preview.replacement(text, "a.log-12345678.txt", "result of cat", 9, SHAPE) == (
        "0123456789... (detailed result is stored in /context_store/a.log-12345678.txt;"
        " complete, 2 lines, 9 tokens; result of cat)"
    )


def test_the_first_preview_shows_a_screen_or_more_by_policy() -> None:
    assert SHAPE.first_preview().preview_chars == GLIMPSE_CHARS
    assert Shape("/s", 5000).first_preview().preview_chars == 5000


def test_other_content_has_another_digest() -> None:
    assert preview.digest("a") != preview.digest("b")
    assert re.fullmatch("[0-9a-f]{32}", preview.digest("\ud83d"))


@pytest.mark.parametrize(("text", "lines"), [("", 0), ("a", 1), ("a\n", 1), ("a\nb", 2), ("a\r\u2028b\n\n", 2)])
def test_a_preview_counts_lines(text: str, lines: int) -> None:
    assert preview.line_count(text) == lines


@given(st.text(min_size=11))
def test_the_head_of_a_preview_is_copied_exactly(text: str) -> None:
    assert preview.replacement(text, "f", "o", 1, SHAPE).startswith(text[:10] + "... (detailed result is stored in ")
