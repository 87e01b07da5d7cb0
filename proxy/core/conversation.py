"""By what all requests of a conversation are known. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from proxy.core.history import BEGINNING, Message, extend
from proxy.core.plan import Role

LONGEST = 100
"""Messages among which the user's first one is looked for. It is the first or second one of nearly every history."""


def beginning(messages: Sequence[Message]) -> bytes:
    """Return the digest of what a history means up to the user's first message."""
    link, leads = BEGINNING, True
    for message in messages[:LONGEST]:
        leads = leads and message.role is Role.SYSTEM
        if not leads:
            link = extend(link, message.meaning)
            if message.role is Role.USER:
                break
    return link
