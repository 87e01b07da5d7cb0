"""The demo's agent, over the tests' own upstream: what it says to its tools, and what it stumbles over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from proxy.demo.agent import Agent, AgentTurn
from proxy.demo.library import Library
from proxy.errors import ProxyError
from tests.fake_upstream import DROP, Cut, Reply, StrictUpstream, calls, error, mixed, text


@pytest.fixture
def agent(up: StrictUpstream, tmp_path: Path) -> Iterator[Agent]:
    (tmp_path / "a.py").write_text("x = 1\n")
    with openai.OpenAI(base_url=up.url, api_key="k", max_retries=0) as client:
        yield Agent(client, Library(tmp_path))


def test_the_agent_calls_tools_until_there_is_an_answer(up: StrictUpstream, agent: Agent) -> None:
    page = ("read_source", '{"path": "a.py"}')
    up.script(
        mixed("First, and then.", ("list_sources", "{}"), page),
        calls(("search_sources", '{"pattern": "x"}')),
        text("Done."),
    )
    turns = list(agent.work("Look."))
    assert turns == [
        AgentTurn("First, and then.", [("list_sources", "{}"), page]),
        AgentTurn("", [("search_sources", '{"pattern": "x"}')]),
        AgentTurn("Done.", []),
    ]
    results = [message["content"] for message in agent.messages if message["role"] == "tool"]
    assert results == ["a.py 6 bytes\n", "a.py, lines 1-1 of 1\nx = 1\n", "a.py:1:x = 1\n"]
    assert [len(request.messages) for request in up.chats] == [2, 5, 7]


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (calls(("grep", "{}")), "told to call grep, which is not one of its tools"),
        (error(503), "scripted 503"),
        (Cut(text("Half of an answer"), 2, DROP), "got an error"),
    ],
)
def test_errors_that_stop_the_agent(up: StrictUpstream, agent: Agent, reply: Reply, says: str) -> None:
    up.script(reply)
    with pytest.raises(ProxyError, match=says):
        list(agent.work("Look."))
