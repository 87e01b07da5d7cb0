"""`/v1/messages`, streamed and plain, through the real proxy in front of a strict upstream.

The policy is tight enough that compaction, hidden rounds and mixed turns happen in a short session.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.acceptance.shared import BIG, own_ids, proxy, up
from tests.dialects.messages.api import MessagesApi, call, say, thinking
from tests.dialects.messages.turns import FETCH, accumulated
from tests.fake_upstream import StrictUpstream, whole
from tests.fake_upstream import text as answer
from tests.serving import Proxy, tight

__all__ = ["proxy", "up"]

Json = dict[str, Any]
Ask = Callable[..., Json]

REMINDER = {"type": "text", "text": "<system-reminder>Mind the list.</system-reminder>"}
USER = {"role": "user", "content": "Read the log."}


@pytest.fixture
def api(up: StrictUpstream, request: pytest.FixtureRequest) -> MessagesApi:
    up.begin_anew()
    up.respond(made := MessagesApi(made=own_ids(request)))
    return made


def post(proxy: Proxy, body: Json, path: str = "/v1/messages", **headers: str) -> httpx.Response:
    return proxy.post(
        path, body, "", **{"x-api-key": "sk-test", "anthropic-version": "2023-06-01"}, **headers
    )


def body_of(messages: list[Json], **options: Any) -> Json:
    return {"model": "m", "max_tokens": 4_000, "messages": messages, "tools": [FETCH], **options}


@pytest.fixture(params=[False, True], ids=["plain", "streamed"])
def ask(proxy: Proxy, request: pytest.FixtureRequest) -> Ask:
    """Ask, and return the message as a client makes it."""

    def asking(messages: list[Json], proxy: Proxy = proxy, **options: Any) -> Json:
        reply = post(proxy, body_of(messages, stream=request.param, **options))
        assert reply.status_code == 200, reply.text
        return accumulated(reply.content) if request.param else reply.json()  # type: ignore[no-any-return]

    return asking


def step(message: Json, *texts: str, after: tuple[Json, ...] = ()) -> list[Json]:
    """What the client sends back: the reply as it was, and the results of its calls."""
    called = [block for block in message["content"] if block["type"] == "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": text}
        for block, text in zip(called, texts, strict=True)
    ]
    return [
        {"role": "assistant", "content": message["content"]},
        {"role": "user", "content": [*results, *after]},
    ]


def begun(ask: Ask, api: MessagesApi, **options: Any) -> list[Json]:
    """A history with a large result, after which two more steps were made, so that the result is
    old."""
    messages: list[Json] = [USER]
    for text in (BIG, "small", "small"):
        api.script(
            [
                thinking("I need it."),
                call("fetch", {"url": text[:5]}),
                call("fetch", {"url": "other"}),
            ]
        )
        messages += step(ask(messages, **options), text, "other", after=(REMINDER,))
    return messages


def looked(api: MessagesApi) -> None:
    api.script(
        [thinking("I must look."), say("Let me look."), call("grep", {"pattern": "code is"})],
        [thinking("There."), say("It is heliotrope-7291.")],
    )


THINKER: Json = {"model": "claude-opus-5-5", "thinking": {"type": "adaptive"}}
"""A model that takes its thinking back only behind what it thought about."""


def test_thinking_about_what_was_moved_is_dropped_upstream(ask: Ask, api: MessagesApi) -> None:
    """After two refusals the proxy knows that, and the streamed requests are not refused at all."""
    messages = begun(ask, api, **THINKER)
    looked(api)
    reply = ask(messages, **THINKER)
    assert reply["content"][-1] == say("It is heliotrope-7291.")
    assert [said for said in api.refused if "bound to a different conversation" not in said] == []
    assert api.asked[-1]["thinking"] == THINKER["thinking"] | {
        "block_binding": {"prefix_mismatch_behavior": "drop_block"}
    }


@pytest.mark.parametrize(
    ("how", "why"),
    [
        (
            "off",
            "sent without the thinking that upstream refused: the client sent `x-offload: off`",
        ),
        ("observe", "Sent without the thinking that upstream refused."),
    ],
)
def test_thinking_about_what_was_moved_is_dropped_where_nothing_moves_any_more(
    how: str, why: str, proxy: Proxy, ask: Ask, api: MessagesApi
) -> None:
    messages = begun(ask, api, **THINKER)
    looked(api)
    reply = ask(messages, **THINKER)
    messages += [{"role": "assistant", "content": reply["content"]}, USER]
    before = len(api.refused)
    api.script([say("ok")])
    sent = post(proxy, body_of(messages, **THINKER), **{"x-offload": how})
    assert sent.status_code == 200 and len(api.refused) == before + 1
    assert api.asked[-1]["messages"] == messages
    assert sent.headers["x-offload-reason"] == why


def test_a_client_that_changes_its_history_itself_hears_of_it(
    proxy: Proxy, api: MessagesApi
) -> None:
    api.script([thinking("Hm."), say("Yes.")])
    said = post(proxy, body_of([USER], **THINKER)).json()["content"]
    later = [{"role": "user", "content": "Read."}, {"role": "assistant", "content": said}, USER]
    reply = post(proxy, body_of(later, **THINKER))
    assert reply.status_code == 400
    assert "bound to a different conversation" in reply.json()["error"]["message"]
    assert len(api.refused) == 1


def test_an_untouched_request_and_its_reply_arrive_byte_for_byte(
    proxy: Proxy, api: MessagesApi, up: StrictUpstream
) -> None:
    api.script([thinking("Hm."), say("Hello.")])
    raw = json.dumps(body_of([USER], stream=True), indent=1).encode()
    beta = {"anthropic-version": "2023-06-01", "anthropic-beta": "interleaved-thinking-2025-05-14"}
    reply = proxy.post("/v1/messages", raw, "k", **beta)
    assert up.requests[-1].body == raw
    assert {name: up.requests[-1].header(name) for name in beta} == beta
    assert accumulated(reply.content)["content"][1] == say("Hello.")


def test_clearing_old_thinking_is_no_compaction(proxy: Proxy, ask: Ask, api: MessagesApi) -> None:
    """Claude Code sends this with every request of a session that thinks."""
    edits = [{"type": "clear_thinking_20251015", "keep": "all"}]
    messages = begun(ask, api, context_management={"edits": edits})
    looked(api)
    assert ask(messages, context_management={"edits": edits})["content"][-1] == say(
        "It is heliotrope-7291."
    )
    assert api.asked[-1]["context_management"] == {"edits": edits}
    api.script([say("ok")])
    both = [*edits, {"type": "clear_tool_uses_20250919"}]
    post(proxy, body_of([USER], context_management={"edits": both}))
    assert api.asked[-1]["context_management"] == {"edits": edits}


def test_counted_is_what_would_be_sent(proxy: Proxy, api: MessagesApi, ask: Ask) -> None:
    messages = begun(ask, api)
    looked(api)
    reply = ask(messages)
    later = [
        *messages,
        {"role": "assistant", "content": reply["content"]},
        {"role": "user", "content": "Thanks"},
    ]
    stored = proxy.stored()
    body = {key: value for key, value in body_of(later).items() if key != "max_tokens"}
    counted = post(proxy, body, "/v1/messages/count_tokens")
    assert counted.status_code == 200, counted.text
    assert proxy.stored() == stored
    api.script([say("ok")])
    ask(later)
    assert counted.json()["input_tokens"] > 100
    assert [api.counted[-1][key] for key in ("messages", "tools")] == [
        api.asked[-1][key] for key in ("messages", "tools")
    ]
    assert api.refused == []


def test_errors_have_anthropics_shape(proxy: Proxy, api: MessagesApi) -> None:
    reply = post(proxy, body_of([{"role": "assistant", "content": "x"}]))
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].startswith("messages: first message")
    api.refused.clear()
    with httpx.Client(trust_env=False) as http:
        ours = http.post(
            f"{proxy.url}/messages", content=b"{}", headers={"content-encoding": "nonsense"}
        )
    assert ours.json()["type"] == "error"
    assert ours.json()["error"]["type"] == "invalid_request_error"


def test_the_tenant_s_key_goes_out_as_anthropic_expects_it(
    up: StrictUpstream, serve: Callable[..., Proxy]
) -> None:
    up.begin_anew()
    up.respond(api := MessagesApi(expect_key="sk-theirs"))
    policy = tight(up.url, open=True)
    policy["upstream"] = {"base_url": up.url.removesuffix("/v1"), "api_key": "sk-theirs"}
    proxy = serve({"default": policy})
    api.script([say("ok")], [say("ok")])
    assert post(proxy, body_of([USER]), "/v1/v1/messages").status_code == 200
    assert proxy.post("/v1/messages", body_of([USER]), "mine").status_code == 200
    assert up.requests[-1].header("authorization") is None
    assert api.refused == []


def test_one_tenant_has_an_upstream_for_each_api(
    up: StrictUpstream, serve: Callable[..., Proxy]
) -> None:
    up.begin_anew()
    claude = StrictUpstream()
    with claude:
        claude.respond(api := MessagesApi(expect_key="sk-claude"))
        own = {"base_url": claude.url.removesuffix("/v1"), "api_key": "sk-claude"}
        policy = tight(up.url, open=True, upstreams={"messages": own})
        policy["upstream"]["api_key"] = "sk-openai"
        proxy = serve({"default": policy})
        api.script([say("ok")])
        assert post(proxy, body_of([USER])).json()["content"] == [say("ok")]
        up.script(answer("Hello."))
        chat = {"model": "m", "messages": [USER]}
        assert (
            post(proxy, chat, "/v1/chat/completions").json()["choices"][0]["message"]["content"]
            == "Hello."
        )
        claude.respond(lambda request: whole({"data": []}))
        with httpx.Client(trust_env=False) as http:
            assert (
                http.get(
                    f"{proxy.url}/models", headers={"anthropic-version": "2023-06-01"}
                ).status_code
                == 200
            )
            refused = http.get(f"{proxy.url}/messages/batches", headers={"x-api-key": "k"})
    assert [request.target for request in claude.requests] == ["/v1/messages", "/v1/models"]
    assert {request.header("x-api-key") for request in claude.requests} == {"sk-claude"}
    assert [request.target for request in up.requests] == ["/v1/chat/completions"]
    assert up.requests[0].header("x-api-key") == "sk-openai"
    assert (refused.status_code, refused.json()["type"]) == (403, "error")
