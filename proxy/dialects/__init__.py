"""The APIs that the proxy knows. `base` says what a dialect is."""

from __future__ import annotations

from collections.abc import Collection

from proxy.dialects.base import Dialect, Entry
from proxy.dialects.chat import CHAT
from proxy.dialects.messages import MESSAGES
from proxy.dialects.responses import RESPONSES

__all__ = ["DIALECTS", "Dialect", "Entry", "for_body", "for_request", "owner_of"]

DIALECTS: tuple[Dialect, ...] = (CHAT, RESPONSES, MESSAGES, MESSAGES.counting)
"""Every dialect that the proxy knows. The first one that serves a request is used."""


def for_body(body: bytes) -> list[Dialect]:
    """Return the dialects of which a body without a path may be, the likeliest first."""
    return [MESSAGES, CHAT, RESPONSES] if any(map(body.__contains__, MESSAGES.signs)) else [CHAT, RESPONSES, MESSAGES]


def owner_of(path: bytes, names: Collection[bytes]) -> Dialect | None:
    """Return the dialect of a request that asks for no reply, as its path or a header's name tells; None if several
    APIs have its path."""
    return next((one for one in DIALECTS if one.own.search(path) or one.version_header in names), None)


def for_request(method: str, path: bytes) -> Dialect | None:
    """Return the dialect that serves this method and path, or None for requests that are only relayed."""
    return next((one for one in DIALECTS if method == "POST" and one.path.fullmatch(path)), None)
