"""Turns one policy file into a `Policy`, and says what in it is wrong or contradicts something else.

A rule's sections are overlaid when the file is loaded, so that a bad rule fails then and not at a later request.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from proxy.plan.plan import CEILING_SHARE, Room
from proxy.plan.prices import ASSUMED, price_of
from proxy.plan.profiles import presets
from proxy.plan.texts import ResultRole, ResultRule
from proxy.policies.document import Document, Path, read
from proxy.policies.format import SECTIONS, PolicyFile, duration, explained
from proxy.policy import LISTED, Inject, Mode, Offload, Policy, Sections, Tools, Upstream

_LISTS = {"relay", "exclude_tools", "results", "said", "members"}
_EMPTY_IS_DEFAULT = (SECTIONS.keys() - {""}) | {"tenant"} | _LISTS
"""Keys that may be empty, for example because everything in a section is commented out."""

_OF_THE_ADDRESS = frozenset(("api_key", "context_window"))
"""Keys of an upstream that another address must not get."""


class PolicySource(msgspec.Struct, frozen=True):
    """One policy file. `keys` has the SHA-256 of each API key and its path in the file."""

    document: Document
    policy: Policy
    keys: tuple[tuple[bytes, Path], ...]
    is_default: bool
    warnings: tuple[str, ...] = ()
    """What is written there without an effect, each with its line."""

    def __repr__(self) -> str:
        return f"Source({self.document.name!r}, tenant={self.policy.tenant!r})"


def parse(
    text: str,
    name: str,
    stem: str,
    environment: Mapping[str, str],
    base_url: str | None = None,
    *,
    alone: bool = False,
) -> PolicySource:
    """Parse one file's text. `name` is used in errors. `stem` is the file's name without `.yaml`.

    `base_url` is used if the file has none. An `alone` policy is not served: it needs no callers, and their keys do not
    matter. Raises PolicyError, which names the file, the line, the key and what was expected there.
    """
    document, is_default = read(text, name, environment), stem == "default"
    value = _accepted(document.value)
    try:
        if isinstance(value, dict):
            value = overlay({"tenant": stem, "upstream": {"base_url": base_url} if base_url else {}}, value)
            written = msgspec.convert(_preset(value), PolicyFile)
        else:
            written = msgspec.convert(value, PolicyFile)
    except msgspec.ValidationError as error:
        raise document.error(*explained(str(error))) from error
    policy = _policy(stem, written, value)
    callers = () if alone else caller_faults(written, policy, is_default=is_default)
    for path, fault in (*callers, *section_faults(policy)):
        raise document.error(path, fault)
    found = () if alone else contradictions(value, policy)
    warnings = tuple(str(document.error(path, reason)) for path, reason in found)
    keys = () if alone else tuple(_keys(document, written, environment))
    return PolicySource(document, policy, keys, is_default, warnings)


def overlay(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return `below` overridden by `above`. Mappings merge key by key, and any other value is replaced."""
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        both = isinstance(value, Mapping) and isinstance(under, Mapping)
        merged[key] = overlay(under, value) if both else value  # type: ignore[arg-type]
    return merged


def _accepted(value: Any) -> Any:
    """Undo two surprises of YAML: it reads `off` as false, and a section with nothing but comments as null."""
    if isinstance(value, list):
        return [_accepted(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: "off" if key == "mode" and member is False else _accepted(member)
        for key, member in value.items()
        if member is not None or key not in _EMPTY_IS_DEFAULT
    }


def _preset(sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return these sections with what their profile and their upstream set where they say nothing."""
    offload, upstream = sections.get("offload", {}), sections.get("upstream", {})
    if not isinstance(offload, Mapping) or not isinstance(upstream, Mapping):
        return dict(sections)  # a fault, which is explained when it is converted
    address = upstream.get("base_url", Upstream().base_url)
    return overlay(presets(offload, address if isinstance(address, str) else ""), sections)


def _policy(stem: str, written: PolicyFile, value: Mapping[str, Any]) -> Policy:
    """Return the policy. `value` is what is written, which has been validated part by part: so overlays are valid."""
    policy = Policy(
        **{name: getattr(written, name) for name in Sections.__struct_fields__},
        tenant=written.tenant or stem,
        retention=None if written.retention is None else duration(written.retention),
        listed=LISTED.difference(value.get("offload", {})),
    )
    rules = tuple(_with(policy, overlay(value, rule), rule["model"]) for rule in value.get("rules", ()))
    return replace(policy, rules=rules, by_api=tuple(_by_api(policy, value)))


def _by_api(policy: Policy, value: Mapping[str, Any]) -> Iterator[tuple[str, Policy]]:
    shared, rules = value.get("upstream", {}), value.get("rules", ())
    for api, own in value.get("upstreams", {}).items():
        upstream = overlay(_without_address(shared) if "base_url" in own else shared, own)
        elsewhere = _without_address(upstream) | {key: shared[key] for key in _OF_THE_ADDRESS & shared.keys()}
        made = _with(policy, {**value, "upstream": upstream})
        ruled = (
            overlay({**value, "upstream": elsewhere if "base_url" in rule.get("upstream", {}) else upstream}, rule)
            for rule in rules
        )
        yield api, replace(made, rules=tuple(_with(policy, sections, sections["model"]) for sections in ruled))


def _without_address(upstream: Mapping[str, Any]) -> dict[str, Any]:
    return {key: given for key, given in upstream.items() if key not in _OF_THE_ADDRESS}


def _with(policy: Policy, value: Mapping[str, Any], model: str = "") -> Policy:
    """Return the policy with these sections."""
    sections = _preset(value)
    return replace(
        policy,
        model=model,
        upstream=msgspec.convert(sections.get("upstream", {}), Upstream),
        offload=msgspec.convert(sections.get("offload", {}), Offload),
        tools=msgspec.convert(sections.get("tools", {}), Tools),
        listed=LISTED.difference(value.get("offload", {})),
    )


def _keys(document: Document, written: PolicyFile, environment: Mapping[str, str]) -> Iterator[tuple[bytes, Path]]:
    for index, key in enumerate(written.api_keys):
        path: Path = ("api_keys", index)
        if (key.sha256 is None) == (key.env is None):
            raise document.error(path, "expected either `sha256` or `env`")
        if key.sha256 is not None:
            yield bytes.fromhex(key.sha256), path
        elif key.env is not None:
            yield _digest(document, (*path, "env"), key.env, environment), path


def _digest(document: Document, path: Path, variable: str, environment: Mapping[str, str]) -> bytes:
    if variable not in environment:
        raise document.error(path, f"the environment variable {variable} is not set")
    key = environment[variable]
    if not key or key != key.strip():
        raise document.error(path, f"the environment variable {variable} is empty or has white space at its ends")
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


# -- what is valid by itself but not together --

_SUMMARISING = (Mode.COMPRESS, Mode.AUTO, Mode.OBSERVE)
MANY_RECENT = 20
"""Messages that stay, of which a few with large results fill any ceiling."""

Said = tuple[Path, str]
"""The path of a key, and what is to be said about it."""


def _parts(policy: Policy) -> Iterator[tuple[Path, Policy]]:
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


def _offload_faults(part: Policy) -> Iterator[Said]:
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


def _pairs(part: Policy) -> Iterator[tuple[str, ...]]:
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
