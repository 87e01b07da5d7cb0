"""The real `openai` client, streamed and plain, through the real proxy in front of the strict upstream.

The policy is tight enough that compaction, an internal round and a mixed turn happen in a short session.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from tests.fake_upstream import Message, Recorded, StrictUpstream, calls, mixed, text
from tests.serving import Proxy, tight
from tests.steps import CHAT_TOOL, chat

Json = dict[str, Any]

TOOL = CHAT_TOOL
BIG = "".join(f"line {number}: nothing of interest here\n" for number in range(60)) + "the code is heliotrope-7291\n"
REFERENCE = re.compile(r"\(detailed result is stored in (/context_store/\S+?)[;)]")


@pytest.fixture
def proxy(up: StrictUpstream, serve: Callable[..., Proxy]) -> Proxy:
    return serve({"default": tight(up.url)})


@pytest.fixture
def client(proxy: Proxy) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=proxy.url, api_key="sk-test", max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture(params=[False, True], ids=["plain", "streamed"])
def ask(client: openai.OpenAI, request: pytest.FixtureRequest) -> Callable[..., Json]:
    """Ask, and return the assistant message, finish reason and usage in one form for both kinds of reply."""

    def asking(messages: list[Json], **options: Any) -> Json:
        options = {"model": "m", "messages": messages, "tools": [TOOL], **options}
        if not request.param:
            return _plain(client.chat.completions.create(**options))
        return _folded(client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **options))

    return asking


def _plain(reply: Any) -> Json:
    message = reply.choices[0].message
    made = [(call.id, call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    return _said(message.content or "", made, reply.choices[0].finish_reason, reply.usage)


def _folded(stream: Any) -> Json:
    content, made, finish, usage = "", {}, None, None
    ids, roles = set(), 0
    for chunk in stream:
        ids.add(chunk.id)
        usage = chunk.usage or usage
        for choice in chunk.choices:
            content += choice.delta.content or ""
            roles += choice.delta.role is not None
            finish = choice.finish_reason or finish
            for delta in choice.delta.tool_calls or ():
                call = made.setdefault(delta.index, ["", "", ""])
                call[0] += delta.id or ""
                call[1] += delta.function.name or ""
                call[2] += delta.function.arguments or ""
    assert len(ids) == roles == 1, "one reply, however many rounds it took"
    assert sorted(made) == list(range(len(made)))
    return _said(content, [tuple(made[index]) for index in sorted(made)], finish, usage)


def _said(content: str, made: list[Any], finish: Any, usage: Any) -> Json:
    tool_calls = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for call_id, name, arguments in made
    ]
    message = {"role": "assistant", "content": content, **({"tool_calls": tool_calls} if made else {})}
    return {"message": message, "finish": finish, "usage": usage}


def history(results: int = 3) -> list[Json]:
    """Return a session with `results` big results, all read by the model, that ends with a question."""
    messages: list[Json] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Fetch the logs."}]
    for number in range(results):
        messages += chat(f"call_{number}", f"log {number}\n{BIG}", n=number)
    messages += [
        {"role": "assistant", "content": "I have the logs."},
        {"role": "user", "content": "What is the code in the first one?"},
    ]
    return messages


def references(request: Recorded) -> list[str]:
    """Return the files to which the request's tool results refer."""
    results = (str(message["content"]) for message in request.messages if message["role"] == "tool")
    return [found[1] for result in results if (found := REFERENCE.search(result))]


def test_compaction_and_an_internal_round(up: StrictUpstream, ask: Callable[..., Json]) -> None:
    up.respond(_finds_the_code)
    reply = ask(history())
    assert reply["message"] == {"role": "assistant", "content": "It is heliotrope-7291."}
    assert reply["finish"] == "stop"
    first, second = up.chats
    assert first.tool_names == ["fetch", "grep", "read_file"]
    assert len(references(first)) == 3
    assert second.raw_messages[: len(first.messages)] == first.raw_messages
    assert [message["role"] for message in second.messages[len(first.messages) :]] == ["assistant", "tool"]
    # A context gauge: the last round's prompt, and all that was written.
    assert reply["usage"].prompt_tokens == second.prompt_tokens
    assert second.cached_tokens >= first.prompt_tokens


def test_everything_moved_can_be_read_back_exactly(up: StrictUpstream, ask: Callable[..., Json]) -> None:
    def reads_all(request: Recorded) -> Message:
        read = [message for message in request.messages if message.get("tool_call_id", "").startswith("r")]
        if read:
            return text("Done.")
        return calls(*(("read_file", {"path": path}, f"r{n}") for n, path in enumerate(references(request))))

    up.respond(reads_all)
    messages = history()
    ask(messages)
    back = [message["content"] for message in up.chats[1].messages[-3:]]
    assert back == [message["content"] for message in messages if message["role"] == "tool"]


def test_the_next_turn_knows_what_was_read(up: StrictUpstream, ask: Callable[..., Json]) -> None:
    up.respond(_finds_the_code)
    messages = history()
    messages.append(ask(messages)["message"])
    messages.append({"role": "user", "content": "Thank you. And the second?"})
    assert ask(messages)["message"]["content"] == "It is heliotrope-7291."
    found, follow_up = up.chats[1], up.chats[2]
    assert follow_up.raw_messages[: len(found.messages)] == found.raw_messages
    assert [message["role"] for message in follow_up.messages[len(found.messages) :]] == ["assistant", "user"]


def test_a_mixed_turn_is_put_back_together(up: StrictUpstream, ask: Callable[..., Json]) -> None:
    messages = history()
    up.script(
        mixed(
            "Let me see.",
            ("grep", {"pattern": "code is"}, "ours_1"),
            ("fetch", {"n": 9}, "theirs_1"),
            ("grep", {"pattern": "line 7"}, "ours_2"),
        ),
        text("Done."),
    )
    reply = ask(messages)
    assert reply["finish"] == "tool_calls"
    assert reply["message"]["content"] == "Let me see."
    shown = reply["message"]["tool_calls"]
    assert [(call["id"], call["function"]["name"]) for call in shown] == [("theirs_1", "fetch")]
    assert json.loads(shown[0]["function"]["arguments"]) == {"n": 9}

    messages += [reply["message"], {"role": "tool", "tool_call_id": "theirs_1", "content": "a short result"}]
    assert ask(messages)["message"]["content"] == "Done."
    turn = up.chats[1].messages[len(up.chats[0].messages) :]
    assert [call["id"] for call in turn[0]["tool_calls"]] == ["ours_1", "theirs_1", "ours_2"]
    results = {message["tool_call_id"]: message["content"] for message in turn[1:]}
    assert set(results) == {"ours_1", "theirs_1", "ours_2"}
    assert "heliotrope-7291" in results["ours_1"]
    assert results["theirs_1"] == "a short result"


def _finds_the_code(request: Recorded) -> Message:
    """Search what was moved, unless this turn has done so, and answer from the results."""
    last = request.messages[-1]
    if last["role"] == "tool":
        found = re.search(r"heliotrope-\d+", str(last["content"]))
        return text(f"It is {found[0] if found else 'not to be found'}.")
    return calls(("grep", {"pattern": "code is", "path": references(request)[0]}))
