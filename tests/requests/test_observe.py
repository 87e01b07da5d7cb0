"""A request that is only observed: it goes upstream as it came, and the plan is recorded beside
it."""

from __future__ import annotations

import gzip
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from proxy.dialects.messages import MESSAGES
from proxy.dialects.responses import RESPONSES
from proxy.errors import Overloaded
from proxy.policy import Mode, Policy
from proxy.requests import handler
from proxy.requests.handler import Chat
from proxy.telemetry.outcome import Outcome
from tests.dialects.chat.turns import ANSWER, whole
from tests.requests.scripted import JSON, STREAM, ScriptedReply
from tests.requests.test_handler import LONG, OFF, OVERFLOW, World, chat, refused, reply_headers
from tests.requests.test_handler import POLICY as FREE

CHUNKED = (b"transfer-encoding", b"chunked")
OBSERVE = [CHUNKED, (b"x-offload", b" Observe ")]
BILLED = {
    "prompt_tokens": 10_000,
    "completion_tokens": 7,
    "total_tokens": 10_007,
    "prompt_tokens_details": {"cached_tokens": 0},
}
REPLY = whole({"content": "It is 42."}, usage=BILLED)


POLICY = msgspec.structs.replace(
    FREE,
    offload=msgspec.structs.replace(FREE.offload, keep_views=1, cached_read=0.1, cache_write=1.25),
)


Observing = Callable[[Policy], Policy]
"""Returns the policy by which requests are only observed."""


@pytest.fixture(params=["mode", "holdout"])
def observing(request: pytest.FixtureRequest) -> Observing:
    """By its mode, or because each conversation is held out: the two are alike."""
    changes = {"mode": Mode.OBSERVE} if request.param == "mode" else {"holdout": 1.0}
    return lambda policy: replace(policy, offload=replace(policy.offload, **changes))


@pytest.fixture
async def world(observing: Observing) -> AsyncIterator[World]:
    """One in which nothing may be stored, asked for in the background, or learned."""
    world = World()
    world.policy = observing(POLICY)
    world.fail_store()
    yield world
    await world.close()
    assert not world.store.records


def seen(outcome: Outcome) -> tuple[str, str, str, str]:
    return outcome.kind, outcome.mode, outcome.usage, outcome.reason


async def test_the_request_and_its_reply_go_byte_for_byte_and_the_plan_is_reported(
    world: World,
) -> None:
    client, outcome = await world.ask(LONG, ScriptedReply(REPLY[:30], REPLY[30:]))
    assert world.sent == [LONG] and client.body == REPLY and client.complete
    assert seen(outcome) == ("observed", "observe", "billed", "")
    assert (outcome.compacted, outcome.rounds, outcome.store_errors) == (1, 0, {})
    assert outcome.tokens_after < 3_000 < 25_000 < outcome.tokens_before
    assert (outcome.prompt_tokens, outcome.completion_tokens, outcome.cached_tokens) == (
        10_000,
        7,
        0,
    )
    assert outcome.cost_before == 12_500, "10,000 tokens, written to the cache at 1.25"
    assert 0 < outcome.cost_after < 2_000
    headers = reply_headers(client)
    assert headers[b"x-offload-mode"] == b"observe"
    assert headers[b"x-offload-tokens-before"] == b"%d" % outcome.tokens_before
    assert headers[b"x-offload-tokens-after"] == b"%d" % outcome.tokens_after
    assert (headers[b"x-offload-compacted"], headers[b"x-offload-compressed"]) == (b"1", b"0")
    assert outcome.words.startswith("Only observed; the plan: Sent only a preview of 1 new result")


def spaced(request: bytes) -> bytes:
    """The request with spaces in the arguments of its call, as most models write them."""
    body = json.loads(request)
    body["messages"][1]["tool_calls"][0]["function"]["arguments"] = (
        '{ "q" : [ 1 , 2 ,\n\n 3 , 4 ] , "of" : { } }'
    )
    return json.dumps(body).encode()


@pytest.mark.parametrize(
    "body", [LONG, spaced(LONG), spaced(chat("word"))], ids=["moved", "spaces", "unchanged"]
)
async def test_it_reports_what_offloading_then_does(world: World, body: bytes) -> None:
    _, foreseen = await world.ask(body, ScriptedReply(REPLY))
    real = World()
    _, done = await real.ask(body, ScriptedReply(REPLY))
    await real.close()
    assert (foreseen.tokens_before, foreseen.tokens_after) == (
        done.tokens_before,
        done.tokens_after,
    )
    assert (foreseen.compacted, foreseen.compressed, foreseen.events) == (
        done.compacted,
        done.compressed,
        done.events,
    )


async def test_a_client_asks_for_it_and_the_plan_is_that_of_its_policy(world: World) -> None:
    world.policy = POLICY
    client, outcome = await world.ask(LONG, ScriptedReply(REPLY), headers=OBSERVE)
    assert world.sent == [LONG] and client.body == REPLY
    assert seen(outcome) == ("observed", "observe", "billed", "") and outcome.compacted == 1


@pytest.mark.parametrize("why", ["policy", "header"])
async def test_off_is_stronger(world: World, observing: Observing, why: str) -> None:
    off = replace(POLICY, offload=replace(POLICY.offload, mode=Mode.OFF))
    world.policy = off if why == "policy" else observing(POLICY)
    headers = OBSERVE if why == "policy" else [CHUNKED, (b"x-offload", b"off")]
    client, outcome = await world.ask(LONG, ScriptedReply(REPLY), headers=headers)
    assert world.sent == [LONG]
    assert seen(outcome) == ("untouched", "off", "", "off" if why == "policy" else "header")
    assert reply_headers(client)[b"x-offload-mode"] == b"off"


@pytest.mark.parametrize(
    ("reply", "usage"),
    [
        (ScriptedReply(ANSWER), "unknown"),  # its usage says nothing of the cache
        (
            ScriptedReply(
                ANSWER.replace(b'"usage"', b'"spent"').replace(b"_tokens", b""), headers=[STREAM]
            ),
            "unknown",
        ),
        (
            ScriptedReply(b'data: {"usage": %b}\n\ndata: [DONE]\n\n' % json.dumps(BILLED).encode()),
            "billed",
        ),
        (
            ScriptedReply(gzip.compress(REPLY), headers=[JSON, (b"Content-Encoding", b"gzip")]),
            "billed",
        ),
        (ScriptedReply(REPLY, headers=[JSON, (b"Content-Encoding", b"gzip")]), "unknown"),
        # clients ignore it, too
        (ScriptedReply(REPLY, headers=[JSON, (b"Content-Encoding", b"rot13")]), "billed"),
        (
            ScriptedReply(
                gzip.compress(b" " * (4 << 20) + REPLY), headers=[(b"Content-Encoding", b"gzip")]
            ),
            "unknown",
        ),
    ],
)
async def test_costs_rest_on_upstreams_numbers_where_it_gives_any(
    world: World, reply: ScriptedReply, usage: str
) -> None:
    body = chat("word " * 5_000, more=True, stream=True)
    client, outcome = await world.ask(body, reply)
    assert world.sent == [body] and client.body == b"".join(
        step for step in reply.steps if isinstance(step, bytes)
    )
    assert seen(outcome) == ("observed", "observe", usage, "")
    assert outcome.cost_before == 12_500 if usage == "billed" else outcome.cost_before > 2_000
    assert outcome.cost_after > 0


async def test_a_refusal_reaches_the_client_and_teaches_nothing(world: World) -> None:
    client, outcome = await world.ask(LONG, refused(OVERFLOW))
    assert (client.status, client.body, world.sent) == (400, OVERFLOW, [LONG])
    assert (outcome.kind, outcome.status, outcome.usage) == ("observed", 400, "unknown")
    assert world.services.known.window("acme-1", POLICY, "m") is None


async def test_a_limit_that_does_not_fit_stays_as_it_came(
    world: World, observing: Observing
) -> None:
    world.policy = observing(
        replace(POLICY, upstream=replace(POLICY.upstream, context_window=4_000))
    )
    body = chat(max_tokens=3_990)
    await world.ask(body, ScriptedReply(REPLY))
    assert world.sent == [body]


async def test_what_cannot_be_planned_says_why(world: World) -> None:
    for body, reason in ((b"{", "invalid"), (chat(n=2), "field")):
        client, outcome = await world.ask(body, ScriptedReply(REPLY))
        assert world.sent[-1] == body and client.body == REPLY
        assert seen(outcome) == ("untouched", "off", "", reason)


async def test_nothing_is_asked_for_in_the_background(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(
        world.services.known, "list_models", lambda tenant, headers: asked.append(tenant)
    )
    await world.ask(LONG, ScriptedReply(REPLY))
    world.policy = OFF
    await world.ask(LONG, ScriptedReply(REPLY))
    assert not asked
    world.policy = POLICY
    world.store._fault = None
    await world.ask(chat(), ScriptedReply(REPLY))
    assert len(asked) == 1


def messages_stream(usage: Any, later: Any) -> bytes:
    """A stream of Messages, which says at its beginning what the prompt cost."""
    begin = json.dumps({"type": "message_start", "message": {"id": "m", "usage": usage}})
    text = json.dumps(
        {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "word " * 3_000}}
    )
    end = json.dumps(
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": later}
    )
    return b"".join(b"data: %b\n\n" % event.encode() for event in (begin, text, end))


@pytest.mark.parametrize(
    ("usage", "later", "found"),
    [
        (
            {"input_tokens": 500, "cache_read_input_tokens": 9_000, "output_tokens": 1},
            {"output_tokens": 7},
            (9_500, 9_000, 7),
        ),
        ({"input_tokens": 500, "output_tokens": 1}, {"output_tokens": 7}, (500, 0, 7)),
        ({}, {"input_tokens": 500, "cache_read_input_tokens": 0, "output_tokens": 7}, (500, 0, 7)),
        (None, None, (0, 0, 0)),
    ],
)
async def test_messages_are_observed_and_billed_by_both_ends_of_a_stream(
    world: World, usage: Any, later: Any, found: tuple[int, int, int]
) -> None:
    world.chat = Chat(world.services, MESSAGES)
    asked = [
        {"role": "user", "content": "What is it?"},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "c", "name": "search", "input": {}}],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c", "content": "word " * 5_000}],
        },
        {"role": "assistant", "content": "It is 42."},
        {"role": "user", "content": "Sure?"},
    ]
    body = json.dumps({"model": "m", "max_tokens": 9, "stream": True, "messages": asked}).encode()
    reply = messages_stream(usage, later)
    client, outcome = await world.ask(
        body, ScriptedReply(reply[:100], reply[100:], headers=[STREAM])
    )
    assert world.sent == [body] and client.body == reply
    billed = "billed" if "cache_read" in json.dumps([usage, later]) else "unknown"
    assert seen(outcome) == ("observed", "observe", billed, "") and outcome.compacted == 1
    assert (outcome.prompt_tokens, outcome.cached_tokens, outcome.completion_tokens) == found


MANAGED = {
    "edits": [{"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": 9}}]
}


async def test_a_history_that_upstream_is_to_clear_is_planned_as_if_it_were_not(
    world: World,
) -> None:
    """What upstream bills is less than the history then, and says nothing of the plan's tokens."""
    world.chat = Chat(world.services, MESSAGES)
    verify = replace(world.policy.offload, verify=1.0, input_price=1.0)
    world.policy = replace(world.policy, offload=verify)
    call = {"type": "tool_use", "id": "c", "name": "search", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "word " * 5_000}
    asked = [
        {"role": "user", "content": "What is it?"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
        {"role": "assistant", "content": "It is 42."},
        {"role": "user", "content": "Sure?"},
    ]
    body = json.dumps(
        {"model": "m", "max_tokens": 9, "messages": asked, "context_management": MANAGED}
    ).encode()
    usage = {"input_tokens": 500, "cache_read_input_tokens": 0, "output_tokens": 1}
    reply = json.dumps({"type": "message", "role": "assistant", "content": [], "usage": usage})
    _, outcome = await world.ask(body, ScriptedReply(reply.encode()))
    assert world.sent == [body]
    assert seen(outcome) == ("observed", "observe", "billed", "")
    assert (outcome.compacted, outcome.cost_before) == (1, 625)
    assert outcome.tokens_after < 3_000 < 25_000 < outcome.tokens_before
    assert 300 < outcome.cost_after < outcome.tokens_after, "a part would be cached"


async def test_what_is_only_observed_is_not_refused_for_want_of_a_plan(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def busy(*_: Any, **_more: Any) -> None:
        raise Overloaded("too much work")

    monkeypatch.setattr(handler, "plan", busy)
    client, outcome = await world.ask(LONG, ScriptedReply(REPLY))
    assert world.sent == [LONG] and (client.status, client.body) == (200, REPLY)
    assert seen(outcome) == ("untouched", "off", "", "busy") and not outcome.fault


async def test_where_the_model_may_not_read_back_nothing_is_put_back(world: World) -> None:
    body = chat("word " * 5_000, tool_choice="none")
    _, outcome = await world.ask(body, ScriptedReply(REPLY))
    assert world.sent == [body]
    assert seen(outcome) == ("untouched", "off", "", "field")
    assert outcome.obstacle == "tool_choice"


async def test_a_continuation_that_no_record_knows_goes_up_as_it_came(world: World) -> None:
    world.chat = Chat(world.services, RESPONSES)
    body = json.dumps({"model": "m", "input": "go on", "previous_response_id": "resp_1"}).encode()
    _, outcome = await world.ask(body, ScriptedReply(REPLY))
    assert world.sent == [body]
    assert seen(outcome) == ("untouched", "off", "", "field")
