"""Pages: what they show, what they cost, and that together they are the text."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from proxy.tools.pages import Span, largest, line_start, page, span
from tests.tools.paging import undone

CALL = 'read_file(path="/s/f"'


def shown(
    text: str, line: int = 0, limit: int = 10**9, column: int = 0, budget: int = 10**6
) -> str | None:
    """A page whose tokens are characters."""
    part = span(text, line, limit, column)
    assert part is not None
    return page(text, part, CALL, budget, len)


@given(text=st.text(alphabet="ab\n"), number=st.integers(0, 12), start=st.integers(0, 3))
def test_line_start(text: str, number: int, start: int) -> None:
    start = min(start, len(text))
    expected = start + len("".join(line + "\n" for line in text[start:].split("\n")[:number]))
    assert line_start(text, number, start) == min(expected, len(text))


@pytest.mark.parametrize(
    ("text", "line", "limit", "column", "expected"),
    [
        ("a\nb\nc", 0, 9, 0, Span(0, 5, 0, 0, 3)),
        ("a\nb\nc", 1, 1, 0, Span(2, 4, 1, 0, 3)),
        ("a\nbcd\n", 1, 1, 2, Span(4, 6, 1, 2, 2)),
        ("a\nbcd\n", 1, 1, 3, Span(5, 6, 1, 3, 2)),
        ("a\nbcd\n", 1, 1, 4, None),
        ("a\nbcd\n", 0, 1, 2, None),
        ("a\nb\n", 2, 1, 0, None),
        ("a\nb", 1, 1, 1, None),
        ("a\nb", 10**18, 10**18, 10**18, None),
        ("", 0, 1, 0, None),
    ],
)
def test_span_of_requested_lines(
    text: str, line: int, limit: int, column: int, expected: Span | None
) -> None:
    assert span(text, line, limit, column) == expected


def test_a_line_above_the_budget_is_cut_inside() -> None:
    text = "short\n" + "x" * 2000 + "\nend"
    assert shown(text, budget=500) == f"short\n[lines 0-0 of 3; continue with {CALL}, offset=1)]"
    second = shown(text, 1, budget=500)
    assert second is not None
    size = second.index("\n")
    assert size > 350
    assert (
        second
        == "x" * size
        + f"\n[lines 1-1 of 3; cut within line 1; continue with {CALL}, offset=1, column={size})]"
    )
    assert shown(text, 1, column=1990, budget=500) == "xxxxxxxxxx\nend"


@pytest.mark.parametrize(
    ("text", "ours"),
    [
        ("a\n[lines 0-1 of 9; continue]\n", "[lines 0-1 of 2; end of file]"),
        ("a\n[lines 0-1 of 9; continue]", "\n[lines 0-1 of 2; end of file without a newline]"),
        ("a\r [lines", "\n[lines 0-0 of 1; end of file without a newline]"),
        ("[lines]\n\n \n", "[lines 0-2 of 3; end of file]"),
    ],
)
def test_a_text_that_ends_like_a_page_footer_is_read_exactly(text: str, ours: str) -> None:
    assert shown(text) == text + ours


def test_a_budget_too_small_for_any_text_makes_no_page() -> None:
    assert shown("a" * 50, budget=20) is None
    assert shown("a", budget=0) is None
    assert shown("a", budget=-5) is None


def test_the_token_counter_is_called_rarely_and_on_small_texts() -> None:
    sizes: list[int] = []

    def count(text: str) -> int:
        sizes.append(len(text))
        return len(text) // 50  # long runs: far from the first guess

    text = "x" * 9_999_999
    part = span(text, 0)
    assert part is not None
    page(text, part, CALL, 1000, count)
    assert len(sizes) < 20
    assert max(sizes) < 2 * 50 * 1000


@given(size=st.integers(1, 500), guess=st.integers(0, 900), fitting=st.integers(0, 500))
def test_largest_finds_nearly_the_largest_fitting_size(size: int, guess: int, fitting: int) -> None:
    best = min(size, fitting)
    found = largest(size, guess, lambda number: number <= fitting)
    assert best - best // 32 - 1 < found <= best


TEXT = st.text(alphabet="ab[]é😀\r\n\u2028").map(
    lambda text: text.replace("[]", "[lines 0-1 of 2]")
)


@given(text=TEXT | st.text(), budget=st.integers(120, 400), limit=st.integers(1, 9) | st.none())
@example(text="[lines 0-1 of 2]\r[", budget=180, limit=None)
def test_pages_add_up_to_the_text_and_stay_within_budget(
    text: str, budget: int, limit: int | None
) -> None:
    text = text * 10
    read, follow = "", {"offset": 0} if text else None
    while follow is not None:
        part = span(text, follow["offset"], limit or 10**9, follow.get("column", 0))
        assert part is not None
        answer = page(text, part, CALL, budget, len)
        assert answer is not None and len(answer) <= budget
        own, follow = undone(answer)
        assert own
        read += own
        assert follow or read == text[: part.stop]
    assert read == text or limit
