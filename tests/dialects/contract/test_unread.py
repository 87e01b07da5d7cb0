"""Calls of our tools where no API has calls: they never reach the client. Forms that servers really
write are read, and any other one is a broken reply."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy import sse
from proxy.dialects.turn import Turn
from proxy.plan.turn import Broken
from tests.dialects.chat.turns import called, chunk, events, stream, usage
from tests.dialects.contract.apis import APIS, Api, Round, text, theirs
from tests.dialects.scripted import encoded
from tests.dialects.turning import receive, run

Json = dict[str, Any]

SAID = "Let me look."
FUNCTION = {
    "id": "a",
    "type": "function",
    "function": {"name": "grep", "arguments": '{"pattern":"x"}'},
}
CUSTOM = {"id": "a", "type": "custom", "custom": {"name": "grep", "input": "x"}}
USE = {"type": "tool_use", "id": "a", "name": "grep", "input": {"pattern": "x"}}
ITEM = {"type": "function_call", "call_id": "a", "name": "grep", "arguments": "{}"}

CHAT_CHOICES: dict[str, Json] = {
    "beside the message": {"tool_calls": [FUNCTION]},
    "the older call, beside the message": {"function_call": FUNCTION["function"]},
    "a name as models write it": {"tool_calls": [{"name": "functions.Grep:0", "arguments": {}}]},
}
CHAT_MESSAGES: dict[str, Json] = {
    "a custom call": {"tool_calls": [CUSTOM]},
    "a part of the content": {"content": [{"type": "text", "text": SAID}, USE]},
    "a part with the name of a tool": {
        "content": [{"type": "tool_call", "tool_name": "grep", "arguments": {}}]
    },
    "a member that nobody knows": {"actions": [{"tool": "grep", "tool_input": {"pattern": "x"}}]},
    "deep inside": {"extra": {"model": {"output": [{"function": "grep"}]}}},
}
BLOCKS: dict[str, Json] = {
    "a call of upstream's own tools": {**USE, "type": "server_tool_use"},
    "an MCP call without a server": {**USE, "type": "mcp_tool_use"},
    "a call of another kind": {**USE, "type": "tool_call"},
    "a function": FUNCTION,
    "calls beside a text": {"type": "text", "text": "", "tool_calls": [FUNCTION]},
}
ITEMS: dict[str, Json] = {
    "a custom call": {"type": "custom_tool_call", "call_id": "a", "name": "grep", "input": "x"},
    "an MCP call without a server": {**ITEM, "type": "mcp_call"},
    "a call of another kind": {**ITEM, "type": "tool_call"},
    "a call of the Messages API": USE,
    "a call of the chat API": FUNCTION,
    "a part of a message": {"type": "message", "role": "assistant", "content": [USE]},
}


def chat_whole(choice: Json, message: Json) -> bytes:
    message = {"role": "assistant", "content": SAID, **message}
    choices = [{"index": 0, "message": message, "finish_reason": "stop", **choice}]
    return json.dumps(
        {"id": "c", "object": "chat.completion", "model": "m", "choices": choices}
    ).encode()


def chat_stream(choice: Json, delta: Json) -> bytes:
    odd = chunk(delta)
    odd["choices"][0] |= choice
    return stream(chunk({"role": "assistant", "content": SAID}), odd, chunk({}, "stop"), "[DONE]")


def with_event(api: Api, event: Json) -> bytes:
    """A reply with one more event before its end."""
    reply = {
        key: value for key, value in api.reply(Round([text(SAID)]), 1).items() if key != "tools"
    }
    found = api.encodings["own"](reply).split(b"\n\n")
    place = 2 if api is APIS["chat"] else -3
    return b"\n\n".join(
        [*found[:place], sse.encode(json.dumps(event).encode()).strip(), *found[place:]]
    )


def with_member(api: Api, name: str, value: Any) -> Json:
    """A whole reply with one more block, item or member."""
    reply = api.reply(Round([text(SAID)]), 1)
    if isinstance(reply.get(name), list):
        return reply | {name: [*reply[name], value]}
    return reply | {name: value}


def replies() -> dict[str, tuple[str, bytes]]:
    """Replies that name one of our tools where no call is read."""
    messages, responses = APIS["messages"], APIS["responses"]
    made: dict[str, tuple[str, bytes]] = {}
    for name, choice in CHAT_CHOICES.items():
        made[f"chat, {name}"] = "chat", chat_whole(choice, {})
        made[f"chat, {name}, streamed"] = "chat", chat_stream(choice, {})
        made[f"chat, {name}, with words"] = "chat", chat_stream(choice, {"content": "Hm."})
    for name, message in CHAT_MESSAGES.items():
        made[f"chat, {name}"] = "chat", chat_whole({}, message)
        made[f"chat, {name}, streamed"] = "chat", chat_stream({}, message)
    beside = {"role": "assistant", "content": SAID, "tool_calls": [FUNCTION]}
    made["chat, a delta in a body"] = "chat", chat_whole({"delta": beside}, {})
    made["chat, a message beside a delta"] = (
        "chat",
        chat_stream({"message": beside}, {"content": "Hm."}),
    )
    made["chat, a message behind deltas"] = "chat", chat_stream({"message": beside}, {})
    for name, block in BLOCKS.items():
        made[f"messages, {name}"] = (
            "messages",
            messages.whole(with_member(messages, "content", block)),
        )
        start = {"type": "content_block_start", "index": 1, "content_block": block}
        made[f"messages, {name}, streamed"] = "messages", with_event(messages, start)
    for name, item in ITEMS.items():
        made[f"responses, {name}"] = (
            "responses",
            responses.whole(with_member(responses, "output", item)),
        )
        added = {"type": "response.output_item.added", "output_index": 1, "item": item}
        made[f"responses, {name}, streamed"] = "responses", with_event(responses, added)
    foreign = {
        "chat": chunk(calls := {"tool_calls": [FUNCTION]}),
        "messages": {"type": "content_block_start", "index": 1, "content_block": USE},
        "responses": {"type": "response.output_item.done", "output_index": 1, "item": ITEM},
    }
    for name, api in APIS.items():
        made[f"{name}, a member of the reply"] = (
            name,
            api.whole(with_member(api, "tool_calls", [FUNCTION])),
        )
        for other, event in foreign.items():
            if other != name:
                made[f"{name}, an event of {other}"] = name, with_event(api, event)
                made[f"{name}, an event of {other} with a type"] = (
                    name,
                    with_event(api, {"type": "x", **event}),
                )
    made["messages, in its beginning"] = (
        "messages",
        encoded({"type": "message_start", "message": {"content": [USE]}}),
    )
    made["responses, in its beginning"] = (
        "responses",
        encoded({"type": "response.created", "response": {**calls}}),
    )
    return made


REPLIES = replies()


@pytest.mark.parametrize("name", REPLIES)
def test_a_call_of_ours_at_another_place_is_a_broken_reply(name: str) -> None:
    kind, raw = REPLIES[name]
    api = APIS[kind]
    streamed = not raw.startswith(b"{")
    turn = api.turn(stream=streamed)
    turn.request()
    out = b""
    with pytest.raises(Broken):
        out = pieces(turn, raw, out)
    without = api.turn(stream=streamed, injected=False)
    without.request()
    assert receive(without, raw) + without.end() + without.close() == raw


def pieces(turn: Turn, raw: bytes, out: bytes) -> bytes:
    """What the client gets before the reply turns out to be broken has no call."""
    if raw.startswith(b"{"):
        return receive(turn, raw) + turn.end() + turn.close()
    for event in sse.EventDecoder().feed(raw):
        out += turn.receive(event)
        assert b"grep" not in out.lower()
    return out + turn.end() + turn.close()


# -- forms that are read ---------------------------------------------------------------------------

MARKED = '<tool_call>{"name": "grep", "arguments": {"pattern": "x"}}</tool_call>'
ANSWER = "It is 42."


def part(said: str) -> Json:
    return {"type": "text", "text": said}


THOUGHT = {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}
WHOLE_MESSAGE = {
    "message": {
        "role": "assistant",
        "content": SAID,
        "tool_calls": [called("grep", '{"pattern":"x"}')],
    }
}
READ: dict[str, bytes] = {
    "a whole message in a stream": stream(
        chunk({"role": "assistant"}),
        {**chunk(), "choices": [{"index": 0, "finish_reason": "tool_calls", **WHOLE_MESSAGE}]},
        chunk(usage=usage(1, 1)),
    ),
    "text parts": chat_whole({}, {"content": [THOUGHT, part(SAID), part(MARKED)]}),
    "one text part": chat_whole({}, {"content": [THOUGHT, part(f"{SAID}\n{MARKED}")]}),
    "text parts in a stream": chat_stream({}, {"content": [THOUGHT, part(MARKED)]}),
    "text parts in pieces": stream(
        chunk({"role": "assistant", "content": [THOUGHT]}),
        chunk({"content": [part(SAID)]}),
        *(chunk({"content": [part(piece)]}) for piece in (MARKED[:7], MARKED[7:30], MARKED[30:])),
        chunk({}, "stop"),
        "[DONE]",
    ),
    "a list, then strings": stream(
        chunk({"role": "assistant", "content": [THOUGHT, part(SAID)]}),
        *(chunk({"content": piece}) for piece in (MARKED[:7], MARKED[7:])),
        chunk({}, "stop"),
        "[DONE]",
    ),
}


@pytest.mark.parametrize("name", READ)
def test_a_call_of_ours_in_a_form_that_servers_write_is_answered(name: str) -> None:
    chat = APIS["chat"]
    streamed = not READ[name].startswith(b"{")
    final = stream(chunk({"content": ANSWER}), chunk({}, "stop"), "[DONE]")
    turn = chat.turn(stream=streamed)
    out, requests = run(
        turn, READ[name], final if streamed else chat_whole({}, {"content": ANSWER})
    )
    assert b"grep" not in out
    assert b"tool_call" not in out
    assert SAID.encode() in out
    assert ANSWER.encode() in out
    assert (b'"hm"' in out) is (name != "a whole message in a stream")
    said, result = requests[1]["messages"][-2:]
    assert said["tool_calls"][0]["function"]["name"] == "grep"
    assert "<tool_call>" not in json.dumps(said)
    assert SAID in json.dumps(said)
    assert ("hm" in json.dumps(said)) is (name != "a whole message in a stream")
    assert result["role"] == "tool"


def test_a_whole_message_in_a_stream_with_a_call_of_the_client() -> None:
    chat = APIS["chat"]
    message = {
        "role": "assistant",
        "content": SAID,
        "tool_calls": [FUNCTION, called("search", '{"q":"q"}', "b")],
    }
    choices = [{"index": 0, "finish_reason": "tool_calls", "message": message}]
    one = {**chunk(), "object": "chat.completion", "choices": choices, "usage": usage(1, 1)}
    turn = chat.turn()
    out, _ = run(turn, stream(one, "[DONE]"))
    assert chat.blocks(chat.assembled(out)) == [text(SAID), theirs()]
    assert turn.hidden is not None
    assert len(turn.hidden.after) == 1


@pytest.mark.parametrize("tail", ["", " And so on."])
def test_text_parts_lose_no_character_wherever_they_are_split(tail: str) -> None:
    said = f"{SAID}\n{MARKED}{tail}"
    final = stream(chunk({"content": ANSWER}), chunk({}, "stop"), "[DONE]")
    for place in range(1, len(said)):
        pieces = [chunk({"content": [part(piece)]}) for piece in (said[:place], said[place:])]
        first = stream(
            chunk({"role": "assistant", "content": [THOUGHT]}), *pieces, chunk({}, "stop"), "[DONE]"
        )
        out, _ = run(APIS["chat"].turn(), *([first] if tail else [first, final]))
        assert listed_text(out).split() == (said if tail else f"{SAID} {ANSWER}").split()


def listed_text(out: bytes) -> str:
    """The text that a client finds in the events, which have it as parts or as a string."""
    found = []
    for event in events(out):
        for choice in event["choices"] if event != "[DONE]" else []:
            content = choice["delta"].get("content") or ""
            listed = content if isinstance(content, list) else [part(content)]
            found += [one.get("text", "") for one in listed]
    return "".join(found)


def test_what_is_nested_too_deep_to_be_looked_into_is_broken() -> None:
    nested: Json = {"extra": "grep"}
    for _ in range(200):
        nested = {"extra": [nested]}
    turn = APIS["chat"].turn(stream=False)
    turn.request()
    with pytest.raises(Broken):
        receive(turn, chat_whole(nested, {})) + turn.end() + turn.close()


# -- what is no call of ours -----------------------------------------------------------------------

CALLED: Json = {"name": "grep", "tool": "read_file", "function": "grep"}
MCP = {
    "type": "mcp_call",
    "id": "m",
    "server_label": "files",
    "name": "read_file",
    "arguments": "{}",
    "output": "x",
}
FOUND = {
    "type": "tool_search_tool_result",
    "tool_use_id": "s",
    "content": {"tool_name": "read_file"},
}
MENTIONS: dict[str, tuple[str, bytes]] = {
    "chat, a word": ("chat", chat_stream({}, {"content": "grep"})),
    "chat, JSON in a text": (
        "chat",
        chat_whole({}, {"content": f"It wrote {json.dumps(USE)} once."}),
    ),
    "chat, a client's arguments": (
        "chat",
        chat_whole(
            {}, {"tool_calls": [{"id": "b", "function": {"name": "search", "arguments": CALLED}}]}
        ),
    ),
    "chat, likely words": (
        "chat",
        chat_stream({"logprobs": {"content": [{"token": "grep"}]}}, {"content": "grep"}),
    ),
    "messages, a client's arguments": (
        "messages",
        json.dumps(
            with_member(APIS["messages"], "content", {**USE, "name": "search", "input": CALLED})
        ).encode(),
    ),
    "messages, an MCP server's tool": (
        "messages",
        json.dumps(
            with_member(
                APIS["messages"], "content", {**USE, "type": "mcp_tool_use", "server_name": "files"}
            )
        ).encode(),
    ),
    "messages, tools that were found": (
        "messages",
        with_event(
            APIS["messages"], {"type": "content_block_start", "index": 1, "content_block": FOUND}
        ),
    ),
    "responses, an MCP server's tool": (
        "responses",
        with_event(
            APIS["responses"], {"type": "response.output_item.done", "output_index": 1, "item": MCP}
        ),
    ),
    "responses, the client's namespace": (
        "responses",
        with_event(
            APIS["responses"],
            {
                "type": "response.output_item.done",
                "output_index": 1,
                "item": {**ITEM, "namespace": "mine"},
            },
        ),
    ),
    "responses, what is repeated of the request": (
        "responses",
        APIS["responses"].whole(with_member(APIS["responses"], "metadata", CALLED) | {"tools": []}),
    ),
}


@pytest.mark.parametrize("name", MENTIONS)
def test_what_only_mentions_our_tools_passes(name: str) -> None:
    kind, raw = MENTIONS[name]
    turn = APIS[kind].turn(stream=not raw.startswith(b"{"))
    out, requests = run(turn, raw)
    assert len(requests) == 1
    assert out == raw
