"""Exact things of a history, found mechanically: the same each time, in linear time, and never more than fits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.plan import record
from proxy.plan.plan import Role
from proxy.plan.record import FactKind
from proxy.plan.summary import Section
from tests.doubling import assert_linear


def tool(text: str) -> Section:
    return Section("1 tool", text, Role.TOOL)


def shown(*texts: str, known: str = "", room: int = 10_000) -> list[str]:
    return record.section([tool(text) for text in texts], known, room, len).split("\n")


@pytest.mark.parametrize(
    ("line", "fact"),
    [
        ("the deploy code is heliotrope-7291, ok", "- deploy code is heliotrope-7291"),
        ("heap limit 512 MB reached", "- heap limit 512 MB"),
        ("latency p99=340ms today", "- latency p99=340ms"),
        ('  "port": 8443,', "- port: 8443"),
        ("max_connections = 450", "- max_connections = 450"),
        ("usage at 93.5%", "- usage at 93.5%"),
        ("see https://x.example/runs/88?a=1.", "- https://x.example/runs/88?a=1"),
        ("read `/var/log/billing.log` first", "- /var/log/billing.log"),
        ("in mailer/settings.py:12 there", "- mailer/settings.py:12"),
        ("ERROR  billing: connection refused", "- ERROR billing: connection refused"),
        ("commit 9f3c2ab1 by me", "- commit 9f3c2ab1"),
        ("Ticket OPS-4711 is open", "- Ticket OPS-4711"),
        ("see https://x.example/a\\n2. heap 512 MB\\n", "- https://x.example/a"),
        ("see C:\\new\\log.txt", "- C:\\new\\log.txt"),
    ],
)
def test_what_is_found(line: str, fact: str) -> None:
    assert fact in shown(f"Some words.\n{line}\nMore words.")


@pytest.mark.parametrize(
    "line", ["We read/write this and/or that.", "2024-05-01T12:00:00 started", "12:00:01 started", "a 7 x", "", "== -"]
)
def test_what_is_not(line: str) -> None:
    assert shown(line) == [""]


def test_the_newest_and_the_most_frequent_come_first() -> None:
    texts = ["alpha-1001", *["beta-2002 and filler words"] * 3, *[f"gamma-3{n:03}" for n in range(40)], "delta-4004"]
    found = shown(*texts, room=60)
    assert "- delta-4004" in found and "- beta-2002" in found and "- alpha-1001" not in found
    assert sum(len(line) + 1 for line in found) <= 60


def test_what_somebody_said_counts_more_than_what_a_tool_printed() -> None:
    said = Section("2 assistant", "It is alpha-1001.", Role.ASSISTANT)
    texts = [said, *[tool(f"gamma-3{n:03}") for n in range(300)]]
    assert "alpha-1001" in record.section(texts, "", 100, len)


def test_a_log_does_not_push_out_the_rest() -> None:
    log = "\n".join(f"INFO request id=a{n:06x} took {n} ms" for n in range(3_000))
    assert "- the code is heliotrope-7291" in shown("the code is heliotrope-7291", log, room=600)


def test_what_the_record_has_is_left_out() -> None:
    assert shown("code heliotrope-7291", known="It is heliotrope-7291.") == [""]


def test_kinds_are_grouped() -> None:
    found = record.found([tool("OPS-4711 took 5 ms\nfailed: x1\n/var/log/a.log")])
    assert {fact.kind for fact in found.values()} == set(FactKind)
    assert shown("OPS-4711\nfailed: it\n/var/log/a.log") == ["- failed: it", "- OPS-4711", "- /var/log/a.log"]


texts = st.lists(st.text(alphabet='ab7-/.: =\n%{"mse', max_size=120), max_size=6)


@given(texts, st.integers(0, 200))
def test_any_texts_give_the_same_facts_within_the_room(some: list[str], room: int) -> None:
    sections = [tool(text) for text in some]
    made = record.section(sections, "", room, len)
    assert len(made) <= room
    assert made == record.section(sections, "", room, len)
    for fact in record.found(sections).values():
        assert len(fact.exact) < 400


REPEATED = [
    "a",
    "a" * 399 + "\n",
    "7",
    "a7 ",
    "/a",
    "a/7 ",
    "a.b",
    "7 ms ",
    "1.",
    "http://",
    "-",
    "\n",
    "a7\n",
    "=7 ",
    '"a": 77, ',
    "error ",
    "{[(",
]


@pytest.mark.parametrize("text", REPEATED)
def test_finding_facts_is_linear(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(record, "LINE_CHARS", 10_000_000)

    def work(number: int) -> None:
        record.found([tool(text * number)])

    assert_linear(work, 30_000 // len(text), 60_000 // len(text))
