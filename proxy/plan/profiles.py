"""The defaults of each plan and profile: how soon tool results leave, and how much that may cost until it pays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proxy.plan.prices import price_of
from proxy.policy import Inject, Mode, Profile

PROFILES: Mapping[Profile, Mapping[str, Any]] = {
    Profile.CAREFUL: {"max_total_tokens": 20_000, "min_views": 10, "max_loss": 0.04},
    Profile.BALANCED: {"max_total_tokens": 10_000, "min_views": 3, "max_loss": 0.05},
    Profile.FRUGAL: {"max_total_tokens": 10_000, "min_views": 1, "max_loss": 0.15},
}
"""Tuned on half of the recorded runs; docs/benchmarks.md shows the other half."""
PLAN_2: Mapping[str, Any] = {
    "plan": 2,
    "max_tool_message_tokens": 500,
    "hard_total_tokens": 100_000,
    "early_total_tokens": 0,
    "early_saved_tokens": 1_000,
}
"""What all profiles have. With a hard total of 50,000 some conversations cost up to 0.2 more right after its event, and
nothing is saved in the median."""
PLAN_1: Mapping[str, Any] = {"plan": 1, "max_total_tokens": 20_000, "max_tool_message_tokens": 2_000, "min_views": 1}
"""The defaults of plan 1, which knows no profiles."""
LATER: Mapping[str, Any] = {"inject": Inject.WHEN_OFFLOADING}
"""Our tools from the start save the first event from writing the whole prompt anew, because tools come before messages.
`careful` goes without, as it leaves most requests as they came."""
FOLLOWING: Mapping[str, str] = {
    "hard_total_tokens": "max_total_tokens",
    "early_total_tokens": "max_total_tokens",
    "early_saved_tokens": "min_saved_tokens",
}
"""Keys that follow another one where the policy sets that one, so that it goes on to mean what it says."""
PLAN_2_ONLY = ("profile", "min_views", "max_loss", *FOLLOWING)
"""Keys without effect under plan 1."""


def presets(offload: Mapping[str, Any], base_url: str = "") -> dict[str, Mapping[str, Any]]:
    """Return, by section, what the plan and the profile of this `offload` section set where the policy says nothing,
    together with the prices of the upstream at this address.

    A value of the wrong kind is left to validation.
    """
    if offload.get("plan", 2) == 1:
        return {"offload": PLAN_1, "tools": LATER}
    profile = offload.get("profile", Profile.BALANCED)
    if profile not in tuple(Profile):
        return {}
    chosen = {**PLAN_2, **PROFILES[profile]}
    chosen |= {key: None for key, leading in FOLLOWING.items() if leading in offload}
    if offload.get("mode") == Mode.COMPRESS:
        chosen["hard_total_tokens"] = None  # without results that move, nothing is saved that could pay for a summary
    known = price_of(base_url)
    chosen |= {"cached_read": known.cached_read, "cache_write": known.cache_write}
    return {"offload": chosen, "tools": LATER if profile == Profile.CAREFUL else {}}
