"""A session that goes past a proxy, or through one that loses things, is seen to; and the agent
fails in words."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.apps.demo.model import ScriptedUpstream, Sent
from proxy.errors import ProxyError
from tests.fake_upstream import StrictUpstream, error
from tests.sdks import Lazy, openai

session = Lazy("proxy.apps.demo.session")

Json = dict[str, Any]


def test_without_a_proxy_the_demo_answers_but_moves_nothing() -> None:
    with (
        ScriptedUpstream().serving() as upstream,
        openai.OpenAI(base_url=upstream.url, api_key="k", max_retries=0) as client,
    ):
        agent = session.Agent(client, upstream)
        rows = list(agent.run())
    assert all(row.sent == row.client for row in rows)
    assert all(one.line.strip() == said for one, said in agent.answers) and len(agent.answers) == 2
    assert session.faults(agent, agent.lost({})) == ["nothing was moved", "nothing was read back"]


class Seen:
    """An upstream that has seen one request."""

    def __init__(self, sent: Sent) -> None:
        self.requests = [sent]


REQUEST = {"role": "user", "content": "Look."}
FUNCTION = {"name": "ab", "arguments": "{}"}
CALL = {"role": "assistant", "tool_calls": [{"id": "c1", "type": "function", "function": FUNCTION}]}
WHOLE = {"role": "tool", "tool_call_id": "c1", "content": "123"}
MOVED = {
    **WHOLE,
    "content": "1... (detailed result is stored in /store/a.py.01234567.txt; complete, 9 tokens)",
}
FILE = "a.py.01234567.txt"


def agent(**changed: Any) -> Any:
    """An agent after a good session, but for what `changed` says."""
    upstream: Any = Seen(Sent([REQUEST, CALL, MOVED], []))
    client: Any = None
    made = session.Agent(client, upstream)
    made.messages = [REQUEST, CALL, WHOLE]
    made.rows = [session.Row(1, "answers the user", 100_000, 10_000, 5, 300)]
    made.answers = [(session.Question("a.py", "X =", "X = 1"), "X = 1")]
    for name, value in changed.items():
        setattr(made, name, value())
    return made


@pytest.mark.parametrize(
    ("changed", "stored", "fault"),
    [
        ({}, {FILE: b"123"}, ""),
        ({}, {}, f"the store does not hold what was moved: {FILE}"),
        ({}, {FILE: b"12"}, f"the store does not hold what was moved: {FILE}"),
        ({"rows": lambda: [session.Row(1, "", 94_999, 10_000, 5, 300)]}, {FILE: b"123"}, "94,999"),
        (
            {"rows": lambda: [session.Row(1, "", 100_000, 10_000, 5, 0)]},
            {FILE: b"123"},
            "nothing was read back",
        ),
        (
            {"answers": lambda: [(session.Question("a.py", "X =", "X = 1"), "X = 2")]},
            {FILE: b"123"},
            "it said 'X = 2'",
        ),
    ],
)
def test_each_failed_check_is_named(changed: Json, stored: dict[str, bytes], fault: str) -> None:
    one = agent(**changed)
    said = session.faults(one, one.lost(stored))
    assert len(said) == bool(fault) and fault in "".join(said)


def test_what_two_requests_share_is_how_both_begin() -> None:
    one, two = (
        Sent([], [(str(piece), 5) for piece in pieces]) for pieces in ([1, 2, 3], [1, 2, 4, 3])
    )
    assert (one.tokens, one.shares(two), two.shares(one)) == (15, 10, 10)


def test_an_error_stops_the_agent(up: StrictUpstream) -> None:
    up.script(error(503))
    with openai.OpenAI(base_url=up.url, api_key="k", max_retries=0) as client:
        seen: Any = Seen(Sent([], []))
        with pytest.raises(ProxyError, match="scripted 503"):
            list(session.Agent(client, seen).work("Look."))
