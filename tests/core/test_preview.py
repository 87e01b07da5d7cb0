"""What stands in the context instead of a tool result."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core import preview
from proxy.core.preview import GLIMPSE_CHARS, MARK, Shape

SHAPE = Shape("/context_store", 10, 0)


def test_the_form_that_is_documented() -> None:
    text = "0123456789 and more\nsecond line"
    name = preview.file_name("call_123", preview.digest(text))
    assert re.fullmatch(r"tool_call_call_123_[0-9a-f]{12}\.txt", name)
    assert preview.replacement(text, name, 9, SHAPE) == (
        f"0123456789... (detailed result is stored in /context_store/{name}; complete, 2 lines, 9 tokens)"
    )


def test_with_a_tail() -> None:
    shape = Shape("/s", 3, 4)
    assert preview.replacement("abcdefgh", "f", 2, shape).startswith("abc...efgh... " + MARK + "/s/f;")


def test_a_glimpse_shows_a_screen_or_what_the_policy_says_if_that_is_more() -> None:
    assert SHAPE.first_preview().preview_chars == GLIMPSE_CHARS
    assert Shape("/s", 5000, 0).first_preview().preview_chars == 5000


@pytest.mark.parametrize(
    ("call_id", "part"),
    [("a/../b", "a_b"), ("\u00e9\n", "_"), ("x" * 100, "x" * 64), ("", ""), ("call_1-2", "call_1-2")],
)
def test_an_id_is_reduced_to_what_every_file_system_takes(call_id: str, part: str) -> None:
    assert preview.file_name(call_id, "d") == f"tool_call_{part}_d.txt"


def test_same_id_other_content_other_file() -> None:
    assert preview.digest("a") != preview.digest("b")
    assert len(preview.digest("\ud83d")) == 12


@pytest.mark.parametrize(("text", "lines"), [("", 0), ("a", 1), ("a\n", 1), ("a\nb", 2), ("a\r\u2028b\n\n", 2)])
def test_lines(text: str, lines: int) -> None:
    assert preview.line_count(text) == lines


@given(st.text(min_size=11))
def test_the_head_is_the_texts_own(text: str) -> None:
    assert preview.replacement(text, "f", 1, SHAPE).startswith(text[:10] + "... (detailed result is stored in ")
