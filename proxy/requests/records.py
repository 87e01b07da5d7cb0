"""What one request asks of the store, in its own words: snapshots, hidden rounds, originals.

Records stand under `NAMESPACE/KIND/NAME` and are written once. Everything here can come back empty: the store is a
memo, and without it a request is served all the same.

Rounds and snapshots end with a seal: one more JSON member, the SHA-256 of the record without it. A version that knows
no seals passes over the member. Records that such a version wrote have none, and are looked at in every detail instead.
A damaged record counts as absent and is deleted, since it would keep a good one from being put.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgspec
from msgspec import Raw

from proxy.core import rawjson
from proxy.core.rawjson import NotJson
from proxy.dialects.chat.messages import tool_calls
from proxy.dialects.chat.render import HiddenRound
from proxy.requests.summarizer import Snapshot
from proxy.stores.guarded import Put, Visit
from proxy.stores.memory import Missing
from proxy.telemetry.outcome import StoreError

T = TypeVar("T")

LOOKUPS = 16
"""Replies asked for at once, newest first, and then four times as many each time: most conversations have no hidden
rounds, and then each reply is asked for once."""

_UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

_SEAL = re.compile(rb',"sha256":"([0-9a-f]{64})"\}\Z')
_SEAL_BYTES = len(',"sha256":""}') + 64


class _Hidden(msgspec.Struct, frozen=True):
    """A hidden round's record. `earlier`: the digests of the replies before it that hid rounds too, oldest first."""

    before: list[Raw]
    instead: Raw
    after: list[Raw]
    tokens: int
    earlier: list[str]

    def round(self) -> HiddenRound:
        instead = None if rawjson.is_null(self.instead) else bytes(self.instead)
        return HiddenRound(tuple(map(bytes, self.before)), instead, tuple(map(bytes, self.after)), self.tokens)


class Records:
    """The records of one namespace, as one request (or one task beside it) visits them."""

    def __init__(self, visit: Visit, namespace: str) -> None:
        self._visit = visit
        self._namespace = namespace

    @property
    def errors(self) -> Mapping[StoreError, int]:
        return self._visit.errors

    def key(self, kind: str, name: str) -> str:
        return f"{self._namespace}/{kind}/{name}"

    async def snapshots(self, names: Sequence[str]) -> list[Snapshot | None]:
        """The snapshots of these names, None where there is none yet."""
        keys = [self.key("snapshots", name) for name in names]
        found = await self._visit.get_many(keys, intact=_intact_snapshot)
        return [None if isinstance(value, Missing) else _decoded(value, Snapshot) for value in found]

    async def snapshot(self, key: str) -> bytes | None:
        """The record of this key, without its seal; None where there is none, or no answer."""
        [found] = await self._visit.get_many([key], intact=_intact_snapshot)
        return None if isinstance(found, Missing) else _without_seal(found)

    async def keep_snapshot(self, key: str, value: bytes) -> bytes | None:
        """Put if absent; the stored bytes, the winner's. None where the store failed."""
        for _ in range(2):  # the one that existed may be damaged, and deleted when it is read
            done = await self._visit.put(key, sealed(value))
            if done is not Put.EXISTED:
                return value if done is Put.WRITTEN else None
            if winner := await self.snapshot(key):
                return winner
        return None

    async def rounds(self, links: Mapping[int, bytes], model: str) -> dict[int, HiddenRound]:
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
        rounds: dict[int, HiddenRound] = {}
        for (place, _), record in zip(earlier, found, strict=True):
            if record is None:
                return rounds
            rounds[place] = record.round()
        return rounds | {index: hidden.round()}

    async def remember(self, link: bytes, model: str, hidden: HiddenRound, earlier: Sequence[bytes]) -> None:
        """Write down what a reply hid, under the digest of the history that it ends."""
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
        found = await self._visit.get_many(keys, final=True, intact=_intact_round)
        return [None if isinstance(value, Missing) else _decoded(value, _Hidden) for value in found]

    def _round_keys(self, links: Sequence[str], model: str) -> list[str]:
        """Rounds are for the model that took part in them: others refuse its signatures."""
        variant = hashlib.sha256(model.encode("utf-8", "surrogatepass")).hexdigest()[:8]
        return [self.key("rounds", f"{link}-{variant}") for link in links]


def _decoded(value: bytes, kind: type[T]) -> T | None:
    """None for bytes that are no such record, such as one of another version."""
    try:
        return msgspec.json.decode(value, type=kind)
    except _UNDECODABLE:
        return None


# -- seals ---------------------------------------------------------------------------------------------------------


def sealed(record: bytes) -> bytes:
    """A JSON object's bytes with the digest of those bytes as one more, last, member."""
    return b'%b,"sha256":"%b"}' % (record[:-1], hashlib.sha256(record).hexdigest().encode())


def _without_seal(value: bytes) -> bytes:
    return value[:-_SEAL_BYTES] + b"}" if _SEAL.search(value, _tail(value)) else value


def _is_sealed(value: bytes) -> bool:
    """Whether there is a seal, and it is that of the rest."""
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
    return hidden is not None and _are_messages(hidden)


class _OldSnapshot(msgspec.Struct, forbid_unknown_fields=True):
    """A snapshot without a seal: what has any other member had one, which is damaged."""

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


def _are_messages(hidden: _OldHidden) -> bool:
    """Whether this is what the model and our tools say: each answer of a tool is that of a call beside it."""
    instead = [] if rawjson.is_null(hidden.instead) else [hidden.instead]
    called, answered = set[str](), set[str]()
    try:
        for raw in (*hidden.before, *instead, *hidden.after):
            json.loads(bytes(raw))  # msgspec skips over what is inside
            members = rawjson.members(raw)
            if rawjson.string(members["role"]) == "tool":
                answered.add(rawjson.string(members["tool_call_id"]))
            elif rawjson.string(members["role"]) == "assistant":
                called |= {call.id for call in tool_calls(members)}
            else:
                return False
    except (NotJson, KeyError, ValueError, RecursionError):
        return False
    return answered <= called
