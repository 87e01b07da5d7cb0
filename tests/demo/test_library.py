from __future__ import annotations

from pathlib import Path

import pytest

from proxy.demo.library import PAGE_LINES, Library, Question
from proxy.errors import UserMistake

LINES = ["SECRET_NAME = 'what it is'", "TWICE = 'once here'", *(f"x{n} = {n}" for n in range(PAGE_LINES))]


@pytest.fixture
def library(tmp_path: Path) -> Library:
    (tmp_path / "http").mkdir()
    (tmp_path / "http" / "client.py").write_text("class E(OSError):\n    pass\n")
    (tmp_path / "argparse.py").write_text("\n".join([*LINES, "TWICE = 'and once here'"]))
    (tmp_path / "secret.py").write_text("hidden = 1\n")
    return Library(tmp_path)


def test_pages_say_which_lines_they_are_and_concatenate(library: Library) -> None:
    starts = (1, PAGE_LINES + 1)
    pages = [library.page("argparse.py", first) for first in starts]
    heads, texts = zip(*(page.split("\n", 1) for page in pages), strict=True)
    assert heads == ("argparse.py, lines 1-500 of 503", "argparse.py, lines 501-503 of 503")
    assert "".join(texts) == "\n".join([*LINES, "TWICE = 'and once here'"])


@pytest.mark.parametrize("path", ["../x.py", "/etc/passwd", "secret.py", ""])
def test_only_listed_files_can_be_read(library: Library, path: str) -> None:
    assert library.page(path) == f"There is no {path}."


def test_the_reading_list_reaches_the_required_tokens(library: Library) -> None:
    assert library.reading_list(10, len) == ["argparse.py"]
    assert library.reading_list(10, lambda text: 5) == ["argparse.py", "http/client.py"]
    with pytest.raises(UserMistake, match="too few"):
        library.reading_list(10, lambda text: 1)


def test_questions_are_about_a_line_that_begins_as_no_other(library: Library) -> None:
    assert library.question("argparse.py") == Question("argparse.py", "SECRET_NAME =", "SECRET_NAME = 'what it is'")
    with pytest.raises(UserMistake):
        library.question("http/client.py")


def test_the_installed_standard_library_suits_the_demo() -> None:
    """If this fails, so does the demo: the installation has no sources."""
    library = Library()
    modules = library.reading_list(95_000, lambda text: len(text) // 4)
    assert [library.question(module).path for module in modules[:2]] == modules[:2]
