"""A session that goes past a proxy, or through one that loses things, is seen to; and the agent fails in words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from proxy.demo.model import ScriptedUpstream, Sent, message_tokens
from proxy.demo.session import PAGE_LINES, Agent, Question, Row, faults, pages, question, reading_list
from proxy.errors import ProxyError, UserMistake
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
FUNCTION = {"name": "ab", "arguments": "{}"}
CALL = {"role": "assistant", "tool_calls": [{"id": "c1", "type": "function", "function": FUNCTION}]}
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


@pytest.mark.parametrize(
    ("changed", "stored", "fault"),
    [
        ({}, {FILE: b"123"}, ""),
        ({}, {}, f"the store does not hold what was moved: {FILE}"),
        ({}, {FILE: b"12"}, f"the store does not hold what was moved: {FILE}"),
        ({"rows": [Row(1, "", 94_999, 10_000, 5, 300)]}, {FILE: b"123"}, "94,999"),
        ({"rows": [Row(1, "", 100_000, 10_000, 5, 0)]}, {FILE: b"123"}, "nothing was read back"),
        ({"answers": [(Question("a.py", "X =", "X = 1"), "X = 2")]}, {FILE: b"123"}, "it said 'X = 2'"),
    ],
)
def test_each_failed_check_is_named(changed: Json, stored: dict[str, bytes], fault: str) -> None:
    one = agent(**changed)
    said = faults(one, one.lost(stored))
    assert len(said) == bool(fault) and fault in "".join(said)


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


# -- what it reads --

LINES = ["SECRET_NAME = 'what it is'", "TWICE = 'once here'", *(f"x{n} = {n}" for n in range(PAGE_LINES))]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "http").mkdir()
    (tmp_path / "http" / "client.py").write_text("class E(OSError):\n    pass\n")
    (tmp_path / "argparse.py").write_text("\n".join([*LINES, "TWICE = 'and once here'"]))
    (tmp_path / "secret.py").write_text("hidden = 1\n")
    return tmp_path


def test_pages_say_which_lines_they_are_and_concatenate(root: Path) -> None:
    heads, texts = zip(*(page.text.split("\n", 1) for page in pages("argparse.py", root)), strict=True)
    assert heads == ("argparse.py, lines 1-500 of 503", "argparse.py, lines 501-503 of 503")
    assert "".join(texts) == "\n".join([*LINES, "TWICE = 'and once here'"])
    for path in ("../x.py", "/etc/passwd", "secret.py", ""):
        assert list(pages(path, root)) == []


def test_the_reading_list_reaches_the_required_tokens(root: Path) -> None:
    assert {page.path for page in reading_list(10, len, root)} == {"argparse.py"}
    assert [page.path for page in reading_list(11, lambda text: 5, root)][-1] == "http/client.py"
    with pytest.raises(UserMistake, match="too few"):
        reading_list(10, lambda text: 1, root)


def test_questions_are_about_a_line_that_begins_as_no_other(root: Path) -> None:
    assert question("argparse.py", root) == Question("argparse.py", "SECRET_NAME =", "SECRET_NAME = 'what it is'")
    with pytest.raises(UserMistake):
        question("http/client.py", root)


def test_the_installed_standard_library_suits_the_demo() -> None:
    """If this fails, so does the demo: the installation has no sources."""
    modules = list(dict.fromkeys(page.path for page in reading_list(95_000, lambda text: len(text) // 4)))
    assert [question(module).path for module in modules[:2]] == modules[:2]
