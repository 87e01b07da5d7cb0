"""Replicas are interchangeable: a recorded run over several of them sends upstream what one process
alone sends.

The model is scripted: it answers what the recorded one answered, after a round of our tools, or
with a call of ours among the client's, so that there are hidden rounds to be remembered as well as
snapshots.
"""

from __future__ import annotations

import json
import random
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.dialects.chat.turns import folded
from tests.fake_upstream import Message, Recorded, StrictUpstream, calls, mixed, text
from tests.serving import PLAIN, Proxy, served, spawned
from tests.stores.engines import S3_KEYS, redis_server, s3_server, s3_url
from tests.transcripts import needed, one, requests_of

pytestmark = needed

Json = dict[str, Any]

RUN = "super-swe-agent_masked-transnormerllm_goal"
"""45 turns, 94,000 tokens; with `OFFLOAD` 19 events, two of them with cuts."""
OFFLOAD: Json = {
    "mode": "auto",
    "max_total_tokens": 7_000,
    "compress": {"wait": "always"},
}
SNAPSHOT = "<state_snapshot><overall_goal>go on</overall_goal></state_snapshot>"
KILLS = 10


class Turn:
    """One request of the recorded agent and the reply that it got. Its number goes along as
    `user`."""

    def __init__(self, number: int, messages: list[Json], tools: list[Json], reply: Json) -> None:
        self.number = number
        self.content = reply.get("content") or ""
        self.calls = [
            (call["function"]["name"], call["function"]["arguments"], call["id"])
            for call in reply.get("tool_calls") or ()
        ]
        self.body = {
            "model": "gpt-4o",
            "messages": messages,
            "tools": tools,
            "user": f"turn-{number}",
        }
        self.body |= {"stream": True} if number % 2 else {}

    def model(self, request: Recorded) -> Message:
        """The recorded reply; where our tools can be called, in every third turn after a round of
        them, or with one."""
        ours = [name for name in request.tool_names if name.endswith("grep")][-1:]
        if (
            ours
            and self.number % 3 == 0
            and not any(_is_answer(message, self.number) for message in request.messages)
        ):
            return calls((ours[0], {"pattern": f"turn {self.number}|error"}, f"ours-{self.number}"))
        among = (
            [(ours[0], {"pattern": "def "}, f"ours-{self.number}")]
            if ours and self.number % 3 == 1
            else []
        )
        if not self.calls:
            return text(self.content)
        return mixed(self.content, *self.calls, *among)


def _is_answer(message: Json, number: int) -> bool:
    return bool(message.get("tool_call_id") == f"ours-{number}")


@cache
def turns() -> tuple[Turn, ...]:
    run = one(RUN)
    made = [(messages, reply) for messages, reply in requests_of(run) if messages]
    return tuple(
        Turn(number, messages, run.tools, reply) for number, (messages, reply) in enumerate(made)
    )


def model(request: Recorded) -> Message:
    last = request.messages[-1]
    if last["role"] == "user" and "scratchpad" in str(last["content"]):
        return text(SNAPSHOT)
    return turns()[_turn_of(request)].model(request)


def _turn_of(request: Recorded) -> int:
    return int(request.json["user"].removeprefix("turn-"))


# The client


def ask(url: str, turn: Turn) -> tuple[str, list[tuple[str, str, str]]]:
    """The visible reply: text and calls. Raises httpx.TransportError where it does not come or
    breaks off."""
    reply = httpx.post(
        f"{url}/chat/completions",
        json=turn.body,
        headers={"authorization": "Bearer k"},
        verify=PLAIN,
    )
    assert reply.status_code == 200, reply.text[:500]
    message = (folded(reply.content) if turn.body.get("stream") else reply.json()["choices"][0])[
        "message"
    ]
    called = [(call["function"], call["id"]) for call in message.get("tool_calls") or ()]
    return message["content"] or "", [
        (function["name"], function["arguments"], id) for function, id in called
    ]


# What went upstream


def by_turn(requests: Sequence[Recorded]) -> dict[int, list[bytes]]:
    sent = defaultdict(list)
    for request in requests:
        sent[_turn_of(request)].append(request.body)
    return dict(sent)


def policies(up: StrictUpstream) -> Json:
    return {"default": {"upstream": {"base_url": up.url}, "offload": OFFLOAD}}


@pytest.fixture
def up(up: StrictUpstream) -> StrictUpstream:
    up.respond(model)
    return up


@pytest.fixture(scope="module")
def expected() -> dict[int, list[bytes]]:
    """What a single process with a new store sends: with summaries, hidden rounds and mixed
    turns."""
    with StrictUpstream() as up:
        up.respond(model)
        with served(policies(up)) as proxy:
            for turn in turns():
                assert ask(proxy.url, turn) == (turn.content, turn.calls)
        sent = by_turn(up.chats)
    bodies = [body for turn in sent.values() for body in turn]
    assert sum(b"scratchpad" in body for body in bodies) == 2, "summaries"
    assert sum(len(turn) > 1 for turn in sent.values()) > 8, "internal rounds"
    last = json.loads(sent[len(turns()) - 1][-1])["messages"]
    hidden = [
        message["tool_call_id"]
        for message in last
        if str(message.get("tool_call_id")).startswith("ours-")
    ]
    assert {int(one.removeprefix("ours-")) % 3 for one in hidden} == {0, 1}, (
        "put back: internal rounds and mixed turns"
    )
    return sent


# Two replicas


@pytest.fixture(params=["redis", pytest.param("s3", marks=pytest.mark.sweep)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "redis":
        with redis_server(tmp_path) as redis:
            yield f"redis://127.0.0.1:{redis.port}/0"
    else:
        with s3_server(tmp_path) as s3:
            yield s3_url(s3.port)


def test_two_replicas_send_what_one_process_sends(
    up: StrictUpstream, spawn: Callable[..., Proxy], store: str, expected: dict[int, list[bytes]]
) -> None:
    replicas = [
        spawn(policies(up), flags=[f"--store={store}"], environment=S3_KEYS) for _ in range(2)
    ]
    balancer = random.Random(5)
    used = [balancer.choice(replicas) for _ in turns()]
    for turn, replica in zip(turns(), used, strict=True):
        assert ask(replica.url, turn) == (turn.content, turn.calls)
    assert {replica.port for replica in used} == {replica.port for replica in replicas}
    assert by_turn(up.chats) == expected


class Replica:
    """A replica that can be killed at any moment and restarts by itself."""

    def __init__(self, start: Callable[[], Any]) -> None:
        self._start = start
        self._back: threading.Thread | None = None
        self._held = ExitStack()
        self.proxy: Proxy = self._held.enter_context(self._start())

    def kill(self) -> None:
        """Send SIGKILL, and start a new process in a thread."""
        assert self.proxy.process
        self.proxy.process.kill()
        self._back = threading.Thread(target=self._restart)
        self._back.start()

    def wait(self) -> None:
        """Wait until the replica is running again."""
        if self._back:
            self._back.join()

    def close(self) -> None:
        self.wait()
        self._held.close()

    def _restart(self) -> None:
        self._held.close()
        self.proxy = self._held.enter_context(self._start())


@contextmanager
def killing(replica: Replica, seconds: float) -> Iterator[None]:
    """Kill the replica `seconds` from now, whatever it does then."""
    timer = threading.Timer(seconds, replica.kill)
    timer.start()
    try:
        yield
    finally:
        timer.join()


def persist(turn: Turn, replicas: Sequence[Replica]) -> tuple[Any, int]:
    """Return the reply and the number of retries, each at the next replica, as with any load
    balancer."""
    for attempt, replica in enumerate((*replicas, *replicas)):
        try:
            return ask(replica.proxy.url, turn), attempt
        except httpx.TransportError:
            continue
    raise AssertionError(f"turn {turn.number}: nobody answers")


@pytest.mark.sweep
def test_killing_a_replica_repeatedly_changes_no_request(
    up: StrictUpstream, tmp_path: Path, expected: dict[int, list[bytes]]
) -> None:
    chance, retries = random.Random(7), 0
    # Behind the first event, where there are records: a replica without them would send something
    # else.
    killed_at = sorted(chance.sample(range(len(turns()) - 20, len(turns())), KILLS))
    with redis_server(tmp_path) as redis, ExitStack() as held:

        def start() -> Any:
            return spawned(policies(up), flags=[f"--store=redis://127.0.0.1:{redis.port}/0"])

        mortal, other = (Replica(start) for _ in range(2))
        held.callback(mortal.close)
        held.callback(other.close)
        for turn in turns():
            if turn.number in killed_at:
                mortal.wait()
                with killing(mortal, chance.uniform(0, 0.06)):
                    reply, again = persist(turn, [mortal, other])
            else:
                reply, again = persist(turn, chance.sample([mortal, other], 2))
            assert reply == (turn.content, turn.calls)
            retries += again
    assert retries, "some of them were in the middle of something"
    sent = by_turn(up.chats)
    assert {number: list(dict.fromkeys(bodies)) for number, bodies in sent.items()} == expected
