"""The cache of read messages: only what was never seen before is decoded and counted, and that off the event loop."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Protocol, TypeVar

from msgspec import Raw

from proxy.core import rawjson
from proxy.core.history import History, Message, Reading, Terms, Transcript
from proxy.core.preview import Shape
from proxy.dialects.chat.messages import compacted, digest, read
from proxy.dialects.chat.render import Compacted
from proxy.dialects.chat.request import LARGE_BYTES, LARGE_MESSAGES
from proxy.lru import Lru
from proxy.threads import READING, WorkPool

T = TypeVar("T")

INLINE_BYTES = 16_384
"""Reading this much takes about a millisecond; more of it goes to a thread, so that nobody else has to wait."""
BATCH_BYTES = 512 << 10
"""Of messages that are read in a thread at once: some 50 milliseconds."""
MESSAGES = 100_000
MESSAGE_BYTES = 700
"""What a cached message takes, about, besides the ids and names of its calls and its content's parts."""
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


class MessageCache:
    """Reads messages by their bytes. A message is a pure function of them, so nothing here is ever wrong.

    `caller` is whose turn it is in the pool, for work that is too much for the event loop.
    """

    def __init__(self, tokens: Counter, pool: WorkPool | None = None, large: WorkPool | None = None) -> None:
        self._tokens = tokens
        self._pool = pool or WorkPool("reading", READING)
        self._large = large or self._pool
        self._messages: Lru[Key, Message] = Lru(MESSAGES * MESSAGE_BYTES)
        self._compacted: Lru[Key, bytes] = Lru(COMPACTED_BYTES)
        self._tools: Lru[tuple[bytes, str], int] = Lru(1_000)
        self._pasts: Lru[tuple[bytes, Terms], tuple[bytes, History]] = Lru(PAST_BYTES)

    def caches(self) -> dict[str, Callable[[], tuple[int, int]]]:
        """What tells the entries and bytes of each cache, for the metrics."""
        return {
            "messages": lambda: (len(self._messages), self._messages.weight),
            "compacted": lambda: (len(self._compacted), self._compacted.weight),
            "histories": lambda: (len(self._pasts), self._pasts.weight),
        }

    async def past(self, raws: Sequence[Raw], terms: Terms, caller: str = "") -> History:
        """A history, measured and folded. Of one that goes on from an earlier request's only what is new is read.

        Raises Unplannable.
        """
        past, key, seen = await self._run(partial(self._begun, raws, terms), _large(raws), caller)
        new = raws[len(past.messages) :]
        messages = await self.read(new, Reading.of(terms.offload), terms.model, caller)
        past = await self._run(partial(past.extended, messages), len(raws) > LARGE_MESSAGES, caller)
        if key:
            self._pasts.put((key, terms), (seen, past), past.size())
        return past

    def _begun(self, raws: Sequence[Raw], terms: Terms) -> tuple[History, bytes, bytes]:
        """What is known of a history already, by what it is found, and the digest of all of it."""
        past = History.beginning(terms)
        if len(raws) < LONG:
            return past, b"", b""
        seen = hashlib.sha256()
        _update(seen, raws[:LONG])
        key = seen.digest()
        known, earlier = self._pasts.get((key, terms)) or (b"", past)
        reached = max(len(earlier.messages), LONG)
        _update(seen, raws[LONG:reached])
        if seen.digest() == known:
            past = earlier
        _update(seen, raws[reached:])
        return past, key, seen.digest()

    async def read(self, raws: Sequence[Raw], reading: Reading, model: str, caller: str = "") -> list[Message]:
        """Every message's measure, in order. Raises Unplannable."""
        keys, found = await self._run(partial(self._known, raws, _variant(reading, model)), _large(raws), caller)
        unread = {key: raw for key, raw, message in zip(keys, raws, found, strict=True) if message is None}
        if unread:
            fresh = await self._fresh(unread, reading, model, caller)
            found = [message or fresh[key] for key, message in zip(keys, found, strict=True)]
        return [message for message in found if message is not None]

    def _known(self, raws: Sequence[Raw], variant: bytes) -> tuple[list[Key], list[Message | None]]:
        keys = [digest(raw) + variant for raw in raws]
        return keys, [self._messages.get(key) for key in keys]

    async def _fresh(self, unread: dict[Key, Raw], reading: Reading, model: str, caller: str) -> dict[Key, Message]:
        small = sum(len(memoryview(raw)) for raw in unread.values()) <= INLINE_BYTES
        large = not small or not self._tokens.loaded(model)
        fresh: dict[Key, Message] = {}
        for batch in _batches(unread):
            work = partial(self._read, batch, reading, model)
            if len(memoryview(batch[-1][1])) > BATCH_BYTES:
                fresh |= await self._large.run(caller, work)
            else:
                fresh |= await self._run(work, large, caller)
        return fresh

    def _read(self, batch: Sequence[tuple[Key, Raw]], reading: Reading, model: str) -> dict[Key, Message]:
        fresh = {key: read(raw, reading, self.counter(model)) for key, raw in batch}
        for key, message in fresh.items():
            self._messages.put(key, message, MESSAGE_BYTES + message.extra())
        return fresh

    async def _run(self, work: Callable[[], T], large: bool, caller: str) -> T:
        return await self._pool.run(caller, work) if large else work()

    def compactor(self, transcript: Transcript, shape: Shape) -> Compacted:
        """Makes messages as they go upstream with their text moved."""
        variants = {first_preview: _variant(shape, first_preview) for first_preview in (False, True)}

        def make(index: int, first_preview: bool) -> bytes:
            message = transcript.messages[index]
            key = message.digest + variants[first_preview]
            found = self._compacted.get(key)
            if found is None:
                found = compacted(transcript.raws[index], message, shape, first_preview)
                self._compacted.put(key, found, len(found))
            return found

        return make

    async def tool_tokens(self, raw: Raw, model: str, caller: str = "") -> int:
        """What the client's tool definitions take; the same array comes with every request."""
        if rawjson.is_null(raw):
            return 0
        key = (await self._run(partial(digest, raw), _large([raw]), caller), model)
        found = self._tools.get(key)
        if found is None:
            pool = self._large if len(memoryview(raw)) > BATCH_BYTES else self._pool
            found = await pool.run(caller, lambda: self._tokens.count(bytes(raw).decode("utf-8", "replace"), model))
            self._tools.put(key, found)
        return found

    def count(self, text: str, model: str) -> int:
        return self._tokens.count(text, model)

    def counter(self, model: str) -> Callable[[str], int]:
        """What counts the tokens of texts for this model."""
        return lambda text: self._tokens.count(text, model)


def _update(seen: hashlib._Hash, raws: Sequence[Raw]) -> None:
    """With messages as they stand in an array: what two of these make up is what both together do."""
    if _large(raws):
        for raw in raws:
            seen.update(raw)
            seen.update(b",")
    else:
        seen.update(b",".join([*raws, b""]))


def _batches(unread: dict[Key, Raw]) -> Iterator[list[tuple[Key, Raw]]]:
    """As much as one turn in the pool takes, so that others have theirs in between. What is larger ends its batch."""
    batch: list[tuple[Key, Raw]] = []
    size = 0
    for key, raw in unread.items():
        batch.append((key, raw))
        size += len(memoryview(raw)) + MESSAGE_BYTES
        if size > BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _large(raws: Sequence[Raw]) -> bool:
    """Whether to look at each of their bytes takes more than a moment."""
    return len(raws) > LARGE_MESSAGES or sum(len(memoryview(raw)) for raw in raws) > LARGE_BYTES


@lru_cache(256)
def _variant(*parts: Hashable) -> bytes:
    """A digest of values of ours. As a part of each key they themselves took longer than the bytes."""
    return hashlib.sha256(repr(parts).encode("utf-8", "surrogatepass")).digest()
