"""The files of one request: the texts that were moved out of it, by path. They are decoded when they are opened."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from operator import attrgetter

from msgspec.structs import replace

from proxy.dialects import Dialect, attachments, render
from proxy.plan import summary
from proxy.plan.history import Transcript
from proxy.plan.message import Piece, moved_pieces
from proxy.plan.plan import Plan, SummaryBoundary
from proxy.plan.preview import EARLIER, ORIGINALS, Label
from proxy.plan.summary import Section
from proxy.tools.answer import Media
from proxy.tools.find import Index


class Files(Mapping[str, str]):
    """Path → whole text. It holds this request's own texts; `recalled` makes one of an earlier conversation.

    `labels` say what the files are, and `index` finds them by other words than their paths.
    """

    def __init__(
        self,
        loaders: Mapping[str, Callable[[], str]],
        labels: Mapping[str, Label],
        store_dir: str,
        media: Mapping[str, str] = {},
        takes: Collection[str] = (),
    ) -> None:
        """`media`: what the images and files among them are, by path. `takes`: the types of parts that this API's
        results can hold."""
        self._loaders = loaders
        self._labels = labels
        self._media = media
        self._takes = takes
        self.index = Index(loaders, labels, store_dir)

    def __getitem__(self, path: str) -> str:
        about = self._media.get(path)
        return f"[{about}]" if about else self.read(path)

    def read(self, path: str) -> str:
        """Return a text; of an image or a file, its JSON."""
        return self._loaders[path]()

    def media(self, path: str) -> Media | None:
        """Return the image or the file at this path; None if that is a text."""
        return attachments.media(self.read(path), self._takes) if path in self._media else None

    def recalled(self, path: str, text: str, store_dir: str) -> Files:
        """Return one text of an earlier conversation as files of its own."""
        media = attachments.media(text, self._takes)
        media_at = {path: media.about} if media else {}
        return Files({path: lambda: text}, {path: EARLIER}, store_dir, media=media_at, takes=self._takes)

    def beside(self, kept: Mapping[str, tuple[str, bytes]], store_dir: str) -> Files:
        """Return these files with texts of earlier conversations, which come last and say so. `kept` has what each is,
        and its UTF-8, by its name."""
        others = {f"{store_dir}/{name}": one for name, one in kept.items()}
        others = {path: one for path, one in others.items() if path not in self}
        loaders = {path: partial(data.decode, "utf-8", "surrogatepass") for path, (_, data) in others.items()}
        labels = {path: replace(EARLIER, about=f"{about}, {EARLIER.about}") for path, (about, _) in others.items()}
        return Files({**self._loaders, **loaders}, {**self._labels, **labels}, store_dir)

    def __iter__(self) -> Iterator[str]:
        return iter(self._loaders)

    def __len__(self) -> int:
        return len(self._loaders)


def moved_files(
    dialect: Dialect,
    transcript: Transcript,
    plan: Plan,
    store_dir: str,
    shown: SummaryBoundary | None,
    chain: list[bytes],
) -> Files:
    """Return every file to which a model may have seen a reference.

    These are the moved results, including those that a snapshot has since replaced, and the originals of snapshots:
    each snapshot's file holds what it took out of the context since the one before, and no text is in two files. An
    image or a file has a file of its own wherever it was.
    """

    @lru_cache(maxsize=1)  # an entry can have thousands of texts, which are mostly read in their order
    def texts(index: int) -> dict[int | None, str]:
        return dict(dialect.texts(transcript.raws[index]))

    loaders: dict[str, Callable[[], str]] = {}
    labels: dict[str, Label] = {}
    said: dict[str, dict[str, None]] = {}
    media: dict[str, str] = {}
    moved: dict[int, dict[int | None, str]] = {}

    def add(index: int, piece: Piece) -> None:
        path = f"{store_dir}/{piece.name}"
        loaders[path] = lambda: texts(index)[piece.part]
        labels[path] = piece.label
        # Equal results of several calls are one file, which each of these calls names.
        said.setdefault(path, {}).update(dict.fromkeys((*piece.label.said, transcript.messages[index].answers)))
        moved.setdefault(index, {})[piece.part] = path
        if piece.media:
            media[path] = piece.media

    for index, move in plan.moves.items():
        for piece in moved_pieces(transcript.messages[index], move.event == 0):
            add(index, piece)
    cuts = [
        (boundary, render.taken_since(transcript, boundary, since))
        for since, boundary in pairwise((None, *plan.boundaries))
        if boundary and shown and boundary.end <= shown.end
    ]
    for index in (index for _, indexes in cuts for index in indexes):
        for piece in filter(attrgetter("media"), transcript.messages[index].pieces):
            add(index, piece)
    labels.update((path, replace(labels[path], said=tuple(words))) for path, words in said.items())
    elsewhere = {
        message.answers
        for index, message in ((index, transcript.messages[index]) for index in moved)
        if index in plan.moves or all(piece.media for piece in message.pieces)
    }
    for boundary, indexes in cuts:
        path = f"{store_dir}/{summary.file_name(chain[boundary.end])}"
        loaders[path] = _originals_loader(dialect, transcript, indexes, moved)
        labels[path] = replace(ORIGINALS, said=_said(transcript, indexes, elsewhere))
    return Files(loaders, labels, store_dir, media, dialect.takes)


def _said(transcript: Transcript, indexes: Sequence[int], elsewhere: Collection[str]) -> tuple[str, ...]:
    """Return the words for the results of these entries' calls, without the calls whose results are `elsewhere`."""
    said = {
        word: None
        for index in indexes
        for (call, _), label in zip(transcript.messages[index].calls, transcript.messages[index].labels, strict=False)
        if call not in elsewhere
        for word in (*label.said, call)
    }
    return tuple(said)


def _originals_loader(
    dialect: Dialect, transcript: Transcript, indexes: Sequence[int], moved: Mapping[int, Mapping[int | None, str]]
) -> Callable[[], str]:
    """Return a function that returns these entries as one text. A text that has a file of its own leaves its path."""

    def sections(index: int) -> Iterator[Section]:
        raw, paths = transcript.raws[index], moved.get(index, {})
        elsewhere = {text: paths[part] for part, text in dialect.texts(raw) if part in paths} if paths else {}
        for section in dialect.sections(raw, index, transcript.messages[index], transcript.tools[index]):
            path = elsewhere.get(section.part or section.text)
            where = f"({section.text} is in {path})" if section.part else f"(the whole text is in {path})"
            yield replace(section, text=where) if path else section

    return lambda: summary.originals(section for index in indexes for section in sections(index))
