"""The `store` command: shows and cleans up the store. Each function makes a command, which `run` runs on the store."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

from proxy import policies, regex
from proxy.cli.words import duration, harmless, in_units, table
from proxy.errors import UserMistake
from proxy.operations.names import name_of
from proxy.policies import load
from proxy.policies.tenants import identify, retention
from proxy.settings import Settings
from proxy.stores import (
    Entry,
    Retention,
    Store,
    checked,
    checked_prefix,
    expires_by_itself,
    folder_of,
    namespace_of,
    open_store,
)
from proxy.tools.search import TooSlow, in_data

T = TypeVar("T")

Command = Callable[[Store], Awaitable[int]]
"""Does something with an open store, and returns the exit code."""


def run(settings: Settings, command: Command) -> int:
    """Run `command` on the store. Raises StoreFault and UserMistake.

    Redis knows a record's remaining time to live but not its age, which follows from its tenant's retention.
    """
    _require_folder(settings.store)
    needed = expires_by_itself(settings.store)

    async def opened() -> int:
        store = open_store(settings.store, _policies(settings) if needed else lambda namespace: None)
        try:
            return await command(store)
        finally:
            await store.close()

    return asyncio.run(opened())


def _require_folder(url: str) -> None:
    """Raise UserMistake if the store's folder is missing. Only `serve` makes it, so here the name must be wrong."""
    folder = folder_of(url)
    if folder is not None and not os.path.lexists(folder):
        raise UserMistake(f"there is no folder {folder}; `serve` makes it, or name another with --store")


def ls(namespace: str | None) -> Command:
    """List namespaces with their kinds of records, or the records of one namespace."""
    prefix = _taken(checked_prefix, f"{namespace}/") if namespace else ""

    async def command(store: Store) -> int:
        entries = await _found(store, prefix)
        if entries:
            sys.stdout.write(table(_listed(entries) if namespace else _counted(entries)))
        else:
            sys.stderr.write("no records\n")
        return 0

    return command


def cat(key: str) -> Command:
    """Write one record's bytes. Exits with 1 if there is none."""
    _taken(checked, key)

    async def command(store: Store) -> int:
        value = await store.get(key)
        if value is None:
            sys.stderr.write(f"offload-proxy: no record {key}\n")
            return 1
        sys.stdout.buffer.write(value)
        return 0

    return command


def grep(pattern: str, prefix: str) -> Command:
    """Write `KEY:LINE:TEXT` for each matching line. Exits with 1 if none matches, like grep."""
    find = _taken(regex.compile, pattern)
    _taken(checked_prefix, prefix)

    async def command(store: Store) -> int:
        found = False
        try:
            for entry in await _found(store, prefix):
                text = (await store.get(entry.key) or b"").decode("utf-8", "replace")
                for match in filter(None, in_data(entry.key, text.encode(), find)):
                    found = True
                    sys.stdout.write(f"{entry.key}:{match.line}:{harmless(match.text)}\n")
        except TooSlow as error:
            raise UserMistake(str(error)) from error
        return 0 if found else 1

    return command


def gc(settings: Settings, older_than: str | None, *, dry_run: bool) -> Command:
    """Delete records older than `older_than`, or else older than their tenant's retention."""
    kept_for = _retention(settings, older_than)

    async def command(store: Store) -> int:
        now = time.time()
        entries = await _found(store, "")
        old = [entry for entry in entries if _outlived(entry, kept_for, now)]
        if not dry_run:
            await store.delete(*(entry.key for entry in old))
        count, size = len(old), in_units(sum(entry.size for entry in old))
        sys.stdout.write(f"{'would delete' if dry_run else 'deleted'} {count} of {len(entries)} records, {size}\n")
        return 0

    return command


async def _found(store: Store, prefix: str) -> list[Entry]:
    return [entry async for entry in store.list(prefix)]


def _taken(check: Callable[[str], T], text: str) -> T:
    """Return `check(text)`. Raises UserMistake if it raises ValueError."""
    try:
        return check(text)
    except ValueError as error:
        raise UserMistake(str(error)) from error


def _retention(settings: Settings, older_than: str | None) -> Retention:
    if older_than is not None:
        age = _taken(policies.duration, older_than)
        return lambda namespace: age
    return _policies(settings)


def namespace_of_key(settings: Settings, key: bytes) -> str:
    """Return the namespace of the caller with this key, or of callers without one. Raises Unauthorized."""
    sent = [(b"authorization", b"Bearer " + key)] if key else []
    return identify(sent, load(settings.policies, settings.environment)).namespace


def _policies(settings: Settings) -> Retention:
    loaded = load(settings.policies, settings.environment)
    return lambda namespace: retention(namespace, loaded)


def _outlived(entry: Entry, kept_for: Retention, now: float) -> bool:
    limit = kept_for(namespace_of(entry.key))
    return limit is not None and now - entry.modified > limit


def _counted(entries: list[Entry]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each namespace and kind, after a header."""
    groups = defaultdict(list)
    for entry in entries:
        namespace, kind, _ = entry.key.split("/", 2)
        groups[namespace, kind].append(entry)
    now = time.time()
    yield "NAMESPACE", "KIND", "RECORDS", "SIZE", "LAST USED"
    for (namespace, kind), group in sorted(groups.items()):
        size, newest = sum(entry.size for entry in group), max(entry.modified for entry in group)
        yield namespace, kind, str(len(group)), in_units(size), duration(now - newest)


def _listed(entries: list[Entry]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each record, after a header. The newest is last, where a terminal's reader looks first.

    `PATH` is the file's name for callers of the operations.
    """
    now = time.time()
    yield "KIND", "SIZE", "LAST USED", "KEY", "PATH"
    for entry in sorted(entries, key=lambda entry: (entry.modified, entry.key)):
        _, kind, part = entry.key.split("/")
        path = harmless(name_of(part) or "") if kind == "files" else ""
        yield kind, in_units(entry.size), duration(now - entry.modified), entry.key, path
