"""The APIs that the proxy knows. `base` says what a dialect is."""

from __future__ import annotations

from collections.abc import Collection

from proxy.dialects.base import Dialect, Entry
from proxy.dialects.chat import CHAT
from proxy.dialects.messages import MESSAGES
from proxy.dialects.responses import RESPONSES
from proxy.plan.turn import Unplannable
from proxy.rawjson import NotJson

__all__ = ["DIALECTS", "Dialect", "Entry", "for_body", "for_request", "owner_of"]

DIALECTS: tuple[Dialect, ...] = (CHAT, RESPONSES, MESSAGES, MESSAGES.counting)
"""Every dialect that the proxy knows. The first one that serves a request is used."""


def for_body(body: bytes) -> list[Dialect]:
    """Return the dialects of which a body without a path may be, the likeliest first."""
    own: list[Dialect] = [dialect for dialect in DIALECTS if not dialect.counts]
    try:
        messages = MESSAGES.recognises(MESSAGES.parse(body))
    except (Unplannable, NotJson):
        messages = False
    return [MESSAGES, *own] if messages else own


def owner_of(path: bytes, names: Collection[bytes]) -> Dialect | None:
    """Return the dialect of a request that asks for no reply, or None if several APIs have its path."""
    return next((dialect for dialect in DIALECTS if dialect.owns(path, names)), None)


def for_request(method: str, path: bytes) -> Dialect | None:
    """Return the dialect that serves this method and path, or None for requests that are only relayed."""
    return next((dialect for dialect in DIALECTS if dialect.serves(method, path)), None)
