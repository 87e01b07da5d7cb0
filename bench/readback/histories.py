"""Three agents' histories, and questions whose answers are only in their tool results. The same on
every run."""

from __future__ import annotations

import json
import random
import re
from itertools import islice, zip_longest
from typing import Any

import msgspec

Json = dict[str, Any]

KINDS = ("value", "line", "count", "comparison", "nowhere")
DENIAL = re.compile(r"\b(?:no|not|none|nothing|nowhere|cannot|unable|\w+n\Wt)\b", re.I)
NUMBER = re.compile(r"\b\d{5,6}\b")
"""One of the records' numbers."""
KEY = re.compile(r"\bk\d+\b")
STATES = ("open", "closed", "draining")
SYSTEM = (
    "You are an assistant with tools. Answer in words, from what the tools returned. Do not call a tool again for what"
    " it has returned before."
)
RECORDS = 90
"""Entries of a tool result: about 2,000 tokens of o200k_base."""
LEAST_RECORDS = 8
"""Fewer hardly have enough that nobody has told yet."""

SETTINGS = {
    "operations": [
        ("read_log", "/var/log/billing.log", "log"),
        ("show_state", "deploy/cluster_state.json", "json"),
        ("run_query", "reports/latency.csv", "csv"),
        ("read_log", "/var/log/mailer.log", "log"),
    ],
    "code": [
        ("open_file", "mailer/settings.py", "python"),
        ("open_file", "billing/limits.py", "python"),
        ("run_tests", "tests/test_engine.py", "log"),
        ("open_file", "fixtures/accounts.json", "json"),
    ],
    "research": [
        ("fetch_page", "https://example.org/stations/visitors", "prose"),
        ("fetch_page", "https://example.org/harbours/depths", "prose"),
        ("fetch_table", "https://example.org/data/rainfall.csv", "csv"),
        ("fetch_page", "https://example.org/bridges/lengths", "prose"),
    ],
}
"""For each history, the client's calls: tool, what it is called with, and the form of the
result."""

_FORMS = {
    "log": "2026-03-01 10:{number:02}:17 INFO entry={key} amount={value} state={state} worker-{worker}",
    "csv": "{key},{value},{state},worker-{worker}",
    "python": "{key} = {value}  # {state}, kept by worker-{worker}",
    "prose": "At {key} they counted {value}, while worker-{worker} found it {state}.",
}


class Record(msgspec.Struct, frozen=True):
    key: str
    value: int
    state: str
    line: str
    """The whole line; empty where a record takes several."""


class Document(msgspec.Struct, frozen=True):
    """A tool result: the call, its text, and what it says."""

    tool: str
    path: str
    text: str
    records: list[Record]


class Question(msgspec.Struct, frozen=True):
    kind: str
    text: str
    answer: str

    def is_right(self, reply: str) -> bool:
        """Whether the reply has the answer, whatever its case and spaces, or says that there is
        none."""
        if self.kind == "nowhere":
            return DENIAL.search(reply) is not None and not NUMBER.search(reply.replace(",", ""))
        if self.kind == "comparison":  # the first key that it gives, as naming both is no answer
            keys = KEY.findall(reply.lower().rpartition("answer:")[2])
            return keys[:1] == [self.answer.lower()]
        said, wanted = (
            " ".join(text.lower().replace(",", "").split()) for text in (reply, self.answer)
        )
        return re.search(rf"(?<!\w){re.escape(wanted)}(?!\w)", said) is not None


class Recorded(msgspec.Struct, frozen=True):
    """A history that ends where the client asks its question.

    As in agents' sessions, the user has asked before, and the assistant has answered in words:
    after a call, and from what it had. Models go on as they find things; after a history of bare
    calls, small ones only call.
    """

    name: str
    documents: list[Document]
    told: list[list[Record]]
    """For each document, the two of its records that the assistant has told. No question asks for
    them."""
    questions: list[Question]

    def messages(self, dropped: bool = False) -> list[Json]:
        """Return the messages before the question. `dropped`: without the texts of the results."""
        made: list[Json] = [{"role": "system", "content": SYSTEM}]
        for number, (document, (first, second)) in enumerate(
            zip(self.documents, self.told, strict=True)
        ):
            function = {"name": document.tool, "arguments": json.dumps({"path": document.path})}
            call = {"id": f"call_{number}", "type": "function", "function": function}
            content = f"{len(document.records)} entries, such as {first.key}: {first.value}, {first.state}."
            made += [
                {"role": "user", "content": f"What is in {document.path}?"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {
                    "role": "tool",
                    "tool_call_id": call["id"],
                    "content": "[cleared]" if dropped else document.text,
                },
                {"role": "assistant", "content": content},
                {"role": "user", "content": f"And {second.key}?"},
                {
                    "role": "assistant",
                    "content": f"{second.key} has {second.value} and is {second.state}.",
                },
            ]
        return made

    def tools(self) -> list[Json]:
        """Return the definitions of the client's own tools."""
        parameters = {
            "type": "object",
            "properties": {"path": {"type": "string"}},
            "required": ["path"],
        }
        names = dict.fromkeys(document.tool for document in self.documents)
        return [
            {
                "type": "function",
                "function": {"name": name, "description": "Fetch it.", "parameters": parameters},
            }
            for name in names
        ]


def histories(records: int = RECORDS, questions: int | None = None) -> list[Recorded]:
    """Return all histories with results of so many entries, each with 14 questions of five kinds,
    or the given number of them, in which every kind has its turn."""
    return [_history(name, random.Random(name), records, questions) for name in SETTINGS]


def _history(name: str, chance: random.Random, records: int, questions: int | None) -> Recorded:
    marks = iter(chance.sample(range(1_000, 10_000), records * len(SETTINGS[name])))
    documents = [
        _document(*setting, list(islice(marks, records)), chance) for setting in SETTINGS[name]
    ]
    told = [chance.sample(document.records, 2) for document in documents]
    asked = _questions(documents, [record for some in told for record in some], chance)
    turns = zip_longest(
        *([question for question in asked if question.kind == kind] for kind in KINDS)
    )
    chosen = set(islice((question for turn in turns for question in turn if question), questions))
    return Recorded(name, documents, told, [question for question in asked if question in chosen])


def _document(tool: str, path: str, form: str, marks: list[int], chance: random.Random) -> Document:
    records = []
    for number, mark in enumerate(marks):
        key = f"K{mark}"
        value = chance.randrange(10_000, 1_000_000)
        state = chance.choice(STATES)
        line = ""
        if form != "json":
            worker = chance.randrange(100)
            line = _FORMS[form].format(
                number=number % 60, key=key, value=value, state=state, worker=worker
            )
        records.append(Record(key, value, state, line))
    if form == "json":
        text = json.dumps(
            [{"id": each.key, "amount": each.value, "state": each.state} for each in records],
            indent=2,
        )
    else:
        text = "\n".join(each.line for each in records) + "\n"
    return Document(tool, path, text, records)


def _questions(
    documents: list[Document], told: list[Record], chance: random.Random
) -> list[Question]:
    """Ask three questions of each kind, and two about what is nowhere."""
    asked = []
    lined = [document for document in documents if document.records[0].line]
    for number in range(3):
        document, other = chance.sample(documents, 2)
        record, second = (chance.choice(_without(told, one.records)) for one in (document, other))
        asked.append(
            Question(
                "value",
                f"Which number belongs to {record.key} in {document.path}?",
                str(record.value),
            )
        )
        source = lined[number % len(lined)]
        line = chance.choice(_without(told, source.records))
        asked.append(
            Question(
                "line",
                f"Quote the whole line of {source.path} that has {line.key} in it.",
                line.line,
            )
        )
        state = STATES[number]
        count = sum(each.state == state for each in document.records)
        text = f"How many entries of {document.path} are {state}? Say only the number."
        asked.append(Question("count", text, str(count)))
        larger = record if record.value >= second.value else second
        asked.append(
            Question(
                "comparison",
                f"Which has the larger number, {record.key} in {document.path} or {second.key} in {other.path}?"
                " End with `Answer: ` and its key.",
                f"{larger.key}",
            )
        )
    for document in documents[:2]:
        key = f"K0{chance.randrange(100, 1_000)}"
        asked.append(Question("nowhere", f"Which number belongs to {key} in {document.path}?", ""))
    return sorted(asked, key=lambda question: KINDS.index(question.kind))


def _without(told: list[Record], records: list[Record]) -> list[Record]:
    return [record for record in records if record not in told]
