"""By what all requests of a conversation are known. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from proxy.core.history import BEGINNING, Message, extend
from proxy.core.opening import START

LONGEST = 100
"""Messages among which the user's first one is looked for. It is the first or second one of nearly every history."""


def beginning(messages: Sequence[Message]) -> bytes:
    """Return the digest of what a history means up to the user's first message."""
    link, opening = BEGINNING, START
    for message in messages[:LONGEST]:
        if opening.asked:
            break
        if not opening.leads(message.role):
            link = extend(link, message.meaning)
        opening = opening.then(message.role)
    return link
