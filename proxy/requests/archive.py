"""What a caller's conversations have moved: an index over the originals in the store, for people
and later sessions.

The texts that one event moved have a record `NAMESPACE/sessions/SESSION-SET`, which is written
once, after the texts. SESSION is the digest of how the conversation began, SET that of the texts'
names. Whoever reads the index sees what it lists only while the originals are there.
`NAMESPACE/digests/DIGEST` has the name of the text with this digest, for gateways that know nothing
else of it.
"""

from __future__ import annotations

import hashlib
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence

import msgspec

from proxy import rawjson
from proxy.errors import StoreFault
from proxy.plan import summary
from proxy.plan.history import beginning
from proxy.plan.plan import Role, moved_pieces
from proxy.plan.preview import ORIGINALS, digest_in
from proxy.requests.planned import Rendered
from proxy.requests.records import Records, Run, intact, original_of
from proxy.stores import Entry
from proxy.stores.guarded import Guarded, Visit

KIND = "sessions"
TEXTS = "originals"
DIGESTS = "digests"

DIGITS = 16
"""Hex digits of a session's digest, and of a set's."""

INDEX_BYTES = 16 << 20
"""The most bytes of records that one look at the index reads, the newest sessions' first."""

TITLE_CHARS = 100
TITLE_READ = 2_000
"""Characters of the user's first words that are kept, and that are read for them."""

SEARCHED_SESSIONS = 20
SEARCHED_BYTES = 8 << 20
"""The sessions, and about how many bytes of texts, that a model's search looks through beside its
own conversation."""

AT_ONCE = 200
"""Keys in one lookup."""

BYTES_PER_TOKEN = 4
UNKNOWN_TOKENS = 20_000
"""For guessing how many bytes a text has, and one of which the index has no tokens: the messages
behind a summary."""


class Text(msgspec.Struct, frozen=True, omit_defaults=True):
    """A moved text: its file's name, the call whose result it is, and its size in tokens, if that
    is known."""

    name: str
    about: str
    tokens: int = 0

    @property
    def bytes(self) -> int:
        """About how many bytes it has."""
        return BYTES_PER_TOKEN * (self.tokens or UNKNOWN_TOKENS)


class Moved(msgspec.Struct, frozen=True):
    """A record of the index. `time` is in seconds since the epoch, when the record was written
    first."""

    time: float
    model: str
    title: str
    texts: list[Text]


class Session(msgspec.Struct, frozen=True):
    """A conversation by its id, with the texts that it moved, oldest first."""

    session: str
    began: float
    last: float
    model: str
    title: str
    texts: Sequence[Text]


async def keep(
    rendered: Rendered,
    store: Guarded,
    namespace: str,
    run: Run,
    *,
    by_digest: bool = False,
    sure: bool = False,
) -> bool:
    """Store the request's moved texts, and then what the index says of them. Returns whether all of
    this is there.

    `by_digest`: they can then also be found by the digests in their names. `sure`: the client drops
    them, so the store is asked for each, even if it was written a moment ago.
    """
    records = Records(store.visit(), namespace)
    name = f"{rendered.moves_name}{'-digests' if by_digest else ''}"
    if not sure and records.has_originals(name):
        return True
    texts = await run(rendered.originals)
    found = await run(
        lambda: {records.key(KIND, one): record for one, record in index(rendered, time.time())}
    )
    if by_digest:
        named = {digest_in(text): rawjson.encode({"name": text}) for text in texts}
        found |= {
            records.key(DIGESTS, digest): record for digest, record in named.items() if digest
        }
    if sure:
        return await records.ensure_originals(texts, run, found)
    return await records.keep_originals(name, texts, run, found)


def index(rendered: Rendered, now: float) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the content of the record for each event of the request."""
    planned = rendered.planned
    messages = planned.transcript.messages
    chain = planned.chain
    groups: defaultdict[int, dict[str, Text]] = defaultdict(dict)
    for place, move in rendered.plan.moves.items():
        for piece in moved_pieces(messages[place], move.event == 0):
            groups[move.event][piece.name] = Text(
                piece.name, rawjson.encodable(piece.label.about), piece.tokens
            )
    for boundary in rendered.plan.boundaries:
        if rendered.shown and boundary.end <= rendered.shown.boundary.end:
            name = summary.file_name(chain[boundary.end])
            groups[boundary.event][name] = Text(name, ORIGINALS.about)
    session = beginning(planned.history.messages).hex()[:DIGITS]
    title = _title(rendered)
    for _, texts in sorted(groups.items()):
        names = "\n".join(sorted(texts)).encode("utf-8", "surrogatepass")
        moved = Moved(now, rawjson.encodable(planned.request.model), title, list(texts.values()))
        yield f"{session}-{hashlib.sha256(names).hexdigest()[:DIGITS]}", msgspec.json.encode(moved)


def _title(rendered: Rendered) -> str:
    """Return the beginning of the user's first words. Clients put reminders in tags before them."""
    transcript = rendered.planned.transcript
    for raw, message in zip(transcript.raws, transcript.messages, strict=True):
        if message.role is Role.USER:
            texts = [text[:TITLE_READ].strip() for _, text in rendered.planned.dialect.texts(raw)]
            said = next(
                (text for text in texts if text and not text.startswith("<")), "".join(texts[:1])
            )
            return rawjson.encodable(" ".join(said.split())[:TITLE_CHARS])
    return ""


def newest(sessions: Sequence[Session], most: int) -> tuple[list[tuple[Session, Text]], bool]:
    """Return the sessions' texts up to about so many bytes, the newest first, and whether any is
    left out."""
    found = {text.name: (session, text) for session in reversed(sessions) for text in session.texts}
    chosen = list[tuple[Session, Text]]()
    left = most
    for session, text in reversed(found.values()):
        left -= text.bytes
        if left < 0 and chosen:
            return chosen, True
        chosen.append((session, text))
    return chosen, False


class Archive:
    """One caller's index and originals. What fails raises StoreFault. `run` does what takes long
    for many records."""

    def __init__(self, visit: Visit, namespace: str, run: Run) -> None:
        self._visit = visit
        self._namespace = namespace
        self._run = run

    async def sessions(self, most: int, only: str = "") -> tuple[list[Session], bool]:
        """Return the newest sessions, newest first, and whether there are more; `only` those whose
        id begins so."""
        found = await self._visit.list(f"{self._namespace}/{KIND}/{only}")
        if found is None:
            raise StoreFault("The store did not list your sessions; try again later")
        chosen, more = await self._run(lambda: _newest_keys(found, most))
        keys = [key for ones in chosen.values() for key in ones]
        values = dict(zip(keys, await self._read(keys), strict=True))

        def made() -> list[Session]:
            sessions = list[Session]()
            for id, ones in chosen.items():
                whole = [value for key in ones if (value := self._undamaged(key, values[key]))]
                if records := [msgspec.json.decode(value, type=Moved) for value in whole]:
                    sessions.append(_session(id, records))
            return sorted(sessions, key=lambda one: one.last, reverse=True)

        return await self._run(made), more

    async def read_many(self, names: Sequence[str]) -> list[bytes | None]:
        """Return moved texts in UTF-8, None for each that is not there or damaged."""
        found = await self._read([f"{self._namespace}/{TEXTS}/{name}" for name in names])
        there = zip(names, found, strict=True)
        return await self._run(
            lambda: [None if value is None else original_of(name, value) for name, value in there]
        )

    async def last(self) -> dict[str, tuple[str, bytes]]:
        """Return what the last sessions moved, newest first: what each text is, and its UTF-8, by
        its name. Never raises: without a store there is nothing."""
        try:
            sessions, _ = await self.sessions(SEARCHED_SESSIONS)
            wanted = [text for _, text in newest(sessions, SEARCHED_BYTES)[0]]
            values = await self.read_many([text.name for text in wanted])
        except StoreFault:
            return {}
        there = zip(wanted, values, strict=True)
        return {text.name: (text.about, value) for text, value in there if value is not None}

    async def named(self, digest: str) -> str | None:
        """Return the name of the text with this digest, if it was kept under its digest."""
        key = f"{self._namespace}/{DIGESTS}/{digest}"
        [value] = await self._read([key])
        value = self._undamaged(key, value)
        return rawjson.text(rawjson.members(value)["name"]) if value else None

    def _undamaged(self, key: str, value: bytes | None) -> bytes | None:
        """Return the record with this key, if it is there and not damaged."""
        if value is None or intact(key, value):
            return value
        self._visit.damaged(key)
        return None

    async def _read(self, keys: Sequence[str]) -> list[bytes | None]:
        values = list[bytes | None]()
        for at in range(0, len(keys), AT_ONCE):
            part = await self._visit.read(keys[at : at + AT_ONCE])
            if part is None:
                raise StoreFault("The store did not read what is kept of you; try again later")
            values += part
        return values


def _newest_keys(entries: Sequence[Entry], most: int) -> tuple[dict[str, list[str]], bool]:
    """Return the keys of the newest sessions' records, by session, and whether there are more
    sessions."""
    grouped: defaultdict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        grouped[entry.key.rpartition("/")[2].partition("-")[0]].append(entry)
    newest = sorted(
        grouped.items(), key=lambda one: max(entry.modified for entry in one[1]), reverse=True
    )
    chosen = dict[str, list[str]]()
    size = 0
    for session, ones in newest[:most]:
        size += sum(entry.size for entry in ones)
        if size > INDEX_BYTES and chosen:
            break
        chosen[session] = [entry.key for entry in ones]
    return chosen, len(chosen) < len(grouped)


def _session(id: str, records: Sequence[Moved]) -> Session:
    """Return a session made of its records, in which a text may stand several times."""
    records = sorted(records, key=lambda record: record.time)
    first = records[0]
    newest = records[-1]
    texts = {text.name: text for record in records for text in record.texts}
    return Session(id, first.time, newest.time, newest.model, newest.title, list(texts.values()))
