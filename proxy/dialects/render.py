"""Plan and records → the entries that are sent upstream, and the files of what was moved out of
them. The same plan and records always give the same bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import islice, pairwise
from operator import attrgetter
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from proxy.dialects import NAMED, Dialect, Entry, attachments
from proxy.dialects.entries import MARKS, OPENAI, Mark, marks_in
from proxy.plan import preview, summary
from proxy.plan.history import Transcript
from proxy.plan.plan import Message, Piece, Plan, Role, SummaryBoundary, moved_pieces
from proxy.plan.preview import EARLIER, ORIGINALS, Label, Shape
from proxy.plan.recognise import Hidden
from proxy.plan.summary import Section
from proxy.plan.turn import Request
from proxy.policy import SnapshotRole
from proxy.rawjson import encodable, object_of, text_of
from proxy.tools.answer import Media
from proxy.tools.definitions import NAMES, Names
from proxy.tools.find import Index


class ActiveSnapshot(msgspec.Struct, frozen=True):
    """The boundary whose snapshot is shown. `text` is the text between the tags."""

    boundary: SummaryBoundary
    text: str
    path: str
    """Where the originals are that the boundary took out of the context since the one before it."""
    since: SummaryBoundary | None = None
    """The boundary before it."""
    earlier: tuple[str, ...] = ()
    """Where the originals of the boundaries before it are, oldest first."""
    role: SnapshotRole = SnapshotRole.AUTO


REACH = 20
"""The entries before a change of which one gets our cache breakpoint. From further back, upstream
finds nothing."""

MOST_MARKS = 4
"""The most breakpoints of one request that upstream takes or writes. OpenAI drops the first ones
above that. It sets one itself, unless the request says `prompt_cache_options: {mode: explicit}`
(openai 3.54.0)."""

Previews = Callable[[int, bool], bytes]
"""Takes an entry's index, and whether the model has not seen it yet; returns the entry with
previews and references."""


def altered(
    dialect: Dialect,
    transcript: Transcript,
    plan: Plan,
    previews: Previews,
    shown: SummaryBoundary | None = None,
    marking: Request | None = None,
) -> dict[int, Entry]:
    """Return the entries that are sent changed, by their indexes: those that moved, and those with
    a cache breakpoint of ours. `marking` is the request whose breakpoints ours join."""
    moves = plan.moves
    made: dict[int, Entry] = {
        index: previews(index, moves[index].event == 0)
        for index in staying(transcript, shown)
        if index in moves
    }
    if marking is not None and (places := _to_mark(transcript, plan, shown)):
        entries = {index: made.get(index, transcript.raws[index]) for index in places}
        made |= _marked(dialect, marking, transcript, entries)
    return made


def render(
    dialect: Dialect,
    transcript: Transcript,
    altered: Mapping[int, Entry],
    *,
    shown: ActiveSnapshot | None = None,
    rounds: Mapping[int, Hidden] = {},
    end: int | None = None,
) -> list[Entry]:
    """Return the first `end` entries (by default all) as sent upstream. The keys of `rounds` are
    indexes of replies.

    User messages that the snapshot leaves side by side become one. The boundary alone decides
    which, so that they stay as they are until the next event.
    """
    start = shown.boundary.end if shown else 0
    stop = len(transcript.raws) if end is None else end

    def sent(index: int) -> list[Entry]:
        entry = altered.get(index, transcript.raws[index])
        hidden = rounds.get(index) if index >= start else None
        return dialect.reinserted(hidden, entry) if hidden else [entry]

    if shown is None:
        return [entry for index in range(stop) for entry in sent(index)]
    entries: list[Entry] = []
    kept = [index for index in beside(transcript, shown.boundary) if index < stop]
    kept += range(start, stop)[:1]
    cuts = [place for place in range(1, len(kept)) if kept[place] == kept[place - 1] + 1]
    # what the client had side by side stays apart
    for first, last in pairwise((0, *cuts, len(kept))):
        entries += dialect.joined([entry for index in kept[first:last] for entry in sent(index)])
    entries += [entry for index in range(start + 1, stop) for entry in sent(index)]
    block = shown_block(transcript, shown)
    return (
        dialect.with_snapshot(entries, transcript.leading, block, shown.role) if block else entries
    )


def _to_mark(transcript: Transcript, plan: Plan, shown: SummaryBoundary | None) -> tuple[int, ...]:
    """Return the entries for our cache breakpoints: the last one before what the newest event moved
    that is no reply, and the last one that it moved. None if a snapshot precedes it all. The first
    is worth more, and comes first.

    Upstream's cache has an entry for each breakpoint. The client marks the end of its history, so
    behind a change only the entry of the system prompt would be found. The next event mostly
    changes what follows this one's results.
    """
    event = len(plan.events)
    moved = [index for index, move in plan.moves.items() if event and move.event == event]
    if not moved or (plan.boundaries and plan.boundaries[-1].event == event):
        return ()
    first = max(shown.end + 1 if shown else transcript.leading, min(moved) - REACH)
    before = range(min(moved) - 1, first - 1, -1)
    last = next(
        (index for index in before if transcript.messages[index].role in (Role.USER, Role.TOOL)),
        None,
    )
    return (max(moved),) if last is None else (last, max(moved))


def _marked(
    dialect: Dialect, request: Request, transcript: Transcript, entries: Mapping[int, Entry]
) -> Iterator[tuple[int, Entry]]:
    """Yield those of these entries that get a breakpoint of ours, with it, as far as there is room.

    A client that sets no breakpoints gets none of ours. An entry that it marks itself keeps its
    own.

    Each is like the client's next one, as none may live longer than those before it, else in the
    client's spelling.
    """
    theirs = Counter(mark.key for mark in marks_in(request.aside))
    for (member, _), times in transcript.breakpoints.items():
        theirs[member] += times
    key = next((key for key in MARKS if theirs[key]), "")
    if not key:
        return
    explicit = (
        text_of(object_of(request.members.get("prompt_cache_options")).get("mode")) == "explicit"
    )
    room = MOST_MARKS - theirs[key] - (key == OPENAI and not explicit)
    last = request.members[key] if object_of(request.members.get(key)) else MARKS[key]
    for index, entry in entries.items():
        if room > 0 and not marks_in(request.entries[index]):
            behind = islice(request.entries, index + 1, None)
            later = (mark for other in behind for mark in marks_in(other))
            marked = dialect.marked(entry, next(later, Mark(key, last)))
            if marked is not entry:
                room -= 1
                yield index, marked


def put_back(
    dialect: Dialect, model: str, transcript: Transcript, found: Mapping[int, Sequence[Hidden]]
) -> dict[int, Hidden]:
    """Return the hidden rounds of each reply as they go with what its client made of it, and with
    this API and model.

    A round of this model goes back as it was. What another model wrote, perhaps in another API,
    goes back as calls and answers: nobody else takes its thinking.
    """
    made: dict[int, Hidden] = {}
    for at, rounds in found.items():
        if len(rounds) == 1 and _wrote(dialect, model, rounds[0]):
            made[at] = dialect.paired(rounds[0], transcript.raws[at])
            continue
        ahead = [
            dialect.ahead(one, NAMED[one.api], anew=not _wrote(dialect, model, one))
            for one in rounds
        ]
        before = tuple(entry for one in ahead for entry in one.before)
        sizes = tuple(size for one in ahead for size in one.sizes)
        own = [one for one in rounds if one.api == dialect.name]
        made[at] = Hidden(
            before, dialect.alone(own, transcript.raws[at]), (), sizes, dialect.name, model
        )
    return made


def _wrote(dialect: Dialect, model: str, hidden: Hidden) -> bool:
    return (hidden.api, hidden.model) == (dialect.name, model)


def sent_rounds(
    dialect: Dialect,
    transcript: Transcript,
    plan: Plan,
    rounds: Mapping[int, Hidden],
    least: int,
    names: Names = NAMES,
) -> dict[int, Hidden]:
    """Return the hidden rounds as they are sent: before the newest event's user turn, answers above
    `least` tokens are replaced by lines."""
    made = dict(rounds)
    for at, hidden in rounds.items():
        if at < plan.used:
            how = dialect.name, least, names
            if how not in hidden.shrunk:
                hidden.shrunk[how] = dialect.shrunk(hidden, least, names)
            made[at] = hidden.shrunk[how]
    return made


def with_previews(
    dialect: Dialect, raw: Entry, message: Message, shape: Shape, first_preview: bool
) -> bytes:
    """Return a message with previews and references in place of the texts that become shorter by
    it."""
    shape = shape.first_preview() if first_preview else shape
    moved = {piece.part: piece for piece in moved_pieces(message, first_preview)}
    replaced: dict[int | None, str] = {}
    for part, text in dialect.pieces(raw):
        if part not in moved:
            continue
        piece = moved[part]
        origin = moved[part].label.origin
        if piece.media:
            replaced[part] = preview.pointer(piece.media, piece.name, origin, shape)
        else:
            tokens = piece.tokens
            kept = piece.opening
            spans = piece.spans
            replaced[part] = preview.replacement(
                text, piece.name, origin, tokens, shape, kept, spans
            )
    return dialect.replace(raw, replaced)


def beside(transcript: Transcript, shown: SummaryBoundary) -> list[int]:
    """Return the indexes of the entries before the boundary's end that its snapshot leaves."""
    kept = shown.pins.union(range(transcript.leading))
    return sorted([index for index in kept if index < shown.end])


def staying(transcript: Transcript, shown: SummaryBoundary | None) -> Sequence[int]:
    """Return the indexes of the entries that are sent beside the snapshot of the boundary that is
    shown."""
    every = range(len(transcript.messages))
    return [*beside(transcript, shown), *every[shown.end :]] if shown else every


def replaced(
    transcript: Transcript, boundary: SummaryBoundary, since: SummaryBoundary | None = None
) -> list[int]:
    """Return the indexes of the entries that the boundary's snapshot replaces, and that of `since`
    does not.

    A history has many boundaries, so only the entries between the two are looked at, and those that
    `since` kept.
    """
    left = {*beside(transcript, boundary)}
    before = range(since.end, boundary.end) if since else range(boundary.end)
    earlier = beside(transcript, since) if since else []
    return [index for index in (*earlier, *before) if index not in left]


def shown_block(transcript: Transcript, shown: ActiveSnapshot | None) -> str:
    """Return the snapshot's whole text as it appears in the context; empty if none is shown."""
    if shown is None:
        return ""
    messages = len(replaced(transcript, shown.boundary, shown.since))
    return summary.block(shown.text, messages, shown.path, shown.earlier)


def originals(
    dialect: Dialect,
    transcript: Transcript,
    boundary: SummaryBoundary,
    since: SummaryBoundary | None = None,
) -> list[Section]:
    """Return everything that a boundary takes out of the context, in order and in its original
    words.

    With `since`, return only the entries that this earlier boundary had not taken out yet.
    """
    indexes = replaced(transcript, boundary, since)
    return [one for index in indexes for one in originals_of(dialect, transcript, index)]


def originals_of(dialect: Dialect, transcript: Transcript, index: int) -> list[Section]:
    """Return an entry in its original words. One that the policy's `results` name counts as a
    result, so that it is shortened before what the user said."""
    message = transcript.messages[index]
    sections = dialect.sections(transcript.raws[index], index, message, transcript.tools[index])
    if not message.carries:
        return sections
    return [replace(section, role=Role.TOOL) for section in sections]


# -- the texts that were moved out, by path --------------------------------------------------------


class Behind(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is known of a text behind a reference to a compacted history. `media` says what it is if
    it is the JSON of an image or a file."""

    label: Label
    media: str = ""


class _File(NamedTuple):
    """A text, which is made when it is read. `media` says what it is if it is the JSON of an image
    or a file."""

    read: Callable[[], str]
    label: Label
    media: str = ""


class Files(Mapping[str, str]):
    """Path → whole text. It holds this request's own texts; `recalled` makes those of earlier
    conversations.

    `index` finds them by other words than their paths. `takes` are the types of parts that this
    API's results can hold.
    """

    def __init__(
        self, files: Mapping[str, _File], store_dir: str, takes: Collection[str] = ()
    ) -> None:
        self._files = files
        self._store_dir = store_dir
        self._media_types = takes
        self.index = Index(files, {path: file.label for path, file in files.items()}, store_dir)

    def __getitem__(self, path: str) -> str:
        about = self._files[path].media
        return f"[{about}]" if about else self.read(path)

    def read(self, path: str) -> str:
        """Return a text; of an image or a file, its JSON."""
        return self._files[path].read()

    def media(self, path: str) -> Media | None:
        """Return the image or the file at this path; None if that is a text."""
        file = self._files.get(path)
        return attachments.media(file.read(), self._media_types) if file and file.media else None

    def recalled(self, texts: Mapping[str, str]) -> Files:
        """Return texts of earlier conversations, by their paths, as files of their own."""
        files: dict[str, _File] = {}
        for path, text in texts.items():
            media = attachments.media(text, self._media_types)
            files[path] = _File(partial(str, text), EARLIER, media.about if media else "")
        return Files(files, self._store_dir, self._media_types)

    def beside(self, kept: Mapping[str, tuple[str, bytes]]) -> Files:
        """Return these files with texts of earlier conversations, which come last and say so.
        `kept` has what each is, and its UTF-8, by its name."""
        files = dict(self._files)
        for name, (about, data) in kept.items():
            label = replace(EARLIER, about=f"{about}, {EARLIER.about}")
            files.setdefault(
                f"{self._store_dir}/{name}",
                _File(partial(data.decode, "utf-8", "surrogatepass"), label),
            )
        return Files(files, self._store_dir, self._media_types)

    def described(self) -> dict[str, Behind]:
        """Return what is known of each file, by its name, as JSON can hold it."""
        found: dict[str, Behind] = {}
        for path, (_, label, media) in self._files.items():
            stem, origin, about = map(encodable, (label.stem, label.origin, label.about))
            label = Label(stem, origin, about, tuple(map(encodable, label.call_strings)))
            found[path.rpartition("/")[2]] = Behind(label, encodable(media))
        return found

    def after(self, behind: Mapping[str, Behind], texts: Mapping[str, str]) -> Files:
        """Return these files after those behind references. `texts` gets their texts before they
        are read."""
        files: dict[str, _File] = {}
        for name, known in behind.items():
            files[f"{self._store_dir}/{name}"] = _File(
                partial(texts.__getitem__, name), known.label, known.media
            )
        return Files({**files, **self._files}, self._store_dir, self._media_types)

    def without(self, paths: Collection[str]) -> Files:
        """Return the files but for those at these paths."""
        files = {path: file for path, file in self._files.items() if path not in paths}
        return Files(files, self._store_dir, self._media_types)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def moved_files(
    dialect: Dialect,
    transcript: Transcript,
    plan: Plan,
    store_dir: str,
    shown: SummaryBoundary | None,
    chain: list[bytes],
) -> Files:
    """Return every file to which a model may have seen a reference.

    These are the moved results, including those that a snapshot has since replaced, and the
    originals of snapshots: each snapshot's file holds what it took out of the context since the one
    before, and no text is in two files. An image or a file has a file of its own wherever it was.
    """

    # an entry can have thousands of texts, which are mostly read in their order
    @lru_cache(maxsize=1)
    def texts(index: int) -> dict[int | None, str]:
        return dict(dialect.pieces(transcript.raws[index]))

    pieces: dict[str, tuple[int, Piece]] = {}
    said: dict[str, dict[str, None]] = {}
    moved: dict[int, dict[int | None, str]] = {}

    def add(index: int, piece: Piece) -> None:
        path = f"{store_dir}/{piece.name}"
        pieces[path] = index, piece
        # Equal results of several calls are one file, which each of these calls names.
        words = (*piece.label.call_strings, transcript.messages[index].answers)
        said.setdefault(path, {}).update(dict.fromkeys(words))
        moved.setdefault(index, {})[piece.part] = path

    def file(index: int, piece: Piece, words: Iterable[str]) -> _File:
        label = replace(piece.label, call_strings=tuple(words))
        return _File(lambda: texts(index)[piece.part], label, piece.media)

    for index, move in plan.moves.items():
        for piece in moved_pieces(transcript.messages[index], move.event == 0):
            add(index, piece)
    cuts = [
        (boundary, replaced(transcript, boundary, since))
        for since, boundary in pairwise((None, *plan.boundaries))
        if boundary and shown and boundary.end <= shown.end
    ]
    for index in (index for _, indexes in cuts for index in indexes):
        for piece in filter(attrgetter("media"), transcript.messages[index].pieces):
            add(index, piece)
    files = {path: file(*pieces[path], words) for path, words in said.items()}
    messages = transcript.messages
    elsewhere = {  # the calls whose results have a file of their own
        messages[index].answers
        for index in moved
        if index in plan.moves or all(piece.media for piece in messages[index].pieces)
    }
    for boundary, indexes in cuts:
        path = f"{store_dir}/{summary.file_name(chain[boundary.end])}"
        label = replace(
            ORIGINALS,
            call_strings=_said_by_calls([messages[index] for index in indexes], elsewhere),
        )
        files[path] = _File(partial(_joined, dialect, transcript, indexes, moved), label)
    return Files(files, store_dir, dialect.media_types)


def _said_by_calls(messages: Sequence[Message], elsewhere: Collection[str]) -> tuple[str, ...]:
    """Return what these messages' calls named, and the calls' ids, but for the calls whose results
    are `elsewhere`."""
    words: dict[str, None] = {}
    for message in messages:
        for (call, _), label in zip(message.calls, message.labels, strict=False):
            if call not in elsewhere:
                words.update(dict.fromkeys((*label.call_strings, call)))
    return tuple(words)


def _joined(
    dialect: Dialect,
    transcript: Transcript,
    indexes: Sequence[int],
    moved: Mapping[int, Mapping[int | None, str]],
) -> str:
    """Return these entries as one text. A text that has a file of its own leaves its path."""
    found: list[Section] = []
    for index in indexes:
        raw = transcript.raws[index]
        paths = moved.get(index, {})
        elsewhere = (
            {text: paths[part] for part, text in dialect.pieces(raw) if part in paths}
            if paths
            else {}
        )
        for section in dialect.sections(
            raw, index, transcript.messages[index], transcript.tools[index]
        ):
            path = elsewhere.get(section.part or section.text)
            where = (
                f"({section.text} is in {path})"
                if section.part
                else f"(the whole text is in {path})"
            )
            found.append(replace(section, text=where) if path else section)
    return summary.originals(found)
