"""Mappings of bounded weight that drop the least recently used items first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock, RLock
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


class FairLru(Generic[K, V]):
    """A mapping of bounded weight that many owners share. Thread-safe.

    If it is full, the owner that holds most loses what it has not used for longest: nobody pushes
    out what others hold. An item above its `share` of the limit is not kept. `dropped` is called
    with each item that goes or is not kept.
    """

    def __init__(
        self,
        limit: int,
        share: int = 8,
        dropped: Callable[[K, V], object] = lambda key, value: None,
    ) -> None:
        self._limit = limit
        self._most = limit // share
        self._dropped = dropped
        self._items: dict[str, OrderedDict[K, tuple[V, int]]] = {}
        self._weights: dict[str, int] = {}
        self.lock = RLock()
        """Held while anything changes, and while `dropped` is called."""
        self.weight = 0

    def __len__(self) -> int:
        return sum(map(len, self._items.values()))

    def get(self, owner: str, key: K) -> V | None:
        """Return the value of this key, or None, and make it the owner's most recently used."""
        with self.lock:
            items = self._items.get(owner)
            item = items.get(key) if items else None
            if items and item:
                items.move_to_end(key)
        return item[0] if item else None

    def put(self, owner: str, key: K, value: V, weight: int) -> None:
        """Store a value, replacing any earlier one of this key."""
        with self.lock:
            self.discard(owner, key)
            if weight > self._most:
                self._dropped(key, value)
                return
            self._items.setdefault(owner, OrderedDict())[key] = (value, weight)
            self._weigh(owner, weight)
            while self.weight > self._limit:
                most = max(self._weights, key=self._weights.__getitem__)
                self.discard(most, next(iter(self._items[most])))

    def discard(self, owner: str, key: K) -> None:
        """Remove a key, if present."""
        with self.lock:
            items = self._items.get(owner)
            item = items.pop(key, None) if items else None
            if item is None:
                return
            self._weigh(owner, -item[1])
            self._dropped(key, item[0])

    def _weigh(self, owner: str, more: int) -> None:
        self.weight += more
        self._weights[owner] = self._weights.get(owner, 0) + more
        if not self._items[owner]:
            del self._items[owner], self._weights[owner]
