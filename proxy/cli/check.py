"""The `check` command: explains in words what a directory of policies means."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from proxy.policies import Policies, load
from proxy.policy import Mode, Policy
from proxy.settings import Settings

_UNITS = (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1))


def checked(settings: Settings, directory: str | None) -> tuple[Policies, str]:
    """Return the policies of a directory, and their meaning in words. Raises PolicyError if one is bad."""
    where = Path(directory) if directory is not None else settings.policies or Path("policies")
    policies = load(where, settings.environment, settings.upstream)
    return policies, "".join(f"{line}\n" for line in _lines(where, policies))


def _lines(where: Path, policies: Policies) -> Iterator[str]:
    count = len(policies.all())
    yield f"{where}: {count} {'policy' if count == 1 else 'policies'}, all good"
    for policy in policies.all():
        yield ""
        yield policy.tenant
        for title, text in _facts(policy, policies):
            yield f"  {title:<10} {text}"
    if policies.warnings:
        yield ""
        yield from (f"warning: {warning}" for warning in policies.warnings)
    if policies.default is None:
        yield ""
        yield "Callers with other keys, or none, get 401: there is no default.yaml."


def _facts(policy: Policy, policies: Policies) -> Iterator[tuple[str, str]]:
    yield "callers", _callers(policy, policies)
    for title, one in (("upstream", policy), *policy.by_api):
        upstream = one.upstream
        yield title, f"{upstream.base_url} with {'the policy' if upstream.api_key else 'the caller'}'s key"
    yield "offload", _offload(policy)
    kept = "for ever" if policy.retention is None else f"for {_duration(policy.retention)}"
    yield "records", f"kept {kept}, {'one namespace for all keys' if policy.share_namespace else 'a namespace a key'}"
    if policy.capture:
        yield "capture", "whole requests, where `serve --capture` names a folder"
    if policy.relay:
        yield "relay", "also " + ", ".join(policy.relay)
    if policy.rules:
        yield "rules", ", ".join(rule.model for rule in policy.rules)


def _callers(policy: Policy, policies: Policies) -> str:
    if policy is policies.default:
        return "everybody whom no other file names"
    count = sum(owner is policy for owner in policies.by_digest.values())
    return f"{count} {'key' if count == 1 else 'keys'}"


def _offload(policy: Policy) -> str:
    offload = policy.offload
    if offload.mode is Mode.OFF:
        return "off"
    tools = f"tool results above {offload.max_tool_message_tokens:,}; tools {policy.tools.inject.replace('_', ' ')}"
    return f"{offload.mode}, {offload.profile}, at most {offload.max_total_tokens:,} tokens of history; {tools}"


def _duration(seconds: float) -> str:
    """Return the duration in the largest unit that is exact."""
    unit, size = next((unit, size) for unit, size in _UNITS if seconds % size == 0)
    return f"{seconds / size:.0f}{unit}"
