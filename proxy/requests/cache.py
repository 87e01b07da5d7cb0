"""What was measured before: messages, previews, and histories with their plan so far. Only new
messages are decoded and counted, in a thread if that takes long."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache, partial
from typing import Protocol, TypeVar

from msgspec import Raw

from proxy import rawjson
from proxy.dialects import Dialect
from proxy.dialects.render import Previews, with_previews
from proxy.lru import ENTRY_BYTES, Lru
from proxy.plan.history import History, Terms, Transcript
from proxy.plan.plan import Message, Reading, digest
from proxy.plan.preview import Shape
from proxy.plan.turn import ENTRY
from proxy.threads import NEW, WorkPool

BATCH_BYTES = 512 << 10
"""Bytes of messages that a thread reads at a time, about 50 milliseconds. A larger message ends its
batch."""
MESSAGE = 700
"""Bytes that reading a small message counts as towards a batch: it takes time even if it is
empty."""
MESSAGES_BYTES = 64 << 20
PREVIEWS_BYTES = 32 << 20
KEY_BYTES = ENTRY_BYTES + 112
TEXT_BYTES = 40
"""Bytes of an entry and its key, and of a text beside its characters."""

PAST_BYTES = 128 << 20
"""Bytes of histories with the client's own bytes, and their messages, which are often in their own
cache as well."""
LONG = 4
"""A history is found by this many messages at its beginning, which include a reply. Shorter
histories are not kept."""

T = TypeVar("T")

Key = bytes
"""A message's digest, followed by the digest of everything else that its measure depends on."""


class Counter(Protocol):
    def count(self, text: str, model: str = "") -> int: ...


class MessageCache:
    """Reads messages by their bytes. A message is a pure function of its bytes, so no entry here
    ever becomes stale.

    `caller` names the namespace that work in the pool is done for.
    """

    def __init__(self, tokens: Counter, pool: WorkPool | None = None) -> None:
        self._tokens = tokens
        self.pool = pool or WorkPool("reading")
        self._messages: Lru[Key, Message] = Lru(MESSAGES_BYTES)
        self._previews: Lru[Key, bytes] = Lru(PREVIEWS_BYTES)
        self._tools: Lru[tuple[bytes, str], int] = Lru(1_000)
        self._pasts: Lru[tuple[bytes, Terms], tuple[bytes, History]] = Lru(PAST_BYTES)

    def caches(self) -> dict[str, Callable[[], tuple[int, int]]]:
        """Functions that return the number of entries and bytes of each cache, for the metrics."""
        return {
            "messages": lambda: (len(self._messages), self._messages.weight),
            "previews": lambda: (len(self._previews), self._previews.weight),
            "histories": lambda: (len(self._pasts), self._pasts.weight),
        }

    async def history(
        self,
        dialect: Dialect,
        raws: Sequence[Raw],
        terms: Terms,
        caller: str = "",
        size: int = 0,
        *,
        then: Callable[[History], T],
    ) -> T:
        """Return what `then` makes of the measured and folded history. If it continues an earlier
        request's, read only the new messages.

        `size` is how many bytes it takes to look through it. Raises Unplannable.
        """

        def begun() -> tuple[History, bytes, bytes, T | None]:
            past, key, whole = self._begun(dialect, raws, terms)
            return past, key, whole, then(past) if len(past) == len(raws) else None

        past, key, whole, made = await self.pool.run(caller, begun, size)
        if made is not None:
            return made
        reading = Reading.of(terms.offload, terms.room.window, terms.harmless)
        messages = await self.read(dialect, raws[len(past) :], reading, terms.model, caller)
        parts = sum([len(message.pieces) + len(message.calls) for message in messages])

        def extended() -> T:
            longer = past.extended(messages)
            if key:
                self._pasts.put(
                    (key, terms), (whole, longer), ENTRY_BYTES + len(whole) + longer.size()
                )
            return then(longer)

        return await self.pool.run(caller, extended, max(size, (len(raws) + parts) * ENTRY))

    def _begun(
        self, dialect: Dialect, raws: Sequence[Raw], terms: Terms
    ) -> tuple[History, bytes, bytes]:
        """Return the known part of a history, the key by which it is found, and the whole history's
        bytes.

        Bytes are compared, which is ten times as fast as a digest. A comma follows each message, so
        that one that goes on differently is no longer the same.
        """
        past = History(terms)
        if len(raws) < LONG:
            return past, b"", b""
        key = hashlib.sha256(b",".join([dialect.name.encode(), *raws[:LONG]])).digest()
        whole = b",".join([*raws, b""])
        known, earlier = self._pasts.get((key, terms)) or (b"", past)
        return (earlier if whole.startswith(known) else past), key, whole

    async def read(
        self, dialect: Dialect, raws: Sequence[Raw], reading: Reading, model: str, caller: str = ""
    ) -> list[Message]:
        """Return every message's measure, in order. Raises Unplannable."""
        variant = _variant(dialect.name, reading, model)
        count = self.counter(model)
        messages = list[Message]()

        def read(batch: Sequence[Raw]) -> list[Message]:
            found = list[Message]()
            for raw in batch:
                key = digest(raw) + variant
                message = self._messages.get(key)
                if message is None:
                    message = dialect.read(raw, reading, count)
                    self._messages.put(key, message, KEY_BYTES + message.size())
                found.append(message)
            return found

        while len(messages) < len(raws):
            at = len(messages)
            weight = 0
            end = at
            while weight <= BATCH_BYTES and end < len(raws):
                weight += len(memoryview(raws[end])) + MESSAGE
                end += 1
            size = NEW * (weight - MESSAGE * (end - at))
            messages += await self.pool.run(caller, partial(read, raws[at:end]), size)
        return messages

    def previews(self, dialect: Dialect, transcript: Transcript, shape: Shape) -> Previews:
        """Return a function that returns messages with previews and references, from the cache if
        possible."""
        variants = {
            first_preview: _variant(dialect.name, shape, first_preview)
            for first_preview in (False, True)
        }

        def make(index: int, first_preview: bool) -> bytes:
            message = transcript.messages[index]
            key = message.key + variants[first_preview]
            found = self._previews.get(key)
            if found is None:
                found = with_previews(
                    dialect, transcript.raws[index], message, shape, first_preview
                )
                self._previews.put(key, found, KEY_BYTES + TEXT_BYTES + len(found))
            return found

        return make

    async def tool_tokens(self, raw: Raw, model: str, caller: str = "") -> int:
        """Return the tokens of the client's tool definitions, cached because every request repeats
        the same array."""
        if rawjson.is_null(raw):
            return 0
        key = (await self.pool.run(caller, partial(digest, raw), len(memoryview(raw))), model)
        found = self._tools.get(key)
        if found is None:
            found = await self.pool.run(
                caller, lambda: self.count(bytes(raw).decode("utf-8", "replace"), model)
            )
            self._tools.put(key, found)
        return found

    def count(self, text: str, model: str) -> int:
        return self._tokens.count(text, model)

    def counter(self, model: str) -> Callable[[str], int]:
        return lambda text: self._tokens.count(text, model)


@lru_cache(256)
def _variant(*parts: Hashable) -> bytes:
    """Return a digest of our own values, cached because they are too slow to hash for every key."""
    return hashlib.sha256(repr(parts).encode("utf-8", "surrogatepass")).digest()
