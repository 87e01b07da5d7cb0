"""The figures of the savings benchmark's tables as plain data, for `--json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean, median
from typing import Any

from bench.caches import MODELS
from bench.outcomes import Bench, Figures, percentile

Rows = Sequence[Figures]


def spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "median": median(values),
        "p90": percentile(values, 0.9),
        "p95": percentile(values, 0.95),
        "worst": max(values),
        "not_above_1": sum(value <= 1 + 1e-9 for value in values) / len(values),
    }


def costs(bench: Bench, rows: Rows) -> dict[str, dict[str, float]]:
    return {model: spread(bench.costs(rows, model)) for model in rows[0].costs}


def strategy(bench: Bench, rows: Rows) -> dict[str, Any]:
    return {
        "sent": median(bench.ratios(rows, lambda one: one.sent)),
        "last": median(bench.ratios(rows, lambda one: one.last)),
        "breaks": mean(row.breaks for row in rows),
        "summaries": mean(row.summaries for row in rows),
        "costs": costs(bench, rows),
    }


def default(bench: Bench, never: Rows, always: Rows) -> dict[str, Any]:
    """Costs where moved results are never read back, and where each one is, once."""
    return {"never_read": costs(bench, never), "always_read": costs(bench, always)}


def by_source(bench: Bench, rows: Rows) -> dict[str, Any]:
    found = {}
    for source in sorted({run.source for run in bench.runs}):
        places = [place for place, run in enumerate(bench.runs) if run.source == source]
        medians = {model: median(bench.costs(rows, model)[place] for place in places) for model in MODELS}
        sent = bench.ratios(rows, lambda one: one.sent)
        found[source] = {"runs": len(places), "sent": median(sent[place] for place in places), "costs": medians}
    return found


def sweep(bench: Bench, swept: Mapping[tuple[int, int | None], Rows]) -> list[dict[str, Any]]:
    return [
        {"max_total_tokens": total, "keep_recent_count": keep, **strategy(bench, rows)}
        for (total, keep), rows in swept.items()
    ]
