"""Clients that rewrite the replies they send back, and fork their histories: whose hidden rounds a request gets."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from proxy.policy import Inject, Mode
from proxy.policy import Tools as ToolsPolicy
from tests import written
from tests.dialects.chat.turns import Json, called, calls, read, whole
from tests.requests.scripted import ScriptedReply
from tests.requests.test_handler import POLICY, World

RULES = replace(
    POLICY,
    offload=written.offload(
        mode=Mode.COMPACT,
        keep_views=1,
        max_total_tokens=3_000,
        max_tool_message_tokens=200,
        max_unseen_tool_tokens=20_000,
        keep_recent_count=2,
    ),
    tools=ToolsPolicy(inject=Inject.ALWAYS),
)
QUICK = (Phase.explicit, Phase.reuse, Phase.generate)
"""Each example is a conversation, so that shrinking one takes minutes."""
MARK = re.compile(rb"needle-[0-9a-z]+-")


# -- what clients do --------------------------------------------------------------------------------------------------

Rewriting = Callable[[Json], None]


def as_it_was(reply: Json) -> None:
    pass


def drop_text(reply: Json) -> None:
    if reply.get("tool_calls"):
        reply["content"] = None


def empty_text(reply: Json) -> None:
    if reply.get("tool_calls"):
        reply["content"] = ""


def keep_first_call(reply: Json) -> None:
    reply["tool_calls"] = reply.get("tool_calls", [])[:1]


def new_ids(reply: Json) -> None:
    for call in reply.get("tool_calls", []):
        call["id"] = "Mistral" + call["id"][-2:]


def strip_thinking(reply: Json) -> None:
    reply["content"] = re.sub(r"<think>.*?</think>", "", reply.get("content") or "", flags=re.DOTALL).strip()


def trailing_newlines(reply: Json) -> None:
    reply["content"] = (reply.get("content") or "") + "\n\n"


def reorder_arguments(reply: Json) -> None:
    for call in reply.get("tool_calls", []):
        arguments = json.loads(call["function"]["arguments"])
        call["function"]["arguments"] = json.dumps(dict(reversed(arguments.items())), indent=1)


def add_defaults(reply: Json) -> None:
    for call in reply.get("tool_calls", []):
        call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]) | {"deep": False})


def saw(reply: Json) -> str:
    """What the reply says, without members that differ between one round and several."""
    functions = [(call["id"], call["function"]) for call in reply.get("tool_calls") or []]
    return json.dumps([(reply.get("content") or "").strip(), functions], sort_keys=True)


def said(history: list[Json]) -> str:
    """The history without such members."""
    return json.dumps([saw(one) if one["role"] == "assistant" else one for one in history])


REWRITINGS = (
    as_it_was, drop_text, empty_text, keep_first_call, new_ids, strip_thinking, trailing_newlines, reorder_arguments,
    add_defaults,
)  # fmt: skip


class Agent:
    """A client with its history."""

    def __init__(self, world: World, rewrite: Rewriting) -> None:
        self.world = world
        self.rewrite = rewrite
        self.keeps_prefixes = True
        self.history: list[Json] = [{"role": "user", "content": "Find it."}]
        self.turns: list[tuple[str, str, set[bytes]]] = []
        """The history before each reply, the reply as the client saw it, and the marks of the rounds that it hid."""
        self.replies: list[str] = []
        """The replies as the client sends them back."""
        self.asked = 0
        self.sent: list[str] = []
        self.events = 0

    def fork(self) -> Agent:
        other = Agent(self.world, self.rewrite)
        other.history, other.turns = deepcopy(self.history), list(self.turns)
        other.replies = list(self.replies)
        other.asked, other.sent, other.events = self.asked, list(self.sent), self.events
        return other

    @property
    def marks(self) -> set[bytes]:
        """The marks of all hidden rounds of this history."""
        return {mark for _, _, marks in self.turns for mark in marks}

    def marks_shared_with(self, other: Agent) -> set[bytes]:
        """The marks of the other's rounds up to the last of its replies that this client saw, or made of another one by
        rewriting, in a history that both sent: nobody could tell one from the other there."""
        shared: set[bytes] = set()
        until: set[bytes] = set()
        for place, (mine, theirs) in enumerate(zip(self.turns, other.turns, strict=False)):
            until |= theirs[2]
            if mine[0] == theirs[0] and theirs[1] in (mine[1], self.replies[place]):
                shared |= until
        return shared

    async def ask(self, step: Json) -> set[bytes]:
        """Send one request, whose reply is that of the step. Returns the marks that upstream saw in the first round."""
        self.asked += 1
        body = {
            "model": "m",
            "max_tokens": 1_000 - self.asked,
            "messages": [{"role": "system", "content": f"It is {self.asked} o'clock."}, *self.history],
        }
        marks = [f"needle-{step['mark']}{number}-" for number in range(step["hidden"])]
        rounds = [
            whole(calls(called("grep", json.dumps({"pattern": mark}), id="h"), content=step["aside"]), "tool_calls")
            for mark in marks
        ]
        made = [
            called("search", json.dumps({"q": q, "n": 3}), id=f"call_{number}")
            for number, q in enumerate(step["calls"])
        ]
        last = whole(
            {"content": step["text"], **({"tool_calls": made} if made else {})}, "tool_calls" if made else "stop"
        )
        first = len(self.world.sent)
        client, outcome = await self.world.ask(json.dumps(body).encode(), *map(ScriptedReply, [*rounds, last]))
        sent = self.world.sent[first]
        self._check_prefix(sent, outcome.events)
        reply = read(client.body)["message"]
        self.turns.append((said(self.history), saw(reply), {mark.encode() for mark in marks}))
        self._adopt(reply, step)
        return set(MARK.findall(sent))

    def _adopt(self, reply: Json, step: Json) -> None:
        reply = deepcopy({"role": "assistant", **reply})
        self.rewrite(reply)
        if not reply.get("tool_calls"):
            reply.pop("tool_calls", None)
        self.history.append(reply)
        self.replies.append(saw(reply))
        for call in reply.get("tool_calls", []):
            self.history.append({"role": "tool", "tool_call_id": call["id"], "content": "found " * step["size"]})
        if not reply.get("tool_calls"):
            self.history.append({"role": "user", "content": "Go on."})

    def _check_prefix(self, sent: bytes, events: int) -> None:
        """Compare with the request before. Only the leading system message may differ, long answers may become a line,
        and behind an event anything."""
        messages = [json.dumps(one) for one in json.loads(sent)["messages"][1:]]
        if self.sent and events == self.events and self.keeps_prefixes:
            pairs = zip(messages, self.sent, strict=False)
            assert len(messages) >= len(self.sent)
            assert all(now == before or "was shown before" in now for now, before in pairs)
        self.sent = messages
        self.events = events


STEPS = st.lists(
    st.fixed_dictionaries(
        {
            "hidden": st.integers(0, 2),
            "aside": st.sampled_from([None, "Let me look."]),
            "text": st.sampled_from([None, "I search.", "<think>Where?</think>I search.", "Now this."]),
            "calls": st.lists(st.sampled_from(["x", "y"]), max_size=2, unique=True),
            "size": st.integers(5, 250),
        }
    ).filter(lambda step: bool(step["calls"] or step["text"])),
    min_size=2,
    max_size=6,
)


def run(work: Callable[[World], Any]) -> None:
    async def inside() -> None:
        world = World()
        world.policy = RULES
        try:
            await work(world)
        finally:
            await world.services.background.close(1)
            world.services.threads.close()

    asyncio.run(inside())


def numbered(steps: list[Json], name: str) -> list[Json]:
    return [step | {"mark": f"{name}{place}n"} for place, step in enumerate(steps)]


async def every_round_returns(world: World, rewrite: Rewriting, steps: list[Json]) -> None:
    agent = Agent(world, rewrite)
    for step in numbered(steps, "a"):
        expected = set(agent.marks)
        assert await agent.ask(step) == expected


async def no_round_of_another(world: World, rewrite: Rewriting, steps: list[list[Json]]) -> None:
    """Two samples of one history, with the same ids, go on in turns."""
    common, left, right = steps
    agent = Agent(world, rewrite)
    agent.keeps_prefixes = False  # a conflict between the samples takes rounds back
    for step in numbered(common, "a"):
        await agent.ask(step)
    other = agent.fork()
    other.keeps_prefixes = False
    pairs = zip(numbered(left, "b"), numbered(right, "c"), strict=False)
    for mine, theirs in pairs:
        for one, another, step in ((agent, other, mine), (other, agent, theirs)):
            allowed = one.marks | one.marks_shared_with(another)
            assert await one.ask(step) <= allowed


@given(rewrite=st.sampled_from(REWRITINGS), steps=STEPS)
@settings(max_examples=20, deadline=None, phases=QUICK, suppress_health_check=list(HealthCheck))
def test_hidden_rounds_return_whatever_the_client_does_to_its_replies(rewrite: Rewriting, steps: list[Json]) -> None:
    run(lambda world: every_round_returns(world, rewrite, steps))


@given(rewrite=st.sampled_from(REWRITINGS), steps=st.tuples(STEPS, STEPS, STEPS))
@settings(max_examples=20, deadline=None, phases=QUICK, suppress_health_check=list(HealthCheck))
def test_no_sample_gets_the_hidden_rounds_of_another(rewrite: Rewriting, steps: list[list[Json]]) -> None:
    run(lambda world: no_round_of_another(world, rewrite, steps))


@pytest.mark.sweep
@given(rewrite=st.sampled_from(REWRITINGS), steps=st.tuples(STEPS, STEPS, STEPS))
@settings(max_examples=300, deadline=None, phases=QUICK, suppress_health_check=list(HealthCheck))
def test_whose_hidden_rounds_return_at_length(rewrite: Rewriting, steps: list[list[Json]]) -> None:
    run(lambda world: every_round_returns(world, rewrite, steps[0] + steps[1]))
    run(lambda world: no_round_of_another(world, rewrite, steps))
