"""The store as commands use it that need no running proxy."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from proxy import policies
from proxy.errors import UserMistake
from proxy.policies.tenants import retention
from proxy.settings import Settings
from proxy.stores import Retention, Store, expires_by_itself, folder_of, open_store


@asynccontextmanager
async def opened(settings: Settings) -> AsyncIterator[Store]:
    """Open the store for the block. Raises UserMistake if there is none."""
    store = _store(settings)
    try:
        yield store
    finally:
        await store.close()


def _store(settings: Settings) -> Store:
    """Redis knows a record's remaining time to live; its age follows from its tenant's
    retention."""
    folder = folder_of(settings.store)
    if folder is not None and not os.path.lexists(folder):
        raise UserMistake(
            f"there is no folder {folder}; `serve` makes it, or name another with --store"
        )
    kept_for = (
        retention_of(settings) if expires_by_itself(settings.store) else lambda namespace: None
    )
    return open_store(settings.store, kept_for)


def retention_of(settings: Settings) -> Retention:
    """Return how long the records of each namespace are kept, as the policies say."""
    loaded = policies.load(settings.policies, settings.environment)
    return lambda namespace: retention(namespace, loaded)
