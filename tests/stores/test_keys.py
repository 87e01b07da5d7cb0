from __future__ import annotations

import os.path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.stores import checked, is_key, namespace_of

NASTY = st.text(st.sampled_from("aZ9._-/\\\0\n ~%é\u2028:*"), max_size=12)
PARTS = st.from_regex(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,254}", fullmatch=True)


@given(
    st.one_of(NASTY, st.text(max_size=20), st.lists(NASTY, min_size=3, max_size=3).map("/".join))
)
def test_a_key_never_leaves_its_folder(text: str) -> None:
    if is_key(text):
        assert checked(text) == text
        assert os.path.normpath(f"/store/{text}") == f"/store/{text}"
        assert [part[0] != "." and 0 < len(part.encode()) <= 255 for part in text.split("/")] == [
            True
        ] * 3
    else:
        with pytest.raises(ValueError):
            checked(text)


@given(PARTS, PARTS, PARTS)
def test_three_parts_make_a_key(namespace: str, kind: str, name: str) -> None:
    key = f"{namespace}/{kind}/{name}"
    assert checked(key) == key
    assert namespace_of(key) == namespace


NO_KEYS = [
    "a/b/.c",
    ".tmp/b/c",
    "a/../c",
    "a/./c",
    f"a/b/{'c' * 256}",
    "a/b/c\n",
    "a/b/c/",
    "/a/b/c",
    "a\\b\\c",
    "a/b",
    "",
    "a",
    "a/b/c/d",
    "a/b/é",
]


@pytest.mark.parametrize("key", [*NO_KEYS, "a//c"])
def test_no_key(key: str) -> None:
    assert not is_key(key)
