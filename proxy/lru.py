"""A mapping of bounded weight that drops the least recently used items first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from threading import Lock
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

ENTRY_BYTES = 230
"""Bytes of an entry beside its key and value: a link of the order, its places in two tables, and
the pair with its weight. Measured as the growth of the process over 60,000 entries."""


class Lru(Generic[K, V]):
    """Thread-safe. An item above its `share` of the limit is not kept, because it would push out
    too many others."""

    def __init__(self, limit: int, share: int = 8) -> None:
        """`share`: the part of the limit that an item may take; 8: an eighth."""
        self._limit = limit
        self._most = limit // share
        self._items: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._lock = Lock()
        self.weight = 0

    def __len__(self) -> int:
        return len(self._items)

    def items(self) -> list[tuple[K, V]]:
        """Return the items, the least recently used first."""
        with self._lock:
            return [(key, value) for key, (value, _) in self._items.items()]

    def get(self, key: K) -> V | None:
        """Return the value of this key, or None, and make it the most recently used."""
        with self._lock:
            item = self._items.get(key)
            if item is not None:
                self._items.move_to_end(key)
        return item[0] if item else None

    def put(self, key: K, value: V, weight: int = 1) -> None:
        """Store a value, replacing any earlier one of this key."""
        with self._lock:
            self._discard(key)
            if weight > self._most:
                return
            self._items[key] = (value, weight)
            self.weight += weight
            while self.weight > self._limit:
                self.weight -= self._items.popitem(last=False)[1][1]

    def discard(self, key: K) -> None:
        """Remove a key, if present."""
        with self._lock:
            self._discard(key)

    def _discard(self, key: K) -> None:
        item = self._items.pop(key, None)
        if item is not None:
            self.weight -= item[1]
