"""A cache that stays small: the least recently used entries go first."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Bounded(Generic[K, V]):
    """A mapping whose entries' sizes (one each, by default) add up to `limit` at most. Not for several threads."""

    def __init__(self, limit: int, size: Callable[[V], int] | None = None) -> None:
        self._limit = limit
        self._size = size
        self._entries: dict[K, V] = {}
        self.used = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K) -> V | None:
        value = self._entries.pop(key, None)
        if value is not None:
            self._entries[key] = value  # now the youngest: dictionaries keep the order of insertion
        return value

    def put(self, key: K, value: V) -> None:
        self._forget(key)
        self._entries[key] = value
        self.used += self._weight(value)
        while self.used > self._limit:
            self._forget(next(iter(self._entries)))

    def _forget(self, key: K) -> None:
        value = self._entries.pop(key, None)
        if value is not None:
            self.used -= self._weight(value)

    def _weight(self, value: V) -> int:
        return self._size(value) if self._size else 1
