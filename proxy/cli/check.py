"""What policies mean, what their upstreams answer, and what will not work: for `check` and the
start of `serve`."""

from __future__ import annotations

import asyncio
import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from proxy.dialects.messages import MESSAGES
from proxy.errors import UpstreamFault
from proxy.plan.forecast import CAUSES, UNSEEN, waiting
from proxy.plan.plan import Item, Role, Room
from proxy.plan.planner import Fold
from proxy.plan.prices import price_of
from proxy.policies import Policies, load, reference, schema
from proxy.policies.tenants import CHECKED, KEY_HEADERS, Tenant, described
from proxy.policy import Inject, ListedOffload, Mode, Policy, Upstream
from proxy.requests.planned import OUR_TOOLS_TOKENS
from proxy.settings import Settings, refuse_loop, strange_variables
from proxy.stores import describe, folder_of, open_store
from proxy.stores.guarded import Guarded
from proxy.terminal import duration, several
from proxy.upstream.client import UpstreamClient, models
from proxy.upstream.headers import url_for

RESULTS = (300, 1_000, 4_000)
"""Tokens of the results in the sessions that are simulated."""
INJECTED = {
    Inject.AGENTS: "for agents from the start",
    Inject.ALWAYS: "in every request",
    Inject.WHEN_OFFLOADING: "once something has moved",
    Inject.NEVER: "never",
}
"""When requests get our tools."""
TASK = 200
CALL = 60
PREVIEW = 70
GLIMPSE = 560
"""Tokens of their task, of each call with what the model says beside it, and of a result that has
moved, which leaves more where the model has not seen it."""
MOST_REQUESTS = 300
UPSTREAM_SECONDS = 3.0
STORE_SECONDS = 2.0
"""How long one answer of an upstream may take, and the store's."""
MOST = 20
"""Most upstreams that `serve` asks."""
IN_FULL = 5
"""A list of at most so many models, such as a local server's, is shown in full, and so are so many
policies."""


def check(settings: Settings, chosen: Namespace) -> int:
    """Write what the policies of a directory mean and, with `--live`, what their upstreams answer;
    returns 1 if one of these does not do as requests need it. Raises PolicyError if a policy is
    bad.

    Where no directory is named and there is no `policies`, these are the built-in ones, as for
    `serve`.
    """
    if chosen.schema or chosen.reference:
        sys.stdout.write(schema().decode() if chosen.schema else reference())
        return 0
    refuse_loop(settings)
    directory = chosen.directory
    where = Path(directory) if directory is not None else settings.policies or Path("policies")
    built_in = directory is None and settings.policies is None and not where.exists()
    policies = load(
        None if built_in else where, settings.environment, settings.upstream, settings.built_in
    )
    full = chosen.full or len(policies.all()) <= IN_FULL
    lines = _lines("built in" if built_in else str(where), policies, full=full)
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    if not chosen.live:
        return 0
    found = answers(settings, policies.all())
    sys.stdout.write("\nupstreams, asked now\n")
    for one in found:
        sys.stdout.write(f"  {one.policy.tenant:<10} {one.upstream.base_url}: {one.sentence}\n")
        sys.stdout.write("".join(f"  {'':<10}   {model}\n" for model in one.models))
    return 0 if all(one.good for one in found) else 1


def _lines(where: str, policies: Policies, *, full: bool) -> Iterator[str]:
    warned = len(policies.warnings)
    verdict = f"{several(warned, 'warning')} below" if warned else "all good"
    yield f"{where}: {several(len(policies.all()), 'policy', 'policies')}, {verdict}"
    if full:
        for policy in policies.all():
            yield f"\n{policy.tenant}"
            yield from (f"  {title:<10} {text}" for title, text in _facts(policy, policies))
    else:
        width = max(len(policy.tenant) for policy in policies.all())
        yield "\n--full explains each.\n"
        for policy in policies.all():
            _, callers = next(_facts(policy, policies))
            yield f"{policy.tenant:<{width}}  {callers}, {policy.upstream.base_url}, {_briefly(policy)}"
    if policies.warnings:
        yield ""
        yield from (f"warning: {warning}" for warning in policies.warnings)
    if policies.default is None:
        yield "\nCallers with other keys, or none, get 401: there is no default.yaml."


def _facts(policy: Policy, policies: Policies) -> Iterator[tuple[str, str]]:
    keys = sum(owner is policy for owner in policies.by_digest.values())
    default = policy is policies.default
    yield "callers", "everybody whom no other file names" if default else several(keys, "key")
    for title, one in {"upstream": policy, **policy.by_api}.items():
        upstream = one.upstream
        yield (
            title,
            f"{upstream.base_url} with {'the policy' if upstream.api_key else 'the caller'}'s key",
        )
    yield from _by_api("", policy, policy.by_api)
    for index, rule in enumerate(policy.rules):
        if not policy.shadowing(index):  # else a warning says that it is for no model
            model = rule.model.rstrip("*")
            named = {api: own.rules[index].for_model(model) for api, own in policy.by_api.items()}
            yield from _by_api(f"{rule.model}: ", rule.for_model(model), named)
    kept = (
        "for ever" if policy.retention is None else f"for {duration(policy.retention, exact=True)}"
    )
    yield (
        "records",
        f"kept {kept}, one namespace {'for all keys' if policy.share_namespace else 'per key'}",
    )
    if not policy.share_namespace:
        yield "identity", described(policy.identity, listed=not default)
    if policy.capture:
        yield "capture", "whole requests, if `serve --capture` gives them room"
    if policy.relay:
        yield "relay", "also " + ", ".join(policy.relay)


def _by_api(whose: str, part: Policy, by_api: Mapping[str, Policy]) -> Iterator[tuple[str, str]]:
    """Say what a policy does, and what each API's own does where that differs."""
    acts = list(_acts(whose, part))
    yield from acts
    for api, own in by_api.items():
        if (other := list(_acts(f"{whose}{api}: ", own)))[1:] != acts[1:]:
            yield from other


def _acts(whose: str, part: Policy) -> Iterator[tuple[str, str]]:
    """Say what a policy does, or what is `whose` of it, and when."""
    yield "offload", whose + offloads(part)
    if part.offload.mode is not Mode.OFF:
        yield "prices", prices(part)
        for size in RESULTS:
            yield "results", f"of {size:,} tokens: {first_event(part, size)}"


def _briefly(policy: Policy) -> str:
    offload = policy.offload
    return "off" if offload.mode is Mode.OFF else f"{offload.mode}, {offload.profile}"


def offloads(policy: Policy) -> str:
    offload = policy.offload
    if offload.mode is Mode.OFF:
        return "off"
    ceiling = Room(policy.upstream.context_window).ceiling(offload.max_total_tokens)
    acts = "would move" if offload.mode is Mode.OBSERVE else "moves"
    moves = (
        ""
        if offload.mode is Mode.COMPRESS
        else f"; {acts} results above {offload.max_tool_message_tokens:,}"
    )
    return (
        f"{offload.mode}, {offload.profile}, ceiling {ceiling:,} tokens of history{moves}; "
        f"grep and read_file {INJECTED[policy.tools.inject]}"
    )


def prices(policy: Policy) -> str:
    offload = policy.offload
    listed = (
        offload.prices if isinstance(offload, ListedOffload) else price_of(policy.upstream.base_url)
    )
    same = (offload.cached_read, offload.cache_write) == (listed.cached_read, listed.cache_write)
    source = f"{listed.models}: {listed.source}" if same else "this policy"
    return f"plain input 1, cached {offload.cached_read:g}, written to the cache {offload.cache_write:g} ({source})"


def first_event(policy: Policy, size: int) -> str:
    """Say when an agent's session whose results have so many tokens is first changed."""
    acts = "would first act" if policy.offload.mode is Mode.OBSERVE else "first acts"
    policy = policy.planning.for_request(has_tools=True)
    upstream = policy.upstream
    offload = policy.offload
    reply = upstream.reply_room(upstream.context_window)
    room = Room(upstream.context_window, reply + OUR_TOOLS_TOKENS, reply)
    state = Fold(
        offload, room, OUR_TOOLS_TOKENS if policy.tools.inject is Inject.WHEN_OFFLOADING else 0
    )
    stays = offload.excludes("")
    preview = size if stays else min(PREVIEW, size)
    large = not stays and size > offload.unseen_limit(upstream.context_window)
    first = min(GLIMPSE, size) if large else size
    state.add(Item(Role.USER, TASK, TASK, TASK))
    for request in range(1, MOST_REQUESTS):
        plan = state.plan()
        if plan.moves or plan.boundaries:
            left = plan.standing.total
            total = left + size - first
            why = CAUSES[UNSEEN]
            if plan.events:
                total = plan.events[-1].total
                why = CAUSES[plan.events[-1].cause.name.lower()]
            return f"it {acts} at request {request}, where {total:,} tokens become {left:,} ({why})"
        state.add(Item(Role.ASSISTANT, CALL, CALL, CALL))
        state.add(Item(Role.TOOL, size, first, preview))
    return f"it does not act within {MOST_REQUESTS} requests; {waiting(state.plan(), offload)}"


# -- what upstreams answer -------------------------------------------------------------------------


class Answer(NamedTuple):
    """What one upstream of one policy says. `good`: whether requests can be expected to work."""

    policy: Policy
    upstream: Upstream
    good: bool
    sentence: str
    models: Sequence[str] = ()
    """A line for each model that matters."""


def answers(
    settings: Settings, policies: Sequence[Policy], most: int | None = None
) -> list[Answer]:
    """Ask each distinct address with each key of a policy for its models, at most so many."""
    targets: dict[tuple[str, str, str | None], tuple[Policy, Upstream, bool, list[str]]] = {}
    for policy in policies:
        for api, one in {"": policy, **policy.by_api}.items():
            for part in (one, *one.rules):
                upstream = part.upstream
                key = policy.tenant, upstream.base_url, upstream.api_key
                *_, globs = targets.setdefault(key, (one, upstream, api == MESSAGES.name, []))
                globs += filter(
                    None, ("" if part is one else part.model, part.offload.compress.model)
                )

    async def asked() -> list[Answer]:
        async with UpstreamClient(settings) as client:
            return await asyncio.gather(
                *(_answer(client, *target) for target in [*targets.values()][:most])
            )

    return asyncio.run(asked())


async def _answer(
    client: UpstreamClient, policy: Policy, upstream: Upstream, anthropic: bool, globs: list[str]
) -> Answer:
    """Ask with the policy's key, trying each header that clients use until one works. `globs` name
    the models that matter."""
    address = url_for(upstream.base_url, b"/v1", anthropic=anthropic)
    headers = [(MESSAGES.version_header, b"2023-06-01")] if anthropic else []
    for header in (b"",) if upstream.api_key is None else KEY_HEADERS:
        credential = Tenant(policy, "", key_header=header).credential(upstream, anthropic=anthropic)
        try:
            found = await models(
                client, address, [*headers, *([credential] if credential else [])], UPSTREAM_SECONDS
            )
        except UpstreamFault as fault:
            return Answer(
                policy, upstream, False, f"DOES NOT ANSWER, {fault.detail or fault.message}"
            )
        if found.status not in (401, 403):
            break
    good, text = verdict(found.status, header.decode())
    if found.status == 404 and not address.rstrip("/").endswith("/v1"):
        text += "; its address may lack /v1"
    lines = []
    for name, window in found.windows.items():
        if len(found.windows) <= IN_FULL or any(fnmatchcase(name, glob) for glob in globs):
            written = policy.for_model(name).upstream.context_window
            said = f"context window {window:,} tokens" if window else "context window not given"
            lines.append(
                f"{name}: {said}"
                + (f", the policy says {written:,}" if written not in (None, window) else "")
            )
    count = f", {several(len(found.windows), 'model')}" if found.windows else ""
    return Answer(policy, upstream, good, text + count, lines)


def verdict(status: int, key_header: str) -> tuple[bool, str]:
    """Return whether this status is good, and its meaning. `key_header` names the policy key's
    header, or is empty."""
    if 200 <= status < 300:
        accepted = {"": "asks for no key", "authorization": "key accepted"}
        return True, f"reachable, {status}, " + accepted.get(
            key_header, f"key accepted, but only as `{key_header}`"
        )
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


# -- what `serve` says before it listens -----------------------------------------------------------


def serve(settings: Settings, chosen: Namespace) -> int:
    """Serve, after saying what will not work. Raises UserMistake if upstream is this proxy or a
    policy is bad."""
    from proxy.apps import dashboard, parts  # these take a second, which `check` does not need
    from proxy.server import runner

    refuse_loop(settings)
    terminal = sys.stderr.isatty()
    if terminal and not (chosen.log_format or settings.environment.get("OFFLOAD_LOG_FORMAT")):
        settings = replace(settings, log_format="short")
    say(settings, terminal=terminal)
    return runner.serve(settings, [*parts.PARTS.values()], partial(dashboard.invitation, settings))


def say(settings: Settings, *, terminal: bool) -> None:
    """Write to standard error what will not work and its cure and, on a `terminal`, four lines of
    what is set up.

    Raises UserMistake if the policies are bad.
    """
    policies = load(settings.policies, settings.environment, settings.upstream, settings.built_in)
    fault = asyncio.run(_store_fault(settings))
    lines = []
    files = (
        [file for file in settings.policies.glob("*.yaml") if file.is_file()]
        if settings.policies
        else []
    )
    for name, meant in strange_variables(settings.environment):
        if not any(name in file.read_text(errors="replace") for file in files):
            cure = f"; did you mean {meant}?" if meant else "; unset it"
            lines.append(f"warning: {name} is no setting of the proxy{cure}")
    if fault:
        lines.append(
            f"warning: the store {describe(settings.store)} cannot be used ({fault}): requests are served, but "
            "summaries and the operations' files are lost; give --store a folder that you can write to, or a running "
            "store's URL"
        )
    if terminal:
        lines += _four_lines(settings, policies, fault)
    # a full disk below standard error is no reason not to serve
    with suppress(OSError, ValueError):
        sys.stderr.write("".join(f"{line}\n" for line in lines))
        sys.stderr.flush()


async def _store_fault(settings: Settings) -> str | None:
    """Return what is wrong with the store; of a folder only whether we can write to it, as no
    thread may hang in it."""
    if (folder := folder_of(settings.store)) is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            return (
                "not a directory"
                if isinstance(error, FileExistsError)
                else error.strerror or str(error)
            )
        return None if os.access(folder, os.W_OK | os.X_OK) else "Permission denied"
    kept = open_store(settings.store, lambda namespace: CHECKED)
    store = Guarded(kept, warn=lambda *_: None)
    try:
        return await store.check(STORE_SECONDS)
    finally:
        await store.close()


def _four_lines(settings: Settings, policies: Policies, fault: str | None) -> Iterator[str]:
    found = policies.all()
    said = [f"{one.upstream.base_url} {one.sentence}" for one in answers(settings, found, MOST)]
    cure = "; start it, or give --upstream" if any("DOES NOT ANSWER" in one for one in said) else ""
    yield f"upstream   {'; '.join(dict.fromkeys(said))}{cure}"
    if len(found) == 1:
        brief = f"{settings.policies or 'built in'}: {_briefly(found[0])}"
        yield f"policy     {brief}; `offload-proxy check` explains it in full"
    else:
        many = f"{len(found)} of {settings.policies}"
        yield f"policy     {many}; `offload-proxy check --full` explains each"
    yield f"store      {describe(settings.store)}, {'DOES NOT WORK' if fault else 'works'}"
    off = "off; --dashboard FILE shows every request and what it cost"
    yield f"dashboard  {f'{settings.dashboard}; --dashboard off ends it' if settings.dashboard else off}"
