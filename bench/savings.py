"""What the proxy saves and costs on recorded runs, and what a model then lacks.

    python -m bench.savings [tokens|lengths|pauses|facts|fidelity ...]

Every request of a run is planned, without a server or a model. Summaries are canned. By default it
prints everything:

- *tokens*: tokens and cost of each strategy, as ratios to the same run without a proxy, under the
  caches that providers document (`bench.caches`);
- *lengths*: the same by the length of a run, short ones included;
- *pauses*: what it saves that the planner knows when upstream's cache has expired;
- *facts*: how often a reply uses something that had moved (`bench.facts`);
- *fidelity*: whether all that moved can be read back and found (`bench.fidelity`).

A summary's input is charged through the same cache as everything else; its output, and that of
calls that read back, costs 5 input tokens for each token. The profiles were tuned on one half of
the runs; *reported* is the other one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from hashlib import sha256
from itertools import islice, pairwise
from math import ceil
from pathlib import Path
from statistics import mean, median
from typing import Any

import msgspec

from bench import facts, fidelity, pauses
from bench.caches import MODELS, READS, WRITTEN, Segment
from bench.replay import Call, Kind, Proxied, Recorded, Strategy, cost, plainly, prompt, recorded
from bench.sent import synthetic
from proxy import policy
from proxy.plan.plan import Role, Room
from proxy.plan.planner import Fold
from proxy.plan.turn import Unplannable
from proxy.policy import Inject, Mode, Profile
from proxy.requests.planned import OUR_TOOLS_TOKENS
from proxy.tokens import Tokens
from tests import written
from tests.transcripts import FOLDER, Run, absence, load

PLACEHOLDER = 20
"""Tokens of the message that replaces an omitted result, its frame included."""
READ_BACK = 0.15
"""The chance that a moved result is read back, once."""
LENGTHS = (5_000, 10_000, 15_000, 25_000, 36_000, 70_000)
"""Tokens of a run's largest request without a proxy, from which each row of the table by length
begins."""


def chosen(**keys: Any) -> Proxied:
    """The proxy's strategy under a policy that sets these keys."""
    profile = keys.get("profile", Profile.BALANCED)
    return Proxied(written.offload(**keys), **policy.PROFILES[profile][1])


def window(results: int) -> Strategy:
    """Send the last `results` tool results whole and a placeholder for each older one.

    SWE-agent's history processor `last_n_observations` does this (its paper uses five), and so do
    many later agents.
    """

    def calls(run: Recorded) -> Iterator[Call]:
        tools = [index for index, item in enumerate(run.items) if item.role is Role.TOOL]
        for point in run.points:
            old = {*[index for index in tools if index < point][:-results]}
            yield Call(prompt(run, [_segment(run, index, index in old) for index in range(point)]))

    return calls


def _segment(run: Recorded, index: int, elided: bool) -> Segment:
    tokens = run.items[index].tokens
    key: Hashable = (index, "elided") if elided else index
    return key, min(PLACEHOLDER, tokens) if elided else tokens, run.blocks[index]


PROFILES = {f"`profile: {profile}`": chosen(profile=profile) for profile in Profile}
STRATEGIES: dict[str, Strategy] = {
    **PROFILES,
    "balanced, where cached reads are free": chosen(cached_read=0.0, cache_write=1.0),
    "`mode: compress`": chosen(mode=Mode.COMPRESS),
    "the last 5 results, as many agents do": window(5),
    "the last 10 results": window(10),
}


class Figures(msgspec.Struct, frozen=True):
    """One run under one strategy: tokens of all its requests, of the last and of the largest one,
    and cost by cache."""

    sent: int
    last: int
    largest: int
    costs: dict[str, float]


class Bench:
    """The runs, and as the baseline each one's figures without a proxy."""

    def __init__(self, runs: Sequence[Recorded], models: Iterable[str] = MODELS) -> None:
        self.runs = runs
        self._models = tuple(models)
        self.plain = self.figures(plainly)

    def figures(self, strategy: Strategy) -> list[Figures]:
        """Each run's figures."""
        return [figures([*strategy(run)], self._models) for run in self.runs]

    def ratios(self, found: Sequence[Figures], value: Callable[[Figures], float]) -> list[float]:
        """Each run's value, divided by the same without a proxy."""
        return [value(one) / value(plain) for one, plain in zip(found, self.plain, strict=True)]

    def costs(self, found: Sequence[Figures], model: str) -> list[float]:
        """Each run's cost under this cache."""
        return self.ratios(found, lambda one: one.costs[model])


def figures(calls: Sequence[Call], models: Iterable[str] = MODELS) -> Figures:
    """The figures of a run's calls."""
    sizes = {kind: [call.prompt.tokens for call in calls if call.kind is kind] for kind in Kind}
    return Figures(
        sent=sum(call.prompt.tokens for call in calls),
        last=sizes[Kind.CLIENT][-1],
        largest=max(sizes[Kind.CLIENT] + sizes[Kind.ROUND]),
        costs={model: cost(calls, MODELS[model]) for model in models},
    )


def events(run: Recorded, strategy: Proxied) -> int:
    """How often results of a run move, or history becomes a summary."""
    at_once = strategy.inject is Inject.AGENTS and run.tools
    state = Fold(strategy.offload, Room(), 0 if at_once else OUR_TOOLS_TOKENS)
    for item in run.items[: run.points[-1]]:
        state.add(item)
    return len(state.plan().events)


def percentile(values: Sequence[float], part: float) -> float:
    """The smallest value that at least this part of them does not exceed."""
    ordered = sorted(values)
    return ordered[ceil(len(ordered) * part) - 1]


def is_reported(run: Recorded | Run) -> bool:
    """Whether the run is in the half that the profiles were not tuned on: by the parity of a digest
    of its id."""
    return sha256(run.id.encode()).digest()[0] % 2 == 1


# -- tables ----------------------------------------------------------------------------------------


def costs_of(costs: Sequence[float]) -> str:
    """Their mean, the worst, and the share that is above 1, rounding errors aside."""
    dearer = sum(one > 1 + 1e-9 for one in costs) / len(costs)
    return f"{mean(costs):.2f} ({max(costs):.2f}) {dearer:.0%}"


def row(name: str, bench: Bench, found: Sequence[Figures]) -> list[str]:
    """A strategy's row: medians of the tokens, and the costs."""
    strategy = STRATEGIES[name]
    sent = median(bench.ratios(found, lambda one: one.sent))
    last = median(bench.ratios(found, lambda one: one.last))
    largest = percentile([one.largest for one in found], 0.9)
    cells = [name, f"{sent:.2f}", f"{last:.2f}", f"{largest:,}", "", ""]
    if isinstance(strategy, Proxied):
        cells[4] = f"{mean(events(run, strategy) for run in bench.runs):.1f}"
        reading = bench.figures(msgspec.structs.replace(strategy, reading=READ_BACK))
        cells[5] = f"{mean(bench.costs(reading, READS)):.2f}"
    return cells + [costs_of(bench.costs(found, model)) for model in MODELS]


def tokens_table(runs: Sequence[Recorded], title: str) -> str:
    """Every strategy, on these runs."""
    bench = Bench(runs)
    heads = [title, "sent", "last", "largest of 90 %", "events", f"{READ_BACK:.0%} read back"]
    rows = [row(name, bench, bench.figures(one)) for name, one in STRATEGIES.items()]
    return markdown([*heads, *MODELS], rows)


def lengths_table(runs: Sequence[Recorded]) -> str:
    """By the largest request without a proxy, for two profiles."""
    bench = Bench(runs, (READS, WRITTEN))
    found = {
        profile: bench.figures(chosen(profile=profile))
        for profile in (Profile.BALANCED, Profile.FRUGAL)
    }
    priced = [(profile, model) for profile in found for model in (READS, WRITTEN)]
    sent = bench.ratios(found[Profile.BALANCED], lambda one: one.sent)
    costs = [bench.costs(found[profile], model) for profile, model in priced]
    rows = []
    for least, below in pairwise([*LENGTHS, sys.maxsize]):
        places = [place for place, one in enumerate(bench.plain) if least <= one.largest < below]
        if places:
            name = f"{least:,} to {below:,}" if below < sys.maxsize else f"{least:,} and more"
            cells = [costs_of([one[place] for place in places]) for one in costs]
            average = mean(sent[place] for place in places)
            rows.append([name, str(len(places)), f"{average:.2f}", *cells])
    heads = ["largest request", "runs", "tokens sent, balanced"]
    return markdown([*heads, *(f"{profile}, {model}" for profile, model in priced)], rows)


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# -- the recorded runs -----------------------------------------------------------------------------


def plannable(runs: Iterable[Run]) -> Iterator[Recorded]:
    """The runs that the proxy would plan. Prints the ids of the others."""
    tokens = Tokens()
    for run in runs:
        try:
            yield recorded(run, tokens)
        except Unplannable as error:
            print(f"{run.id}: left out, {error}")


def in_half(run: Run, half: str) -> bool:
    """Whether a run is in this half."""
    return half == "all" or is_reported(run) == (half == "reported")


def tokens(runs: Sequence[Run], options: argparse.Namespace) -> None:
    planned = [*plannable(runs)]
    print(f"{len(planned)} runs, {sum(len(run.points) for run in planned):,} requests\n")
    print(tokens_table(planned, "all"))
    reported = [run for run in planned if is_reported(run)]
    if reported:
        print(f"\n{tokens_table(reported, f'reported half, {len(reported)} runs')}")


def lengths(runs: Sequence[Run], options: argparse.Namespace) -> None:
    every = runs if options.smoke else [*load(folder=options.transcripts)]
    print(lengths_table([*plannable(every)]))


def paused(runs: Sequence[Run], options: argparse.Namespace) -> None:
    planned = [*plannable(runs)]
    print(pauses.table(planned if options.smoke else planned[1::2]))


def used(runs: Sequence[Run], options: argparse.Namespace) -> None:
    half = [run for run in runs if options.smoke or in_half(run, options.half)]
    print(f"{len(half)} runs above {options.above:,} tokens, {options.half}\n{facts.report(half)}")


def examined(runs: Sequence[Run], options: argparse.Namespace) -> None:
    print(fidelity.table([*fidelity.examine(runs)]))


PARTS = {
    "tokens": tokens,
    "lengths": lengths,
    "pauses": paused,
    "facts": used,
    "fidelity": examined,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.savings",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help="what to print [everything]")
    parser.add_argument(
        "--transcripts", type=Path, default=FOLDER, help="the folder of the recorded runs"
    )
    parser.add_argument(
        "--above", type=int, default=30_000, help="the least tokens of a run [30000]"
    )
    parser.add_argument(
        "--half", choices=("reported", "tuned", "all"), default="reported", help="for facts"
    )
    parser.add_argument("--smoke", action="store_true", help="only two runs, to see that it works")
    options = parser.parse_args(arguments)
    if unknown := {*options.parts} - {*PARTS}:
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if absence(options.transcripts):
        print(f"{absence(options.transcripts)}: a made-up one instead")
        runs = [synthetic()]
    else:
        most = 2 if options.smoke else None
        runs = [*islice(load(options.above, folder=options.transcripts), most)]
    for name in options.parts or PARTS:
        print(f"\n## {name}\n")
        PARTS[name](runs, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
