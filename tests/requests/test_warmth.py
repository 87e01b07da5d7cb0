"""What a process remembers of a conversation changes nothing but its work: upstream gets the same
bytes from one that has served all of it and from one that has just begun."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from proxy.dialects import NAMED
from proxy.dialects.beginnings import LEAST
from proxy.policies.tenants import Tenant
from proxy.policy import Compress, Mode, Policy, Wait
from proxy.requests.cache import ALIKE, CANDIDATES, END, MessageCache
from proxy.requests.handler import Chat
from proxy.requests.planned import plan
from tests import steps, written
from tests.asgi import ScriptedClient
from tests.requests.changing import HISTORY, OF_API, PATHS
from tests.requests.planning import Counting
from tests.requests.scripted import ScriptedReply
from tests.requests.test_handler import POLICY, World

Json = dict[str, Any]
TEXT = 'def one(path):\n\treturn "\\\\" + path  # ü €\n' * 40
SNAPSHOT = "<state_snapshot><overall_goal>go on {}</overall_goal></state_snapshot>"
MARK = {"cache_control": {"type": "ephemeral"}}
QUOTE = "As /context_store/read.0123456789abcdef.txt says."
REPLIES: dict[str, Json] = {
    "chat": {"choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant"}}]},
    "messages": {"type": "message", "role": "assistant", "stop_reason": "end_turn"},
    "responses": {"object": "response", "status": "completed"},
}


class Answering:
    """Upstream says `ok`, or writes a snapshot of what it was sent."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []

    async def send(self, request: Any) -> ScriptedReply:
        self.bodies.append(request.content)
        asked = b"scratchpad" in request.content
        digest = hashlib.sha256(request.content).hexdigest()
        text = SNAPSHOT.format(digest[:8]) if asked else "ok"
        api = next(name for name, path in PATHS.items() if request.url.endswith(path))
        reply = json.loads(json.dumps({"id": "x_1", "model": "m", **REPLIES[api]}))
        if api == "chat":
            reply["choices"][0]["message"]["content"] = text
        elif api == "messages":
            reply["content"] = [{"type": "text", "text": text}]
        else:
            part = {"type": "output_text", "text": text, "annotations": []}
            reply["output"] = [
                {"type": "message", "id": "msg_1", "role": "assistant", "content": [part]}
            ]
        return ScriptedReply(json.dumps(reply).encode())


class Serving(World):
    """One process, that begins with these records."""

    def __init__(self, records: dict[str, bytes]) -> None:
        super().__init__()
        self.services.threads.close()
        self.upstream: Any = Answering()
        self.services = self._services(self.services.settings)
        self.store.records = dict(records)

    async def post(self, api: str, body: bytes, policy: Policy) -> list[bytes]:
        """What upstream gets for a request."""
        path = PATHS[api]
        client = ScriptedClient(body, b"", path=path, raw_path=path.encode())
        before = len(self.upstream.bodies)
        await Chat(self.services, NAMED[api])(client.client(), Tenant(policy, "acme-1"))
        assert client.status == 200
        await self.services.background.ended("", 10)
        return list(self.upstream.bodies[before:])


def body_of(api: str, history: list[Json], how: Json, spaces: bool) -> bytes:
    members = {"model": "m", **OF_API[api], "tools": [steps.tool(api, "read")], **how}
    listed = {**members, HISTORY[api]: history}
    return json.dumps(listed, separators=(", ", ": ") if spaces else (",", ":")).encode()


@given(data=st.data())
@settings(max_examples=10)
async def test_a_process_that_knows_a_conversation_sends_what_a_new_one_sends(
    data: st.DataObject,
) -> None:
    mode = data.draw(st.sampled_from([Mode.COMPACT, Mode.COMPRESS, Mode.AUTO]))
    offload = written.offload(
        mode=mode,
        max_total_tokens=data.draw(st.sampled_from([6_000, 15_000])),
        max_tool_message_tokens=500,
        cached_read=data.draw(st.sampled_from([0, 0.1])),
        cache_write=1,
        compress=Compress(snapshot_tokens=500, wait=Wait.ALWAYS),
    )
    policy = replace(POLICY, offload=offload)
    api = data.draw(st.sampled_from(sorted(PATHS)))
    spaces = data.draw(st.booleans())
    begin: list[Json] = [{"role": "user", "content": f"Find it. {TEXT * 2}"}]
    histories = {name: list(begin) for name in PATHS}
    warm = Serving({})
    for number in range(data.draw(st.integers(5, 9))):
        kinds = ["turn"] * 4 + ["fork", "edit", "said", "api", "model", "marked", "again", "short"]
        kind = data.draw(st.sampled_from(kinds))
        api = data.draw(st.sampled_from(sorted(PATHS))) if kind == "api" else api
        size = data.draw(st.integers(0, 3))
        for name, history in histories.items():
            history += steps.STEP[name](f"call_{number}", f"{number} {TEXT * size}", "read")
            history += [{"role": "user", "content": QUOTE}] if kind == "said" else []
        sent = histories[api]
        if kind == "fork":
            sent = [*sent[: 1 + 2 * (number // 2)], {"role": "user", "content": "And else?"}]
        elif kind == "edit":
            sent = [{"role": "user", "content": f"Find another. {TEXT * 2}"}, *sent[1:]]
        elif kind == "short":  # as a client that compacts leaves it
            sent = [{"role": "user", "content": f"Summary. {QUOTE} {TEXT * 3}"}, *sent[-2:]]
        elif kind == "marked" and api == "messages":
            sent = [*sent[:-1], {**sent[-1], "content": [sent[-1]["content"][0] | MARK]}]
        how = {"model": "other"} if kind == "model" else {}
        body = body_of(api, sent, how, spaces)
        for again in range(1 + (kind == "again")):
            cold = Serving(warm.store.records)
            assert await cold.post(api, body, policy) == await warm.post(api, body, policy), again
            await cold.close()
    await warm.close()


# -- what is remembered, and for whom --------------------------------------------------------------


def chat(*texts: str) -> bytes:
    messages = [{"role": "user", "content": text} for text in texts]
    return json.dumps({"model": "m", "messages": messages}).encode()


async def remembered(reader: MessageCache, body: bytes, caller: str = "acme-1") -> None:
    policy = replace(POLICY, offload=written.offload(mode=Mode.COMPACT))
    request = reader.request(NAMED["chat"], body, caller)
    assert await plan(NAMED["chat"], request, policy, None, reader, caller)


async def test_nobody_finds_what_another_caller_left() -> None:
    reader = MessageCache(Counting())
    body = chat("a" * LEAST, "b")
    await remembered(reader, body)
    assert reader.known(NAMED["chat"], body, "acme-1") is not None
    for other in ("acme-2", "other-1", ""):
        assert reader.known(NAMED["chat"], body, other) is None


class Body(bytes):
    """Bytes that count how much of them is compared."""

    compared = 0

    def startswith(self, *given: Any) -> bool:
        self.compared += len(given[0])
        return super().startswith(*given)


async def test_bodies_that_are_nearly_equal_are_compared_with_few() -> None:
    reader = MessageCache(Counting())
    many = 40
    for number in range(many):
        await remembered(reader, chat("a" * LEAST, f"{number:04}", "b" * 9_000))
    body = Body(chat("a" * LEAST, "none", "b" * 9_000))
    assert reader.known(NAMED["chat"], body, "acme-1") is None
    assert body.compared <= CANDIDATES * len(body)
    other = Body(chat("a" * LEAST, "none", "b" * 9_000 + "c" * END))
    assert reader.known(NAMED["chat"], other, "acme-1") is None
    assert other.compared == 0
    assert reader.known(NAMED["chat"], chat("a" * LEAST, "0039", "b" * 9_000), "acme-1")


async def test_of_beginnings_that_begin_alike_the_newest_are_kept() -> None:
    reader = MessageCache(Counting())
    bodies = [chat("a" * LEAST, f"{number:04}") for number in range(ALIKE + 9)]
    for body in bodies:
        await remembered(reader, body)
    found = [reader.known(NAMED["chat"], body, "acme-1") is not None for body in bodies]
    assert sum(found) <= ALIKE + 1
    assert found[-1]
    assert not found[0]


async def test_a_conversation_that_goes_on_is_remembered_once() -> None:
    reader = MessageCache(Counting())
    texts = ["a" * LEAST]
    for number in range(9):
        texts.append(f"{number}" * 1_000)
        await remembered(reader, chat(*texts))
    entries, weight = reader.caches()["histories"]()
    assert entries == len(texts) + 1  # and each message
    assert weight < 10 * sum(map(len, texts))


@pytest.mark.parametrize("caller", ["acme-1", "other-1"])
async def test_a_tenant_that_fills_the_memory_leaves_others_their_part(
    caller: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.requests.cache.MEMORY_BYTES", 2 << 20)
    reader = MessageCache(Counting())
    body = chat("a" * LEAST, "mine")
    await remembered(reader, body, "acme-1")
    for number in range(300):
        await remembered(reader, chat(f"{number:04}" * LEAST, "more"), caller)
    _, weight = reader.caches()["histories"]()
    assert weight <= 2 << 20
    assert (reader.known(NAMED["chat"], body, "acme-1") is not None) is (caller == "other-1")
