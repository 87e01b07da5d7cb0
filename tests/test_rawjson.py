"""JSON in pieces, every piece as it came; half surrogate pairs included."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from proxy import rawjson
from proxy.rawjson import NotJson

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


PIECE = 1 << 20


@pytest.mark.parametrize("shift", range(-14, 3))
@pytest.mark.parametrize("text", ["\ud83d\ude00", "\ud83d", "\ud83d\ud83d\ude00", "\ude00\ud83d"])
def test_surrogates_where_a_long_string_is_cut(text: str, shift: int) -> None:
    whole = json.dumps("x" * (PIECE + shift) + text + "y").encode()
    assert rawjson.string(b" " + whole + b"\n") == json.loads(whole)


@pytest.mark.parametrize("shift", range(-16, 3))
def test_every_mask_is_taken_off_where_a_long_value_is_cut(shift: int) -> None:
    text = b'"' + b"x" * (PIECE + shift) + b"\x7fu" + LONE[1:-1] * 3 + b'"'
    found = rawjson.elements(b"[" + text + b"," + LONE + b"]")
    assert [bytes(raw) for raw in found] == [text, LONE]
    assert rawjson.encode(found) == b"[" + text + b"," + LONE + b"]"


@pytest.mark.parametrize("body", [b"[%b1]", b'{"a":[%b1]}', b'{"a":"[","b":[%b1]}'])
def test_too_many_values_are_refused_unread(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rawjson, "MAX_VALUES", 1_000)
    decoder = msgspec.json.Decoder(Raw)
    with pytest.raises(NotJson, match="more than 1000 values"):
        rawjson.decode(decoder, body % (b"1," * 1_001))
    assert rawjson.decode(decoder, body % (b"1," * 900))
    assert rawjson.decode(decoder, body % (b'",,\\",,",' * 900)), "commas in strings separate nothing"
    assert rawjson.decode(decoder, b'["%b"]' % (b"," * 3 * PIECE)), "in a long one neither"


@pytest.mark.parametrize("shift", range(-3, 2))
def test_long_texts_with_half_a_pair_are_encoded_as_json_does(shift: int) -> None:
    text = "é" * (PIECE + shift) + "\ud83d\ude00😀\ud83d"
    value = [1, text, {"a": (text, []), "\ud83d": {}}, None, "\ud83d"]
    assert rawjson.encode(value) == json.dumps(value, separators=(",", ":")).encode()


NESTED = st.recursive(
    st.sampled_from([1, None, "a,b[]{}", '\\"x,', "é\\", '""' * 40]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(['"[', "a,", "}"]), inner),
    max_leaves=30,
)


@given(
    value=st.lists(NESTED, max_size=9) | st.dictionaries(st.text("ab,[", max_size=3), NESTED), most=st.integers(1, 9)
)
def test_elements_are_counted_wherever_pieces_end(value: Any, most: int) -> None:
    padded = json.dumps(value).encode() + b" " * (2 * most)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rawjson, "_PIECE", 256)
        assert rawjson.more_than(padded, most) == (len(value) > most)


def test_nested_arrays_are_counted_in_large_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    end = rawjson._end

    def counted(pattern: re.Pattern[bytes], view: memoryview, at: int, size: int = rawjson._PIECE) -> int:
        steps.append(at)
        return end(pattern, view, at, size)

    monkeypatch.setattr(rawjson, "_end", counted)
    body = b"[[%b[]]]" % (b"[]," * 400_000)
    assert not rawjson.more_than(body, 100)
    assert len(steps) <= 16 * len(body) // rawjson._PIECE
