"""Deletes records not put again within their tenant's retention, in stores that do not expire records themselves.

Every worker sweeps independently, at its own time. Deleting a record twice is harmless, so no leader is needed.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from contextlib import aclosing

from proxy.errors import NamespaceFault, StoreFault
from proxy.stores.base import Entry, Retention, Store, lifetime

EVERY_SECONDS = 3600.0

DELETES = 10_000
"""Most records that one sweep deletes. The next sweep deletes the rest."""

BREATH = 200
"""Entries after which a sweep pauses for `REST_SECONDS`, to let requests run first."""

REST_SECONDS = 0.01


class Sweeper:
    """Sweeps a whole store repeatedly, by each namespace's retention. `clock` returns seconds since the epoch."""

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
        """Sweep until cancelled. The first sweep starts after a random delay, so that workers take turns."""
        await asyncio.sleep(random.uniform(0, self._every))
        while True:
            await self.once()
            await asyncio.sleep(self._every)

    async def once(self) -> int:
        """Sweep once and return how many records were deleted. If the store fails, this sweep ends early."""
        now, deleted, seen = self._clock(), 0, 0
        try:
            async with aclosing(self._store.list("")) as entries:
                async for entry in entries:
                    if deleted == DELETES:
                        break
                    if self._expired(entry, now):
                        deleted += await self._deleted(entry.key)
                    seen += 1
                    if seen % BREATH == 0:
                        await asyncio.sleep(REST_SECONDS)
        except StoreFault as fault:
            self._warn("store sweep", f"store: sweep: {fault.message}")
        return deleted

    async def _deleted(self, key: str) -> bool:
        """Delete the record. Returns False if its namespace's folder does not let us, which concerns no other."""
        try:
            await self._store.delete(key)
        except NamespaceFault as fault:
            self._warn("store sweep", f"store: sweep: {fault.message}")
            return False
        return True

    def _expired(self, entry: Entry, now: float) -> bool:
        seconds = lifetime(entry.key, self._retention)
        return seconds is not None and now - entry.modified > seconds
