"""The evaluation kit, with a scripted model that reads what it sees and greps what it does not."""

from __future__ import annotations

import json
import os
import re
import socket
from urllib.parse import urlsplit

import pytest

from bench.readback import __main__ as command
from bench.readback.histories import KINDS, Question, histories
from bench.readback.recorder import recording
from bench.readback.run import CONDITIONS, Asker, Score, measured
from tests.clock import PATIENCE
from tests.fake_upstream import Message, Recorded, StrictUpstream, calls, text

RECORD = "<state_snapshot>\n<overall_goal>Answer.</overall_goal>\nThe number is {fact}.\n</state_snapshot>"


def test_there_are_forty_questions_of_five_kinds_with_one_answer_each() -> None:
    asked = [question for history in histories() for question in history.questions]
    assert len(asked) >= 40 and len({question.text for question in asked}) == len(asked)
    assert {question.kind for question in asked} == set(KINDS)
    assert [history.questions for history in histories()] == [
        history.questions for history in histories()
    ]
    for history in histories():
        texts = "".join(document.text for document in history.documents)
        assert "[cleared]" in json.dumps(history.messages(dropped=True))
        for question in history.questions:
            key = re.findall(r"K\d{4}", question.text)
            assert all(each in texts for each in key) == (question.kind != "nowhere")


def test_every_call_was_answered_in_words_and_nothing_that_was_told_is_asked() -> None:
    for history in histories():
        messages = history.messages()
        roles = [message["role"] for message in messages]
        assert roles == [
            "system",
            *["user", "assistant", "tool", "assistant", "user", "assistant"] * 4,
        ]
        said = [
            str(message["content"])
            for message in messages
            if message["role"] == "assistant" and message["content"]
        ]
        told = set(re.findall(r"K\d+", " ".join(said)))
        assert len(told) == len(said) == 8
        assert not told & {
            key for question in history.questions for key in re.findall(r"K\d+", question.text)
        }


@pytest.mark.parametrize(
    ("kind", "answer", "reply", "right"),
    [
        ("value", "4711", "It is 4,711.", True),
        ("value", "4711", "It is 47110.", False),
        ("count", "3", "33", False),
        ("line", "a = 1  # x", "`a = 1 # x`", True),
        ("comparison", "K1", "K1 has 5 and K2 has 4. Answer: K1", True),
        ("comparison", "K1", "K1 has 5 and K2 has 6. Answer: K2", False),
        ("comparison", "K1", "Answer: K1 in a.log is larger than K2.", True),
        ("comparison", "K1", "Answer: K2 in a.log is larger than K1.", False),
        ("nowhere", "", "NOT FOUND", True),
        ("nowhere", "", "There is no K0123 in /var/log/billing.log.", True),
        ("nowhere", "", "The tools didn't find it.", True),
        ("nowhere", "", "It is not 1,234 but 123,456.", False),
        ("nowhere", "", "K0123 is 123456.", False),
        ("nowhere", "", "", False),
    ],
)
def test_what_is_a_right_answer(kind: str, answer: str, reply: str, right: bool) -> None:
    assert Question(kind, "?", answer).is_right(reply) == right


ASKING = ("Which", "Quote", "How many")


def model(request: Recorded) -> Message:
    """Answer from the results in the context, or else from what grep finds below the path that the
    question names."""
    messages = request.messages
    question = str(next(one["content"] for one in reversed(messages) if one["role"] == "user"))
    if not question.startswith(ASKING):
        return text(RECORD.format(fact=FACT))
    seen = "\n".join(str(message["content"]) for message in messages if message["role"] == "tool")
    keys, paths = (
        re.findall(r"K\d+", question),
        re.findall(r"(?:in|of) ([\w/.:]*[/.][\w/.:]*\w)", question),
    )
    if (
        keys
        and keys[0] not in seen
        and "grep" in request.tool_names
        and messages[-1]["role"] == "user"
    ):
        return calls(("grep", {"pattern": keys[0], "path": paths[0]}))
    found = re.findall(rf"{keys[0]}\W+(?:\d+- +\W)?(?:amount\W+)?(\d{{5,}})", seen) if keys else []
    return text(found[-1] if found else "It is not there.")


HISTORY = histories()[0]
FACT = next(question.answer for question in HISTORY.questions if question.kind == "value")


@pytest.fixture(scope="module")
def scores() -> dict[str, Score]:
    with StrictUpstream() as up:
        up.respond(model)
        with recording(up.url) as recorder, open(os.devnull, "w") as log:
            asker = Asker(recorder, "m", "k", log)
            return {each.condition: each for each in measured(asker, [HISTORY], CONDITIONS)}


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


def test_raw_calls_and_empty_replies_are_counted() -> None:
    """Without a proxy, as it lets neither through."""
    replies = iter(
        ['{"name": "grep", "arguments": {"pattern": "x"}}', " "] * len(HISTORY.questions)
    )
    with StrictUpstream() as up:
        up.respond(lambda request: text(next(replies)))
        with recording(up.url) as recorder, open(os.devnull, "w") as log:
            [score] = measured(Asker(recorder, "m", "", log), [HISTORY], ["everything"])
    assert score.raw == score.empty == len(HISTORY.questions) / 2


def test_a_request_whose_client_has_left_is_given_up() -> None:
    """A small server answers one after another: a summary that timed out would hold up all
    questions behind it."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        recording(f"http://127.0.0.1:{server.getsockname()[1]}") as to,
    ):
        server.settimeout(PATIENCE)
        with socket.create_connection(("127.0.0.1", urlsplit(to.url).port)) as client:
            client.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\n{}"
            )
            asked, _ = server.accept()
        with asked:
            asked.settimeout(PATIENCE)
            while asked.recv(4096):
                pass
    assert to.taken() == []


def test_the_command_prints_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with StrictUpstream() as up:
        up.respond(model)
        arguments = ["readback", "--base-url", up.url, "--model", "m", "--conditions", "dropped"]
        arguments += ["--histories", "1", "--questions", "5", "--records", "10"]
        monkeypatch.setattr("sys.argv", arguments)
        assert command.main() == 0
    out = capsys.readouterr().out
    assert out.startswith("m, results of 10 entries, temperature 0\n")
    assert re.search(r"\| dropped \| 1/5 \| 0/1 \| 0/1 \| 0/1 \| 0/1 \| 1/1 \|", out)
