"""Runs a few hundred attacks of `tests.wire_fuzz`, always the same ones, and checks that a fault would be seen.

To run it for an hour, use `python -m tests.wire_fuzz --seconds 3600 --seed N`.
"""

from __future__ import annotations

import asyncio

import pytest

from tests.wire import Message
from tests.wire_fuzz import honest
from tests.wire_fuzz.attacks import KINDS, Case, case
from tests.wire_fuzz.run import Plan, run

CONNECTIONS = 12


@pytest.mark.parametrize("cases", [60, pytest.param(400, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("seed", [1, 2], ids=["strangers are served", "strangers are refused"])
def test_nobody_can_harm_the_honest_client(seed: int, cases: int) -> None:
    figures = asyncio.run(run(Plan(seed, cases=cases, connections=CONNECTIONS, strangers=bool(seed % 2))))
    assert not figures.violations, "\n".join([*figures.lines(), *figures.violations[:5]])
    assert figures.cases.total() == cases
    assert set(figures.cases) == set(KINDS)
    assert figures.book.shared
    assert len(figures.book.known["offloaded"][0]) == 2, "the proxy answered a round of its tools"
    assert set(figures.book.done) == {kind(0).kind for kind in honest.KINDS}


def test_a_case_is_always_the_same() -> None:
    made = [case(3, number) for number in range(20)]
    assert made == [case(3, number) for number in range(20)]
    assert made != [case(4, number) for number in range(20)]
    assert isinstance(made[0], Case)


def _arrived(asked: honest.Asked) -> Message:
    _, _, body = asked.wire.partition(b"\r\n\r\n")
    return Message(b"POST /v1/chat/completions HTTP/1.1", [(b"X-Honest", b"%d" % asked.number)], body)


def _reply(body: bytes | None, status: int = 200) -> Message:
    return Message(b"HTTP/1.1 %d Said" % status, [], body or b"")


def _book(asked: honest.Asked, *arrivals: Message) -> honest.Book:
    book = honest.Book()
    book.arrived[asked.number] = []
    for message in arrivals:
        book.arrival(message)
    return book


def test_an_honest_request_that_is_served_is_no_fault() -> None:
    asked = honest.plain(7)
    assert asked.expected
    book = _book(asked, _arrived(asked))
    book.check(asked, _reply(asked.expected[1]))
    assert book.violations == []


@pytest.mark.parametrize("fault", ["status", "another's reply", "arrived twice", "never arrived", "not asked"])
def test_what_is_wrong_with_an_honest_request_is_seen(fault: str) -> None:
    asked, other = honest.plain(7), honest.plain(8)
    assert asked.expected and other.expected
    times = {"arrived twice": 2, "never arrived": 0}.get(fault, 1)
    book = _book(asked, *[_arrived(asked)] * times, *[_arrived(other)] * (fault == "not asked"))
    said = other.expected[1] if fault == "another's reply" else asked.expected[1]
    book.check(asked, _reply(said, 400 if fault == "status" else 200))
    assert len(book.violations) == 1
