"""What was expected and what it came to, per tenant and model. Pure.

Costs are of the input, in plain input tokens. What we spent ourselves is in the actual cost: hidden rounds in those of
their requests, and summaries as rows of their own. Money is cost times the policy's price of an input token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from proxy.telemetry.outcome import Basis, Holdout, Kind

Row = dict[str, Any]
Price = Callable[[str, str], float | None]
"""Returns the money for a million plain input tokens, for a tenant and a model, if its policy says."""

SENT = (Kind.OFFLOADED, Kind.UNTOUCHED, Kind.OBSERVED)
"""Kinds of requests that have a history."""


def savings(sums: Iterable[Mapping[str, Any]], price: Price) -> list[Row]:
    """Return a row for each tenant and model, the largest first."""
    found: dict[tuple[str, str], Row] = {}
    for one in sums:
        row = found.setdefault((one["tenant"], one["model"]), _empty(one["tenant"], one["model"]))
        _count(row, one)
    for row in found.values():
        row["price"] = price(row["tenant"], row["model"])
        row["saved"] = row["expected"] - row["actual"] - row["summaries"]
    return sorted(
        found.values(), key=lambda row: (-row["expected"], -row["tokens_before"], row["tenant"], row["model"])
    )


def compared(groups: Iterable[Mapping[str, Any]], sums: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Return what conversations really cost in each group of a holdout, by tenant and model.

    Only requests of which upstream said what it counted are in the costs, and summaries count for the planned ones. If
    another model made them, it is not known for which conversations: they count in proportion to the costs.
    """
    found: dict[tuple[str, str, str], Row] = {}
    for group in groups:
        names = group["tenant"], group["model"], group["holdout"]
        found[names] = {
            **dict(zip(("tenant", "model", "holdout"), names, strict=True)),
            "sessions": group["sessions"],
            "requests": group["requests"],
            "billed": 0,
            "cost": 0,
        }
    others = Counter[str]()
    for one in sums:
        summary = one["kind"] == Kind.SUMMARY
        row = found.get((one["tenant"], one["model"], Holdout.PLANNED if summary else one["holdout"]))
        if row and (summary or one["usage"] == Basis.BILLED):
            row["billed"] += 0 if summary else one["requests"]
            row["cost"] += one["cost_before"] if one["holdout"] == Holdout.KEPT else one["cost_after"]
        elif summary:
            others[one["tenant"]] += one["cost_after"]
    for tenant, cost in others.items():
        planned = [row for row in found.values() if (row["tenant"], row["holdout"]) == (tenant, Holdout.PLANNED)]
        whole = sum(row["cost"] for row in planned)
        for row in planned:
            row["cost"] += round(cost * row["cost"] / whole) if whole else 0
    return [found[names] for names in sorted(found)]


def verified(sums: Iterable[Mapping[str, Any]]) -> Row:
    """Return how many requests were asked again, and how many of them led to the same next action."""
    found = [one for one in sums if one["kind"] == Kind.VERIFY]
    fields = ("again_tools", "again_exact", "whole_tools", "whole_exact")
    asked = sum(one["requests"] - one["faults"] for one in found)
    return {"asked": asked, **{name: sum(one[name] for one in found) for name in fields}}


def missed(sums: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Return what upstream's cache lacked of prompts, by tenant, model and cause, the most tokens first."""
    found: dict[tuple[str, str, str], Row] = {}
    for one in sums:
        if one["miss"]:
            names = {name: one[name] for name in ("tenant", "model", "miss")}
            row = found.setdefault(tuple(names.values()), {**names, "requests": 0, "missed_tokens": 0})
            row["requests"] += one["requests"]
            row["missed_tokens"] += one["missed_tokens"]
    return sorted(found.values(), key=lambda row: -row["missed_tokens"])


def _empty(tenant: str, model: str) -> Row:
    counted = (
        "requests", "faults", "tokens_before", "tokens_after", "rewritten", "billed", "losses", "expected", "actual",
        "summaries", "summary_calls", "retrieved_tokens", "observed", "observed_before", "observed_after",
        "observed_cost_before", "observed_cost_after",
    )  # fmt: skip
    return {"tenant": tenant, "model": model, **dict.fromkeys(counted, 0)}


def _count(row: Row, one: Mapping[str, Any]) -> None:
    kind = one["kind"]
    row["requests"] += one["requests"] if kind in SENT else 0
    row["faults"] += one["faults"] if kind in SENT else 0
    match kind:
        case Kind.SUMMARY:
            row["summaries"] += one["cost_after"]
            row["summary_calls"] += one["requests"]
        case Kind.OBSERVED:
            row["observed"] += one["requests"]
            for field in ("tokens_before", "tokens_after"):
                row[field.replace("tokens", "observed")] += one[field]
            for field in ("cost_before", "cost_after"):
                row[f"observed_{field}"] += one[field]
        case Kind.OFFLOADED | Kind.UNTOUCHED:
            row["tokens_before"] += one["tokens_before"]
            row["tokens_after"] += one["tokens_after"]
            row["retrieved_tokens"] += one["retrieved_tokens"]
            if kind == Kind.OFFLOADED:
                row["rewritten"] += one["requests"]
                row["billed"] += one["requests"] if one["usage"] == Basis.BILLED else 0
                row["expected"] += one["cost_before"]
                row["actual"] += one["cost_after"]
                row["losses"] += one["losses"]
