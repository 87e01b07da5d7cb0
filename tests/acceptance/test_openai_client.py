"""The real `openai` client, streamed and plain, through the real proxy in front of the strict
upstream.

The policy is tight enough that compaction and an internal round happen in a short session.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.acceptance.shared import BIG
from tests.fake_upstream import Message, Recorded, StrictUpstream, calls, text
from tests.sdks import openai
from tests.serving import Proxy, tight
from tests.steps import CHAT_TOOL, chat

Json = dict[str, Any]

TOOL = CHAT_TOOL
REFERENCE = re.compile(r"\(detailed result is stored in (/context_store/\S+?)[;)]")


def history(results: int = 3) -> list[Json]:
    """Return a session with `results` big results, all read by the model, that ends with a
    question."""
    messages: list[Json] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Fetch the logs."},
    ]
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


@pytest.mark.parametrize("stream", [False, True])
def test_compaction_and_an_internal_round(
    up: StrictUpstream, serve: Callable[..., Proxy], stream: bool
) -> None:
    up.respond(_finds_the_code)
    options: Any = {"model": "m", "messages": history(), "tools": [TOOL]}
    proxy = serve({"default": tight(up.url)})
    with openai.OpenAI(base_url=proxy.url, api_key="sk-test", max_retries=0, timeout=60) as client:
        if stream:
            with client.chat.completions.stream(
                stream_options={"include_usage": True}, **options
            ) as events:
                reply = events.get_final_completion()
        else:
            reply = client.chat.completions.create(**options)
    [choice] = reply.choices
    assert (choice.message.content, choice.message.tool_calls or [], choice.finish_reason) == (
        "It is heliotrope-7291.", [], "stop"
    )  # fmt: skip
    first, second = up.chats
    assert first.tool_names == ["fetch", "grep", "read_file"]
    assert len(references(first)) == 3
    assert second.raw_messages[: len(first.messages)] == first.raw_messages
    assert [message["role"] for message in second.messages[len(first.messages) :]] == [
        "assistant",
        "tool",
    ]
    # A context gauge: the last round's prompt, and all that was written.
    assert reply.usage and reply.usage.prompt_tokens == second.prompt_tokens
    assert second.cached_tokens >= first.prompt_tokens


def _finds_the_code(request: Recorded) -> Message:
    """Search what was moved, unless this turn has done so, and answer from the results."""
    last = request.messages[-1]
    if last["role"] == "tool":
        found = re.search(r"heliotrope-\d+", str(last["content"]))
        return text(f"It is {found[0] if found else 'not to be found'}.")
    return calls(("grep", {"pattern": "code is", "path": references(request)[0]}))
