"""The `store` command: shows and cleans up the store, and forgets a namespace in it and beside
it."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Coroutine
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from proxy import policies
from proxy.apps.dashboard import fleet
from proxy.apps.dashboard.rows import Rows
from proxy.apps.offline import opened, retention_of
from proxy.apps.operations.call import name_of
from proxy.errors import DashboardFault, UserMistake
from proxy.policies.tenants import described, identify, namespace_as
from proxy.settings import ROWS, Settings
from proxy.stores import Entry, Store, is_part, namespace_of
from proxy.terminal import duration, harmless, in_units, several, table

SETTLED = 2.0
"""Seconds until `forget` looks a second time for what a proxy was still writing."""

T = TypeVar("T")


def _run(settings: Settings, work: Callable[[Store], Coroutine[Any, Any, T]]) -> T:
    """Return what `work` does with the store. Raises StoreFault and UserMistake."""

    async def run() -> T:
        async with opened(settings) as store:
            return await work(store)

    return asyncio.run(run())


async def _found(store: Store, prefix: str) -> list[Entry]:
    return [entry async for entry in store.list(prefix)]


def _taken(check: Callable[[str], T], text: str) -> T:
    """Return `check(text)`. Raises UserMistake if it raises ValueError."""
    try:
        return check(text)
    except ValueError as error:
        raise UserMistake(str(error)) from error


def _check_namespace(text: str) -> None:
    if not is_part(text):
        raise UserMistake(f"{text!r}: expected a namespace, as `store ls` lists them")


def ls(settings: Settings, chosen: Namespace) -> int:
    """List namespaces with their kinds of records, or the records of one namespace, the newest
    last."""
    if chosen.namespace:
        _check_namespace(chosen.namespace)
    prefix = f"{chosen.namespace}/" if chosen.namespace else ""
    now = time.time()
    entries = _run(settings, lambda store: _found(store, prefix))
    if not entries:
        sys.stderr.write("no records\n")
        return 0
    groups = defaultdict(list)
    for entry in sorted(entries, key=lambda entry: (entry.modified, entry.key)):
        owner, kind, part = entry.key.split("/", 2)
        groups[(kind, part) if prefix else (owner, kind)].append(entry)
    if prefix:
        rows = [["KIND", "SIZE", "LAST USED", "KEY", "PATH"]]
        for (kind, part), [entry] in groups.items():
            # the file's name for its owner
            path = harmless(name_of(part) or "") if kind == "files" else ""
            rows.append(
                [kind, in_units(entry.size), duration(now - entry.modified), entry.key, path]
            )
    else:
        rows = [["NAMESPACE", "KIND", "RECORDS", "SIZE", "LAST USED"]]
        for (owner, kind), group in sorted(groups.items()):
            size = sum(entry.size for entry in group)
            newest = group[-1].modified
            rows.append([owner, kind, str(len(group)), in_units(size), duration(now - newest)])
    sys.stdout.write(table(rows))
    return 0


def gc(settings: Settings, chosen: Namespace) -> int:
    """Delete records older than `--older-than`, or else older than their tenant's retention."""
    age = None if chosen.older_than is None else _taken(policies.duration, chosen.older_than)
    kept_for = retention_of(settings) if chosen.older_than is None else lambda namespace: age

    async def delete_old(store: Store) -> tuple[int, list[Entry]]:
        now = time.time()
        entries = await _found(store, "")
        limits = ((entry, kept_for(namespace_of(entry.key))) for entry in entries)
        old = [
            entry for entry, limit in limits if limit is not None and now - entry.modified > limit
        ]
        if not chosen.dry_run:
            await store.expire(old)
        return len(entries), old

    count, old = _run(settings, delete_old)
    done = "would delete" if chosen.dry_run else "deleted"
    size = in_units(sum(entry.size for entry in old))
    sys.stdout.write(f"{done} {len(old)} of {count} records, {size}\n")
    return 0


def namespace(settings: Settings, chosen: Namespace) -> int:
    """Write the namespace of the caller whose key is on standard input, or of callers without one;
    with `--identity`, of the caller with that identity.

    Raises Unauthorized and UserMistake.
    """
    key = sys.stdin.buffer.readline().strip()
    sent = [(b"authorization", b"Bearer " + key)] if key else []
    tenant = identify(sent, policies.load(settings.policies, settings.environment))
    found = (
        tenant.namespace
        if chosen.identity is None
        else namespace_as(tenant, chosen.identity.strip())
    )
    if found is None:
        by = described(tenant.policy.identity, listed=tenant.listed)
        raise UserMistake(f"--identity: nobody is known to {tenant.name} by this value: {by}")
    sys.stdout.write(f"{found}\n")
    return 0


# -- forget ----------------------------------------------------------------------------------------


class Kept(NamedTuple):
    """How much is kept of a namespace. `rows` is None if the dashboard has neither rows nor
    sums."""

    records: int
    rows: int | None

    def __bool__(self) -> bool:
        return bool(self.records or self.rows is not None)

    def __str__(self) -> str:
        rows = (
            ""
            if self.rows is None
            else f", {several(self.rows, 'row')} of the dashboard and their sums"
        )
        return several(self.records, "record") + rows


def forget(settings: Settings, chosen: Namespace) -> int:
    """Delete all that is kept of a namespace, and say what that was; ask first, unless `--yes` is
    given.

    Returns the exit code: 1 if there is nothing, if the answer was no, or if more may come. No
    request waits until the texts that it moved are stored, so a proxy may go on writing after the
    caller's last one. Raises UserMistake and StoreFault.
    """
    namespace = chosen.namespace
    _check_namespace(namespace)
    kept = _counted(settings, namespace, delete=False)
    if kept and not chosen.yes:
        if not sys.stdin.isatty():
            raise UserMistake(
                f"this would delete {kept}: there is no terminal to ask, so add --yes"
            )
        sys.stdout.write(f"{kept}\nDelete all of this of {namespace} for good? [y/N] ")
        sys.stdout.flush()
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            return 1
    # Also where there is nothing here: another replica may have rows.
    if not (gone := _counted(settings, namespace, delete=True)):
        sys.stderr.write(f"nothing is kept of {namespace}\n")
        return 1
    sys.stdout.write(f"deleted {gone}\n")
    time.sleep(SETTLED)
    if late := _counted(settings, namespace, delete=True):
        sys.stdout.write(f"deleted {late}\n")
        sys.stderr.write(
            f"more of {namespace} may come: end its conversations, then run this again\n"
        )
    return 1 if late else 0


def _dashboards(settings: Settings) -> list[Path]:
    """Return the files of dashboards: the one that is named, else those of this user's proxies.
    Raises UserMistake."""
    if not settings.dashboard_named:
        return sorted(settings.state.glob(ROWS)) if settings.state else []
    if settings.dashboard is None or settings.dashboard.is_file():
        return [settings.dashboard] if settings.dashboard else []
    raise UserMistake(
        f"--dashboard {settings.dashboard}: there is no such file. Name that of `serve --dashboard`; "
        "without this flag, those of your own proxies are used"
    )


def _counted(settings: Settings, namespace: str, *, delete: bool) -> Kept:
    """Return how much is kept, and delete it if told to. Raises UserMistake and StoreFault."""
    rows = None
    dashboards = _dashboards(settings)
    for path in dashboards:
        try:
            with closing(Rows(path, settings.dashboard_limit)) as table:
                found = table.count(namespace)
                rows = rows if found is None else (rows or 0) + found
                if delete:
                    table.forget(namespace, time.time())
        except (DashboardFault, sqlite3.Error) as error:
            raise UserMistake(
                f"--dashboard {path}: {error}; try again, or leave its rows as they are with --dashboard off"
            ) from error

    async def count(store: Store) -> int:
        keys = [entry.key for entry in await _found(store, f"{namespace}/")]
        if delete and dashboards:  # for the dashboards of other replicas
            await store.put(fleet.forgotten(namespace, time.time()), b"")
        if delete:
            await store.delete(*keys)
        return len(keys)

    return Kept(_run(settings, count), rows)
