"""One message as the plan sees it: a pure function of an entry's bytes and of the policy, without its texts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from operator import attrgetter

import msgspec
from msgspec import Raw

from proxy.plan.plan import Role
from proxy.plan.preview import PREVIEW_CHARS, Label, Shape, Spans
from proxy.plan.texts import Carries, ResultRule, is_tool
from proxy.policy import Offload

Count = Callable[[str], int]


def digest(raw: bytes | Raw) -> bytes:
    """Identifies an entry's bytes."""
    return hashlib.sha256(raw).digest()


class ToolCall(msgspec.Struct, frozen=True, gc=False):
    """A tool call of a model. `arguments` is the text as the model wrote it."""

    id: str
    name: str
    arguments: str


class Piece(msgspec.Struct, frozen=True, gc=False):
    """A text, an image or a file that can be moved. `part` is its place in the entry; None for the only text."""

    part: int | None
    digest: str  # of the text; see `preview.digest`
    tokens: int
    preview: int  # tokens of its replacement at an event; `tokens` where that would not be smaller
    first_preview: int  # the same for a text that the model has not seen yet
    label: Label  # what it is. A result has a general label until `Naming` has found its call.
    kept: int = 0
    """The first characters of it that stay in any case: they tell the client's model that a result follows."""
    name: str = ""  # the name of the file that it moves to; empty until `Naming` has given it one
    spans: Spans = ()  # where the user speaks in it; see `said`
    media: str = ""  # what it is, if it is the JSON of an image or a file: `image, image/png, 34 kB`

    def named(self, name: str, label: Label) -> Piece:
        """Return the piece with its name and label, and with the tokens that they add to its replacement."""
        return msgspec.structs.replace(
            self,
            name=name,
            label=label,
            preview=min(self.preview + label.tokens, self.tokens),
            first_preview=min(self.first_preview + label.tokens, self.tokens),
        )


MESSAGE_BYTES, PIECE_BYTES, CALL_BYTES = 390, 300, 180
"""Bytes that a message, each of its pieces, and each of its calls take, without the texts of names, ids and labels."""


class Message(msgspec.Struct, frozen=True):
    """Everything that the plan needs of one message, without its text."""

    digest: bytes  # of the bytes as they came
    role: Role
    meaning: bytes
    tokens: int
    pieces: tuple[Piece, ...]
    calls: tuple[tuple[str, str], ...]  # id and name of each tool call that it makes
    answers: str  # the id of the tool call whose result it is; empty for other messages
    sealed: bool = False
    """Whether anything in it is not known to be safe to move or to cut. Then it and its step stay as they are."""
    said: bool = False
    """Whether the user speaks in it, whoever sends it; see `said`. It stays, and a moved text leaves these words."""
    failed: bool = False  # whether it is a result that reports an error; see `texts.reports_error`
    carries: Carries = Carries.NO  # whether the policy's `results` name it, as far as that does not depend on its place
    labels: tuple[Label, ...] = ()  # what the results of its calls are called, in the order of the calls
    fixed: int = 0  # tokens of images and audio, which cannot cause an event

    @property
    def preview(self) -> int:
        """Its tokens after compaction at an event."""
        return self.tokens - sum([piece.tokens - piece.preview for piece in self.pieces])

    @property
    def first_preview(self) -> int:
        """Its tokens after compaction at first sight."""
        return self.tokens - sum([piece.tokens - piece.first_preview for piece in self.pieces])

    @property
    def key(self) -> bytes:
        """Identifies what replaces it, which depends on its bytes and on the names of its pieces."""
        named = "".join([f"\n{piece.name}\n{piece.label.origin}" for piece in self.pieces])
        return digest(self.digest + named.encode())

    def size(self) -> int:
        """About how many bytes it takes."""
        size = MESSAGE_BYTES + len(self.answers)
        if self.pieces:
            size += sum([PIECE_BYTES + len(piece.name) + len(piece.media) for piece in self.pieces])
        if self.calls:
            size += sum([CALL_BYTES + len(id) + len(name) for id, name in self.calls])
            size += sum(map(Label.size, self.labels))
        return size


def moved_pieces(message: Message, first_preview: bool) -> list[Piece]:
    """The pieces of a moved message that are worth moving."""
    left = attrgetter("first_preview" if first_preview else "preview")
    return [piece for piece in message.pieces if left(piece) < piece.tokens]


class Reading(msgspec.Struct, frozen=True):
    """What a `Message` depends on besides the bytes: the shape of replacements, the limit for unseen results, and the
    rules that name messages with results."""

    shape: Shape
    unseen_limit: int
    results: tuple[ResultRule, ...] = ()
    said: tuple[str, ...] = ()  # further texts with which the user's words begin

    @classmethod
    def of(cls, offload: Offload, window: int | None = None) -> Reading:
        shape = Shape(offload.store_dir, PREVIEW_CHARS)
        beginnings = tuple(named for named in offload.said if not is_tool(named))
        return cls(shape, offload.unseen_limit(window), offload.result_rules(), beginnings)
