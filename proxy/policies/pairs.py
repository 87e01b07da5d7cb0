"""What is valid by itself but not together: faults of a policy, and keys that others contradict or leave idle."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from proxy.plan.plan import CEILING_SHARE, Room
from proxy.plan.prices import ASSUMED, price_of
from proxy.plan.texts import ResultRole, ResultRule
from proxy.policies.document import Path
from proxy.policies.format import PolicyFile
from proxy.policy import Inject, Mode, Offload, Policy, Rule

_SUMMARISING = (Mode.COMPRESS, Mode.AUTO, Mode.OBSERVE)
MANY_RECENT = 20
"""Messages that stay, of which a few with large results fill any ceiling."""

Said = tuple[Path, str]
"""The path of a key, and what is to be said about it."""


def _parts(policy: Policy) -> Iterator[tuple[Path, Policy | Rule]]:
    """Yield everything that has the sections of a policy, with its path."""
    yield (), policy
    for index, rule in enumerate(policy.rules):
        yield ("rules", index), rule


# -- faults --


def caller_faults(written: PolicyFile, policy: Policy, *, is_default: bool) -> Iterator[Said]:
    """Yield what is wrong in who may use the policy, and with whose key."""
    if re.search(r"-([0-9a-f]{16}|anonymous)$", policy.tenant):
        yield ("tenant",), "a name that ends like this could be taken for one caller of another tenant"
    if is_default and written.api_keys:
        yield ("api_keys",), "default.yaml is for callers without a file of their own; give these keys a file"
    if not is_default and not written.api_keys:
        yield (), "expected `api_keys`: without any, nobody can be this tenant (only default.yaml has none)"
    if not is_default and written.open:
        yield ("open",), "only default.yaml can be open to strangers"
    yield from ((("identity",), text) for text in _identity_faults(policy, is_default=is_default))
    upstreams = [((*path, "upstream"), part.upstream) for path, part in _parts(policy)]
    upstreams += [(("upstreams", api), own.upstream) for api, own in policy.by_api]
    if is_default and not written.open:
        for path, upstream in upstreams:
            if upstream.api_key is not None:
                text = "every stranger could use this key; expected `open: true` at the top level if that is meant"
                yield (*path, "api_key"), text


def _identity_faults(policy: Policy, *, is_default: bool) -> Iterator[str]:
    by = policy.identity
    if sum(map(bool, (by.header, by.jwt, by.body))) > 1:
        yield "expected one of `header`, `jwt` and `body`"
    if by.given and policy.share_namespace:
        yield "contradicts `share_namespace`, with which all keys are one client"
    if by.given and is_default and any(upstream.api_key for upstream in policy.upstreams):
        text = "only upstream could tell that these callers are who they say, and it gets the policy's key"
        yield f"{text}; list their keys in a file of their own"


def section_faults(policy: Policy) -> Iterator[Said]:
    """Yield what is wrong in the sections for each API and model."""
    for one in (policy, *(own for _, own in policy.by_api)):
        for path, part in _parts(one):
            yield from (((*path, "offload", *key), text) for key, text in _offload_faults(part))


def _offload_faults(part: Policy | Rule) -> Iterator[Said]:
    offload, window = part.offload, part.upstream.context_window
    if offload.cache_write < offload.cached_read:
        yield ("cache_write",), "expected at least `cached_read`: no cache is cheaper to write than read"
    for index, rule in enumerate(offload.results):
        if isinstance(rule, ResultRule) and rule.role is ResultRole.USER and not rule.prefix:
            yield ("results", index), "expected a `prefix`: without one, all that users say is results"
    if window is not None and offload.compress.snapshot_tokens >= window and offload.mode in _SUMMARISING:
        text = f"expected less than `upstream.context_window` ({window} tokens), as the snapshot has to fit in"
        yield ("compress", "snapshot_tokens"), text


# -- warnings --


def contradictions(value: Mapping[str, Any], policy: Policy) -> Iterator[Said]:
    """Yield the path of a written key for each pair that cannot both mean what they say, and what happens instead.

    `value` has the sections as they are written. Whoever switches the mode off for a while keeps the rest.
    """
    for (path, part), written in zip(_parts(policy), (value, *value.get("rules", ())), strict=True):
        if part.offload.mode is Mode.OFF:
            continue
        for text, *keys in _pairs(part):
            if key := next((key for key in keys if _at(written, key) is not None), None):
                first = _at(msgspec.to_builtins(part, enc_hook=list), keys[0])
                shown = "" if isinstance(first, dict) else f" ({first})" if isinstance(first, str) else f" ({first:,g})"
                yield (*path, *key.split(".")), f"`{keys[0].rpartition('.')[2]}`{shown} {text}"


def _at(value: Any, key: str) -> Any:
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _pairs(part: Policy | Rule) -> Iterator[tuple[str, ...]]:
    """Yield what is to be said of a key, the key, and another one that it may be written about instead."""
    offload, window = part.offload, part.upstream.context_window
    ceiling = Room(window).ceiling(offload.max_total_tokens)
    if window is not None and ceiling < offload.max_total_tokens:
        text = (
            f"is more than {CEILING_SHARE:.0%} of `context_window` ({window:,}): history moves above {ceiling:,} tokens"
        )
        yield text, "offload.max_total_tokens", "upstream.context_window"
    if offload.mode is not Mode.COMPRESS and offload.max_tool_message_tokens >= ceiling:
        text = f"is not below the ceiling ({ceiling:,}): history can exceed it without a result that may move"
        yield text, "offload.max_tool_message_tokens", "offload.max_total_tokens"
    if (offload.keep_recent_count or 0) >= MANY_RECENT:
        text = f"leaves the newest messages alone: history stays above {ceiling:,} where these exceed it"
        yield text, "offload.keep_recent_count"
    if offload.verify and offload.input_price is None and price_of(part.upstream.base_url) is ASSUMED:
        yield "asks nothing again: its cost is not known, for want of `input_price`", "offload.verify"
    if part.tools.inject is Inject.NEVER:
        yield "leaves references that the model cannot follow", "tools.inject"
    if window is not None and part.tools.max_retrieved_tokens > window // 2:
        text = f"is more than half of `context_window` ({window:,}): one turn's reading can fill it"
        yield text, "tools.max_retrieved_tokens"
    yield from _pairs_of_mode(offload, ceiling)


def _pairs_of_mode(offload: Offload, ceiling: int) -> Iterator[tuple[str, ...]]:
    if offload.mode is Mode.COMPRESS:
        yield "has no effect in the mode compress, where results do not move by themselves", "offload.keep_views"
    elif offload.cached_read == 0 < offload.cache_write:
        text = f"has no effect where cached input is free: history moves above `max_total_tokens` ({ceiling:,})"
        yield text, "offload.keep_views"
    if offload.mode in (Mode.COMPACT, Mode.COMPRESS):
        yield f"has no effect in the mode {offload.mode}, only in auto", "offload.compact_ratio_threshold"
    if offload.mode is Mode.COMPACT:
        yield "has no effect in the mode compact, which summarises nothing", "offload.compress"
        return
    snapshot = offload.compress.snapshot_tokens
    if snapshot > ceiling // 2:
        text = f"takes more than half of the ceiling ({ceiling:,}): summaries free little"
        yield text, "offload.compress.snapshot_tokens", "offload.max_total_tokens"
    if offload.pin_user_tokens > ceiling:
        text = f"is above the ceiling ({ceiling:,}): the user's messages alone can keep history above it"
        yield text, "offload.pin_user_tokens"
