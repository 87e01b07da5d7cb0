"""What a turn needs from outside, with an upstream and a store that only take notes."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from proxy.dialects.chat import CHAT
from proxy.plan.history import extend
from proxy.plan.message import ToolCall
from proxy.plan.recognise import Visible
from proxy.plan.turn import Continuation, Form, Hidden, Usage
from proxy.policy import Policy, Tools
from proxy.requests.planned import Rendered
from proxy.requests.relay import ANOTHER, Relay, rewritten
from proxy.requests.rounds import Rounds
from proxy.telemetry.outcome import ToolUse
from proxy.threads import WorkPool
from proxy.tools.answer import REPEATED
from proxy.upstream.client import UpstreamRequest
from proxy.upstream.headers import Headers
from tests.requests.planning import MOVING, OFFLOAD, POLICY, planned

HEADERS = Headers(
    [
        (b"authorization", b"Bearer k"),
        (b"content-length", b"9"),
        (b"accept-encoding", b"gzip"),
        (b"idempotency-key", b"i"),
    ]
)


class Reply:
    """A whole reply of upstream."""

    def __init__(self, body: bytes, status: int = 200) -> None:
        self.status = status
        self.headers = Headers([(b"content-type", b"application/json")])
        self._body = body

    async def __aiter__(self) -> AsyncGenerator[bytes, None]:
        yield self._body

    async def aclose(self) -> None:
        pass


class World:
    """Services, client and records of one request."""

    def __init__(self, io: Rounds, uses: list[ToolUse], ready: Any, notes: dict[str, Any]) -> None:
        self.io = io
        self.uses = uses
        self.ready = ready
        self.sent: list[UpstreamRequest] = notes["sent"]
        self.remembered: list[Any] = notes["remembered"]


async def world(policy: Policy = POLICY, **members: Any) -> World:
    history, reader = await planned(MOVING, policy, **members)
    ready = Rendered.of(history, None, {}, reader)
    notes: dict[str, Any] = {"sent": [], "remembered": []}

    async def send(request: UpstreamRequest) -> Reply:
        notes["sent"].append(request)
        return Reply(b"{}")

    async def remember(*noted: Any) -> None:
        notes["remembered"].append(noted)

    class Unaddressed(Relay):
        def request(self, client: Any, tenant: Any, content: Any, target: bytes = b"") -> UpstreamRequest:
            return _request(content)

    services: Any = SimpleNamespace(
        upstream=SimpleNamespace(send=send),
        relay=Unaddressed.__new__(Unaddressed),
        reader=reader,
        store=None,
        threads=WorkPool("test"),
    )
    client: Any = SimpleNamespace(sent=None)
    uses: list[ToolUse] = []
    prepared: Any = SimpleNamespace(
        tenant=SimpleNamespace(namespace="ns", name="t"),
        form=Form(),
        headers=lambda: [(b"x-ours", b"1")],
        uses=uses,
    )

    async def contest(before: bytes, model: str, visible: Callable[[], Awaitable[Visible]]) -> None:
        notes["remembered"].append((before, model, await visible()))

    async def keep_continuation(continuation: Continuation) -> None:
        notes["remembered"].append(continuation)

    records: Any = SimpleNamespace(
        namespace="ns", remember=remember, contest=contest, keep_continuation=keep_continuation
    )

    async def accepted() -> None:
        """This request leaves nothing behind."""

    return World(Rounds(services, client, prepared, ready, records, accepted), uses, ready, notes)


def _request(body: bytes) -> UpstreamRequest:
    return UpstreamRequest(
        method="POST",
        url="http://up/v1/x",
        headers=HEADERS,
        content=body,
        connect_timeout=1,
        first_byte_timeout=1,
        idle_timeout=1,
    )


def test_a_rewritten_request_has_the_headers_of_its_new_body() -> None:
    request = _request(b"old")
    made = rewritten(request, b"new body", ANOTHER)
    assert made.headers == [HEADERS[0], (b"accept-encoding", b"identity"), (b"content-length", b"8")]
    assert request.content == b"old"


def reading(path: str) -> ToolCall:
    return ToolCall("c", "read_file", json.dumps({"path": path}))


async def resolved(one: Any, calls: list[ToolCall]) -> list[str]:
    return [answer.text for answer in await one.io.resolve(calls)]


async def test_calls_are_answered_from_the_files_of_the_request() -> None:
    one = await world()
    path = next(iter(one.ready.files()))
    read, found, missing = await resolved(
        one, [reading(path), ToolCall("c", "grep", '{"pattern": "call_1_0"}'), reading("/etc/passwd")]
    )
    assert read.startswith("call_1_0 call_1_0") and path.rpartition("/")[2] in found
    assert "call_1_0 call_1_0" not in missing
    assert [(use.tool, use.result) for use in one.uses][:2] == [("read_file", "ok"), ("grep", "ok")]


async def test_the_same_call_again_gets_a_pointer_to_the_first_answer() -> None:
    one = await world()
    path = next(iter(one.ready.files()))
    spaced = ToolCall("d", "read_file", json.dumps({"path": path}, indent=2))
    first, again = await resolved(one, [reading(path), spaced])
    assert first.startswith("call_1_0") and again == REPEATED
    assert await resolved(one, [reading(path)]) == [REPEATED]
    assert await resolved(one, [reading(path.rpartition("/")[2]), reading("call_1_0")]) == [REPEATED] * 2
    other, refused = ToolCall("e", "grep", json.dumps({"pattern": "call", "path": path})), ToolCall("f", "grep", "{}")
    answers = await resolved(one, [other, refused, refused])
    assert REPEATED not in answers and answers[1] == answers[2]


async def test_a_turn_reads_no_more_than_its_policy_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tools, "max_calls", 1)
    one = await world(Policy(offload=OFFLOAD, tools=Tools(max_retrieved_tokens=1_000)))
    path = next(iter(one.ready.files()))
    first, second = await resolved(one, [reading(path), reading(path)])
    assert len(first) <= 1_000 and "call_1_0" not in second
    await resolved(one, [reading(path)])
    assert sum(use.tokens for use in one.uses if use.result == "ok") <= 1_000


async def test_calls_beyond_those_of_a_round_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tools, "max_calls", 2)
    one = await world(Policy(offload=OFFLOAD))
    calls = [ToolCall(f"id{number}", ("grep", "read_file")[number % 2], "{}") for number in range(5_001)]
    answers = await resolved(one, calls)
    assert len(answers) == 5_001 and len(set(answers[2:])) == 1
    first, second, *rest = one.uses
    assert (first.calls, second.calls) == (1, 1)
    assert [(use.tool, use.result, use.calls) for use in rest] == [
        ("grep", "refused", 2_500),
        ("read_file", "refused", 2_499),
    ]
    assert [use.tokens for use in rest] == [use.calls * len(answers[-1]) for use in rest]


async def test_hidden_rounds_are_stored_under_the_history_that_the_reply_ends() -> None:
    one = await world()
    hidden = Hidden((b'{"role":"assistant","content":"before"}',), None, (b'{"role":"user","content":"after"}',))
    turn: Any = SimpleNamespace(hidden=hidden, continuation=None, visible=("It is 42.", []))
    await one.io.remember(turn)
    link = extend(one.ready.planned.chain[-1], CHAT.reply_meaning("It is 42.", []))
    counted = replace(hidden, tokens=19, sizes=(10, 9))
    befores = one.ready.planned.befores()
    assert befores == {one.ready.planned.chain[-1]}
    assert one.remembered == [(link, "m", counted, befores, Visible("It is 42."))]
    going_on = Continuation("r1", ("r1", "r2"), ())
    await one.io.remember(SimpleNamespace(hidden=None, continuation=going_on, visible=("Sure.", []), spent=Usage()))
    assert one.remembered[1:] == [going_on, (one.ready.planned.chain[-1], "m", Visible("Sure."))]
