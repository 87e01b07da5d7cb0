"""The `check` command: explains in words what a directory of policies means."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from proxy.cli.words import duration, several
from proxy.plan.forecast import CAUSES, waiting
from proxy.plan.plan import Item, Role, Room
from proxy.plan.planner import Fold
from proxy.plan.prices import price_of
from proxy.policies import Policies, builtin, load
from proxy.policies.tenants import described
from proxy.policy import Inject, Mode, Policy
from proxy.requests.planned import OUR_TOOLS_TOKENS
from proxy.settings import Settings

RESULTS = (300, 1_000, 4_000)
"""Tokens of the results in the sessions that are simulated."""
TASK, CALL, PREVIEW = 200, 60, 70
"""Tokens of their task, of each call with what the model says beside it, and of a result that has moved."""
MOST_REQUESTS = 300


def checked(settings: Settings, directory: str | None) -> tuple[Policies, str]:
    """Return the policies of a directory, and their meaning in words. Raises PolicyError if one is bad.

    Where no directory is named and there is no `policies`, these are the built-in ones, as for `serve`.
    """
    where = Path(directory) if directory is not None else settings.policies or Path("policies")
    if directory is None and settings.policies is None and not where.exists():
        policies, place = builtin(settings.upstream), "built in"
    else:
        policies, place = load(where, settings.environment, settings.upstream), str(where)
    return policies, "".join(f"{line}\n" for line in _lines(place, policies))


def _lines(where: str, policies: Policies) -> Iterator[str]:
    count = len(policies.all())
    warned = len(policies.warnings)
    verdict = "all good" if not warned else f"{several(warned, 'warning')} below"
    yield f"{where}: {several(count, 'policy', 'policies')}, {verdict}"
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
    yield "offload", offloads(policy)
    if policy.offload.mode is not Mode.OFF:
        yield "prices", prices(policy)
        for size in RESULTS:
            yield "results", f"of {size:,} tokens: {first_event(policy, size)}"
    kept = "for ever" if policy.retention is None else f"for {duration(policy.retention, exact=True)}"
    yield "records", f"kept {kept}, {'one namespace for all keys' if policy.share_namespace else 'a namespace a key'}"
    if not policy.share_namespace:
        yield "identity", described(policy.identity, listed=policy is not policies.default)
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
    return several(count, "key")


def offloads(policy: Policy) -> str:
    offload = policy.offload
    if offload.mode is Mode.OFF:
        return "off"
    tools = f"tool results above {offload.max_tool_message_tokens:,}; tools {policy.tools.inject.replace('_', ' ')}"
    return f"{offload.mode}, {offload.profile}, at most {offload.max_total_tokens:,} tokens of history; {tools}"


def prices(policy: Policy) -> str:
    offload, listed = policy.offload, price_of(policy.upstream.base_url)
    same = (offload.cached_read, offload.cache_write) == (listed.cached_read, listed.cache_write)
    source = f"{listed.models}: {listed.source}" if same else "this policy"
    return f"plain input 1, cached {offload.cached_read:g}, written to the cache {offload.cache_write:g} ({source})"


def first_event(policy: Policy, size: int) -> str:
    """Say when an agent's session whose results have so many tokens is first changed."""
    policy = policy.planning.for_request(has_tools=True)
    upstream, offload = policy.upstream, policy.offload
    reply = upstream.reply_room(upstream.context_window)
    room = Room(upstream.context_window, reply + OUR_TOOLS_TOKENS, reply)
    state = Fold(offload, room, OUR_TOOLS_TOKENS if policy.tools.inject is Inject.WHEN_OFFLOADING else 0)
    preview = min(PREVIEW, size)
    first = preview if size > offload.unseen_limit(upstream.context_window) else size
    state.add(Item(Role.USER, TASK, TASK, TASK))
    for request in range(1, MOST_REQUESTS):
        plan = state.plan()
        if plan.events:
            why = CAUSES[plan.events[-1].cause.name.lower()]
            total, left = plan.events[-1].total, plan.standing.total
            return f"it first acts at request {request}, where {total:,} tokens become {left:,} ({why})"
        state.add(Item(Role.ASSISTANT, CALL, CALL, CALL))
        state.add(Item(Role.TOOL, size, first, preview))
    return f"it does not act within {MOST_REQUESTS} requests; {waiting(state.plan(), offload)}"
