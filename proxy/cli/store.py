"""The `store` command: shows and cleans up the store, and forgets a namespace in it and beside it."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from typing import NamedTuple, TypeVar

from proxy import policies, regex
from proxy.cli.words import duration, harmless, in_units, several, table
from proxy.dashboard import fleet
from proxy.dashboard.rows import Rows
from proxy.errors import DashboardFault, UserMistake
from proxy.operations.call import name_of
from proxy.policies.tenants import identify, retention
from proxy.requests import capture
from proxy.settings import Settings
from proxy.stores import (
    Entry,
    Retention,
    Store,
    checked,
    expires_by_itself,
    folder_of,
    is_part,
    namespace_of,
    open_store,
)
from proxy.tools.search import TooSlow, in_data

AT_ONCE = 32
"""Records that are deleted at once."""
SETTLED = 2.0
"""Seconds until `forget` looks a second time for what a proxy was still writing."""

T = TypeVar("T")


@asynccontextmanager
async def _opened(settings: Settings) -> AsyncIterator[Store]:
    """Raises StoreFault and UserMistake."""
    store = _open(settings)
    try:
        yield store
    finally:
        await store.close()


def _open(settings: Settings) -> Store:
    """Open the store. Redis knows a record's remaining time to live; its age follows from its tenant's retention."""
    folder = folder_of(settings.store)
    if folder is not None and not os.path.lexists(folder):
        raise UserMistake(f"there is no folder {folder}; `serve` makes it, or name another with --store")
    return open_store(
        settings.store, _retention(settings) if expires_by_itself(settings.store) else lambda namespace: None
    )


def _retention(settings: Settings) -> Retention:
    loaded = policies.load(settings.policies, settings.environment)
    return lambda namespace: retention(namespace, loaded)


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


async def ls(settings: Settings, namespace: str | None) -> int:
    """List namespaces with their kinds of records, or the records of one namespace, the newest last."""
    if namespace:
        _check_namespace(namespace)
    now = time.time()
    async with _opened(settings) as store:
        entries = await _found(store, f"{namespace}/" if namespace else "")
    if not entries:
        sys.stderr.write("no records\n")
        return 0
    groups = defaultdict(list)
    for entry in sorted(entries, key=lambda entry: (entry.modified, entry.key)):
        owner, kind, part = entry.key.split("/", 2)
        groups[(kind, part) if namespace else (owner, kind)].append(entry)
    if namespace:
        rows = [["KIND", "SIZE", "LAST USED", "KEY", "PATH"]]
        for (kind, part), [entry] in groups.items():
            path = harmless(name_of(part) or "") if kind == "files" else ""  # the file's name for its owner
            rows.append([kind, in_units(entry.size), duration(now - entry.modified), entry.key, path])
    else:
        rows = [["NAMESPACE", "KIND", "RECORDS", "SIZE", "LAST USED"]]
        for (owner, kind), group in sorted(groups.items()):
            size, newest = sum(entry.size for entry in group), group[-1].modified
            rows.append([owner, kind, str(len(group)), in_units(size), duration(now - newest)])
    sys.stdout.write(table(rows))
    return 0


async def cat(settings: Settings, key: str) -> int:
    """Write one record's bytes. Exits with 1 if there is none."""
    _taken(checked, key)
    async with _opened(settings) as store:
        value = await store.get(key)
    if value is None:
        sys.stderr.write(f"offload-proxy: no record {key}\n")
        return 1
    sys.stdout.buffer.write(value)
    return 0


async def grep(settings: Settings, pattern: str, prefix: str) -> int:
    """Write `KEY:LINE:TEXT` for each matching line. Exits with 1 if none matches, like grep."""
    find, found = _taken(regex.compile, pattern), False
    async with _opened(settings) as store:
        try:
            for entry in await _found(store, prefix):
                text = (await store.get(entry.key) or b"").decode("utf-8", "replace")
                for match in in_data(entry.key, text.encode(), find):
                    found = True
                    sys.stdout.write(f"{entry.key}:{match.line}:{harmless(match.text)}\n")
        except TooSlow as error:
            raise UserMistake(str(error)) from error
    return 0 if found else 1


async def gc(settings: Settings, older_than: str | None, *, dry_run: bool) -> int:
    """Delete records older than `older_than`, or else older than their tenant's retention."""
    age = _taken(policies.duration, older_than) if older_than is not None else None
    kept_for = _retention(settings) if older_than is None else lambda namespace: age
    async with _opened(settings) as store:
        now, entries = time.time(), await _found(store, "")
        limits = ((entry, kept_for(namespace_of(entry.key))) for entry in entries)
        old = [entry for entry, limit in limits if limit is not None and now - entry.modified > limit]
        if not dry_run:
            await store.delete(*(entry.key for entry in old))
    count, size = len(old), in_units(sum(entry.size for entry in old))
    sys.stdout.write(f"{'would delete' if dry_run else 'deleted'} {count} of {len(entries)} records, {size}\n")
    return 0


def namespace_of_key(settings: Settings, key: bytes) -> str:
    """Return the namespace of the caller with this key, or of callers without one. Raises Unauthorized."""
    sent = [(b"authorization", b"Bearer " + key)] if key else []
    return identify(sent, policies.load(settings.policies, settings.environment)).namespace


# -- forget ------------------------------------------------------------------------------------------------------------


class Kept(NamedTuple):
    """How much is kept of a namespace. `rows` is None if the dashboard has neither rows nor sums."""

    records: int
    files: int
    rows: int | None

    def __bool__(self) -> bool:
        return bool(self.records or self.files or self.rows is not None)

    def __str__(self) -> str:
        rows = "" if self.rows is None else f", {several(self.rows, 'row')} of the dashboard and their sums"
        return f"{several(self.records, 'record')}, {several(self.files, 'file')} of captured requests{rows}"


def forget(settings: Settings, namespace: str, *, sure: bool) -> int:
    """Delete all that is kept of a namespace, and say what that was; ask first, unless `sure`.

    Returns the exit code: 1 if there is nothing, if the answer was no, or if more may come. No request waits until the
    texts that it moved are stored, so a proxy may go on writing after the caller's last one. Raises UserMistake and
    StoreFault.
    """
    _check_namespace(namespace)
    kept = asyncio.run(_kept(settings, namespace, delete=False))
    if kept and not sure:
        if not sys.stdin.isatty():
            raise UserMistake(f"this would delete {kept}: give --yes, as there is no terminal to ask")
        sys.stdout.write(f"{kept}\nDelete all of this of {namespace} for good? [y/N] ")
        sys.stdout.flush()
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            return 1
    # Also where there is nothing here: another replica may have rows.
    if not (gone := asyncio.run(_kept(settings, namespace, delete=True))):
        sys.stderr.write(f"nothing is kept of {namespace}\n")
        return 1
    sys.stdout.write(f"deleted {gone}\n")
    time.sleep(SETTLED)
    if late := asyncio.run(_kept(settings, namespace, delete=True)):
        sys.stdout.write(f"deleted {late}\n")
        sys.stderr.write(f"more of {namespace} may come: end its conversations, then run this again\n")
    return 1 if late else 0


async def _kept(settings: Settings, namespace: str, *, delete: bool) -> Kept:
    """Return how much is kept, and delete it if told to. Raises UserMistake and StoreFault."""
    files, rows = 0, None
    if settings.capture is not None:
        try:
            files, _ = capture.kept(settings.capture, namespace, delete=delete)
        except OSError as error:
            raise UserMistake(f"--capture {settings.capture}: {error.strerror}") from error
    if settings.dashboard is not None:
        if not settings.dashboard.is_file():
            raise UserMistake(f"--dashboard {settings.dashboard}: there is no such file")
        try:
            with closing(Rows(settings.dashboard, settings.dashboard_limit)) as table:
                rows = table.count(namespace)
                if delete:
                    table.forget(namespace, time.time())
        except (DashboardFault, sqlite3.Error) as error:
            raise UserMistake(f"--dashboard {settings.dashboard}: {error}") from error
    async with _opened(settings) as store:
        keys = [entry.key for entry in await _found(store, f"{namespace}/")]
        if delete and settings.dashboard is not None:  # for the dashboards of other replicas
            await store.put(fleet.forgotten(namespace, time.time()), b"")
        for start in range(0, len(keys) if delete else 0, AT_ONCE):
            await asyncio.gather(*map(store.delete, keys[start : start + AT_ONCE]))
    return Kept(len(keys), files, rows)
