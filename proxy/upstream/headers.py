"""Which headers go on, in either direction, and to which address: pure functions over raw headers.

Raw headers are a list of (name, value) in order, repeated ones repeated, names in any case.
"""

from __future__ import annotations

from collections.abc import Iterable

Header = tuple[bytes, bytes]
Headers = list[Header]

# RFC 9110, 7.6.1, and what it says of Proxy-Connection. Proxy-Authenticate and -Authorization are between us and
# whoever stands next as well (11.7).
_HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
# `Expect` is answered by the server that the client talks to, before it asks for the body.
_OURS_TO_SAY = _HOP_BY_HOP | {b"host", b"expect"}
_CREDENTIALS = frozenset((b"authorization", b"api-key", b"x-api-key", b"cookie"))


def request_headers(headers: Iterable[Header], credential: Header | None = None) -> Headers:
    """What of a client's headers goes upstream; with `credential`, the tenant's, in place of all the client's own.

    `Content-Length` stays: it is right as long as the body is the client's. Where it is not, see `without`.
    """
    headers = list(headers)
    dropped = _OURS_TO_SAY | _named_in_connection(headers)
    if credential is not None:
        dropped |= _CREDENTIALS
    kept = [
        (name, value)
        for name, value in headers
        if (lower := name.lower()) not in dropped and not lower.startswith(b"x-offload")
    ]
    return kept if credential is None else [*kept, credential]


def reply_headers(headers: Iterable[Header], ours: Iterable[Header] = ()) -> Headers:
    """What of upstream's headers goes to the client, and then `ours`, which displace upstream's of the same name."""
    headers, ours = list(headers), list(ours)
    dropped = _HOP_BY_HOP | _named_in_connection(headers)
    return without(headers, dropped | {name.lower() for name, _ in ours}) + ours


def without(headers: Iterable[Header], names: Iterable[bytes]) -> Headers:
    """The headers without those of these lower-case names."""
    names = frozenset(names)
    return [(name, value) for name, value in headers if name.lower() not in names]


def _named_in_connection(headers: Headers) -> frozenset[bytes]:
    """The headers that `Connection` declares to be for this hop only, in lower case."""
    values = [value for name, value in headers if name.lower() == b"connection"]
    return frozenset(option.strip().lower() for value in values for option in value.split(b","))


def url_for(base_url: str, target: bytes) -> str:
    """Where a request for `target` (raw path and query, beginning with a slash) goes upstream.

    A leading `/v1` is replaced by `base_url`; anything else is appended to `base_url` without its own trailing `/v1`.
    """
    base = base_url.rstrip("/")
    path = target.decode("ascii")
    if path.startswith("/v1") and path[3:4] in ("", "/", "?"):
        return base + path[3:]
    return base.removesuffix("/v1") + path
