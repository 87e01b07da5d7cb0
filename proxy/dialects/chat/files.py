"""The files of one request: what was moved out of it, by path, decoded when somebody opens it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping

from proxy.core import summary
from proxy.core.history import Transcript, moved_pieces
from proxy.core.plan import Plan, SummaryBoundary
from proxy.dialects.chat import render
from proxy.dialects.chat.messages import texts

KEPT = 64 << 20
"""Bytes of texts that are kept decoded while a round's calls are answered: as many as a body may have by default."""


class Files(Mapping[str, str]):
    """Path → whole text. There is nothing in here but this request's own messages, so nothing else can be reached.

    What was opened is kept, up to `KEPT` bytes or one larger text, until `forget`: many calls read the same few files.
    """

    def __init__(self, loaders: Mapping[str, Callable[[], str]]) -> None:
        self._loaders = loaders
        self._opened: dict[str, str] = {}
        self._size = 0

    def __getitem__(self, path: str) -> str:
        text = self._opened.get(path)
        if text is None:
            text = self._loaders[path]()
            if self._size + sys.getsizeof(text) > KEPT:
                self.forget()
            self._opened[path] = text
            self._size += sys.getsizeof(text)
        return text

    def forget(self) -> None:
        """Give back the memory of what was opened."""
        self._opened.clear()
        self._size = 0

    def __iter__(self) -> Iterator[str]:
        return iter(self._loaders)

    def __len__(self) -> int:
        return len(self._loaders)


def moved_files(
    transcript: Transcript, plan: Plan, store_dir: str, shown: SummaryBoundary | None, chain: list[bytes]
) -> Files:
    """What a model can have seen a reference to: moved results, compressed since or not, and snapshots' originals."""
    loaders: dict[str, Callable[[], str]] = {}
    for index, move in plan.moves.items():
        for piece in moved_pieces(transcript.messages[index], move.event == 0):
            loaders[f"{store_dir}/{piece.name}"] = piece_loader(transcript, index, piece.part)
    for boundary in plan.boundaries:
        if shown and boundary.end <= shown.end:
            loaders[f"{store_dir}/{summary.file_name(chain[boundary.end])}"] = _originals_loader(transcript, boundary)
    return Files(loaders)


def piece_loader(transcript: Transcript, index: int, part: int | None) -> Callable[[], str]:
    """The text of a message, or of one of its parts, when it is asked for."""
    return lambda: dict(texts(transcript.raws[index]))[part]


def _originals_loader(transcript: Transcript, boundary: SummaryBoundary) -> Callable[[], str]:
    return lambda: summary.originals(render.originals(transcript, boundary))
