"""A request's records in the store: snapshots, hidden rounds, originals.

A record's key is `NAMESPACE/KIND/NAME`, and it is written once. Every lookup may find nothing: a request is served
without its records, too.

Rounds and snapshots end with a seal: one more JSON member with the SHA-256 of the record without it. Versions that know
no seals ignore the member. Records from such a version have no seal, and every detail of them is checked instead.
A damaged record counts as absent. It is deleted, because a good one could not be put in its place otherwise.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgspec
from msgspec import Raw

from proxy.core import rawjson
from proxy.core.turn import HiddenRound
from proxy.dialects.chat import CHAT
from proxy.requests.summarizer import Snapshot
from proxy.stores.guarded import Put, Visit
from proxy.stores.memory import Missing
from proxy.telemetry.outcome import StoreError

T = TypeVar("T")

LOOKUPS = 16
"""How many replies are looked up at first, the newest ones; each further lookup has four times as many. Most
conversations have no hidden rounds, and then each reply is looked up once."""

_UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

_SEAL = re.compile(rb',"sha256":"([0-9a-f]{64})"\}\Z')
_SEAL_BYTES = len(',"sha256":""}') + 64


class _Hidden(msgspec.Struct, frozen=True):
    """A hidden round's record. `earlier`: digests of the replies before it that also hid rounds, oldest first."""

    before: list[Raw]
    instead: Raw
    after: list[Raw]
    tokens: int
    earlier: list[str]

    def round(self) -> HiddenRound:
        instead = None if rawjson.is_null(self.instead) else bytes(self.instead)
        return HiddenRound(tuple(map(bytes, self.before)), instead, tuple(map(bytes, self.after)), self.tokens)


class Records:
    """The records of one namespace, for one request or one background task."""

    def __init__(self, visit: Visit, namespace: str) -> None:
        self._visit = visit
        self._namespace = namespace

    @property
    def errors(self) -> Mapping[StoreError, int]:
        return self._visit.errors

    def key(self, kind: str, name: str) -> str:
        return f"{self._namespace}/{kind}/{name}"

    async def snapshots(self, names: Sequence[str]) -> list[Snapshot | None]:
        """The snapshots with these names; None where there is none yet."""
        keys = [self.key("snapshots", name) for name in names]
        found = await self._visit.get_many(keys, intact=_intact_snapshot)
        return [None if isinstance(value, Missing) else _decoded(value, Snapshot) for value in found]

    async def snapshot(self, key: str) -> bytes | None:
        """The record with this key, without its seal; None where there is none or the store does not answer."""
        [found] = await self._visit.get_many([key], intact=_intact_snapshot)
        return None if isinstance(found, Missing) else _without_seal(found)

    async def keep_snapshot(self, key: str, value: bytes) -> bytes | None:
        """Put the record unless there is one. Returns the stored bytes, whoever wrote them; None on failure."""
        for _ in range(2):  # an existing one may be damaged, and is then deleted when it is read
            done = await self._visit.put(key, sealed(value))
            if done is not Put.EXISTED:
                return value if done is Put.WRITTEN else None
            if winner := await self.snapshot(key):
                return winner
        return None

    async def rounds(self, links: Mapping[int, bytes], model: str) -> dict[int, HiddenRound]:
        """The hidden rounds of these replies (index → digest of the history that the reply ends).

        The newest record names its predecessors. If one of them is missing, it and all later ones are left out: the
        model would see the later ones in a history that it never had.
        """
        newest = await self._newest(links, model)
        if newest is None:
            return {}
        index, hidden = newest
        places = {link.hex(): place for place, link in links.items()}
        earlier = [(places[link], link) for link in hidden.earlier if link in places]
        found = await self._hidden([link for _, link in earlier], model)
        rounds: dict[int, HiddenRound] = {}
        for (place, _), record in zip(earlier, found, strict=True):
            if record is None:
                return rounds
            rounds[place] = record.round()
        return rounds | {index: hidden.round()}

    async def remember(self, link: bytes, model: str, hidden: HiddenRound, earlier: Sequence[bytes]) -> None:
        """Store what a reply hid, under the digest of the history that ends with it."""
        record = _Hidden(
            before=[Raw(raw) for raw in hidden.before],
            instead=Raw(hidden.instead or b"null"),
            after=[Raw(raw) for raw in hidden.after],
            tokens=hidden.tokens,
            earlier=[one.hex() for one in earlier],
        )
        [key] = self._round_keys([link.hex()], model)
        await self._visit.put(key, sealed(msgspec.json.encode(record)))

    def has_originals(self, of: str) -> bool:
        """Whether all texts that `of` names together were written lately."""
        return self._visit.was_put(self.key("originals", of))

    async def keep_originals(self, of: str, texts: Mapping[str, Callable[[], str]]) -> None:
        """Write moved texts, so that people can look at them; the proxy itself reads them from each request.

        `of` names all of these texts together, because every later request of the conversation has them again. Each
        write gets the time of a whole visit: a long history has thousands of them, and nobody waits.
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
        found = await self._visit.get_many(keys, final=True, intact=_intact_round)
        return [None if isinstance(value, Missing) else _decoded(value, _Hidden) for value in found]

    def _round_keys(self, links: Sequence[str], model: str) -> list[str]:
        """A round belongs to the model that took part in it; other models refuse its signatures."""
        variant = hashlib.sha256(model.encode("utf-8", "surrogatepass")).hexdigest()[:8]
        return [self.key("rounds", f"{link}-{variant}") for link in links]


def _decoded(value: bytes, kind: type[T]) -> T | None:
    """None for bytes that are not such a record, such as one of another version."""
    try:
        return msgspec.json.decode(value, type=kind)
    except _UNDECODABLE:
        return None


# -- seals ---------------------------------------------------------------------------------------------------------


def sealed(record: bytes) -> bytes:
    """A JSON object's bytes, with their digest added as the last member."""
    return b'%b,"sha256":"%b"}' % (record[:-1], hashlib.sha256(record).hexdigest().encode())


def _without_seal(value: bytes) -> bytes:
    return value[:-_SEAL_BYTES] + b"}" if _SEAL.search(value, _tail(value)) else value


def _is_sealed(value: bytes) -> bool:
    """Whether there is a seal that matches the rest."""
    seal = _SEAL.search(value, _tail(value))
    return seal is not None and hashlib.sha256(_without_seal(value)).hexdigest().encode() == seal[1]


def _tail(value: bytes) -> int:
    return max(0, len(value) - _SEAL_BYTES)


def _intact_snapshot(value: bytes) -> bool:
    return _is_sealed(value) or _decoded(value, _OldSnapshot) is not None


def _intact_round(value: bytes) -> bool:
    if _is_sealed(value):
        return True
    hidden = _decoded(value, _OldHidden)
    if hidden is None:
        return False
    instead = [] if rawjson.is_null(hidden.instead) else [hidden.instead]
    # Records without a seal are older than all other dialects.
    return CHAT.are_paired([*hidden.before, *instead, *hidden.after])


class _OldSnapshot(msgspec.Struct, forbid_unknown_fields=True):
    """A snapshot without a seal. Any other member would be a damaged seal."""

    text: str
    tokens: int
    model: str


class _OldHidden(msgspec.Struct, forbid_unknown_fields=True):
    """A hidden round without a seal."""

    before: list[Raw]
    instead: Raw
    after: list[Raw]
    tokens: int
    earlier: list[str]
