"""What events at an expired cache save.

A person pauses, upstream's cache expires, and the next request is written again in any case. So an
event there costs nothing extra. This simulates recorded runs with pauses, and compares the planner
that knows of them with one that does not, in the same cache. Pauses come before requests that a
user's message begins, and before one in ten others (an approval, a look at the diff).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from statistics import mean

import msgspec

from bench.caches import MODELS, READS, Prompt
from bench.replay import Recorded
from proxy.plan.plan import Plan, Role, Room
from proxy.plan.planner import Fold
from proxy.policy import Mode, Offload, Profile
from proxy.requests.planned import OUR_TOOLS_TOKENS
from tests import written

CASES = ((1, 5, False), (10, 5, False), (10, 30, False), (60, 60, False), (10, 5, True))
"""Mean minutes of a pause, minutes for which upstream keeps a cached prefix, and whether some are
nights. The proxy knows Anthropic's lifetimes, 5 and 60; 30 is OpenAI's least."""
BETWEEN = 0.1
"""The share of requests within a turn that a pause precedes."""
NIGHT = 12 * 60.0
MORNING = 0.1
"""Minutes of a night, and the share of pauses that are one: office hours."""


def expired(run: Recorded, minutes: float, lifetime: float, nights: bool) -> list[bool]:
    """Before which requests of a run the cache has expired, by pauses drawn from an exponential
    distribution with this mean."""
    drawn = random.Random(run.id)
    found = []
    for point in run.points:
        asks = run.items[point - 1].role is Role.USER or drawn.random() < BETWEEN
        night = nights and drawn.random() < MORNING
        pause = (NIGHT if night else drawn.expovariate(1 / minutes)) if asks else 0.0
        found.append(pause > lifetime)
    return found


def plans(run: Recorded, offload: Offload, cold: Sequence[bool], clock: bool) -> Iterator[Plan]:
    """The plan of each request."""
    state = Fold(offload, Room(), OUR_TOOLS_TOKENS)
    pauses = {point: int(clock and one) for point, one in zip(run.points, cold, strict=True)}
    for index, item in enumerate(run.items):
        pause = pauses.get(index, 0)
        if index in pauses:
            yield state.plan(pause)
        state.add(item, pause)


def priced(run: Recorded, offload: Offload, cold: Sequence[bool], clock: bool) -> tuple[float, int]:
    """The cost of a run in input tokens, and the tokens sent."""
    cache = MODELS[READS].cold()
    cost = 0.0
    sent = 0
    for point, plan, lost in zip(run.points, plans(run, offload, cold, clock), cold, strict=True):
        segments = [("head", run.tools + (0 if plan.empty else OUR_TOOLS_TOKENS), 1)]
        for index in range(point):
            item = run.items[index]
            moved = index in plan.moves
            tokens = item.preview if moved else item.tokens
            segments.append(((index, moved), tokens, run.blocks[index]))
        prompt = Prompt(segments)
        cache = MODELS[READS].cold() if lost else cache
        cost += cache.charge(prompt)
        sent += prompt.tokens
    return cost, sent


def saved(runs: Sequence[Recorded], offload: Offload, colds: Sequence[Sequence[bool]]) -> float:
    """The share of the cost that the clock saves at equal tokens: beside the rule without a clock
    that lets results leave one view earlier."""

    def ratios(one: Offload, clock: bool) -> tuple[float, float]:
        pairs = [
            (priced(run, offload, cold, False), priced(run, one, cold, clock))
            for run, cold in zip(runs, colds, strict=True)
        ]
        costs = mean(after[0] / before[0] for before, after in pairs)
        return costs, mean(after[1] / before[1] for before, after in pairs)

    eager = msgspec.structs.replace(offload, keep_views=max(offload.keep_views - 1, 1))
    cost, tokens = ratios(offload, True)
    other, fewer = ratios(eager, False)
    equal = 1 + (other - 1) * (1 - tokens) / (1 - fewer) if fewer < 1 else 1.0
    return 1 - cost / equal


def table(runs: Sequence[Recorded]) -> str:
    """The saved cost by pauses, lifetime and profile."""
    profiles = (Profile.BALANCED, Profile.CAREFUL)
    lines = [f"| pauses of {len(runs)} runs (mean) | cache lives | {' | '.join(profiles)} |"]
    lines.append("|---|---|---|---|")
    for minutes, lifetime, nights in CASES:
        colds = [expired(run, minutes, lifetime, nights) for run in runs]
        cells = [
            f"{saved(runs, written.offload(profile=profile, mode=Mode.COMPACT), colds):.1%}"
            for profile in profiles
        ]
        name = f"{minutes} minutes{', one in ten a night' if nights else ''}"
        lines.append(f"| {name} | {lifetime} minutes | {' | '.join(cells)} |")
    return "\n".join(lines)
