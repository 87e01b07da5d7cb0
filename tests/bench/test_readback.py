"""The evaluation kit, with a scripted model that reads what it sees and greps what it does not."""

from __future__ import annotations

import json
import re

import pytest

from tests.bench.readback import __main__ as command
from tests.bench.readback.histories import KINDS, NOWHERE, Question, histories
from tests.bench.readback.recorder import recording
from tests.bench.readback.run import CONDITIONS, RULE, Score, measured, table
from tests.fake_upstream import Message, Recorded, StrictUpstream, calls, text

RECORD = "<state_snapshot>\n<overall_goal>Answer.</overall_goal>\nThe number is {fact}.\n</state_snapshot>"


def test_there_are_forty_questions_of_five_kinds_with_one_answer_each() -> None:
    asked = [question for history in histories() for question in history.questions]
    assert len(asked) >= 40 and len({question.text for question in asked}) == len(asked)
    assert {question.kind for question in asked} == set(KINDS)
    assert [history.questions for history in histories()] == [history.questions for history in histories()]
    for history in histories():
        texts = "".join(document.text for document in history.documents)
        assert "[cleared]" in json.dumps(history.messages(dropped=True))
        for question in history.questions:
            key = re.findall(r"K\d{4}", question.text)
            assert all(each in texts for each in key) == (question.kind != "nowhere")


@pytest.mark.parametrize(
    ("kind", "answer", "reply", "right"),
    [
        ("value", "4711", "It is 4,711.", True),
        ("value", "4711", "It is 47110.", False),
        ("count", "3", "33", False),
        ("line", "a = 1  # x", "`a = 1 # x`", True),
        ("comparison", "K1", "K1 has 5 and K2 has 4. Answer: K1", True),
        ("comparison", "K1", "K1 has 5 and K2 has 6. Answer: K2", False),
        ("nowhere", NOWHERE, "not found", True),
        ("nowhere", NOWHERE, "", False),
    ],
)
def test_what_is_a_right_answer(kind: str, answer: str, reply: str, right: bool) -> None:
    assert Question(kind, "?", answer).is_right(reply) == right


def model(request: Recorded) -> Message:
    """Answer from the results in the context, or else from what grep finds below the path that the question names."""
    messages = request.messages
    question = str(next(one["content"] for one in reversed(messages) if one["role"] == "user"))
    if RULE not in question:
        return text(RECORD.format(fact=FACT))
    seen = "\n".join(str(message["content"]) for message in messages if message["role"] == "tool")
    keys, paths = re.findall(r"K\d+", question), re.findall(r"(?:in|of) ([\w/.:]*[/.][\w/.:]*\w)", question)
    if keys and keys[0] not in seen and "grep" in request.tool_names and messages[-1]["role"] == "user":
        return calls(("grep", {"pattern": keys[0], "path": paths[0]}))
    found = re.findall(rf"{keys[0]}\W+(?:\d+- +\W)?(?:amount\W+)?(\d{{5,}})", seen) if keys else []
    return text(found[-1] if found else NOWHERE)


HISTORY = histories()[0]
FACT = next(question.answer for question in HISTORY.questions if question.kind == "value")


@pytest.fixture(scope="module")
def scores() -> dict[str, Score]:
    with StrictUpstream() as up:
        up.respond(model)
        with recording(up.url) as recorder:
            return {each.condition: each for each in measured(recorder, "m", "k", [HISTORY], CONDITIONS)}


def test_each_condition_gets_every_question(scores: dict[str, Score]) -> None:
    assert list(scores) == list(CONDITIONS)
    assert all(sum(score.asked.values()) == len(HISTORY.questions) for score in scores.values())
    assert all(score.empty == 0 and score.sent > 0 for score in scores.values())


def test_what_is_in_the_context_is_answered_from_it(scores: dict[str, Score]) -> None:
    everything, dropped = scores["everything"], scores["dropped"]
    assert everything.right["value"] == 3 and everything.right["nowhere"] == 2
    assert dropped.right["value"] == 0 and dropped.right["nowhere"] == 2
    assert everything.reads == dropped.reads == 0 and everything.rounds == len(HISTORY.questions)


@pytest.mark.parametrize("condition", ["compact", "compress", "auto"])
def test_what_was_moved_is_read_back_by_the_path_of_the_clients_own_call(
    scores: dict[str, Score], condition: str
) -> None:
    score = scores[condition]
    assert score.right["value"] == 3 and score.right["nowhere"] == 2
    assert score.reads == score.understood >= 5
    assert score.rounds >= len(HISTORY.questions) + score.reads
    assert score.cached > 0


def test_facts_in_snapshots_are_counted(scores: dict[str, Score]) -> None:
    assert scores["compact"].facts == 0 < scores["compress"].facts
    assert scores["compress"].asked_facts == 3


def test_the_table_has_everything_that_was_counted(scores: dict[str, Score]) -> None:
    rows = table(list(scores.values()), "m").splitlines()
    assert rows[0] == f"m, {len(HISTORY.questions)} questions in each condition, temperature 0"
    assert [row.split(" | ")[0] for row in rows[4:]] == [f"| {condition}" for condition in CONDITIONS]
    assert len({row.count("|") for row in rows[2:]}) == 1


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with StrictUpstream() as up:
        up.respond(model)
        arguments = ["readback", "--base-url", up.url, "--model", "m", "--conditions", "dropped"]
        monkeypatch.setattr("sys.argv", arguments)
        assert command.main() == 0
    assert "| dropped | " in capsys.readouterr().out
