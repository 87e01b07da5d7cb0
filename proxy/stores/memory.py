"""What one process remembers of a store: records, final absences, recent puts, and what could not be written yet."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Literal

from proxy.lru import ENTRY_BYTES, Lru

ENTRY_WEIGHT = ENTRY_BYTES + 100
"""Bytes that a remembered record takes beside its key and value: their heads, and what alignment adds."""

PUTS_BYTES = 20 << 20
"""Bytes of keys remembered as recently put: some 50,000 of them."""

UNWRITTEN_BYTES = 32 << 20
"""Bytes of records that could not be written yet. If there are more, the oldest are given up."""


class Missing(Enum):
    """Why there is no value: the store has none (ABSENT), or it failed, was not asked or was too slow (FAILED)."""

    ABSENT = "absent"
    FAILED = "failed"


Absent = Literal[Missing.ABSENT]
Failed = Literal[Missing.FAILED]


class Memory:
    """Records never change, so only damaged ones must be forgotten."""

    def __init__(self, limit_bytes: int, refresh_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._refresh = refresh_seconds
        self._clock = clock
        self._records: Lru[str, bytes | Absent] = Lru(limit_bytes)
        self._puts: Lru[str, float] = Lru(PUTS_BYTES)
        self.unwritten: OrderedDict[str, bytes] = OrderedDict()
        """Records that could not be put, oldest first."""
        self._held = 0

    @property
    def size(self) -> tuple[int, int]:
        """The number of remembered records, and the bytes that all of this takes."""
        count = len(self._records) + len(self.unwritten)
        return count, self._records.weight + self._puts.weight + self._held

    def recall(self, keys: Iterable[str]) -> Mapping[str, bytes | Absent]:
        """Return the remembered values of these keys."""
        found = ((key, self.unwritten.get(key, self._records.get(key))) for key in keys)
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

    def was_put(self, key: str) -> bool:
        """Return whether the record was put recently."""
        until = self._puts.get(key)
        return until is not None and self._clock() < until

    def owe(self, key: str, value: bytes) -> int:
        """Remember a record that has yet to be put. Returns how many older ones had to be given up."""
        self.unwritten[key] = value
        self._held += len(key) + len(value) + ENTRY_WEIGHT
        given_up = 0
        while self._held > UNWRITTEN_BYTES:
            self.settle(next(iter(self.unwritten)))
            given_up += 1
        return given_up

    def settle(self, key: str) -> None:
        """Stop owing a record."""
        if (value := self.unwritten.pop(key, None)) is not None:
            self._held -= len(key) + len(value) + ENTRY_WEIGHT

    def forget(self, key: str) -> None:
        """Forget a damaged record, so that it is fetched again and can be put again."""
        self._records.discard(key)
        self._puts.discard(key)
        self.settle(key)
