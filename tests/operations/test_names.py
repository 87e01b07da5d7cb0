"""A caller's paths: what they name, what is refused, and the way into a store's key and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.operations import names
from proxy.operations.names import BadName
from proxy.stores import is_part


@pytest.mark.parametrize(
    ("spelled", "name"),
    [
        ("/workspace/context_store", "workspace/context_store"),
        ("./cache_file/", "cache_file"),
        ("~/x", "~/x"),
        ("a//b/./c", "a/b/c"),
        ("a/../b", "b"),
        ("a/..", ""),
        (".", ""),
        ("/", ""),
        ("", ""),
        ("...", "..."),
        (" a ", " a "),
        ("é/中", "é/中"),
        ("%2e%2e/x", "%2e%2e/x"),
        ("..\\x", "..\\x"),
    ],
)
def test_canonical_form_of_a_path(spelled: str, name: str) -> None:
    assert names.canonical(spelled) == name


@pytest.mark.parametrize(
    ("spelled", "reason"),
    [
        ("..", "'..' leads out of your files"),
        ("/../etc/passwd", "'/../etc/passwd' leads out of your files"),
        ("a/../../b", "'a/../../b' leads out of your files"),
        ("a\0b", "'a\\x00b' has a control character in it"),
        ("a\nb", "'a\\nb' has a control character in it"),
        ("\ud800", "'\\ud800' is not valid Unicode"),
        ("../" + "x" * 200, "'../" + "x" * 97 + "\\u2026' leads out of your files"),
    ],
)
def test_bad_paths_are_refused(spelled: str, reason: str) -> None:
    with pytest.raises(BadName) as refused:
        names.canonical(spelled)
    assert str(refused.value) == reason


@pytest.mark.parametrize(
    ("directory", "path"),
    [("/workspace/x", "/workspace/x/f"), ("./c/", "./c/f"), ("/", "/f"), (".", "./f"), ("~/x//", "~/x/f")],
)
def test_a_path_comes_back_as_its_directory_was_spelled(directory: str, path: str) -> None:
    assert names.joined(directory, "f") == path


@given(st.text(st.characters(codec="utf-8"), min_size=1, max_size=20))
def test_every_name_goes_into_a_key_and_comes_back(name: str) -> None:
    part = names.key_part(name)
    assert is_part(part)
    assert names.name_of(part) == name


def test_names_too_long_for_a_key_are_refused() -> None:
    assert len(names.key_part("x" * 254)) == names.KEY_BYTES
    with pytest.raises(BadName, match="is too long: 256 bytes when stored, of 255"):
        names.key_part("x" * 255)


@pytest.mark.parametrize("part", ["x", "", "_.FF"])
def test_foreign_keys_have_no_name(part: str) -> None:
    assert names.name_of(part) is None
