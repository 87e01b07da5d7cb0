"""What events at an expired cache save: `python -m bench.pauses [--transcripts DIR] [--smoke]`.

A person pauses, upstream's cache expires, and the next request is written again in any case. So an
event there costs nothing extra. This simulates recorded runs with pauses, and compares the planner
that knows of them with one that does not, in the same cache. Pauses come before requests that a
user's message begins, and before one in ten others (an approval, a look at the diff).
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean

from msgspec.structs import replace

from bench.caches import BREAKPOINTS, MODELS, Model, Prompt
from bench.replay import Recorded
from bench.savings import plannable
from proxy.plan.plan import Plan, Role, Room
from proxy.plan.planner import Fold
from proxy.policy import Mode, Offload, Profile
from proxy.requests.planned import OUR_TOOLS_TOKENS
from tests import written
from tests.transcripts import FOLDER, absence, load

LIFETIMES = (5, 30, 60)
"""Minutes for which upstream keeps a cached prefix. The proxy knows Anthropic's, 5 and 60; 30 is
OpenAI's least."""
BETWEEN = 0.1
"""The share of requests within a turn that a pause precedes."""
NIGHT = 12 * 60.0
MORNING = 0.1
"""Minutes of a night, and the share of pauses that are one: office hours."""


def paused(run: Recorded, minutes: float, office: bool, seed: int) -> list[float]:
    """The minutes before each request of a run, drawn from an exponential distribution with this
    mean."""
    drawn = random.Random(f"{run.id} {seed}")
    pauses = []
    for point in run.points:
        asks = run.items[point - 1].role is Role.USER or drawn.random() < BETWEEN
        night = office and drawn.random() < MORNING
        pauses.append((NIGHT if night else drawn.expovariate(1 / minutes)) if asks else 0.0)
    return pauses


def plans(run: Recorded, offload: Offload, expired: Sequence[bool], clock: bool) -> Iterator[Plan]:
    """The plan of each request."""
    state = Fold(offload, Room(), OUR_TOOLS_TOKENS)
    places = {point: number for number, point in enumerate(run.points)}
    for index, item in enumerate(run.items):
        pause = int(clock and index in places and expired[places[index]])
        if index in places:
            yield state.plan(pause)
        state.add(item, pause)


def priced(
    run: Recorded, offload: Offload, expired: Sequence[bool], clock: bool, model: Model
) -> tuple[float, int]:
    """The cost of a run in input tokens, and the tokens sent."""
    cache = model.cold()
    cost = 0.0
    sent = 0
    for point, plan, cold in zip(
        run.points, plans(run, offload, expired, clock), expired, strict=True
    ):
        segments = [("head", run.tools + (0 if plan.empty else OUR_TOOLS_TOKENS), 1)]
        for index in range(point):
            item = run.items[index]
            moved = index in plan.moves
            segments.append(
                ((index, moved), item.preview if moved else item.tokens, run.blocks[index])
            )
        prompt = Prompt(segments)
        cache = model.cold() if cold else cache
        cost = cost + cache.charge(prompt)
        sent = sent + prompt.tokens
    return cost, sent


def saved(
    runs: Sequence[Recorded], offload: Offload, minutes: float, office: bool, lifetime: float
) -> list[str]:
    """The share of requests at an expired cache. Then, for each kind of cache, the ratios of cost
    and tokens, and the share of cost saved at equal tokens: beside the rule without a clock that
    lets results leave one view earlier."""
    eager = replace(offload, keep_views=max(offload.keep_views - 1, 1))
    pauses = [[pause > lifetime for pause in paused(run, minutes, office, 1)] for run in runs]
    cells = [f"{mean(map(mean, pauses)):9.0%}"]
    for name in ("128 x 0.1", BREAKPOINTS):

        def ratios(one: Offload, clock: bool, model: Model = MODELS[name]) -> tuple[float, float]:
            found = []
            for run, expired in zip(runs, pauses, strict=True):
                before = priced(run, offload, expired, False, model)
                after = priced(run, one, expired, clock, model)
                found.append((after[0] / before[0], after[1] / before[1]))
            return mean(cost for cost, _ in found), mean(tokens for _, tokens in found)

        (cost, tokens), (other, fewer) = ratios(offload, True), ratios(eager, False)
        equal = 1 + (other - 1) * (1 - tokens) / (1 - fewer) if fewer < 1 else 1.0
        cells.append(f"{cost:9.3f} {tokens:9.3f} {1 - cost / equal:9.1%}")
    return cells


def report(runs: Sequence[Recorded]) -> None:
    print(f"{len(runs)} runs; cost and tokens with the clock, of the same run without it\n")
    head = "".join(f"{one:>10}" for one in ("cost", "tokens", "at equal"))
    print(f"{'profile':10}{'pauses':>16}{'lifetime':>10}{'expired':>10}{head}{head}")
    for profile in (Profile.CAREFUL, Profile.BALANCED):
        offload = written.offload(profile=profile, mode=Mode.COMPACT)
        for minutes, office in ((1.0, False), (10.0, False), (60.0, False), (10.0, True)):
            for lifetime in LIFETIMES:
                kind = f"{minutes:g} min" + (", nights" if office else "")
                cells = saved(runs, offload, minutes, office, lifetime)
                print(f"{profile:10}{kind:>16}{lifetime:>6} min" + " ".join(cells), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--transcripts", type=Path, default=FOLDER, help="the folder of the recorded runs"
    )
    parser.add_argument("--smoke", action="store_true", help="only two runs")
    options = parser.parse_args()
    if absence(options.transcripts):
        print(absence(options.transcripts))
        return 0
    runs = list(plannable(load(30_000, folder=options.transcripts)))
    report(runs[:2] if options.smoke else runs[1::2])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
