"""What one request asks of the store, in its own words: snapshots, hidden rounds, originals.

Records stand under `NAMESPACE/KIND/NAME` and are written once. Everything here can come back empty: the store is a
memo, and without it a request is served all the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgspec
from msgspec import Raw

from proxy.core import rawjson
from proxy.core.render import Round
from proxy.stores.guarded import Put, Visit
from proxy.stores.memory import Missing
from proxy.summarizer import Snapshot

T = TypeVar("T")

LOOKUPS = 16
"""Replies asked for at once, newest first, and then four times as many each time: most conversations have no hidden
rounds, and then each reply is asked for once."""


class _Hidden(msgspec.Struct, frozen=True):
    """A hidden round's record. `earlier`: the digests of the replies before it that hid rounds too, oldest first."""

    before: list[Raw]
    instead: Raw
    after: list[Raw]
    tokens: int
    earlier: list[str]

    def round(self) -> Round:
        instead = None if rawjson.is_null(self.instead) else bytes(self.instead)
        return Round(tuple(map(bytes, self.before)), instead, tuple(map(bytes, self.after)), self.tokens)


class Records:
    """The records of one namespace, as one request (or one task beside it) visits them."""

    def __init__(self, visit: Visit, namespace: str) -> None:
        self._visit = visit
        self._namespace = namespace

    @property
    def errors(self) -> Mapping[str, int]:
        return self._visit.errors

    def key(self, kind: str, name: str) -> str:
        return f"{self._namespace}/{kind}/{name}"

    async def snapshots(self, names: Sequence[str]) -> list[Snapshot | None]:
        """The snapshots of these names, None where there is none yet."""
        found = await self._visit.get_many([self.key("snapshots", name) for name in names])
        return [None if isinstance(value, Missing) else _decoded(value, Snapshot) for value in found]

    async def snapshot(self, key: str) -> bytes | None:
        """The record of this key; None where there is none, or no answer."""
        found = await self._visit.get(key)
        return None if isinstance(found, Missing) else found

    async def keep_snapshot(self, key: str, value: bytes) -> bytes | None:
        """Put if absent; the stored bytes, the winner's. None where the store failed."""
        done = await self._visit.put(key, value)
        if done is not Put.EXISTED:
            return value if done is Put.WRITTEN else None
        return await self.snapshot(key)

    async def rounds(self, links: Mapping[int, bytes], model: str) -> dict[int, Round]:
        """The hidden rounds of these replies (index → digest of the history that the reply ends).

        The newest hit names its predecessors; where one of them is missing, it and all behind it are left out, for
        then the model has never seen what stands behind it in that form.
        """
        newest = await self._newest(links, model)
        if newest is None:
            return {}
        index, hidden = newest
        places = {link.hex(): place for place, link in links.items()}
        earlier = [(places[link], link) for link in hidden.earlier if link in places]
        found = await self._hidden([link for _, link in earlier], model)
        rounds: dict[int, Round] = {}
        for (place, _), record in zip(earlier, found, strict=True):
            if record is None:
                return rounds
            rounds[place] = record.round()
        return rounds | {index: hidden.round()}

    async def remember(self, link: bytes, model: str, hidden: Round, earlier: Sequence[bytes]) -> None:
        """Write down what a reply hid, under the digest of the history that it ends."""
        record = _Hidden(
            before=[Raw(raw) for raw in hidden.before],
            instead=Raw(hidden.instead or b"null"),
            after=[Raw(raw) for raw in hidden.after],
            tokens=hidden.tokens,
            earlier=[one.hex() for one in earlier],
        )
        [key] = self._round_keys([link.hex()], model)
        await self._visit.put(key, msgspec.json.encode(record))

    def has_originals(self, of: str) -> bool:
        """Whether all that `of` stands for was written lately."""
        return self._visit.was_put(self.key("originals", of))

    async def keep_originals(self, of: str, texts: Mapping[str, Callable[[], str]]) -> None:
        """Write moved texts for people to trace; the proxy itself reads them out of each request.

        `of` stands for all of these texts together: every later request of the conversation has them again. Each has
        the time of a whole visit: a long history has thousands, and nobody waits for them.
        """
        missing = 0
        for name, text in texts.items():
            key = self.key("originals", name)
            if not self._visit.was_put(key):
                done = await self._visit.anew().put(key, text().encode("utf-8", "surrogatepass"), keep=False)
                missing += done is Put.FAILED
        if not missing:
            self._visit.note_put(self.key("originals", of))

    async def _newest(self, links: Mapping[int, bytes], model: str) -> tuple[int, _Hidden] | None:
        indexes = sorted(links, reverse=True)
        start, size = 0, LOOKUPS
        while batch := indexes[start : start + size]:
            found = await self._hidden([links[index].hex() for index in batch], model)
            for index, record in zip(batch, found, strict=True):
                if record is not None:
                    return index, record
            start, size = start + size, 4 * size
        return None

    async def _hidden(self, links: Sequence[str], model: str) -> list[_Hidden | None]:
        keys = self._round_keys(links, model)
        found = await self._visit.get_many(keys, final=True)
        return [None if isinstance(value, Missing) else _decoded(value, _Hidden) for value in found]

    def _round_keys(self, links: Sequence[str], model: str) -> list[str]:
        """Rounds are for the model that took part in them: others refuse its signatures."""
        variant = hashlib.sha256(model.encode("utf-8", "surrogatepass")).hexdigest()[:8]
        return [self.key("rounds", f"{link}-{variant}") for link in links]


def _decoded(value: bytes, kind: type[T]) -> T | None:
    """A record of another version, or damaged by whoever owns the disk, is as good as none."""
    try:
        return msgspec.json.decode(value, type=kind)
    except msgspec.MsgspecError:
        return None
