"""The interface of a store: bytes under a key, written once and never changed.

Keys are `NAMESPACE/KIND/NAME`, of `[A-Za-z0-9._-]` between slashes (`keys.py`; anything else is a ValueError). Every
method raises `errors.StoreFault` if the engine fails, and nothing else.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Protocol

import msgspec

Retention = Callable[[str], float | None]
"""How many seconds a namespace's records are kept after they were last put. None: forever."""


Damaged = Callable[[str], None]
"""Called with the key of a record that is damaged or is no record at all. May be called in any thread."""


class Entry(msgspec.Struct, frozen=True):
    """One record as a listing shows it: `size` in bytes, `modified` in seconds since the epoch."""

    key: str
    size: int
    modified: float


class Store(Protocol):
    """Write-once records. The first writer wins, in any process on any machine."""

    async def put(self, key: str, value: bytes) -> bool:
        """Store durably if absent. False: the key existed, and its value is unchanged.

        Putting an existing record marks it as used: its age counts from now, if the engine can do that cheaply.
        """

    async def get(self, key: str) -> bytes | None:
        """The value, or None if there is none or something else is in its place."""

    async def get_many(self, keys: Sequence[str]) -> Sequence[bytes | None]:
        """The values in the order of `keys`, None where absent."""

    def list(self, prefix: str) -> AsyncGenerator[Entry, None]:
        """Every record whose key begins with `prefix`, each once, in the engine's order.

        Records put or deleted meanwhile may be missing or included. Anything that is no record is skipped. Close the
        generator if you leave it early.
        """

    async def delete(self, key: str) -> None:
        """Delete the record. A missing key is no error."""

    async def close(self) -> None:
        """Finish operations under way and close the engine. The store must not be used afterwards.

        Raises StoreFault, which names what hangs, if something does not end.
        """
