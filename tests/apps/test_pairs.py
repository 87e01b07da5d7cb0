"""The intervals have the true value in them as often as they say, and no figure is shown of too few
requests."""

from __future__ import annotations

import math
from collections import Counter
from random import Random

import pytest

from proxy.apps.verify import pairs
from proxy.apps.verify.pairs import NEEDED, NextStep, Took

TRIALS = 300
COVERED = 0.93

LOOKED: pairs.Action = (("look", "{}"),)


def triples(
    chance: Random, number: int, noise: float, effect: float, longer: float
) -> Counter[str]:
    """The sums of so many requests. A reply is another one by chance as often as `noise` says; as
    planned it is so in `effect` more, and `longer` times as long."""
    sums = Counter[str]()
    for _ in range(number):
        size = chance.lognormvariate(6, 1)

        def reply(share: float, scale: float, size: float = size) -> NextStep:
            action = LOOKED if chance.random() >= share else (("look", str(chance.random())),)
            return NextStep(action, max(round(size * scale * chance.lognormvariate(0, 0.6)), 1))

        seen, again, other = reply(noise, 1), reply(noise, 1), reply(noise + effect, longer)
        sums.update(pairs.same(seen, again, other))
        whole = [Took(one.tokens, 4 * one.tokens) for one in (seen, again)]
        sums.update(pairs.measured(whole, [Took(other.tokens, 3 * other.tokens)]))
    return sums


@pytest.mark.parametrize("number", [NEEDED, 90])
@pytest.mark.parametrize(
    ("noise", "effect", "longer"),
    [(0.0, 0.0, 1.0), (0.1, 0.1, 1.1), (0.3, 0.2, 1.5), (0.02, 0.3, 3.0)],
)
def test_intervals_cover_a_known_effect(
    number: int, noise: float, effect: float, longer: float
) -> None:
    chance = Random(f"{number} {noise} {effect}")
    covered = Counter[str]()
    changed = (1 - noise) * effect
    for _ in range(TRIALS):
        sums = triples(chance, number, noise, effect, longer)
        exact = pairs.changed(number, sums["again_exact"], sums["whole_exact"], sums["both_exact"])
        covered["action"] += exact.low <= changed <= exact.high
        reply = pairs.typical(number, sums["reply_ratio"], sums["reply_ratio_squared"])
        covered["reply"] += reply.low <= longer <= reply.high
        cost = pairs.typical(number, sums["cost_ratio"], sums["cost_ratio_squared"])
        covered["cost"] += cost.low <= 0.75 * longer <= cost.high
    assert min(covered.values()) >= COVERED * TRIALS, covered


def test_requests_of_one_session_are_alike() -> None:
    """Each session has its own effect. Without the sessions, too few intervals cover the mean of
    them all."""
    chance = Random(5)
    covered = Counter[str]()
    for _ in range(TRIALS):
        sums = Counter[str]()
        sessions = list[Counter[str]]()
        for _ in range(20):
            effect = chance.choice((0.0, 0.6))
            longer = chance.lognormvariate(0.1, 0.5)
            sessions.append(triples(chance, 6, 0.1, effect, longer))
            sessions[-1]["asked"] = 6
            sums.update(sessions[-1])
        whole = sums["again_exact"], sums["whole_exact"], sums["both_exact"]
        each = [(6, one["again_exact"] - one["whole_exact"]) for one in sessions]
        spread = pairs.Sessions.of(each, whole[0] + whole[1] - 2 * whole[2])
        found = pairs.changed(120, *whole, spread)
        covered["action"] += found.low <= 0.9 * 0.3 <= found.high
        logs = sums["reply_ratio"], sums["reply_ratio_squared"]
        spread = pairs.Sessions.of([(6, one["reply_ratio"]) for one in sessions], logs[1])
        ratio = pairs.typical(120, *logs, spread)
        covered["reply"] += ratio.low <= math.exp(0.1) <= ratio.high
        ratio = pairs.typical(120, *logs)
        covered["reply as if independent"] += ratio.low <= math.exp(0.1) <= ratio.high
    assert min(covered["action"], covered["reply"]) >= 0.93 * TRIALS, covered
    assert covered["reply as if independent"] < 0.85 * TRIALS, covered


def test_an_interval_narrows_with_more_requests() -> None:
    few, many = (triples(Random(1), number, 0.2, 0.1, 1.2) for number in (NEEDED, 10 * NEEDED))

    def width(sums: Counter[str], number: int) -> float:
        found = pairs.typical(number, sums["reply_ratio"], sums["reply_ratio_squared"])
        return found.high - found.low

    assert width(many, 10 * NEEDED) < 0.5 * width(few, NEEDED)


def test_no_figure_is_shown_of_fewer_than_thirty() -> None:
    sums = triples(Random(2), NEEDED - 1, 0.1, 0.0, 1.0)
    assert pairs.figures(NEEDED - 1, sums) == []
    assert pairs.missing(NEEDED - 1) == "29 of the 30 compared requests that a figure needs"
    sums += triples(Random(3), 1, 0.1, 0.0, 1.0)
    assert len(pairs.figures(NEEDED, sums)) == 4 and not pairs.missing(NEEDED)
    sums["measured"] -= 1
    titles = [figure.title for figure in pairs.figures(NEEDED, sums)]
    assert titles == ["Same tools called", "Same next action"]


@pytest.mark.parametrize(
    ("again", "whole", "both", "words"),
    [
        (90, 90, 85, "none of 100 beyond chance: between 7 fewer and 7 more"),
        (95, 60, 60, "35 of 100 beyond chance: between 24 and 44 more"),
        (60, 95, 60, "35 of 100 fewer than chance: between 24 and 44 fewer"),
        (100, 100, 100, "none of 100 beyond chance: between 2 fewer and 2 more"),
    ],
)
def test_an_interval_is_said_in_words(again: int, whole: int, both: int, words: str) -> None:
    sums = Counter(again_exact=again, whole_exact=whole, both_exact=both)
    found = pairs.figures(100, sums)[1]
    assert found.value == f"{whole} %"
    assert found.lines[2] == f"the plan changes {words}"


@pytest.mark.parametrize(
    ("longer", "value"), [(1.0, "the same"), (1.5, "50 % longer"), (0.5, "50 % shorter")]
)
def test_longer_replies_are_called_so(longer: float, value: str) -> None:
    sums = Counter[str]()
    for number in range(60):
        tokens = 400 + number % 7
        took = Took(round(tokens * longer) + number % 3, 1000)
        sums.update(pairs.measured([Took(tokens, 1000)] * 2, [took]))
    found = pairs.figures(0, sums)[0]
    assert (found.title, found.value) == ("Length of replies", value)


def test_nothing_is_made_of_no_difference() -> None:
    sums = Counter[str]()
    for _ in range(NEEDED):
        sums.update(pairs.measured([Took(7, 100)], [Took(7, 100)]))
    length, cost = pairs.figures(0, sums)
    assert (length.value, cost.value) == ("the same", "the same")
    assert length.lines[0] == "no difference, in the typical one of 30 requests"


def test_what_is_not_known_is_not_measured() -> None:
    assert pairs.measured([Took(10, 10)], [Took(0, 10)]) == {}
    assert pairs.measured([], [Took(5, 10)]) == {}
