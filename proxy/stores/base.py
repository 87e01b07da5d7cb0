"""What a store must do: keep bytes under a key, written once, never changed.

Keys are `NAMESPACE/KIND/NAME`, of `[A-Za-z0-9._-]` between slashes (`keys.py`; anything else is a ValueError). Every
method raises `errors.StoreFault` when the engine fails, and nothing else.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Protocol

import msgspec

Retention = Callable[[str], float | None]
"""For how many seconds a namespace's records are kept after they were last put; None: for ever."""


Damaged = Callable[[str], None]
"""Told the key of what stands in a record's place and cannot be one. May be called in any thread."""


class Entry(msgspec.Struct, frozen=True):
    """One record as a listing shows it: `size` in bytes, `modified` in seconds since the epoch."""

    key: str
    size: int
    modified: float


class Store(Protocol):
    """Write-once records. Whoever puts first wins, in any process on any machine."""

    async def put(self, key: str, value: bytes) -> bool:
        """Store durably if absent. False: the key existed, and its value is as it was.

        Putting what exists says that it is in use: its age counts from now, where the engine can do that cheaply.
        """

    async def get(self, key: str) -> bytes | None:
        """The value, or None; None too where something else than a record stands in its place."""

    async def get_many(self, keys: Sequence[str]) -> Sequence[bytes | None]:
        """The values in the order of `keys`, None where absent."""

    def list(self, prefix: str) -> AsyncGenerator[Entry, None]:
        """Every record whose key begins with `prefix`, each once, in the engine's order.

        One that is put or deleted meanwhile may be in it or not; what is no record is passed over. Close the generator
        where it is left early.
        """

    async def delete(self, key: str) -> None:
        """Forget the record; a key that is not there is no error."""

    async def close(self) -> None:
        """Finish what is under way and let go of the engine. Nothing may be asked of the store afterwards.

        Raises StoreFault that says what hangs, where something does not end.
        """
