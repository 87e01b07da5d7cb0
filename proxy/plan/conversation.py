"""By what all requests of a conversation are known. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from proxy.plan.history import BEGINNING, Message, extend
from proxy.plan.plan import Role

LONGEST = 100
"""Messages among which the user's first one is looked for. It is the first or second one of nearly every history."""


def opening(messages: Sequence[Message]) -> tuple[bytes, ...]:
    """Return what each message means up to the user's first one, without the leading system messages."""
    found: list[bytes] = []
    for message in messages[:LONGEST]:
        if found or message.role is not Role.SYSTEM:
            found.append(message.meaning)
            if message.role is Role.USER:
                break
    return tuple(found)


def beginning(messages: Sequence[Message]) -> bytes:
    """Return the digest of what a history means up to the user's first message."""
    return reduce(extend, opening(messages), BEGINNING)
