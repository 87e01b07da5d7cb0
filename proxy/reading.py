"""The cache of read messages: only what was never seen before is decoded and counted, and that off the event loop."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from typing import Protocol

from msgspec import Raw

from proxy.core import rawjson
from proxy.core.compact import Shape
from proxy.core.past import Past, Terms
from proxy.core.render import Compacted
from proxy.core.transcript import Message, Reading, Transcript, compacted, digest, read
from proxy.lru import Lru

INLINE_BYTES = 16_384
"""Reading this much takes about a millisecond; more of it goes to a thread, so that nobody else has to wait."""
MESSAGES = 100_000
MESSAGE_BYTES = 700
"""What a cached message takes, about: they are counted and not weighed."""
COMPACTED_BYTES = 32 << 20

PAST_BYTES = 32 << 20
LONG = 4
"""Messages of a history that is worth looking for. By these first ones it is found: a reply is among them."""

Key = bytes
"""A message's digest, and that of all else that its measure depends on."""


class Counter(Protocol):
    def count(self, text: str, model: str = "") -> int: ...

    def loaded(self, model: str = "") -> bool:
        """Whether `count` begins at once."""
        ...


class Reader:
    """Reads messages by their bytes. A message is a pure function of them, so nothing here is ever wrong."""

    def __init__(self, tokens: Counter) -> None:
        self._tokens = tokens
        self._messages: Lru[Key, Message] = Lru(MESSAGES)
        self._compacted: Lru[Key, bytes] = Lru(COMPACTED_BYTES)
        self._tools: Lru[tuple[bytes, str], int] = Lru(1_000)
        self._pasts: Lru[tuple[bytes, Terms], tuple[bytes, Past]] = Lru(PAST_BYTES)

    def caches(self) -> dict[str, Callable[[], tuple[int, int]]]:
        """What tells the entries and bytes of each cache, for the metrics."""
        return {
            "messages": lambda: (len(self._messages), len(self._messages) * MESSAGE_BYTES),
            "compacted": lambda: (len(self._compacted), self._compacted.weight),
            "histories": lambda: (len(self._pasts), self._pasts.weight),
        }

    async def past(self, raws: Sequence[Raw], terms: Terms) -> Past:
        """A history, measured and folded. Of one that goes on from an earlier request's only what is new is read.

        Raises Unplannable.
        """
        past = Past.beginning(terms)
        if len(raws) < LONG:
            return await self._extended(past, raws, terms)
        seen = hashlib.sha256(_bytes(raws[:LONG]))
        key = (seen.digest(), terms)
        known, earlier = self._pasts.get(key) or (b"", past)
        reached = max(len(earlier.messages), LONG)
        seen.update(_bytes(raws[LONG:reached]))
        if seen.digest() == known:
            past = earlier
        seen.update(_bytes(raws[reached:]))
        past = await self._extended(past, raws[len(past.messages) :], terms)
        self._pasts.put(key, (seen.digest(), past), past.size())
        return past

    async def _extended(self, past: Past, raws: Sequence[Raw], terms: Terms) -> Past:
        return past.extended(await self.read(raws, Reading.of(terms.offload), terms.model))

    async def read(self, raws: Sequence[Raw], reading: Reading, model: str) -> list[Message]:
        """Every message's measure, in order. Raises Unplannable."""
        variant = _variant(reading, model)
        keys = [digest(raw) + variant for raw in raws]
        found = [self._messages.get(key) for key in keys]
        unread = {key: raw for key, raw, message in zip(keys, raws, found, strict=True) if message is None}
        if unread:
            fresh = await self._fresh(unread, reading, model)
            found = [message or fresh[key] for key, message in zip(keys, found, strict=True)]
        return [message for message in found if message is not None]

    async def _fresh(self, unread: dict[Key, Raw], reading: Reading, model: str) -> dict[Key, Message]:
        def work() -> dict[Key, Message]:
            return {key: read(raw, reading, self.counter(model)) for key, raw in unread.items()}

        small = sum(len(memoryview(raw)) for raw in unread.values()) <= INLINE_BYTES
        inline = small and self._tokens.loaded(model)
        fresh = work() if inline else await asyncio.to_thread(work)
        for key, message in fresh.items():
            self._messages.put(key, message)
        return fresh

    def compactor(self, transcript: Transcript, shape: Shape) -> Compacted:
        """Makes messages as they go upstream with their text moved."""
        variants = {glimpse: _variant(shape, glimpse) for glimpse in (False, True)}

        def make(index: int, glimpse: bool) -> bytes:
            message = transcript.messages[index]
            key = message.digest + variants[glimpse]
            found = self._compacted.get(key)
            if found is None:
                found = compacted(transcript.raws[index], message, shape, glimpse)
                self._compacted.put(key, found, len(found))
            return found

        return make

    async def tool_tokens(self, raw: Raw, model: str) -> int:
        """What the client's tool definitions take; the same array comes with every request."""
        if rawjson.is_null(raw):
            return 0
        key = (digest(raw), model)
        found = self._tools.get(key)
        if found is None:
            found = await asyncio.to_thread(self._tokens.count, bytes(raw).decode("utf-8", "replace"), model)
            self._tools.put(key, found)
        return found

    def count(self, text: str, model: str) -> int:
        return self._tokens.count(text, model)

    def counter(self, model: str) -> Callable[[str], int]:
        """What counts the tokens of texts for this model."""
        return lambda text: self._tokens.count(text, model)


def _bytes(raws: Sequence[Raw]) -> bytes:
    """Messages as they stand in an array: what two of these make up is what both together do."""
    return b",".join([*raws, b""])


@lru_cache(256)
def _variant(*parts: Hashable) -> bytes:
    """A digest of values of ours. As a part of each key they themselves took longer than the bytes."""
    return hashlib.sha256(repr(parts).encode("utf-8", "surrogatepass")).digest()
