"""A request's records in the store: snapshots, hidden rounds, originals.

A record's key is `NAMESPACE/KIND/NAME`, and it is written once. Any lookup may find nothing, because a request can be
served without its records.

Records end with a seal: one more JSON member with the SHA-256 of the record without it and of its key, so that a record
under another one's key is no better than a damaged one. A damaged record counts as absent. It is deleted, because
otherwise no good one could be stored under its key.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Protocol, TypeVar

import msgspec
from msgspec import Raw

from proxy import rawjson
from proxy.plan.history import extend
from proxy.plan.labels import digest_in
from proxy.plan.preview import STEP
from proxy.plan.recognition import Reply, Visible, resembles
from proxy.plan.turn import Continuation, HiddenRound
from proxy.rawjson import NotJson
from proxy.requests.summary_writer import Snapshot
from proxy.stores.guarded import Put, Visit
from proxy.stores.memory import Missing
from proxy.telemetry.outcome import StoreError

T = TypeVar("T")
RecordT = TypeVar("RecordT", bound=msgspec.Struct)


class Run(Protocol):
    """Runs work where it holds up nobody, and returns its result."""

    async def __call__(self, work: Callable[[], T]) -> T: ...


async def at_once(work: Callable[[], T]) -> T:
    """A `Run` for little work."""
    return work()


LOOKUPS, MOST_LOOKUPS = 16, 1_024
"""The number of replies in the first lookup, which takes the newest ones. Each further lookup takes four times as many,
up to the second number, as that takes the event loop 20 ms. Most conversations have no hidden rounds, and then each
reply is looked up once."""

_SEAL = re.compile(rb',"sha256":"([0-9a-f]{64})"\}\Z')
_SEAL_BYTES = len(',"sha256":""}') + 64


PLACES = 4
"""Rounds that are kept by the history before the reply, for clients that rewrite the reply. One history has several if
it was sent several times. If the last place is taken, none is used, because there may be more."""


class _Hidden(msgspec.Struct, frozen=True):
    """A hidden round's record. `earlier` has the digests of earlier replies with hidden rounds, oldest first."""

    before: list[Raw]
    instead: Raw
    after: list[Raw]
    tokens: int
    earlier: list[str]
    sizes: list[int] = []
    names: list[str] = []
    """The names of these earlier replies' records; empty in old records, where they are the digests."""
    name: str = ""
    visible: Visible | None = None
    """The reply as the client saw it."""

    def round(self, link: str) -> HiddenRound:
        """Return the round of the reply with this digest."""
        instead = None if rawjson.is_null(self.instead) else bytes(self.instead)
        before, after = tuple(map(bytes, self.before)), tuple(map(bytes, self.after))
        name = "" if self.name == link else self.name
        return HiddenRound(before, instead, after, self.tokens, tuple(self.sizes), name)

    def differs(self, other: _Hidden) -> bool:
        return (self.before, self.instead, self.after) != (other.before, other.instead, other.after)

    @property
    def empty(self) -> bool:
        """Whether the reply hid nothing. Its record only says that there is another reply to the same history."""
        return not (self.before or self.after)


class _Continued(msgspec.Struct, frozen=True):
    """A continuation's record."""

    last: str
    after: list[Raw]


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
        """Return the snapshots with these names, with None for each that does not exist."""
        keys = [self.key("snapshots", name) for name in names]
        found = await self._visit.get_many(keys, intact=_is_sealed)
        return [None if isinstance(value, Missing) else _decoded(value, Snapshot) for value in found]

    async def snapshot(self, key: str) -> bytes | None:
        """Return the record with this key, without its seal; None if there is none or the store does not answer."""
        [found] = await self._visit.get_many([key], intact=_is_sealed)
        return None if isinstance(found, Missing) else _without_seal(found)

    async def keep_snapshot(self, key: str, value: bytes) -> bytes | None:
        """Store the record unless there is one. Returns the stored bytes, whoever wrote them, or None on failure.

        If the store fails, this process keeps the record, which was paid for, and puts it later.
        """
        for again in (False, True):  # reading deletes an existing record if it is damaged; others delete them, too
            done = await self._visit.put(key, sealed(key, value), sure=again)
            if done is not Put.EXISTED:
                return value
            if winner := await self.snapshot(key):
                return winner
        return None

    async def rounds(self, replies: Mapping[int, Reply], model: str) -> dict[int, HiddenRound]:
        """Return the hidden rounds of these replies, by their indexes.

        The newest record names its predecessors. If one of them is missing, it and all later ones are left out, because
        the model would otherwise see the later ones in a history that it never had.
        """
        newest = await self._newest(replies, model)
        if newest is None:
            return {}
        index, hidden = newest
        places = {reply.link.hex(): place for place, reply in replies.items()}
        names = hidden.names or hidden.earlier
        earlier = [(link, name) for link, name in zip(hidden.earlier, names, strict=False) if link in places]
        found = await self._hidden([name for _, name in earlier], model)
        rounds: dict[int, HiddenRound] = {}
        for (link, _), record in zip(earlier, found, strict=True):
            if record is None:
                return rounds
            rounds[places[link]] = record.round(link)
        return rounds | {index: hidden.round(replies[index].link.hex())}

    async def remember(
        self,
        link: bytes,
        model: str,
        hidden: HiddenRound,
        earlier: Sequence[tuple[bytes, str]],
        befores: Collection[bytes] = (),
        visible: Visible | None = None,
        run: Run = at_once,
    ) -> None:
        """Store the hidden rounds of a reply.

        The record's name is the digest of the history that ends with the reply as the client saw it. For clients that
        rewrite the reply, it is also kept by the digests `befores` of the history before it. `earlier` are the earlier
        replies with hidden rounds: the digest of the history that ends with each, and the name of its record. `run`
        makes the record, which takes long for one of many calls.
        """
        record, encoded = await run(partial(_record, link, hidden, earlier, visible))
        [key] = self._round_keys([link.hex()], model)
        placed = [self._place(before, record, encoded, model, run) for before in befores]
        await asyncio.gather(self._visit.put(key, await run(partial(sealed, key, encoded))), *placed)
        for before in befores:
            if self._visit.was_put(self._hid_nothing(before, model)):
                await self._contested(before, model, None)

    async def contest(self, before: bytes, model: str, visible: Callable[[], Awaitable[Visible]]) -> None:
        """Record a reply that hid nothing, if another one to the same history did, before it or after it.

        Only this process's memory is asked, because nearly every reply hides nothing.
        """
        [first, *_] = self._round_keys(_places(before), model)
        if self._visit.was_put(first):
            await self._contested(before, model, await visible())
        else:
            self._visit.note_put(self._hid_nothing(before, model))

    async def _contested(self, before: bytes, model: str, visible: Visible | None) -> None:
        record = _Hidden([], Raw(b"null"), [], 0, [], visible=visible)
        await self._place(before, record, msgspec.json.encode(record), model, at_once)

    def _hid_nothing(self, before: bytes, model: str) -> str:
        """Return a key for the memory of this process alone: a reply to this history hid nothing."""
        [key] = self._round_keys([extend(before, b"hid nothing").hex()], model)
        return key

    async def _place(self, before: bytes, record: _Hidden, encoded: bytes, model: str, run: Run) -> None:
        """Keep a round at the first free place of the history before it, unless it is at one already."""
        for name in _places(before):
            [key] = self._round_keys([name], model)
            if await self._visit.put(key, await run(partial(sealed, key, encoded))) is not Put.EXISTED:
                return
            [there] = await self._hidden([name], model)
            if there is not None and there.visible == record.visible and not there.differs(record):
                return

    async def continuation(self, shown: str) -> Continuation | None:
        """Return how to go on from a reply that the client knows by this id; None if upstream knows it by the same."""
        [found] = await self._visit.get_many([self._continuation_key(shown)], intact=_is_sealed)
        record = None if isinstance(found, Missing) else _decoded(found, _Continued)
        return None if record is None else Continuation(shown, record.last, tuple(map(bytes, record.after)))

    async def keep_continuation(self, continuation: Continuation) -> None:
        """Store how to go on from a reply with hidden rounds."""
        record = _Continued(last=rawjson.encodable(continuation.last), after=[Raw(raw) for raw in continuation.after])
        key = self._continuation_key(continuation.shown)
        await self._visit.put(key, sealed(key, msgspec.json.encode(record)))

    def _continuation_key(self, shown: str) -> str:
        """Return the record's key, for which upstream's id may have unsuitable characters."""
        return self.key("continuations", hashlib.sha256(shown.encode("utf-8", "surrogatepass")).hexdigest()[:32])

    def has_originals(self, of: str) -> bool:
        """Whether all texts that `of` names together were written recently."""
        return self._visit.was_put(self.key("originals", of))

    async def original(self, name: str) -> str | None:
        """Return a text that was moved out of a conversation of this namespace; None if it is not there, or damaged.

        What a name says of the text's digest is checked; the originals behind a summary are named after their history.
        """
        [found] = await self._visit.get_many([self.key("originals", name)], intact=partial(_intact_original, name))
        return None if isinstance(found, Missing) else found.decode("utf-8", "surrogatepass")

    async def keep_originals(
        self, of: str, texts: Mapping[str, Callable[[], str]], run: Callable[[Callable[[], bytes]], Awaitable[bytes]]
    ) -> None:
        """Write moved texts for later conversations and for people; this one has them in each of its requests.

        `of` names all of these texts together, because every later request of the conversation has them again. A long
        history has thousands of texts and no request waits for them, so each write may take as long as a whole visit.
        `run` runs the reading of one text, which can take long.
        """
        missing = 0
        for number, (name, text) in enumerate(texts.items(), 1):
            key = self.key("originals", name)
            if not self._visit.was_put(key):
                value = await run(partial(_encoded, text))
                missing += await self._visit.anew().put(key, value, keep=False) is Put.FAILED
            if not number % MOST_LOOKUPS:
                await asyncio.sleep(0)  # those that were put before let nobody else have a turn
        if not missing:
            self._visit.note_put(self.key("originals", of))

    async def _newest(self, replies: Mapping[int, Reply], model: str) -> tuple[int, _Hidden] | None:
        indexes = sorted(replies, reverse=True)
        start, size = 0, LOOKUPS
        while batch := indexes[start : start + size]:
            names = [replies[index].link.hex() for index in batch]
            placed = [_place(replies[index].before, 0) for index in batch]
            found = await self._hidden([*names, *placed], model)
            for index, record, first in zip(batch, found, found[len(batch) :], strict=False):
                if record is None and first is not None:
                    record = await self._recognised(replies[index], first, model)
                if record is not None:
                    return index, record
            start, size = start + size, min(4 * size, MOST_LOOKUPS)
            await asyncio.sleep(0)  # a lookup that memory answers lets nobody else have a turn
        return None

    async def _recognised(self, reply: Reply, first: _Hidden, model: str) -> _Hidden | None:
        """Return the round of a reply that its client has rewritten. If there may be several, none is the right one."""
        others = await self._hidden(_places(reply.before)[1:], model, final=False)
        found = [one for one in (first, *others) if one is not None]
        if len(found) == PLACES or any(one.visible is None for one in found):
            return None
        sent = reply.visible()
        rounds = [one for one in found if one.visible and resembles(one.visible, sent)]
        ambiguous = any(one.differs(rounds[0]) for one in rounds)
        return None if ambiguous or not rounds or rounds[0].empty else rounds[0]

    async def _hidden(self, names: Sequence[str], model: str, *, final: bool = True) -> list[_Hidden | None]:
        keys = self._round_keys(names, model)
        found = await self._visit.get_many(keys, final=final, intact=_is_sealed)
        return [None if isinstance(value, Missing) else _decoded(value, _Hidden) for value in found]

    def _round_keys(self, names: Sequence[str], model: str) -> list[str]:
        """Return the keys of rounds. They depend on the model, because other models refuse its signatures."""
        variant = hashlib.sha256(model.encode("utf-8", "surrogatepass")).hexdigest()[:8]
        return [self.key("rounds", f"{name}-{variant}") for name in names]


def _record(
    link: bytes, hidden: HiddenRound, earlier: Sequence[tuple[bytes, str]], visible: Visible | None
) -> tuple[_Hidden, bytes]:
    """Return a hidden round's record, and as JSON."""
    record = _Hidden(
        before=[Raw(raw) for raw in hidden.before],
        instead=Raw(hidden.instead or b"null"),
        after=[Raw(raw) for raw in hidden.after],
        tokens=hidden.tokens,
        earlier=[one.hex() for one, _ in earlier],
        sizes=list(hidden.sizes),
        names=[name or one.hex() for one, name in earlier] if any(name for _, name in earlier) else [],
        name=link.hex(),
        visible=visible,
    )
    return record, msgspec.json.encode(record)


def _intact_original(name: str, value: bytes) -> bool:
    return hashlib.sha256(value).hexdigest().startswith(digest_in(name))


def _encoded(text: Callable[[], str]) -> bytes:
    whole = text()
    return b"".join([whole[at : at + STEP].encode("utf-8", "surrogatepass") for at in range(0, len(whole), STEP)])


def _places(before: bytes) -> list[str]:
    """Return the names under which rounds are kept by the history before their replies."""
    return [_place(before, number) for number in range(PLACES)]


def _place(before: bytes, number: int) -> str:
    return extend(before, b"place %d" % number).hex()


def _decoded(value: bytes, kind: type[RecordT]) -> RecordT | None:
    """Decode a record. Returns None for anything else, such as a record of another version."""
    try:
        found, masked = rawjson.decode(_decoder(kind), value)
    except NotJson:
        return None
    return kind(*map(_unmasked, msgspec.structs.astuple(found))) if masked else found


@lru_cache
def _decoder(kind: type[RecordT]) -> msgspec.json.Decoder[RecordT]:
    return msgspec.json.Decoder(kind)


def _unmasked(value: Any) -> Any:
    """Return a record's member as it was stored: entries may have half a surrogate pair."""
    if isinstance(value, list):
        return list(map(_unmasked, value))
    return rawjson.unmasked(value) if isinstance(value, Raw) else value


# -- seals ---------------------------------------------------------------------------------------------------------


def sealed(key: str, record: bytes) -> bytes:
    """Return a JSON object's bytes with the digest of them and their key added as the last member."""
    return b'%b,"sha256":"%b"}' % (record[:-1], _seal(key, record))


def _seal(key: str, record: bytes) -> bytes:
    digest = hashlib.sha256(record)
    digest.update(key.encode())
    return digest.hexdigest().encode()


def _without_seal(value: bytes) -> bytes:
    return value[:-_SEAL_BYTES] + b"}" if _SEAL.search(value, _tail(value)) else value


def _is_sealed(key: str, value: bytes) -> bool:
    """Whether the value has a seal that matches the rest of it and its key."""
    seal = _SEAL.search(value, _tail(value))
    return seal is not None and _seal(key, _without_seal(value)) == seal[1]


def _tail(value: bytes) -> int:
    return max(0, len(value) - _SEAL_BYTES)
