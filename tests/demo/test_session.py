"""A session that goes past a proxy, or through one that loses things, is seen to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from proxy.demo.agent import Agent
from proxy.demo.library import Library, Question
from proxy.demo.session import DemoAnswer, DemoResult, Row, Session
from proxy.demo.upstream import ScriptedUpstream, unpaired


def words(text: str) -> int:
    return len(text) // 4


@pytest.fixture
def upstream() -> Iterator[ScriptedUpstream]:
    with ScriptedUpstream(words) as running:
        yield running


def test_without_a_proxy_the_demo_answers_but_moves_nothing(upstream: ScriptedUpstream) -> None:
    library = Library()
    with openai.OpenAI(base_url=upstream.url, api_key="k", max_retries=0) as client:
        session = Session(Agent(client, library), library, upstream, words)
        rows = list(session.run())
    outcome = session.outcome({})
    assert all(row.sent == row.client for row in rows)
    assert [answer.right for answer in outcome.answers] == [True, True]
    assert outcome.faults() == ["nothing was moved", "nothing was read back"]
    assert outcome.reduction == 0


GOOD: dict[str, Any] = {
    "rows": [Row(1, "answers the user", 100_000, 10_000, 5, 300)],
    "answers": [DemoAnswer(Question("a.py", "X =", "X = 1"), "X = 1")],
    "sent": 10_000,
    "prefix_kept": 0.9,
    "moved": 5,
    "lost": [],
    "refused": [],
}


def test_a_good_demo_result_has_no_faults() -> None:
    assert DemoResult(**GOOD).faults() == []


@pytest.mark.parametrize(
    ("wrong", "fault"),
    [
        ({"rows": [Row(1, "", 94_999, 10_000, 5, 300)]}, "94,999"),
        ({"moved": 0}, "nothing was moved"),
        ({"rows": [Row(1, "", 100_000, 10_000, 5, 0)]}, "nothing was read back"),
        ({"lost": ["f.txt"]}, "does not hold what was moved: f.txt"),
        ({"refused": ["orphan"]}, "upstream refused: orphan"),
        ({"answers": [DemoAnswer(Question("a.py", "X =", "X = 1"), "X = 2")]}, "it said 'X = 2'"),
    ],
)
def test_each_failed_check_of_the_demo_is_named(wrong: dict[str, Any], fault: str) -> None:
    (said,) = DemoResult(**{**GOOD, **wrong}).faults()
    assert fault in said


CALL = {"role": "assistant", "tool_calls": [{"id": "c1"}]}
RESULT = {"role": "tool", "tool_call_id": "c1"}
USER = {"role": "user"}


@pytest.mark.parametrize(
    ("messages", "fault"),
    [
        ([USER, CALL, RESULT, USER], None),
        ([USER, RESULT], "c1 is a result of no call"),
        ([USER, CALL, RESULT, RESULT], "c1 is a result of no call"),
        ([USER, CALL, USER, RESULT], "these calls have no result: c1"),
        ([USER, CALL], "these calls have no result: c1"),
    ],
)
def test_the_embedded_upstream_is_strict_about_pairs(messages: list[dict[str, Any]], fault: str | None) -> None:
    assert unpaired(messages) == fault
