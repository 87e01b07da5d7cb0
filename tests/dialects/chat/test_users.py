"""User messages in a row become one; nothing of them is lost, and nothing else is touched."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.dialects.chat import CHAT

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
        (["a", [IMAGE], [IMAGE], [part("b"), part("c")]], [part("a"), IMAGE, IMAGE, part("\n\nb"), part("c")]),
        ([[], "b"], [part("b")]),
    ],
)
def test_contents_follow_one_another_with_a_blank_line_between_texts(contents: list[Any], together: Any) -> None:
    [one] = CHAT.joined([user(content) for content in contents])
    assert json.loads(one) == {"role": "user", "content": together}


def test_texts_keep_the_spelling_of_their_characters() -> None:
    [one] = CHAT.joined([b'{"role":"user","content":"caf\\u00e9 \\ud83d"}', b'{"role":"user","content":"\\/"}'])
    assert one == b'{"role":"user","content":"caf\\u00e9 \\ud83d\\n\\n\\/"}'


def test_members_of_all_are_kept() -> None:
    [one] = CHAT.joined([user("a", **MARK), user("b")])
    assert json.loads(one) == {"role": "user", "content": "a\n\nb", **MARK}


@pytest.mark.parametrize("odd", [user("a", expires=1), user([part("a", new=1)]), user([{"type": "new"}])])
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
