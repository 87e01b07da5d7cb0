"""Asks the upstreams of policies for their models, and says each answer in words: for `check --live` and `serve`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from proxy.cli.words import several
from proxy.dialects.messages import MESSAGES
from proxy.errors import UpstreamFault
from proxy.policies.tenants import KEY_HEADERS, Tenant
from proxy.policy import Policy, Upstream
from proxy.settings import Settings
from proxy.upstream.client import ModelList, UpstreamClient, models
from proxy.upstream.headers import url_for

SECONDS = 3.0
"""How long to wait for one answer."""
FEW = 5
"""A list of at most so many models, such as a local server's, is shown in full."""


class Answer(NamedTuple):
    """What one upstream of one policy says. `good`: whether requests can be expected to work."""

    policy: Policy
    upstream: Upstream
    good: bool
    said: str
    models: Sequence[str] = ()
    """A line for each model that matters."""


def report(settings: Settings, policies: Sequence[Policy]) -> tuple[bool, str]:
    """Return whether every upstream answers and accepts its key, and a text that says so."""
    found, text = answers(settings, policies), "\nupstreams, asked now\n"
    for one in found:
        text += f"  {one.policy.tenant:<10} {one.upstream.base_url}: {one.said}\n"
        text += "".join(f"  {'':<10}   {model}\n" for model in one.models)
    return all(one.good for one in found), text


def answers(settings: Settings, policies: Sequence[Policy], most: int | None = None) -> list[Answer]:
    """Ask each distinct address with each key of a policy, at most so many."""
    pool = UpstreamClient(settings)
    targets = [target for policy in policies for target in _targets(policy)][:most]

    async def asked() -> list[Answer]:
        async with pool as client:
            return await asyncio.gather(*(_answer(client, *target) for target in targets))

    return asyncio.run(asked())


def _targets(policy: Policy) -> Iterable[tuple[Policy, Upstream, bool, list[str]]]:
    """Return each upstream of the policy, whether it is Anthropic's, and the models (globs) that go there."""
    found: dict[tuple[str, str | None], tuple[Policy, Upstream, bool, list[str]]] = {}
    for api, one in (("", policy), *policy.by_api):
        for rule in (None, *one.rules):
            part = rule or one
            upstream, summaries = part.upstream, part.offload.compress.model
            key = upstream.base_url, upstream.api_key
            target = found.setdefault(key, (one, upstream, api == MESSAGES.name, []))
            target[-1].extend(model for model in (rule and rule.model, summaries) if model)
    return found.values()


async def _answer(
    client: UpstreamClient, policy: Policy, upstream: Upstream, anthropic: bool, globs: list[str]
) -> Answer:
    """Ask with the policy's key, trying each header that clients use until one works."""
    address = url_for(upstream.base_url, b"/v1", anthropic=anthropic)
    headers = [(MESSAGES.version_header, b"2023-06-01")] if anthropic else []
    for header in (b"",) if upstream.api_key is None else KEY_HEADERS:
        credential = Tenant(policy, "", key_header=header).credential(upstream, anthropic=anthropic)
        try:
            found = await models(client, address, [*headers, *([credential] if credential else [])], SECONDS)
        except UpstreamFault as fault:
            return Answer(policy, upstream, False, f"DOES NOT ANSWER, {fault.detail or fault.message}")
        if found.status not in (401, 403):
            break
    good, text = verdict(found.status, header.decode())
    if found.status == 404 and not address.rstrip("/").endswith("/v1"):
        text += "; its address may lack /v1"
    count = f", {several(len(found.windows), 'model')}" if found.windows else ""
    return Answer(policy, upstream, good, text + count, list(_windows(policy, globs, found)))


def verdict(status: int, key_header: str) -> tuple[bool, str]:
    """Return whether this status is good, and its meaning. `key_header` names the policy key's header, or is empty."""
    if 200 <= status < 300:
        accepted = {"": "asks for no key", "authorization": "key accepted"}
        return True, f"reachable, {status}, " + accepted.get(key_header, f"key accepted, but only as `{key_header}`")
    if status in (401, 403):
        if key_header:
            return False, f"FAILED, {status}, the policy's key is refused"
        return True, f"reachable, {status}, asks for a key, which each caller has to send"
    if status < 400:
        return False, f"FAILED, {status}, and redirects are not followed"
    if status >= 500:
        return False, f"FAILED, {status}"
    unknown = ", so the key was not checked" if key_header else ""
    return True, f"reachable, {status}, gives no list of models{unknown}"


def _windows(policy: Policy, models: list[str], found: ModelList) -> Iterator[str]:
    for name, window in found.windows.items():
        if len(found.windows) <= FEW or any(fnmatchcase(name, model) for model in models):
            written = policy.for_model(name).upstream.context_window
            said = f"context window {window:,} tokens" if window else "context window not given"
            yield f"{name}: {said}" + (f", the policy says {written:,}" if written and written != window else "")
