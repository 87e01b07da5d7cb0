"""`check --live`: asks every upstream of the policies for its models, and describes each answer in words."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from fnmatch import fnmatchcase

import msgspec

from proxy.dialects.messages import MESSAGES
from proxy.errors import UpstreamFault
from proxy.policies.tenants import KEY_HEADERS, Tenant
from proxy.policy import Policy, Upstream
from proxy.settings import Settings
from proxy.upstream.headers import url_for
from proxy.upstream.models import ModelList, ModelsClient

SECONDS = 5.0
"""How long to wait for one answer."""

AT_ONCE = 20
"""Most upstreams asked at once."""

FEW = 5
"""A list of at most so many models, such as a local server's, is shown in full."""

MOST = 20
"""Most models shown for one upstream."""


class Target(msgspec.Struct, frozen=True):
    """One upstream of one policy for one API, and the model names (globs) that the policy sends there."""

    policy: Policy
    api: str
    """The API that only this upstream is for; empty if it is for every other one."""
    upstream: Upstream
    models: tuple[str, ...]


class Answer(msgspec.Struct, frozen=True):
    """An upstream's answer in words, and whether requests can be expected to work."""

    good: bool
    text: str
    models: tuple[str, ...] = ()
    """One line for each model to show."""


def report(settings: Settings, policies: tuple[Policy, ...]) -> tuple[bool, str]:
    """Return whether every upstream answers and accepts its key, and a text that says so."""
    targets = [target for policy in policies for target in _targets(policy)]
    answers = asyncio.run(_answers(ModelsClient(settings.environment), targets))
    lines = ["", "upstreams, asked now"]
    for target, answer in zip(targets, answers, strict=True):
        lines.append(f"  {target.policy.tenant:<10} {target.upstream.base_url}: {answer.text}")
        lines += [f"  {'':<10}   {model}" for model in answer.models]
    return all(answer.good for answer in answers), "".join(f"{line}\n" for line in lines)


def _targets(policy: Policy) -> Iterator[Target]:
    """Yield a target for each distinct address and key in the policy."""
    named: dict[tuple[str, str | None], tuple[str, Policy, Upstream, list[str]]] = {}
    for api, one in (("", policy), *policy.by_api):
        for rule in (None, *one.rules):
            part = one if rule is None else rule
            upstream, summaries = part.upstream, part.offload.compress.model
            target = named.setdefault((upstream.base_url, upstream.api_key), (api, one, upstream, []))
            target[-1].extend(model for model in (rule and rule.model, summaries) if model)
    for api, one, upstream, models in named.values():
        yield Target(one, api, upstream, tuple(models))


async def _answers(client: ModelsClient, targets: list[Target]) -> list[Answer]:
    slots = asyncio.Semaphore(AT_ONCE)

    async def asked(target: Target) -> Answer:
        async with slots:
            try:
                return await _answer(client, target)
            except UpstreamFault as fault:
                return Answer(False, f"FAILED, {fault.detail or fault.message}")

    return await asyncio.gather(*(asked(target) for target in targets))


async def _answer(client: ModelsClient, target: Target) -> Answer:
    """Ask with the policy's key, trying each header that clients use until one works. Raises UpstreamFault."""
    upstream, header = target.upstream, b""
    anthropic = target.api == MESSAGES.name
    address = url_for(upstream.base_url, b"/v1", anthropic=anthropic)
    headers = [(MESSAGES.version_header, b"2023-06-01")] if anthropic else []
    if upstream.api_key is None:
        found = await client.models(address, headers, SECONDS)
    else:
        for header in KEY_HEADERS:
            credential = Tenant(target.policy, "", key_header=header).credential(upstream, anthropic=anthropic)
            found = await client.models(address, [*headers, *([credential] if credential else [])], SECONDS)
            if found.status not in (401, 403):
                break
    good, text = verdict(found.status, header.decode())
    count = f", {len(found.windows)} model{'s' * (len(found.windows) != 1)}" if found.windows else ""
    return Answer(good, text + count, tuple(_windows(target, found)))


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
    names = [
        name
        for name in found.windows
        if len(found.windows) <= FEW or any(fnmatchcase(name, model) for model in target.models)
    ]
    for name in names[:MOST]:
        window = found.windows[name]
        written = target.policy.for_model(name).upstream.context_window
        said = f"context window {window:,} tokens" if window else "context window not given"
        yield f"{name}: {said}" + (f", the policy says {written:,}" if written and written != window else "")
    if len(names) > MOST:
        yield f"and {len(names) - MOST} more"
