"""Deletes records not put again within their tenant's retention, in stores that do not expire records themselves.

Every worker sweeps independently, at its own time. Deleting a record twice is harmless, so no leader is needed. A sweep
reads the whole store and deletes all that has expired. It rests as long as it works, and comes after what clients wait
for.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from contextlib import aclosing

from proxy.errors import StoreFault
from proxy.stores import Retention, Store, namespace_of
from proxy.threads import nobody_waits

EVERY_SECONDS = 3600.0
AGAIN_SECONDS = 60.0
"""Seconds until the next sweep, and until another one if the store failed."""

BATCH = 100
"""Records that are deleted together, which takes a disk some milliseconds."""


class Sweeper:
    """Sweeps a whole store repeatedly, by each namespace's retention. `clock` returns seconds since the epoch.

    `swept(deleted, overdue)` is called for every few records: how many were deleted, and how many seconds the oldest
    that was found is past its retention; at the end of a sweep, none is.
    """

    def __init__(
        self,
        store: Store,
        retention: Retention,
        *,
        warn: Callable[[str, str], None],
        swept: Callable[[int, float], None] = lambda deleted, overdue: None,
        every_seconds: float = EVERY_SECONDS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._retention = retention
        self._warn = warn
        self._swept = swept
        self._every = every_seconds
        self._clock = clock

    async def run(self) -> None:
        """Sweep until cancelled. The first sweep starts after a random delay, so that workers take turns."""
        await asyncio.sleep(random.uniform(0, self._every))
        with nobody_waits():
            while True:
                done = await self.once()
                await asyncio.sleep(self._every if done is not None else min(self._every, AGAIN_SECONDS))

    async def once(self) -> int | None:
        """Sweep once. Returns how many records were deleted, or None if the store failed."""
        now, deleted, pace = self._clock(), 0, _Pace()
        expired: dict[str, float] = {}
        try:
            async with aclosing(self._store.list("")) as entries:
                async for entry in entries:
                    kept = self._retention(namespace_of(entry.key))
                    if kept is not None and now - entry.modified > kept:
                        expired[entry.key] = now - entry.modified - kept
                    if len(expired) == BATCH:
                        deleted += await self._delete(expired)
                        expired = {}
                    await pace.keep()
            deleted += await self._delete(expired)
        except StoreFault as fault:
            self._warn("store sweep", f"store: sweep: {fault.message}")
            return None
        self._swept(0, 0.0)
        return deleted

    async def _delete(self, expired: Mapping[str, float]) -> int:
        """Delete the records, and return how many."""
        if expired:
            await self._store.delete(*expired)
            self._swept(len(expired), max(expired.values()))
        return len(expired)


class _Pace:
    """Rests as long as it worked."""

    LEAST = 0.005
    """Seconds of work after which it rests."""

    def __init__(self) -> None:
        self._since = time.monotonic()

    async def keep(self) -> None:
        """Rest, if it is time."""
        worked = time.monotonic() - self._since
        if worked >= self.LEAST:
            await asyncio.sleep(worked)
            self._since = time.monotonic()
