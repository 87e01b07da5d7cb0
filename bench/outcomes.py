"""The figures of a run under one strategy, and those of all runs beside the same runs without a
proxy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import ceil

import msgspec

from bench.caches import PRICED
from bench.replay import Call, Kind, Recorded, Strategy, breaks, cost, plainly


class Figures(msgspec.Struct, frozen=True):
    """One run under one strategy: tokens, those of its last and largest request, prefix breaks,
    summaries, cost by cache."""

    sent: int
    last: int
    largest: int
    breaks: int
    summaries: int
    costs: dict[str, float]


class Bench:
    """The runs, and as the baseline each one's figures without a proxy, priced under these
    caches."""

    def __init__(self, runs: Sequence[Recorded], models: Iterable[str] = PRICED) -> None:
        self.runs = runs
        self.plain = self.figures(plainly, models)

    def figures(self, strategy: Strategy, models: Iterable[str] = PRICED) -> list[Figures]:
        priced = tuple(models)
        return [measured(strategy, run, priced) for run in self.runs]

    def ratios(self, found: Sequence[Figures], value: Callable[[Figures], float]) -> list[float]:
        return [value(one) / value(plain) for one, plain in zip(found, self.plain, strict=True)]

    def costs(self, found: Sequence[Figures], model: str) -> list[float]:
        return self.ratios(found, lambda one: one.costs[model])


def measured(strategy: Strategy, run: Recorded, models: Sequence[str]) -> Figures:
    """One run's figures."""
    return figures(list(strategy(run)), models)


def figures(calls: Sequence[Call], models: Iterable[str] = PRICED) -> Figures:
    asked = [call.prompt.tokens for call in calls if call.kind is not Kind.SUMMARY]
    return Figures(
        sent=sum(call.prompt.tokens for call in calls),
        last=[call.prompt.tokens for call in calls if call.kind is Kind.CLIENT][-1],
        largest=max(asked),
        breaks=breaks(calls),
        summaries=sum(call.kind is Kind.SUMMARY for call in calls),
        costs={model: cost(calls, PRICED[model]) for model in models},
    )


def percentile(values: Sequence[float], part: float) -> float:
    """The smallest value that at least this part of them does not exceed."""
    ordered = sorted(values)
    return ordered[ceil(len(ordered) * part) - 1]
