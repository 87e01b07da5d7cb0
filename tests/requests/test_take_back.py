"""What the proxy adds never costs a client its request, and what one caller's requests provoke
touches nobody else."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proxy.dialects.chat import CHAT
from proxy.dialects.messages import MESSAGES
from proxy.errors import UpstreamBroken
from proxy.plan.turn import Verdict
from proxy.requests import relay, versions
from proxy.requests.handler import Chat
from tests.clock import Clock, turns
from tests.dialects.chat.turns import ANSWER, DONE, folded, stream, text, usage
from tests.requests.scripted import JSON, STREAM, ScriptedReply
from tests.requests.test_handler import (
    HELLO,
    LONG,
    NO_TOOLS,
    OVERFLOW,
    POLICY,
    World,
    chat,
    refused,
)
from tests.requests.test_handler import world as world

STREAMED = LONG[:-1] + b', "stream": true}'
NO_USAGE = (
    b'{"error": {"message": "Unknown parameter: \'stream_options\'.", "param": "stream_options"}}'
)
ODD = b'{"error": {"message": "The model expects a single text element per message."}}'
FAILED = b'{"error": {"message": "Failed to call a function.", "code": "tool_use_failed", "failed_generation": "x"}}'
FILTERED = b'{"error": {"message": "The prompt was filtered.", "code": "content_filter"}}'
UNKNOWN = b'{"error": {"message": "The model `m` does not exist.", "code": "model_not_found"}}'


def changed(body: bytes) -> bool:
    return b"/context_store/" in body


# -- what is tried ---------------------------------------------------------------------------------


async def test_refused_usage_is_left_out_and_the_rest_stays(world: World) -> None:
    client, outcome = await world.ask(STREAMED, refused(NO_USAGE), ScriptedReply(ANSWER))
    assert "stream_options" in json.loads(world.sent[0]) and "stream_options" not in json.loads(
        world.sent[1]
    )
    assert changed(world.sent[1]) and b'"grep"' in world.sent[1]
    assert client.status == 200 and text(folded(client.body)) == "It is 42."
    assert (outcome.kind, outcome.reason, outcome.refused) == ("offloaded", "", ("usage",))


MIXED = (
    b"{\"message\": \"Tools with mixed values for 'strict' are not allowed. Please set all tools to 'strict: true' or "
    b'\'strict: false\'", "type": "invalid_request_error", "param": "tools", "code": "wrong_api_format"}'
)


def strict_chat(*strict: bool | None, streams: bool = False) -> bytes:
    """A long chat request with tools of which each is strict, is not, or does not say."""
    tools = [
        {"type": "function", "function": {"name": f"look_{place}", "strict": one}}
        for place, one in enumerate(strict)
    ]
    return chat("word " * 5_000, tools=tools, **({"stream": True} if streams else {}))


class Uniform:
    """An upstream that takes tools only if all are strict, or none, as Cerebras does."""

    def __init__(self, reply: bytes) -> None:
        self.reply, self.taken, self.refused = reply, list[bytes](), 0

    async def send(self, request: Any) -> Any:
        tools = json.loads(request.content).get("tools") or []
        if len({bool(tool["function"].get("strict")) for tool in tools}) > 1:
            self.refused += 1
            return refused(MIXED, 422)
        self.taken.append(request.content)
        return ScriptedReply(self.reply)


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
async def test_where_all_tools_must_be_strict_ours_are_and_that_is_remembered(
    world: World, streams: bool
) -> None:
    upstream = Uniform(ANSWER if streams else HELLO)
    world.upstream = upstream  # type: ignore[assignment]
    world.services = world._services(world.services.settings)
    world.chat = type(world.chat)(world.services, CHAT)
    body, learned = strict_chat(True, True, streams=streams), []
    for _ in range(3):
        client = await world.send(body)
        assert client.status == 200
        learned.append(world.outcomes[-1].refused)
    assert learned == [("loose",), ("loose",), ()] and upstream.refused == 2
    assert all(map(changed, upstream.taken)) and len(set(upstream.taken)) == 1, (
        "each turn repeats the one before"
    )
    ours = [tool["function"] for tool in json.loads(upstream.taken[0])["tools"][2:]]
    assert [(tool["name"], tool["strict"]) for tool in ours] == [
        ("grep", True),
        ("read_file", True),
    ]
    await world.send(chat("word " * 5_000))
    assert b'"strict"' not in upstream.taken[-1] and changed(upstream.taken[-1])
    world.services.threads.close()


@pytest.mark.parametrize("strict", [(False, None), (None,), ()])
async def test_tools_stay_as_they_are_where_the_clients_are_not_strict(
    world: World, strict: Any
) -> None:
    client, outcome = await world.ask(
        strict_chat(*strict), refused(MIXED, 422), ScriptedReply(HELLO)
    )
    assert (client.status, outcome.refused) == (200, ("any",)) and world.sent[1] == strict_chat(
        *strict
    )


async def test_a_client_whose_own_tools_are_mixed_sees_upstreams_words(world: World) -> None:
    client, _ = await world.ask(strict_chat(True, False), refused(MIXED, 422), refused(MIXED, 422))
    assert (client.status, client.body, len(world.sent)) == (422, MIXED, 2)


TEMPLATE = b'{"error": {"message": "chat template: KeyError: tool", "type": "server_error"}}'


@pytest.mark.parametrize("body", [LONG, STREAMED], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("status", "said"),
    [
        (400, ODD),
        (404, b""),
        (422, b"<html>"),
        (400, b'{"detail": [{"msg": "no"}]}'),
        (500, TEMPLATE),
    ],
)
async def test_refusal_in_unknown_words_leads_to_the_clients_own_bytes(
    world: World, body: bytes, status: int, said: bytes
) -> None:
    reply = ANSWER if body == STREAMED else HELLO
    client, outcome = await world.ask(body, refused(said, status), ScriptedReply(reply))
    assert world.sent[1] == body and (client.status, client.body) == (200, reply)
    assert (outcome.kind, outcome.reason, outcome.refused) == ("untouched", "refused", ("any",))


BOUND = b'{"type":"error","error":{"message":"Invalid `signature`. The block is bound to a different conversation."}}'
NO_BETA = (
    b'{"type":"error","error":{"message":"Unexpected value(s) for the `anthropic-beta` header"}}'
)


@pytest.mark.parametrize(
    "said",
    [BOUND, NO_BETA, b'{"error":{"message":"block_binding: Extra inputs are not permitted"}}'],
)
@pytest.mark.parametrize("taken", [True, False])
async def test_where_upstream_will_not_drop_thinking_it_gets_the_clients_own_bytes(
    world: World, said: bytes, taken: bool
) -> None:
    """Servers of this API may not know the beta, and a hostile one may always complain."""
    world.chat = Chat(world.services, MESSAGES)
    use = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "word " * 5_000}
    messages = [
        {"role": "assistant", "content": [thought, use]},
        {"role": "user", "content": [result]},
    ]
    body = json.dumps(
        {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}, *messages]}
    )
    own = ScriptedReply(b'{"type":"message"}', headers=[JSON]) if taken else refused(BOUND)
    client, outcome = await world.ask(
        body.encode(), refused(BOUND), refused(said), refused(said), own
    )
    assert [changed(sent) for sent in world.sent] == [True, True, False, False]
    assert [b"block_binding" in sent for sent in world.sent] == [False, True, True, False]
    assert (
        world.sent[-1] == body.encode()
        and world.upstream.requests[-1].headers.get_all(b"anthropic-beta") == []
    )
    assert (client.status, client.body) == ((200, b'{"type":"message"}') if taken else (400, BOUND))
    assert outcome.refused == (("any",) if taken else ())


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (400, FILTERED),
        (404, UNKNOWN),
        (401, NO_TOOLS),
        (402, ODD),
        (403, ODD),
        (429, NO_TOOLS),
        (500, b""),
        (503, b""),
    ],
)
async def test_refusals_that_nothing_would_avoid_reach_the_client_at_once(
    world: World, status: int, said: bytes
) -> None:
    client, _ = await world.ask(LONG, refused(said, status))
    assert (client.status, client.body, len(world.sent)) == (status, said, 1)


async def test_failed_generation_is_tried_once_more_unchanged_and_teaches_nothing(
    world: World,
) -> None:
    for _ in range(3):
        client, outcome = await world.ask(LONG, refused(FAILED), ScriptedReply(HELLO))
        assert world.sent[-1] == world.sent[-2] and changed(world.sent[-1])
        assert (client.status, outcome.kind, outcome.refused) == (200, "offloaded", ())
    for _ in range(2):
        await world.ask(LONG, refused(FAILED), refused(FAILED), ScriptedReply(HELLO))
        assert world.sent[-1] == LONG
    await world.ask(LONG, ScriptedReply(HELLO))
    assert changed(world.sent[-1])


@pytest.mark.parametrize("own", [ODD, NO_TOOLS])
async def test_client_sees_the_refusal_of_its_own_bytes_which_teaches_nothing(
    world: World, own: bytes
) -> None:
    for _ in range(3):
        client, outcome = await world.ask(LONG, refused(NO_TOOLS), refused(own, 422))
        assert (client.status, client.body) == (422, own)
        assert (outcome.kind, outcome.refused) == ("untouched", ())
    await world.ask(LONG, ScriptedReply(HELLO))
    assert changed(world.sent[-1])


async def test_overflow_of_own_bytes_and_then_a_refusal_of_our_tools(world: World) -> None:
    fitting = chat("word " * 1_500, more=True)
    client, _ = await world.ask(fitting, refused(OVERFLOW), refused(NO_TOOLS))
    assert (client.status, client.body) == (400, OVERFLOW) and len(world.sent) == 2


TOOLS_SAID = "this model does not support tools"
BEGIN: dict[str, Any] = {
    "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]
}
ODD_ERRORS: dict[str, Any] = {
    "OpenAI": json.loads(NO_TOOLS),
    "a text": {"error": TOOLS_SAID},
    "vLLM's own object": {"object": "error", "message": TOOLS_SAID, "code": 400},
    "a status and a message": {"code": 400, "message": TOOLS_SAID},
    "FastAPI": {"detail": [{"loc": ["body", "tools"], "msg": "Extra inputs are not permitted"}]},
    "MiniMax": {"base_resp": {"status_code": 2013, "status_msg": TOOLS_SAID}, "choices": None},
    "Gemini's list": [{"error": {"message": TOOLS_SAID, "code": 400}}],
    "OpenRouter's choice": {
        "choices": [
            {"index": 0, "delta": {"content": ""}, "error": {"message": TOOLS_SAID, "code": 400}}
        ]
    },
}


@pytest.mark.parametrize("error", ODD_ERRORS.values(), ids=ODD_ERRORS.keys())
async def test_error_in_the_place_of_a_reply_may_have_any_shape(world: World, error: Any) -> None:
    for events in (b": keep-alive\n\n" + stream(error, DONE), stream(BEGIN) + stream(error, DONE)):
        client, outcome = await world.ask(
            STREAMED, ScriptedReply(events, headers=[STREAM]), ScriptedReply(ANSWER)
        )
        assert world.sent[-1] == STREAMED and client.body == ANSWER and outcome.refused == ("any",)
        world = World()
    whole = json.dumps(error).replace("delta", "message").encode()
    client, outcome = await world.ask(
        LONG, ScriptedReply(whole, headers=[JSON]), ScriptedReply(HELLO)
    )
    assert world.sent[-1] == LONG and client.body == HELLO and outcome.refused == ("any",)


@pytest.mark.parametrize("data", [b'{"reason": "tools"}', b'"no tools"', b"no tools"])
async def test_event_that_is_named_an_error_is_a_refusal_whatever_its_data_says(
    world: World, data: bytes
) -> None:
    said = ScriptedReply(b"event: error\ndata: " + data + b"\n\n", headers=[STREAM])
    client, _ = await world.ask(STREAMED, said, ScriptedReply(ANSWER))
    assert world.sent[-1] == STREAMED and client.body == ANSWER


@pytest.mark.parametrize("nothing", [None, "", {}, [], False])
async def test_reply_with_an_empty_error_is_a_reply(world: World, nothing: Any) -> None:
    start = {**BEGIN, "error": nothing}
    client, outcome = await world.ask(STREAMED, ScriptedReply(stream(start) + ANSWER))
    assert client.body.startswith(stream(start)) and text(folded(client.body)) == "It is 42."
    assert (outcome.kind, outcome.refused, len(world.sent)) == ("offloaded", (), 1)


class Resumed(ScriptedReply):
    """A reply whose chunks go on where they were left, as those of a real one do."""

    def __init__(self, clock: Clock, *steps: Any, status: int) -> None:
        super().__init__(*steps, status=status, headers=[JSON])
        self._left, self._clock = iter(steps), clock

    async def __aiter__(self) -> Any:
        for step in self._left:
            if isinstance(step, Exception):
                raise step
            if isinstance(step, float):
                self._clock.move(step)
                await turns()
            else:
                yield step


ENDLESS: dict[str, list[Any]] = {
    "too long": [b"x" * 60] * 4,
    "too slow": [b"x", 20.0] * 4,
    "broken off": [b"x", UpstreamBroken("it broke off")],
}


@pytest.mark.parametrize("steps", ENDLESS.values(), ids=ENDLESS.keys())
async def test_refusal_that_cannot_be_read_whole_costs_the_client_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch, clock: Clock, steps: list[Any]
) -> None:
    monkeypatch.setattr(relay, "WHOLE_LIMIT", 200 if len(steps) < 8 else 1 << 20)
    monkeypatch.setattr(versions, "REFUSAL_SECONDS", 30)
    client, _ = await world.ask(LONG, Resumed(clock, *steps, status=400), ScriptedReply(HELLO))
    assert world.sent[-1] == LONG and client.body == HELLO
    client, _ = await world.ask(LONG, Resumed(clock, *steps, status=429))
    assert client.status == 502 and b"429" in client.body
    if not isinstance(steps[-1], Exception):
        client, _ = await world.ask(chat(), Resumed(clock, *steps, status=400))
        assert (client.status, client.body) == (
            400,
            b"".join(step for step in steps if isinstance(step, bytes)),
        )


async def test_error_after_the_head_of_a_stream_is_learned_and_distorts_no_counts(
    world: World,
) -> None:
    where = msgspec.structs.replace(POLICY.upstream, context_window=40_000)
    world.policy = msgspec.structs.replace(POLICY, upstream=where)
    late = stream(BEGIN) + stream(json.loads(NO_TOOLS), DONE)
    billed = stream({"choices": [], "usage": usage(len(STREAMED), 10)})
    for _ in range(2):
        own = ScriptedReply(ANSWER.replace(b"data: [DONE]", billed + b"data: [DONE]"))
        client, outcome = await world.ask(
            STREAMED, ScriptedReply(stream(BEGIN), late, headers=[STREAM]), own
        )
        assert world.sent[-1] == STREAMED and text(folded(client.body)) == "It is 42."
        assert (outcome.refused, len(world.sent) % 2) == (("any",), 0)
    client, _ = await world.ask(STREAMED, ScriptedReply(ANSWER))
    assert world.sent[-1] == STREAMED and client.body == ANSWER and len(world.sent) == 5


async def test_final_error_after_the_head_of_a_stream_costs_no_other_request(world: World) -> None:
    said = stream({"error": {"code": 429, "message": "Rate limited"}}, DONE)
    client, _ = await world.ask(STREAMED, ScriptedReply(stream(BEGIN), said, headers=[STREAM]))
    assert b"Rate limited" in client.body and len(world.sent) == 1


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    status=st.sampled_from([400, 404, 422, 401, 403, 409, 413, 429, 500, 503]),
    said=st.sampled_from([ODD, NO_TOOLS, NO_USAGE, FAILED, OVERFLOW, b"", b"{}", b"[]"])
    | st.binary(max_size=40)
    | st.text("a'{}[]\": tolsremu", max_size=60).map(
        lambda words: json.dumps({"error": {"message": words}}).encode()
    ),
    streams=st.booleans(),
    accepts=st.booleans(),
)
async def test_whatever_upstream_says_the_client_gets_a_reply_or_a_refusal_of_its_own_bytes(
    status: int, said: bytes, streams: bool, accepts: bool
) -> None:
    """Upstream refuses every changed request in these words, and takes the client's own bytes or
    has words for them."""
    world, body = World(), STREAMED if streams else LONG
    own = ScriptedReply(ANSWER if streams else HELLO) if accepts else refused(b"own", 418)
    world.upstream = Choosing(body, own, status, said)  # type: ignore[assignment]
    world.services = world._services(world.services.settings)
    world.chat = type(world.chat)(world.services, CHAT)
    client = await world.send(body)
    world.services.threads.close()
    if CHAT.complaint(status, said) is Verdict.FINAL:
        assert (client.status, client.body) == (status, said)
    else:
        assert (client.status, client.body) == (
            (200, ANSWER if streams else HELLO) if accepts else (418, b"own")
        )


class Choosing:
    """An upstream that has one reply for the client's own bytes, and refuses everything else."""

    def __init__(self, own: bytes, reply: ScriptedReply, status: int, said: bytes) -> None:
        self._own, self._reply, self._refusal = own, reply, (status, said)

    async def send(self, request: Any) -> Any:
        status, said = self._refusal
        return self._reply if request.content == self._own else refused(said, status)


# -- what is learned, and by whom ------------------------------------------------------------------


async def test_refused_usage_is_believed_and_tried_again_later(world: World) -> None:
    for _ in range(2):
        await world.ask(STREAMED, refused(NO_USAGE), ScriptedReply(ANSWER))
    _, outcome = await world.ask(STREAMED, ScriptedReply(ANSWER))
    assert changed(world.sent[-1]) and "stream_options" not in json.loads(world.sent[-1])
    assert outcome.refused == ()
    world.services.refusals._clock = lambda: 1e12
    await world.ask(STREAMED, ScriptedReply(ANSWER))
    assert "stream_options" in json.loads(world.sent[-1])
    await world.ask(STREAMED, ScriptedReply(ANSWER))
    assert "stream_options" in json.loads(world.sent[-1]), "upstream takes it by now"


async def test_refusal_in_unknown_words_is_believed_of_this_conversation_alone(
    world: World,
) -> None:
    for _ in range(2):
        await world.ask(LONG, refused(ODD), ScriptedReply(HELLO))
    _, outcome = await world.ask(LONG, ScriptedReply(HELLO))
    assert world.sent[-1] == LONG and outcome.reason == "refused"
    other = LONG.replace(b"What is it?", b"Who is it?")
    _, outcome = await world.ask(other, ScriptedReply(HELLO))
    assert changed(world.sent[-1]) and outcome.kind == "offloaded"
