"""`bench.facts` tells where the facts stand that a reply uses, on a small made-up run."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from bench import facts
from bench.facts import (
    MOVED,
    PREVIEW,
    SENT,
    Tally,
    facts_in,
    last_results,
    of_message,
    proxied,
    summary_only,
)
from proxy.policy import Profile
from tests.transcripts import Json, Run

FACT = "the vault of bay seven opens with 774123 only"
FILLER = "\n".join(
    f"nothing happened in hall {number}, as ever, and nobody was there" for number in range(400)
)


def run(age: int, said: str = "", arguments: Any = None, task: str = "Look.") -> Run:
    """A run whose last reply says this, `age` replies after the result that has the fact."""
    messages: list[Json] = [{"role": "user", "content": task}]
    for number in range(age):
        function = {"name": "look", "arguments": json.dumps({"path": f"/logs/{number}.log"})}
        call = {"id": f"c{number}", "type": "function", "function": function}
        text = f"{FILLER}\n{FACT}\n{FILLER}" if number == 0 else f"{FILLER} {number}"
        messages += [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"c{number}", "content": text},
        ]
    last: Json = {"role": "assistant", "content": said}
    if arguments is not None:
        last["tool_calls"] = [
            {"id": "x", "type": "function", "function": {"name": "f", "arguments": arguments}}
        ]
    return Run("made up", "1", "m", [], [*messages, last], 0)


def tally(of: Run, strategy: facts.Strategy) -> Tally:
    return facts.needed([of], {"it": strategy})[facts.ALL]["it"]


def test_a_text_has_facts_of_four_kinds() -> None:
    found = facts_in("12: def read_all(self, path='/etc/hosts'): # 4711 of 42")
    assert {("paths", "/etc/hosts"), ("numbers", "4711"), ("identifiers", "read_all")} <= found
    assert ("quotes", "def read_all(self, path='/etc/hosts'): # 4711 of 42") in found
    assert ("numbers", "42") not in found and ("numbers", "12") not in found


def test_arguments_are_read_as_what_they_say() -> None:
    call = {
        "function": {
            "name": "edit",
            "arguments": json.dumps({"new": ["a\nthis line is one of the file's own"]}),
        }
    }
    assert ("quotes", "this line is one of the file's own") in of_message(
        {"content": None, "tool_calls": [call]}
    )
    call = {"function": {"name": "edit", "arguments": "no JSON but host_17"}}
    assert ("identifiers", "host_17") in of_message({"content": None, "tool_calls": [call]})


@pytest.mark.parametrize(
    ("age", "strategy", "where"),
    [
        (1, proxied(Profile.FRUGAL), SENT),
        (8, last_results(10**9), SENT),
        (8, proxied(Profile.BALANCED), MOVED),
        (8, last_results(3), MOVED),
        (8, last_results(3, 10**9), SENT),
        (2, last_results(3), SENT),
        (8, summary_only, MOVED),
    ],
)
def test_a_used_fact_is_sent_or_moved(age: int, strategy: facts.Strategy, where: str) -> None:
    found = tally(run(age, f"It is 774123. And:\n{FACT}"), strategy)
    assert found.where == {where: 2} and found.replies == 1 and found.lacking == (where == MOVED)


def test_what_only_a_preview_shows_is_told_apart() -> None:
    """Its first line is in the preview."""
    made = run(8, "Then 558899 it is.")
    made.messages[2]["content"] = f"code 558899\n{FILLER}"
    assert tally(made, proxied(Profile.BALANCED)).where == {PREVIEW: 1}


@pytest.mark.parametrize("said", ["Nothing of it.", "It is 1234567."])
def test_what_no_result_brought_does_not_count(said: str) -> None:
    assert tally(run(8, said), last_results(3)).replies == 0


def test_what_the_task_names_does_not_count() -> None:
    assert not tally(run(8, "774123", task="Is it 774123?"), last_results(3)).where


def test_what_the_model_said_itself_is_still_there() -> None:
    made = run(8, "774123")
    made.messages[3]["content"] = "I note 774123."
    assert tally(made, last_results(3)).where == {SENT: 2}  # there, and in the last reply


@pytest.mark.parametrize("name", ["old_str", "old_string", "search"])
def test_an_edit_quotes_old_text_that_has_moved(name: str) -> None:
    made = run(
        8, "", json.dumps({"edits": [{name: f"{FACT}\nnever read before, by anybody", "new": "x"}]})
    )
    found = tally(made, proxied(Profile.BALANCED))
    assert (found.edits, found.edits_moved) == (1, 1)
    assert tally(made, last_results(10**9)).edits_moved == 0


def test_an_edit_quotes_old_text_between_markers() -> None:
    text = "<<<BEFORE_EDIT>>>\nthe line that was in the file\n<<<AFTER_EDIT>>>\nthe line that will be in the file"
    assert facts.quoted(json.dumps({"content": text})) == {
        ("quotes", "the line that was in the file")
    }
    assert not facts.quoted(json.dumps({"content": FACT}))


def test_one_read_brings_back_facts_of_one_result_only() -> None:
    made = run(9, f"It is 774123. And:\n{FACT}")
    assert tally(made, proxied(Profile.BALANCED)).one_read == 1
    made.messages[4]["content"] += "\nand another vault has 558899"
    made.messages[-1]["content"] += " 558899"
    found = tally(made, proxied(Profile.BALANCED))
    assert (found.lacking, found.one_read) == (1, 0)


def test_runs_are_summed_up_by_kind_of_agent_and_by_source() -> None:
    coding = msgspec.structs.replace(run(8, FACT), source="editor", kind="software-engineering")
    gathering = msgspec.structs.replace(run(2, FACT), source="researcher", kind="web-research")
    found = facts.needed([coding, gathering])
    rows = [line.split(" | ") for line in facts.group_table(found).splitlines()[2:]]
    assert rows[0] == ["| all", "2", "0.0%", "50.0%", "100.0%", "1 of 1", "0 of 0 |"]
    groups = ["all", "coding agents", "gathering agents", "editor", "researcher"]
    assert [row[0].removeprefix("| ") for row in rows] == groups
    assert rows[3][3] == "100.0%" and rows[4][3] == "0.0%"


def test_the_table_has_every_strategy_and_its_share_of_tokens() -> None:
    found = facts.needed([run(8, f"It is 774123. And:\n{FACT}")])[facts.ALL]
    first, _, _, _, *rows = facts.table(found).splitlines()
    assert first == "2 facts of results that 1 replies use"
    [balanced] = [row.split(" | ") for row in rows if "balanced" in row]
    assert balanced[2:] == ["0.0%", "0.0%", "100.0%", "100.0% |"]
    assert float(balanced[1]) < 0.7
    assert len(rows) == len(facts.STRATEGIES)
