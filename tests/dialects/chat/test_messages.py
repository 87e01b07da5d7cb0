"""Reading messages: sizes, pairs, what may be moved, and which differences do not count for the
history's digest."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy import rawjson
from proxy.dialects.attachments import OTHER_PART_TOKENS
from proxy.dialects.chat import CHAT
from proxy.dialects.entries import MAX_ARGUMENTS, MAX_SEPARATORS
from proxy.dialects.render import with_previews
from proxy.plan.history import History, Naming, Terms
from proxy.plan.plan import Message, Reading, Role, Room, ToolCall
from proxy.plan.preview import MARK, Shape
from proxy.plan.turn import Unplannable
from proxy.policy import Offload

SHAPE = Shape(store_dir="/context_store", preview_chars=100)
READING = Reading(SHAPE, 20_000)


def words(text: str) -> int:
    """A token a character: sizes can be read off the test."""
    return len(text)


def message(reading: Reading = READING, **fields: Any) -> Message:
    return CHAT.read(json.dumps(fields).encode(), reading, words)


def call(id: str = "c1", name: str = "search", arguments: str = "{}") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool(content: Any, id: str = "c1") -> bytes:
    return json.dumps({"role": "tool", "tool_call_id": id, "content": content}).encode()


# -- sizes -----------------------------------------------------------------------------------------

SIZES: list[tuple[dict[str, Any], int]] = [
    ({"role": "user", "content": "hello"}, 5),
    ({"role": "user", "content": ""}, 0),
    ({"role": "assistant", "content": None}, 0),
    ({"role": "assistant"}, 0),
    (
        {
            "role": "user",
            "content": [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}],
        },
        3,
    ),
    (
        {
            "role": "user",
            "content": [{"type": "image_url", "image_url": {"url": "data:" + "A" * 9999}}],
        },
        OTHER_PART_TOKENS,
    ),
    (
        {"role": "assistant", "content": "a", "tool_calls": [call(name="xy", arguments='{"q":1}')]},
        1 + 2 + 7,
    ),
    ({"role": "assistant", "content": "a", "reasoning_content": "bcd"}, 4),
    ({"role": "assistant", "content": "a", "reasoning": "bcd"}, 4),
    (
        {
            "role": "assistant",
            "content": "a",
            "reasoning": "",
            "reasoning_details": [{"text": "bcd"}],
        },
        4,
    ),
    (
        {
            "role": "assistant",
            "tool_calls": [{"id": "c", "type": "custom", "custom": {"name": "n", "input": "xyz"}}],
        },
        4,
    ),
]


@pytest.mark.parametrize(("fields", "size"), SIZES)
def test_the_tokens_of_a_message_are_those_of_what_it_says(
    fields: dict[str, Any], size: int
) -> None:
    assert message(**fields).tokens == size + 4


@pytest.mark.parametrize("raw", [b"1", b"[]", b'"user"', b'{"role":"user"'])
def test_what_is_no_object_is_none_of_our_business(raw: bytes) -> None:
    with pytest.raises(Unplannable):
        CHAT.read(raw, READING, words)


@pytest.mark.parametrize(
    ("raw", "role"),
    [
        (b"{}", Role.TOOL),
        (b'{"role":"wizard"}', Role.TOOL),
        (b'{"role":"function","name":"f","content":"found"}', Role.TOOL),
        (b'{"role":1}', Role.TOOL),
        (b'{"role":"user","content":1}', Role.USER),
        (b'{"role":"user","content":[1]}', Role.USER),
        (b'{"role":"assistant","tool_calls":1}', Role.ASSISTANT),
        (b'{"role":"assistant","tool_calls":["call"]}', Role.ASSISTANT),
        (b'{"role":"user","content":"\xff"}', Role.USER),
    ],
)
def test_a_message_of_an_unknown_form_stays_as_it_is(raw: bytes, role: Role) -> None:
    found = CHAT.read(raw, READING, words)
    assert (bool(found.sealed), found.role, found.pieces, found.calls) == (True, role, (), ())
    assert (
        found.tokens
        == found.preview
        == found.first_preview
        == words(raw.decode(errors="replace")) + 4
    )
    assert (
        found.meaning == CHAT.read(raw.replace(b'":', b'" : '), READING, words).meaning
        or b"xff" in raw
    )
    assert found.meaning != CHAT.read(b'{"role":"tool"}', READING, words).meaning


def test_arguments_and_ids_that_are_no_strings_are_read_as_json() -> None:
    strange = {"id": 7, "function": {"name": "look", "arguments": {"b": 1, "a": [2]}}}
    found = message(role="assistant", tool_calls=[strange])
    assert not found.sealed and found.calls == (("7", "look"),)
    usual = message(role="assistant", tool_calls=[call("7", "look", '{"a": [2], "b": 1}')])
    assert found.meaning == usual.meaning
    assert message(role="tool", tool_call_id=7, content="x").answers == "7"


def named(*messages: Message) -> list[Message]:
    return Naming().named(messages)[0]


# -- what may be moved -----------------------------------------------------------------------------


def test_a_large_result_becomes_preview_and_reference() -> None:
    text = "".join(f"line {number}\n" for number in range(500))
    raw = (
        b'{ "role":"tool","cache_control" : 1e400, "tool_call_id":"c1","content":'
        + json.dumps(text).encode()
        + b"}"
    )
    [known] = named(CHAT.read(raw, READING, words))
    [piece] = known.pieces
    moved = with_previews(CHAT, raw, known, SHAPE, first_preview=False)
    [(_, shown)] = CHAT.texts(moved)
    assert shown.startswith(text[:100] + "... " + MARK + "/context_store/" + piece.name + ";")
    assert "500 lines" in shown
    assert b"1e400" in moved
    assert piece.preview == words(shown)
    assert known.preview == known.tokens - piece.tokens + piece.preview


def test_each_part_goes_to_a_file_of_its_own_and_small_and_other_parts_stay() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:x"}}
    small = {"type": "text", "text": "small"}
    large = [
        {"type": "text", "text": letter * 3000, "cache_control": {"type": "ephemeral"}}
        for letter in "ab"
    ]
    raw = tool([large[0], image, small, large[1]])
    [known] = named(CHAT.read(raw, READING, words))
    parts = json.loads(with_previews(CHAT, raw, known, SHAPE, first_preview=False))["content"]
    assert parts[1:3] == [image, small]
    assert parts[0]["cache_control"] == large[0]["cache_control"]
    names = [piece.name for piece in known.pieces if piece.preview < piece.tokens]
    assert len(set(names)) == 2
    assert all(name in part["text"] for name, part in zip(names, (parts[0], parts[3]), strict=True))


@given(st.text(max_size=400), st.text(max_size=80))
def test_any_text_and_any_id(text: str, id: str) -> None:
    """Also hostile ids: a name never leaves its directory and is the same for the same text."""
    raw = tool(text * 7, id)
    [known] = named(CHAT.read(raw, READING, words))
    for piece in known.pieces:
        assert set(piece.name) <= set(
            "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-."
        )
        assert ".." not in piece.name and "/" not in piece.name and len(piece.name) < 100
    assert len(with_previews(CHAT, raw, known, SHAPE, first_preview=False)) <= len(raw)


# -- the history's digest --------------------------------------------------------------------------

ALIKE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"role": "user", "content": "hi"}, {"content": "hi", "role": "user"}),
    ({"role": "user", "content": "hi"}, {"role": "user", "content": " hi\n"}),
    (
        {"role": "user", "content": "hi"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    ),
    (
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {
            "role": "user",
            "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}],
        },
    ),
    ({"role": "assistant", "content": None}, {"role": "assistant", "content": ""}),
    (
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "a", "reasoning_content": "thought"},
    ),
    (
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "a", "annotations": [], "refusal": None},
    ),
    (
        {"role": "assistant", "tool_calls": [call(arguments='{"a": 1, "b": [1.5]}')]},
        {"role": "assistant", "tool_calls": [call(arguments='{"b":[1.5],"a":1}')], "content": ""},
    ),
    (
        {"role": "assistant", "tool_calls": [call(arguments="")]},
        {"role": "assistant", "tool_calls": [call()]},
    ),
]
DIFFERENT: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"role": "user", "content": "hi"}, {"role": "user", "content": "ho"}),
    ({"role": "user", "content": "hi"}, {"role": "assistant", "content": "hi"}),
    (
        {"role": "assistant", "tool_calls": [call("c1")]},
        {"role": "assistant", "tool_calls": [call("c2")]},
    ),
    (
        {"role": "assistant", "tool_calls": [call(name="a")]},
        {"role": "assistant", "tool_calls": [call(name="b")]},
    ),
    (
        {"role": "assistant", "tool_calls": [call(arguments='{"a":1}')]},
        {"role": "assistant", "tool_calls": [call(arguments='{"a":2}')]},
    ),
    (
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "b"}}]},
    ),
]


@pytest.mark.parametrize(("one", "other"), ALIKE)
def test_alike(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert message(**one).meaning == message(**other).meaning


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_different(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert message(**one).meaning != message(**other).meaning


@pytest.mark.parametrize(
    "arguments",
    ["[" + "1, " * MAX_SEPARATORS + "1]", '{"text": "' + "x" * MAX_ARGUMENTS + '"}'],
    ids=["many", "long"],
)
def test_arguments_too_large_to_look_into_stand_for_themselves(
    arguments: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json, "loads", None)
    fields = {"role": "assistant", "tool_calls": [call(arguments=arguments)]}
    assert message(**fields).calls == (("c1", "search"),)


def test_arguments_that_are_not_json_stand_for_themselves() -> None:
    broken = [
        {"role": "assistant", "tool_calls": [call(arguments=text)]}
        for text in ("{oops", "{oops ", "{oups")
    ]
    first, trimmed, other = (message(**fields).meaning for fields in broken)
    assert first == trimmed != other


def test_the_reply_means_what_the_client_sends_back() -> None:
    sent_back = message(
        role="assistant", content="text", tool_calls=[call("c9", "search", '{"q": "x"}')]
    )
    assert CHAT.reply_meaning("text ", [ToolCall("c9", "search", '{"q":"x"}')]) == sent_back.meaning
    assert (
        CHAT.reply_meaning("only text", [])
        == message(role="assistant", content="only text").meaning
    )


def history(*raws: bytes, offload: Offload | None = None) -> History:
    return History(Terms("m", offload or Offload(), Room(), 0)).extended(
        [CHAT.read(raw, READING, words) for raw in raws]
    )


ASKS = json.dumps({"role": "assistant", "tool_calls": [call("c1"), call("c2", "fetch")]}).encode()


def test_members_that_clients_add_to_what_is_called_seal_nothing() -> None:
    for member in ("index", "provider_specific_fields", "parsed_arguments", "a_new_member"):
        called = call("c1")
        called["function"] |= {member: 1}
        entry = message(role="assistant", content=None, tool_calls=[called])
        new = member == "a_new_member"
        assert entry.sealed == ("messages[].tool_calls[].function.a_new_member" if new else "")


def test_excluded_tools_are_never_moved() -> None:
    raws = (ASKS, tool("a" * 5000, "c1"), tool("b" * 5000, "c2"))
    found = history(*raws, offload=Offload(exclude_tools=("fet*",))).items
    assert found[1].preview < found[1].tokens
    assert found[2].preview == found[2].first_preview == found[2].tokens
    assert not found[2].stays, (
        "a cut replaces it: else a tool that is called in every step would leave nothing to cut"
    )


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=20,
    )
)
def test_nothing_but_unplannable_is_raised(value: Any) -> None:
    for raw in (
        rawjson.encode(value) if not _huge(value) else b"0",
        json.dumps({"role": "user", "content": value}).encode(),
    ):
        with contextlib.suppress(Unplannable):
            CHAT.read(raw, READING, words)


def _huge(value: Any) -> bool:
    return "int" in type(value).__name__ and abs(value) >= 2**63
