"""The defaults of each profile: how soon tool results leave."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proxy.plan.prices import price_of
from proxy.policy import Inject, Profile

PROFILES: Mapping[Profile, Mapping[str, Any]] = {
    Profile.CAREFUL: {"keep_views": 10, "max_total_tokens": 60_000},
    Profile.BALANCED: {"keep_views": 2, "max_total_tokens": 30_000},
    Profile.FRUGAL: {"keep_views": 1, "max_total_tokens": 20_000},
}
"""Tuned on half of the recorded runs; docs/benchmarks.md shows the other half."""
LATER: Mapping[str, Any] = {"inject": Inject.WHEN_OFFLOADING}
"""Our tools from the start save the first event from writing the whole prompt again, as tools come before messages.
`careful` goes without, because it leaves most requests as they came."""


def presets(offload: Mapping[str, Any], base_url: str = "") -> dict[str, Mapping[str, Any]]:
    """Return, by section, what the profile of this `offload` section sets where the policy says nothing, together with
    the prices of the upstream at this address.

    A value of the wrong kind is left to validation.
    """
    profile = offload.get("profile", Profile.BALANCED)
    if profile not in tuple(Profile):
        return {}
    chosen = dict(PROFILES[profile])
    known = price_of(base_url)
    chosen |= {"cached_read": known.cached_read, "cache_write": known.cache_write}
    return {"offload": chosen, "tools": LATER if profile == Profile.CAREFUL else {}}
