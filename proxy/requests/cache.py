"""What came before: beginnings of histories with their plan so far, and measured messages.

A body is compared with the beginnings of its caller, and only the rest of it is parsed, measured
and planned. A message that is known from elsewhere in another history is not measured again. All
this is a pure function of bytes and policy, so that nothing here ever becomes stale. It shares one
bounded memory, of which every tenant keeps its part.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache, partial
from itertools import count as numbers
from typing import Protocol, TypeVar

from msgspec import Raw
from msgspec.structs import replace

from proxy import rawjson
from proxy.dialects import Dialect, render
from proxy.dialects.beginnings import LEAST, coming, parsed, place_in
from proxy.dialects.entries import marks_in, without_marks
from proxy.lru import ENTRY_BYTES, FairLru, Lru
from proxy.plan.history import Beginning, History, Terms, Transcript
from proxy.plan.plan import Message, Reading, digest
from proxy.plan.preview import Shape
from proxy.plan.summary import READ_CHARS, Mentions, mentions
from proxy.plan.turn import ENTRY, Request
from proxy.threads import NEW, WorkPool, breathe, tenant_of

BATCH_BYTES = 512 << 10
"""Bytes of messages that a thread reads at a time, about 50 milliseconds. A larger message ends its
batch."""
MESSAGE = 700
"""Bytes that reading a small message counts as towards a batch: it takes time even if it is
empty."""
MEMORY_BYTES = 224 << 20
"""Bytes of all that is remembered."""
LARGEST = 2
"""A beginning may take half of it. Larger ones are read anew at each turn. That is only a tenant's
own loss, as no tenant can push out what others hold."""
KEY_BYTES = ENTRY_BYTES + 112

ALIKE = 256
"""The most beginnings of a caller that begin alike."""
CANDIDATES = 3
"""The most of them that are compared with a body: nearly all others have another end."""
END = 32
"""Bytes of that end."""
TERMS = 4
"""The most plans that are kept with a beginning: for several models, or for more pauses."""

T = TypeVar("T")

Key = tuple[str, bytes]
"""A message's caller, and its digest followed by that of everything else that its measure depends
on."""
Alike = tuple[str, str, bytes]
"""The caller and the dialect of beginnings, and how they begin."""


class Counter(Protocol):
    def count(self, text: str, model: str = "") -> int: ...


class MessageCache:
    """Reads requests and their messages. `caller` names the namespace that they are read for: it
    finds only what came from there."""

    def __init__(self, tokens: Counter, pool: WorkPool | None = None) -> None:
        self._tokens = tokens
        self.pool = pool or WorkPool("reading")
        self._memory: FairLru[Key | int, Message | Beginning | tuple[Mentions, ...]] = FairLru(
            MEMORY_BYTES, LARGEST, self._dropped
        )
        self._alike: dict[Alike, dict[int, Beginning]] = {}
        """The beginnings by their numbers in memory, the newest last."""
        self._places: dict[int, Alike] = {}
        self._numbers = numbers()
        self._tools: Lru[tuple[str, bytes, str], int] = Lru(1_000)

    def caches(self) -> dict[str, Callable[[], tuple[int, int]]]:
        """Functions that return the number of entries and bytes of each cache, for the metrics."""
        return {"histories": lambda: (len(self._memory), self._memory.weight)}

    # -- beginnings --

    def known(self, dialect: Dialect, body: bytes, caller: str = "") -> Beginning | None:
        """Return the longest beginning of this caller's that a body has."""
        start = place_in(dialect, body)
        if start is None:
            return None
        alike = self._alike.get((caller, dialect.name, body[start : start + LEAST]), {})
        compared = 0
        best: tuple[int, Beginning] | None = None
        for number, one in reversed(list(alike.items())):
            end = start + len(one.text)
            if (best and len(one.text) <= len(best[1].text)) or (
                body[end - END : end] != one.text[-END:]
            ):
                continue
            if body.startswith(one.text, start):
                best = number, one
            compared += 1
            if compared == CANDIDATES:
                break
        if best is None:
            return None
        self._memory.get(tenant_of(caller), best[0])  # it is used
        return best[1]

    def request(self, dialect: Dialect, body: bytes, caller: str = "") -> Request:
        """Parse a body. Raises Unplannable."""
        return parsed(dialect, body, self.known(dialect, body, caller))

    def _keep(
        self, dialect: Dialect, caller: str, known: Beginning | None, made: Beginning
    ) -> None:
        """Keep a beginning, in the place of the known one that it goes on from."""
        owner = tenant_of(caller)
        place = caller, dialect.name, made.text[:LEAST]
        with self._memory.lock:
            alike = self._alike.setdefault(place, {})
            gone = [number for number, one in alike.items() if one is known or one is made]
            gone += [*alike][: max(len(alike) - ALIKE, 0)]
            number = next(self._numbers)
            alike[number] = made
            self._places[number] = place
            for one in gone:
                self._memory.discard(owner, one)
            self._memory.put(owner, number, made, ENTRY_BYTES + LEAST + made.size())

    def _dropped(self, key: Key | int, value: object) -> None:
        if isinstance(key, int):
            place = self._places.pop(key)
            del self._alike[place][key]
            if not self._alike[place]:
                del self._alike[place]

    # -- histories --

    async def history(
        self,
        dialect: Dialect,
        request: Request,
        terms: Terms,
        caller: str = "",
        *,
        made: Beginning | None = None,
        then: Callable[[History], T],
    ) -> tuple[T, Beginning | None]:
        """Return what `then` makes of the measured and folded history, and the beginning that is
        kept for later requests; `made` is the one that was kept when this request was read with
        other terms. If the request continues an earlier one, only the new messages are read. Raises
        Unplannable."""
        known = made or request.known
        past = (known.histories.get(terms) if known else None) or History(terms)
        raws = request.entries[len(past) :]
        reading = Reading.of(terms.offload, terms.room.window, terms.harmless)
        messages = await self.read(dialect, raws, reading, terms.model, caller)
        parts = sum([len(message.pieces) + len(message.calls) for message in messages])

        def extended() -> tuple[T, Beginning | None]:
            history = past
            beginning = made or coming(dialect, request)
            if beginning is not None:
                new = len(beginning.entries) - len(past)
                history = past.extended(messages[:new])
                before = known.histories if known else {}
                kept = [one for one in before.items() if one[0] != terms][1 - TERMS :]
                beginning.histories = {**dict(kept), terms: history}
                self._keep(dialect, caller, known, beginning)
            whole = history.extended(messages[len(history) - len(past) :])
            whole.stem = history if 0 < len(history) < len(whole) else None
            return then(whole), beginning

        return await self.pool.run(caller, extended, max(request.size, parts * ENTRY))

    async def read(
        self, dialect: Dialect, raws: Sequence[Raw], reading: Reading, model: str, caller: str = ""
    ) -> list[Message]:
        """Return every message's measure, in order. Raises Unplannable."""
        variant = _variant(dialect.name, reading, model)
        owner = tenant_of(caller)
        count = self.counter(model)
        messages = list[Message]()

        def read(batch: Sequence[Raw]) -> list[Message]:
            found = list[Message]()
            for raw in batch:
                marks = marks_in(raw)
                plain = without_marks(raw, marks)
                key = caller, digest(plain) + variant
                message = self._memory.get(owner, key)
                if not isinstance(message, Message):
                    message = dialect.read(plain, reading, count)
                    self._memory.put(owner, key, message, KEY_BYTES + message.size())
                if marks:
                    breakpoints = tuple((mark.key, bytes(mark.value)) for mark in marks)
                    message = replace(message, digest=digest(raw), breakpoints=breakpoints)
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

    @staticmethod
    def previews(dialect: Dialect, transcript: Transcript, shape: Shape) -> render.Previews:
        """Return a function that returns messages with previews and references, which are made
        once."""

        def make(index: int, first_preview: bool) -> bytes:
            message = transcript.messages[index]
            made = message.replaced.get(first_preview)
            if made is None:
                raw = transcript.raws[index]
                made = render.with_previews(dialect, raw, message, shape, first_preview)
                message.replaced[first_preview] = made
            return made

        return make

    def mentions(
        self, dialect: Dialect, transcript: Transcript, indexes: Sequence[int], caller: str
    ) -> list[Mentions]:
        """Return what each text of these entries mentions, of the newest ones with `READ_CHARS`
        characters. One that was in an earlier snapshot is not read again."""
        owner = tenant_of(caller)
        found = list[Mentions]()
        chars = 0
        for index in reversed(indexes):
            if chars >= READ_CHARS:
                break
            message = transcript.messages[index]
            key = caller, message.digest + (b"said" if message.carries else b"mentioned")
            here = self._memory.get(owner, key)
            if not isinstance(here, tuple):
                sections = render.originals_of(dialect, transcript, index)
                here = tuple(mentions(one, breathe) for one in sections if not one.part)
                texts = (text for one in here for detail in one.details for text in detail)
                size = sum([ENTRY_BYTES + len(text) for text in texts])
                self._memory.put(owner, key, here, KEY_BYTES + size)
            found += reversed(here)
            chars += sum([one.chars for one in here])
        return found[::-1]

    async def tool_tokens(self, raw: Raw, model: str, caller: str = "") -> int:
        """Return the tokens of the client's tool definitions, cached because every request repeats
        the same array."""
        if rawjson.is_null(raw):
            return 0
        digested = await self.pool.run(caller, partial(digest, raw), len(memoryview(raw)))
        key = caller, digested, model
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
