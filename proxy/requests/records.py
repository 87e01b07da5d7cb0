"""A request's records in the store: snapshots, hidden rounds, originals, pauses.

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
from proxy.plan import compacting
from proxy.plan.history import extend
from proxy.plan.preview import CHUNK, digest_in
from proxy.plan.recognise import Reply, Visible, contains, resembles
from proxy.plan.turn import Continuation, Hidden
from proxy.rawjson import NotJson
from proxy.requests.summary_writer import Snapshot
from proxy.stores.guarded import Missing, Put, Visit

T = TypeVar("T")
RecordT = TypeVar("RecordT", bound=msgspec.Struct)


class Run(Protocol):
    """Runs work where it holds up nobody, and returns its result."""

    async def __call__(self, work: Callable[[], T]) -> T: ...


async def at_once(work: Callable[[], T]) -> T:
    """A `Run` for little work."""
    return work()


MOST_LOOKUPS = 1_024
"""The number of keys in one lookup, as that takes the event loop 20 ms."""

_SEAL = re.compile(rb',"sha256":"([0-9a-f]{64})"\}\Z')
_SEAL_BYTES = len(',"sha256":""}') + 64


PLACES = 4
"""Rounds that are kept by what else identifies the reply, for clients that rewrite it or what precedes it. A history
has several replies if it was sent several times. If the last place is taken, none is used: there may be more."""


class _Record(msgspec.Struct, frozen=True):
    """A hidden round's record."""

    before: list[Raw]
    instead: Raw
    after: list[Raw]
    tokens: int
    sizes: list[int] = []
    visible: Visible | None = None
    """The reply as the client saw it."""

    @classmethod
    def of(cls, hidden: Hidden, visible: Visible | None) -> _Record:
        before, after = map(Raw, hidden.before), map(Raw, hidden.after)
        instead = Raw(hidden.instead or b"null")
        return cls([*before], instead, [*after], hidden.tokens, [*hidden.sizes], visible)

    def round(self) -> Hidden:
        instead = None if rawjson.is_null(self.instead) else bytes(self.instead)
        before, after = tuple(map(bytes, self.before)), tuple(map(bytes, self.after))
        return Hidden(before, instead, after, self.tokens, tuple(self.sizes))

    def differs(self, other: _Record) -> bool:
        return (self.before, self.instead, self.after) != (other.before, other.instead, other.after)

    @property
    def empty(self) -> bool:
        """Whether the reply hid nothing. Its record only says that there is another reply to the same history."""
        return not (self.before or self.after)


class _Continued(msgspec.Struct, frozen=True):
    """A continuation's record."""

    rounds: list[str]
    after: list[Raw]
    reply: Raw


class _Compacted(msgspec.Struct, frozen=True):
    """The record behind a reference that the client has in the place of its history."""

    text: str


class _Paused(msgspec.Struct, frozen=True):
    """The record of a pause before a request, after which upstream's cache had expired."""

    seconds: int


class Records:
    """The records of one namespace, for one request or one background task."""

    def __init__(self, visit: Visit, namespace: str) -> None:
        self._visit = visit
        self._namespace = namespace

    @property
    def namespace(self) -> str:
        return self._namespace

    @property
    def errors(self) -> Mapping[str, int]:
        return self._visit.errors

    def key(self, kind: str, name: str) -> str:
        return f"{self._namespace}/{kind}/{name}"

    async def snapshots(self, names: Sequence[str]) -> list[Snapshot | None]:
        """Return the snapshots with these names, with None for each that does not exist."""
        return await self._read_many([self.key("snapshots", name) for name in names], Snapshot)

    async def keep_snapshot(self, name: str, snapshot: Snapshot) -> Snapshot:
        """Store the snapshot unless there is one. Returns the stored one, whoever wrote it.

        If the store fails, this process keeps the record, which was paid for, and puts it later.
        """
        key = self.key("snapshots", name)
        value = sealed(key, msgspec.json.encode(snapshot))
        for again in (False, True):  # reading deletes an existing record if it is damaged; others delete them, too
            if await self._visit.put(key, value, sure=again) is not Put.EXISTED:
                return snapshot
            [winner] = await self._read_many([key], Snapshot)
            if winner is not None:
                return winner
        return snapshot

    async def _read_many(
        self, keys: Sequence[str], kind: type[RecordT], *, final: bool = False
    ) -> list[RecordT | None]:
        """Return the records with these keys. With `final`, one that is absent now stays so for this process."""
        found = list[bytes | Missing]()
        for at in range(0, len(keys), MOST_LOOKUPS):
            found += await self._visit.get_many(keys[at : at + MOST_LOOKUPS], final=final, intact=intact)
            await asyncio.sleep(0)  # a lookup that memory answers lets nobody else have a turn
        return [None if isinstance(value, Missing) else _decoded(value, kind) for value in found]

    async def compaction(self, digest: str) -> str:
        """Return the snapshot that a reference leads to, or the words for one that is not kept."""
        [record] = await self._read_many([self.key("compactions", digest)], _Compacted)
        return record.text if record and compacting.digest(record.text) == digest else compacting.GONE

    async def keep_compaction(self, text: str) -> bool:
        """Store a snapshot to which the client gets a reference. Returns whether that can be followed now."""
        key, value = self.key("compactions", compacting.digest(text)), rawjson.encode({"text": text})
        return await self._visit.put(key, sealed(key, value), sure=True) is not Put.FAILED

    async def pauses(self, asked: Sequence[bytes], model: str) -> dict[bytes, int]:
        """Return the seconds before these requests after which upstream's cache had expired, for those that have such a
        record. If the last one has none, another replica may still be about to write it, for the same request."""
        keys = self._keys("pauses", [digest.hex() for digest in asked], model)
        past, last = await asyncio.gather(
            self._read_many(keys[:-1], _Paused, final=True), self._read_many(keys[-1:], _Paused)
        )
        found = zip(asked, [*past, *last], strict=True)
        return {digest: record.seconds for digest, record in found if record is not None}

    async def keep_pause(self, asked: bytes, model: str, seconds: int) -> dict[bytes, int]:
        """Store a pause, and return it as every later request finds it: nothing if it could not be stored in time."""
        [key] = self._keys("pauses", [asked.hex()], model)
        await self._visit.put(key, sealed(key, rawjson.encode({"seconds": seconds})), keep=False)
        return await self.pauses([asked], model)

    async def rounds(self, replies: Mapping[int, Reply], model: str) -> dict[int, Hidden]:
        """Return the hidden rounds of these replies, by their indexes.

        A reply is found by the history that ends with it, by the history before it, or by itself: a client may rewrite
        the reply, or what precedes it, or make one reply of several. Each round is put back once.
        """
        names = {index: self._names(reply) for index, reply in replies.items()}
        asked = [name for ones in names.values() for name in ones]
        found = dict(zip(asked, await self._hidden(asked, model), strict=True))
        rounds: dict[int, Hidden] = {}
        used: list[_Record] = []
        for index, (link, *placed) in sorted(names.items()):
            exact = found[link]
            firsts = [(name, first) for name in placed if (first := found[name]) is not None]
            ours = [exact] if exact else await self._recognised(replies[index], firsts, model)
            ours = [one for one in ours if all(one.differs(other) for other in used)]
            if ours:
                rounds[index] = _joined(ours)
                used += ours
        return rounds

    async def remember(
        self,
        link: bytes,
        model: str,
        hidden: Hidden,
        places: Collection[bytes] = (),
        visible: Visible | None = None,
    ) -> None:
        """Store the hidden rounds of a reply.

        The record's name is the digest of the history that ends with the reply as the client saw it. For clients that
        rewrite it, it is also kept at these `places`: the digest of the history before it, and the reply's anchors.
        """
        record = _Record.of(hidden, visible)
        encoded = msgspec.json.encode(record)
        [key] = self._round_keys([link.hex()], model)
        placed = [self._place(place, record, encoded, model) for place in places]
        await asyncio.gather(self._visit.put(key, sealed(key, encoded)), *placed)
        for place in places:
            if self._visit.was_put(self._hid_nothing(place, model)):
                await self._contested(place, model, None)

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
        record = _Record([], Raw(b"null"), [], 0, visible=visible)
        await self._place(before, record, msgspec.json.encode(record), model)

    def _hid_nothing(self, before: bytes, model: str) -> str:
        """Return a key for the memory of this process alone: a reply to this history hid nothing."""
        [key] = self._round_keys([extend(before, b"hid nothing").hex()], model)
        return key

    async def _place(self, before: bytes, record: _Record, encoded: bytes, model: str) -> None:
        """Keep a round at the first free place of the history before it, unless it is at one already."""
        for name in _places(before):
            [key] = self._round_keys([name], model)
            if await self._visit.put(key, sealed(key, encoded)) is not Put.EXISTED:
                return
            [there] = await self._hidden([name], model)
            if there is not None and there.visible == record.visible and not there.differs(record):
                return

    async def continuation(self, shown: str) -> Continuation | None:
        """Return how to go on from a reply that the client knows by this id; None if upstream knows it by the same."""
        [record] = await self._read_many([self._continuation_key(shown)], _Continued)
        if record is None:
            return None
        reply = b"" if rawjson.is_null(record.reply) else bytes(record.reply)
        return Continuation(shown, tuple(record.rounds), tuple(map(bytes, record.after)), reply)

    async def keep_continuation(self, continuation: Continuation) -> None:
        """Store how to go on from a reply with hidden rounds."""
        rounds, after = map(rawjson.encodable, continuation.rounds), map(Raw, continuation.after)
        record = _Continued(rounds=list(rounds), after=list(after), reply=Raw(continuation.reply or b"null"))
        key = self._continuation_key(continuation.shown)
        await self._visit.put(key, sealed(key, msgspec.json.encode(record)))

    async def forget_continuation(self, shown: str) -> None:
        """Delete what was stored of a reply that upstream has deleted."""
        await self._visit.discard(self._continuation_key(shown))

    def _continuation_key(self, shown: str) -> str:
        """Return the record's key, for which upstream's id may have unsuitable characters."""
        return self.key("continuations", hashlib.sha256(shown.encode("utf-8", "surrogatepass")).hexdigest()[:32])

    def has_originals(self, of: str) -> bool:
        """Whether all texts that `of` names together were written recently."""
        return self._visit.was_put(self.key("originals", of))

    async def original(self, name: str) -> str | None:
        """Return a text that was moved out of a conversation of this namespace; None if it is not there, or damaged."""
        [found] = await self._visit.get_many([self.key("originals", name)], intact=_is_original)
        text = None if isinstance(found, Missing) else original_of(name, found)
        return None if text is None else text.decode("utf-8", "surrogatepass")

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
                value = await run(partial(_encoded, name, text))
                missing += await self._visit.anew().put(key, value, keep=False) is Put.FAILED
            if not number % MOST_LOOKUPS:
                await asyncio.sleep(0)  # those that were put before let nobody else have a turn
        if not missing:
            self._visit.note_put(self.key("originals", of))

    def _names(self, reply: Reply) -> list[str]:
        return [reply.link.hex(), *(_place(anchor, 0) for anchor in (reply.before, *reply.anchors()))]

    async def _recognised(self, reply: Reply, firsts: Sequence[tuple[str, _Record]], model: str) -> list[_Record]:
        """Return the rounds of a reply of which, or of whose history, its client has made another one. `firsts` are the
        first records at its places."""
        if not firsts:
            return []
        found, sent, at = list[_Record](), reply.visible(), dict(firsts)
        if (first := at.get(_place(reply.before, 0))) is not None:
            one = await self._one(reply.before, first, lambda seen: resembles(seen, sent), model)
            found += [one] if one else []
        for anchor in reply.anchors() if not found else ():
            if (first := at.get(_place(anchor, 0))) is not None:
                one = await self._one(anchor, first, partial(contains, sent), model)
                found += [one] if one and all(one.differs(other) for other in found) else []
        return found

    async def _one(self, place: bytes, first: _Record, fits: Callable[[Visible], bool], model: str) -> _Record | None:
        """Return the round at this place that fits the reply. If there may be several, none is the right one."""
        others = await self._hidden(_places(place)[1:], model, final=False)
        found = [one for one in (first, *others) if one is not None]
        if len(found) == PLACES or any(one.visible is None for one in found):
            return None
        rounds = [one for one in found if one.visible and fits(one.visible)]
        ambiguous = any(one.differs(rounds[0]) for one in rounds)
        return None if ambiguous or not rounds or rounds[0].empty else rounds[0]

    async def _hidden(self, names: Sequence[str], model: str, *, final: bool = True) -> list[_Record | None]:
        return await self._read_many(self._round_keys(names, model), _Record, final=final)

    def _round_keys(self, names: Sequence[str], model: str) -> list[str]:
        """Return the keys of rounds. Other models refuse a model's signatures."""
        return self._keys("rounds", names, model)

    def _keys(self, kind: str, names: Sequence[str], model: str) -> list[str]:
        """Return the keys of records that hold for one model."""
        variant = hashlib.sha256(model.encode("utf-8", "surrogatepass")).hexdigest()[:8]
        return [self.key(kind, f"{name}-{variant}") for name in names]


def _joined(records: Sequence[_Record]) -> Hidden:
    """Return the rounds of a reply that its client made of several, to be put before it."""
    if len(records) == 1:
        return records[0].round()
    rounds = [record.round() for record in records]
    before = tuple(raw for one in rounds for raw in one.before)
    sizes = tuple(size for one in rounds for size in one.sizes_of_each()[: len(one.before)])
    return Hidden(before, None, (), sum(sizes), sizes)


def original_of(name: str, value: bytes) -> bytes | None:
    """Return the text with this name if it is what was written. A name has the beginning of its text's digest; the
    messages behind a summary are named after their history, and end with a line that seals them."""
    if digest := digest_in(name):
        return value if hashlib.sha256(value).hexdigest().startswith(digest) else None
    text, _, seal = value.rpartition(b"\n")
    return text if seal == _seal(name, text) else None


def _is_original(key: str, value: bytes) -> bool:
    return original_of(key.rpartition("/")[2], value) is not None


def _encoded(name: str, text: Callable[[], str]) -> bytes:
    whole = text()
    made = b"".join([whole[at : at + CHUNK].encode("utf-8", "surrogatepass") for at in range(0, len(whole), CHUNK)])
    return made if digest_in(name) else b"%b\n%b" % (made, _seal(name, made))


def _places(before: bytes) -> list[str]:
    """Return the names under which rounds are kept by the history before their replies."""
    return [_place(before, number) for number in range(PLACES)]


def _place(before: bytes, number: int) -> str:
    return extend(before, b"place %d" % number).hex()


def _decoded(value: bytes, kind: type[RecordT]) -> RecordT | None:
    """Decode a record. Returns None for anything else."""
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


def unsealed(value: bytes) -> bytes:
    return value[:-_SEAL_BYTES] + b"}" if _SEAL.search(value, _tail(value)) else value


def intact(key: str, value: bytes) -> bool:
    """Whether the value has a seal that matches the rest of it and its key."""
    seal = _SEAL.search(value, _tail(value))
    return seal is not None and _seal(key, unsealed(value)) == seal[1]


def _tail(value: bytes) -> int:
    return max(0, len(value) - _SEAL_BYTES)
