"""Finds the keys of a policy file that have no effect there, so that nobody relies on one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from proxy.policies.document import Path
from proxy.policy import Mode, Offload, Policy

_SUMMARISING = (Mode.COMPRESS, Mode.AUTO, Mode.OBSERVE)


def idle_keys(value: Mapping[str, Any], policy: Policy) -> Iterator[tuple[Path, str]]:
    """Yield the path of each written key of `offload` that has no effect, and why. `value`: the sections as written."""
    rules = value.get("rules", ())
    by_rule = list(zip(rules, policy.rules, strict=True))
    shared = [policy.offload, *(own.offload for _, own in policy.by_api)]
    for key in value.get("offload", {}):
        heirs = [rule.offload for written, rule in by_rule if key not in written.get("offload", {})]
        if reason := _why_idle(key, [*shared, *heirs]):
            yield ("offload", key), reason
    for index, (written, rule) in enumerate(by_rule):
        for key in written.get("offload", {}):
            if reason := _why_idle(key, [rule.offload]):
                yield ("rules", index, "offload", key), reason


def _why_idle(key: str, sections: Sequence[Offload]) -> str:
    """Return why this key has no effect in any of these sections, or nothing if it has."""
    reasons = [_why(key, offload) for offload in sections]
    return reasons[0] if all(reasons) else ""


def _why(key: str, offload: Offload) -> str:
    mode = offload.mode
    if mode is Mode.OFF:
        return ""  # whoever switches it off for a while keeps the rest
    if key == "compact_ratio_threshold" and mode not in (Mode.AUTO, Mode.OBSERVE):
        return f"has no effect in the mode {mode}, only in auto"
    if key == "compress" and mode not in _SUMMARISING:
        return f"has no effect in the mode {mode}, which summarises nothing"
    if key == "keep_views":
        return _why_nothing_pays(offload)
    return ""


def _why_nothing_pays(offload: Offload) -> str:
    if offload.mode is Mode.COMPRESS:
        return "has no effect in the mode compress, where results do not move by themselves"
    if offload.cached_read == 0 < offload.cache_write:
        return (
            "has no effect where cached input is free (`cached_read: 0`), as nothing pays there: history is offloaded "
            f"above `max_total_tokens` ({offload.max_total_tokens:,}), and where the window is full"
        )
    return ""
