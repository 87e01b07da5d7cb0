"""The real `openai` client's Responses API, streamed and plain, through the real proxy in front of
a strict upstream.

The policy is tight enough that compaction, hidden rounds and mixed turns happen in a short session.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.shared import BIG, own_ids, proxy, up
from tests.dialects.responses.api import ResponsesApi, call, reasoning, say
from tests.fake_upstream import StrictUpstream, whole
from tests.sdks import openai
from tests.serving import Proxy, served, tight

__all__ = ["proxy", "up"]

Json = dict[str, Any]

TOOL = {"type": "function", "name": "fetch", "parameters": {"type": "object"}, "strict": False}


@pytest.fixture
def api(up: StrictUpstream, request: pytest.FixtureRequest) -> ResponsesApi:
    up.begin_anew()
    up.respond(made := ResponsesApi(made=own_ids(request)))
    return made


def client_of(proxy: Proxy) -> openai.OpenAI:
    return openai.OpenAI(base_url=proxy.url, api_key="sk-test", max_retries=0, timeout=60)


@pytest.fixture
def client(proxy: Proxy) -> Iterator[openai.OpenAI]:
    with client_of(proxy) as made:
        yield made


def asking(client: openai.OpenAI, stream: bool) -> Callable[..., Any]:
    """Ask, and return the response as the SDK makes it."""

    def ask(items: list[Json] | str, **options: Any) -> Any:
        options = {"model": "m", "input": items, "tools": [TOOL], **options}
        if not stream:
            return client.responses.create(**options)
        with client.responses.stream(**options) as events:
            return events.get_final_response() if not options.get("events") else list(events)

    return ask


@pytest.fixture(params=[False, True], ids=["plain", "streamed"])
def ask(client: openai.OpenAI, request: pytest.FixtureRequest) -> Callable[..., Any]:
    return asking(client, request.param)


def history(response: Any) -> list[Json]:
    """What the client sends back of a response: its items as they are."""
    return [
        item.model_dump(exclude_none=True, exclude={"parsed_arguments", "parsed"})
        for item in response.output
    ]


def replayed(response: Any) -> list[Json]:
    items = history(response)
    for item in items:
        for part in item.get("content", []):
            part.pop("parsed", None)
    return items


def outputs(items: list[Json], text: str) -> list[Json]:
    called = [item for item in items if item["type"] == "function_call"]
    return [
        {"type": "function_call_output", "call_id": item["call_id"], "output": text}
        for item in called
    ]


def begun(ask: Callable[..., Any], api: ResponsesApi, **options: Any) -> list[Json]:
    """A history with a large result, after which two more steps were made, so that the result is
    old."""
    items: list[Json] = [{"role": "user", "content": "Read the log."}]
    for text in (BIG, "small", "small"):
        api.script([reasoning("I need it."), call("fetch", {"url": text[:5]})])
        said = replayed(ask(items, **options))
        items += [*said, *outputs(said, text)]
    return items


@pytest.mark.parametrize("header", [{}, {"x-offload": "off"}, {"x-offload": "observe"}], ids=str)
@pytest.mark.parametrize("mixed", [False, True])
def test_a_stored_response_goes_on_by_the_id_that_the_client_saw(
    ask: Callable[..., Any], api: ResponsesApi, mixed: bool, header: dict[str, str]
) -> None:
    items = begun(ask, api)
    looked = [reasoning("I look."), call("grep", {"pattern": "code is"})]
    api.script(
        *(
            [[*looked, call("fetch", {"url": "x"})]]
            if mixed
            else [looked, [call("fetch", {"url": "x"})]]
        )
    )
    response = ask(items)
    api.script([say("Done.")])
    after = ask(
        outputs(replayed(response), "got it"),
        previous_response_id=response.id,
        extra_headers=header,
    )
    assert after.output_text == "Done."
    assert api.refused == []


def test_a_stored_response_goes_on_while_the_store_fails(
    up: StrictUpstream, api: ResponsesApi, tmp_path: Path
) -> None:
    """Without the outputs of our calls, upstream would refuse every request that goes on from
    there."""
    (tmp_path / "store").write_text("not a folder")
    with (
        served({"default": tight(up.url)}, store=tmp_path / "store") as proxy,
        client_of(proxy) as client,
    ):
        for stream in (False, True):
            ask = asking(client, stream)
            items = begun(ask, api)
            looked = [reasoning("I look."), call("grep", {"pattern": "code is"})]
            api.script(looked, [call("fetch", {"url": "x"})])
            response = ask(items)
            api.script([say("Done.")])
            after = ask(outputs(replayed(response), "got it"), previous_response_id=response.id)
            assert after.output_text == "Done."
    assert api.refused == []


@pytest.mark.parametrize("stream", [False, True])
def test_a_stored_response_of_several_rounds_is_shown_and_deleted_as_one(
    up: StrictUpstream, api: ResponsesApi, tmp_path: Path, stream: bool
) -> None:
    """Also by another process than the one that made it."""
    store = tmp_path / "store"
    with served({"default": tight(up.url)}, store=store) as proxy, client_of(proxy) as client:
        ask = asking(client, stream)
        items = begun(ask, api)
        others = set(api.kept)
        looked = [reasoning("I look."), call("grep", {"pattern": "code is"})]
        api.script(looked, looked, [reasoning("There."), say("It is heliotrope-7291.")])
        shown = ask(items)
        assert len(rounds := set(api.kept) - others) == 3
    with served({"default": tight(up.url)}, store=store) as proxy, client_of(proxy) as client:
        again = client.responses.retrieve(shown.id)
        assert (again.id, again.output_text) == (shown.id, "It is heliotrope-7291.")
        assert history(again) == replayed(shown)
        assert again.usage == shown.usage and [tool.name for tool in again.tools] == ["fetch"]
        with pytest.raises(openai.BadRequestError, match="several rounds"):
            client.responses.retrieve(shown.id, stream=True)
        with client_of(proxy).with_options(api_key="another caller's") as other:
            assert other.responses.retrieve(shown.id).output[-1].type == "function_call", (
                "nothing of ours is shown"
            )
        client.responses.delete(shown.id)
        assert set(api.kept) == others and rounds
        assert not [path for path in proxy.stored() if "continuations" in str(path)]
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(shown.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.delete(shown.id)
    assert api.refused == []


PROGRAM = {"tenant": "acme", "api_keys": [{"sha256": hashlib.sha256(b"sk-test").hexdigest()}]}
ACCOUNT = "7b1d2c0e-6f5a-4a57-9b3a-0d6a6c1f2e11"


@pytest.mark.parametrize(
    ("sections", "options"),
    [
        ({"identity": {"body": "safety_identifier"}}, {"safety_identifier": ACCOUNT}),
        ({"identity": {"body": "safety_identifier"}, **PROGRAM}, {"safety_identifier": "ann"}),
        ({"identity": {"header": "x-account"}}, {"extra_headers": {"x-account": ACCOUNT}}),
    ],
    ids=["body", "body, of a listed key's user", "header"],
)
def test_a_stored_response_of_a_client_with_an_identity_is_reached_by_the_key_that_got_it(
    up: StrictUpstream, api: ResponsesApi, tmp_path: Path, sections: Json, options: Json
) -> None:
    named = {sections.get("tenant", "default"): tight(up.url, **sections)}
    with (
        served({"default": tight(up.url), **named}, store=tmp_path / "store") as proxy,
        client_of(proxy) as client,
    ):
        ask = asking(client, stream=False)
        items = begun(ask, api, **options)
        others = set(api.kept)
        looked = [reasoning("I look."), call("grep", {"pattern": "code is"})]
        api.script(looked, [say("It is heliotrope-7291.")])
        shown = ask(items, **options)
        api.script([say("Done.")])
        assert ask("Go on.", previous_response_id=shown.id, **options).output_text == "Done."
        others |= {list(api.kept)[-1]}
        up.expect_refusals = True
        with pytest.raises(openai.BadRequestError, match="No tool output found"):
            ask("Go on.", previous_response_id=shown.id)
        assert client.responses.retrieve(shown.id).output_text == "It is heliotrope-7291."
        with client_of(proxy).with_options(api_key="another caller's") as other:
            seen = other.responses.retrieve(shown.id, extra_headers=options.get("extra_headers"))
            assert seen.output[-1].type == "function_call", "nothing of ours is shown"
        client.responses.delete(shown.id)
        assert set(api.kept) == others
        assert not [path for path in proxy.stored() if "continuations" in str(path)]
    assert len(api.refused) == 1, "of who says no identity"


def test_a_round_that_cannot_be_deleted_leaves_the_one_that_the_client_knows(
    proxy: Proxy, client: openai.OpenAI, up: StrictUpstream, api: ResponsesApi
) -> None:
    ask = asking(client, stream=False)
    items = begun(ask, api)
    api.script([reasoning("I look."), call("grep", {"pattern": "code is"})], [say("Done.")])
    shown = ask(items)
    [*_, hidden] = api.kept
    up.respond(
        lambda request: (
            whole({"error": {"message": "later"}}, 503) if hidden in request.path else api(request)
        )
    )
    with pytest.raises(openai.InternalServerError):
        client.responses.delete(shown.id)
    assert {shown.id, hidden} <= set(api.kept)
    up.respond(api)
    client.responses.delete(shown.id)
    assert not {shown.id, hidden} & set(api.kept)


def test_nothing_stored_means_no_ids_of_what_is_put_back(
    ask: Callable[..., Any], api: ResponsesApi
) -> None:
    options = {"store": False, "include": ["reasoning.encrypted_content"]}
    items = begun(ask, api, **options)
    api.script(
        [reasoning("I look."), call("grep", {"pattern": "code is"})], [reasoning(), say("Found.")]
    )
    response = ask(items, **options)
    api.script([say("Done.")])
    assert (
        ask([*items, *replayed(response), {"role": "user", "content": "?"}], **options).output_text
        == "Done."
    )
    put_back = [item for item in api.asked[-1]["input"] if item.get("name") == "grep"]
    assert put_back
    assert "id" not in put_back[0]
    assert api.refused == []


@pytest.mark.parametrize("how", ["off", "observe", "mode: off"])
def test_where_nothing_is_put_back_any_more_reasoning_before_a_hidden_call_is_left_out(
    how: str, client: openai.OpenAI, up: StrictUpstream, api: ResponsesApi
) -> None:
    """Upstream refuses it, and the client cannot know why."""
    ask = asking(client, stream=False)
    options: Json = {"store": False, "include": ["reasoning.encrypted_content"]}
    items = begun(ask, api, **options)
    api.script([reasoning("I look."), call("grep", {"pattern": "code is"})], [say("Found.")])
    items += [*replayed(ask(items, **options)), {"role": "user", "content": "?"}]
    api.script([say("Done.")])
    if how == "mode: off":
        policy = tight(up.url, offload={"mode": "off"})
        with served({"default": policy}) as other, client_of(other) as elsewhere:
            reply = asking(elsewhere, stream=False)(items, **options)
    else:
        reply = ask(items, extra_headers={"x-offload": how}, **options)
    assert reply.output_text == "Done."
    [refused] = api.refused
    assert "without its required following item" in refused
    sent = api.asked[-1]["input"]
    kept = [item for item in items if item.get("type") != "reasoning"]
    assert [item.get("call_id") for item in sent] == [item.get("call_id") for item in kept]


def test_a_client_that_leaves_its_history_to_upstream_never_gets_our_tools(
    up: StrictUpstream,
) -> None:
    """Agno and Microsoft Agent Framework go on by `previous_response_id`: with our tools only in
    the first request, upstream would read the prompt twice."""
    up.begin_anew()
    up.respond(made := ResponsesApi())
    with (
        served({"default": {"upstream": {"base_url": up.url}}}) as agents,
        client_of(agents) as client,
    ):
        made.script([call("fetch", {})], [say("Done.")])
        first = asking(client, False)("Read the log.")
        asking(client, False)(outputs(history(first), BIG), previous_response_id=first.id)
        assert [request.json["tools"] for request in up.requests if request.method == "POST"] == [
            [TOOL],
            [TOOL],
        ]


def test_a_client_that_sends_its_history_has_our_tools_from_then_on(up: StrictUpstream) -> None:
    up.begin_anew()
    up.respond(made := ResponsesApi())
    with (
        served({"default": {"upstream": {"base_url": up.url}}}) as agents,
        client_of(agents) as client,
    ):
        begun(asking(client, False), made)
    assert [len(request.json["tools"]) for request in up.requests if request.method == "POST"] == [
        1,
        3,
        3,
    ]


@pytest.mark.parametrize("item", [0, {"type": ["message"]}], ids=str)
def test_an_item_that_no_history_could_hold_reaches_the_client_after_a_hidden_round(
    proxy: Proxy, up: StrictUpstream, client: openai.OpenAI, api: ResponsesApi, item: Any
) -> None:
    items = begun(asking(client, stream=False), api)
    found = {
        "type": "function_call",
        "id": "fc",
        "call_id": "c",
        "name": "grep",
        "arguments": '{"pattern": "is"}',
    }
    outputs: list[Any] = [[{**found, "status": "completed"}], [item]]
    up.respond(
        lambda _: whole(
            {"id": "resp_1", "object": "response", "status": "completed", "output": outputs.pop(0)}
        )
    )
    body = {"model": "m", "input": items, "tools": [TOOL]}
    reply = proxy.post("/v1/responses", body)
    assert (reply.status_code, reply.json().get("output")) == (200, [item])
