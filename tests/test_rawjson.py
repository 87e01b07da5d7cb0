"""JSON in pieces, every piece as it came; half surrogate pairs included."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from proxy import rawjson
from proxy.rawjson import NotJson, TooManyElements
from tests.doubling import cpu

LONE = rb'"\ud83d"'


def test_members_keep_their_bytes() -> None:
    found = rawjson.members(b'{ "a" : 1.50 ,"b":[ 1 ],"a":"\\u0041"}')
    assert {key: bytes(raw) for key, raw in found.items()} == {"a": b'"\\u0041"', "b": b"[ 1 ]"}


def test_members_with_half_a_surrogate_pair_keep_their_bytes() -> None:
    found = rawjson.members(b' { "a" : ' + LONE + b' , "n" : 1.50 } ')
    assert {key: bytes(raw) for key, raw in found.items()} == {"a": LONE, "n": b"1.50"}
    assert rawjson.text(LONE) == "\ud83d"
    assert [bytes(one) for one in rawjson.elements(b"[ " + LONE + b" ,2 ]")] == [LONE, b"2"]
    assert [bytes(one) for one in rawjson.elements(b"[" + LONE + b"]")] == [LONE]
    assert rawjson.members(b'{"' + LONE[1:-1] + b'":{}}').keys() == {"\ud83d"}


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[" * 100_000, b"[1]", b'"x"', b"1", b'{"a":1}x', b"\xff", b'{"a" 1}', b"{,}"],
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
    "text",
    [b"[" + LONE + b" 2]", b"[" + LONE + b"] ]", b'{"a":' + LONE + b" 1}", b"[" * 100_000 + LONE],
)
def test_json_broken_after_half_a_surrogate_pair_is_refused(text: bytes) -> None:
    for cut in (rawjson.elements, rawjson.members, rawjson.text):
        with pytest.raises(NotJson):
            cut(text)


@pytest.mark.parametrize("text", [b"1", b'["' + LONE[1:-1] + b'"]', b'"', b"null"])
def test_string_of_anything_but_a_string_is_refused(text: bytes) -> None:
    with pytest.raises(NotJson):
        rawjson.text(text)


def test_kinds_of_raw_values() -> None:
    assert (
        rawjson.is_null(None) and rawjson.is_null(Raw(b"null")) and not rawjson.is_null(Raw(b"0"))
    )
    assert (
        rawjson.is_string(Raw(b'"a"'))
        and not rawjson.is_string(None)
        and not rawjson.is_string(Raw(b"1"))
    )
    assert (
        rawjson.is_array(Raw(b"[]"))
        and not rawjson.is_array(None)
        and not rawjson.is_array(Raw(b"{}"))
    )


def test_array_joins_raw_pieces() -> None:
    assert rawjson.array([]) == b"[]"
    assert rawjson.array([b" 1", Raw(b"2 ")]) == b"[ 1,2 ]"


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters()),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters()), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(values, st.booleans())
def test_cutting_and_joining_json_keeps_its_value(value: object, spaced: bool) -> None:
    encoded = json.dumps(value, indent=1 if spaced else None).encode()
    if isinstance(value, dict):
        assert {
            key: json.loads(bytes(raw)) for key, raw in rawjson.members(encoded).items()
        } == value
    if isinstance(value, list):
        assert [json.loads(bytes(raw)) for raw in rawjson.elements(encoded)] == value
    assert json.loads(rawjson.encode(value)) == value


def with_raw(value: Any, choose: random.Random) -> Any:
    """Return the value with some of its parts encoded already."""
    if choose.random() < 0.3:
        return Raw(rawjson.encode(value))
    if isinstance(value, list):
        return [with_raw(one, choose) for one in value]
    if isinstance(value, dict):
        return {key: with_raw(one, choose) for key, one in value.items()}
    return value


@given(values, st.randoms(use_true_random=False))
def test_encoding_is_the_same_whatever_is_encoded_already(
    value: object, choose: random.Random
) -> None:
    assert rawjson.encode(with_raw(value, choose)) == rawjson.encode(value)


ESCAPES = st.lists(
    st.sampled_from([r"\\", r"\"", r"\ud83d", r"\uD83D", r"\ude00", "u", "ud83d", "x", r"\n"])
).map("".join)


@given(st.lists(ESCAPES, min_size=1))
def test_every_mask_is_taken_off(texts: list[str]) -> None:
    raws = [f'"{text}"'.encode() for text in texts]
    assert [bytes(one) for one in rawjson.elements(rawjson.array(raws))] == raws
    assert [rawjson.text(one) for one in raws] == [json.loads(one) for one in raws]
    keyed = b"{%b}" % b",".join(b"%b:%b" % (one, one) for one in raws)
    assert rawjson.members(keyed).keys() == {json.loads(one) for one in raws}


def test_del_beside_half_a_pair_is_refused_because_it_is_the_mask() -> None:
    with pytest.raises(NotJson):
        rawjson.elements(b'["\x7f",' + LONE + b"]")


@pytest.mark.parametrize("element", [b"1", b'",,,"', b"[1,2,3]", b'{"a":1,"b":2}', b"null", LONE])
@pytest.mark.parametrize("few", [0, rawjson.UNCOUNTED])
def test_too_many_elements_are_refused(
    element: bytes, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rawjson, "MAX_ELEMENTS", 100)
    monkeypatch.setattr(rawjson, "UNCOUNTED", few)
    assert [bytes(one) for one in rawjson.elements(rawjson.array([element] * 100))] == [
        element
    ] * 100
    with pytest.raises(TooManyElements):
        rawjson.elements(rawjson.array([element] * 101))


def test_an_object_with_too_many_strings_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rawjson, "MAX_STRINGS", 1_000)
    assert rawjson.members(b'{"content":"%b"}' % (rb"\"a\", " * 50_000)).keys() == {"content"}
    for key in ("%d", "%d\\\\", '%d\\"'):
        body = b"{%b}" % b",".join(b'"%b":1' % (key % number).encode() for number in range(1_001))
        with pytest.raises(TooManyElements):
            rawjson.members(body)
        assert len(rawjson.members(body, checked=True)) == 1_001


def test_too_many_commas_are_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rawjson, "MAX_COMMAS", 1_000)
    with pytest.raises(TooManyElements, match="more than 1000 commas"):
        rawjson.decode(msgspec.json.Decoder(Raw), b"[%b1]" % (b"1," * 1_001))


def test_commas_in_texts_cost_no_more_than_other_characters() -> None:
    """As a ratio, in one run: tokenising in Python took 30 times as long."""

    def seconds(text: bytes) -> float:
        body = b'{"messages":%b}' % rawjson.array(
            [b'{"role":"user","content":"%b"}' % text] * 1_000
        )
        return min(
            cpu(lambda read: rawjson.elements(rawjson.members(read)["messages"]), body)
            for _ in range(5)
        )

    assert seconds(b"a, b,c" * 300) < 8 * seconds(b"a. b.c" * 300)
