"""One process's cache of a store. Records never change, so only damaged ones must be forgotten."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Literal

from proxy.lru import ENTRY_BYTES, Lru

ENTRY_WEIGHT = ENTRY_BYTES + 100
"""Bytes that a remembered record takes beside its key and value: their heads, and what alignment adds."""

PUTS_BYTES = 20 << 20
"""Bytes of keys remembered as recently put: some 50,000 of them."""


class Missing(Enum):
    """Why there is no value: the store has none (ABSENT), or it failed, was not asked or was too slow (FAILED)."""

    ABSENT = "absent"
    FAILED = "failed"


Absent = Literal[Missing.ABSENT]


class Memory:
    """Remembers records that were read or written, final absences, and recent puts."""

    def __init__(self, limit_bytes: int, refresh_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._refresh = refresh_seconds
        self._clock = clock
        self._records: Lru[str, bytes | Absent] = Lru(limit_bytes)
        self._puts: Lru[str, float] = Lru(PUTS_BYTES)

    @property
    def size(self) -> tuple[int, int]:
        """The number of remembered records, and the bytes that they and the keys of recent puts take."""
        return len(self._records), self._records.weight + self._puts.weight

    def recall(self, keys: Iterable[str]) -> Mapping[str, bytes | Absent]:
        """Return the remembered values of these keys."""
        found = ((key, self._records.get(key)) for key in keys)
        return {key: value for key, value in found if value is not None}

    def keep(self, key: str, value: bytes | Absent) -> None:
        """Remember a record, or that there will never be one."""
        size = len(value) if isinstance(value, bytes) else 0
        self._records.put(key, value, size + len(key) + ENTRY_WEIGHT)

    def note_put(self, key: str, retention: float | None = None) -> None:
        """Note that the record exists, whoever wrote it. Its store deletes it after `retention` seconds."""
        fresh = self._refresh if retention is None else min(self._refresh, retention / 3)
        self._puts.put(key, self._clock() + fresh, len(key) + ENTRY_WEIGHT)
        if self._records.get(key) is Missing.ABSENT:
            self._records.discard(key)

    def forget(self, key: str) -> None:
        """Forget a damaged record, so that it is fetched again and can be put again."""
        self._records.discard(key)
        self._puts.discard(key)

    def was_put(self, key: str) -> bool:
        """Return whether the record was put recently."""
        until = self._puts.get(key)
        return until is not None and self._clock() < until
