"""What clients get is valid by the types of Open Responses (the package `openresponses-types`),
whole and streamed: directly, and through the proxy with moved results and hidden rounds.

The requests are those of its compliance tests: a text, a system prompt, a call, an image, and
several turns.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from proxy import sse
from tests.acceptance.shared import BIG, proxy, up
from tests.dialects.responses.api import ResponsesApi, call, reasoning, say
from tests.fake_upstream import StrictUpstream
from tests.serving import PLAIN, Proxy

__all__ = ["proxy", "up"]

types = pytest.importorskip(
    "openresponses_types.types", reason="openresponses-types is not installed: make servers"
)
pydantic = pytest.importorskip("pydantic", reason="pydantic is not installed: make servers")

Json = dict[str, Any]

FUNCTION = {
    "name": "fetch",
    "description": "Fetches a log.",
    "parameters": {"type": "object"},
    "strict": False,
}
TOOL = {"type": "function", **FUNCTION}
PIXEL = "data:image/gif;base64,R0lGODlhAQABAAAAACw="
STATED = {
    "background": False,
    "completed_at": 1_700_000_001,
    "frequency_penalty": 0.0,
    "max_tool_calls": None,
    "presence_penalty": 0.0,
    "prompt_cache_key": None,
    "reasoning": None,
    "safety_identifier": None,
    "service_tier": "default",
    "store": True,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "top_logprobs": 0,
    "top_p": 1.0,
    "truncation": "disabled",
}
"""What Open Responses requires of a response beside what OpenAI's always has."""


class OpenApi(ResponsesApi):
    def _respond(self, body: Json, history: list[Json], reply: Any) -> Json:
        return {**STATED, **super()._respond(body, history, reply)}


def user(content: Any) -> Json:
    return {"type": "message", "role": "user", "content": content}


CALLED = {"type": "function_call", "call_id": "call_0", "name": "fetch", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "call_0", "output": BIG}
IMAGE = [{"type": "input_text", "text": "What is it?"}, {"type": "input_image", "image_url": PIXEL}]
TURNS = [
    user("Hello."),
    {"type": "message", "role": "assistant", "content": "Hello!"},
    user("And now?"),
]
LONG = [user("Read it."), CALLED, RESULT, *TURNS]
GREP = [reasoning("I look."), say("Wait."), call("grep", {"pattern": "code is"})]

TEMPLATES: dict[str, tuple[Json, list[list[Json]]]] = {
    "text": ({"input": [user("Say hello.")]}, [[say("Hello!")]]),
    "system prompt": (
        {"input": [{"type": "message", "role": "system", "content": "Be brief."}, user("Hi.")]},
        [[say("Hi.")]],
    ),
    "call": (
        {"input": [user("Fetch it.")], "tools": [TOOL]},
        [[reasoning("I must."), call("fetch", {"q": 1})]],
    ),
    "image": ({"input": [user(IMAGE)]}, [[say("A pixel.")]]),
    "turns": ({"input": TURNS}, [[say("It is noon.")]]),
}
REWRITTEN: dict[str, tuple[Json, list[list[Json]]]] = {
    "hidden round": (
        {"input": LONG, "tools": [TOOL]},
        [GREP, [reasoning("So."), say("It is heliotrope-7291.")]],
    ),
    "ours and theirs": ({"input": LONG, "tools": [TOOL]}, [[*GREP, call("fetch", {"q": 2})]]),
}


def answered(url: str, body: Json, stream: bool) -> list[Json]:
    """The events of a stream, or one that holds the whole response."""
    headers = {"authorization": "Bearer a-key"}
    asked = {"model": "m", "stream": stream, **body}
    reply = httpx.post(f"{url}/responses", json=asked, headers=headers, verify=PLAIN, timeout=60)
    assert reply.status_code == 200, reply.text
    if not stream:
        return [{"type": "response.completed", "sequence_number": 0, "response": reply.json()}]
    return [
        json.loads(event.data) for event in sse.EventDecoder().feed(reply.content) if event.data
    ]


def faults(events: list[Json]) -> list[str]:
    """What is not as the types say."""
    streamed = [one for name, one in vars(types).items() if name.endswith("StreamingEvent")]
    by_type = {kind.value: one for one in streamed for kind in one.model_fields["type"].annotation}
    said = []
    for event in events:
        try:
            by_type[event["type"]].model_validate(event)
        except pydantic.ValidationError as error:
            said.append(f"{event['type']}: {error}")
    return said


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", TEMPLATES | REWRITTEN)
def test_replies_are_valid(up: StrictUpstream, proxy: Proxy, name: str, stream: bool) -> None:
    body, replies = (TEMPLATES | REWRITTEN)[name]
    for url in (up.url, proxy.url) if name in TEMPLATES else (proxy.url,):
        up.begin_anew()
        up.respond(api := OpenApi())
        api.script(*replies)
        assert faults(answered(url, body, stream)) == []
        assert len(api.asked) == len(replies)
        assert api.refused == []
        if name in REWRITTEN:
            assert "(detailed result is stored in /context_store/" in json.dumps(
                api.asked[0]["input"]
            )
