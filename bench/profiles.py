"""The three profiles: tables for `bench.savings`.

The profiles were tuned on one half of the runs, so these tables show the other one, and all runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from hashlib import sha256
from statistics import mean, median
from typing import Any

import msgspec

from bench.caches import BREAKPOINTS, GPT_5_6, THIRD_MARK
from bench.outcomes import Bench, Figures, percentile
from bench.replay import Proxied, Recorded, Strategy
from proxy import policy
from proxy.plan.plan import Cause, Room
from proxy.plan.planner import Fold
from proxy.policy import Inject, Offload, Profile
from proxy.requests.planned import OUR_TOOLS_TOKENS
from tests import written
from tests.transcripts import Run

SHOWN = ("128 x 0.5", "128 x 0.25", "128 x 0.1", BREAKPOINTS, THIRD_MARK, GPT_5_6)
READ_BACK = (0.05, 0.15, 0.3)
"""The chances that a moved result is read back, once."""


class Chosen(msgspec.Struct, frozen=True):
    """A plan to compare: its policy, and when requests get our tools."""

    offload: Offload
    inject: Inject = Inject.AGENTS

    def strategy(self, reading: float = 0.0) -> Strategy:
        return Proxied(self.offload, self.inject, reading=reading)


def chosen(**keys: Any) -> Chosen:
    """The plan of a policy that sets these keys."""
    return Chosen(written.offload(**keys), **policy.PROFILES[keys.get("profile", DEFAULT)][1])


DEFAULT = Profile.BALANCED
FREE = "balanced, free reads"
PROFILES: dict[str, Chosen] = {
    f"proxy: {profile}{' (default)' if profile is DEFAULT else ''}": chosen(profile=profile)
    for profile in Profile
}
PLANS: dict[str, Chosen] = {
    **PROFILES,
    FREE: chosen(cached_read=0.0, cache_write=1.0),
}


class Goal(msgspec.Struct, frozen=True):
    """What a profile should reach on runs that it was not tuned on; None: no matter.

    `sent`, `last`: medians. `largest`: the largest request of nine runs in ten. `reads`, `marked`:
    mean costs at cached reads of 0.1, and there with marks. `dearer`: the share of runs that cost
    more than without a proxy.
    """

    sent: float | None = None
    last: float | None = None
    largest: int | None = None
    reads: float | None = None
    marked: float | None = None
    dearer: float | None = None


GOALS: dict[str, Goal] = {
    "proxy: balanced (default)": Goal(
        sent=0.5, largest=33_000, reads=0.66, marked=0.69, dearer=0.1
    ),
    "proxy: frugal": Goal(sent=0.34, largest=33_000, reads=0.56, marked=0.59, dearer=0.1),
    FREE: Goal(last=0.45, largest=33_000),
}


def missed(found: dict[str, Any]) -> list[str]:
    """The goals that are missed, in words."""
    return [
        f"{name} {what} {value:.3f}, not {most}"
        for name, one in found.items()
        if name in GOALS
        for what, value, most in _reached(one, GOALS[name])
        if most is not None and round(value, 3) > most
    ]


def _reached(one: dict[str, Any], goal: Goal) -> list[tuple[str, float, float | None]]:
    reads = one["costs"]["128 x 0.1"]
    marked = one["costs"][THIRD_MARK]
    return [
        ("sent", one["sent"], goal.sent),
        ("last", one["last"], goal.last),
        ("largest", one["largest"], goal.largest),
        ("reads 0.1", reads["mean"], goal.reads),
        ("reads 0.1 dearer", reads["dearer"], goal.dearer),
        (THIRD_MARK, marked["mean"], goal.marked),
    ]


def is_reported(run: Recorded | Run) -> bool:
    """Whether the run is in the half that the profiles were not tuned on: by the parity of a digest
    of its id."""
    return sha256(run.id.encode()).digest()[0] % 2 == 1


CODING = "coding agents"
GATHERING = "gathering agents"
"""Agents that work on code, and those that gather facts through the APIs of others: research, MCP,
customer service."""


def agents(run: Recorded | Run) -> str:
    """The kind of agent that made this run: `CODING` or `GATHERING`."""
    return CODING if run.kind in ("software-engineering", "ml-repo-execution") else GATHERING


def compared(runs: Sequence[Recorded]) -> dict[str, Any]:
    """Every figure of the profiles' tables: the half that is reported, and all runs."""
    reported = [run for run in runs if is_reported(run)] or list(runs)
    found: dict[str, Any] = {}
    for title, chosen_runs in (("reported", reported), ("all", runs)):
        bench = Bench(chosen_runs)
        measured = {name: bench.figures(plan.strategy(), SHOWN) for name, plan in PLANS.items()}
        found[title] = figures(bench, measured)
    return found


def report(found: dict[str, Any]) -> str:
    halves = [tables(title, found[title]) for title in ("reported", "all")]
    goals = "goals on the reported half, and missed: " + (
        "; ".join(missed(found["reported"])) or "nothing"
    )
    return "\n\n".join([*halves, goals])


def figures(bench: Bench, found: dict[str, list[Figures]]) -> dict[str, Any]:
    """Every figure of the tables, by plan."""
    return {name: _figures(bench, rows, PLANS[name]) for name, rows in found.items()}


def _figures(bench: Bench, rows: Sequence[Figures], plan: Chosen) -> dict[str, Any]:
    causes = Counter(cause for run in bench.runs for cause in _causes(run, plan))
    read = {
        f"{chance:.0%}": median(
            bench.costs(bench.figures(plan.strategy(chance), ("128 x 0.1",)), "128 x 0.1")
        )
        for chance in READ_BACK
    }
    costs = {model: bench.costs(rows, model) for model in SHOWN}
    return {
        "kept_views": plan.offload.keep_views,
        "sent": median(bench.ratios(rows, lambda one: one.sent)),
        "last": median(bench.ratios(rows, lambda one: one.last)),
        "largest": percentile([row.largest for row in rows], 0.9),
        "events": sum(causes.values()) / len(bench.runs),
        "causes": {cause.name.lower(): causes[cause] for cause in Cause},
        "costs": {
            model: {
                "mean": mean(one),
                "median": median(one),
                "worst": max(one),
                "dearer": sum(cost > 1 + 1e-9 for cost in one) / len(one),
            }
            for model, one in costs.items()
        },
        "read_back": read,
    }


def _causes(run: Recorded, plan: Chosen) -> list[Cause]:
    at_once = plan.inject is Inject.AGENTS and run.tools
    state = Fold(plan.offload, Room(), 0 if at_once else OUR_TOOLS_TOKENS)
    for item in run.items[: run.points[-1]]:
        state.add(item)
    return [event.cause for event in state.plan().events]


def tables(title: str, found: dict[str, Any]) -> str:
    """Tokens, events and read-back by plan, then costs: mean, worst, share of the runs that are
    dearer."""
    heads = "".join(f"{f'{chance:.0%} read':>10}" for chance in READ_BACK)
    lines = [
        f"{title:26}{'sent':>8}{'last':>8}{'largest':>9}{'events':>8}{'views':>7}{heads}  causes"
    ]
    for name, one in found.items():
        causes = " ".join(f"{cause}:{count}" for cause, count in one["causes"].items() if count)
        row = (
            f"{name:26}{one['sent']:8.3f}{one['last']:8.3f}{one['largest']:9,}{one['events']:8.1f}"
        )
        read = "".join(f"{cost:10.3f}" for cost in one["read_back"].values())
        lines.append(f"{row}{one['kept_views']:7}{read}  {causes}")
    lines += ["", f"{'mean, worst, dearer':26}" + "".join(f"{model:>18}" for model in SHOWN)]
    for name, one in found.items():
        costs = (
            f"{cost['mean']:.3f} {cost['worst']:.3f} {cost['dearer']:4.0%}"
            for cost in one["costs"].values()
        )
        lines.append(f"{name:26}" + "".join(f"{cost:>18}" for cost in costs))
    return "\n".join(lines)
