"""What stands in the context instead of a tool result."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core import preview
from proxy.core.preview import GLIMPSE_CHARS, MARK, Shape

SHAPE = Shape("/context_store", 10, 0)


def test_a_preview_has_the_documented_form() -> None:
    text = "0123456789 and more\nsecond line"
    name = preview.file_name("call_123", preview.digest(text))
    assert re.fullmatch(r"tool_call_call_123_[0-9a-f]{12}\.txt", name)
    assert preview.replacement(text, name, 9, SHAPE) == (
        f"0123456789... (detailed result is stored in /context_store/{name}; complete, 2 lines, 9 tokens)"
    )


def test_a_preview_can_include_the_tail() -> None:
    shape = Shape("/s", 3, 4)
    assert preview.replacement("abcdefgh", "f", 2, shape).startswith("abc...efgh... " + MARK + "/s/f;")


def test_the_first_preview_shows_a_screen_or_more_by_policy() -> None:
    assert SHAPE.first_preview().preview_chars == GLIMPSE_CHARS
    assert Shape("/s", 5000, 0).first_preview().preview_chars == 5000


@pytest.mark.parametrize(
    ("call_id", "part"),
    [("a/../b", "a_b"), ("\u00e9\n", "_"), ("x" * 100, "x" * 64), ("", ""), ("call_1-2", "call_1-2")],
)
def test_an_id_is_reduced_to_what_every_file_system_takes(call_id: str, part: str) -> None:
    assert preview.file_name(call_id, "d") == f"tool_call_{part}_d.txt"


def test_the_same_id_with_other_content_names_another_file() -> None:
    assert preview.digest("a") != preview.digest("b")
    assert len(preview.digest("\ud83d")) == 12


@pytest.mark.parametrize(("text", "lines"), [("", 0), ("a", 1), ("a\n", 1), ("a\nb", 2), ("a\r\u2028b\n\n", 2)])
def test_a_preview_counts_lines(text: str, lines: int) -> None:
    assert preview.line_count(text) == lines


@given(st.text(min_size=11))
def test_the_head_of_a_preview_is_copied_exactly(text: str) -> None:
    assert preview.replacement(text, "f", 1, SHAPE).startswith(text[:10] + "... (detailed result is stored in ")
