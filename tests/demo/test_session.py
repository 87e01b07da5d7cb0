"""A session that goes past a proxy, or through one that loses things, is seen to; and the agent fails in words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from proxy.demo.library import Question
from proxy.demo.model import ScriptedUpstream, Sent, message_tokens
from proxy.demo.session import Agent, Row, faults
from proxy.errors import ProxyError
from tests.fake_upstream import DROP, Cut, Reply, StrictUpstream, calls, error, mixed, text

Json = dict[str, Any]


def words(text: str) -> int:
    return len(text) // 4


@pytest.fixture
def upstream() -> Iterator[ScriptedUpstream]:
    with ScriptedUpstream(words).serving() as running:
        yield running


def test_without_a_proxy_the_demo_answers_but_moves_nothing(upstream: ScriptedUpstream) -> None:
    with openai.OpenAI(base_url=upstream.url, api_key="k", max_retries=0) as client:
        agent = Agent(client, upstream, words)
        rows = list(agent.run())
    assert all(row.sent == row.client for row in rows)
    assert all(one.line.strip() == said for one, said in agent.answers) and len(agent.answers) == 2
    assert faults(agent, agent.lost({})) == ["nothing was moved", "nothing was read back"]


class Seen:
    """An upstream that has seen one request."""

    def __init__(self, sent: Sent) -> None:
        self.requests = [sent]


REQUEST = {"role": "user", "content": "Look."}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "ab", "arguments": "{}"}}],
}
WHOLE = {"role": "tool", "tool_call_id": "c1", "content": "123"}
MOVED = {**WHOLE, "content": "1... (detailed result is stored in /store/a.py-01234567.txt; complete, 9 tokens)"}
FILE = "a.py-01234567.txt"


def agent(**changed: Any) -> Agent:
    """An agent after a good session, but for what `changed` says."""
    upstream: Any = Seen(Sent([REQUEST, CALL, MOVED], []))
    client: Any = None
    made = Agent(client, upstream, words)
    made.messages = [REQUEST, CALL, WHOLE]
    made.rows = [Row(1, "answers the user", 100_000, 10_000, 5, 300)]
    made.answers = [(Question("a.py", "X =", "X = 1"), "X = 1")]
    for name, value in changed.items():
        setattr(made, name, value)
    return made


def test_a_good_session_has_no_faults() -> None:
    good = agent()
    assert good.lost({FILE: b"123"}) == {FILE: False}
    assert faults(good, {FILE: False}) == []


def test_a_moved_result_that_the_store_does_not_hold_is_named() -> None:
    for stored in ({}, {FILE: b"12"}):
        one = agent()
        assert faults(one, one.lost(stored)) == [f"the store does not hold what was moved: {FILE}"]


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"rows": [Row(1, "", 94_999, 10_000, 5, 300)]}, "94,999"),
        ({"rows": [Row(1, "", 100_000, 10_000, 5, 0)]}, "nothing was read back"),
        ({"answers": [(Question("a.py", "X =", "X = 1"), "X = 2")]}, "it said 'X = 2'"),
    ],
)
def test_each_failed_check_is_named(changed: Json, fault: str) -> None:
    [said] = faults(agent(**changed), {FILE: False})
    assert fault in said


def test_tokens_and_what_two_requests_share() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "12"}, {"type": "image_url", "image_url": {}}]}
    assert [message_tokens(one, len) for one in (REQUEST, CALL, WHOLE, parts)] == [9, 8, 7, 6]
    one, two = (Sent([], [(json.dumps(one), 5) for one in messages]) for messages in ([1, 2, 3], [1, 2, 4, 3]))
    assert (one.tokens, one.shares(two), two.shares(one)) == (15, 10, 10)


# -- the agent --


@pytest.fixture
def at_work(up: StrictUpstream) -> Iterator[Agent]:
    with openai.OpenAI(base_url=up.url, api_key="k", max_retries=0) as client:
        seen: Any = Seen(Sent([REQUEST], []))
        made = Agent(client, seen, words)
        made._row = lambda client, calls, requests: Row(0, str(len(calls)), client, 0, 0, 0)  # type: ignore[method-assign]
        yield made


def test_the_agent_calls_tools_until_there_is_an_answer(up: StrictUpstream, at_work: Agent) -> None:
    page = ("read_source", '{"path": "no.py", "first": 1}')
    first = ("read_source", '{"path": "argparse.py", "first": 1}')
    up.script(mixed("First, and then.", first, page), calls(page), text("Done."))
    assert [row.action for row in at_work.work("Look.")] == ["2", "1", "0"]
    results = [message["content"] for message in at_work.messages if message["role"] == "tool"]
    assert "argparse.py" in results[0] and results[1:] == ["There is no no.py."] * 2
    assert [len(request.messages) for request in up.chats] == [2, 5, 7]
    assert at_work.messages[-1]["content"] == "Done."


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (calls(("grep", "{}")), "told to call grep, which is not its tool"),
        (error(503), "scripted 503"),
        (Cut(text("Half of an answer"), 2, DROP), "got an error"),
    ],
)
def test_errors_that_stop_the_agent(up: StrictUpstream, at_work: Agent, reply: Reply, says: str) -> None:
    up.script(reply)
    with pytest.raises(ProxyError, match=says):
        list(at_work.work("Look."))
