"""`check --live`: asks every upstream of the policies for its models, and describes each answer in words."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import NamedTuple

from proxy.cli.words import several
from proxy.dialects.messages import MESSAGES
from proxy.errors import UpstreamFault
from proxy.policies.tenants import KEY_HEADERS, Tenant
from proxy.policy import Policy, Upstream
from proxy.settings import Settings
from proxy.upstream.headers import url_for
from proxy.upstream.models import ModelList, ModelsClient

SECONDS = 5.0
"""How long to wait for one answer."""

FEW = 5
"""A list of at most so many models, such as a local server's, is shown in full."""


class Target(NamedTuple):
    """One upstream of one policy, and the model names (globs) that the policy sends there. `api`: the only API that it
    is for; empty if it is for every other one."""

    policy: Policy
    api: str
    upstream: Upstream
    models: list[str]


def report(settings: Settings, policies: tuple[Policy, ...]) -> tuple[bool, str]:
    """Return whether every upstream answers and accepts its key, and a text that says so."""
    targets = [target for policy in policies for target in _targets(policy)]
    client = ModelsClient(settings.environment)

    async def asked() -> list[tuple[bool, list[str]]]:
        return await asyncio.gather(*(_answer(client, target) for target in targets))

    answers, text = asyncio.run(asked()), "\nupstreams, asked now\n"
    for target, (_, (first, *models)) in zip(targets, answers, strict=True):
        text += f"  {target.policy.tenant:<10} {target.upstream.base_url}: {first}\n"
        text += "".join(f"  {'':<10}   {model}\n" for model in models)
    return all(good for good, _ in answers), text


def _targets(policy: Policy) -> Iterable[Target]:
    """Return a target for each distinct address and key in the policy."""
    found: dict[tuple[str, str | None], Target] = {}
    for api, one in (("", policy), *policy.by_api):
        for rule in (None, *one.rules):
            part = rule or one
            upstream, summaries = part.upstream, part.offload.compress.model
            target = found.setdefault((upstream.base_url, upstream.api_key), Target(one, api, upstream, []))
            target.models.extend(model for model in (rule and rule.model, summaries) if model)
    return found.values()


async def _answer(client: ModelsClient, target: Target) -> tuple[bool, list[str]]:
    """Ask with the policy's key, trying each header that clients use until one works. Return whether requests can be
    expected to work, and the answer in words."""
    upstream, anthropic = target.upstream, target.api == MESSAGES.name
    address = url_for(upstream.base_url, b"/v1", anthropic=anthropic)
    headers = [(MESSAGES.version_header, b"2023-06-01")] if anthropic else []
    for header in (b"",) if upstream.api_key is None else KEY_HEADERS:
        credential = Tenant(target.policy, "", key_header=header).credential(upstream, anthropic=anthropic)
        try:
            found = await client.models(address, [*headers, *([credential] if credential else [])], SECONDS)
        except UpstreamFault as fault:
            return False, [f"FAILED, {fault.detail or fault.message}"]
        if found.status not in (401, 403):
            break
    good, text = verdict(found.status, header.decode())
    count = f", {several(len(found.windows), 'model')}" if found.windows else ""
    return good, [text + count, *_windows(target, found)]


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


def _windows(target: Target, found: ModelList) -> Iterator[str]:
    """Yield the context windows of the models that the policy names, or of all models if there are few."""
    for name, window in found.windows.items():
        if len(found.windows) <= FEW or any(fnmatchcase(name, model) for model in target.models):
            written = target.policy.for_model(name).upstream.context_window
            said = f"context window {window:,} tokens" if window else "context window not given"
            yield f"{name}: {said}" + (f", the policy says {written:,}" if written and written != window else "")
