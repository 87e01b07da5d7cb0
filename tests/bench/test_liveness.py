"""The arithmetic of `liveness`, and that every attack can be made."""

from __future__ import annotations

import pytest

from bench.liveness import ATTACKS, Row, corrected, percentile, table
from bench.misbehaving import REPLIES
from tests.probing import Seen


def test_a_request_that_waited_counts_as_those_that_were_not_asked_meanwhile() -> None:
    assert corrected([0.001], 0.005) == [0.001]
    assert corrected([0.012], 0.005) == pytest.approx([0.012, 0.007, 0.002])


def test_percentiles() -> None:
    assert percentile([], 99) == 0
    assert percentile(list(range(100)), 50) == 50
    assert percentile(list(range(100)), 99) == 99


@pytest.mark.parametrize(
    ("seen", "holds"),
    [
        (Seen([0.001] * 1000, [0.2] * 10), True),
        (Seen([0.001] * 1000 + [2.0], [0.001]), False),
        (Seen([0.001], [0.001] * 1000 + [2.0]), False),
        (Seen([0.001], [0.001], [0.3]), False),
        (Seen([0.001], [0.001], [], ["503"]), False),
    ],
    ids=[
        "within the bounds",
        "one long stall of /health",
        "of the chat",
        "of the one that needs a thread",
        "a failure",
    ],
)
def test_a_row_says_whether_the_bounds_hold(seen: Seen, holds: bool) -> None:
    row = Row("one", seen=seen)
    assert row.holds == holds
    assert ("**no**" in table([row])) != holds


def test_every_attack_has_a_name_and_the_reply_that_it_wants() -> None:
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS)
    assert {attack.model for attack in ATTACKS if attack.model} <= REPLIES.keys()
