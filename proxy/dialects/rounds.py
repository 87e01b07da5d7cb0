"""What the turn's machine needs of a dialect: how it reads one reply of upstream, and makes one of all for the client.

A reply consists of events, and what the client gets of it consists of *parts*. Only the dialect knows what they are. A
whole reply is read as the events of a stream, so both share one code path.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol, TypeVar

from msgspec import Raw

from proxy.plan.history import ToolCall
from proxy.plan.turn import Broken

MAX_REPLY = 32 << 20
"""The most bytes that are held for one round: about eight million tokens."""
MAX_ARGUMENTS = 1 << 20
"""The most bytes of arguments for one call of our tools; a search pattern and a path need a few hundred."""

EventT = TypeVar("EventT", contravariant=True)
PartT = TypeVar("PartT")
ShownT = TypeVar("ShownT", contravariant=True)


def check_arguments(size: int) -> None:
    """Raises Broken if a call of our tools has so many bytes of arguments that it is endless."""
    if size > MAX_ARGUMENTS:
        raise Broken(f"more than {MAX_ARGUMENTS} bytes of arguments for a call")


class Call(Protocol):
    """A call in a reply."""

    @property
    def whole(self) -> bool:
        """Whether it is complete although the reply is not."""

    def call(self) -> ToolCall: ...

    def identify(self, id: str) -> None:
        """Give the call this id."""


class Round(Protocol[EventT, PartT]):
    """Reads one reply of upstream, and decides which parts the client may see."""

    failed: bool
    """Whether upstream reports an error."""

    @property
    def ours(self) -> Sequence[Call]:
        """The calls of our tools."""

    @property
    def theirs(self) -> Sequence[Call]:
        """The calls that the client answers."""

    @property
    def usage(self) -> Raw | None: ...

    @property
    def ended(self) -> bool:
        """Whether upstream has said how the reply ends."""

    @property
    def over(self) -> bool:
        """Whether upstream has said that nothing more comes."""

    @property
    def unfinished(self) -> bool:
        """Whether the reply stopped before the model was done, so that its last call may be incomplete."""

    @property
    def empty(self) -> bool:
        """Whether the model said nothing and called nothing but our tools."""

    @property
    def end(self) -> Sequence[PartT]:
        """The parts at the reply's end, if they are kept back."""

    @property
    def pieces(self) -> int:
        """How many calls, blocks or items it has so far: going through them takes so much time."""

    def read(self, event: EventT) -> list[PartT]:
        """Return the parts to show now, of this event and of earlier ones that were kept back. Raises Broken."""

    def settle(self) -> list[PartT]:
        """Decide about the remaining calls, now that the reply has ended. Returns the parts to show."""

    def release(self, *, visible: bool) -> list[PartT]:
        """Return the parts that were kept back, once it is known that the round is not hidden.

        In a mixed turn, text that was kept back is left out; it is shown only if the whole round is `visible`.
        """

    def say(self, text: str, seed: str) -> list[PartT]:
        """Return the parts with a text that is ours. It counts as the model's; `seed` is unique to the turn."""

    def written(self, answered: Collection[object]) -> list[bytes]:
        """Return the reply as entries for upstream. Of our tools' calls, it has only those that are `answered`."""


class ShownReply(Protocol[ShownT]):
    """The reply as the client sees it."""

    @property
    def streamed(self) -> bool:
        """Whether `show` returns events. Otherwise, `close` returns the whole reply."""

    @property
    def seen(self) -> bool:
        """Whether the client has seen anything but the reply's beginning."""

    def show(self, parts: Iterable[ShownT]) -> bytes:
        """Return the bytes for the client. Raises Broken if the reply grows too large."""

    def go_on(self) -> None:
        """Prepare for another round, which must look like a continuation."""

    def close(self, done: bytes) -> bytes:
        """Return the last bytes of the reply. `done` is the end that upstream sent."""
