"""What `serve` says before it listens: four lines on a terminal, and everywhere what will not work and its cure."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from proxy.cli.check import offloads, prices
from proxy.cli.live import answers
from proxy.policies import Policies, load
from proxy.settings import Settings, strange_variables
from proxy.stores import describe, folder_of, open_store
from proxy.stores.guarded import Guarded

SECONDS = 2.0
"""How long the store may take to answer."""
MOST = 20
"""Most upstreams that are asked."""


def say(settings: Settings, *, terminal: bool) -> None:
    """Write to standard error what the caller should know. Raises UserMistake if the policies are bad."""
    policies = load(settings.policies, settings.environment, settings.upstream)
    fault = asyncio.run(_store_fault(settings))
    lines = [f"warning: {text}" for text in _warnings(settings, fault)]
    if terminal:
        lines += _four_lines(settings, policies, fault)
    with suppress(OSError, ValueError):  # a full disk below standard error is no reason not to serve
        sys.stderr.write("".join(f"{line}\n" for line in lines))
        sys.stderr.flush()


def _warnings(settings: Settings, fault: str | None) -> Iterator[str]:
    for name, meant in strange_variables(settings.environment):
        if not _is_named(name, settings.policies):
            yield f"{name} is no setting of the proxy" + (f"; did you mean {meant}?" if meant else "; unset it")
    if fault:
        yield (
            f"the store {describe(settings.store)} cannot be used ({fault}): requests are served, but summaries and "
            "the operations' files are lost; give --store a folder that you can write to, or a running store's URL"
        )


def _is_named(variable: str, policies: Path | None) -> bool:
    files = policies.glob("*.yaml") if policies else ()
    return any(variable in file.read_text(errors="replace") for file in files if file.is_file())


async def _store_fault(settings: Settings) -> str | None:
    """Return what is wrong with the store; of a folder only whether we can write to it, as no thread may hang in it."""
    if (folder := folder_of(settings.store)) is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            return "not a directory" if isinstance(error, FileExistsError) else error.strerror or str(error)
        return None if os.access(folder, os.W_OK | os.X_OK) else "Permission denied"
    store = Guarded(open_store(settings.store), warn=lambda *_: None)
    try:
        return await store.check(SECONDS)
    finally:
        await store.close()


def _four_lines(settings: Settings, policies: Policies, fault: str | None) -> Iterator[str]:
    yield f"upstream   {_upstreams(settings, policies)}"
    yield f"policy     {_policy(settings, policies)}"
    yield f"store      {describe(settings.store)}, {'DOES NOT WORK' if fault else 'works'}"
    yield f"dashboard  {settings.dashboard or 'off; --dashboard FILE shows every request and what it cost'}"


def _upstreams(settings: Settings, policies: Policies) -> str:
    said = [f"{one.upstream.base_url} {one.said}" for one in answers(settings, policies.all(), MOST)]
    cure = "; start it, or give --upstream" if any("DOES NOT ANSWER" in one for one in said) else ""
    return "; ".join(dict.fromkeys(said)) + cure


def _policy(settings: Settings, policies: Policies) -> str:
    found = policies.all()
    if len(found) > 1:
        return f"{len(found)} of {settings.policies}; `offload-proxy check` explains them"
    if not found:
        return f"{settings.policies}: none"
    return f"{settings.policies or 'built in'}: {offloads(found[0])}; {prices(found[0])}"
