"""How servers stream tool calls, and what a client sees of it: a table of ways, each with the same calls in it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy import rawjson
from proxy.dialects.chat.reply import CallDelta
from proxy.dialects.chat.tool_calls import ToolCalls
from tests.dialects.chat.turns import Json, called, more

NAMES = ("grep", "read_file")


def taken(calls: ToolCalls, *entries: Json, whole: bool = False) -> list[Json]:
    """What the client sees, each entry having come in an event of its own; or all in one."""
    deltas = [CallDelta(rawjson.members(json.dumps(entry).encode())) for entry in entries]
    steps = [deltas] if whole else [[delta] for delta in deltas]
    shown = [one for step in steps for one in calls.take(step, whole=whole)]
    return [json.loads(rawjson.encode(one)) for one in [*shown, *calls.settle()]]


def named(name: str | None = None, arguments: Any = None, **members: Any) -> Json:
    function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None}
    return {**members, "function": function}


# Each of these says: call a is the client's `search` with {"q":1}, call b ours, `grep` with {"p":2}.
WAYS: dict[str, list[Json]] = {
    "OpenAI": [
        called("search", "", "a", 0),
        more('{"q":', 0),
        more("1}", 0),
        called("grep", "", "b", 1),
        more('{"p":', 1),
        more("2}", 1),
    ],
    "at once": [called("search", '{"q":1}', "a", 0), called("grep", '{"p":2}', "b", 1)],
    "interleaved": [
        called("search", '{"q":', "a", 0),
        called("grep", '{"p":', "b", 1),
        more("1}", 0),
        more("2}", 1),
    ],
    "no index": [
        named("search", "", id="a"),
        named(arguments='{"q":1}'),
        named("grep", "", id="b"),
        named(arguments='{"p":2}'),
    ],
    "no index, the id each time": [
        named("search", '{"q":', id="a"),
        named(arguments="1}", id="a"),
        named("grep", '{"p":', id="b"),
        named(arguments="2}", id="b"),
    ],
    "index null": [
        named("search", '{"q":1}', id="a", index=None),
        named("grep", '{"p":2}', id="b", index=None),
    ],
    "always index 0": [called("search", '{"q":1}', "a", 0), called("grep", '{"p":', "b", 0), more("2}", 0)],
    "index from 1": [called("search", '{"q":1}', "a", 1), called("grep", '{"p":2}', "b", 2)],
    "odd indexes": [
        called("search", '{"q":1}', "a", -1),
        called("grep", '{"p":2}', "b", 123456789012345678901),
    ],
    "indexes as text": [
        called("search", '{"q":1}', "a") | {"index": "0"},
        called("grep", '{"p":2}', "b") | {"index": "1"},
    ],
    "an index that moves on within a call": [
        called("search", '{"q":', "a", 0),
        more("1}", 1),
        called("grep", '{"p":', "b", 2),
        more("2}", 3),
    ],
    "a new id each time": [
        called("search", '{"q":', "a", 0),
        named(arguments="1}", id="x", index=0),
        called("grep", '{"p":', "b", 1),
        named(arguments="2}", id="y", index=1),
    ],
    "the name again and again": [
        called("search", "", "a", 0),
        called("search", '{"q":', "a", 0),
        called("search", "1}", "a", 0),
        called("grep", "", "b", 1),
        called("grep", '{"p":', "b", 1),
        called("grep", "2}", "b", 1),
    ],
    "the name in pieces": [
        called("sea", "", "a", 0),
        named("rch", index=0),
        more('{"q":1}', 0),
        called("gr", "", "b", 1),
        named("ep", index=1),
        more('{"p":2}', 1),
    ],
    "the name behind the arguments": [
        named(arguments='{"q":1}', index=0, id="a"),
        named("search", index=0),
        named(arguments='{"p":2}', index=1, id="b"),
        named("grep", index=1),
    ],
    "the id behind the name": [
        named("search", index=0),
        {"index": 0, "id": "a", "function": {"arguments": '{"q":1}'}},
        named("grep", index=1),
        {"index": 1, "id": "b", "function": {"arguments": '{"p":2}'}},
    ],
    "arguments as an object": [called("search", '{"q":1}', "a", 0), named("grep", {"p": 2}, index=1, id="b")],
    "nulls": [
        called("search", '{"q":1}', "a", 0),
        {"index": 0, "id": None, "type": None, "function": None},
        called("grep", '{"p":2}', "b", 1),
        {"index": 1, "id": None, "type": None, "function": {"name": None, "arguments": None}},
    ],
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_ways_to_stream(way: list[Json]) -> None:
    calls = ToolCalls(NAMES, numbered=True)
    shown = taken(calls, *way)
    assert [(one.id, one.name, json.loads(one.arguments)) for one in calls.theirs] == [("a", "search", {"q": 1})]
    assert [(one.id, one.name, json.loads(one.arguments)) for one in calls.ours] == [("b", "grep", {"p": 2})]
    assert {one["index"] for one in shown} == {0}
    pieces = [(one.get("function") or {}).get("arguments") or "" for one in shown]
    assert "".join(pieces) == '{"q":1}'


def test_calls_that_have_neither_id_nor_index() -> None:
    """A new one begins where a name comes and the last one's arguments are an object already."""
    calls = ToolCalls(NAMES, numbered=True)
    taken(calls, named("search", '{"q":'), named("search", "1}"), named("grep", "{}"), named("search", "{}"))
    assert [(call.name, call.arguments) for call in calls.all] == [
        ("search", '{"q":1}'),
        ("grep", "{}"),
        ("search", "{}"),
    ]


def test_the_first_delta_may_have_nothing() -> None:
    calls = ToolCalls(NAMES, numbered=True)
    assert taken(calls, {"function": {"arguments": "{}"}}) == [{"index": 0, "function": {"arguments": "{}"}}]


NAMED = {
    "search": "at once",
    "grep_files": "at once",
    "re": "with its arguments",
    "grep": "never",
    "read_file": "never",
    "Grep": "never",
    "": "at the end",
}


@pytest.mark.parametrize(("name", "when"), NAMED.items())
def test_when_a_call_is_shown(name: str, when: str) -> None:
    calls = ToolCalls(NAMES, numbered=True)

    def take(entry: Json) -> bool:
        return bool(calls.take([CallDelta(rawjson.members(json.dumps(entry).encode()))]))

    shown = {
        "at once": take(called(name, "")),
        "with its arguments": take(more("{}")),
        "at the end": bool(calls.settle()),
    }
    first = next((moment for moment, yes in shown.items() if yes), "never")
    assert first == when


def test_a_name_that_is_ours_only_in_part() -> None:
    calls = ToolCalls(NAMES, numbered=True)
    way = [called("grep", "", "a"), named("_files", index=0), more("{}")]
    assert taken(calls, *way) == way
    assert calls.theirs[0].name == "grep_files"


def test_where_no_tool_is_ours_nothing_is_touched() -> None:
    calls = ToolCalls((), numbered=True)
    way: list[Json] = [called("grep", "{}", "a", 7), named("read_file", "{}"), {"function": {}}]
    assert taken(calls, *way) == way


def test_whole_replies_have_one_entry_for_each_call() -> None:
    calls = ToolCalls(NAMES, numbered=False)
    entries = [named("search", ""), named("search", ""), named("grep", "{}"), called("search", "{}", "x", 3)]
    shown = taken(calls, *entries, whole=True)
    assert shown == [entries[0], entries[1], entries[3]]
    assert len(calls.theirs) == 3 and len(calls.ours) == 1


def test_custom_tools_are_the_clients() -> None:
    calls = ToolCalls(NAMES, numbered=True)
    first = {"index": 0, "id": "a", "type": "custom", "custom": {"name": "grep", "input": "fr"}}
    rest = {"index": 0, "custom": {"input": "ee"}}
    assert taken(calls, first, rest, {"index": 0}) == [first, rest, {"index": 0}]
    [call] = calls.theirs
    assert (call.call().name, call.call().arguments) == ("grep", "free")
    assert json.loads(bytes(call.raw())) == {"id": "a", "type": "custom", "custom": {"name": "grep", "input": "free"}}


def test_a_call_as_it_goes_back() -> None:
    """Every member but the index, strings joined; what no JSON encoder takes is escaped as it came."""
    calls = ToolCalls(NAMES, numbered=True)
    taken(calls, {"index": 0, "function": {"name": "grep", "strict": True}, "extra": {"n": 1}, "id": None, "x": None})
    taken(calls, more('{"p":"\ud83d'), more('\ude00\ud800"}'))
    [call] = calls.ours
    function = {"name": "grep", "strict": True, "arguments": '{"p":"😀\ud800"}'}
    assert json.loads(bytes(call.raw())) == {"type": "function", "extra": {"n": 1}, "function": function}
