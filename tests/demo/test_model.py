"""The scripted model decides by what it sees, and by nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.demo.model import QUESTION, TASK, Said, reply

Json = dict[str, Any]

SYSTEM = {"role": "system", "content": "s"}
READ = {"role": "user", "content": TASK.format(modules="`a.py`, `b/c.py`")}
ASK = {"role": "user", "content": QUESTION.format(path="a.py", begins="LIMIT =")}
OURS = ["read_source", "grep", "read_file"]
FILE = "/context_store/a.py-01234567.txt"


def called(name: str, arguments: str = "{}", call_id: str = "c1") -> Json:
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": call_id, "type": "function", "function": function}],
    }


def result(text: str, call_id: str = "c1") -> Json:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def page(path: str, first: int, last: int, of: int, text: str = "def f(): ...\n") -> list[Json]:
    return [called("read_source"), result(f"{path}, lines {first}-{last} of {of}\n{text}")]


def moved(path: str, first: int, last: int, of: int, file: str = FILE) -> list[Json]:
    return page(path, first, last, of, f"imp... (detailed result is stored in {file}; complete)")


NEXT: dict[str, tuple[list[Json], str, Json | None]] = {
    "the first page": ([SYSTEM, READ], "read_source", {"path": "a.py", "first": 1}),
    "then the next": ([SYSTEM, READ, *page("a.py", 1, 5, 9)], "read_source", {"path": "a.py", "first": 6}),
    "though it was moved": ([SYSTEM, READ, *moved("a.py", 1, 5, 9)], "read_source", {"path": "a.py", "first": 6}),
    "the next module": ([SYSTEM, READ, *page("a.py", 1, 9, 9)], "read_source", {"path": "b/c.py", "first": 1}),
    "the end": ([SYSTEM, READ, *page("a.py", 1, 9, 9), *page("b/c.py", 1, 9, 9)], "", None),
}


@pytest.mark.parametrize("name", NEXT)
def test_the_model_reads_the_named_modules_page_by_page(name: str) -> None:
    messages, tool, arguments = NEXT[name]
    assert reply(messages, OURS)[1:3] == (tool, arguments)


def test_the_model_notes_the_definitions_of_a_page() -> None:
    seen = [SYSTEM, READ, *page("a.py", 1, 9, 9, "def f(): ...\nclass G: ...\n  def h(): ...\n")]
    assert reply(seen, OURS).text == "2 definitions, from f to G. "


FOUND = """\
Found 1 match for pattern "^LIMIT =" in path "/context_store" (line numbers are read_file's offset):
---
File: a.py-01234567.txt (result of read_source a.py)
5- # the most
6: LIMIT = 5
7- # the least
---
"""
GREP = called("grep", '{"pattern": "^LIMIT =", "path": "/context_store"}', "g1")
OPEN = called("read_file", "{}", "g2")


def test_the_model_answers_from_pages_that_it_still_sees() -> None:
    assert reply([SYSTEM, READ, *page("a.py", 1, 9, 9, "x\nLIMIT = 5\n"), ASK], OURS).text == "LIMIT = 5"


@pytest.mark.parametrize("tools", [["grep", "read_file"], ["offload_grep", "offload_read_file"]])
def test_the_model_greps_moved_pages(tools: list[str]) -> None:
    answer = reply([SYSTEM, READ, *moved("a.py", 1, 9, 9), ASK], tools)
    assert answer == Said("", tools[0], {"pattern": r"^LIMIT\ =", "path": "/context_store"})


def test_the_model_opens_the_hit_in_a_page_of_that_file() -> None:
    other = FOUND.replace("a.py-01234567", "a.py-99999999").replace("6:", "3:") + FOUND
    answer = reply([SYSTEM, READ, *moved("a.py", 1, 9, 9), ASK, GREP, result(other, "g1")], OURS)
    assert answer == Said("", "read_file", {"path": FILE, "offset": 6, "limit": 1})


def test_the_model_quotes_the_text_that_came_back() -> None:
    turn = [ASK, GREP, result(FOUND, "g1"), OPEN, result("LIMIT = 5\n[lines 6-6 of 9; continue]", "g2")]
    assert reply([SYSTEM, READ, *moved("a.py", 1, 9, 9), *turn], OURS).text == "LIMIT = 5"


WRONG = {
    "no tools to follow the reference": ([SYSTEM, READ, *moved("a.py", 1, 9, 9), ASK], ["read_source"]),
    "nothing is left": ([SYSTEM, READ, ASK], OURS),
    "no match": ([SYSTEM, READ, *moved("a.py", 1, 9, 9), ASK, GREP, result("No matches.", "g1")], OURS),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_model_does_not_know_text_that_it_cannot_see(name: str) -> None:
    answer = reply(*WRONG[name])
    assert not answer.tool
    assert "any more" in answer.text
