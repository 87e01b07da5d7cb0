"""Messages that we change as a whole: replies with hidden rounds put back, and user messages that
become one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.dialects.chat import CHAT
from proxy.plan.recognise import Hidden
from tests.dialects.chat.turns import Json

# -- hidden rounds beside replies that the client has rewritten: calls and results still pair ------


def call(id: str, name: str = "look", arguments: str = '{"path":"a"}') -> Json:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def message(content: Any, *calls: Json) -> bytes:
    return json.dumps(
        {"role": "assistant", "content": content} | ({"tool_calls": calls} if calls else {})
    ).encode()


OURS, FIRST, SECOND = call("h1", "grep"), call("c1"), call("c2", arguments='{"path":"b"}')
ANSWER = json.dumps({"role": "tool", "tool_call_id": "h1", "content": "found"}).encode()
WROTE = message("I look.", FIRST, OURS, SECOND)
MIXED = Hidden((), b"[%b]" % WROTE, (ANSWER,))


@pytest.mark.parametrize("content", ["I look.", None, "edited"])
def test_the_models_own_words_return_byte_for_byte_while_the_calls_are_the_same(
    content: Any,
) -> None:
    visible = message(content, FIRST, SECOND)
    assert CHAT.reinserted(CHAT.paired(MIXED, visible), visible) == [WROTE, ANSWER]


REWRITTEN = [
    message(None, FIRST),
    message("I look.", FIRST | {"id": "new1"}, SECOND | {"id": "new2"}),
    message("I look. Calling tools: ['c1', 'c2']"),
    message(None, call("h1")),
    message(None, call("c1", "list")),
]
"""A call less, other ids, calls as text, an id of our call, another tool."""


@pytest.mark.parametrize("visible", REWRITTEN)
def test_calls_that_the_client_rewrote_stay_as_it_sent_them_behind_ours(visible: bytes) -> None:
    asking, answer, last = CHAT.reinserted(CHAT.paired(MIXED, visible), visible)
    assert json.loads(asking) == {"role": "assistant", "content": None, "tool_calls": [OURS]}
    assert (json.loads(answer), last) == (json.loads(ANSWER), visible)
    before = (message("Let me see.", OURS), ANSWER)
    spoken = Hidden(before, b"[%b]" % message("I look.", FIRST, SECOND), ())
    assert CHAT.reinserted(CHAT.paired(spoken, visible), visible) == [*before, visible]


@pytest.mark.parametrize("visible", [message("It is 42."), message(None, FIRST)])
def test_a_reply_that_the_client_saw_whole_stays_as_it_sent_it(visible: bytes) -> None:
    hidden = Hidden((message(None, OURS), ANSWER), None, ())
    assert CHAT.reinserted(hidden, visible) == [*hidden.before, visible]


# -- user messages in a row: nothing of them is lost, and nothing else is touched ------------------

IMAGE = {"type": "image_url", "image_url": {"url": "data:,x"}}
MARK = {"cache_control": {"type": "ephemeral"}}


def user(content: Any, **more: Any) -> bytes:
    return json.dumps({"role": "user", "content": content, **more}).encode()


def part(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


@pytest.mark.parametrize(
    ("contents", "together"),
    [
        (["a", "b", "c"], "a\n\nb\n\nc"),
        (["a", "", None, "c"], "a\n\nc"),
        ([None, None], ""),
        (["a", [part("b", **MARK)]], [part("a"), part("\n\nb", **MARK)]),
        ([[part("a", **MARK)], "b"], [part("a", **MARK), part("\n\nb")]),
        ([[part("a"), IMAGE], "b"], [part("a"), IMAGE, part("\n\nb")]),
        (
            ["a", [IMAGE], [IMAGE], [part("b"), part("c")]],
            [part("a"), IMAGE, IMAGE, part("\n\nb"), part("c")],
        ),
        ([[], "b"], [part("b")]),
    ],
)
def test_contents_follow_one_another_with_a_blank_line_between_texts(
    contents: list[Any], together: Any
) -> None:
    [one] = CHAT.joined([user(content) for content in contents])
    assert json.loads(one) == {"role": "user", "content": together}


def test_texts_keep_the_spelling_of_their_characters() -> None:
    [one] = CHAT.joined(
        [b'{"role":"user","content":"caf\\u00e9 \\ud83d"}', b'{"role":"user","content":"\\/"}']
    )
    assert one == b'{"role":"user","content":"caf\\u00e9 \\ud83d\\n\\n\\/"}'


def test_members_of_all_are_kept() -> None:
    [one] = CHAT.joined([user("a", **MARK), user("b")])
    assert json.loads(one) == {"role": "user", "content": "a\n\nb", **MARK}


@pytest.mark.parametrize(
    "odd", [user("a", expires=1), user([part("a", new=1)]), user([{"type": "new"}])]
)
def test_what_we_do_not_know_is_not_joined(odd: bytes) -> None:
    assert CHAT.joined([odd, user("b"), odd]) == [odd, user("b"), odd]


def test_different_names_and_roles_stay_apart() -> None:
    ann, bob, nobody = user("a", name="ann"), user("b", name="bob"), user("c")
    assert CHAT.joined([ann, bob, nobody]) == [ann, bob, nobody]
    reply, odd = b'{"role":"assistant","content":"x"}', user({"text": "?"})
    assert CHAT.joined([ann, reply, ann, odd, ann]) == [ann, reply, ann, odd, ann]
    first, second = CHAT.joined([reply, ann, ann])
    assert first == reply and json.loads(second)["content"] == "a\n\na"


@pytest.mark.parametrize("messages", [[], [user("a")], [b'{ "role" : "user" }']])
def test_one_message_keeps_its_bytes(messages: list[bytes]) -> None:
    assert CHAT.joined(messages) == messages
