"""The APIs that the proxy knows. `base` says what a dialect is."""

from __future__ import annotations

import re
from collections.abc import Collection
from urllib.parse import quote, unquote

from proxy.dialects.base import Dialect
from proxy.dialects.chat import CHAT
from proxy.dialects.entries import Entry
from proxy.dialects.messages import MESSAGES
from proxy.dialects.request import check_model
from proxy.dialects.responses import RESPONSES

__all__ = [
    "DIALECTS",
    "NAMED",
    "Dialect",
    "Entry",
    "for_body",
    "for_model",
    "for_request",
    "model_in",
    "owner_of",
]

_NAMED = re.compile(rb"(/deployments/|/publishers/anthropic/models/)([^/:?]+)")
"""Where a path of Azure's or Vertex's names the model."""

DIALECTS: tuple[Dialect, ...] = (CHAT, RESPONSES, MESSAGES, MESSAGES.counting)
"""Every dialect that the proxy knows. The first one that serves a request is used."""
NAMED = {dialect.name: dialect for dialect in reversed(DIALECTS)}
"""The dialect of each API."""


def for_body(body: bytes) -> list[Dialect]:
    """Return the dialects of which a body without a path may be, the likeliest first."""
    return (
        [MESSAGES, CHAT, RESPONSES]
        if any(map(body.__contains__, MESSAGES.signs))
        else [CHAT, RESPONSES, MESSAGES]
    )


def owner_of(path: bytes, names: Collection[bytes]) -> Dialect | None:
    """Return the dialect of a request that asks for no reply, as its path or a header's name tells;
    None if several APIs have its path."""
    return next(
        (one for one in DIALECTS if one.further_paths.search(path) or one.version_header in names),
        None,
    )


def for_request(method: str, path: bytes) -> Dialect | None:
    """Return the dialect that serves this method and path, or None for requests that are only
    relayed. A slash behind a path changes nothing."""
    plain = path.removesuffix(b"/")
    return next((one for one in DIALECTS if method == "POST" and one.path.fullmatch(plain)), None)


def model_in(path: bytes) -> str:
    """Return the model that a path names: Azure's deployment, or Vertex's model. Empty for other
    paths. Raises Unplannable if it is too long."""
    named = _NAMED.search(path)
    if not named:
        return ""
    check_model(named[2])
    return unquote(named[2].decode("latin-1"))


def for_model(target: bytes, model: str) -> bytes:
    """Return the path and query for another model, if they name one."""
    return _NAMED.sub(lambda named: named[1] + quote(model, safe="@").encode(), target, count=1)
