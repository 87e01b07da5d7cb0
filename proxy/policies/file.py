"""Turns one policy file into a `Policy`.

A rule's sections are overlaid when the file is loaded, so that a bad rule fails then and not at a later request.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from proxy.plan.profiles import presets
from proxy.plan.results import ResultRole, ResultRule
from proxy.policies.document import Document, Path, read
from proxy.policies.error_texts import explained
from proxy.policies.format import SECTIONS, Api, PolicyFile, duration
from proxy.policies.warnings import contradictions, idle_keys
from proxy.policy import LISTED, Mode, Offload, Policy, Rule, Tools, Upstream

T = TypeVar("T")

_LISTS = {"relay", "exclude_tools", "results", "said", "members"}
_EMPTY_IS_DEFAULT = (SECTIONS.keys() - {""}) | {"tenant", "upstreams"} | _LISTS
"""Keys that may be empty, for example because everything in a section is commented out."""

_RULED = ("upstream", "offload", "tools")
"""The sections that a rule may change."""


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


def parse(text: str, name: str, stem: str, environment: Mapping[str, str], base_url: str | None = None) -> PolicySource:
    """Parse one file's text. `name` is used in errors. `stem` is the file's name without `.yaml`.

    `base_url` is used if the file has none. Raises PolicyError, which names the file, the line, the key and what was
    expected there.
    """
    document, written, policy = _parsed(text, name, stem, environment, base_url)
    for path, fault in _faults(written, policy, is_default=stem == "default"):
        raise document.error(path, fault)
    value = _accepted(document.value)
    found = [*idle_keys(value, policy), *contradictions(value, policy)]
    warnings = tuple(str(document.error(path, reason)) for path, reason in found)
    keys = tuple(_keys(document, written, environment))
    return PolicySource(document, policy, keys, stem == "default", warnings)


def parse_alone(text: str, name: str, stem: str, environment: Mapping[str, str]) -> Policy:
    """Parse one file's text as a policy that is not served, so that it needs no callers and their keys do not matter.

    Raises PolicyError as `parse` does.
    """
    document, _, policy = _parsed(text, name, stem, environment, None)
    for path, fault in _sections_faults(policy):
        raise document.error(path, fault)
    return policy


def _parsed(
    text: str, name: str, stem: str, environment: Mapping[str, str], base_url: str | None
) -> tuple[Document, PolicyFile, Policy]:
    document = read(text, name, environment)
    defaults: dict[str, Any] = {"tenant": stem, "upstream": {"base_url": base_url} if base_url else {}}
    value = _accepted(document.value)
    value = overlay(defaults, value) if isinstance(value, dict) else value
    written = _converted(document, _preset(value) if isinstance(value, dict) else value)
    return document, written, _policy(stem, written, value)


def _preset(sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return these sections with what their profile and their upstream set where they say nothing."""
    offload, upstream = sections.get("offload", {}), sections.get("upstream", {})
    if not isinstance(offload, Mapping) or not isinstance(upstream, Mapping):
        return dict(sections)  # a fault, which is explained when it is converted
    address = upstream.get("base_url", Upstream().base_url)
    return overlay(presets(offload, address if isinstance(address, str) else ""), sections)


def overlay(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return `below` overridden by `above`. Mappings merge key by key, and any other value is replaced."""
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        both = isinstance(value, Mapping) and isinstance(under, Mapping)
        merged[key] = overlay(under, value) if both else value  # type: ignore[arg-type]
    return merged


# --- from YAML's values to a policy ---------------------------------------------------------------------------------


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


def _converted(document: Document, value: Any) -> PolicyFile:
    own = value.get("upstreams") if isinstance(value, Mapping) else None
    for api, upstream in own.items() if isinstance(own, Mapping) else ():
        # First and alone, because errors within a mapping do not say under which key.
        if api not in tuple(Api):
            raise document.error(("upstreams", api), "unknown key; expected one of " + ", ".join(Api))
        _part(document, upstream, Upstream, f".upstreams.{api}")
    return _part(document, value, PolicyFile)


def _part(document: Document, value: Any, kind: type[T], place: str = "") -> T:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise document.error(*explained(str(error), place)) from error


_OF_THE_ADDRESS = frozenset(("api_key", "context_window"))
"""Keys of an upstream that another address must not get."""


def _policy(stem: str, written: PolicyFile, value: Mapping[str, Any]) -> Policy:
    policy = _policy_of_one_upstream(stem, written, value)
    shared = value.get("upstream", {})
    by_api = []
    for api, own in value.get("upstreams", {}).items():
        inherited = {key: given for key, given in shared.items() if "base_url" not in own or key not in _OF_THE_ADDRESS}
        upstream = overlay(inherited, own)
        elsewhere = {key: shared[key] for key in _OF_THE_ADDRESS & shared.keys()}
        moved = {key: given for key, given in upstream.items() if key not in _OF_THE_ADDRESS} | elsewhere
        rules = tuple(
            _rule(rule, {**value, "upstream": moved if "base_url" in rule.get("upstream", {}) else upstream})
            for rule in value.get("rules", ())
        )
        offload = msgspec.convert(_preset({**value, "upstream": upstream}).get("offload", {}), Offload)
        served = replace(policy, upstream=msgspec.convert(upstream, Upstream), offload=offload, rules=rules)
        by_api.append((api, served))
    return replace(policy, by_api=tuple(by_api))


def _policy_of_one_upstream(stem: str, written: PolicyFile, value: Mapping[str, Any]) -> Policy:
    return Policy(
        tenant=written.tenant or stem,
        upstream=written.upstream,
        offload=written.offload,
        tools=written.tools,
        limits=written.limits,
        store_originals=written.store_originals,
        capture=written.capture,
        dashboard_content=written.dashboard_content,
        retention=None if written.retention is None else duration(written.retention),
        share_namespace=written.share_namespace,
        relay=written.relay,
        rules=tuple(_rule(rule, value) for rule in value.get("rules", ())),
        listed=LISTED.difference(value.get("offload", {})),
    )


def _rule(rule: Mapping[str, Any], value: Mapping[str, Any]) -> Rule:
    """Return the rule overlaid on its policy. Both have been validated, so the result is valid too."""

    own = {name: overlay(value.get(name, {}), rule.get(name, {})) for name in _RULED}
    sections = _preset(own)
    return Rule(
        model=rule["model"],
        upstream=msgspec.convert(sections["upstream"], Upstream),
        offload=msgspec.convert(sections["offload"], Offload),
        tools=msgspec.convert(sections["tools"], Tools),
        listed=LISTED.difference(own["offload"]),
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


# --- keys that are valid alone but not together ---------------------------------------------------------------------


_OPEN_RELAY = "every stranger could use this key; expected `open: true` at the top level if that is meant"


def _faults(written: PolicyFile, policy: Policy, *, is_default: bool) -> Iterator[tuple[Path, str]]:
    yield from _identity_faults(written, policy, is_default=is_default)
    yield from _sections_faults(policy)
    for path, upstream in _upstreams(policy):
        if is_default and upstream.api_key is not None and not written.open:
            yield (*path, "api_key"), _OPEN_RELAY


def _parts(policy: Policy) -> Iterator[tuple[Path, Policy | Rule]]:
    """Yield everything that has the sections of a policy, with its path."""
    yield (), policy
    for index, rule in enumerate(policy.rules):
        yield ("rules", index), rule


def _upstreams(policy: Policy) -> Iterator[tuple[Path, Upstream]]:
    for path, part in _parts(policy):
        yield (*path, "upstream"), part.upstream
    for api, own in policy.by_api:
        yield ("upstreams", api), own.upstream


def _sections_faults(policy: Policy) -> Iterator[tuple[Path, str]]:
    for one in (policy, *(own for _, own in policy.by_api)):
        for path, part in _parts(one):
            yield from _section_faults(path, part)


def _identity_faults(written: PolicyFile, policy: Policy, *, is_default: bool) -> Iterator[tuple[Path, str]]:
    if re.search(r"-([0-9a-f]{16}|anonymous)$", policy.tenant):
        yield ("tenant",), "a name that ends like this could be taken for one caller of another tenant"
    if is_default and written.api_keys:
        yield ("api_keys",), "default.yaml is for callers without a file of their own; give these keys a file"
    if not is_default and not written.api_keys:
        yield (), "expected `api_keys`: without any, nobody can be this tenant (only default.yaml has none)"
    if not is_default and written.open:
        yield ("open",), "only default.yaml can be open to strangers"


def _section_faults(path: Path, part: Policy | Rule) -> Iterator[tuple[Path, str]]:
    upstream, offload = part.upstream, part.offload
    if offload.cache_write < offload.cached_read:
        yield (
            (*path, "offload", "cache_write"),
            "expected at least `cached_read`: no cache is cheaper to write than read",
        )
    for index, rule in enumerate(offload.results):
        if isinstance(rule, ResultRule) and rule.role is ResultRole.USER and not rule.prefix:
            yield (
                (*path, "offload", "results", index),
                "expected a `prefix`: without one, all that users say is results",
            )
    window, snapshot = upstream.context_window, offload.compress.snapshot_tokens
    if window is not None and snapshot >= window and offload.mode in (Mode.COMPRESS, Mode.AUTO, Mode.OBSERVE):
        place = (*path, "offload", "compress", "snapshot_tokens")
        yield place, f"expected less than `upstream.context_window` ({window} tokens), as the snapshot has to fit in"
