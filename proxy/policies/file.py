"""Turns one policy file into a `Policy`.

A rule's sections are overlaid when the file is loaded, so that a bad rule fails then and not at a later request.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from proxy.plan.profiles import presets
from proxy.policies.document import Document, Path, read
from proxy.policies.format import SECTIONS, PolicyFile, duration, explained
from proxy.policies.pairs import caller_faults, contradictions, section_faults
from proxy.policy import LISTED, Offload, Policy, Rule, Sections, Tools, Upstream

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
        rules=tuple(_rule(rule, value) for rule in value.get("rules", ())),
        listed=LISTED.difference(value.get("offload", {})),
    )
    return replace(policy, by_api=tuple(_by_api(policy, value)))


def _by_api(policy: Policy, value: Mapping[str, Any]) -> Iterator[tuple[str, Policy]]:
    shared, rules = value.get("upstream", {}), value.get("rules", ())
    for api, own in value.get("upstreams", {}).items():
        upstream = overlay(_without_address(shared) if "base_url" in own else shared, own)
        elsewhere = _without_address(upstream) | {key: shared[key] for key in _OF_THE_ADDRESS & shared.keys()}
        ruled = (
            _rule(rule, {**value, "upstream": elsewhere if "base_url" in rule.get("upstream", {}) else upstream})
            for rule in rules
        )
        offload = msgspec.convert(_preset({**value, "upstream": upstream}).get("offload", {}), Offload)
        converted = msgspec.convert(upstream, Upstream)
        yield api, replace(policy, upstream=converted, offload=offload, rules=tuple(ruled))


def _without_address(upstream: Mapping[str, Any]) -> dict[str, Any]:
    return {key: given for key, given in upstream.items() if key not in _OF_THE_ADDRESS}


def _rule(rule: Mapping[str, Any], value: Mapping[str, Any]) -> Rule:
    own = {name: overlay(value.get(name, {}), rule.get(name, {})) for name in ("upstream", "offload", "tools")}
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
