"""Clients that have their history summarised: by a prompt of their own, or by asking for upstream's
compaction. Pure.

Where we serve the latter, the client gets a *reference* in the place of upstream's encrypted
summary. It is the digest of the record with the snapshot, under which the caller's records have it:
it can be neither read, nor changed, nor guessed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import Enum, auto

import msgspec

from proxy.plan.turn import Request

_ASKING = re.compile(
    r"\b(?:summary of|summari[sz]e|compact)(?: (?:this|our|the|entire|whole|partial|recent|portion|of))+"
    r" (?:conversation|session)\b(?!')|\b(?:(?:anchored|continuation) summary|handoff document)\b"
    r"|checkpoint (?:for this session|compaction)|continuing our conversation above|generate the <state_snapshot>"
)
"""How clients ask for a summary, in lower case. `tests/plan/test_compacting.py` has their prompts
and where they are from."""

# characters of a text in which that is looked for. Prompts have it in their first 1,000.
READ_CHARS = 4_000
MOST = 16  # the most references of a request that are looked up. A history has one.
GONE = "The record of the conversation before this point is no longer kept. Ask the user for what you need to know."
UNREAD = "The record of the conversation before this point cannot be read at the moment. Tell the user so."
"""Stand for what a reference led to: it expired, or never was this caller's; or the store does not
answer."""
MARK = b"offload-proxy."
"""How references begin."""
_REFERENCE = re.compile(rf"{re.escape(MARK.decode())}([0-9a-f]{{64}})")


def asks_for_summary(texts: Iterable[str]) -> bool:
    """Whether the user's last message, which has these texts, asks for a summary of the
    conversation."""
    return any(_ASKING.search(" ".join(text[:READ_CHARS].lower().split())) for text in texts)


def hint(read: str) -> str:
    """Return what is added to such a request that is not sent whole. `read`: what our tool is
    called in it."""
    return (
        "\n\nWhat is shown only with a reference, such as (detailed result is stored in PATH), can be read with "
        f"{read}. Keep the paths that will matter in your summary: they may be readable after it, too."
    )


def limit(came: int, sent: int) -> int:
    """Return the limit to recommend to a client that compacts at `came` tokens of history, which
    are sent as `sent`: at this ratio, its history is sent as long as it wanted it. It is at most
    ten times as much, and a round number."""
    most = min(came * came // max(sent, 1), 10 * came)
    return round(most, 1 - len(str(most)))


class Compacting(Enum):
    """How a client asks for compaction."""

    MANAGED = auto()
    """Where upstream finds that the history is too long. As our plan keeps it short, leaving out
    the wish grants it."""
    WHOLE = auto()  # of the whole history, now and instead of a reply


class Wish(msgspec.Struct, frozen=True):
    """What a client asks for. `request` has the wish, and what the references stand for that it
    `came` with."""

    kind: Compacting
    request: Request
    request_as_sent: Request


def reference(digest: str) -> str:
    """Return the reference to the compaction with this digest."""
    return MARK.decode() + digest


def referred(text: str) -> str:
    """Return the digest in a reference of ours; empty for everything else."""
    found = _REFERENCE.fullmatch(text)
    return found[1] if found else ""
