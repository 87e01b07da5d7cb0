"""A chat request from its first byte to its last, and the outcome that is recorded of it. No
server, no network."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from proxy import rawjson
from proxy.dialects.chat import CHAT
from proxy.dialects.messages import MESSAGES
from proxy.errors import StoreFault, UpstreamBroken
from proxy.plan.history import History
from proxy.plan.turn import Addition
from proxy.policies.tenants import Tenant
from proxy.policy import Inject, Mode, Policy
from proxy.policy import Tools as ToolsPolicy
from proxy.policy import Upstream as Where
from proxy.requests import summaries
from proxy.requests.cache import MessageCache
from proxy.requests.handler import Chat
from proxy.requests.planned import Planned
from proxy.requests.relay import Relay
from proxy.requests.rounds import Services
from proxy.requests.summaries import Summaries
from proxy.requests.windows import Known
from proxy.settings import Settings
from proxy.stores import Entry
from proxy.stores.guarded import Guarded
from proxy.telemetry.outcome import Outcome
from proxy.threads import Background, WorkPool
from tests import written
from tests.asgi import Headers, ScriptedClient
from tests.dialects.chat.turns import ANSWER, called, calls, events, read, text, usage, whole
from tests.requests.planning import Counting
from tests.requests.scripted import JSON, STREAM, ScriptedReply, ScriptedUpstream

POLICY = Policy(
    tenant="acme",
    upstream=Where(base_url="http://upstream/v1"),
    offload=written.offload(
        mode=Mode.COMPACT,
        max_total_tokens=50_000,
        cached_read=0,
        cache_write=1,
        max_tool_message_tokens=50,
        unseen_limit=20_000,
    ),
)
OVERFLOW = b'{"error": {"message": "maximum context length is 4096 tokens", "code": "context_length_exceeded"}}'
CHUNKED = (b"transfer-encoding", b"chunked")
NO_TOOLS = b'{"error": {"message": "this model does not support tools"}}'
HELLO = whole({"content": "It is 42."}, usage=usage(100, 10))


class MemoryStore:
    """Records in a dictionary; with a `fault`, none at all."""

    def __init__(self, fault: StoreFault | None = None) -> None:
        self.records: dict[str, bytes] = {}
        self._fault = fault

    def _answer(self) -> None:
        if self._fault is not None:
            raise self._fault

    async def put(self, key: str, value: bytes, *, sync: bool = True) -> bool:
        self._answer()
        return self.records.setdefault(key, value) is value

    async def get(self, key: str) -> bytes | None:
        self._answer()
        return self.records.get(key)

    async def get_many(self, keys: Sequence[str]) -> Sequence[bytes | None]:
        self._answer()
        return [self.records.get(key) for key in keys]

    async def list(self, prefix: str) -> AsyncGenerator[Entry, None]:
        for key, value in self.records.items():
            yield Entry(key, len(value), 0)

    async def delete(self, key: str) -> None:
        self.records.pop(key, None)

    async def discard(self, key: str, value: bytes) -> None:
        if self.records.get(key) == value:
            del self.records[key]

    async def renew(self, keys: Sequence[str], seconds: float) -> None:
        self._answer()

    async def close(self) -> None: ...


class World:
    """A process's chat handler between a scripted upstream and scripted clients."""

    def __init__(self) -> None:
        self.upstream = ScriptedUpstream()
        self.store = MemoryStore()
        self.outcomes: list[Outcome] = []
        self.policy = POLICY
        self.services = self._services(Settings(body_limit=8 << 20))
        self.chat = Chat(self.services, CHAT)

    def _services(self, settings: Settings) -> Services:
        threads = WorkPool("test")
        reader = MessageCache(Counting(), threads)

        upstream: Any = self.upstream
        store = Guarded(self.store, warn=lambda kind, text: None)
        known = Known(upstream, Background(0), threads)
        return Services(
            settings=settings,
            upstream=upstream,
            relay=Relay(settings, upstream, self.outcomes.append),
            store=store,
            reader=reader,
            summaries=Summaries(store, reader, threads, lambda outcome: None),
            background=Background(100),
            threads=threads,
            known=known,
            sink=lambda outcome, *_: self.outcomes.append(outcome),
        )

    def fail_store(self) -> None:
        self.store._fault = StoreFault("the disk is full")

    async def ask(
        self, body: bytes, *replies: ScriptedReply | Exception, headers: Headers | None = None
    ) -> tuple[ScriptedClient, Outcome]:
        """One request, answered by these replies of upstream's one after another."""
        client = ScriptedClient(body, b"", headers=headers, path="/v1/chat/completions")
        return client, await self.serve(client, *replies)

    async def serve(self, client: ScriptedClient, *replies: ScriptedReply | Exception) -> Outcome:
        self.upstream.replies = [*self.upstream.replies[: len(self.upstream.requests)], *replies]
        await self.send(client)
        assert len(self.outcomes) == 1, "one outcome for each request"
        assert all(reply.closed for reply in self.upstream.read)
        return self.outcomes.pop()

    async def send(
        self, client: ScriptedClient | bytes, namespace: str = "acme-1"
    ) -> ScriptedClient:
        """One request, for whatever upstream answers."""
        client = (
            ScriptedClient(client, b"", path="/v1/chat/completions")
            if isinstance(client, bytes)
            else client
        )
        client.scope["raw_path"] = b"/v1/chat/completions"
        await self.chat(client.client(), Tenant(self.policy, namespace))
        return client

    async def close(self) -> None:
        await self.services.background.close(1)
        self.services.threads.close()

    @property
    def sent(self) -> list[bytes]:
        """The bodies that went upstream."""
        return [request.content for request in self.upstream.requests]


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    yield world
    await world.close()


def chat(result: str = "", *, more: bool = False, **members: Any) -> bytes:
    """A chat request; with a `result` of the client's tool, and two messages `more` after it."""
    messages: list[Any] = [{"role": "user", "content": "What is it?"}]
    if result:
        messages += [
            {"role": "assistant", "content": None, "tool_calls": [called("search", id="c")]},
            {"role": "tool", "tool_call_id": "c", "content": result},
        ]
    if more:
        messages += [
            {"role": "assistant", "content": "It is 42."},
            {"role": "user", "content": "Sure?"},
        ]
    return json.dumps({"model": "m", "messages": messages, **members}).encode()


LONG = chat("word " * 5_000)
"""A request whose tool result is moved before it is sent for the first time."""


def refused(body: bytes, status: int = 400) -> ScriptedReply:
    return ScriptedReply(body, status=status, headers=[JSON])


def reply_headers(client: ScriptedClient) -> dict[bytes, bytes]:
    return {name.lower(): value for name, value in client.headers}


async def test_a_member_that_nobody_knows_is_named_and_the_policy_can_call_it_harmless(
    world: World,
) -> None:
    body = json.loads(LONG)
    body["messages"][-1]["timestamp"] = 1
    client, outcome = await world.ask(json.dumps(body).encode(), ScriptedReply(HELLO))
    told = "what has `messages[].timestamp` stays as it is, because the proxy does not know what that means"
    assert told in outcome.words and told.encode() in reply_headers(client)[b"x-offload-reason"]
    assert outcome.compacted == 0
    where = replace(POLICY.upstream, members=("messages[].timestamp",))
    world.policy = replace(POLICY, upstream=where)
    _, outcome = await world.ask(json.dumps(body).encode(), ScriptedReply(HELLO))
    moved = json.loads(world.sent[-1])["messages"][-1]
    assert (
        outcome.compacted == 1 and moved["timestamp"] == 1 and "/context_store/" in moved["content"]
    )


@pytest.mark.parametrize("name", [b"content-digest", b"repr-digest", b"digest", b"content-md5"])
async def test_a_digest_of_the_clients_body_goes_up_with_that_body_alone(
    world: World, name: bytes
) -> None:
    given = [CHUNKED, (name, b"sha-256=:x:")]
    for body, passes in ((LONG, False), (chat(), True)):
        await world.ask(body, ScriptedReply(HELLO), headers=given)
        assert world.upstream.requests[-1].headers.has(name) is passes


ASKED_ELSEWHERE = {
    "Claude Code": "<tool_use_error>File does not exist.</tool_use_error>",
    "a shell": "cat: PATH: No such file or directory",
    "opencode": "Error: File not found: PATH",
    "Node": "ENOENT: no such file or directory, open 'PATH'",
    "MCP's server for files": "Access denied - path outside allowed directories: PATH not in /home",
}


@pytest.mark.parametrize("said", ASKED_ELSEWHERE.values(), ids=ASKED_ELSEWHERE.keys())
async def test_a_reference_that_another_tool_was_asked_for_leads_to_ours(
    world: World, said: str
) -> None:
    await world.ask(LONG, ScriptedReply(HELLO))
    [path] = re.findall(rb"/context_store/[\w.-]+?\.txt", world.sent[0])
    body = json.loads(LONG)
    asked = called("Read", json.dumps({"file_path": path.decode()}), id="r")
    body["messages"] += [
        {"role": "assistant", "content": None, "tool_calls": [asked]},
        {"role": "tool", "tool_call_id": "r", "content": said.replace("PATH", path.decode())},
    ]
    await world.ask(json.dumps(body).encode(), ScriptedReply(HELLO))
    last = json.loads(world.sent[1])["messages"][-1]["content"]
    line = f"[{path.decode()} is no file of this tool's: read_file reads it, and grep searches it.]"
    assert last == f"{body['messages'][-1]['content']}\n\n{line}"
    body["messages"] += [
        {"role": "assistant", "content": "Hm."},
        {"role": "user", "content": "And?"},
    ]
    await world.ask(json.dumps(body).encode(), ScriptedReply(HELLO))
    assert json.loads(world.sent[2])["messages"][4]["content"] == last, "each later turn repeats it"


@pytest.mark.parametrize(
    ("arguments", "result"),
    [
        ({"file_path": "/src/main.py"}, "File does not exist."),
        ({"file_path": "PATH"}, "1: the text of a file"),
        ({"file_path": "PATH"}, "not found " * 500),
    ],
)
async def test_no_other_result_gets_a_line(
    world: World, arguments: dict[str, str], result: str
) -> None:
    await world.ask(LONG, ScriptedReply(HELLO))
    [path] = re.findall(rb"/context_store/[\w.-]+?\.txt", world.sent[0])
    body = json.loads(LONG)
    asked = called("Read", json.dumps(arguments).replace("PATH", path.decode()), id="r")
    body["messages"] += [
        {"role": "assistant", "content": None, "tool_calls": [asked]},
        {"role": "tool", "tool_call_id": "r", "content": result},
    ]
    await world.ask(json.dumps(body).encode(), ScriptedReply(HELLO))
    assert b"is no file of this tool's" not in world.sent[1]


# -- what a request comes to -----------------------------------------------------------------------


async def test_long_tool_result_is_offloaded_and_counted(world: World) -> None:
    client, outcome = await world.ask(LONG, ScriptedReply(HELLO))
    sent = json.loads(world.sent[0])
    assert "/context_store/" in sent["messages"][2]["content"] and len(world.sent[0]) < len(LONG)
    assert [tool["function"]["name"] for tool in sent["tools"]] == ["grep", "read_file"]
    assert text(read(client.body)) == "It is 42."
    assert (outcome.kind, outcome.status, outcome.fault, outcome.reason) == (
        "offloaded",
        200,
        "",
        "",
    )
    assert (outcome.compacted, outcome.compressed, outcome.reinserted, outcome.rounds) == (
        1,
        0,
        0,
        0,
    )
    assert outcome.tokens_after < 3_000 < 25_000 < outcome.tokens_before
    assert (outcome.prompt_tokens, outcome.completion_tokens) == (100, 10)
    headers = reply_headers(client)
    assert headers[b"x-offload-tokens-before"] == b"%d" % outcome.tokens_before
    assert headers[b"x-offload-tokens-after"] == b"%d" % outcome.tokens_after
    assert (headers[b"x-offload-compacted"], headers[b"x-offload-compressed"]) == (b"1", b"0")
    assert headers[b"x-offload-rounds"] == b"0"


async def test_internal_round_is_answered_remembered_and_counted(world: World) -> None:
    call = whole(calls(called("grep", '{"pattern": "word"}')), "tool_calls", usage=usage(100, 10))
    client, outcome = await world.ask(LONG, ScriptedReply(call), ScriptedReply(HELLO))
    assert text(read(client.body)) == "It is 42."
    assert json.loads(world.sent[1])["messages"][-1]["role"] == "tool"
    assert (outcome.rounds, outcome.prompt_tokens, outcome.completion_tokens) == (1, 200, 20)
    assert [(use.tool, use.result) for use in outcome.tool_uses] == [("grep", "ok")]
    assert any("/rounds/" in key for key in world.store.records)


# -- requests that have no plan --------------------------------------------------------------------

OFF = msgspec.structs.replace(POLICY, offload=written.offload(mode=Mode.OFF))
TAKEN = {
    "tools": [{"type": "function", "function": {"name": name}} for name in ("grep", "offload_grep")]
}


@pytest.mark.parametrize(
    ("body", "reason", "obstacle"),
    [
        (b"<html>", "invalid", ""),
        (b'{"messages": {}}', "invalid", ""),
        (chat()[:-1], "invalid", ""),
        (json.dumps({"messages": ["jester"]}).encode(), "invalid", ""),
        (b'{"messages": [' + b"1," * 100_001 + b"1]}", "too_many_messages", ""),
        (b'{"messages": [], "tools": [' + b"{}," * 20_001 + b"{}]}", "too_many_tools", ""),
        (b'{"messages": [], "x": [' + b"1," * 200_001 + b"1]}", "too_many_members", ""),
        (chat(n=2), "field", "n"),
        (chat(functions=[]), "field", "functions"),
        (chat(**TAKEN), "field", "tools"),
        (chat("word " * 5_000, tool_choice="none"), "field", "tool_choice"),
    ],
    ids=[
        "not JSON",
        "messages that are no array",
        "JSON cut off",
        "a message that is no object",
        "more messages than are looked into",
        "more tools than are looked into",
        "more members than are looked into",
        "several choices asked for",
        "functions of the old kind",
        "tools of the client's with our names",
        "a result that nobody could read back",
    ],
)
async def test_unplanned_request_goes_as_it_came_and_says_why(
    world: World, body: bytes, reason: str, obstacle: str
) -> None:
    client, outcome = await world.ask(body, ScriptedReply(HELLO))
    assert world.sent == [body] and client.body == HELLO
    assert (outcome.kind, outcome.reason, outcome.obstacle) == ("untouched", reason, obstacle)
    assert (outcome.mode, outcome.messages, outcome.tokens_before) == ("off", 0, 0)
    assert reply_headers(client)[b"x-offload-mode"] == b"off"


@pytest.mark.parametrize("mode", ["auto", "off"])
async def test_a_path_with_an_endless_name_of_a_model_goes_as_it_came(
    world: World, mode: str
) -> None:
    policy = replace(POLICY, offload=replace(POLICY.offload, mode=Mode(mode)))
    body = chat(model=None)
    client = ScriptedClient(body, b"")
    client.scope["raw_path"] = b"/openai/deployments/%b/chat/completions" % (b"m" * 1_001)
    world.upstream.replies = [ScriptedReply(HELLO)]
    await world.chat(client.client(), Tenant(policy, "acme-1"))
    assert world.sent == [body] and client.body == HELLO
    assert [(one.kind, one.reason) for one in world.outcomes] == [("untouched", "invalid")]


@pytest.mark.parametrize(
    ("model", "mode", "sent"),
    [("quiet", Mode.OFF, "off"), ("other", Mode.COMPACT, "invalid")],
)
async def test_where_the_mode_is_off_nothing_but_the_model_is_read(
    world: World, model: str, mode: Mode, sent: str
) -> None:
    """The messages could not be read: a body that is read says so."""
    quiet = msgspec.structs.replace(OFF, model="quiet*")
    world.policy = msgspec.structs.replace(POLICY, rules=(quiet,))
    body = b'{"messages": {}, "stream": true, "model": "%b"}' % model.encode()
    client, outcome = await world.ask(body, ScriptedReply(HELLO))
    assert world.sent == [body] and client.body == HELLO
    assert world.policy.for_model(model).offload.mode is mode
    assert (outcome.reason, outcome.status) == (sent, 200)
    assert (outcome.model, outcome.stream) == (("quiet", True) if sent == "off" else ("", False))


async def test_results_move_where_they_do_not_fit_though_nobody_can_read_them_back(
    world: World,
) -> None:
    body = chat("word " * 5_000, more=True, tool_choice="none")
    client, outcome = await world.ask(body, refused(OVERFLOW), ScriptedReply(HELLO))
    assert world.sent[0] == body
    assert outcome.kind == "offloaded" and "tools" in json.loads(world.sent[1])
    assert outcome.unfollowed and outcome.words.endswith(
        said := "and the request does not fit whole."
    )
    assert reply_headers(client)[b"x-offload-reason"].decode().endswith(said)
    client, outcome = await world.ask(chat("word " * 5_000, more=True), ScriptedReply(HELLO))
    assert (
        outcome.compacted
        and not outcome.unfollowed
        and b"x-offload-reason" not in reply_headers(client)
    )


async def test_a_history_that_is_to_be_summarised_goes_whole_if_that_costs_little_more(
    world: World,
) -> None:
    """The first request that has the large result has more new text beside it."""
    for more, kind in ((7_000, "untouched"), (10, "offloaded")):
        body = json.loads(chat("word " * 5_000, more=True))
        body["messages"][-1]["content"] = (
            "Create a detailed summary of the conversation so far." + " now" * more
        )
        _, outcome = await world.ask(json.dumps(body).encode(), ScriptedReply(HELLO))
        assert outcome.kind == kind, outcome.words
        assert "Your client compacts itself; raise its limit to " in outcome.words
        assert (outcome.reason == "summary") is (kind == "untouched")
        assert ("the model gets all of it" in outcome.words) is (kind == "untouched")


# -- what upstream refuses -------------------------------------------------------------------------

FITTING = chat("word " * 1_500, more=True)
"""A request that is sent as it came as long as the context window is unknown."""


async def test_overflow_is_planned_anew_for_the_window_upstream_names(world: World) -> None:
    client, outcome = await world.ask(FITTING, refused(OVERFLOW), ScriptedReply(HELLO))
    assert world.sent[0] == FITTING and len(world.sent[1]) < 4096
    assert client.status == 200 and text(read(client.body)) == "It is 42."
    assert (outcome.kind, outcome.status, outcome.compacted, outcome.fault) == (
        "offloaded",
        200,
        1,
        "",
    )
    await world.ask(FITTING, ScriptedReply(HELLO))
    assert world.sent[2] == world.sent[1], "the window is remembered"


@pytest.mark.parametrize("inject", [Inject.ALWAYS, Inject.WHEN_OFFLOADING])
@pytest.mark.parametrize("result", ["", "word " * 1_500], ids=["nothing moves", "one moves"])
async def test_what_was_too_long_is_not_sent_again_unless_a_new_plan_changes_it(
    world: World, result: str, inject: Inject
) -> None:
    world.policy = msgspec.structs.replace(POLICY, tools=ToolsPolicy(inject=inject))
    body = chat(result, more=True)
    for _ in range(2):
        before = len(world.sent)
        client, _ = await world.ask(body, *[refused(OVERFLOW)] * 4)
        new = world.sent[before:]
        assert (client.status, client.body) == (400, OVERFLOW)
        assert len(set(new)) == len(new) and new.count(body) == 1


async def test_a_lower_limit_alone_is_tried_once(world: World) -> None:
    """Upstream counts more than we do, so that each refusal shows a smaller window."""
    world.chat = Chat(world.services, MESSAGES)
    said = "prompt is too long: 9100 tokens > 9000 maximum"
    too_long = json.dumps({"type": "error", "error": {"message": said}}).encode()
    asked = [{"role": "user", "content": "x" * 6_000}]
    body = json.dumps({"model": "m", "max_tokens": 4_000, "messages": asked}).encode()
    for tries in (2, 1):
        before = len(world.sent)
        client, _ = await world.ask(body, *[refused(too_long)] * 4)
        limits = [json.loads(sent)["max_tokens"] for sent in world.sent[before:]]
        assert (client.status, client.body, len(limits)) == (400, too_long, tries)
        assert limits == sorted(limits, reverse=True) and limits[-1] < 4_000


async def test_refused_followup_round_is_not_planned_anew(world: World) -> None:
    call = whole(calls(called("grep", '{"pattern": "word"}')), "tool_calls")
    refusals = [refused(OVERFLOW)] * 3
    client, outcome = await world.ask(LONG, ScriptedReply(call), *refusals)
    assert (client.status, client.body) == (400, OVERFLOW) and world.sent[3:] == [LONG]
    assert (outcome.kind, outcome.rounds, outcome.status) == ("offloaded", 1, 400)
    assert world.services.known.window("acme-1", POLICY, "m") is None


# -- clients that leave, upstreams and stores that fail --------------------------------------------


async def test_client_that_leaves_within_its_body_is_gone(world: World) -> None:
    client = ScriptedClient(b"{", headers=[(b"content-length", b"20")])
    client._incoming.get_nowait()
    client.say(b"{", more=True)
    client.hang_up()
    outcome = await world.serve(client)
    assert (outcome.kind, outcome.status, outcome.fault) == ("untouched", 0, "client_gone")
    assert client.messages == [] and world.sent == []


@pytest.mark.parametrize(
    ("body", "kind"), [(chat(), "untouched"), (LONG, "offloaded")], ids=["untouched", "offloaded"]
)
async def test_upstream_fault_within_a_stream_is_an_error_event(
    world: World, body: bytes, kind: str
) -> None:
    client, outcome = await world.ask(
        body, ScriptedReply(ANSWER[:200], UpstreamBroken("reset"), headers=[STREAM])
    )
    assert client.status == 200 and client.complete
    assert (
        events(client.body[client.body.rindex(b"data: ") :])[-1]["error"]["code"]
        == "upstream_broken"
    )
    assert (outcome.kind, outcome.status, outcome.fault) == (kind, 200, "broken")


async def test_upstream_fault_within_an_offloaded_reply_is_an_error_reply(world: World) -> None:
    client, outcome = await world.ask(LONG, ScriptedReply(HELLO[:20], UpstreamBroken("reset")))
    assert client.status == 502 and client.complete
    assert (outcome.kind, outcome.status, outcome.fault) == ("offloaded", 502, "broken")


async def test_snapshots_and_hidden_rounds_that_cannot_be_read_are_counted(world: World) -> None:
    world.fail_store()
    _, outcome = await world.ask(chat("word " * 5_000, more=True), ScriptedReply(HELLO))
    assert (outcome.kind, outcome.status, outcome.reinserted) == ("offloaded", 200, 0)
    assert outcome.store_errors["get:failed"] == 1


async def test_a_bug_within_a_reply_is_the_proxys_fault_and_not_swallowed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(_: Any, client: Any, *__: Any) -> None:
        await client.start(200, [])
        raise ZeroDivisionError

    monkeypatch.setattr("proxy.requests.handler.converse", fail)
    with pytest.raises(ZeroDivisionError):
        await world.ask(LONG)
    [outcome] = world.outcomes
    assert (outcome.kind, outcome.status, outcome.fault) == ("offloaded", 200, "proxy")


@pytest.mark.parametrize("broken", ["rounds.Rounds._remember", "handler._Request._keep_originals"])
async def test_a_bug_in_what_is_kept_does_not_cost_the_reply(
    world: World, broken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(f"proxy.requests.{broken}", fail)
    _, outcome = await world.ask(LONG, ScriptedReply(HELLO))
    assert (outcome.kind, outcome.status, outcome.fault) == ("offloaded", 200, "")
    assert "a bug, in " in caplog.text and len(world.sent) == 1


async def test_a_bug_in_sending_what_came_is_not_met_twice(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.requests.handler.pass_on", fail)
    world.policy = replace(POLICY, offload=replace(POLICY.offload, mode=Mode.OFF))
    with pytest.raises(ZeroDivisionError):
        await world.ask(LONG, ScriptedReply(HELLO), ScriptedReply(HELLO))
    assert world.sent == [LONG]


async def test_after_a_bug_nobody_is_asked_for_a_client_that_left(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def leave(_: Any, client: Any, *__: Any) -> None:
        client.gone = True
        raise ZeroDivisionError

    monkeypatch.setattr("proxy.requests.handler.converse", leave)
    with pytest.raises(ZeroDivisionError):
        await world.ask(LONG, ScriptedReply(HELLO))
    assert world.sent == []


async def test_after_a_bug_the_request_goes_up_with_all_that_came(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bug is met in a version that changes what came, and in making a round's request."""
    monkeypatch.setattr(
        "proxy.requests.versions.Refusals.refused",
        lambda *_: frozenset([Addition.THINKING]),
    )
    monkeypatch.setattr("proxy.requests.relay.Relay.changed", fail)
    came = [(b"idempotency-key", b"k"), (b"accept-encoding", b"gzip")]
    _, outcome = await world.ask(LONG, ScriptedReply(HELLO), headers=[CHUNKED, *came])
    [request] = world.upstream.requests
    assert (outcome.reason, outcome.fault, request.content) == ("bug", "", LONG)
    assert [request.headers.get(name) for name, _ in came] == [b"k", b"gzip"]


def fail(*_: object, **__: object) -> None:
    raise ZeroDivisionError("nobody has thought of this")


# -- the event loop --------------------------------------------------------------------------------


@pytest.mark.parametrize(("turns", "aside"), [(20, False), (1_200, True)], ids=["small", "large"])
async def test_long_histories_are_looked_at_off_the_loop(
    world: World, turns: int, aside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of these looks at the whole body or the whole history, which is up to 100,000
    messages."""
    threads: dict[str, list[bool]] = {}

    def note(owner: Any, name: str, of: Callable[..., bool] = lambda *_: True) -> None:
        work = getattr(owner, name)

        def noting(*given: Any, **more: Any) -> Any:
            if of(*given):
                threads.setdefault(name, []).append(threading.get_ident() != loop)
            return work(*given, **more)

        monkeypatch.setattr(owner, name, noting)

    loop = threading.get_ident()
    offload = replace(POLICY.offload, mode=Mode.COMPRESS, max_total_tokens=1_000)
    world.policy = replace(POLICY, offload=offload)
    messages = [{"role": "user", "content": "What is it?"}] + turns * [
        {"role": "assistant", "content": "Thinking. " * 100},
        {"role": "user", "content": "Sure?"},
    ]
    body = json.dumps({"model": "m", "messages": messages}).encode()
    note(rawjson, "members", lambda raw, *_: len(memoryview(raw)) == len(body))
    note(History, "plan")
    note(Planned, "replies")
    note(summaries, "_measured")
    await world.ask(body, *[ScriptedReply(HELLO)] * 9)  # summaries are asked for as well
    assert threads.keys() >= {"members", "plan", "replies", "_measured"}
    assert {name: set(used) for name, used in threads.items()} == {
        name: {aside} for name in threads
    }


async def test_searches_of_one_request_share_one_budget(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ToolsPolicy, "max_search_seconds", 0)
    call = whole(calls(called("grep", '{"pattern": "word"}')), "tool_calls")
    _, outcome = await world.ask(LONG, ScriptedReply(call), ScriptedReply(HELLO))
    assert [use.result for use in outcome.tool_uses] == ["refused"]
