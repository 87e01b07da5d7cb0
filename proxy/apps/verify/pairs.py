"""What requests that were asked again show, each figure with an interval. Pure.

Each request has three replies: two of them to the same bytes, whose difference is chance, and one
to the other bytes: with the plan, or without. Of each, `compared` gives whole numbers, and sums of
these are all that `figures` needs, so that those of many requests, processes and days add up.

All intervals are of 95 %: of 100 such intervals, some 95 have the true value in them.

- Shares of the same requests: A. Agresti and Y. Min, Simple improved confidence intervals for
  comparing matched proportions, Statistics in Medicine 24 (2005), 729-740: Wald's interval with half
  a request added to each of the four cells.
- Lengths and costs: Student's interval for the mean of the logarithms of the ratios, as both are
  skewed (NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.5.2).
- Where it is known which requests are of one session, both are widened by the design effect, as
  such requests are alike (L. Kish, Survey Sampling, 1965).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from proxy.telemetry.outcome import Outcome

NEEDED = 30
"""The fewest requests of which a figure is shown."""
NORMAL = 1.96
"""The normal distribution's quantile for intervals of 95 %."""
SCALE = 1000
"""Logarithms of ratios are whole thousandths, so that sums of them are exact."""

Action = tuple[tuple[str, str], ...]
"""What the model does next: the names of the tools that it calls, with their arguments; empty if it
stops."""

SUMMED = (
    *("again_tools", "whole_tools", "both_tools", "again_exact", "whole_exact", "both_exact"),
    *("measured", "whole_reply", "planned_reply", "reply_ratio", "reply_ratio_squared"),
    *("whole_cost", "planned_cost", "cost_ratio", "cost_ratio_squared"),
)
"""The fields of an outcome that `figures` needs the sums of, beside how many requests `asked`."""
assert set(SUMMED) <= set(Outcome.__struct_fields__)


class NextStep(NamedTuple):
    """What the model did, and the tokens of all that it wrote for it; 0 if upstream did not say."""

    did: Action
    tokens: int


class Took(NamedTuple):
    """The tokens of a reply, and what it cost with its input, in plain input tokens; 0 if that is
    not known."""

    reply: int
    cost: int


class Interval(NamedTuple):
    low: float
    high: float


class Figure(NamedTuple):
    """One result in words: what it is about, its value, and sentences that say of how many
    requests, and within which interval the true value is."""

    title: str
    value: str
    lines: Sequence[str]


# -- one request -----------------------------------------------------------------------------------


def same(seen: NextStep, again: NextStep, other: NextStep) -> dict[str, int]:
    """Return what was the same: in the reply to the same bytes as the one that was `seen`, in the
    `other` one, and in both."""
    found = dict[str, int]()
    for name, part in (("tools", _tools), ("exact", _exact)):
        twice = part(again) == part(seen)
        whole = part(other) == part(seen)
        found |= {f"again_{name}": twice, f"whole_{name}": whole, f"both_{name}": twice and whole}
    return {name: int(value) for name, value in found.items()}


def _tools(reply: NextStep) -> Sequence[str]:
    return [name for name, _ in reply.did]


def _exact(reply: NextStep) -> Action:
    return reply.did


def measured(whole: Sequence[Took], planned: Sequence[Took]) -> dict[str, int]:
    """Return what the replies to the whole and to the planned request took, one or two each, and
    what their ratios add to the sums; nothing if something is not known."""
    found = {"measured": 1}
    for place, name in enumerate(Took._fields):
        sides = [[one[place] for one in side] for side in (whole, planned)]
        if not all(side and min(side) > 0 for side in sides):
            return {}
        # the means of logarithms: that of two replies' mean would be above them by chance alone
        logs = [fmean(map(math.log, side)) for side in sides]
        ratio = round(SCALE * (logs[1] - logs[0]))
        found |= {
            f"whole_{name}": round(fmean(sides[0])),
            f"planned_{name}": round(fmean(sides[1])),
            f"{name}_ratio": ratio,
            f"{name}_ratio_squared": ratio**2,
        }
    return found


# -- many requests ---------------------------------------------------------------------------------


class Sessions(NamedTuple):
    """How requests are spread over sessions: how many there are, and how many times the variance is
    what it would be if requests were independent."""

    number: int
    design: float

    @classmethod
    def of(cls, sums: Sequence[tuple[int, int]], squares: int) -> Sessions:
        """`sums`: of each session how many requests there are, and the sum of their values;
        `squares`: the sum of the squares of all values."""
        number = sum(count for count, _ in sums)
        mean = sum(value for _, value in sums) / number
        alone = (squares - number * mean**2) / (number - 1)
        together = sum((value - count * mean) ** 2 for count, value in sums) / number
        if len(sums) < 2 or alone <= 0:
            return cls(len(sums), 1.0)
        return cls(len(sums), max(together / alone * len(sums) / (len(sums) - 1), 1.0))

    @property
    def quantile(self) -> float:
        """Student's for intervals of 95 % (Abramowitz and Stegun, 26.7.5)."""
        freedom = max(self.number - 1, 1)
        first = (NORMAL**3 + NORMAL) / 4
        second = (5 * NORMAL**5 + 16 * NORMAL**3 + 3 * NORMAL) / 96
        return NORMAL + first / freedom + second / freedom**2


def changed(
    asked: int, again: int, whole: int, both: int, sessions: Sessions | None = None
) -> Interval:
    """Return the interval of the share of replies that the plan changes beyond chance, as a share
    of `asked`: how much rarer the `whole` ones are the same than those `again`."""
    lost = again - both + 0.5
    won = whole - both + 0.5
    number = asked + 2
    middle = (lost - won) / number
    spread = (lost + won - (lost - won) ** 2 / number) ** 0.5 / number
    width = (
        NORMAL * spread if sessions is None else sessions.quantile * spread * sessions.design**0.5
    )
    return Interval(max(middle - width, -1.0), min(middle + width, 1.0))


def typical(number: int, ratios: int, squares: int, sessions: Sessions | None = None) -> Interval:
    """Return the interval of the typical ratio (the geometric mean), by the sums of the ratios'
    logarithms and of their squares."""
    sessions = sessions or Sessions(number, 1.0)
    mean = ratios / number
    variance = max(squares - number * mean**2, 0.0) / (number - 1)
    width = sessions.quantile * (sessions.design * variance / number) ** 0.5
    return Interval(math.exp((mean - width) / SCALE), math.exp((mean + width) / SCALE))


def figures(
    asked: int, sums: Mapping[str, int], sessions: Sequence[Mapping[str, int]] = ()
) -> list[Figure]:
    """Return what the sums of so many requests show; nothing of fewer than are needed. `sessions`
    are the same sums of each session with its own `asked`, if it is known which requests are of
    one."""
    found = list[Figure]()
    if asked >= NEEDED:
        for title, what, name in (
            ("Same tools called", "the same tools", "tools"),
            ("Same next action", "the same tools and arguments", "exact"),
        ):
            found.append(_sameness(title, what, name, asked, sums, sessions))
    number = sums["measured"]
    if number < NEEDED:
        return found

    def ratio(name: str) -> tuple[float, Interval]:
        total = sums[f"{name}_ratio"]
        squares = sums[f"{name}_ratio_squared"]
        each = [(one["measured"], one[f"{name}_ratio"]) for one in sessions]
        spread = Sessions.of(each, squares) if each else None
        return math.exp(total / number / SCALE), typical(number, total, squares, spread)

    value, interval = ratio("reply")
    means = [round(sums[name] / number) for name in ("whole_reply", "planned_reply")]
    lines = (
        f"{_ratios(interval, 'longer', 'shorter')}, in the typical one of {number:,} requests",
        f"on average {means[0]:,} tokens with the whole history, {means[1]:,} as planned",
    )
    found.append(Figure("Length of replies", _ratio(value, "longer", "shorter"), lines))
    value, interval = ratio("cost")
    together = sums["planned_cost"] / sums["whole_cost"]
    lines = (
        f"{_ratios(interval, 'more', 'less')}, for the typical one of {number:,} requests",
        f"all of them together: {_ratio(together, 'more', 'less')}",
    )
    found.append(Figure("Cost with its reply", _ratio(value, "more", "less"), lines))
    return found


def missing(asked: int) -> str:
    """Say how many more requests a figure needs; empty if it needs none."""
    if asked >= NEEDED:
        return ""
    return f"{asked} of the {NEEDED} compared requests that a figure needs"


def _sameness(
    title: str,
    what: str,
    name: str,
    asked: int,
    sums: Mapping[str, int],
    sessions: Sequence[Mapping[str, int]],
) -> Figure:
    again = sums[f"again_{name}"]
    whole = sums[f"whole_{name}"]
    both = sums[f"both_{name}"]
    each = [(one["asked"], one[f"again_{name}"] - one[f"whole_{name}"]) for one in sessions]
    spread = Sessions.of(each, again + whole - 2 * both) if each else None
    low, high = changed(asked, again, whole, both, spread)
    least = math.floor(100 * low)
    most = math.ceil(100 * high)
    if least < 0 < most:
        within = f"between {-least} fewer and {most} more"
    elif least >= 0:
        within = f"between {least} and {most} more"
    else:
        within = f"between {-most} and {-least} fewer"
    beyond = round(100 * (again - whole) / asked)
    count = abs(beyond) or "none"
    return Figure(
        title,
        f"{100 * whole / asked:.0f} %",
        (
            f"{what} with and without the plan, of {asked:,} requests",
            f"{100 * again / asked:.0f} % where the same request is asked twice",
            f"the plan changes {count} of 100 {'beyond' if beyond >= 0 else 'fewer than'} chance: {within}",
        ),
    )


def _ratio(ratio: float, more: str, less: str) -> str:
    percent = round(100 * abs(ratio - 1))
    return f"{percent} % {more if ratio > 1 else less}" if percent else "the same"


def _ratios(interval: Interval, more: str, less: str) -> str:
    """Say an interval of ratios, rounded outwards."""
    low = math.floor(100 * (interval.low - 1))
    high = math.ceil(100 * (interval.high - 1))
    if low == high == 0:
        return "no difference"
    if low < 0 < high:
        return f"between {-low} % {less} and {high} % {more}"
    if low >= 0:
        return f"between {low} and {high} % {more}"
    return f"between {-high} and {-low} % {less}"
