"""JSON is UTF-8 (RFC 8259, 8.1), but msgspec checks only the strings that it decodes: a body is checked as a whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from proxy import rawjson
from proxy.dialects import Dialect
from proxy.dialects.chat import CHAT
from proxy.dialects.messages import MESSAGES
from proxy.dialects.responses import RESPONSES
from proxy.dialects.turn import Turn
from proxy.plan.turn import Broken, Reason, State, Unplannable
from proxy.rawjson import NotJson
from tests.dialects.chat import turns as chat
from tests.dialects.messages import turns as messages
from tests.dialects.responses import turns as responses
from tests.dialects.turning import receive
from tests.requests.scripted import ScriptedReply
from tests.requests.test_handler import HELLO, World, world

__all__ = ["world"]

NO_UTF8 = (b"\x9e", b"\xed\xa0\x80", b"\xc3")
"""A byte from the middle of a character, half a surrogate pair, and a character without its end."""
ARGUMENTS = '{"pattern": "x"}'
BODIES: dict[Dialect, dict[str, Any]] = {
    CHAT: {"model": "m", "messages": [{"role": "tool", "tool_call_id": "a", "content": "hi"}], "user": "u"},
    MESSAGES: {"model": "m", "max_tokens": 9, "system": "s", "messages": [{"role": "user", "content": "hi"}]},
    RESPONSES: {"model": "m", "instructions": "s", "input": [{"type": "message", "role": "user", "content": "hi"}]},
}


@pytest.mark.parametrize("dialect", BODIES, ids=lambda dialect: dialect.name)
def test_a_request_with_such_a_byte_anywhere_is_left_alone(dialect: Dialect) -> None:
    """A bug once answered such a role with 500, because reading the message failed a second time."""
    body = json.dumps(BODIES[dialect]).encode()
    assert dialect.parse(body).model == "m"
    for place in range(len(body)):
        for odd in NO_UTF8:
            with pytest.raises(Unplannable):
                dialect.parse(body[:place] + odd + body[place + 1 :])


async def test_it_goes_upstream_as_it_came(world: World) -> None:
    body = json.dumps(BODIES[CHAT]).encode().replace(b"tool", b"\x9eool", 1)
    client, outcome = await world.ask(body, ScriptedReply(HELLO))
    assert (client.status, outcome.reason, world.sent) == (200, Reason.INVALID, [body])


def _called_in_messages() -> Any:
    call = {"type": "tool_use", "name": "grep", "input": json.loads(ARGUMENTS)}
    return messages.message({"type": "text", "text": "Look"}, call)


def _called_in_responses() -> Any:
    return responses.response({"type": "function_call", "name": "grep", "arguments": ARGUMENTS, "status": "completed"})


REPLIES: dict[str, tuple[Callable[..., Turn], bytes]] = {
    "chat, streamed": (chat.turn, chat.OURS),
    "chat, whole": (chat.turn, chat.whole(chat.calls(chat.called("grep", ARGUMENTS)), "tool_calls")),
    "messages, streamed": (messages.turn, messages.stream(_called_in_messages())),
    "messages, whole": (messages.turn, json.dumps(_called_in_messages()).encode()),
    "responses, streamed": (responses.turn, responses.stream(_called_in_responses())),
    "responses, whole": (responses.turn, json.dumps(_called_in_responses()).encode()),
}


@pytest.mark.parametrize("kind", REPLIES)
def test_a_reply_with_such_a_byte_anywhere_is_relayed_or_broken(kind: str) -> None:
    make, said = REPLIES[kind]
    for place in range(0, len(said), 5):
        turn = make(stream="streamed" in kind)
        turn.request()
        raw = said[:place] + b"\x9e" + said[place + 1 :]
        try:
            receive(turn, raw)
            turn.end()
        except Broken:
            continue
        if turn.state is State.CALLING:  # the byte was in an event that says nothing
            turn.answer(["found"] * len(turn.calls))
            json.loads(turn.request())


@pytest.mark.parametrize("size", [0, 1, 1 << 20, (1 << 20) + 1])
def test_a_character_across_two_pieces_is_whole(size: int) -> None:
    rawjson.check_utf8(b"x" * size + "é".encode())
    for odd in NO_UTF8:
        with pytest.raises(NotJson):
            rawjson.check_utf8(b"x" * size + odd)
