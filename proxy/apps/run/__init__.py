"""`offload-proxy run -- COMMAND`: an agent behind a proxy of its own, which ends with it and leaves
nothing behind.

The command gets the proxy's address in its environment or its arguments. No file of the user or of
the agent is written: what moves, the log and the dashboard's rows are in our folder in the user's
state directory.
"""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

from msgspec.structs import replace

from proxy.apps.run import agents, command
from proxy.apps.run.serving import DRAIN, Serving
from proxy.errors import UserMistake
from proxy.settings import Settings, policy, rows_file

TENANT = "run"
"""The tenant of all runs, and the one namespace of their records: the tokens of a login change, the
user does not."""

NOTHING = (
    "nothing has been run with `offload-proxy run` yet; for what a running proxy moved, set OFFLOAD_API_KEY to the key "
    "with which your client calls it"
)

LOGIN = "logs in by subscription; its tokens change, so all runs of this user count as one client"


def run(settings: Settings, chosen: Namespace) -> int:
    """Run the command; returns its exit status. Raises UserMistake and ProxyError before it has
    begun."""
    given = chosen.command[1:] if chosen.command[:1] == ["--"] else chosen.command
    if not given:
        raise UserMistake("expected a command, as in: offload-proxy run -- claude")
    environment = settings.environment
    home = Path(environment["HOME"]) if environment.get("HOME") else None
    led = agents.lead(given, environment, home)
    if led.refusal:
        raise UserMistake(f"{led.name} is not started: {led.refusal}")
    if shutil.which(given[0], path=environment.get("PATH")) is None:
        there = os.path.sep in given[0] and Path(given[0]).exists()
        _say(f"{given[0]} cannot be run" if there else f"there is no command {given[0]}")
        return command.NOT_EXECUTABLE if there else command.NOT_FOUND
    with _folder(settings) as (folder, kept):
        terminal = sys.stderr.isatty()
        made = _settings(settings, chosen, led, folder)
        serving = Serving(made, folder / "run.log", link=terminal)
        if terminal:
            _say(_beginning(serving, led, kept))
        words, variables = led.at(serving.address)
        try:
            code = command.run(words, {**environment, **variables})
        except OSError as error:
            serving.end()
            _say(f"{given[0]} cannot be run: {error.strerror}")
            return command.NOT_EXECUTABLE
        totals = serving.end()
        if totals is None:
            _say(
                f"the proxy was killed before {led.name} ended; without `run`, {led.name} works as before"
            )
        else:
            shown = not kept and settings.policies is None and made.store == str(folder / "store")
            _say(totals.sentence(None if kept else folder / "run.log", recall=shown))
    return command.status_of(code)


@contextmanager
def archive(settings: Settings) -> Iterator[tuple[str, str]]:
    """Serve what the runs of this user moved. Yields the address, and a key that is good for this
    block alone."""
    if settings.state is None or not (settings.state / "run.log").exists():
        raise UserMistake(NOTHING)
    key = secrets.token_urlsafe()
    keys = [{"sha256": sha256(key.encode()).hexdigest()}]
    shown = policy(None, None, tenant=TENANT, share_namespace=True, api_keys=keys)
    store = str(settings.state / "store")
    made = replace(
        _alone(settings),
        port=0,
        built_in={TENANT: shown},
        policies=None,
        store=store,
        dashboard=None,
    )
    serving = Serving(made, settings.state / "run.log")
    try:
        yield serving.address, key
    finally:
        serving.end()


def _alone(settings: Settings) -> Settings:
    """Return the settings of a proxy for one user of this machine."""
    return replace(settings, host="127.0.0.1", workers=1, drain_timeout=DRAIN, log_format="json")


def _settings(settings: Settings, chosen: Namespace, led: agents.Led, folder: Path) -> Settings:
    """Return the settings of the run's proxy."""
    explicit = chosen.upstream or settings.environment.get("OFFLOAD_UPSTREAM")
    upstream = settings.upstream if explicit else led.openai
    apis = {} if explicit else {"upstreams": {"messages": {"base_url": led.anthropic}}}
    sections = {
        "upstream": {"base_url": upstream},
        "share_namespace": True,
        "tenant": TENANT,
        **apis,
    }
    store = (
        settings.store
        if chosen.store or settings.environment.get("OFFLOAD_STORE")
        else str(folder / "store")
    )
    about = str(settings.policies.resolve()) if settings.policies else f"{upstream} {apis}"
    rows = settings.dashboard if settings.dashboard_named else rows_file(folder, TENANT, about)
    return replace(
        _alone(settings),
        port=settings.port if chosen.port else 0,
        below=f"/{secrets.token_urlsafe()}",
        upstream=upstream,
        built_in={"default": policy(upstream, settings.profile, **sections)},
        store=store,
        dashboard=rows,
    )


@contextmanager
def _folder(settings: Settings) -> Iterator[tuple[Path, str]]:
    """Yield the folder for what we write, and why that is not kept, if it is not."""
    try:
        if settings.state is None:
            raise OSError(0, "there is no HOME")
        settings.state.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (settings.state / "run.log").open("ab"):
            pass
    except OSError as error:
        why = f"{settings.state}: {error.strerror}" if settings.state else error.strerror
        with tempfile.TemporaryDirectory(prefix="offload-run-") as made:
            yield Path(made), f"what moves is kept until the end only ({why})"
    else:
        yield settings.state, ""


def _beginning(serving: Serving, led: agents.Led, kept: str) -> str:
    """Return the line at the start."""
    parts = [
        f"dashboard {serving.link}"
        if serving.link
        else f"in front of {led.name} at {serving.address}"
    ]
    if led.login:
        parts.append(f"{led.name} {LOGIN}")
    return "; ".join(filter(None, (*parts, kept)))


def _say(line: str) -> None:
    with suppress(OSError, ValueError):
        sys.stderr.write(f"offload-proxy: {line}\n")
        sys.stderr.flush()
