"""The scripted model decides by what it sees, and by nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.demo.model import QUESTION, TASK, Said, reply

Json = dict[str, Any]

SYSTEM = {"role": "system", "content": "s"}
READ = {"role": "user", "content": TASK.format(pages="`a.py` from line 1\n`b/c.py` from line 501")}
ASK = {"role": "user", "content": QUESTION.format(path="a.py", begins="LIMIT =")}
OURS = ["read_source", "grep", "read_file"]
FILE = "/context_store/a.py-01234567.txt"


def called(name: str, call_id: str = "c1") -> Json:
    function = {"name": name, "arguments": "{}"}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": call_id, "type": "function", "function": function}],
    }


def page(path: str, text: str) -> list[Json]:
    result = {"role": "tool", "tool_call_id": "c1", "content": f"{path}, lines 1-9 of 9\n{text}"}
    return [called("read_source"), result]


WHOLE = page("a.py", "x\nLIMIT = 5\n")
MOVED = page("a.py", f"imp... (detailed result is stored in {FILE}; complete)")
FOUND = """\
Found 1 match for pattern "^LIMIT =" in path "/context_store" (line numbers are read_file's offset):
---
File: b.py-99999999.txt (result of read_source b.py)
3: LIMIT = 7
---
File: a.py-01234567.txt (result of read_source a.py)
5- # the most
6: LIMIT = 5
7- # the least
---
"""


def turn(tool: str, result: str) -> list[Json]:
    return [ASK, called(tool, "g"), {"role": "tool", "tool_call_id": "g", "content": result}]


GREP = {"pattern": r"^LIMIT\ =", "path": "/context_store"}
REPLIES: dict[str, tuple[list[Json], Said]] = {
    "the first page": ([SYSTEM, READ], Said("", "read_source", {"path": "a.py", "first": 1})),
    "then the next": ([SYSTEM, READ, *WHOLE], Said("", "read_source", {"path": "b/c.py", "first": 501})),
    "though it was moved": ([SYSTEM, READ, *MOVED], Said("", "read_source", {"path": "b/c.py", "first": 501})),
    "the end": ([SYSTEM, READ, *WHOLE, *WHOLE], Said("That was the last page: I have read all of them.")),
    "from what it sees": ([SYSTEM, READ, *WHOLE, ASK], Said("LIMIT = 5")),
    "search": ([SYSTEM, READ, *MOVED, ASK], Said("", "grep", GREP)),
    "open the hit in that file": (
        [SYSTEM, READ, *MOVED, *turn("grep", FOUND)],
        Said("", "read_file", {"path": FILE, "offset": 6, "limit": 1}),
    ),
    "quote what came back": ([READ, *MOVED, *turn("read_file", "LIMIT = 5\n[lines 6-6 of 9]")], Said("LIMIT = 5")),
    "nothing is left": ([SYSTEM, READ, ASK], Said("I have no text of a.py any more.")),
    "no match": ([READ, *MOVED, *turn("grep", "No matches.")], Said("I cannot find that line any more.")),
}


@pytest.mark.parametrize("name", REPLIES)
def test_what_the_model_says(name: str) -> None:
    messages, said = REPLIES[name]
    assert reply(messages, OURS) == said


def test_our_tools_may_have_their_longer_names_or_be_missing() -> None:
    assert reply([READ, *MOVED, ASK], ["offload_grep", "offload_read_file"]).tool == "offload_grep"
    assert "any more" in reply([READ, *MOVED, ASK], ["read_source"]).text
