"""Forgetting records that have not been put for their tenant's retention, in stores that do not do it themselves.

Every worker sweeps on its own, at its own moment: deleting twice does no harm, and nobody need be elected.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Container
from contextlib import aclosing

from proxy.errors import StoreFault
from proxy.stores.base import Entry, Retention, Store
from proxy.stores.keys import namespace_of

EVERY_SECONDS = 3600.0

DELETES = 10_000
"""At most, in one sweep: what is left is for the next."""

BREATH = 200
"""Entries after which a background sweep rests for `REST_SECONDS`, so that requests come first."""

REST_SECONDS = 0.01


def tenant_of(namespace: str, tenants: Container[str]) -> str | None:
    """Whose it is: `TENANT` where callers share one, else `TENANT-CALLER`. None: of no tenant that is known."""
    if namespace in tenants:
        return namespace
    tenant = namespace.rpartition("-")[0]
    return tenant if tenant in tenants else None


async def sweep(store: Store, prefix: str, older_than_seconds: float, now: float, *, limit: int | None = None) -> int:
    """Delete the records below `prefix` that were put more than so many seconds before `now`, `limit` at most.

    `now` is in seconds since the epoch. Returns how many were deleted; raises StoreFault.
    """
    return await _sweep(store, prefix, lambda namespace: older_than_seconds, now, limit)


class Sweeper:
    """Sweeps a whole store, each namespace after its own retention, again and again."""

    def __init__(
        self,
        store: Store,
        retention: Retention,
        *,
        warn: Callable[[str, str], None],
        every_seconds: float = EVERY_SECONDS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._retention = retention
        self._warn = warn
        self._every = every_seconds
        self._clock = clock

    async def run(self) -> None:
        """Until it is cancelled. The first sweep falls at random, so that workers take turns."""
        await asyncio.sleep(random.uniform(0, self._every))
        while True:
            await self.once()
            await asyncio.sleep(self._every)

    async def once(self) -> int:
        """One sweep; a store that fails is left to the next. Returns how many records were deleted."""
        try:
            return await _sweep(self._store, "", self._retention, self._clock(), DELETES, REST_SECONDS)
        except StoreFault as fault:
            self._warn("store sweep", f"store: sweep: {fault.message}")
            return 0


async def _sweep(
    store: Store, prefix: str, retention: Retention, now: float, limit: int | None, rest_seconds: float = 0.0
) -> int:
    deleted = seen = 0
    async with aclosing(store.list(prefix)) as entries:
        async for entry in entries:
            if deleted == limit:
                break
            if _expired(entry, retention, now):
                await store.delete(entry.key)
                deleted += 1
            seen += 1
            if seen % BREATH == 0:
                await asyncio.sleep(rest_seconds)
    return deleted


def _expired(entry: Entry, retention: Retention, now: float) -> bool:
    seconds = retention(namespace_of(entry.key))
    return seconds is not None and now - entry.modified > seconds
