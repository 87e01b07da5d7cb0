"""Raw headers: searching them, and choosing which of them pass to the next hop, in either
direction. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from itertools import chain
from urllib.parse import urlsplit

Header = tuple[bytes, bytes]

_CONTROL = bytes((*range(9), *range(10, 32), 127))
"""The characters that are forbidden in headers (RFC 9110, 5.5). Deleting them is three times as
fast as searching."""


class Headers(list[Header]):
    """Raw headers in order, with repeated ones repeated and names in any case. Search by lower-case
    name.

    It is a list because ASGI, aiohttp and uvicorn take and give lists: nothing is copied or indexed
    on the way. A message has some 20 headers and is searched a few times, so an index would cost
    more than it saves.
    """

    __slots__ = ()

    def get(self, name: bytes, default: bytes = b"") -> bytes:
        """Return the first value of this name, or `default`."""
        return next((value for each, value in self if each.lower() == name), default)

    def get_all(self, name: bytes) -> list[bytes]:
        return [value for each, value in self if each.lower() == name]

    def has(self, name: bytes) -> bool:
        return name in self.names()

    def names(self) -> list[bytes]:
        """Return the names in order, in lower case."""
        return [name.lower() for name, _ in self]

    def only(self, names: Collection[bytes]) -> Headers:
        return Headers([header for header in self if header[0].lower() in names])

    def without(self, names: Collection[bytes]) -> Headers:
        return Headers([header for header in self if header[0].lower() not in names])

    def has_control_characters(self) -> bool:
        """Whether a name or value has a character that is forbidden in headers (RFC 9110, 5.5)."""
        joined = b"".join(chain.from_iterable(self))
        return len(joined.translate(None, _CONTROL)) != len(joined)


DIGESTS = (b"content-digest", b"repr-digest", b"digest", b"content-md5")
"""Headers that are true of one body alone (RFC 9530; RFC 3230 and RFC 1864 before it)."""

# RFC 9110, 7.6.1, and its remark about Proxy-Connection. Proxy-Authenticate and Proxy-Authorization
# also concern only us and the next hop (11.7).
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
# `Expect` is not passed on: our own server answers it before it asks the client for the body.
_OURS_TO_SAY = _HOP_BY_HOP | {b"host", b"expect"}
_SAID = b"x-offload"
"""So begin the headers between a client and us."""
_CREDENTIALS = frozenset((b"authorization", b"api-key", b"x-api-key", b"cookie"))


def request_headers(headers: Iterable[Header], credential: Header | None = None) -> Headers:
    """Return the headers of a client's request that go upstream.

    `credential` is the tenant's; it replaces all of the client's own credentials. `Content-Length`
    is kept, which is right as long as the body is the client's. If you send another body, remove it
    with `Headers.without`.
    """
    headers = Headers(headers)
    dropped = _OURS_TO_SAY.union(
        _named(headers), [name for name in headers.names() if name.startswith(_SAID)]
    )
    if credential is not None:
        dropped |= _CREDENTIALS
    kept = headers.without(dropped)
    if credential is not None:
        kept.append(credential)
    return kept


def reply_headers(headers: Iterable[Header], ours: Iterable[Header] = ()) -> Headers:
    """Return the headers of upstream's reply that go to the client, then `ours`, which replace any
    of the same name. If we say what we did, nobody behind us says it of this reply, too.

    All names are in lower case, as in ASGI.
    """
    ours = list(ours)
    lowered = Headers([(name.lower(), value) for name, value in headers])
    dropped = _HOP_BY_HOP.union(_named(lowered), dict(ours))
    if any(name.startswith(_SAID) for name, _ in ours):
        dropped |= {name for name, _ in lowered if name.startswith(_SAID)}
    return Headers([*(header for header in lowered if header[0] not in dropped), *ours])


def _named(headers: Headers) -> list[bytes]:
    """Return the names that `Connection` declares to be for this hop only, in lower case."""
    return [
        name.strip().lower()
        for value in headers.get_all(b"connection")
        for name in value.split(b",")
    ]


_ANTHROPIC = re.compile(
    rb"(?:(?:/v1)+(?=[/?]|\Z)|(?=/messages(?:[/?]|\Z)|/projects/))(.*)", re.DOTALL
)
"""A target with `/v1`, or where it belongs."""


_OPENAI = re.compile(rb"/(?:chat/completions|responses|completions|embeddings|models)(?:[/?]|\Z)")


def url_for(base_url: str, target: bytes, *, anthropic: bool = False) -> str:
    """Return the upstream URL of a request for `target`, its raw path and query with the leading
    slash.

    A leading `/v1` is replaced by `base_url`; clients may leave it out of OpenAI's own paths. Any
    other path is appended to `base_url` without its own trailing `/v1`, and one of Azure's without
    its trailing `/openai` as well. A path of Anthropic's API has `/v1` exactly once in any case:
    its base URLs are given without it, and its clients append it even to one that has it.
    """
    base = base_url.rstrip("/")
    if anthropic and (found := _ANTHROPIC.fullmatch(target)):
        return base.removesuffix("/v1") + "/v1" + found[1].decode("ascii")
    path = target.decode("ascii")
    if path.startswith("/v1") and path[3:4] in ("", "/", "?"):
        return base + path[3:]
    if _OPENAI.match(target):
        return base + path
    base = base.removesuffix("/v1")
    return (base.removesuffix("/openai") if path.startswith("/openai/") else base) + path


_DEFAULT_PORTS = (None, 80, 443)


def location_for(base_url: str, said: bytes, *, anthropic: bool = False) -> bytes:
    """Return a reply's `Location` as the client can follow it through us; as upstream `said` it, if
    it leads elsewhere.

    Servers name themselves by the host that we send, and behind a load balancer with `http`. The
    client gets the path alone: which scheme and host lead to us, only the client knows.
    """
    text = said.decode("latin-1")
    base = urlsplit(base_url)
    try:
        given = urlsplit(text)
        ports = given.port, base.port
    except ValueError:
        return said
    same = given.hostname == base.hostname and (
        ports[0] == ports[1] or all(port in _DEFAULT_PORTS for port in ports)
    )
    if not said.isascii() or not (same if given.netloc else text.startswith("/")):
        return said
    rest = given._replace(scheme="", netloc="").geturl() or "/"
    own = base.path.rstrip("/")
    mounts = [(own.removesuffix("/v1"), "")]
    mounts.insert(len(mounts) if anthropic else 0, (own, "/v1"))
    paths = [at + rest.removeprefix(mount) for mount, at in mounts if rest.startswith(mount)]
    for path in (rest, *paths):
        if (
            url_for(base_url, path.encode(), anthropic=anthropic)
            == f"{base.scheme}://{base.netloc}{rest}"
        ):
            return path.encode()
    return said
