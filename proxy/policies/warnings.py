"""Finds the keys of a policy file that have no effect there or contradict each other, so that nobody relies on one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from proxy.plan.plan import CEILING_SHARE, Room
from proxy.policies.document import Path
from proxy.policy import Inject, Mode, Offload, Policy, Rule

_SUMMARISING = (Mode.COMPRESS, Mode.AUTO, Mode.OBSERVE)
MANY_RECENT = 20
"""Messages that stay, of which a few with large results fill any ceiling."""


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


# -- keys that contradict each other -----------------------------------------------------------------------------------


def contradictions(value: Mapping[str, Any], policy: Policy) -> Iterator[tuple[Path, str]]:
    """Yield the path of a written key for each pair that cannot both mean what they say, and what happens instead."""
    parts: list[tuple[Path, Mapping[str, Any], Policy | Rule]] = [((), value, policy)]
    parts += [
        (("rules", index), written, rule)
        for index, (written, rule) in enumerate(zip(value.get("rules", ()), policy.rules, strict=True))
    ]
    for path, written, part in parts:
        for keys, text in _pairs(part):
            if place := next((key for key in keys if _writes(written, key)), None):
                yield (*path, *place), text


def _writes(value: Mapping[str, Any], path: Path) -> bool:
    for key in path:
        if not isinstance(value, Mapping) or key not in value:
            return False
        value = value[key]  # type: ignore[index]
    return True


def _pairs(part: Policy | Rule) -> Iterator[tuple[tuple[Path, ...], str]]:
    offload, window = part.offload, part.upstream.context_window
    if offload.mode is Mode.OFF:
        return
    total, ceiling = offload.max_total_tokens, Room(window).ceiling(offload.max_total_tokens)
    limit, of_total = ("offload", "max_tool_message_tokens"), ("offload", "max_total_tokens")
    if window is not None and ceiling < total:
        text = f"`max_total_tokens` ({total:,}) is more than {CEILING_SHARE:.0%} of `context_window` ({window:,})"
        yield (of_total, ("upstream", "context_window")), f"{text}: history moves above {ceiling:,} tokens"
    if offload.mode is not Mode.COMPRESS and offload.max_tool_message_tokens >= ceiling:
        text = f"`max_tool_message_tokens` ({offload.max_tool_message_tokens:,}) is not below the ceiling ({ceiling:,})"
        yield (limit, of_total), f"{text}: history can exceed it without a result that may move"
    if (offload.keep_recent_count or 0) >= MANY_RECENT:
        text = f"`keep_recent_count` ({offload.keep_recent_count}) leaves the newest messages alone"
        yield (("offload", "keep_recent_count"),), f"{text}: history stays above {ceiling:,} where these exceed it"
    if offload.holdout == 1:
        yield (("offload", "holdout"),), "`holdout` is 1: every conversation is left as it comes"
    if part.tools.inject is Inject.NEVER:
        yield (("tools", "inject"),), "`inject` is never: references are left that the model cannot follow"
    retrieved = part.tools.max_retrieved_tokens
    if window is not None and retrieved > window // 2:
        text = f"`max_retrieved_tokens` ({retrieved:,}) is more than half of `context_window` ({window:,})"
        yield (("tools", "max_retrieved_tokens"),), f"{text}: one turn's reading can fill it"
    if offload.mode in _SUMMARISING:
        yield from _summary_pairs(offload, ceiling)


def _summary_pairs(offload: Offload, ceiling: int) -> Iterator[tuple[tuple[Path, ...], str]]:
    snapshot, group = offload.compress.snapshot_tokens, offload.compress.group_token_threshold
    of_total, of_group = ("offload", "max_total_tokens"), ("offload", "compress", "group_token_threshold")
    if snapshot > ceiling // 2:
        text = f"a snapshot (`snapshot_tokens`, {snapshot:,}) takes more than half of the ceiling ({ceiling:,})"
        yield (("offload", "compress", "snapshot_tokens"), of_total), f"{text}: summaries free little"
    if offload.pin_user_tokens > ceiling:
        text = f"`pin_user_tokens` ({offload.pin_user_tokens:,}) is above the ceiling ({ceiling:,})"
        yield (("offload", "pin_user_tokens"),), f"{text}: the user's messages alone can keep history above it"
    if 0 < group < snapshot:
        yield (of_group,), f"`group_token_threshold` ({group:,}) is below `snapshot_tokens` ({snapshot:,})"
    if group > ceiling:
        yield (of_group,), f"`group_token_threshold` ({group:,}) is above the ceiling ({ceiling:,})"
    if offload.mode is not Mode.COMPRESS and offload.compact_ratio_threshold == 1:
        yield (("offload", "compact_ratio_threshold"),), "`compact_ratio_threshold` is 1: nothing is ever summarised"
