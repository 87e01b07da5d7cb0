"""Recorded runs, turn by turn, through the real server in front of the strict upstream, at the
default policy.

No refusal, a prefix that stands still between events, few events, every moved byte readable.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import httpx
import pytest

from proxy.dialects.chat import CHAT
from proxy.plan.history import History, Terms
from proxy.plan.plan import Plan, Reading, Room
from proxy.policy import Offload
from proxy.requests.planned import OUR_TOOLS_TOKENS
from proxy.tokens import Tokens
from tests.fake_upstream import Recorded, StrictUpstream, calls, text
from tests.serving import PLAIN, Proxy, spawned
from tests.tools.paging import undone
from tests.transcripts import Run, load, needed, requests_of

pytestmark = needed

SWEPT = 3
"""Of so many runs of a source, the sweep takes one; tests/requests/test_counts.py plans and renders
others."""
LONG = 25_000
SOURCES = ("deerflow", "livemcpbench", "moatless-claude35", "openhands-multi-swe", "super-gpt4o", "sweagent-claude35",
           "whowhen-magentic-one")  # fmt: skip
REFERENCE = re.compile(r"(?:detailed result is|messages are) stored in:? ([^;)]+)[;)]")
SNAPSHOT = "<state_snapshot><overall_goal>go on</overall_goal></state_snapshot>"
TOKENS = Tokens()
AT_ONCE = 16
"""Calls that are answered in one round."""
ALL = {"max_retrieved_tokens": 100_000_000, "max_rounds": 64}


class Model:
    """Answers `ok`; asked for a snapshot, it writes one; told to, it reads every file that it sees
    a reference to."""

    def __init__(self) -> None:
        self.reading = False
        self.read: dict[str, str] = {}

    def __call__(self, request: Recorded) -> Any:
        last = request.messages[-1]
        if (
            last["role"] == "user"
            and "<state_snapshot>" in str(last["content"])
            and "scratchpad" in str(last["content"])
        ):
            return text(SNAPSHOT)
        if last["role"] == "tool" and self.reading:
            self._take(request.messages)
        paths = (
            [path for path in references(request.messages) if path not in self.read]
            if self.reading
            else []
        )
        [name] = [one for one in ("offload_read_file", "read_file") if one in request.tool_names][
            :1
        ] or ["none"]
        return calls(*((name, {"path": path}) for path in paths[:AT_ONCE])) if paths else text("ok")

    def _take(self, messages: list[Any]) -> None:
        asked = {
            call["id"]: json.loads(call["function"]["arguments"])
            for call in messages_calls(messages)
        }
        for message in messages:
            path = asked.get(message.get("tool_call_id"), {}).get("path", "")
            if path.startswith("/context_store/"):
                content, more = undone(message["content"])
                assert more is None
                self.read[path] = content


def messages_calls(messages: list[Any]) -> list[Any]:
    return [call for message in messages for call in message.get("tool_calls") or []]


def references(messages: list[Any]) -> list[str]:
    """Paths that the model is told of. A look-alike in a recorded text is not ours: those never had
    our directory."""
    found = [
        path for message in messages for path in REFERENCE.findall(str(message.get("content")))
    ]
    return sorted({path for path in found if path.startswith("/context_store/")})


@pytest.fixture(scope="module")
def model() -> Model:
    return Model()


@pytest.fixture(scope="module")
def up(model: Model) -> Iterator[StrictUpstream]:
    with StrictUpstream() as upstream:
        upstream.respond(model)
        yield upstream


@pytest.fixture(scope="module")
def proxy(up: StrictUpstream) -> Iterator[Proxy]:
    # for no known host; reading a local cache is free
    prices = {"cached_read": 0.1, "cache_write": 1.25}
    offload = {"compress": {"wait": "always"}, **prices}
    policy = {"upstream": {"base_url": up.url}, "offload": offload, "tools": ALL}
    with spawned({"default": policy}) as one:
        yield one


def bodies(run: Run) -> Iterator[dict[str, Any]]:
    for messages, _ in requests_of(run):
        if messages:
            yield {"model": "gpt-4o", "messages": messages, "tools": run.tools}


def planned(run: Run, offload: Offload) -> Plan:
    """The plan for the run's last request."""
    last = list(bodies(run))[-1]["messages"]
    raws = [json.dumps(message).encode() for message in last]
    measured = [
        CHAT.read(raw, Reading.of(offload), lambda text: TOKENS.count(text, "gpt-4o"))
        for raw in raws
    ]
    tools = 0 if run.tools else OUR_TOOLS_TOKENS
    return History(Terms("gpt-4o", offload, Room(), tools)).extended(measured).plan()


@pytest.mark.parametrize("source", SOURCES)
def test_a_recorded_run_replays_without_loss_or_unexplained_break(
    source: str, up: StrictUpstream, proxy: Proxy, model: Model
) -> None:
    """The shortest that count as long."""
    runs = sorted(load(LONG, source), key=lambda run: run.total_tokens)
    assert runs
    _replay_all(runs[:1], up, proxy, model)


@pytest.mark.sweep
@pytest.mark.parametrize("source", SOURCES)
def test_more_recorded_runs_replay(
    source: str, up: StrictUpstream, proxy: Proxy, model: Model
) -> None:
    runs = sorted(load(LONG, source), key=lambda run: run.total_tokens)
    _replay_all(runs[SWEPT::SWEPT], up, proxy, model)


def _replay_all(runs: list[Run], up: StrictUpstream, proxy: Proxy, model: Model) -> None:
    with httpx.Client(
        base_url=proxy.url, headers={"authorization": "Bearer k"}, verify=PLAIN
    ) as client:
        for run in runs:
            _replay(run, up, client, model)


def _replay(run: Run, up: StrictUpstream, client: httpx.Client, model: Model) -> None:
    up.requests.clear()
    model.reading, model.read = False, {}
    requests = list(bodies(run))
    for number, body in enumerate(requests):
        model.reading = number == len(requests) - 1
        reply = client.post("/chat/completions", json=body)
        assert reply.status_code == 200, (run.id, number, reply.text[:500])
    assert not up.refusals
    sent = [
        one
        for one in up.chats
        if one.messages[-1]["role"] != "user" or "scratchpad" not in str(one.messages[-1])
    ]
    turns = sent[: len(requests)]
    plan = planned(run, Offload())
    broken = sum(
        not _is_prefix(one.raw_messages, other.raw_messages) for one, other in pairwise(turns)
    )
    assert broken <= len(plan.events), run.id
    assert len(plan.events) <= 15, run.id
    _check_read_back(run, model)
    for boundary in plan.boundaries:
        for index in boundary.pins:
            wanted = run.messages[index]["content"]
            assert any(wanted in str(message.get("content")) for message in turns[-1].messages)


def _is_prefix(earlier: list[bytes], later: list[bytes]) -> bool:
    return later[: len(earlier)] == earlier


def _check_read_back(run: Run, model: Model) -> None:
    """Every reference in the last request led to the very text that the agent had sent."""
    texts = {
        message["content"] for message in run.messages if isinstance(message.get("content"), str)
    }
    for path, content in model.read.items():
        if "compressed_group" in path:
            assert content.startswith("### ")
        else:
            assert content in texts, (run.id, path)
