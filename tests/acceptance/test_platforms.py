"""Azure's and Vertex's paths of the known APIs, asked by the SDKs' own clients through the real
proxy.

Whatever the path, old results move, and what the model reads back stays within the proxy.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from proxy.dialects import for_model, model_in
from proxy.dialects.request import MAX_MODEL
from proxy.plan.turn import Unplannable
from tests.acceptance.shared import BIG
from tests.acceptance.test_messages_api import USER, looked, step
from tests.acceptance.test_openai_client import _finds_the_code, history, references
from tests.acceptance.test_openai_responses import begun as begun_responses
from tests.dialects.messages.api import MessagesApi, call, say, thinking
from tests.dialects.messages.turns import FETCH
from tests.dialects.responses.api import ResponsesApi
from tests.dialects.responses.api import call as called
from tests.dialects.responses.api import say as said
from tests.fake_upstream import Pieces, Recorded, StrictUpstream, text
from tests.sdks import anthropic, openai
from tests.serving import Proxy, tight

Json = dict[str, Any]
VERSION = "2024-10-21"
TOOL = {"type": "function", "function": {"name": "fetch", "parameters": {"type": "object"}}}
CHAT = f"/openai/deployments/my-gpt/chat/completions?api-version={VERSION}"
MODEL = "claude-sonnet-4-5@20250929"
PLACE = "/v1/projects/acme/locations/europe-west1/publishers/anthropic/models/"


def with_key(url: str) -> Json:
    return tight(url) | {"upstream": {"base_url": url, "api_key": "the-real-one"}, "open": True}


def azure(proxy: Proxy, **options: Any) -> openai.AzureOpenAI:
    return openai.AzureOpenAI(
        azure_endpoint=proxy.root,
        api_key="sk-azure",
        api_version=VERSION,
        max_retries=0,
        timeout=60,
        **options,
    )


def azure_v1(proxy: Proxy) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{proxy.root}/openai/v1", api_key="sk-azure", max_retries=0, timeout=60
    )


AZURE: dict[str, tuple[Callable[[Proxy], openai.OpenAI], str, bool]] = {
    "a deployment by the model": (azure, CHAT, True),
    "a deployment of the client": (
        lambda proxy: azure(proxy, azure_deployment="my-gpt"),
        CHAT,
        False,
    ),
    "the newer paths": (azure_v1, "/openai/v1/chat/completions", True),
}


@pytest.mark.parametrize(("client", "target", "stream"), AZURE.values(), ids=AZURE.keys())
def test_chat_on_azure(
    up: StrictUpstream,
    serve: Callable[..., Proxy],
    client: Callable[[Proxy], openai.OpenAI],
    target: str,
    stream: bool,
) -> None:
    proxy = serve({"default": tight(up.url.removesuffix("/v1"))})
    up.respond(_finds_the_code)
    asked: Json = {"model": "my-gpt", "messages": history(), "tools": [TOOL]}
    with client(proxy) as asking:
        if stream:
            chunks = list(asking.chat.completions.create(stream=True, **asked))
            answer = "".join(
                choice.delta.content or "" for chunk in chunks for choice in chunk.choices
            )
        else:
            answer = asking.chat.completions.create(**asked).choices[0].message.content or ""
    assert answer == "It is heliotrope-7291."
    assert [request.target for request in up.chats] == [target] * 2
    assert len(references(up.chats[0])) == 3
    key = "authorization" if "v1" in target else "api-key"
    assert {str(request.header(key)).removeprefix("Bearer ") for request in up.chats} == {
        "sk-azure"
    }


def test_a_key_of_the_proxys_own_goes_where_azure_reads_it(
    up: StrictUpstream, serve: Callable[..., Proxy]
) -> None:
    proxy = serve({"default": with_key(up.url.removesuffix("/v1"))})
    up.script(text("Hello."))
    with azure(proxy) as client:
        client.chat.completions.create(model="my-gpt", messages=history(1)[:2])  # type: ignore[arg-type]
    assert up.requests[-1].header("api-key") == "the-real-one"
    assert up.requests[-1].header("authorization") is None


@pytest.mark.parametrize("client", [azure, azure_v1])
def test_responses_on_azure(
    up: StrictUpstream, serve: Callable[..., Proxy], client: Callable[[Proxy], openai.OpenAI]
) -> None:
    proxy = serve({"default": tight(up.url.removesuffix("/v1"))})
    up.respond(api := ResponsesApi())
    with client(proxy) as asking:

        def ask(items: list[Json]) -> Any:
            tool = {
                "type": "function",
                "name": "fetch",
                "parameters": {"type": "object"},
                "strict": False,
            }
            return asking.responses.create(model="m", input=items, tools=[tool])  # type: ignore[list-item,arg-type]

        items = begun_responses(ask, api)
        api.script([called("grep", {"pattern": "code is"})], [said("It is heliotrope-7291.")])
        assert ask(items).output_text == "It is heliotrope-7291."
    assert not api.refused
    assert {request.path for request in up.requests if request.method == "POST"} <= {
        "/openai/responses",
        "/openai/v1/responses",
    }


# -- Vertex ----------------------------------------------------------------------------------------


class Vertex:
    """The Messages API as Vertex offers it: the path names the model, and the body a version."""

    def __init__(self) -> None:
        self.api = MessagesApi()
        self.paths: list[str] = []

    def __call__(self, request: Recorded) -> Pieces:
        body = dict(request.json)
        assert request.header("authorization") in ("Bearer fake-token", "Bearer the-real-one")
        assert request.header("x-api-key") is None
        assert body.pop("anthropic_version")
        counts = request.path == f"{PLACE}count-tokens:rawPredict"
        if not counts:
            assert "model" not in body, "extra inputs are not permitted"
            assert (
                request.path
                == f"{PLACE}{MODEL}:{'streamRawPredict' if body.get('stream') else 'rawPredict'}"
            )
            body["model"] = MODEL
        self.paths.append(request.path)
        target = "/v1/messages/count_tokens" if counts else "/v1/messages"
        return self.api(replace(request, target=target, body=json.dumps(body).encode()))


@pytest.fixture
def vertex(up: StrictUpstream) -> Vertex:
    up.respond(made := Vertex())
    return made


def client_of(proxy: Proxy) -> anthropic.AnthropicVertex:
    return anthropic.AnthropicVertex(
        base_url=f"{proxy.root}/v1",
        region="europe-west1",
        project_id="acme",
        access_token="fake-token",
        max_retries=0,
        timeout=60,
    )


@pytest.fixture(params=[False, True], ids=["plain", "streamed"])
def ask(
    up: StrictUpstream, serve: Callable[..., Proxy], request: pytest.FixtureRequest
) -> Iterator[Callable[..., Json]]:
    proxy = serve({"default": tight(up.url)})
    with client_of(proxy) as client:

        def asking(messages: list[Json]) -> Json:
            options: Any = {
                "model": MODEL,
                "max_tokens": 4_000,
                "messages": messages,
                "tools": [FETCH],
            }
            if not request.param:
                return client.messages.create(**options).to_dict()
            with client.messages.stream(**options) as events:
                return events.get_final_message().to_dict()

        yield asking


def started(ask: Callable[..., Json], api: MessagesApi) -> list[Json]:
    """A history with a large result, after which two more steps were made, so that the result is
    old."""
    messages: list[Json] = [USER]
    for found in (BIG, "small", "small"):
        api.script([thinking("I need it."), call("fetch", {"url": found[:5]})])
        messages += step(ask(messages), found)
    return messages


def test_messages_on_vertex(ask: Callable[..., Json], vertex: Vertex) -> None:
    messages = started(ask, vertex.api)
    looked(vertex.api)
    reply = ask(messages)
    assert [block["text"] for block in reply["content"] if block["type"] == "text"][
        -1
    ] == "It is heliotrope-7291."
    assert "grep" not in str(reply["content"]), "the client sees only its own calls"
    assert "(detailed result is stored in " in str(vertex.api.asked[-1]["messages"])
    vertex.api.script([say("Gladly.")])
    ask(
        [
            *messages,
            {"role": "assistant", "content": reply["content"]},
            {"role": "user", "content": "Thanks."},
        ]
    )
    assert not vertex.api.refused


def test_a_summary_is_asked_for_in_the_form_of_vertex(
    up: StrictUpstream, serve: Callable[..., Proxy], vertex: Vertex
) -> None:
    """In one piece, although the client streams, and the body does not name the model."""
    offload = {
        "mode": "compress",
        "max_total_tokens": 400,
        "compress": {"wait": "always", "snapshot_tokens": 200},
    }
    proxy = serve({"default": tight(up.url, offload=offload)})
    snapshot = "<state_snapshot><overall_goal>Read the log.</overall_goal></state_snapshot>"
    vertex.api.respond(
        lambda body: [say(snapshot if "state_snapshot" in str(body["messages"][-1]) else "Done.")]
    )
    messages = [USER]
    for number in range(8):
        messages += [
            {"role": "assistant", "content": f"{number} " * 300},
            {"role": "user", "content": "Go on."},
        ]
    with (
        client_of(proxy) as client,
        client.messages.stream(model=MODEL, max_tokens=99, messages=messages) as events,
    ):  # type: ignore[arg-type]
        assert events.get_final_text() == "Done."
    assert {path.rpartition(":")[2] for path in vertex.paths} == {"rawPredict", "streamRawPredict"}
    assert "Read the log." in str(vertex.api.asked[-1])
    assert not vertex.api.refused


def test_tokens_are_counted_on_vertex(
    up: StrictUpstream, serve: Callable[..., Proxy], vertex: Vertex
) -> None:
    with client_of(serve({"default": with_key(up.url)})) as client:
        counted = client.messages.count_tokens(model=MODEL, messages=[USER])  # type: ignore[list-item]
    assert counted.input_tokens > 0
    assert vertex.paths == [f"{PLACE}count-tokens:rawPredict"]


def test_a_rule_knows_the_model_in_the_path(
    up: StrictUpstream, serve: Callable[..., Proxy], vertex: Vertex
) -> None:
    policy = tight(up.url) | {"rules": [{"model": "claude-sonnet-*", "offload": {"mode": "off"}}]}
    vertex.api.script([say("Yes.")])
    with client_of(serve({"default": policy})) as client:
        reply = client.messages.with_raw_response.create(
            model=MODEL, max_tokens=99, messages=[USER]
        )  # type: ignore[list-item]
    assert reply.headers["x-offload-mode"] == "off"


NAMED = [
    (
        b"/openai/deployments/my%20gpt/chat/completions",
        "my gpt",
        b"/openai/deployments/o4/chat/completions",
    ),
    (f"{PLACE}{MODEL}:rawPredict".encode(), MODEL, f"{PLACE}o4:rawPredict".encode()),
    (b"/v1/chat/completions?deployments=x", "", b"/v1/chat/completions?deployments=x"),
    (b"/v1/models/x", "", b"/v1/models/x"),
]


@pytest.mark.parametrize(("path", "model", "other"), NAMED)
def test_the_model_in_a_path(path: bytes, model: str, other: bytes) -> None:
    assert (model_in(path), for_model(path, "o4")) == (model, other)


def test_an_endless_name_in_a_path_is_none_of_our_business() -> None:
    named = b"/openai/deployments/%b/chat/completions"
    assert model_in(named % (b"m" * MAX_MODEL))
    with pytest.raises(Unplannable, match="more than"):
        model_in(named % (b"m" * (MAX_MODEL + 1)))
