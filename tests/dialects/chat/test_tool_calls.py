"""How servers stream tool calls, and what a client sees of it: a table of ways, each with the same calls in it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy import sse
from proxy.dialects.chat.chunks import PartialCall
from tests.dialects.chat.turns import Json, called, calls, chunk, events, more, stream, turn, whole


class Reply:
    """A reply with these entries of `tool_calls`, each in an event of its own."""

    def __init__(self, *entries: Json, injected: bool = True) -> None:
        self._turn = turn(injected=injected)
        self._turn.request()
        self.shown: list[Json] = []
        for entry in entries:
            self.take(entry)
        if entries:
            self.end()

    def take(self, entry: Json) -> bool:
        """Whether the client sees anything now."""
        return self._add(self._sent(stream(chunk(calls(entry)))))

    def end(self) -> bool:
        return self._add(self._sent(stream(chunk({}, "tool_calls"))) + self._turn.end())

    def _sent(self, raw: bytes) -> bytes:
        return b"".join(map(self._turn.receive, sse.EventDecoder().feed(raw)))

    def _add(self, out: bytes) -> bool:
        deltas = [choice["delta"] for one in events(out) for choice in one["choices"]]
        found = [entry for delta in deltas for entry in delta.get("tool_calls", [])]
        self.shown += found
        return bool(found)

    @property
    def all(self) -> list[PartialCall]:
        return self._turn._round.blocks

    @property
    def ours(self) -> list[PartialCall]:
        return list(self._turn._round.ours)

    @property
    def theirs(self) -> list[PartialCall]:
        return self._turn._round.theirs


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
    reply = Reply(*way)
    assert [(one.id, one.name, json.loads(one.arguments)) for one in reply.theirs] == [("a", "search", {"q": 1})]
    assert [(one.id, one.name, json.loads(one.arguments)) for one in reply.ours] == [("b", "grep", {"p": 2})]
    assert {one["index"] for one in reply.shown} == {0}
    pieces = [(one.get("function") or {}).get("arguments") or "" for one in reply.shown]
    assert "".join(pieces) == '{"q":1}'


def test_calls_that_have_neither_id_nor_index() -> None:
    """A new one begins where a name comes and the last one has arguments already."""
    reply = Reply(
        named("sea"), named("rch", '{"q":'), named(arguments="1}"), named("grep", "{}"), named("search", "{}")
    )
    assert [(call.name, call.arguments) for call in reply.all] == [
        ("search", '{"q":1}'),
        ("grep", "{}"),
        ("search", "{}"),
    ]


def test_the_first_delta_may_have_nothing() -> None:
    assert Reply({"function": {"arguments": "{}"}}).shown == [{"index": 0, "function": {"arguments": "{}"}}]


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
    reply = Reply()
    shown = {
        "at once": reply.take(called(name, "")),
        "with its arguments": reply.take(more("{}")),
        "at the end": reply.end(),
    }
    first = next((moment for moment, yes in shown.items() if yes), "never")
    assert first == when


def test_a_name_that_is_ours_only_in_part() -> None:
    way = [called("grep", "", "a"), named("_files", index=0), more("{}")]
    reply = Reply(*way)
    assert reply.shown == way
    assert reply.theirs[0].name == "grep_files"


def test_where_no_tool_is_ours_nothing_is_touched() -> None:
    way: list[Json] = [called("grep", "{}", "a", 7), named("read_file", "{}"), {"function": {}}]
    assert Reply(*way, injected=False).shown == way


def test_whole_replies_have_one_entry_for_each_call() -> None:
    entries = [named("search", "{}"), named("search", "{}"), named("grep", "{}"), called("search", "{}", "x", 3)]
    one = turn(stream=False)
    one.request()
    one.receive_whole(whole(calls(*entries), "tool_calls"))
    one.end()
    assert [len(one._round.theirs), len(one._round.ours)] == [3, 1]
    one.answer(["found"])
    shown = json.loads(one.close())["choices"][0]["message"]["tool_calls"]
    assert [call.get("id") for call in shown] == [None, None, "x"]


def test_custom_tools_are_the_clients() -> None:
    first = {"index": 0, "id": "a", "type": "custom", "custom": {"name": "grep", "input": "fr"}}
    rest = {"index": 0, "custom": {"input": "ee"}}
    reply = Reply(first, rest, {"index": 0})
    assert reply.shown == [first, rest, {"index": 0}]
    [call] = reply.theirs
    assert (call.call().name, call.call().arguments) == ("grep", "free")
    assert json.loads(bytes(call.raw())) == {"id": "a", "type": "custom", "custom": {"name": "grep", "input": "free"}}


def test_a_call_as_it_goes_back() -> None:
    """Every member but the index, strings joined; what no JSON encoder takes is escaped as it came."""
    first = {"index": 0, "function": {"name": "grep", "strict": True}, "extra": {"n": 1}, "id": None, "x": None}
    reply = Reply(first, more('{"p":"\ud83d'), more('\ude00\ud800"}'))
    [call] = reply.ours
    function = {"name": "grep", "strict": True, "arguments": '{"p":"😀\ud800"}'}
    made = json.loads(bytes(call.raw()))
    assert made.pop("id")  # it was given one
    assert made == {"type": "function", "extra": {"n": 1}, "function": function}
