"""The proxy's savings on recorded runs, in tokens and in cost under five kinds of cache, beside
other strategies.

    python -m bench.savings [--transcripts DIR] [--above TOKENS] [--smoke] [--png-dir DIR]
                                   [--dialect chat|responses|messages]

Every request of a run is planned and priced on paper, without a server or a model. Summaries are
canned. A summary's input is charged through the same cache as everything else; its output, and that
of calls that read back, costs 5 input tokens for each token. A snapshot exists from the client's
next request on (*3 later*: three requests later). Each figure is a ratio to the same run without a
proxy.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, pairwise
from pathlib import Path
from statistics import mean, median

from bench import chart, profiles
from bench.caches import BREAKPOINTS, MODELS
from bench.outcomes import Bench, Figures, percentile
from bench.replay import Kind, Proxied, Recorded, Strategy, plainly, recorded
from bench.strategies import redeciding, window
from proxy.dialects import Dialect
from proxy.dialects.chat import CHAT
from proxy.dialects.messages import MESSAGES
from proxy.dialects.responses import RESPONSES
from proxy.plan.plan import Room
from proxy.plan.turn import Unplannable
from proxy.policy import Compress, Mode, Offload, Profile, Wait
from proxy.requests.planned import OUR_TOOLS_TOKENS
from proxy.tokens import Tokens
from tests import written
from tests.transcripts import FOLDER, Run, absence, load
from tests.written import fold

OURS = f"proxy: {profiles.DEFAULT} (default)"
STRATEGIES: dict[str, Strategy] = {
    "no proxy": plainly,
    **{name: plan.strategy() for name, plan in profiles.PROFILES.items()},
    "proxy: auto, wait: always": Proxied(Offload(compress=Compress(wait=Wait.ALWAYS))),
    "proxy: auto, 3 later": Proxied(Offload(), late=4),
    "proxy: for free reads": Proxied(Offload(cached_read=0.0, cache_write=1.0)),
    "proxy: compact": Proxied(written.offload(mode=Mode.COMPACT)),
    "proxy: compress": Proxied(written.offload(mode=Mode.COMPRESS)),
    "last 5 results": window(5),
    "last 10 results": window(10),
    "decided at every request": redeciding(
        Offload(max_total_tokens=20_000, max_tool_message_tokens=2_000)
    ),
}
DIALECTS: dict[str, Dialect] = {"chat": CHAT, "responses": RESPONSES, "messages": MESSAGES}
READ_BACK = (0.0, 0.05, 0.2)
"""Probabilities that a moved result is read back, once."""
MAX_TOTAL = (10_000, 20_000, 40_000, 80_000)
KEEP = (None, 6, 12)
"""The sweep over `max_total_tokens` and `keep_recent_count`."""
SWEPT = ("128 x 0.25", "128 x 0.1", BREAKPOINTS)
LENGTHS = (5_000, 10_000, 15_000, 25_000, 36_000, 70_000)
"""Tokens of a run's largest request without a proxy, from which each row of the table by length
begins."""
BY_LENGTH = ("128 x 0.1", BREAKPOINTS)


def read_back(chance: float, never: Sequence[float], always: Sequence[float]) -> list[float]:
    """The expected ratios at this chance, between those where results are never and always read
    back."""
    return [low + chance * (high - low) for low, high in zip(never, always, strict=True)]


def share(values: Sequence[float], limit: float = 1.0) -> float:
    """The share of the values that are at most the limit, rounding errors aside."""
    return sum(value <= limit + 1e-9 for value in values) / len(values)


# -- tables ----------------------------------------------------------------------------------------


def sent_table(bench: Bench, found: dict[str, list[Figures]]) -> str:
    lines = [
        f"{'medians; means behind |':26}{'sent':>8}{'last':>8} |{'breaks':>7}{'summaries':>11}"
    ]
    for strategy, rows in found.items():
        sent = bench.ratios(rows, lambda one: one.sent)
        last = bench.ratios(rows, lambda one: one.last)
        broken, summaries = (
            sum(getattr(row, name) for row in rows) / len(rows) for name in ("breaks", "summaries")
        )
        lines.append(
            f"{strategy:26}{median(sent):8.3f}{median(last):8.3f} |{broken:7.1f}{summaries:11.1f}"
        )
    return "\n".join(lines)


def cost_table(
    bench: Bench,
    found: dict[str, list[Figures]],
    title: str,
    of: Callable[[Sequence[float]], float],
) -> str:
    lines = [f"{title:26}" + "".join(f"{model:>13}" for model in MODELS)]
    lines += [
        f"{strategy:26}" + "".join(f"{of(bench.costs(rows, model)):13.3f}" for model in MODELS)
        for strategy, rows in found.items()
        if rows != bench.plain
    ]
    return "\n".join(lines)


def default_table(bench: Bench, ours: Sequence[Figures], reading: Sequence[Figures]) -> str:
    chances = "".join(f"{f'{chance:.0%} read':>10}" for chance in READ_BACK[1:])
    lines = [f"{OURS:26}{'median':>8}{'p90':>8}{'worst':>8}{'<= 1.00':>9}{chances}"]
    for model in MODELS:
        costs, always = bench.costs(ours, model), bench.costs(reading, model)
        expected = "".join(
            f"{median(read_back(chance, costs, always)):10.3f}" for chance in READ_BACK[1:]
        )
        spread = (
            f"{median(costs):8.3f}{percentile(costs, 0.9):8.3f}{max(costs):8.3f}{share(costs):9.0%}"
        )
        lines.append(f"{model:26}{spread}{expected}")
    return "\n".join(lines)


def source_table(bench: Bench, ours: Sequence[Figures]) -> str:
    lines = [f"{'by source':26}{'runs':>6}{'sent':>8}" + "".join(f"{model:>13}" for model in SWEPT)]
    sent = bench.ratios(ours, lambda one: one.sent)
    groups = [(profiles.agents(run), run.source) for run in bench.runs]
    for source in [*sorted({kind for kind, _ in groups}), *sorted({name for _, name in groups})]:
        places = [place for place, group in enumerate(groups) if source in group]
        costs = [median(bench.costs(ours, model)[place] for place in places) for model in SWEPT]
        middle = median(sent[place] for place in places)
        lines.append(
            f"{source:26}{len(places):6}{middle:8.3f}" + "".join(f"{one:13.3f}" for one in costs)
        )
    return "\n".join(lines)


def length_tables(runs: Sequence[Recorded]) -> str:
    """By the largest request: mean of the tokens sent; mean cost, the worst, and the share of runs
    that are dearer."""
    tables = list[str]()
    for half, chosen in (
        ("all", runs),
        ("reported", [run for run in runs if profiles.is_reported(run)]),
    ):
        bench = Bench(chosen, BY_LENGTH)
        for profile in (Profile.BALANCED, Profile.FRUGAL):
            ours = bench.figures(profiles.chosen(profile=profile).strategy(), BY_LENGTH)
            tables.append(_length_table(f"{profile}, by largest, {half}", bench, ours))
    return "\n\n".join(tables)


def _length_table(title: str, bench: Bench, ours: Sequence[Figures]) -> str:
    sent = bench.ratios(ours, lambda one: one.sent)
    costs = [bench.costs(ours, model) for model in BY_LENGTH]
    lines = [f"{title:30}{'runs':>6}{'sent':>8}" + "".join(f"{model:>20}" for model in BY_LENGTH)]
    for least, below in pairwise([*LENGTHS, sys.maxsize]):
        places = [place for place, one in enumerate(bench.plain) if least <= one.largest < below]
        if not places:
            continue
        name = f"{least:,} to {below:,}" if below < sys.maxsize else f"from {least:,} on"
        priced = "".join(f"{_spread([one[place] for place in places]):>20}" for one in costs)
        lines.append(
            f"{name:30}{len(places):6}{mean(sent[place] for place in places):8.3f}{priced}"
        )
    return "\n".join(lines)


def _spread(costs: Sequence[float]) -> str:
    return f"{mean(costs):.3f} ({max(costs):.2f}) {1 - share(costs):4.0%}"


Sweep = dict[tuple[int, int | None], list[Figures]]


def swept(bench: Bench) -> Sweep:
    """By `max_total_tokens` and `keep_recent_count`."""
    policies = {
        (total, keep): written.offload(max_total_tokens=total, keep_recent_count=keep)
        for total in MAX_TOTAL
        for keep in KEEP
    }
    return {key: bench.figures(Proxied(policy), SWEPT) for key, policy in policies.items()}


def sweep_table(bench: Bench, sweep: Sweep) -> str:
    head = f"{'max_total':>9} {'keep_recent':>11} {'sent':>7} {'last':>7} {'events':>7}"
    lines = [head + "".join(f"{f'{model} (worst)':>24}" for model in SWEPT)]
    for (total, keep), rows in sweep.items():
        sent = bench.ratios(rows, lambda one: one.sent)
        last = bench.ratios(rows, lambda one: one.last)
        costs = [bench.costs(rows, model) for model in SWEPT]
        priced = "".join(f"{f'{median(one):.3f} ({max(one):.3f})':>24}" for one in costs)
        happened = events(
            bench.runs, written.offload(max_total_tokens=total, keep_recent_count=keep)
        )
        lines.append(
            f"{total:9,} {keep or 'null':>11} {median(sent):7.3f} {median(last):7.3f} {happened:7.2f}{priced}"
        )
    return "\n".join(lines)


def events(runs: Sequence[Recorded], offload: Offload) -> float:
    """The mean number of events in a run."""
    plans = [
        fold(run.items[: run.points[-1]], offload, Room(), 0 if run.tools else OUR_TOOLS_TOKENS)
        for run in runs
    ]
    return sum(len(plan.events) for plan in plans) / len(plans)


# -- charts ----------------------------------------------------------------------------------------


def draw(folder: Path, bench: Bench, found: dict[str, list[Figures]], sweep: Sweep) -> None:
    ours = found[OURS]
    x = "share of the runs, cheapest first"
    y = "cost, of no proxy"
    with chart.saved(
        folder / "savings-cost.png", "Cost of each run at the default policy", x=x, y=y
    ) as axes:
        for model in MODELS:
            if model in ("64 x 0.1", "16 x 0.1"):
                continue  # their curves coincide with 128 x 0.1
            costs = sorted(bench.costs(ours, model))
            axes.plot(
                [place / len(costs) for place in range(1, len(costs) + 1)], costs, label=model
            )
        axes.axhline(1, color="black", linewidth=0.8)
    run = max(bench.runs, key=lambda one: len(one.points))
    with chart.saved(
        folder / "savings-turns.png", f"One run, {run.id}", x="request", y="tokens sent"
    ) as axes:
        for name in ("no proxy", OURS, "last 5 results", "decided at every request"):
            axes.plot(
                [call.prompt.tokens for call in STRATEGIES[name](run) if call.kind is Kind.CLIENT],
                label=name,
            )
    x = "max_total_tokens"
    y = "median, of no proxy"
    with chart.saved(
        folder / "savings-sweep.png", "How much old history is allowed", x=x, y=y
    ) as axes:
        rows = [sweep[total, None] for total in MAX_TOTAL]
        axes.plot(
            MAX_TOTAL,
            [median(bench.ratios(one, lambda figures: figures.sent)) for one in rows],
            "k--",
            label="sent",
        )
        for model in SWEPT:
            axes.plot(
                MAX_TOTAL,
                [median(bench.costs(one, model)) for one in rows],
                marker="o",
                label=f"cost, {model}",
            )


def report(runs: Sequence[Recorded], folder: Path | None) -> None:
    """Print every table and, given a folder, draw the charts."""
    bench = Bench(runs)
    found = {name: bench.figures(strategy) for name, strategy in STRATEGIES.items()}
    reading = bench.figures(Proxied(Offload(), reading=True))
    ours = found[OURS]
    sweep = swept(bench)
    tables = [
        f"{len(runs)} runs, {sum(len(run.points) for run in runs):,} requests",
        sent_table(bench, found),
        cost_table(bench, found, "cost, median", median),
        cost_table(bench, found, "cost, worst", max),
        default_table(bench, ours, reading),
        source_table(bench, ours),
        sweep_table(bench, sweep),
    ]
    print("\n\n".join(tables))
    print("\n" + profiles.report(profiles.compared(runs)))
    if folder:
        draw(folder, bench, found, sweep)


def plannable(runs: Iterable[Run], dialect: Dialect = CHAT) -> Iterator[Recorded]:
    """The runs that the proxy would plan, as clients of this API. Prints the ids of the others."""
    tokens = Tokens()
    for run in runs:
        try:
            yield recorded(run, tokens, dialect)
        except Unplannable as error:
            print(f"{run.id}: left out, {error}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--transcripts", type=Path, default=FOLDER, help="the folder of the recorded runs"
    )
    parser.add_argument(
        "--above", type=int, default=30_000, help="the least tokens of a run [30000]"
    )
    parser.add_argument(
        "--smoke", action="store_true", help="only two runs, as a quick check that it works"
    )
    parser.add_argument(
        "--dialect", choices=DIALECTS, default="chat", help="the API of the runs' clients [chat]"
    )
    parser.add_argument("--png-dir", type=Path, help="the folder to draw charts to")
    options = parser.parse_args()
    if absence(options.transcripts):
        print(absence(options.transcripts))
        return 0
    dialect = DIALECTS[options.dialect]
    above = islice(load(options.above, folder=options.transcripts), 2 if options.smoke else None)
    runs = list(plannable(above, dialect))
    report(runs, options.png_dir)
    shorter = [] if options.smoke else _up_to(options.above, options.transcripts)
    print("\n" + length_tables([*runs, *plannable(shorter, dialect)]))
    return 0


def _up_to(tokens: int, folder: Path) -> Iterator[Run]:
    return (run for run in load(folder=folder) if run.total_tokens <= tokens)


if __name__ == "__main__":
    sys.exit(main())
