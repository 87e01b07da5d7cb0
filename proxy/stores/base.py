"""The interface of a store: bytes under a key, written once and never changed.

A key is `NAMESPACE/KIND/NAME`, with `[A-Za-z0-9._-]` between the slashes (see `keys.py`). Any other key raises
ValueError. If the engine fails, every method raises `errors.StoreFault` and nothing else.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Protocol

import msgspec

from proxy.stores.keys import namespace_of

Retention = Callable[[str], float | None]
"""Returns how many seconds to keep a namespace's records after they were last put, or None to keep them forever."""


def lifetime(key: str, retention: Retention) -> float | None:
    """Return how many seconds to keep the record with this key after it was last put; None: forever."""
    return retention(namespace_of(key))


Damaged = Callable[[str], None]
"""Called, in any thread, with a key whose record is damaged or is not a record at all."""


class Entry(msgspec.Struct, frozen=True):
    """One record in a listing: `size` is in bytes, `modified` in seconds since the epoch."""

    key: str
    size: int
    modified: float


class Store(Protocol):
    """Write-once records. The first writer wins, in any process on any machine."""

    async def put(self, key: str, value: bytes) -> bool:
        """Store the value durably if the key is absent. Returns False if the key exists; its value is unchanged.

        If the engine can do so cheaply, putting an existing record also marks it as used, so that its age counts from
        now.
        """

    async def get(self, key: str) -> bytes | None:
        """Return the value, or None if there is none or if something other than a record is in its place."""

    async def get_many(self, keys: Sequence[str]) -> Sequence[bytes | None]:
        """Return the values in the order of `keys`, with None for absent ones."""

    def list(self, prefix: str) -> AsyncGenerator[Entry, None]:
        """Yield every record whose key begins with `prefix` once, in the engine's order.

        Records that are put or deleted during the listing may or may not appear. Anything that is not a record is
        skipped. Close the generator if you stop early. A NamespaceFault comes after the records of all other
        namespaces.
        """

    async def delete(self, key: str) -> None:
        """Delete the record. A missing key is not an error."""

    async def close(self) -> None:
        """Finish running operations and close the engine. Do not use the store afterwards.

        Raises StoreFault, naming the operations that hang, if some do not finish.
        """
