"""How servers stream tool calls, and what a client sees of it: a table of ways, each with the same
calls in it.

The usual ways are the encodings of chat in `tests/dialects/contract/apis.py`.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.dialects.chat.turns import (
    ANSWER,
    Json,
    called,
    calls,
    chunk,
    events,
    folded,
    made,
    more,
    stream,
    turn,
    whole,
)
from tests.dialects.turning import feed, receive, run


def said(*entries: Json) -> bytes:
    """A reply with these entries of `tool_calls`, each in an event of its own."""
    return stream(*(chunk(calls(entry)) for entry in entries), chunk({}, "tool_calls"))


def shown(out: bytes) -> list[Json]:
    """The entries of `tool_calls` that the client gets."""
    deltas = [choice["delta"] for one in events(out) for choice in one["choices"]]
    return [entry for delta in deltas for entry in delta.get("tool_calls", [])]


def named(name: str | None = None, arguments: Any = None, **members: Any) -> Json:
    function = {
        key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None
    }
    return {**members, "function": function}


def put_back(one: Any) -> list[Json]:
    """The calls of a mixed turn as they go back upstream."""
    assert one.hidden is not None
    [reply] = json.loads(one.hidden.instead)
    found: list[Json] = reply["tool_calls"]
    return found


# Each of these says: call a is the client's `search` with {"q":1}, call b ours, `grep` with
# {"p":2}.
WAYS: dict[str, list[Json]] = {
    "interleaved": [called("search", '{"q":', "a", 0), called("grep", '{"p":', "b", 1), more("1}", 0), more("2}", 1)],
    "no index, the id each time": [
        named("search", '{"q":', id="a"), named(arguments="1}", id="a"),
        named("grep", '{"p":', id="b"), named(arguments="2}", id="b"),
    ],
    "index null": [named("search", '{"q":1}', id="a", index=None), named("grep", '{"p":2}', id="b", index=None)],
    "index from 1": [called("search", '{"q":1}', "a", 1), called("grep", '{"p":2}', "b", 2)],
    "odd indexes": [called("search", '{"q":1}', "a", -1), called("grep", '{"p":2}', "b", 123456789012345678901)],
    "indexes as text": [
        called("search", '{"q":1}', "a") | {"index": "0"}, called("grep", '{"p":2}', "b") | {"index": "1"},
    ],
    "an index that moves on within a call": [
        called("search", '{"q":', "a", 0), more("1}", 1), called("grep", '{"p":', "b", 2), more("2}", 3),
    ],
    "a new id each time": [
        called("search", '{"q":', "a", 0), named(arguments="1}", id="x", index=0),
        called("grep", '{"p":', "b", 1), named(arguments="2}", id="y", index=1),
    ],
    "the name behind the arguments": [
        named(arguments='{"q":1}', index=0, id="a"), named("search", index=0),
        named(arguments='{"p":2}', index=1, id="b"), named("grep", index=1),
    ],
    "the id behind the name": [
        named("search", index=0), named(arguments='{"q":1}', index=0, id="a"),
        named("grep", index=1), named(arguments='{"p":2}', index=1, id="b"),
    ],
    "arguments as an object": [called("search", '{"q":1}', "a", 0), named("grep", {"p": 2}, index=1, id="b")],
    "nulls": [
        called("search", '{"q":1}', "a", 0),
        {"index": 0, "id": None, "type": None, "function": None},
        called("grep", '{"p":2}', "b", 1),
        {"index": 1, "id": None, "type": None, "function": {"name": None, "arguments": None}},
    ],
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_ways_to_stream(way: list[Json]) -> None:
    one = turn()
    out, _ = run(one, said(*way))
    assert [call[1:] for call in made(folded(out))] == [("search", '{"q":1}')]
    assert [(call.id, call.name, call.arguments) for call in one.visible[1]] == [
        ("a", "search", '{"q":1}')
    ]
    back = [
        (call["id"], call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in put_back(one)
    ]
    assert back == [("a", "search", {"q": 1}), ("b", "grep", {"p": 2})]


def test_calls_that_have_neither_id_nor_index() -> None:
    """A new one begins where a name comes and the last one has arguments already."""
    one = turn()
    pieces = [("sea", None), ("rch", '{"q":'), (None, "1}"), ("grep", "{}"), ("search", "{}")]
    run(one, said(*(named(name, arguments) for name, arguments in pieces)))
    back = [(call["function"]["name"], call["function"]["arguments"]) for call in put_back(one)]
    assert back == [("search", '{"q":1}'), ("grep", "{}"), ("search", "{}")]


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
    one = turn()
    one.request()
    moments = {
        "at once": receive(one, stream(chunk(calls(called(name, ""))))),
        "with its arguments": receive(one, stream(chunk(calls(more("{}"))))),
        "at the end": feed(one, stream(chunk({}, "tool_calls"))),
    }
    assert next((moment for moment, out in moments.items() if shown(out)), "never") == when


@pytest.mark.parametrize(
    ("way", "injected"),
    [
        ([called("grep", "", "a"), named("_files", index=0), more("{}")], True),
        ([called("grep", "{}", "a", 7), named("read_file", "{}"), {"function": {}}], False),
        ([{"index": 0, "function": {"arguments": "{}"}}], True),
    ],
    ids=["a name that is ours only in part", "no tool is ours", "a first delta with nothing"],
)
def test_what_is_not_ours_stays_as_it_came(way: list[Json], injected: bool) -> None:
    assert shown(run(turn(injected=injected), said(*way))[0]) == way


def test_whole_replies_have_one_entry_for_each_call() -> None:
    entries = [
        named("search", "{}"),
        named("search", "{}"),
        named("grep", "{}"),
        called("search", "{}", "x", 3),
    ]
    one = turn(stream=False)
    out, _ = run(one, whole(calls(*entries), "tool_calls"))
    assert [call.get("id") for call in json.loads(out)["choices"][0]["message"]["tool_calls"]] == [
        None,
        None,
        "x",
    ]
    assert len(put_back(one)) == 4 and one.hidden is not None and len(one.hidden.after) == 1


def test_custom_tools_are_the_clients() -> None:
    first = {"index": 0, "id": "a", "type": "custom", "custom": {"name": "patch", "input": "fr"}}
    rest = {"index": 0, "custom": {"input": "ee"}}
    one = turn()
    out, _ = run(one, said(first, rest, {"index": 0}, called("grep", "{}", "b", 1)))
    assert shown(out) == [first, rest, {"index": 0}]
    assert [(call.name, call.arguments) for call in one.visible[1]] == [("patch", "free")]
    assert put_back(one)[0] == {
        "id": "a",
        "type": "custom",
        "custom": {"name": "patch", "input": "free"},
    }


def test_a_call_as_it_goes_back() -> None:
    """Every member but the index, strings joined; what no JSON encoder takes is escaped as it
    came."""
    first = {
        "index": 0,
        "function": {"name": "grep", "strict": True},
        "extra": {"n": 1},
        "id": None,
        "x": None,
    }
    _, requests = run(turn(), said(first, more('{"p":"\ud83d'), more('\ude00\ud800"}')), ANSWER)
    [call] = requests[1]["messages"][1]["tool_calls"]
    function = {"name": "grep", "strict": True, "arguments": '{"p":"😀\ud800"}'}
    assert call.pop("id")  # it was given one
    assert call == {"type": "function", "extra": {"n": 1}, "function": function}
