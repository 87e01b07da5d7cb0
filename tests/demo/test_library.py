from __future__ import annotations

from pathlib import Path

import pytest

from proxy.demo.library import PAGE_LINES, Library, Question
from proxy.errors import UserMistake


@pytest.fixture
def library(tmp_path: Path) -> Library:
    (tmp_path / "test").mkdir()
    (tmp_path / "http").mkdir()
    (tmp_path / "test" / "test_a.py").write_text("hidden = 1\n")
    (tmp_path / "http" / "client.py").write_text("class E(OSError):\n    pass\n")
    lines = ["SECRET_NAME = 'what it is'", *(f"x{n} = {n}" for n in range(PAGE_LINES)), "def tail(argument): ..."]
    (tmp_path / "argparse.py").write_text("\n".join(lines))
    return Library(tmp_path)


def test_listing_has_paths_and_sizes(library: Library) -> None:
    assert [line.split()[0] for line in library.call("list_sources", "").splitlines()] == [
        "argparse.py",
        "http/client.py",
    ]


def test_pages_say_which_lines_they_are_and_concatenate(library: Library) -> None:
    starts = (1, PAGE_LINES + 1)
    pages = [library.call("read_source", f'{{"path": "argparse.py", "first": {first}}}') for first in starts]
    heads, texts = zip(*(page.split("\n", 1) for page in pages), strict=True)
    assert heads == ("argparse.py, lines 1-500 of 502", "argparse.py, lines 501-502 of 502")
    assert "".join(texts) == (library.root / "argparse.py").read_text()


@pytest.mark.parametrize("path", ["../x.py", "/etc/passwd", "test/test_a.py", ""])
def test_only_listed_files_can_be_read(library: Library, path: str) -> None:
    assert library.page(path) == f"There is no {path}."


def test_search_finds_lines_by_regular_expression(library: Library) -> None:
    assert library.search(r"^class \w+\(OSError") == "http/client.py:1:class E(OSError):\n"
    assert library.search("nowhere") == "No match.\n"
    assert library.search("x1").endswith("… and more\n")


def test_an_unknown_tool_raises_key_error(library: Library) -> None:
    with pytest.raises(KeyError):
        library.call("grep", "{}")


def test_the_reading_list_reaches_the_required_tokens(library: Library) -> None:
    assert library.reading_list(10, len) == ["argparse.py"]
    assert library.reading_list(10, lambda text: 5) == ["argparse.py", "http/client.py"]
    with pytest.raises(UserMistake, match="too few"):
        library.reading_list(10, lambda text: 1)


def test_questions_are_about_a_line_that_occurs_once(library: Library) -> None:
    asked = library.question("argparse.py")
    assert asked == Question("argparse.py", "SECRET_NAME =", "SECRET_NAME = 'what it is'")
    assert library.question("argparse.py", PAGE_LINES + 1).line == "def tail(argument): ..."
    (library.root / "argparse.py").write_text("\nabcd = 1\n")
    with pytest.raises(UserMistake):
        library.question("argparse.py")


def test_the_installed_standard_library_suits_the_demo() -> None:
    """If this fails, so does the demo: the installation has no sources."""
    library = Library()
    modules = library.reading_list(95_000, lambda text: len(text) // 4)
    assert [library.question(module).path for module in modules[:2]] == modules[:2]
