"""The presets of plan 2: how soon tool results leave, and how much that may cost until it pays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proxy.core.policy import Inject, Profile
from proxy.core.prices import prices_of

PROFILES: Mapping[Profile, Mapping[str, Any]] = {
    Profile.CAREFUL: {"max_total_tokens": 20_000, "min_views": 10, "max_loss": 0.04},
    Profile.BALANCED: {"max_total_tokens": 10_000, "min_views": 3, "max_loss": 0.2},
    Profile.FRUGAL: {"max_total_tokens": 10_000, "min_views": 1, "max_loss": 0.15},
}
"""Tuned on half of the recorded runs; docs/benchmarks.md shows the other half."""
_ALL: Mapping[str, Any] = {"plan": 2, "max_tool_message_tokens": 500}
_TOOLS: Mapping[str, Any] = {"inject": Inject.AGENTS}
"""The first event would otherwise write the whole prompt anew, because tools come before messages. `careful` goes
without it, as it leaves most requests as they came."""


def presets(offload: Mapping[str, Any], base_url: str = "") -> dict[str, Mapping[str, Any]]:
    """Return, by section, what the profile of this `offload` section sets where the policy says nothing, together with
    the prices of the upstream at this address.

    A profile implies plan 2. A section of plan 1 has no presets. A value of the wrong kind is left to validation.
    """
    chosen = offload.get("profile")
    if offload.get("plan", 1 if chosen is None else 2) != 2 or chosen not in (None, *Profile):
        return {}
    profile = Profile.BALANCED if chosen is None else Profile(chosen)
    known = prices_of(base_url)
    prices = {"cached_read": known.cached_read, "cache_write": known.cache_write} if known else {}
    return {"offload": {**_ALL, **PROFILES[profile], **prices}, "tools": {} if profile is Profile.CAREFUL else _TOOLS}
