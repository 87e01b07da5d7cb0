"""What the turns of every dialect have in common: their states, their errors, their usage and what they hide.

A turn is one request of a client: as many rounds with upstream as it takes, and one reply.
"""

from __future__ import annotations

from enum import Enum, auto

import msgspec


class State(Enum):
    """Where a turn is: about to send, reading a reply, waiting for the answers of our tools, or finished."""

    READY = auto()
    READING = auto()
    CALLING = auto()
    DONE = auto()


class WrongState(RuntimeError):
    """The driver called a method that the turn's state does not allow."""


class Broken(ValueError):
    """Upstream's reply cannot be continued: it stopped within one of our calls, or it is larger than any limit."""


class Usage(msgspec.Struct):
    """Tokens over all rounds, as upstream counted them."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0
    """Those of the prompt that upstream's cache held."""
    written: int = 0
    """Those of the prompt that upstream wrote to its cache."""
    largest: int = 0
    """The prompt of one round, the largest: upstream has shown that it takes so many."""
    hidden: int = 0
    """Those of the completion tokens that belong to rounds after which another one followed."""
    said: int = 0
    """Rounds of which upstream said what it counted."""


class Continuation(msgspec.Struct, frozen=True):
    """How later requests go on from a reply with hidden rounds, and find it again, if upstream keeps the history.

    The client knows the reply by the id `shown`, and upstream keeps it as several `rounds`, in order. The entries
    `after` belong between the last one and what the client adds. `reply` is the whole reply as the client saw it; empty
    if it has no end.
    """

    shown: str
    rounds: tuple[str, ...]
    after: tuple[bytes, ...]
    reply: bytes = b""


class HiddenRound(msgspec.Struct, frozen=True):
    """What a reply hid from the client, to be put back into the client's next request.

    `before` goes in front of the reply that the client saw, and `after` directly follows it. `instead` replaces the
    reply where the model wrote another one than the client saw; None: it is as the client saw it.
    """

    before: tuple[bytes, ...]
    instead: bytes | None
    after: tuple[bytes, ...]
    tokens: int = 0
    """About how many tokens putting it back adds. 0 as long as nobody counted."""
    sizes: tuple[int, ...] = ()
    """The tokens of each entry in `before` and `after`; empty where only their sum is known."""

    def sizes_of_each(self) -> list[int]:
        """Return `sizes`, or else estimates: the sum in proportion to the bytes."""
        lengths = [len(raw) for raw in (*self.before, *self.after)]
        if len(self.sizes) == len(lengths):
            return list(self.sizes)
        return [self.tokens * length // (sum(lengths) or 1) for length in lengths]
