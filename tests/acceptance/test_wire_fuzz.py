"""Runs a few hundred attacks of `tests.wire_fuzz`, always the same ones.

To run it for an hour, use `python -m tests.wire_fuzz --seconds 3600 --seed N`.
"""

from __future__ import annotations

import asyncio

import pytest

from tests.wire_fuzz import honest
from tests.wire_fuzz.attacks import KINDS
from tests.wire_fuzz.run import Plan, run

CONNECTIONS = 12


@pytest.mark.parametrize("cases", [60, pytest.param(400, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("seed", [1, 2], ids=["strangers are served", "strangers are refused"])
def test_nobody_can_harm_the_honest_client(seed: int, cases: int) -> None:
    figures = asyncio.run(
        run(Plan(seed, cases=cases, connections=CONNECTIONS, strangers=bool(seed % 2)))
    )
    assert not figures.violations, "\n".join([*figures.lines(), *figures.violations[:5]])
    assert figures.cases.total() == cases
    assert set(figures.cases) == set(KINDS)
    assert figures.book.shared
    assert len(figures.book.known["offloaded"][0]) == 2, "the proxy answered a round of its tools"
    assert set(figures.book.done) == {kind(0).kind for kind in honest.KINDS}
