"""JSON in pieces, every piece as it came; half surrogate pairs included."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from proxy.core import rawjson
from proxy.core.rawjson import NotJson

LONE = rb'"\ud83d"'


def test_members_keep_their_bytes() -> None:
    found = rawjson.members(b'{ "a" : 1.50 ,"b":[ 1 ],"a":"\\u0041"}')
    assert {key: bytes(raw) for key, raw in found.items()} == {"a": b'"\\u0041"', "b": b"[ 1 ]"}


def test_members_with_half_a_surrogate_pair_keep_their_bytes() -> None:
    found = rawjson.members(b' { "a" : ' + LONE + b' , "n" : 1.50 } ')
    assert {key: bytes(raw) for key, raw in found.items()} == {"a": LONE, "n": b"1.50"}
    assert rawjson.string(LONE) == "\ud83d"
    assert [bytes(one) for one in rawjson.elements(b"[ " + LONE + b" ,2 ]")] == [LONE, b"2"]
    assert [bytes(one) for one in rawjson.elements(b"[" + LONE + b"]")] == [LONE]
    assert rawjson.members(b'{"' + LONE[1:-1] + b'":{}}').keys() == {"\ud83d"}


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[" * 100_000, b"[1]", b'"x"', b"1", b'{"a":1}x', b"\xff", b'{"a" 1}', b"{,}"]
)
@pytest.mark.parametrize("lone", [b"", b" " + LONE])
def test_members_of_anything_but_an_object_are_refused(text: bytes, lone: bytes) -> None:
    with pytest.raises(NotJson):
        rawjson.members(text + lone)


@pytest.mark.parametrize("text", [b'{"a":1}', b"[1", b"[1 2]", b'"x"'])
@pytest.mark.parametrize("lone", [b"", b" " + LONE])
def test_elements_of_anything_but_an_array_are_refused(text: bytes, lone: bytes) -> None:
    with pytest.raises(NotJson):
        rawjson.elements(text + lone)


@pytest.mark.parametrize(
    "text", [b"[" + LONE + b" 2]", b"[" + LONE + b"] ]", b'{"a":' + LONE + b" 1}", b"[" * 100_000 + LONE]
)
def test_json_broken_after_half_a_surrogate_pair_is_refused(text: bytes) -> None:
    for cut in (rawjson.elements, rawjson.members, rawjson.string):
        with pytest.raises(NotJson):
            cut(text)


@pytest.mark.parametrize("text", [b"1", b'["' + LONE[1:-1] + b'"]', b'"', b"null"])
def test_string_of_anything_but_a_string_is_refused(text: bytes) -> None:
    with pytest.raises(NotJson):
        rawjson.string(text)


def test_kinds_of_raw_values() -> None:
    assert rawjson.is_null(None) and rawjson.is_null(Raw(b"null")) and not rawjson.is_null(Raw(b"0"))
    assert rawjson.is_string(Raw(b'"a"')) and not rawjson.is_string(None) and not rawjson.is_string(Raw(b"1"))
    assert rawjson.is_array(Raw(b"[]")) and not rawjson.is_array(None) and not rawjson.is_array(Raw(b"{}"))


def test_array_joins_raw_pieces() -> None:
    assert rawjson.array([]) == b"[]"
    assert rawjson.array([b" 1", Raw(b"2 ")]) == b"[ 1,2 ]"


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters()), inner, max_size=4),
    max_leaves=12,
)


@given(values, st.booleans())
def test_cutting_and_joining_json_keeps_its_value(value: object, spaced: bool) -> None:
    encoded = json.dumps(value, indent=1 if spaced else None).encode()
    if isinstance(value, dict):
        assert {key: json.loads(bytes(raw)) for key, raw in rawjson.members(encoded).items()} == value
    if isinstance(value, list):
        assert [json.loads(bytes(raw)) for raw in rawjson.elements(encoded)] == value
    assert json.loads(rawjson.encode(value)) == value
