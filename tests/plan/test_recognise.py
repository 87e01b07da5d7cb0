"""What a client may have made of a reply, and what is another reply."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.plan.plan import ToolCall
from proxy.plan.recognise import Visible, plain, resembles

RANDOM = "call_Zk3f9TqLm2Xw8RbV"
OTHER_RANDOM = "call_Pq8d1WnSx5Yt6HcG"


def call(id: str, name: str = "look", **arguments: Any) -> ToolCall:
    return ToolCall(id, name, json.dumps(arguments))


def reply(text: str, *calls: ToolCall) -> Visible:
    return Visible(text, calls)


ONE = reply("I look.", call("call_0", path="a.txt", limit=3))
TWO = reply("", call("call_0", path="a.txt"), call("call_1", path="b.txt"))
OWN = reply("I look.", call(RANDOM, path="a.txt"))
THOUGHT = reply("<think>\nHm, </b>\n</think>\n\nIt is  42.\n")

SMOLAGENTS = (
    "I look.\nCalling tools:\n[{'id': 'call_0', 'type': 'function', 'function': {'name': 'look', 'arguments':"
    " {'path': 'a.txt', 'limit': 3}}}]"
)

CODE = "I look.\n<code>\nlook('a.txt')"
CODE_CALL = "\nCalling tools:\n[{'id': 'call_7', 'function': {'name': 'python', 'arguments': \"look('a.txt')\"}}]"

REWRITTEN: dict[str, tuple[Visible, Visible]] = {
    "as it was": (ONE, ONE),
    "text dropped": (ONE, reply("", *ONE.calls)),
    "text trimmed": (reply("I look.\n\n", *ONE.calls), reply(" I look.", *ONE.calls)),
    "parts of a text trimmed": (reply("I look.\n\nIt is 42."), reply("I look.It is 42.")),
    "parts of a text joined": (
        reply("I look.It is 42.", *ONE.calls),
        reply("I look.\nIt is 42.", *ONE.calls),
    ),
    "arguments reordered": (
        ONE,
        reply("", ToolCall("call_0", "look", '{ "limit":3,"path":"a.txt"}')),
    ),
    "a defaulted argument added": (
        ONE,
        reply("", call("call_0", path="a.txt", limit=3, deep=False, glob="")),
    ),
    "its own name added": (ONE, reply("", call("call_0", path="a.txt", limit=3, request="look"))),
    "an argument left out, with an id of its own": (OWN, reply("", call(RANDOM))),
    "a text added, with an id of its own": (OWN, reply("(edited)", *OWN.calls)),
    "nulls left out": (
        reply("", call("", a={"b": None, "c": [{"d": None}]}, e=1)),
        reply("", call("", a={"c": [{}]}, e=1)),
    ),
    "nulls written out": (
        reply("Hi.", call("", a={"c": 1})),
        reply("Hi.", call("", a={"b": None, "c": 1}, d=None)),
    ),
    "the first call kept": (TWO, reply("", TWO.calls[0])),
    "the second call kept": (TWO, reply("", TWO.calls[1])),
    "calls reordered": (TWO, reply("", *reversed(TWO.calls))),
    "new ids beside the text": (ONE, reply("I look.", call("x", path="a.txt", limit=3))),
    "ids of another kind": (OWN, reply("", call("Ab3dE6gH9", path="a.txt"))),
    "ids numbered anew": (OWN, reply("", call("call_12", path="a.txt"))),
    "calls dropped beside the text": (ONE, reply("I look.")),
    "calls as text": (ONE, reply(SMOLAGENTS)),
    "calls as JSON text": (
        TWO,
        reply(json.dumps([{"id": "call_0", "name": "look", "args": {"path": "a.txt"}}])),
    ),
    "a call made of the text": (reply(CODE), reply(CODE + "\n</code>" + CODE_CALL)),
    "the tag closed at which the model stopped": (reply(CODE), reply(CODE + "</code>")),
    "thinking stripped": (THOUGHT, reply("It is 42.")),
    "thinking left in": (reply("It is 42."), THOUGHT),
    "thinking that the template opened": (reply("Hm.</think>It is 42."), reply("It is 42.")),
}

OTHERS: dict[str, tuple[Visible, Visible]] = {
    "nothing left": (ONE, reply("")),
    "nothing at all": (reply(""), reply("")),
    "another text": (reply("It is 42."), reply("It is 43.")),
    "another text beside the same call": (ONE, reply("I search.", *ONE.calls)),
    "another tool": (ONE, reply("", call("call_0", "list", path="a.txt", limit=3))),
    "other arguments": (ONE, reply("", call("call_0", path="b.txt", limit=3))),
    "other arguments and the text": (ONE, reply("I look.", call("call_0", path="b.txt", limit=3))),
    "other arguments, with an id of its own": (OWN, reply("", call(RANDOM, path="b.txt"))),
    "an argument that is no default": (
        ONE,
        reply("", call("call_0", path="a.txt", limit=3, glob="*.md")),
    ),
    "a null for an argument": (ONE, reply("", call("call_0", path="a.txt", limit=None))),
    "an argument left out": (ONE, reply("", call("call_0", path="a.txt"))),
    "an id of the same kind": (OWN, reply("", call(OTHER_RANDOM, path="a.txt"))),
    "the next number": (ONE, reply("", call("call_1", path="a.txt", limit=3))),
    "one more call": (ONE, reply("", *ONE.calls, call("call_1", path="b.txt"))),
    "the same call twice": (ONE, reply("", *ONE.calls, *ONE.calls)),
    "a new call": (reply("I look."), reply("I look.", call("call_0", path="a.txt"))),
    "another call as text": (ONE, reply(SMOLAGENTS.replace("a.txt", "b.txt"))),
    "another text before calls as text": (ONE, reply(SMOLAGENTS.replace("I look.", "I search."))),
    "a longer text": (reply("I look."), reply("I look. Then I search.")),
    "a list after the text": (reply("I look."), reply("I look.\nFiles:\n[{'name': 'a.txt'}]")),
    "a call made of another text": (reply(CODE), reply(CODE.replace("a.txt", "b.txt") + CODE_CALL)),
    "a call made of nothing": (reply(""), reply(CODE_CALL)),
    "only thinking": (reply("<think>Hm.</think>"), reply("<think>Well.</think>")),
}


@pytest.mark.parametrize("how", REWRITTEN)
def test_a_reply_that_its_client_has_rewritten(how: str) -> None:
    seen, sent = REWRITTEN[how]
    assert resembles(seen, sent)


@pytest.mark.parametrize("how", OTHERS)
def test_another_reply_to_the_same_history(how: str) -> None:
    seen, sent = OTHERS[how]
    assert not resembles(seen, sent)


def test_arguments_that_are_no_json_are_compared_as_they_are() -> None:
    patch = reply("", ToolCall("call_0", "patch", "*** Begin\n"))
    assert resembles(patch, reply("", ToolCall("call_0", "patch", "*** Begin")))
    assert not resembles(patch, reply("", ToolCall("call_0", "patch", "*** End")))
    deep = reply("", ToolCall("call_0", "patch", "[" * 900 + "null" + "]" * 900))
    assert resembles(deep, deep)
    deep = reply("", ToolCall("call_0", "patch", "[" * 100_000))
    assert resembles(deep, deep)


def test_long_texts_take_linear_time() -> None:
    """Each of these would take minutes otherwise."""
    for text in ("<think>" * 200_000, "</think>" * 200_000, "<think></think>" * 100_000):
        plain(text)
    for tail in ("</a" * 300_000, "[" + "'name" * 200_000 + "]"):
        assert not resembles(reply("I look."), reply("I look." + tail))
    endless = reply("", call("a" * 1_000_000, path="x" * 1_000_000))
    assert not resembles(endless, reply("'" * 1_000_000))


def test_replies_with_many_calls_or_long_texts_are_not_compared() -> None:
    """Each call would be compared with each, and looked for in the whole text, on the event
    loop."""
    many = reply("", *(call("call_0", number=number) for number in range(20_000)))
    assert not resembles(many, reply("", *reversed(many.calls)))
    said = "".join(f"'call_{number}' look {number} " for number in range(20_000))
    assert not resembles(
        reply("", *(call(f"call_{number}", n=-1) for number in range(32))), reply(said * 10)
    )
