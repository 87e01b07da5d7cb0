"""A request's records in the store: snapshots, hidden rounds, originals, pauses.

A record's key is `NAMESPACE/KIND/NAME`, and it is written once. Any lookup may find nothing,
because a request can be served without its records.

Records end with a seal: one more JSON member with the SHA-256 of the record without it and of its
key, so that a record under another one's key is no better than a damaged one. A damaged record
counts as absent. It is deleted, because otherwise no good one could be stored under its key.

A hidden round is found by the history that ends with its reply. For clients that rewrite that, it
is also kept under the history before the reply, and under the reply's anchors. Several replies may
share one of these: a history may be sent several times, or to several models. So each of these has
`PLACES`.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Protocol, TypeVar

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from proxy import rawjson
from proxy.dialects.render import Behind
from proxy.plan import compacting
from proxy.plan.history import Sought, extend
from proxy.plan.preview import CHUNK, digest_in
from proxy.plan.recognise import Hidden, Reply, Visible, contains, resembles
from proxy.plan.turn import Continuation, Declined
from proxy.rawjson import NotJson
from proxy.requests.summary_writer import Snapshot
from proxy.stores.guarded import Put, Visit
from proxy.threads import comes_later

T = TypeVar("T")
RecordT = TypeVar("RecordT", bound=msgspec.Struct)

MOST_LOOKUPS = 1_024
"""The number of keys in one lookup, as that takes the event loop 20 ms."""

MOST_BEHIND = 10_000
"""The most texts behind a reference, the newest ones: those of some ten long histories."""

AT_ONCE = 8
"""Records of a request that are written at once while a client waits for all of them."""

REMEMBERED = 20_000
"""Names that are not computed again: those of some hundred conversations."""

PLACES = 4
"""If the last place is taken, none is used: there may be more rounds."""


class Run(Protocol):
    """Runs work where it holds up nobody, and returns its result."""

    async def __call__(self, work: Callable[[], T]) -> T: ...


class _Round(msgspec.Struct, frozen=True):
    """The hidden rounds of a reply, and the reply as the client saw it. A record without rounds
    says that another reply with the same place hid nothing; `visible` is None if it is not known
    which one."""

    before: list[Raw] = []
    instead: Raw = rawjson.NULL
    after: list[Raw] = []
    sizes: list[int] = []
    visible: Visible | None = None
    api: str = ""
    model: str = ""

    def __post_init__(self) -> None:
        if len(self.sizes) != len(self.before) + len(self.after):
            raise ValueError("`sizes` has the tokens of each entry")

    def hidden(self) -> Hidden:
        instead = None if rawjson.is_null(self.instead) else bytes(self.instead)
        before = tuple(map(bytes, self.before))
        after = tuple(map(bytes, self.after))
        return Hidden(before, instead, after, tuple(self.sizes), self.api, self.model)

    @property
    def hides(self) -> bool:
        """Whether anything is hidden. The reply may be another one than the client saw, and nothing
        more."""
        return bool(self.before or self.after) or not rawjson.is_null(self.instead)

    @property
    def content(self) -> bytes:
        """A digest of what is hidden."""
        parts = [[*map(bytes, self.before)], bytes(self.instead), [*map(bytes, self.after)]]
        return hashlib.sha256(repr(parts).encode()).digest()

    def differs(self, other: _Round) -> bool:
        return (self.before, self.instead, self.after) != (other.before, other.instead, other.after)


class _Continued(msgspec.Struct, frozen=True):
    rounds: list[str] = []
    after: list[Raw] = []
    reply: Raw = rawjson.NULL
    namespace: str = ""
    """The namespace that has the rest of it, if this one has not."""


class _Declined(msgspec.Struct, frozen=True):
    model: str
    before: list[Raw]


class _Compaction(msgspec.Struct, frozen=True):
    """A snapshot, and what stands behind it, by the names of the texts, oldest first."""

    text: str
    files: dict[str, Behind]


class References(msgspec.Struct, frozen=True):
    """The references that a request brings: their digests, and all that stands behind them, by
    name, oldest first."""

    digests: Sequence[str] = ()
    files: Mapping[str, Behind] = {}


class _Paused(msgspec.Struct, frozen=True):
    seconds: int


KINDS: Mapping[type[msgspec.Struct], str] = {
    Snapshot: "snapshots",
    _Compaction: "compactions",
    _Paused: "pauses",
    _Round: "rounds",
    _Continued: "continuations",
    _Declined: "credits",
}


class Records:
    """The records of one namespace, for one request or one background task. `key_namespace` is that
    of the caller's key, where the caller has another one as a client."""

    def __init__(self, visit: Visit, namespace: str, key_namespace: str = "") -> None:
        self._visit = visit
        self.namespace = namespace
        self._key_namespace = key_namespace or namespace

    @property
    def errors(self) -> Mapping[str, int]:
        return self._visit.errors

    @property
    def unread(self) -> bool:
        """Whether the store failed to read a record, which may be there."""
        return any(error.startswith("get:") for error in self._visit.errors)

    def key(self, kind: str, name: str) -> str:
        return f"{self.namespace}/{kind}/{name}"

    async def _put(
        self, name: str, record: msgspec.Struct, *, keep: bool = True, sure: bool = False
    ) -> Put:
        key = self.key(KINDS[type(record)], name)
        return await self._visit.put(
            key, sealed(key, msgspec.json.encode(record)), keep=keep, sure=sure
        )

    async def read(
        self, kind: type[RecordT], names: Sequence[str], *, final: bool = False
    ) -> list[RecordT | None]:
        """Return the records with these names, with None for each that does not exist. With
        `final`, one that is absent now stays so for this process."""
        keys = [self.key(KINDS[kind], name) for name in names]
        found = list[bytes | None]()
        for at in range(0, len(keys), MOST_LOOKUPS):
            found += await self._visit.get_many(
                keys[at : at + MOST_LOOKUPS], final=final, intact=intact
            )
            await asyncio.sleep(0)  # a lookup that memory answers lets nobody else have a turn
        return [None if value is None else _decoded(value, kind) for value in found]

    # -- snapshots, compactions, pauses --

    async def keep_snapshot(self, name: str, snapshot: Snapshot) -> Snapshot:
        """Store the snapshot unless there is one. Returns the stored one, whoever wrote it.

        If the store fails, this process keeps the record, which was paid for, and puts it later.
        """
        # reading deletes an existing record if it is damaged; others delete them, too
        for again in (False, True):
            if await self._put(name, snapshot, sure=again) is not Put.EXISTED:
                return snapshot
            [winner] = await self.read(Snapshot, [name])
            if winner is not None:
                return winner
        return snapshot

    async def compactions(self, digests: Sequence[str]) -> tuple[dict[str, str], References]:
        """Return the snapshots that references lead to, with words for each that is not stored, and
        the references."""
        texts: dict[str, str] = {}
        files: dict[str, Behind] = {}
        for digest, record in zip(digests, await self.read(_Compaction, digests), strict=True):
            if record is None or _digest_of(record) != digest:
                texts[digest] = compacting.UNREAD if self.unread else compacting.GONE
            else:
                texts[digest] = record.text
                files |= record.files
        return texts, References(digests, files)

    async def keep_compaction(self, text: str, files: Mapping[str, Behind]) -> str:
        """Store a snapshot with what stands behind it. Returns the digest for a reference to it
        once the store has it, else an empty string."""
        newest = list(files.items())[-MOST_BEHIND:]
        record = _Compaction(text, dict(newest))
        digest = _digest_of(record)
        key = self.key(KINDS[_Compaction], digest)
        value = sealed(key, msgspec.json.encode(record))
        stored = await self._visit.anew().put_intact(key, value, intact)
        return digest if stored else ""

    async def renew(self, references: References, quoted: Collection[str]) -> None:
        """Let the ages begin anew of these references' records, of what stands behind them, and of
        the texts that a request quotes by name. Records older than a day are renewed, because they
        are in use."""
        names = dict.fromkeys([*references.files, *sorted(quoted)[:MOST_BEHIND]])
        keys = [self.key(KINDS[_Compaction], digest) for digest in references.digests]
        keys += [self.key("originals", name) for name in names]
        await self._visit.renew(self.namespace, keys)

    async def pauses(self, points: Sequence[bytes], model: str) -> dict[bytes, int]:
        """Return the seconds before these requests after which upstream's cache had expired, for
        those that have such a record. If the last one has none, another replica may still be about
        to write it, for the same request."""
        names = _for_model([digest.hex() for digest in points], model)
        past, last = await asyncio.gather(
            self.read(_Paused, names[:-1], final=True), self.read(_Paused, names[-1:])
        )
        found = zip(points, [*past, *last], strict=True)
        return {digest: record.seconds for digest, record in found if record is not None}

    async def keep_pause(self, point: bytes, model: str, seconds: int) -> dict[bytes, int]:
        """Store a pause, and return it as every later request finds it: nothing if it could not be
        stored in time."""
        [name] = _for_model([point.hex()], model)
        await self._put(name, _Paused(seconds), keep=False)
        return await self.pauses([point], model)

    # -- hidden rounds --

    def still_there(self, sought: Sought | None) -> Sought:
        """Return what was sought, if looking again would find the same; else nothing."""
        if sought is not None and sought.namespace == self.namespace:
            changed = self._visit.changed_since(sought.at)
            if changed is not None and sought.wanted.isdisjoint(changed):
                return replace(sought, at=self._visit.changes)
        return Sought(self.namespace, wanted=set(), at=self._visit.changes)

    async def rounds(
        self, replies: Mapping[int, Reply], model: str, before: Sought
    ) -> tuple[dict[int, list[Hidden]], Sought]:
        """Return the hidden rounds of these replies, by their indexes, for a request to this model,
        behind those that were sought `before`; and what was sought with them, without the rounds.

        A reply is found by the history that ends with it, by the history before it, or by itself: a
        client may rewrite the reply, or what precedes it, or make one reply of several. Each round
        is put back once. Of a reply that is found otherwise than by its history and model, more may
        be found later.
        """
        places = {
            index: [reply.link, reply.before, *reply.anchors()] for index, reply in replies.items()
        }
        wanted = [_name(place) for ones in places.values() for place in ones]
        found = dict(zip(wanted, await self.read(_Round, wanted, final=True), strict=True))
        before.wanted.update([self.key(KINDS[_Round], name) for name in wanted])
        rounds: dict[int, list[Hidden]] = {}
        used = dict(before.used)
        uncertain: list[int] = []
        for index, reply in sorted(replies.items()):
            first = {place: one for place in places[index] if (one := found[_name(place)])}
            exact = first.get(reply.link)
            if first and (exact is None or exact.model != model):
                uncertain.append(index)
            recognised = await self._recognised(reply, first, model)
            ours = [one for one in recognised if one.content not in used]
            if ours:
                rounds[index] = [one.hidden() for one in ours]
                used |= dict.fromkeys([one.content for one in ours], index)
        upto = min(uncertain, default=sys.maxsize)
        return rounds, replace(before, upto=upto, used=used)

    async def _recognised(
        self, reply: Reply, first: Mapping[bytes, _Round], model: str
    ) -> list[_Round]:
        """Return the rounds of a reply, `first` being the first records at its places.

        The history that ends with the reply is enough for a round of the same model. Otherwise the
        reply must fit what the client saw, and if several rounds fit a place, none is the right
        one.
        """
        ours: list[_Round] = []
        for place, one in first.items():
            there = [one]
            if place != reply.link or one.model != model:
                names = [_name(place, number) for number in range(1, PLACES)]
                there += filter(None, await self.read(_Round, names))
            exact = next((one for one in there if place == reply.link and one.model == model), None)
            if exact is not None:
                return [exact]
            fitting = [
                one for one in there if one.visible is None or _fits(one.visible, reply, place)
            ]
            if (
                len(there) == PLACES
                or not fitting
                or any(one.differs(fitting[0]) for one in fitting)
            ):
                continue
            if not fitting[0].hides:
                continue  # its record only says that there is another reply with the same place
            if place in (reply.link, reply.before):
                return fitting[:1]
            if all(fitting[0].differs(other) for other in ours):
                ours.append(fitting[0])
        return ours

    async def remember(self, hidden: Hidden, places: Collection[bytes], visible: Visible) -> None:
        """Store the hidden rounds of a reply at its places: under the digests of the history that
        ends with it as the client saw it, and of the history before it, and under its anchors."""
        before = [*map(Raw, hidden.before)]
        after = [*map(Raw, hidden.after)]
        instead = Raw(hidden.instead or b"null")
        record = _Round(before, instead, after, [*hidden.sizes], visible, hidden.api, hidden.model)
        await asyncio.gather(*(self._keep_at(place, record) for place in places))
        for place in places:
            if self._visit.was_put(self._hid_nothing(place)):
                await self._keep_at(place, _Round())

    async def contest(self, places: Collection[bytes], visible: Visible) -> None:
        """Two replies share a place: note that this one hid nothing.

        Only this process's memory is asked, because nearly every reply hides nothing.
        """
        for place in places:
            if self._visit.was_put(self.key(KINDS[_Round], _name(place))):
                await self._keep_at(place, _Round(visible=visible))
            else:
                self._visit.note_put(self._hid_nothing(place))

    def _hid_nothing(self, place: bytes) -> str:
        """Return a key for the memory of this process alone: a reply with this place hid
        nothing."""
        return self.key(KINDS[_Round], extend(place, b"hid nothing").hex())

    async def _keep_at(self, place: bytes, record: _Round) -> None:
        """Keep a round at the first free place of these, unless it is at one already."""
        for number in range(PLACES):
            name = _name(place, number)
            if await self._put(name, record) is not Put.EXISTED:
                return
            [there] = await self.read(_Round, [name])
            if there == record:
                return

    # -- continuations, refusals and originals --

    async def declined(self, credit: str) -> Declined | None:
        """Return the request that was refused with this token; None if we did not change it."""
        [record] = await self.read(_Declined, [_continuation(credit)])
        return None if record is None else Declined(record.model, tuple(map(bytes, record.before)))

    async def keep_declined(self, credit: str, declined: Declined) -> None:
        """Store a request that was refused with a token."""
        record = _Declined(declined.model, [*map(Raw, declined.before)])
        await self._put(_continuation(credit), record)

    async def continuation(self, shown: str) -> Continuation | None:
        """Return how to go on from a reply that the client knows by this id; None if upstream knows
        it by the same."""
        [record] = await self.read(_Continued, [_continuation(shown)])
        if record is None or record.namespace:
            return None
        reply = b"" if rawjson.is_null(record.reply) else bytes(record.reply)
        return Continuation(shown, tuple(record.rounds), tuple(map(bytes, record.after)), reply)

    async def kept_reply(self, shown: str) -> Continuation | None:
        """Return the same for who shows or deletes the reply, also if a client with an identity and
        this key got it. To go on from it takes that identity."""
        [record] = await self.read(_Continued, [_continuation(shown)])
        owner = self
        if record is not None and record.namespace:
            owner = Records(self._visit, record.namespace)
        return await owner.continuation(shown)

    async def keep_continuation(self, continuation: Continuation) -> None:
        """Store how to go on from a reply with hidden rounds. It can also be found by the caller's
        key: who asks for a reply or deletes it has no body that says which client it is."""
        name = _continuation(continuation.shown)
        rounds = map(rawjson.encodable, continuation.rounds)
        after = map(Raw, continuation.after)
        record = _Continued(
            rounds=list(rounds), after=list(after), reply=Raw(continuation.reply or b"null")
        )
        await self._put(name, record)
        if self._key_namespace != self.namespace:
            there = _Continued(namespace=self.namespace)
            await Records(self._visit, self._key_namespace)._put(name, there)

    async def forget_continuation(self, shown: str) -> None:
        """Delete what was stored of a reply that upstream has deleted."""
        [record] = await self.read(_Continued, [_continuation(shown)])
        if record is not None and record.namespace:
            await Records(self._visit, record.namespace).forget_continuation(shown)
        await self._visit.delete(self.key(KINDS[_Continued], _continuation(shown)))

    def has_originals(self, of: str) -> bool:
        """Whether all texts that `of` names together were written recently."""
        return self._visit.was_put(self.key("originals", of))

    async def original(self, name: str) -> str | None:
        """Return a text that was moved out of a conversation of this namespace; None if it is not
        there, or damaged."""
        [found] = await self._visit.get_many([self.key("originals", name)], intact=_is_original)
        text = None if found is None else original_of(name, found)
        return None if text is None else text.decode("utf-8", "surrogatepass")

    async def keep_originals(
        self,
        of: str,
        texts: Mapping[str, Callable[[], str]],
        run: Run,
        index: Mapping[str, bytes] = {},
    ) -> bool:
        """Write moved texts for later conversations and for people, and then the records of their
        `index`, by their keys. Returns whether all are there.

        `of` names all of this together, because every later request of the conversation has it
        again. A long history has thousands of texts, so each write has a visit of its own. `run`
        runs the reading of one text, which can take long.
        """
        missing = 0
        waited = not comes_later()
        for number, (key, value) in enumerate(self._originals(texts, index).items(), 1):
            if self._visit.was_put(key):
                there = True
            elif waited:
                there = await self._ensured(run, key, value)
            else:
                done = await self._visit.anew().put(key, await run(value), keep=False, sync=False)
                there = done is not Put.FAILED
            missing += not there
            if missing and waited:
                break
            if not number % MOST_LOOKUPS:
                await asyncio.sleep(0)  # those that were put before let nobody else have a turn
        if not missing:
            self._visit.note_put(self.key("originals", of))
        return not missing

    async def ensure_originals(
        self, texts: Mapping[str, Callable[[], str]], run: Run, index: Mapping[str, bytes]
    ) -> bool:
        """Do the same for a client that drops the texts once this is done. Whatever was written
        before, the store is asked, and a damaged record is written again. Returns whether all are
        there."""
        ensured = partial(self._ensured, run)
        made = list(self._originals(texts, index).items())
        for at in range(0, len(made), AT_ONCE):
            if not all(await asyncio.gather(*(ensured(*one) for one in made[at : at + AT_ONCE]))):
                return False
        return True

    async def _ensured(self, run: Run, key: str, value: Callable[[], bytes]) -> bool:
        """Have the store keep a text or a record of its index, also in the place of a damaged one.
        Returns whether it does."""
        whole = _is_original if key.startswith(self.key("originals", "")) else intact
        return await self._visit.anew().put_intact(key, await run(value), whole)

    def _originals(
        self, texts: Mapping[str, Callable[[], str]], index: Mapping[str, bytes]
    ) -> dict[str, Callable[[], bytes]]:
        """Return functions that return the records of texts and of their index, by their keys."""
        made: dict[str, Callable[[], bytes]] = {}
        for name, text in texts.items():
            made[self.key("originals", name)] = partial(_encoded, name, text)
        for key, record in index.items():
            made[key] = partial(sealed, key, record)
        return made


def _fits(visible: Visible, reply: Reply, place: bytes) -> bool:
    """Whether a reply may be the one that a client saw so, as both have this place."""
    if place == reply.link:
        return True
    sent = reply.visible()
    return resembles(visible, sent) if place == reply.before else contains(sent, visible)


# -- names --


@lru_cache(REMEMBERED)
def _name(place: bytes, number: int = 0) -> str:
    """Return the name of a place's record. The requests of a conversation look for the same
    ones."""
    return extend(place, b"place %d" % number).hex()


def _for_model(names: Sequence[str], model: str) -> list[str]:
    """Return the names of records that hold for one model."""
    variant = hashlib.sha256(model.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return [f"{name}-{variant}" for name in names]


def _digest_of(record: _Compaction) -> str:
    """Return the digest in references to a compaction. Nobody guesses it, and no other content has
    it."""
    return hashlib.sha256(msgspec.json.encode(record)).hexdigest()


def _continuation(shown: str) -> str:
    """Return a continuation's name. Upstream's id may have unsuitable characters."""
    return hashlib.sha256(shown.encode("utf-8", "surrogatepass")).hexdigest()[:32]


# -- reading a value --


def original_of(name: str, value: bytes) -> bytes | None:
    """Return the text with this name if it is what was written. A name has the beginning of its
    text's digest; the messages behind a summary are named after their history, and end with a line
    that seals them."""
    if digest := digest_in(name):
        return value if hashlib.sha256(value).hexdigest().startswith(digest) else None
    text, _, seal = value.rpartition(b"\n")
    return text if seal == _seal(name, text) else None


def _is_original(key: str, value: bytes) -> bool:
    return original_of(key.rpartition("/")[2], value) is not None


def _encoded(name: str, text: Callable[[], str]) -> bytes:
    whole = text()
    made = b"".join(
        [
            whole[at : at + CHUNK].encode("utf-8", "surrogatepass")
            for at in range(0, len(whole), CHUNK)
        ]
    )
    return made if digest_in(name) else b"%b\n%b" % (made, _seal(name, made))


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
    """Return a record's member as it was stored: entries may have half a surrogate pair, and then its
    record is decoded with its backslashes masked."""
    if isinstance(value, list):
        return list(map(_unmasked, value))
    if isinstance(value, str | Visible):
        raw = rawjson.unmasked(Raw(msgspec.json.encode(value)))
        return rawjson.decode(_decoder(type(value)), raw)[0]
    return rawjson.unmasked(value) if isinstance(value, Raw) else value


# -- seals -----------------------------------------------------------------------------------------

_SEAL_BYTES = len(',"sha256":""}') + 64


def sealed(key: str, record: bytes) -> bytes:
    """Return a JSON object's bytes with the digest of them and their key added as the last
    member."""
    return b'%b,"sha256":"%b"}' % (record[:-1], _seal(key, record))


def intact(key: str, value: bytes) -> bool:
    """Whether the value has a seal that matches the rest of it and its key."""
    return value == sealed(key, value[:-_SEAL_BYTES] + b"}")


def _seal(key: str, record: bytes) -> bytes:
    digest = hashlib.sha256(record)
    digest.update(key.encode())
    return digest.hexdigest().encode()
