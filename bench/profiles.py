"""The three profiles beside plan 1: tables for `bench.savings`.

The profiles were tuned on one half of the runs, so these tables show the other one, and the worst runs of all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from hashlib import sha256
from statistics import median
from typing import Any

import msgspec

from bench.caches import BREAKPOINTS, THIRD_MARK
from bench.outcomes import Bench, Figures, percentile
from bench.replay import Proxied, Recorded, Strategy
from proxy.plan.plan import Cause, Room
from proxy.plan.planner import Fold
from proxy.plan.profiles import presets
from proxy.policy import Inject, Offload, Profile
from proxy.requests.prepare import OUR_TOOLS_TOKENS
from tests import written

SHOWN = ("128 x 0.5", "128 x 0.25", "128 x 0.1", BREAKPOINTS, THIRD_MARK)
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
    return Chosen(written.offload(**keys), **presets(keys)["tools"])


DEFAULT = Profile.BALANCED
PROFILES: dict[str, Chosen] = {
    f"proxy: {profile}{' (default)' if profile is DEFAULT else ''}": chosen(profile=profile) for profile in Profile
}
PLANS: dict[str, Chosen] = {
    **PROFILES,
    "balanced, tools later": msgspec.structs.replace(
        PROFILES["proxy: balanced (default)"], inject=Inject.WHEN_OFFLOADING
    ),
    "frugal, tools later": msgspec.structs.replace(PROFILES["proxy: frugal"], inject=Inject.WHEN_OFFLOADING),
}


class Goal(msgspec.Struct, frozen=True):
    """What a profile should reach on runs that it was not tuned on. Costs: the median, and the worst."""

    sent: float
    reads: tuple[float, float]
    marked: tuple[float, float]
    crowded: float
    """The worst where the client leaves no room for the proxy's breakpoints."""
    read_back: float
    """The median at reads of 0.1 if 15 % of the moved results are read back."""


GOALS: dict[str, Goal] = {
    "proxy: careful": Goal(9.0, (9.0, 1.05), (9.0, 1.05), 1.05, 9.0),
    "proxy: balanced (default)": Goal(0.5, (0.68, 1.05), (0.72, 1.05), 1.05, 0.75),
    "proxy: frugal": Goal(0.4, (0.6, 1.05), (0.65, 1.05), 1.05, 0.7),
}


def missed(found: dict[str, Any]) -> list[str]:
    """The goals that are missed, in words."""
    return [
        f"{name} {what} {value:.3f}, not {most}"
        for name, one in found.items()
        if name in GOALS
        for what, value, most in _reached(one, GOALS[name])
        if round(value, 3) > most
    ]


def _reached(one: dict[str, Any], goal: Goal) -> list[tuple[str, float, float]]:
    reads, marked = one["costs"]["128 x 0.1"], one["costs"][THIRD_MARK]
    return [
        ("sent", one["sent"], goal.sent),
        ("reads 0.1", reads["median"], goal.reads[0]),
        ("reads 0.1 worst", reads["worst"], goal.reads[1]),
        (THIRD_MARK, marked["median"], goal.marked[0]),
        (f"{THIRD_MARK} worst", marked["worst"], goal.marked[1]),
        (f"{BREAKPOINTS} worst", one["costs"][BREAKPOINTS]["worst"], goal.crowded),
        ("15% read", one["read_back"]["15%"], goal.read_back),
    ]


def is_reported(run: Recorded) -> bool:
    """Whether the run is in the half that the profiles were not tuned on: by the parity of a digest of its id."""
    return sha256(run.id.encode()).digest()[0] % 2 == 1


def compared(runs: Sequence[Recorded]) -> dict[str, Any]:
    """Every figure of the profiles' tables: the half that is reported, all runs, and the worst runs by source."""
    reported = [run for run in runs if is_reported(run)] or list(runs)
    found: dict[str, Any] = {}
    for title, chosen_runs in (("reported", reported), ("all", runs)):
        bench = Bench(chosen_runs)
        measured = {name: bench.figures(plan.strategy(), SHOWN) for name, plan in PLANS.items()}
        found[title] = figures(bench, measured)
        found["worst"] = worst(bench, measured)
    return found


def report(found: dict[str, Any]) -> str:
    halves = [tables(title, found[title]) for title in ("reported", "all")]
    goals = "goals on the reported half, and missed: " + ("; ".join(missed(found["reported"])) or "nothing")
    return "\n\n".join([*halves, worst_table(found["worst"]), goals])


def figures(bench: Bench, found: dict[str, list[Figures]]) -> dict[str, Any]:
    """Every figure of the tables, by plan."""
    return {name: _figures(bench, rows, PLANS[name]) for name, rows in found.items()}


def _figures(bench: Bench, rows: Sequence[Figures], plan: Chosen) -> dict[str, Any]:
    causes = Counter(cause for run in bench.runs for cause in _causes(run, plan))
    read = {
        f"{chance:.0%}": median(bench.costs(bench.figures(plan.strategy(chance), ("128 x 0.1",)), "128 x 0.1"))
        for chance in READ_BACK
    }
    costs = {model: bench.costs(rows, model) for model in SHOWN}
    return {
        "kept_views": plan.offload.keep_views,
        "sent": median(bench.ratios(rows, lambda one: one.sent)),
        "events": sum(causes.values()) / len(bench.runs),
        "causes": {cause.name.lower(): causes[cause] for cause in Cause},
        "costs": {
            model: {"median": median(one), "p95": percentile(one, 0.95), "worst": max(one)}
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
    """Tokens, events and read-back by plan, then costs: median, 95th percentile, worst."""
    heads = [f"{chance:.0%} read" for chance in READ_BACK]
    lines = [
        f"{title:26}{'sent':>8}{'events':>8}{'replies':>9}" + "".join(f"{head:>10}" for head in heads) + "  causes"
    ]
    for name, one in found.items():
        causes = " ".join(f"{cause}:{count}" for cause, count in one["causes"].items() if count)
        row = f"{name:26}{one['sent']:8.3f}{one['events']:8.1f}{one['kept_views']:9}"
        lines.append(row + "".join(f"{cost:10.3f}" for cost in one["read_back"].values()) + f"  {causes}")
    lines += ["", f"{'median, p95, worst':26}" + "".join(f"{model:>22}" for model in SHOWN)]
    for name, one in found.items():
        costs = (f"{cost['median']:.3f} {cost['p95']:.3f} {cost['worst']:.3f}" for cost in one["costs"].values())
        lines.append(f"{name:26}" + "".join(f"{cost:>22}" for cost in costs))
    return "\n".join(lines)


def worst(bench: Bench, found: dict[str, list[Figures]], model: str = THIRD_MARK) -> dict[str, dict[str, Any]]:
    """By source and plan, the dearest run and its cost."""
    sources = sorted({run.source for run in bench.runs})
    return {
        source: {
            name: max(
                (cost, run.id)
                for cost, run in zip(bench.costs(rows, model), bench.runs, strict=True)
                if run.source == source
            )
            for name, rows in found.items()
        }
        for source in sources
    }


def worst_table(found: dict[str, dict[str, Any]]) -> str:
    lines = [f"{'worst, ' + THIRD_MARK:26}{'plan':26}{'cost':>8}  run"]
    for source, plans in found.items():
        lines += [f"{source:26}{name:26}{cost:8.3f}  {run}" for name, (cost, run) in plans.items()]
    return "\n".join(lines)
