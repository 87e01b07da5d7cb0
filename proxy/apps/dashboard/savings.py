"""What a period's requests came to: the sums of the first page and of the page about savings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from proxy.apps.dashboard.queries import PERIODS, SENT, Reader
from proxy.apps.dashboard.rows import DAY, Row
from proxy.apps.verify import pairs
from proxy.telemetry.outcome import Basis, Holdout, Kind

Price = Callable[[str, str], float | None]
"""Returns the money for a million plain input tokens, for a tenant and a model, if its policy
says."""


def _of(amount: str, *kinds: Kind) -> str:
    """Return the SQL of an amount that counts at requests of these kinds alone."""
    names = ", ".join(f"'{kind}'" for kind in kinds)
    return f"iif(kind IN ({names}), {amount}, 0)"


_IS_BILLED = f"usage = '{Basis.BILLED}'"
_PLANNED = (Kind.OFFLOADED, Kind.UNTOUCHED)
MODELS = {
    "requests": _of("requests", *_PLANNED, Kind.OBSERVED),
    "faults": _of("faults", *_PLANNED, Kind.OBSERVED),
    "tokens_before": _of("tokens_before", *_PLANNED),
    "tokens_after": _of("tokens_after", *_PLANNED),
    "retrieved_tokens": _of("retrieved_tokens", *_PLANNED),
    "rewritten": _of("requests", Kind.OFFLOADED),
    "events": _of("new_event", Kind.OFFLOADED),
    "billed": _of(f"requests * ({_IS_BILLED})", Kind.OFFLOADED),
    "losses": _of("losses", Kind.OFFLOADED),
    "expected": _of("cost_before", Kind.OFFLOADED),
    "actual": _of("cost_after", Kind.OFFLOADED),
    "summaries": _of("cost_after", Kind.SUMMARY),
    "summary_calls": _of("requests", Kind.SUMMARY),
    "saved": f"{_of('cost_before', Kind.OFFLOADED)} - {_of('cost_after', Kind.OFFLOADED, Kind.SUMMARY)}",
    "observed": _of("requests", Kind.OBSERVED),
    "observed_before": _of("tokens_before", Kind.OBSERVED),
    "observed_after": _of("tokens_after", Kind.OBSERVED),
    "observed_cost_before": _of("cost_before", Kind.OBSERVED),
    "observed_cost_after": _of("cost_after", Kind.OBSERVED),
}
"""What the page says of a tenant's model. Costs are of the input, in plain input tokens. What we
spent ourselves is in the actual cost, and summaries beside it."""

_COURSE = {
    "requests": "requests",
    "tokens_before": "tokens_before",
    "tokens_after": "tokens_after",
    "cost_before": f"iif(kind = '{Kind.UNTOUCHED}', 0, cost_before)",
    "cost_after": f"iif(kind = '{Kind.UNTOUCHED}', 0, cost_after)",
}
"""Costs of untouched requests are only compared with those of a holdout."""

_BILLED = {
    "billed": "requests",
    "cost": f"iif(holdout = '{Holdout.KEPT}', cost_before, cost_after)",
}
_MISSED = {name: name for name in ("requests", "missed_tokens")}
_VERIFIED = {
    "asked": "requests - faults",
    "failed": "faults",
    "cost": "verify_cost",
    **{name: name for name in pairs.SUMMED},
}


def savings(reader: Reader, period: str, now: float, price: Price) -> Row:
    """Return what a period's requests came to. It begins with a whole minute, hour or day (UTC), as
    sums do. Without a period, it is the shortest that holds all requests."""
    if period not in PERIODS:
        period = _shortest(reader, now)
    seconds, span = PERIODS[period]
    since = (now - seconds) // span * span
    long = DAY if seconds > DAY else span  # sums of hours are not kept for two weeks
    earlier = reader.sums(
        "time", _COURSE, long, since - seconds, f"{SENT} AND time < {since // long * long}"
    )
    models = priced(reader.sums("tenant, model", MODELS, span, since), price)
    verified = reader.sums("tenant, model", _VERIFIED, span, since, f"kind = '{Kind.VERIFY}'")
    misses = reader.sums("tenant, model, miss", _MISSED, span, since, "miss != ''")
    costs = reader.sums(
        "tenant, model, holdout", _BILLED, span, since, f"{_IS_BILLED} AND kind != '{Kind.SUMMARY}'"
    )
    summaries = [{**one, "cost": one["summaries"]} for one in models if one["summaries"]]
    fared = priced(reader.fared(since), price)
    prices = [
        (one["tenant"], one["model"], one["price"]) for one in fared if one["price"] is not None
    ]
    best, worst = reader.extremes(since, prices)
    return {
        "period": period,
        "since": since,
        "now": now,
        "span": span,
        "models": sorted(models, key=lambda row: (-row["expected"], -row["tokens_before"])),
        "course": reader.sums("time", _COURSE, span, since, SENT),
        "before": {
            name: sum(one[name] for one in earlier) for name in ("tokens_before", "tokens_after")
        },
        "sessions": fared,
        "best": priced(best, price),
        "worst": priced(worst, price),
        "verified": proof(priced(verified, price)),
        "misses": sorted(misses, key=lambda row: -row["missed_tokens"]),
        "groups": compared(reader.groups(since), costs, summaries),
    }


def proof(verified: Sequence[Row]) -> Row:
    """Return what requests that were asked again show: how many there are, how many had no reply to
    compare, the money that was spent, the figures, and how many more these need if there are
    none."""
    sums = {name: sum(one[name] for one in verified) for name in _VERIFIED}
    asked = sums["asked"]
    return {
        "asked": asked,
        "failed": sums["failed"],
        "spent": sum(one["cost"] * (one["price"] or 0.0) for one in verified) / 1_000_000,
        "figures": [figure._asdict() for figure in pairs.figures(asked, sums)],
        "missing": pairs.missing(asked),
    }


def _shortest(reader: Reader, now: float) -> str:
    """Return the shortest period that holds all requests."""

    def count(period: str) -> int:
        seconds, span = PERIODS[period]
        return sum(
            one["requests"]
            for one in reader.sums("kind", {"requests": "requests"}, span, now - seconds)
        )

    *shorter, longest = PERIODS
    every = count(longest)
    return next((period for period in shorter if count(period) == every), longest)


def compared(groups: Iterable[Row], costs: Iterable[Row], summaries: Iterable[Row]) -> list[Row]:
    """Return what conversations really cost in each group of a holdout, by tenant and model.

    Only requests of which upstream said what it counted are in the costs, and summaries count for
    the planned ones. If another model made them, it is not known for which conversations: they
    count in proportion to the costs.
    """
    found = {
        (one["tenant"], one["model"], one["holdout"]): {**one, "billed": 0, "cost": 0}
        for one in groups
    }
    for one in costs:
        if row := found.get((one["tenant"], one["model"], one["holdout"])):
            row |= one
    others = Counter[str]()
    for one in summaries:
        if row := found.get((one["tenant"], one["model"], Holdout.PLANNED)):
            row["cost"] += one["cost"]
        else:
            others[one["tenant"]] += one["cost"]
    for tenant, cost in others.items():
        planned = [
            row
            for row in found.values()
            if (row["tenant"], row["holdout"]) == (tenant, Holdout.PLANNED)
        ]
        whole = sum(row["cost"] for row in planned)
        for row in planned:
            row["cost"] += round(cost * row["cost"] / whole) if whole else 0
    return [found[names] for names in sorted(found)]


def priced(rows: Sequence[Row], price: Price) -> list[Row]:
    """Return these with the money for a million plain input tokens, where it is known."""
    return [{**row, "price": price(row["tenant"], row["model"])} for row in rows]
