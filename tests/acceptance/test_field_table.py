"""A test for each row of the tool loop's field table, streamed and plain, against the strict
upstream."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.acceptance.test_openai_client import TOOL, history, references
from tests.fake_upstream import Rules, StrictUpstream, calls, text
from tests.serving import PLAIN, Proxy, served, tight

Json = dict[str, Any]

EXTRA = ("reasoning_content", "reasoning_details", "extra_content", "cache_control")
GREP = ("grep", {"pattern": "code is"})
OURS = ["grep", "read_file"]


@pytest.fixture(scope="module")
def upstream() -> Iterator[StrictUpstream]:
    """Strict, but for what vendors add to the API's fields."""
    with StrictUpstream(Rules(extra_fields=EXTRA)) as upstream:
        yield upstream


@pytest.fixture(scope="module")
def proxy(upstream: StrictUpstream) -> Iterator[Proxy]:
    with served({"default": tight(upstream.url)}) as proxy:
        yield proxy


@pytest.fixture
def up(upstream: StrictUpstream) -> Iterator[StrictUpstream]:
    yield upstream
    upstream.begin_anew()


Ask = Callable[..., httpx.Response]


@pytest.fixture(params=[False, True], ids=["plain", "streamed"])
def ask(proxy: Proxy, request: pytest.FixtureRequest) -> Iterator[Ask]:
    """Sends a chat request; `fields` are its members, `headers` go along."""
    with httpx.Client(base_url=proxy.url, trust_env=False, verify=PLAIN) as client:

        def asking(headers: Json | None = None, **fields: Any) -> httpx.Response:
            stream = {"stream": True} if request.param else {}
            members = {"model": "m", "messages": history(), "tools": [TOOL], **stream, **fields}
            body = {key: value for key, value in members.items() if value is not None}
            # Spaced as no serialiser of ours would, so that what is touched shows.
            sent = json.dumps(body, separators=(" , ", " : "))
            reply = client.post("/chat/completions", content=sent, headers=headers)
            assert reply.status_code == 200, reply.text
            return reply

        yield asking


# -- tools -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "moves"),
    [
        ("none", False),
        ({"type": "function", "function": {"name": "fetch"}}, False),
        ("auto", True),
    ],
    ids=["none", "a name", "auto"],
)
def test_nothing_moves_that_fits_if_the_model_may_not_call_our_tools(
    up: StrictUpstream, ask: Ask, choice: Any, moves: bool
) -> None:
    """The model could not read it back."""
    up.script(text("Yes."))
    ask(tool_choice=choice)
    [request] = up.chats
    assert request.json["tool_choice"] == choice
    assert request.tool_names == ["fetch", *OURS * moves]
    assert bool(references(request)) is moves


# -- messages --------------------------------------------------------------------------------------


def test_odd_messages_keep_their_bytes(up: StrictUpstream, ask: Ask) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    custom = {"id": "k", "type": "custom", "custom": {"name": "shell", "input": "ls"}}
    odd = [
        {"role": "developer", "content": "Be brief.", "name": "boss"},
        {"role": "user", "name": "ann", "content": [{"type": "text", "text": "Hi\u2028"}, image]},
        {"role": "assistant", "content": None, "refusal": "No."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "Then", "cache_control": {"type": "ephemeral"}}],
        },
        {"role": "assistant", "content": "said", "audio": {"id": "audio_1"}},
        {"role": "user", "content": "list"},
        {"role": "assistant", "content": None, "tool_calls": [custom]},
        {
            "role": "tool",
            "tool_call_id": "k",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        },
    ]
    messages = [*odd, *history()[1:]]
    up.script(calls(GREP), text("Yes."))
    ask(messages=messages)
    raw = [json.dumps(message, separators=(" , ", " : ")).encode() for message in messages]
    for request in up.chats:
        kept = [bool(one == sent) for one, sent in zip(raw, request.raw_messages, strict=False)]
        moved = [index for index, same in enumerate(kept) if not same]
        assert {messages[index]["role"] for index in moved} == {"tool"}
        assert min(moved) >= len(odd)


def test_other_fields_are_the_same_in_every_round(up: StrictUpstream, ask: Ask) -> None:
    fields = {
        "store": True,
        "metadata": {"k": "v"},
        "seed": 12345678901234567890123,
        "user": "ann",
        "service_tier": "flex",
        "prompt_cache_key": "key",
        "safety_identifier": "id",
        "temperature": 0.30000000000000004,
        "stop": ["END"],
        "response_format": {"type": "text"},
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_completion_tokens": 100,
    }
    up.script(calls(GREP), calls(GREP), text("Yes."))
    ask(**fields)
    assert len(up.chats) == 3
    for request in up.chats:
        assert {key: request.json[key] for key in fields} == fields


# -- headers ---------------------------------------------------------------------------------------


def test_every_round_has_the_clients_headers(up: StrictUpstream, ask: Ask) -> None:
    given = {
        "authorization": "Bearer sk-client",
        "connection": "x-hop",
        "x-hop": "1",
        "te": "trailers",
        "x-offload-debug": "1",
        "openai-organization": "org",
        "accept-encoding": "br, gzip",
    }
    up.script(calls(GREP, headers=(("x-twice", "a"), ("x-twice", "b"))), text("Yes."))
    reply = ask(headers=given)
    for request in up.chats:
        assert request.header("authorization") == "Bearer sk-client"
        assert request.header("openai-organization") == "org"
        assert [request.header(name) for name in ("x-hop", "te", "x-offload-debug")] == [None] * 3
        assert request.header("accept-encoding") == "identity"
        assert request.header("content-length") == str(len(request.body))
        assert request.header("host") == f"127.0.0.1:{up.port}"
    assert reply.headers.get_list("x-twice") == ["a", "b"]
    assert reply.headers["x-offload-mode"] == "compact"
    rounds = None if "event-stream" in reply.headers["content-type"] else "1"
    assert reply.headers.get("x-offload-rounds") == rounds
