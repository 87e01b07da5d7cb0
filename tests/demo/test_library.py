from __future__ import annotations

from pathlib import Path

import pytest

from proxy.demo.library import PAGE_LINES, Question, pages, question, reading_list
from proxy.errors import UserMistake

LINES = ["SECRET_NAME = 'what it is'", "TWICE = 'once here'", *(f"x{n} = {n}" for n in range(PAGE_LINES))]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "http").mkdir()
    (tmp_path / "http" / "client.py").write_text("class E(OSError):\n    pass\n")
    (tmp_path / "argparse.py").write_text("\n".join([*LINES, "TWICE = 'and once here'"]))
    (tmp_path / "secret.py").write_text("hidden = 1\n")
    return tmp_path


def test_pages_say_which_lines_they_are_and_concatenate(root: Path) -> None:
    heads, texts = zip(*(page.text.split("\n", 1) for page in pages("argparse.py", root)), strict=True)
    assert heads == ("argparse.py, lines 1-500 of 503", "argparse.py, lines 501-503 of 503")
    assert "".join(texts) == "\n".join([*LINES, "TWICE = 'and once here'"])
    for path in ("../x.py", "/etc/passwd", "secret.py", ""):
        assert list(pages(path, root)) == []


def test_the_reading_list_reaches_the_required_tokens(root: Path) -> None:
    assert {page.path for page in reading_list(10, len, root)} == {"argparse.py"}
    assert [page.path for page in reading_list(11, lambda text: 5, root)][-1] == "http/client.py"
    with pytest.raises(UserMistake, match="too few"):
        reading_list(10, lambda text: 1, root)


def test_questions_are_about_a_line_that_begins_as_no_other(root: Path) -> None:
    assert question("argparse.py", root) == Question("argparse.py", "SECRET_NAME =", "SECRET_NAME = 'what it is'")
    with pytest.raises(UserMistake):
        question("http/client.py", root)


def test_the_installed_standard_library_suits_the_demo() -> None:
    """If this fails, so does the demo: the installation has no sources."""
    modules = list(dict.fromkeys(page.path for page in reading_list(95_000, lambda text: len(text) // 4)))
    assert [question(module).path for module in modules[:2]] == modules[:2]
