"""Which files a path means, and where a pattern matches in them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.regex import compile
from proxy.tools import search
from proxy.tools.find import fitting, relative
from proxy.tools.search import LEAD, LONG_LINE, Files, Find, LineMatch
from tests.doubling import assert_linear

FILES = (
    "/context_store/a.txt",
    "/context_store/b.json",
    "/context_store/sub/a.json",
    "/other/c.txt",
)


def matches(files: Files, paths: list[str], find: Find) -> list[LineMatch]:
    return list(search.matches(files, paths, find))


@pytest.mark.parametrize(
    ("glob", "files"),
    [
        ("*.txt", [FILES[0], FILES[3]]),
        ("**/*.txt", [FILES[0], FILES[3]]),
        ("./*.json", [FILES[1], FILES[2]]),
        ("sub/*", [FILES[2]]),
        ("*", list(FILES)),
        ("[ab].*", list(FILES[:3])),
        ("[", []),
        ("*.TXT", []),
    ],
)
def test_which_paths_a_glob_matches(glob: str, files: list[str]) -> None:
    assert fitting(glob, FILES, "/context_store") == files


def test_paths_are_shown_from_the_directory() -> None:
    assert [relative(path, "/context_store/") for path in FILES] == [
        "a.txt",
        "b.json",
        "sub/a.json",
        "other/c.txt",
    ]


@pytest.mark.parametrize(
    ("text", "pattern", "lines"),
    [
        ("one\ntwo\nthree", "t", [(2, 0, "two"), (3, 0, "three")]),
        ("aXbX\n", "x", [(1, 1, "aXbX")]),
        ("a\r\nb\r\n", "b", [(2, 0, "b")]),
        ("a\u2028b\nb", "b", [(1, 2, "a\u2028b"), (2, 0, "b")]),
        ("é中x\n😀x", "x", [(1, 2, "é中x"), (2, 1, "😀x")]),
        ("a\n\nb\n", "^$", [(2, 0, "")]),
        ("a\nb", "$", [(1, 1, "a"), (2, 1, "b")]),
        ("a\nb\n", "", [(1, 0, "a"), (2, 0, "b")]),
        ("", "", []),
        ("\n", "", [(1, 0, "")]),
        ("x\0y", "y", [(1, 2, "x\0y")]),
        ("\ud800x", "x", [(1, 1, "?x")]),
        ("abc", "z", []),
    ],
)
def test_search_returns_matching_lines_with_numbers(
    text: str, pattern: str, lines: list[tuple[int, int, str]]
) -> None:
    found = matches({"f": text}, ["f"], compile(pattern))
    assert [(match.line, match.column, match.text) for match in found] == lines


def test_files_keep_their_order() -> None:
    files = {"b": "x", "a": "x\nx", "c": "x"}
    found = matches(files, ["b", "a"], compile("x"))
    assert [(match.path, match.line) for match in found] == [("b", 1), ("a", 1), ("a", 2)]


LINE = "x" + "é" * 499 + "x" + "中" * 599 + "x" + "é" * 20
WINDOWS: dict[str, tuple[str, str, list[tuple[int, str]]]] = {
    "a window around each match": (LINE, "x", [
        (0, LINE[:LONG_LINE] + "…"), (500, "…" + LINE[500 - LEAD : 850] + "…"), (1100, "…" + LINE[1100 - LEAD :])]),
    "no more windows than matches": ("x" + "é" * 2000, "x", [(0, "x" + "é" * (LONG_LINE - 1) + "…")]),
    "matches within a window count once": ("ab" * 1000, "a", [
        (0, "ab" * 250 + "…"), (500, "…" + "ab" * 250 + "…"), *[(at, "…" + "ab" * 250 + "…") for at in (850, 1200)],
        (1550, "…" + "ab" * 250 + "…"), (1900, "…" + "ab" * 125)]),
}  # fmt: skip


@pytest.mark.parametrize(("line", "pattern", "windows"), WINDOWS.values(), ids=WINDOWS.keys())
def test_a_long_line_shows_windows(line: str, pattern: str, windows: list[tuple[int, str]]) -> None:
    found = matches({"f": f"\n{line}\n"}, ["f"], compile(pattern))
    assert found == [LineMatch("f", 2, column, text, windowed=True) for column, text in windows]


def test_a_line_of_500_characters_is_shown_whole() -> None:
    line = "é" * (LONG_LINE - 1) + "x"
    assert matches({"f": line}, ["f"], compile("x")) == [LineMatch("f", 1, LONG_LINE - 1, line)]


def test_an_empty_match_within_a_character() -> None:
    assert list(matches({"f": "aé"}, ["f"], lambda data, start: 2)) == [LineMatch("f", 1, 1, "aé")]


def test_lines_without_a_match_are_skipped_unread() -> None:
    calls = []

    def find(data: bytes, start: int) -> int:
        calls.append(start)
        return data.find(b"needle", start)

    list(matches({"f": "hay\n" * 10_000 + "needle\n" + "hay\n" * 10_000}, ["f"], find))
    assert len(calls) == 2


@given(text=st.text(alphabet="aéx中\n\r\u2028"), needle=st.sampled_from("aéx中"))
def test_finds_what_a_search_line_by_line_finds(text: str, needle: str) -> None:
    expected = [
        (number, line.index(needle), line.removesuffix("\r"))
        for number, line in enumerate(text.split("\n"), 1)
        if needle in line
    ]
    found = matches({"f": text}, ["f"], lambda data, start: data.find(needle.encode(), start))
    assert [(match.line, match.column, match.text) for match in found] == expected


@given(parts=st.lists(st.text(alphabet="éa中", min_size=1, max_size=900), min_size=1, max_size=6))
def test_every_needle_of_a_long_line_is_in_a_window(parts: list[str]) -> None:
    line = "é" * LONG_LINE + "x".join(["", *parts, ""])
    found = list(matches({"f": line}, ["f"], lambda data, start: data.find(b"x", start)))
    assert all(line[match.column] == "x" and match.text.strip("…") in line for match in found)
    windows = [
        (max(0, match.column - LEAD), max(0, match.column - LEAD) + LONG_LINE) for match in found
    ]
    for column in (index for index, character in enumerate(line) if character == "x"):
        assert any(start <= column < stop for start, stop in windows)


MANY_LINES = {"f": "ab\n" * 4_000}
LONG = {"f": "é" * 20_000 + "ab" * 20_000}
MANY_FILES = {f"{number}": "ab\n" * 3 for number in range(2_000)}


@pytest.mark.parametrize(
    "files", [MANY_LINES, LONG, MANY_FILES], ids=["lines", "one line", "files"]
)
@pytest.mark.parametrize("pattern", ["b", "x*", "c"])
def test_searching_is_linear_in_the_text(files: dict[str, str], pattern: str) -> None:
    find = compile(pattern)
    more = {f"{path}'": text for path, text in files.items()}
    twice = files | more if len(files) > 1 else {"f": files["f"] * 2}
    assert_linear(lambda files: matches(files, list(files), find), files, twice)


@pytest.mark.parametrize(
    "head", ['{"url": "data:image/png;base64,', '{"type": "base64", "data": "']
)
def test_the_bytes_of_an_image_are_not_searched(head: str) -> None:
    text = f'before\n{head}{"iVBORw0KGgo" * 200}=="}}\niVBOR is said here'
    assert [(one.line, one.text) for one in matches({"f": text}, ["f"], compile("iVBOR"))] == [
        (3, "iVBOR is said here")
    ]
    [line] = matches({"f": text}, ["f"], compile("base64,|data"))
    assert line.text == f'{head}[base64]"}}'


def test_looking_for_the_bytes_of_images_is_linear() -> None:
    for unit in ("a" * 999 + " ", "a", "a ", "/+"):
        assert_linear(
            search.searched,
            "base64 " + unit * (200_000 // len(unit)),
            "base64 " + unit * (400_000 // len(unit)),
        )
