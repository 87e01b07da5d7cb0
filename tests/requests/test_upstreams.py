"""Conversations with upstreams as they are: the client gets 200 and exactly the replies that it
would have had."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from proxy.policy import Compress, Mode, Offload, Wait
from tests import written
from tests.dialects.chat.turns import DONE, chunk, folded, read, stream, text, usage, whole
from tests.requests.scripted import JSON, STREAM, ScriptedReply
from tests.requests.test_handler import POLICY, World
from tests.requests.upstreams import Upstream, upstreams, vllm

Json = dict[str, Any]

NAMES = [upstream.name for upstream in upstreams()]
SNAPSHOT = "<state_snapshot><overall_goal>go on</overall_goal></state_snapshot>"
SMALL = written.offload(
    keep_views=1,
    max_total_tokens=6_000,
    max_tool_message_tokens=300,
    pin_user_tokens=400,
    cached_read=1.0,
    cache_write=1.0,
    compress=Compress(snapshot_tokens=400, wait=Wait.ALWAYS),
)
SEARCH = {
    "type": "function",
    "function": {"name": "search", "parameters": {"type": "object", "properties": {}}},
}


class Conversing(World):
    """A process in front of one of the upstreams, which answers with `reply`, and with a snapshot
    if asked for one."""

    def __init__(self, upstream: Upstream, offload: Offload) -> None:
        super().__init__()
        self.policy = replace(POLICY, offload=offload)
        self.character = upstream
        self.reply = ""
        self.refusals = 0
        sender: Any = self.upstream
        sender.send = self.answer

    async def answer(self, request: Any) -> Any:
        body, streams = request.content, b'"stream":true' in request.content.replace(b" ", b"")
        if refused := self.character.answer(body):
            self.refusals += 1
            status, said = refused
            if self.character.in_stream and streams:
                return ScriptedReply(b": PROCESSING\n\n", stream(said, DONE), headers=[STREAM])
            return ScriptedReply(json.dumps(said).encode(), status=status, headers=[JSON])
        last = json.loads(body)["messages"][-1]
        said = SNAPSHOT if "scratchpad" in str(last["content"]) else self.reply
        if not streams:
            return ScriptedReply(whole({"content": said}, usage=usage(100, 10)))
        bill = [chunk(usage=usage(100, 10))] if b"include_usage" in body else []
        events = [
            chunk({"role": "assistant", "content": ""}),
            chunk({"content": said}),
            chunk({}, "stop"),
            *bill,
            DONE,
        ]
        return ScriptedReply(stream(*events), headers=[STREAM])

    async def say(self, messages: list[Json], reply: str, **members: Any) -> tuple[int, Json]:
        """Return the status and the reply to a client's request."""
        self.reply = reply
        body = json.dumps({"model": "m", "messages": messages, **members}).encode()
        assert self.character.answer(body) is None, "upstream takes the client's own request"
        client = await self.send(body)
        return client.status, folded(client.body) if members.get("stream") else read(client.body)


def short(upstream: Upstream) -> Iterator[list[Json]]:
    """The requests of a conversation of ten steps."""
    messages: list[Json] = [{"role": "system", "content": "Be brief."}] if upstream.system else []
    messages.append({"role": "user", "content": "What is it? " * 20})
    for step in range(10):
        yield list(messages)
        found = f"found {step}: " + "word " * 400
        if upstream.native and step % 4 != 3:
            call = {
                "id": f"c{step}",
                "type": "function",
                "function": {"name": "search", "arguments": "{}"},
            }
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
            messages.append({"role": "tool", "tool_call_id": f"c{step}", "content": found})
        else:
            messages.append({"role": "assistant", "content": f"I think {step}."})
            messages.append({"role": "user", "content": f"Sure? {found}"})


async def converse(name: str, mode: Mode, streams: bool, requests: Any, offload: Offload) -> None:
    upstream = next(one for one in upstreams() if one.name == name)
    world = Conversing(upstream, replace(offload, mode=mode))
    tools = {"tools": [SEARCH]} if upstream.native else {}
    try:
        for number, messages in enumerate(requests(upstream)):
            members = {**tools, **upstream.members, **({"stream": True} if streams else {})}
            status, reply = await world.say(messages, f'{{"answer": {number}}}', **members)
            assert (status, text(reply)) == (200, f'{{"answer": {number}}}'), (
                number,
                world.outcomes[-1],
            )
        assert any(outcome.kind == "offloaded" or outcome.refused for outcome in world.outcomes)
        assert world.outcomes[-1].kind == "offloaded" or not upstream.native
        assert all(outcome.fault == "" for outcome in world.outcomes)
        # What is refused again and again is soon left out, so that few requests are sent twice.
        assert world.refusals <= len(world.outcomes), world.refusals
    finally:
        await world.close()


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("mode", [Mode.AUTO, Mode.COMPRESS])
@pytest.mark.parametrize("name", NAMES)
async def test_short_conversation_is_served(name: str, mode: Mode, streams: bool) -> None:
    await converse(name, mode, streams, short, SMALL)


async def test_snapshot_moves_to_a_user_message_where_its_place_is_refused() -> None:
    """A server that takes a system message only as it was trained with."""

    def grown(request: Json) -> tuple[int, Any] | None:
        systems = [
            message["content"] for message in request["messages"] if message["role"] == "system"
        ]
        return (
            None
            if systems == ["Be brief."]
            else vllm("System message must be the one at the beginning")
        )

    upstream = Upstream("a fixed system message", grown)
    world = Conversing(upstream, replace(SMALL, mode=Mode.COMPRESS))
    try:
        for number, messages in enumerate(short(upstream)):
            assert (await world.say(messages, str(number), tools=[SEARCH]))[0] == 200
        compressed = [outcome for outcome in world.outcomes if outcome.compressed]
        assert [outcome.refused for outcome in compressed][:3] == [("place",), ("place",), ()]
        assert all(outcome.kind == "offloaded" for outcome in compressed)
        assert world.refusals == 2, "it is left out once two requests were refused with it"
    finally:
        await world.close()
